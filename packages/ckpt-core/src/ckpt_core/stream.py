"""The elements of a tensor in row-major order, whatever the chunks are, in bounded memory.

A tensor is cut into boxes that are contiguous in row-major order and no larger than a block.
Each box is filled from the chunks that meet it:

- a run of bytes that is contiguous both in the file and in the box is read straight into it;
- anything else (columns of a chunk, a chunk stored transposed) goes through numpy, in pieces
  whose extent in the file is bounded too.

How a tensor is cut depends on its shape, its dtype and the block size only, so that the
blocks of two checkpoints can be compared one by one. Nothing here imports torch but
`read_tensor`, which returns one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ckpt_core.coverage import Box, check_tiling
from ckpt_core.dtypes import TORCH_OF_DTYPE
from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError, KeyMismatchError
from ckpt_core.reader import CheckpointReader
from ckpt_core.spec import DTYPE_BITS, Chunk, TensorSpec

if TYPE_CHECKING:
    import torch

DEFAULT_BLOCK_BYTES = 8 << 20
"""Large enough that a read costs more than the call, small enough for many threads."""

_MAX_OPEN = 16  # of each stream; several streams run in a process that may open 1,024 or fewer
_SMALL_READ = 64 << 10  # reading this much takes about as long as two separate reads
_MAX_WASTE = 8  # bytes read for one byte wanted, before separate reads are cheaper


def stream_tensor(
    reader: CheckpointReader, spec: TensorSpec, *, block_bytes: int = DEFAULT_BLOCK_BYTES
) -> Iterator[bytes | bytearray]:
    """Yield the bytes of a tensor in row-major order.

    Args:
        reader: Where the tensor is stored.
        spec: Which tensor: one of `reader.tensors`, or a part of one cut at its chunks.
        block_bytes: Largest block; about twice as much is used.

    Raises:
        CorruptCheckpointError: Chunks do not tile the tensor, or a file is damaged.
        CheckpointNotFoundError: A file is missing.
    """
    problems = check_tiling(spec.fqn, spec.shape, [(c.offsets, c.sizes) for c in spec.chunks])
    if problems:
        raise CorruptCheckpointError(f"{reader.path}: {spec.fqn!r} cannot be read", problems=problems)
    with _OpenFiles(reader.directory) as files:
        source = _Source(reader, spec, block_bytes, files)
        for box in _cut_boxes(source.shape, max(1, block_bytes // source.itemsize)):
            yield source.read_box(box)


def tensors_equal(reader: CheckpointReader, first: str, second: str, *, block_bytes: int = DEFAULT_BLOCK_BYTES) -> bool:
    """Tell whether two tensors of a checkpoint have the same dtype, shape and bytes.

    Raises:
        KeyMismatchError: There is no tensor of that name.
        CorruptCheckpointError, CheckpointNotFoundError: As for `stream_tensor`.
    """
    a, b = find_tensor(reader, first), find_tensor(reader, second)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    blocks = (stream_tensor(reader, spec, block_bytes=block_bytes) for spec in (a, b))
    return all(x == y for x, y in zip(*blocks, strict=True))


def read_tensor(reader: CheckpointReader, fqn: str) -> torch.Tensor:
    """Read a whole tensor.

    Raises:
        KeyMismatchError: There is no tensor of that name.
        CorruptCheckpointError, CheckpointNotFoundError: As for `stream_tensor`.
    """
    import torch  # noqa: PLC0415  takes seconds; everything else here does without

    spec = find_tensor(reader, fqn)
    data = torch.empty(spec.nbytes, dtype=torch.uint8)
    start = 0
    for block in stream_tensor(reader, spec):
        data[start : start + len(block)] = torch.frombuffer(bytearray(block), dtype=torch.uint8)
        start += len(block)
    shape = (*spec.shape[:-1], spec.shape[-1] // 2) if spec.dtype == "F4" else spec.shape
    return data.view(getattr(torch, TORCH_OF_DTYPE[spec.dtype])).reshape(shape)


def find_tensor(reader: CheckpointReader, fqn: str) -> TensorSpec:
    """Look a tensor up by its stored name.

    Raises:
        KeyMismatchError: There is none of that name.
    """
    spec = reader.tensors.get(fqn)
    if spec is None:
        raise KeyMismatchError(f"{reader.path}: expected a tensor {fqn!r}, found {len(reader.tensors)} others")
    return spec


@dataclass(frozen=True, slots=True)
class _Piece:
    """A chunk and where its elements lie: element `(i, ...)` at `offset + itemsize * sum(i * stride)`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    file: str


