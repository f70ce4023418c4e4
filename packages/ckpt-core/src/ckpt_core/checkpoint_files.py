"""Files of a checkpoint: which there are, which names are safe, how large they are, exact reads.

Only regular files are opened: a FIFO would block the reader for ever, and a device may act
when it is opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError

DESCRIPTION_LIMIT = 256 * 2**20
"""Bytes of a JSON file beside the weights: records and indexes of the largest models take a tenth of it."""

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


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
        CorruptCheckpointError: The file cannot be read, is no regular file, or ends earlier.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise _refuse_kind(path)
        # Without O_NONBLOCK, a FIFO that came there since would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _read_fully(descriptor, path, offset, length)
        finally:
            os.close(descriptor)
    except FileNotFoundError as err:
        msg = f"{path}: expected a file of the checkpoint, found none; copy the checkpoint again"
        raise CheckpointNotFoundError(msg) from err
    except OSError as err:
        msg = f"{path}: cannot be read: {err.strerror}"
        raise CorruptCheckpointError(msg) from err


def read_whole(path: Path, limit: int = DESCRIPTION_LIMIT) -> bytes:
    """Read a file that describes a checkpoint, all of it.

    Args:
        path: The file.
        limit: Bytes that it may have; more are no description but damage, and would fill the memory.

    Raises:
        CheckpointNotFoundError: No such file.
        CorruptCheckpointError: It is no regular file, cannot be read, or is larger than `limit`.
    """
    size = find_size(path)
    if size is None and describe_entry(path) == "none":
        raise CheckpointNotFoundError(f"{path}: expected a file of the checkpoint, found none")
    if size is None:
        raise _refuse_kind(path)
    if size > limit:
        raise CorruptCheckpointError(
            f"{path}: expected at most {limit:,} bytes, found {size:,}; it is not what a writer leaves there"
        )
    return read_range(path, 0, size)


def describe_entry(path: Path) -> str:
    """Say what is at `path`, for a message about a file that is missing there: "none", "a directory"."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "a link that leads nowhere" if path.is_symlink() else "none"
    except OSError as err:
        return f"what cannot be looked at ({err.strerror})"
    return next((name for test, name in _KINDS if test(mode)), "a file")


def _refuse_kind(path: Path) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path}: expected a regular file, found {describe_entry(path)}")


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
