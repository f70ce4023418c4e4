"""Bytes from file to file, at given offsets, without bringing them into the process if possible."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from ckpt_core.errors import CorruptCheckpointError

STEP = 16 * 2**20
"""Bytes between two reports of progress, which is also where a stop takes effect."""
_BLOCK = 4 * 2**20
"""Buffer of the fallback: large enough that system calls do not count, small beside the ceiling."""
_NO_RANGE_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM})
"""Answers of file systems, kernels and sandboxes that do not copy ranges between these two files."""


def copy_bytes(
    source: int, source_offset: int, target: int, target_offset: int, length: int, advance: Callable[[int], None]
) -> None:
    """Copy `length` bytes between two open files.

    Args:
        source: Descriptor to read, at byte `source_offset`.
        source_offset: In bytes.
        target: Descriptor to write, at byte `target_offset`.
        target_offset: In bytes.
        length: In bytes.
        advance: Called with the bytes copied since the last call; may raise to stop.

    Raises:
        CorruptCheckpointError: The source ends early.
    """
    done = 0
    while done < length:
        wanted = min(STEP, length - done)
        copied = _copy_once(source, source_offset + done, target, target_offset + done, wanted)
        if copied == 0:
            raise CorruptCheckpointError(
                f"expected {length - done} more bytes at {source_offset + done}, found the end"
            )
        done += copied
        advance(copied)


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


def _copy_once(source: int, source_offset: int, target: int, target_offset: int, length: int) -> int:
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(source, target, length, source_offset, target_offset)
        except OSError as error:
            if error.errno not in _NO_RANGE_COPY:
                raise
    return _copy_through_buffer(source, source_offset, target, target_offset, length)


def _copy_through_buffer(source: int, source_offset: int, target: int, target_offset: int, length: int) -> int:
    buffer = memoryview(bytearray(min(_BLOCK, length)))
    done = 0
    while done < length:
        block = buffer[: min(len(buffer), length - done)]
        count = read_bytes(source, source_offset + done, block)
        write_bytes(target, target_offset + done, block[:count])
        done += count
        if count < len(block):
            break
    return done