class _OpenFiles:
    """The files read last, open; a tensor may lie in more files than a process may open."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.descriptors: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Read at most `length` bytes; fewer only at the end of the file."""
        descriptor = self._open(name)
        data = os.pread(descriptor, length, offset)
        while len(data) < length and (more := os.pread(descriptor, length - len(data), offset + len(data))):
            data += more
        return data

    def _open(self, name: str) -> int:
        descriptor = self.descriptors.pop(name, None)
        if descriptor is None:
            descriptor = _open_file(self.root / name)
        self.descriptors[name] = descriptor  # the last one read stands last
        if len(self.descriptors) > _MAX_OPEN:
            os.close(self.descriptors.pop(next(iter(self.descriptors))))
        return descriptor


class _Source:
    """The chunks of one tensor, counted in units of `itemsize` bytes."""

    def __init__(self, reader: CheckpointReader, spec: TensorSpec, block_bytes: int, files: _OpenFiles) -> None:
        self.reader = reader
        self.spec = spec
        self.block_bytes = block_bytes
        self.files = files
        self.itemsize = DTYPE_BITS[spec.dtype] // 8 or 1
        self.flat = spec.dtype == "F4" and not _is_halvable(spec)
        if self.flat and len(spec.chunks) > 1:
            raise CorruptCheckpointError(
                f"{reader.path}: expected chunks of {spec.fqn!r} to begin and end at whole bytes, found halves of F4"
            )
        self.shape = (spec.nbytes,) if self.flat else self._halve(spec.shape)

    def _halve(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Count two F4 elements as one unit."""
        return (*sizes[:-1], sizes[-1] // 2) if self.spec.dtype == "F4" else sizes

    @cached_property
    def pieces(self) -> list[_Piece]:
        return [self._locate(chunk) for chunk in self.spec.chunks]

    def _locate(self, chunk: Chunk) -> _Piece:
        data = self.reader.locate(self.spec, chunk)
        offsets, sizes, strides = self._halve(chunk.offsets), self._halve(chunk.sizes), data.strides
        if self.flat:
            offsets, sizes, strides = (0,), self.shape, (1,)
        elif self.spec.dtype == "F4":
            strides = (*(stride // 2 for stride in strides[:-1]), 1)
        return _Piece(offsets, sizes, strides, data.offset, data.file)

    def read_box(self, box: Box) -> bytes | bytearray:
        """Return the bytes of a box, row by row."""
        length = math.prod(box[1]) * self.itemsize
        parts = [(piece, common) for piece in self.pieces if (common := _intersect(box, piece))]
        if len(parts) == 1 and (at := _find_run(box, parts[0][0])) is not None:
            return self._read(parts[0][0], at, length)
        buffer = bytearray(length)
        for piece, common in parts:
            self._copy(piece, common, box, buffer)
        return buffer

    def _copy(self, piece: _Piece, common: Box, box: Box, buffer: bytearray) -> None:
        """Copy the elements that a chunk and a box have in common."""
        at = _find_run(common, piece)
        start = _find_run_in_box(common, box)
        if at is not None and start is not None:
            data = self._read(piece, at, math.prod(common[1]) * self.itemsize)
            buffer[start * self.itemsize : start * self.itemsize + len(data)] = data
        else:
            self._scatter(piece, common, box, buffer)

    def _scatter(self, piece: _Piece, common: Box, box: Box, buffer: bytearray) -> None:
        """Copy elements that are strided in the file or in the box, in pieces of bounded extent."""
        import numpy as np  # noqa: PLC0415  only chunks that are no runs need it

        unit = np.dtype(f"u{self.itemsize}" if self.itemsize <= 8 else "c16")  # noqa: PLR2004  numpy's widest integer
        target = np.frombuffer(buffer, unit).reshape(box[1])
        for offsets, sizes in self._split(piece, common):
            extent = _find_extent(sizes, piece.strides)
            data = self._read(piece, _find_first(offsets, piece), extent * self.itemsize)
            strides = tuple(stride * self.itemsize for stride in piece.strides)
            part = np.lib.stride_tricks.as_strided(np.frombuffer(data, unit), sizes, strides, writeable=False)
            target[tuple(slice(o - b, o - b + s) for o, s, b in zip(offsets, sizes, box[0], strict=True))] = part

    def _split(self, piece: _Piece, box: Box) -> Iterator[Box]:
        """Halve a box along its widest stride until reading its extent is bounded and worth it."""
        _, sizes = box
        extent, wanted = _find_extent(sizes, piece.strides) * self.itemsize, math.prod(sizes) * self.itemsize
        worth_it = extent <= max(_SMALL_READ, wanted * _MAX_WASTE)
        if wanted == self.itemsize or (worth_it and extent <= max(self.block_bytes, _SMALL_READ)):
            yield box
            return
        dim = max(range(len(sizes)), key=lambda d: (sizes[d] - 1) * piece.strides[d])
        for half in _halve_box(box, dim):
            yield from self._split(piece, half)

    def _read(self, piece: _Piece, element: int, length: int) -> bytes:
        offset = piece.offset + element * self.itemsize
        data = self.files.read(piece.file, offset, length)
        if len(data) < length:
            raise CorruptCheckpointError(
                f"{self.reader.path}: expected {length} bytes at offset {offset} of {piece.file} for"
                f" {self.spec.fqn!r}, found {len(data)}; the file is cut short"
            )
        return data


def _open_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError as err:
        raise CheckpointNotFoundError(f"{path}: expected a file of the checkpoint, found none") from err
    except OSError as err:
        raise CorruptCheckpointError(f"{path}: cannot be read: {err.strerror}") from err


def _is_halvable(spec: TensorSpec) -> bool:
    """Whether every chunk of an F4 tensor consists of whole bytes along the last dimension."""
    ends = [spec.shape, *(chunk.offsets for chunk in spec.chunks), *(chunk.sizes for chunk in spec.chunks)]
    return bool(spec.shape) and all(sizes[-1] % 2 == 0 for sizes in ends)


def _cut_boxes(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Cut a shape into boxes of at most `limit` elements, each contiguous and in row-major order."""
    if 0 in shape:
        return
    # The first dimension from which on everything fits; a box takes a range of the one before it.
    whole = next(d for d in range(len(shape) + 1) if math.prod(shape[d:]) <= limit)
    if whole == 0:
        yield (0,) * len(shape), shape
        return
    step = limit // math.prod(shape[whole:])
    for outer in _iter_indices(shape[: whole - 1]):
        for start in range(0, shape[whole - 1], step):
            size = min(step, shape[whole - 1] - start)
            rest = shape[whole:]
            yield (*outer, start, *(0 for _ in rest)), (*(1 for _ in outer), size, *rest)


def _iter_indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Count through the indices of a shape, the last dimension fastest."""
    for number in range(math.prod(shape)):
        index = []
        for size in reversed(shape):
            number, digit = divmod(number, size)  # noqa: PLW2901  the digits are taken off one by one
            index.append(digit)
        yield tuple(reversed(index))


def _intersect(box: Box, piece: _Piece) -> Box | None:
    starts, sizes = [], []
    for o, s, po, ps in zip(*box, piece.offsets, piece.sizes, strict=True):
        start, end = max(o, po), min(o + s, po + ps)
        if start >= end:
            return None
        starts.append(start)
        sizes.append(end - start)
    return tuple(starts), tuple(sizes)


def _find_first(offsets: tuple[int, ...], piece: _Piece) -> int:
    """Return the place of an element of the tensor in the chunk, in elements."""
    return sum((o - po) * stride for o, po, stride in zip(offsets, piece.offsets, piece.strides, strict=True))


def _find_run(box: Box, piece: _Piece) -> int | None:
    """Return where a box begins in the chunk if it is one run in row-major order there."""
    expected = 1
    for size, stride in zip(reversed(box[1]), reversed(piece.strides), strict=True):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return _find_first(box[0], piece)


def _find_run_in_box(inner: Box, box: Box) -> int | None:
    """Return where a box begins in a larger one if it is one run in row-major order there."""
    strides = [1] * len(box[1])
    for dim in range(len(strides) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * box[1][dim]
    expected = 1
    for size, stride in zip(reversed(inner[1]), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return sum((i - o) * stride for i, o, stride in zip(inner[0], box[0], strides, strict=True))


def _find_extent(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how many elements lie between the first and the last of a box, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _halve_box(box: Box, dim: int) -> Iterator[Box]:
    offsets, sizes = box
    half = sizes[dim] // 2
    yield offsets, (*sizes[:dim], half, *sizes[dim + 1 :])
    second = (*offsets[:dim], offsets[dim] + half, *offsets[dim + 1 :])
    yield second, (*sizes[:dim], sizes[dim] - half, *sizes[dim + 1 :])
