"""Bring the bytes of tensors into output files.

A chunk whose box is one contiguous run of its tensor goes from file to file, by itself and
in any order. A tensor that is cut otherwise is assembled in bounded blocks and written front
to back, because one write per row of each chunk is slow everywhere and impossible on some
stores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_core.errors import CorruptCheckpointError
from ckpt_core.reader import CheckpointReader
from ckpt_core.spec import DTYPE_BITS, Chunk, TensorSpec
from ckpt_core.stream import stream_tensor

from ckpt_convert.byte_copy import Position, copy_bytes, write_bytes
from ckpt_convert.output_files import PlannedFile, PlannedTensor
from ckpt_convert.parallel import Workers


@dataclass(frozen=True, slots=True)
class ByteCopy:
    """A contiguous part of an output file, and the source's elements that fill it."""

    file: str
    """Name of the output file."""
    offset: int
    """Of the first byte in the output file."""
    spec: TensorSpec
    """The elements as a tensor of their own, in row-major order."""


def write_files(
    files: tuple[PlannedFile, ...],
    reader: CheckpointReader,
    directory: Path,
    workers: Workers,
) -> None:
    """Write every file of a plan into `directory`.

    Args:
        files: What to write.
        reader: The source that the plan was made from.
        directory: Where to write; holds none of the files yet.
        workers: Who copies; told about every byte.
    """
    for file in files:
        with open_file(directory / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
            write_bytes(descriptor, 0, file.header)
            os.ftruncate(descriptor, file.size)

    def copy(job: ByteCopy) -> None:
        with open_file(directory / job.file, os.O_WRONLY) as target:
            _copy_elements(reader, job, Position(target, job.offset), workers)

    jobs = (job for file in files for tensor in file.tensors for job in split_copies(file, tensor))
    workers.run(jobs, copy)


def split_copies(file: PlannedFile, tensor: PlannedTensor) -> Iterator[ByteCopy]:
    """Cut a tensor into copies: one for each chunk if every chunk is a run, else one for all."""
    spec = tensor.spec
    runs = [(find_run(spec, chunk), chunk) for chunk in spec.chunks if chunk.numel]
    if any(start is None for start, _ in runs):
        yield ByteCopy(file.name, tensor.offset, spec)
        return
    for start, chunk in runs:
        whole = replace(chunk, offsets=(0,) * len(chunk.sizes))
        yield ByteCopy(file.name, tensor.offset + (start or 0), replace(spec, shape=chunk.sizes, chunks=(whole,)))


def find_run(spec: TensorSpec, chunk: Chunk) -> int | None:
    """Byte offset of `chunk` in the row-major tensor if its elements are contiguous there, else None."""
    rank = len(spec.shape)
    cut = next((dim for dim in range(rank) if chunk.sizes[dim] != 1), rank)
    if any(chunk.sizes[dim] != spec.shape[dim] for dim in range(cut + 1, rank)):
        return None
    first = 0
    for offset, size in zip(chunk.offsets, spec.shape, strict=True):
        first = first * size + offset
    first_bit, bits = first * DTYPE_BITS[spec.dtype], chunk.numel * DTYPE_BITS[spec.dtype]
    return None if first_bit % 8 or bits % 8 else first_bit // 8


@contextmanager
def open_file(path: Path, flags: int) -> Iterator[int]:
    """Open a descriptor for the length of a `with` block; new files get their mode from the umask."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _copy_elements(reader: CheckpointReader, job: ByteCopy, target: Position, workers: Workers) -> None:
    if len(job.spec.chunks) == 1:
        data = reader.locate(job.spec, job.spec.chunks[0])
        if data.is_contiguous:
            _copy_run(reader.directory / data.file, data.offset, target, job.spec, workers)
            return
    for block in stream_tensor(reader, job.spec, block_bytes=workers.block_bytes):
        write_bytes(target.descriptor, target.offset, block)
        target = target.skip(len(block))
        workers.meter.advance(len(block))


def _copy_run(path: Path, offset: int, target: Position, spec: TensorSpec, workers: Workers) -> None:
    with open_file(path, os.O_RDONLY) as source:
        copied = copy_bytes(Position(source, offset), target, spec.nbytes, workers.meter.advance)
    if copied < spec.nbytes:
        raise CorruptCheckpointError(
            f"{path}: expected {spec.nbytes:,} bytes of {spec.fqn!r} at offset {offset:,}, found {copied:,}; "
            "the file was cut short"
        )
