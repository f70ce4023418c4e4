"""Where do two streams of row-major bytes differ, in elements?

Bytes decide, not numbers: two NaNs with different payloads differ, and so do 0.0 and -0.0.
Nothing is kept of the blocks but the first difference and a count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

import numpy as np
from ckpt_core.spec import DTYPE_BITS

Block: TypeAlias = bytes | bytearray
Mask: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]"

_NUMPY_DTYPES: dict[str, str] = {
    "BOOL": "u1",
    "U8": "u1",
    "I8": "i1",
    "I16": "<i2",
    "U16": "<u2",
    "F16": "<f2",
    "I32": "<i4",
    "U32": "<u4",
    "F32": "<f4",
    "C64": "<c8",
    "F64": "<f8",
    "I64": "<i8",
    "U64": "<u8",
    "C128": "<c16",
}
"""Dtypes whose elements numpy can print; of the others only the bits are shown."""


class StreamLengthError(ValueError):
    """A tensor's bytes ended too early or too late."""


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """How two tensors of one shape and dtype differ."""

    count: int
    """Number of elements that differ."""
    first: int
    """Row-major position of the first one, in elements."""
    a: bytes
    """The bytes of that element in A, and in B (of F4, the byte that holds it)."""
    b: bytes


def find_value_diff(a: Iterable[Block], b: Iterable[Block], *, dtype: str, numel: int) -> ValueDiff | None:
    """Compare the elements of two tensors; None if every bit is equal.

    Args:
        a: Row-major bytes of one tensor, in blocks of whole elements.
        b: Those of the other one, in blocks of the same lengths.
        dtype: Safetensors dtype string of both.
        numel: Number of elements of both.

    Raises:
        StreamLengthError: The blocks do not pair up, or hold fewer or more bytes than `numel`
            elements take.
    """
    bits = DTYPE_BITS[dtype]
    count, done, first = 0, 0, None
    for left, right in _pair_blocks(a, b):
        # Bytes of two byte strings are compared far faster than elements; most blocks are equal.
        if left != right:
            mask = _mark_differing(left, right, bits)[: numel - done * 8 // bits]
            count += int(mask.sum())
            if first is None and mask.any():
                first = _describe_first(left, right, int(mask.argmax()), done, bits)
        done += len(left)
    if done != (numel * bits + 7) // 8:
        raise StreamLengthError(f"{done} bytes were read for {numel} elements of {dtype}")
    return None if first is None else ValueDiff(count, *first)


def render_element(dtype: str, raw: bytes) -> str:
    """Show one element as its bits, and as a number where it has one."""
    bits = f"0x{int.from_bytes(raw, 'little'):0{2 * len(raw)}x}"
    if dtype == "BF16":
        # bfloat16 is the upper half of a float32.
        dtype, raw = "F32", b"\0\0" + raw
    if dtype not in _NUMPY_DTYPES:
        return bits
    return f"{np.frombuffer(raw, _NUMPY_DTYPES[dtype])[0]} ({bits})"


def _pair_blocks(a: Iterable[Block], b: Iterable[Block]) -> Iterator[tuple[Block, Block]]:
    for left, right in zip_longest(a, b, fillvalue=b""):
        if len(left) != len(right):
            raise StreamLengthError(f"a block of {len(left)} bytes stands beside one of {len(right)}")
        yield left, right


def _mark_differing(a: Block, b: Block, bits: int) -> Mask:
    if bits == 4:  # noqa: PLR2004  two elements per byte, the first in the low half
        changed = np.frombuffer(a, np.uint8) ^ np.frombuffer(b, np.uint8)
        return np.not_equal(np.stack([changed & 0x0F, changed >> 4], axis=-1).ravel(), 0)
    width = min(bits, 64)
    left, right = (np.frombuffer(block, f"<u{width // 8}").reshape(-1, bits // width) for block in (a, b))
    mask: Mask = np.any(np.not_equal(left, right), axis=1)
    return mask


def _describe_first(a: Block, b: Block, index: int, done: int, bits: int) -> tuple[int, bytes, bytes]:
    size = max(1, bits // 8)
    at = index * bits // 8
    return done * 8 // bits + index, bytes(a[at : at + size]), bytes(b[at : at + size])
