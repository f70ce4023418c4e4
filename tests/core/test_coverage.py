from __future__ import annotations

import itertools

import pytest
from ckpt_core.coverage import Box, check_tiling
from hypothesis import given
from hypothesis import strategies as st


def _count(shape: tuple[int, ...], boxes: list[Box]) -> dict[tuple[int, ...], int]:
    """How many boxes hold each element: the definition, element by element."""
    counts = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    for offsets, sizes in boxes:
        for index in itertools.product(*(range(o, o + s) for o, s in zip(offsets, sizes, strict=True))):
            counts[index] += 1
    return counts


@st.composite
def _shapes_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=0, max_size=3)))
    boxes: list[Box] = []
    for _ in range(draw(st.integers(0, 5))):
        offsets = tuple(draw(st.integers(0, n)) for n in shape)
        boxes.append((offsets, tuple(draw(st.integers(0, n - o)) for o, n in zip(offsets, shape, strict=True))))
    return shape, boxes


@st.composite
def _grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Shapes cut at every dimension, pieces in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    ranges = [list(itertools.pairwise(points)) for points in cuts]
    boxes = [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in itertools.product(*ranges)]
    return shape, draw(st.permutations(boxes))


@given(_shapes_and_boxes())
def test_boxes_tile_a_shape_when_every_element_is_in_exactly_one(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    counts = _count(shape, boxes)
    kinds = {problem.kind for problem in check_tiling("t", shape, boxes)}
    if all(count == 1 for count in counts.values()):
        assert not kinds
    elif any(count > 1 for count in counts.values()):
        assert kinds == {"overlap"}
    else:
        assert kinds == {"hole"}


@given(_grids(), st.data())
def test_a_grid_tiles_and_does_not_without_or_with_twice_one_piece(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = case
    assert check_tiling("t", shape, boxes) == []
    lost = data.draw(st.integers(0, len(boxes) - 1))
    assert [p.kind for p in check_tiling("t", shape, boxes[:lost] + boxes[lost + 1 :])] == ["hole"]
    assert [p.kind for p in check_tiling("t", shape, [*boxes, boxes[lost]])] == ["overlap"]


@pytest.mark.parametrize(
    ("shape", "box"),
    [((2,), ((1,), (2,))), ((2,), ((-1,), (1,))), ((2,), ((0,), (-1,))), ((2, 2), ((0,), (2,))), ((), ((0,), (1,)))],
)
def test_a_box_outside_its_shape_is_out_of_bounds(shape: tuple[int, ...], box: Box) -> None:
    assert [problem.kind for problem in check_tiling("t", shape, [box])] == ["out_of_bounds"]
    assert str(shape) in str(check_tiling("t", shape, [box])[0])


def test_a_scalar_is_one_element() -> None:
    assert check_tiling("t", (), [((), ())]) == []
    assert [problem.kind for problem in check_tiling("t", (), [])] == ["hole"]
    assert [problem.kind for problem in check_tiling("t", (), [((), ()), ((), ())])] == ["overlap"]


def test_many_chunks_are_checked_in_less_than_quadratic_steps() -> None:
    boxes = [((i, 0), (1, 7)) for i in range(50_000)]
    assert check_tiling("t", (50_000, 7), boxes) == []


@pytest.mark.parametrize("count", [21, 100_000])
def test_of_many_overlapping_chunks_the_first_pairs_are_listed(count: int) -> None:
    problems = check_tiling("w", (4,), [((0,), (4,))] * count)
    assert {problem.kind for problem in problems} == {"overlap"}
    assert len(problems) == 21
    assert problems[-1].message == "more than 20 pairs of chunks overlap"
