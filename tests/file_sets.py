"""Small sets of files with distinct contents, as an old and a new checkpoint to publish."""

from __future__ import annotations

from pathlib import Path

OLD = {"a.bin": b"old a", "gone.bin": b"only in the old set", "sub/b.bin": b"old b"}
NEW = {"a.bin": b"new a, longer", "fresh.bin": b"only in the new set", "sub/b.bin": b"new b", "sub/deep/c.bin": b"c"}


def write_set(directory: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def read_set(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def list_names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}
