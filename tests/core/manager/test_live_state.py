from __future__ import annotations

import pytest
import torch
from ckpt_core.key_check import Entry
from ckpt_core.live_state import LiveState, LiveTensor, check_plan, describe_state, merge_states
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def test_tensors_and_objects_are_described_by_flat_names() -> None:
    state = describe_state({"a": torch.ones(2, 3, dtype=torch.bfloat16), "n": {"x": torch.tensor(1), "lr": 0.5}})
    assert state.tensors["a"] == LiveTensor(Entry("BF16", (2, 3)), frozenset({((0, 0), (2, 3))}))
    assert state.tensors["n.x"] == LiveTensor(Entry("I64", ()), frozenset({((), ())}))
    assert state.objects == {"n.lr"}
    assert state.named.names == {"a", "n.x", "n.lr"}
    assert check_plan(state) == []


def _part(*boxes: tuple[tuple[int, ...], tuple[int, ...]], dtype: str = "F32") -> LiveState:
    return LiveState({"w": LiveTensor(Entry(dtype, (4, 2)), frozenset(boxes))}, frozenset())


TOP, BOTTOM = ((0, 0), (2, 2)), ((2, 0), (2, 2))


def test_parts_of_all_ranks_tile_a_tensor_and_copies_count_once() -> None:
    merged = merge_states([_part(TOP), _part(BOTTOM), _part(TOP), LiveState({}, frozenset({"o"}))])
    assert check_plan(merged) == []
    assert merged.named.names == {"w", "o"}


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ([_part(TOP)], "hole"),
        ([_part(TOP), _part(((1, 0), (3, 2)))], "overlap"),
        ([_part(((3, 0), (2, 2)))], "out_of_bounds"),
    ],
)
def test_a_plan_that_does_not_tile_is_found(parts: list[LiveState], kind: str) -> None:
    assert [problem.kind for problem in check_plan(merge_states(parts))] == [kind]


def test_ranks_that_disagree_about_a_tensor_are_found() -> None:
    other = _part(TOP, BOTTOM, dtype="F16")
    problems = check_plan(merge_states([_part(TOP, BOTTOM), other]))
    assert [(p.kind, p.where) for p in problems] == [("shape", "w")]
    assert "F32" in problems[0].message
    assert "F16" in problems[0].message


def test_a_dtensor_that_holds_other_rows_than_its_placements_say_is_found(mesh: DeviceMesh) -> None:
    honest = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)], shape=torch.Size((3, 2)), stride=(2, 1))
    assert check_plan(describe_state({"w": honest})) == []
    uneven = DTensor.from_local(torch.ones(5, 2), mesh, [Shard(0)], shape=torch.Size((3, 2)), stride=(2, 1))
    problems = check_plan(describe_state({"w": uneven}))
    assert [(p.kind, p.where) for p in problems] == [("shape", "w")]
    assert "(5, 2)" in problems[0].message


def test_a_rank_that_holds_no_element_is_no_problem() -> None:
    merged = merge_states([_part(TOP, BOTTOM), _part(((4, 0), (0, 2)))])
    assert check_plan(merged) == []
