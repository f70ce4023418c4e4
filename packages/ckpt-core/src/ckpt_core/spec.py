"""What a checkpoint holds, as values: tensors, their chunks, and where the bytes lie.

Frozen and without I/O, so that a plan made of them can be printed, compared and sent
between processes. Shapes, offsets and sizes are in elements; file offsets and lengths in
bytes. A dtype is a safetensors dtype string, never a `torch.dtype`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeGuard

from ckpt_core.errors import ConfigError

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    # Not safetensors dtypes; named so that they can be reported and refused.
    "C32": 32,
    "C128": 128,
}
"""Bits of one element, by dtype string."""

MAX_DIMS = 64
"""Of a tensor: what numpy and the safetensors readers here can hold."""
_SIZE_LIMIT = 2**63


def find_shape_fault(shape: Sequence[int]) -> str | None:
    """Say why no tensor has this shape; None if one may.

    Args:
        shape: Non-negative sizes in elements.
    """
    if len(shape) > MAX_DIMS:
        return f"{len(shape):,} dimensions, more than the {MAX_DIMS} that can be read"
    # A size of 0 leaves the others as large as they are, and strides are made of those.
    if math.prod(max(1, size) for size in shape) >= _SIZE_LIMIT:
        return "more elements than 64 bits can count"
    return None


Encoding = Literal["raw", "torch_save"]
Nesting = tuple[str | int, ...]
"""Path of an entry in the nested state dict that it was saved from."""

_LARGEST = 1 << 62  # beyond any file; a larger number is damage


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value read from a file can be a size, an offset or a length; a bool cannot."""
    return type(value) is int and 0 <= value < _LARGEST


@dataclass(frozen=True, slots=True)
class StoredRange:
    """The bytes of a file that hold a chunk or an object."""

    file: str
    """File name relative to the checkpoint directory (or of the checkpoint file)."""
    offset: int
    length: int
    encoding: Encoding
    """`raw`: row-major elements. `torch_save`: a whole archive as `torch.save` writes it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor as stored: `sizes` elements from `offsets` on, one per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: StoredRange

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor by its fully qualified name, with its global shape and every chunk."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...] = field(repr=False)

    def __post_init__(self) -> None:
        """Refuse a dtype whose size is unknown."""
        if self.dtype not in DTYPE_BITS:
            msg = f"{self.fqn}: dtype {self.dtype!r} is unknown; known are {sorted(DTYPE_BITS)}"
            raise ConfigError(msg)

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, row-major."""
        return (self.numel * DTYPE_BITS[self.dtype] + 7) // 8


@dataclass(frozen=True, slots=True)
class ObjectSpec:
    """An entry that is no tensor: a pickled Python object inside a checkpoint."""

    fqn: str
    stored: StoredRange


@dataclass(frozen=True, slots=True)
class TensorData:
    """Where the elements of one chunk lie in a file, found by reading the chunk's header.

    Element `(i, j, ...)` of the chunk lies at `offset + itemsize * (i * strides[0] + ...)`.
    """

    file: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        if 0 in self.sizes:
            return True
        expected = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True
