"""Files of a checkpoint: which there are, which names are safe, how large they are, exact reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError


def find_name_fault(name: object) -> str | None:
    """Say why `name` must not be used as a file name inside a checkpoint; None if it may.

    The check is on the text alone, for names that come out of indexes, metadata and records.
    Symbolic links that are directory entries are followed, as caches are made of them.
    """
    if not isinstance(name, str):
        return f"a {type(name).__name__} instead of a string"
    if name in {"", ".", ".."}:
        return "no file name"
    if any(char in name for char in ("/", "\\", "\0")):
        return "a path or a zero byte, not a plain file name"
    return "a drive, not a plain file name" if name[1:2] == ":" else None


def iter_files(directory: Path) -> Iterator[Path]:
    """Yield everything below `directory` that is no directory, sorted in each directory.

    A link is one entry, wherever it points; nothing behind it is listed.

    Raises:
        OSError: A directory cannot be listed.
    """
    for parent, directories, names in os.walk(directory, onerror=raise_walk_error):
        directories.sort()
        links = [name for name in directories if os.path.islink(os.path.join(parent, name))]  # noqa: PTH114, PTH118  cheap
        yield from (Path(parent, name) for name in sorted([*names, *links]))


def raise_walk_error(error: OSError) -> NoReturn:
    """Stop `os.walk`, which would pass over a directory that it cannot read."""
    raise error


def read_range(path: Path, offset: int, length: int) -> bytes:
    """Read exactly `length` bytes from `offset` on.

    Raises:
        CheckpointNotFoundError: No such file.
        CorruptCheckpointError: The file cannot be read, or ends earlier.
    """
    try:
        with path.open("rb", buffering=0) as file:
            return _read_fully(file.fileno(), path, offset, length)
    except FileNotFoundError as err:
        msg = f"{path}: expected a file of the checkpoint, found none; copy the checkpoint again"
        raise CheckpointNotFoundError(msg) from err
    except OSError as err:
        msg = f"{path}: cannot be read: {err.strerror}"
        raise CorruptCheckpointError(msg) from err


def _read_fully(descriptor: int, path: Path, offset: int, length: int) -> bytes:
    size = os.fstat(descriptor).st_size
    if offset < 0 or length < 0 or offset + length > size:
        msg = f"{path}: expected {length} bytes at offset {offset}, found a file of {size} bytes; it is cut short"
        raise CorruptCheckpointError(msg)
    parts = []
    while length:
        part = os.pread(descriptor, min(length, 1 << 30), offset)
        if not part:
            msg = f"{path}: shrank while it was read"
            raise CorruptCheckpointError(msg)
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return b"".join(parts)


def find_size(path: Path) -> int | None:
    """Return the size of the file in bytes, links followed; None if there is no such file."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None
