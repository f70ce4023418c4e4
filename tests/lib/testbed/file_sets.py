"""Small sets of files with distinct contents, as an old and a new checkpoint to publish, and processes that do it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_core.staging import stage_directory

OLD = {"a.bin": b"old a", "gone.bin": b"only in the old set", "sub/b.bin": b"old b"}
NEW = {"a.bin": b"new a, longer", "fresh.bin": b"only in the new set", "sub/b.bin": b"new b", "sub/deep/c.bin": b"c"}

_NOBODY = 65534


def write_set(directory: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def read_set(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def list_names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def publish_set(target: Path, files: dict[str, bytes], *, replace: bool = False) -> None:
    with stage_directory(target, replace=replace) as stage:
        write_set(stage.path, files)
        stage.publish()


@contextmanager
def give_up_root() -> Iterator[Path]:
    """Yield an empty directory of a user to whom permissions apply, as whom the block runs."""
    directory = Path(tempfile.mkdtemp())  # pytest's own directories are closed to other users
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(directory, _NOBODY, _NOBODY)
        os.setegid(_NOBODY)
        os.seteuid(_NOBODY)
    try:
        yield directory
    finally:
        if is_root:
            os.seteuid(0)
            os.setegid(0)
        subprocess.run(["chmod", "-R", "u+rwx", str(directory)], check=True)  # noqa: S603, S607  a literal command
        shutil.rmtree(directory)


def start_python(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: S603  our own interpreter and script
