"""Bytes from file to file, at given offsets, without bringing them into the process if possible."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import NamedTuple

STEP = 16 * 2**20
"""Bytes between two reports of progress, which is also where a stop takes effect."""
_BLOCK = 4 * 2**20
"""Buffer of the fallback: large enough that system calls do not count, small beside the ceiling."""
_NO_RANGE_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM})
"""Answers of file systems, kernels and sandboxes that do not copy ranges between these two files."""


class Position(NamedTuple):
    """A place in an open file."""

    descriptor: int
    offset: int
    """In bytes."""

    def skip(self, nbytes: int) -> Position:
        """Return the place `nbytes` further on."""
        return Position(self.descriptor, self.offset + nbytes)


def copy_bytes(source: Position, target: Position, length: int, advance: Callable[[int], None]) -> int:
    """Copy `length` bytes from one place to another.

    Args:
        source: Where to read.
        target: Where to write.
        length: In bytes.
        advance: Called with the bytes copied since the last call; may raise to stop.

    Returns:
        Bytes copied: fewer than `length` if the source ends early.
    """
    done = 0
    while done < length:
        copied = _copy_once(source.skip(done), target.skip(done), min(STEP, length - done))
        if copied == 0:
            break
        done += copied
        advance(copied)
    return done


def write_bytes(target: int, offset: int, block: bytes | bytearray | memoryview) -> None:
    """Write all of `block` at `offset`, however many system calls that takes."""
    rest = memoryview(block).cast("B")
    while rest:
        written = os.pwrite(target, rest, offset)
        offset += written
        rest = rest[written:]


def read_bytes(source: int, offset: int, buffer: memoryview) -> int:
    """Fill `buffer` from `offset` on; return how many bytes there were before the end."""
    filled = 0
    while filled < len(buffer):
        count = os.preadv(source, [buffer[filled:]], offset + filled)
        if count == 0:
            break
        filled += count
    return filled


def _copy_once(source: Position, target: Position, length: int) -> int:
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(
                source.descriptor, target.descriptor, length, offset_src=source.offset, offset_dst=target.offset
            )
        except OSError as error:
            if error.errno not in _NO_RANGE_COPY:
                raise
    return _copy_through_buffer(source, target, length)


def _copy_through_buffer(source: Position, target: Position, length: int) -> int:
    buffer = memoryview(bytearray(min(_BLOCK, length)))
    done = 0
    while done < length:
        block = buffer[: min(len(buffer), length - done)]
        count = read_bytes(source.descriptor, source.offset + done, block)
        write_bytes(target.descriptor, target.offset + done, block[:count])
        done += count
        if count < len(block):
            break
    return done
