"""Do the chunks of a tensor tile its shape exactly once?

A hole would be read as whatever the memory held before; of two overlapping chunks an
unknown one would win. Both are refused before a byte is read or written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from ckpt_core.errors import Problem

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""`(offsets, sizes)` in elements, one entry per dimension."""
_LISTED = 20


def check_tiling(fqn: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> list[Problem]:
    """List every way in which `boxes` fail to tile `shape`; empty boxes cover nothing.

    Args:
        fqn: Name used in the problems.
        shape: Global shape in elements; `()` is one element, covered by the box `((), ())`.
        boxes: `(offsets, sizes)` of each chunk.

    Returns:
        Problems of kind `out_of_bounds`, `overlap` (the first pairs) and `hole`; empty when
        the tiling is exact.
    """
    problems = [
        Problem("out_of_bounds", fqn, f"chunk at {o} of sizes {s} does not fit in shape {shape}")
        for o, s in boxes
        if not _fits(o, s, shape)
    ]
    if problems:
        return problems
    filled = [(o, s) for o, s in boxes if math.prod(s)]
    problems = [
        Problem("overlap", fqn, f"chunk at {a[0]} of sizes {a[1]} overlaps the one at {b[0]} of sizes {b[1]}")
        for a, b in islice(_overlaps(filled), _LISTED + 1)
    ]
    if len(problems) > _LISTED:
        # All pairs of many equal chunks are too many to find, and no help to anybody.
        problems[_LISTED:] = [Problem("overlap", fqn, f"more than {_LISTED} pairs of chunks overlap")]
    if problems:
        return problems
    covered = sum(math.prod(s) for _, s in filled)
    if covered != math.prod(shape):
        problems.append(Problem("hole", fqn, f"chunks cover {covered} of {math.prod(shape)} elements of shape {shape}"))
    return problems


def _fits(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if not len(offsets) == len(sizes) == len(shape):
        return False
    return all(o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True))


def _overlaps(boxes: list[Box]) -> Iterator[tuple[Box, Box]]:
    """Sweep along the dimension that separates the boxes best; yield overlapping pairs."""
    if len(boxes) < 2:  # noqa: PLR2004  two boxes are needed to overlap
        return
    rank = len(boxes[0][0])
    if rank == 0:
        yield boxes[0], boxes[1]
        return
    axis = max(range(rank), key=lambda d: len({o[d] for o, _ in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: b[0][axis]):
        start = box[0][axis]
        active = [a for a in active if a[0][axis] + a[1][axis] > start]
        yield from ((a, box) for a in active if _intersect(a, box))
        active.append(box)


def _intersect(a: Box, b: Box) -> bool:
    return all(ao < bo + bs and bo < ao + asz for ao, asz, bo, bs in zip(*a, *b, strict=True))
