from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_convert import convert
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, LayoutError
from ckpt_core.layout import CheckpointLayout
from ckpt_verify import Comparison, TiedPair, ValueProblem, compare_checkpoints
from ckpt_verify.report import render_comparison
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from testbed.sharded import cut_columns, cut_rows, save_dcp, save_sharded_safetensors

State = dict[str, torch.Tensor]


def save_consolidated(path: Path, state: Mapping[str, torch.Tensor]) -> Path:
    path.mkdir(parents=True)
    save_file({fqn: tensor.contiguous() for fqn, tensor in state.items()}, path / "model.safetensors")
    return path


def save_column_dcp(path: Path, state: Mapping[str, Any]) -> Path:
    return save_dcp(path, state, ranks=3, cut=cut_columns(3))


def save_grid_dcp(path: Path, state: Mapping[str, Any]) -> Path:
    def cut_grid(_fqn: str, tensor: torch.Tensor) -> tuple[int, ...]:
        return (2, 2)[: tensor.dim()]

    return save_dcp(path, state, ranks=4, cut=cut_grid)


def save_sharded(path: Path, state: Mapping[str, Any]) -> Path:
    return save_sharded_safetensors(path, state, ranks=2, cut=cut_rows(2))


WRITERS: dict[str, Callable[[Path, Mapping[str, Any]], Path]] = {
    "consolidated": save_consolidated,
    "dcp by rows": save_dcp,
    "dcp by columns": save_column_dcp,
    "dcp in a grid": save_grid_dcp,
    "safetensors by rows": save_sharded,
}


def make_state() -> State:
    """Distinct values throughout, odd shapes, every width of element."""
    return {
        "model.embed_tokens.weight": torch.arange(77, dtype=torch.float32).reshape(11, 7),
        "model.layers.0.weight": (torch.arange(35) + 100).to(torch.bfloat16).reshape(7, 5),
        "model.layers.0.bias": torch.arange(200, 213, dtype=torch.float64),
        "model.scale": torch.tensor(3.25),
        "model.steps": torch.arange(9, dtype=torch.int64).reshape(3, 3),
        "model.mask": torch.tensor([True, False, True]),
        "model.bytes": torch.arange(240, 250, dtype=torch.uint8),
        "model.fp8": torch.arange(24, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(4, 6),
        "model.cube": torch.arange(60, dtype=torch.int16).reshape(3, 4, 5),
        "model.empty": torch.empty(0, 3),
    }


def flip_bit(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    """Return a copy with one bit flipped, counted in row-major order."""
    raw = bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    raw[bit // 8] ^= 1 << bit % 8
    return torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)


def compare_states(tmp_path: Path, a: Mapping[str, Any], b: Mapping[str, torch.Tensor]) -> Comparison:
    return compare_checkpoints(save_dcp(tmp_path / "a", a), save_consolidated(tmp_path / "b", b))


def list_kinds(comparison: Comparison) -> list[tuple[str, str]]:
    return [(problem.kind, problem.where) for problem in comparison.differences]


# --- equality --------------------------------------------------------------------------------


@pytest.mark.parametrize("b", WRITERS)
@pytest.mark.parametrize("a", WRITERS)
def test_one_state_is_equal_in_every_layout(tmp_path: Path, a: str, b: str) -> None:
    state = make_state()
    comparison = compare_checkpoints(WRITERS[a](tmp_path / "a", state), WRITERS[b](tmp_path / "b", state))
    assert comparison.differences == ()
    assert comparison.is_equal
    assert comparison.compared == len(state)
    assert comparison.compared_bytes == sum(t.numel() * t.element_size() for t in state.values())


def test_the_comparison_says_what_was_compared(tmp_path: Path) -> None:
    comparison = compare_states(tmp_path, make_state(), make_state())
    assert (comparison.a.path, comparison.a.layout) == (tmp_path / "a", CheckpointLayout.DCP)
    assert (comparison.b.path, comparison.b.layout) == (tmp_path / "b", CheckpointLayout.SAFETENSORS)
    assert comparison.a.tensors == comparison.b.tensors == len(make_state())


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "_fsdp_wrapped_module.", "_orig_mod.module."])
def test_prefixes_of_wrappers_come_off(tmp_path: Path, prefix: str) -> None:
    wrapped = {f"{prefix}{fqn}": tensor for fqn, tensor in make_state().items()}
    assert compare_states(tmp_path, wrapped, make_state()).is_equal


def test_nesting_comes_off_and_is_told_from_a_module_of_that_name(tmp_path: Path) -> None:
    """The names begin with `model.` in both; only in A it is there twice, once for the nesting."""
    comparison = compare_states(tmp_path, {"model": make_state()}, make_state())
    assert comparison.differences == ()
    assert comparison.compared == len(make_state())


def test_two_names_that_become_one_are_refused(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "_orig_mod.w": torch.zeros(2)}
    with pytest.raises(CorruptCheckpointError, match="so nothing was compared") as caught:
        compare_states(tmp_path, state, {"w": torch.ones(2)})
    assert [(p.kind, p.where) for p in caught.value.problems] == [("duplicate_tensor", "w")]


def test_objects_and_optimizer_entries_are_listed_and_not_compared(tmp_path: Path) -> None:
    moments = {"state": {"model.scale": {"exp_avg": torch.tensor(1.5), "step": torch.tensor(3.0)}}}
    state = {"model": {**make_state(), "te._extra_state": "amax 1"}, "optimizer": moments, "step": 7}
    comparison = compare_states(tmp_path, state, make_state())
    assert comparison.is_equal
    assert {"model.te._extra_state", "step"} <= set(comparison.a.objects)
    moments_of = "optimizer.state.model.scale"
    assert set(comparison.a.outside) == {f"{moments_of}.exp_avg", f"{moments_of}.step"}
    assert (comparison.b.objects, comparison.b.outside) == ((), ())


@pytest.mark.parametrize("side", ["a", "b"])
def test_extra_states_of_modules_are_listed_and_not_compared(tmp_path: Path, side: str) -> None:
    own = {"te._extra_state": torch.arange(3, dtype=torch.uint8), "te.sub._extra_state": {"amax": torch.tensor(2.5)}}
    state = {"model": {**make_state(), **own}}
    first, second = (state, make_state()) if side == "a" else (make_state(), state)
    comparison = compare_checkpoints(save_dcp(tmp_path / "a", first), save_dcp(tmp_path / "b", second))
    assert comparison.is_equal
    assert comparison.compared == len(make_state())
    there, absent = (comparison.a, comparison.b) if side == "a" else (comparison.b, comparison.a)
    assert there.tensors == absent.tensors == len(make_state())
    assert set(there.extra_states) == {"model.te._extra_state", "model.te.sub._extra_state.amax"}
    assert absent.extra_states == ()


def test_a_checkpoint_with_extra_states_equals_what_it_is_converted_to(tmp_path: Path) -> None:
    state = {**make_state(), "te._extra_state": {"amax": torch.tensor(2.5), "format": "e4m3"}}
    source = save_dcp(tmp_path / "dcp", state)
    report = convert(source, tmp_path / "hf")
    assert report.plan.names.left_out["module extra states"] == ("te._extra_state.amax",)
    comparison = compare_checkpoints(source, tmp_path / "hf")
    assert (comparison.is_equal, comparison.compared) == (True, len(make_state()))
    assert "extra states of modules: te._extra_state.amax" in render_comparison(comparison)


def test_a_checkpoint_of_an_optimizer_alone_is_not_equal_to_anything(tmp_path: Path) -> None:
    state = {"optim": {"state": {"w": {"exp_avg": torch.ones(2)}}}}
    with pytest.raises(LayoutError, match="holds no tensor of a model"):
        compare_checkpoints(save_dcp(tmp_path / "a", state), save_dcp(tmp_path / "b", state))


# --- differences -----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found_with_its_index(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    tmp_path = tmp_path_factory.mktemp("flip")
    state = make_state()
    fqn = data.draw(st.sampled_from([fqn for fqn, tensor in state.items() if tensor.numel()]))
    tensor = state[fqn]
    bit = data.draw(st.integers(0, tensor.numel() * tensor.element_size() * 8 - 1))
    writer = data.draw(st.sampled_from(sorted(WRITERS)))
    flipped = {**state, fqn: flip_bit(tensor, bit)}
    comparison = compare_checkpoints(WRITERS[writer](tmp_path / "a", state), save_consolidated(tmp_path / "b", flipped))
    (problem,) = comparison.differences
    assert isinstance(problem, ValueProblem)
    assert (problem.kind, problem.where, problem.count) == ("value", fqn, 1)
    position = torch.tensor(bit // 8 // tensor.element_size())
    assert problem.index == tuple(int(i) for i in torch.unravel_index(position, tensor.shape))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.tensor([1, 0x7FC00001], dtype=torch.int32), torch.tensor([1, 0x7FC00002], dtype=torch.int32)),
        (torch.tensor([1, 0x7FC00001], dtype=torch.int32), torch.tensor([1, -0x003FFFFF], dtype=torch.int32)),
    ],
)
def test_nans_with_other_payloads_differ(tmp_path: Path, a: torch.Tensor, b: torch.Tensor) -> None:
    floats = {"a": {"w": a.view(torch.float32)}, "b": {"w": b.view(torch.float32)}}
    assert floats["a"]["w"].isnan().tolist() == floats["b"]["w"].isnan().tolist() == [False, True]
    (problem,) = compare_states(tmp_path, floats["a"], floats["b"]).differences
    assert isinstance(problem, ValueProblem)
    assert (problem.index, problem.count) == ((1,), 1)
    assert "A has nan (0x7fc00001)" in problem.message


def test_equal_nans_are_equal(tmp_path: Path) -> None:
    state = {"w": torch.tensor([float("nan"), float("inf"), -0.0])}
    assert compare_states(tmp_path, state, state).is_equal


def test_minus_zero_is_not_zero(tmp_path: Path) -> None:
    (problem,) = compare_states(tmp_path, {"w": torch.tensor(0.0)}, {"w": torch.tensor(-0.0)}).differences
    assert isinstance(problem, ValueProblem)
    assert problem.index == ()
    assert problem.message == "1 of 1 elements differ, the first at (): A has 0.0 (0x00000000), B has -0.0 (0x80000000)"


def test_the_same_bytes_as_another_dtype_differ(tmp_path: Path) -> None:
    tensor = torch.arange(6, dtype=torch.int16)
    comparison = compare_states(tmp_path, {"w": tensor}, {"w": tensor.view(torch.bfloat16)})
    assert [str(p) for p in comparison.differences] == ["w: A has dtype I16, B has BF16"]


def test_the_same_bytes_in_another_shape_differ(tmp_path: Path) -> None:
    tensor = torch.arange(6.0)
    comparison = compare_states(tmp_path, {"w": tensor.reshape(2, 3)}, {"w": tensor.reshape(3, 2)})
    assert [str(p) for p in comparison.differences] == ["w: A has shape (2, 3), B has (3, 2)"]


def test_shape_and_dtype_are_two_differences(tmp_path: Path) -> None:
    comparison = compare_states(tmp_path, {"w": torch.ones(2)}, {"w": torch.ones(3, dtype=torch.int32)})
    assert list_kinds(comparison) == [("shape", "w"), ("dtype", "w")]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_empty_tensors_of_other_shapes_differ(tmp_path: Path, shape: tuple[int, ...]) -> None:
    state = {"w": torch.empty(0, 2), "x": torch.ones(1)}
    assert list_kinds(compare_states(tmp_path, state, {**state, "w": torch.empty(shape)})) == [("shape", "w")]


def test_a_transposed_square_differs_off_its_diagonal(tmp_path: Path) -> None:
    square = torch.arange(16.0).reshape(4, 4)
    (problem,) = compare_states(tmp_path, {"w": square}, {"w": square.T}).differences
    assert isinstance(problem, ValueProblem)
    assert (problem.index, problem.count) == ((0, 1), 12)


def test_swapped_rows_differ_throughout(tmp_path: Path) -> None:
    rows = torch.arange(35.0).reshape(7, 5)
    (problem,) = compare_states(tmp_path, {"w": rows}, {"w": rows[[0, 1, 2, 4, 3, 5, 6]]}).differences
    assert isinstance(problem, ValueProblem)
    assert (problem.index, problem.count) == ((3, 0), 10)


def test_missing_and_unexpected_tensors_are_told_apart(tmp_path: Path) -> None:
    a, b = make_state(), make_state()
    del b["model.scale"]
    b["model.new"] = torch.ones(2)
    comparison = compare_states(tmp_path, a, b)
    assert [str(p) for p in comparison.differences] == [
        "model.scale: F32 of shape () is in A only",
        "model.new: F32 of shape (2,) is in B only",
    ]
    assert list_kinds(comparison) == [("missing_tensor", "model.scale"), ("unexpected_tensor", "model.new")]


def test_a_difference_far_behind_the_first_block_is_found(tmp_path: Path) -> None:
    tensor = torch.arange(6_000_000, dtype=torch.int32).reshape(3000, 2000)
    other = tensor.clone()
    other[2999, 1998:] += 1
    a = save_dcp(tmp_path / "a", {"w": tensor}, ranks=4, cut=cut_columns(4))
    (problem,) = compare_checkpoints(a, save_consolidated(tmp_path / "b", {"w": other})).differences
    assert isinstance(problem, ValueProblem)
    assert (problem.index, problem.count) == ((2999, 1998), 2)


# --- tied pairs ------------------------------------------------------------------------------

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def make_tied() -> State:
    state = make_state()
    return {**state, HEAD: state[EMBED].clone()}


def test_a_tied_tensor_may_be_stored_once_by_either_side(tmp_path: Path) -> None:
    once, twice = make_state(), make_tied()
    comparison = compare_states(tmp_path, twice, once)
    assert comparison.differences == ()
    assert comparison.tied == (TiedPair(HEAD, EMBED, "B"),)
    comparison = compare_states(tmp_path / "reverse", once, twice)
    assert comparison.differences == ()
    assert comparison.tied == (TiedPair(HEAD, EMBED, "A"),)


def test_each_side_may_keep_the_other_name(tmp_path: Path) -> None:
    head_only = make_tied()
    del head_only[EMBED]
    comparison = compare_states(tmp_path, head_only, make_state())
    assert comparison.differences == ()
    assert comparison.tied == (TiedPair(HEAD, EMBED, "B"), TiedPair(EMBED, HEAD, "A"))


@pytest.mark.parametrize(("flip_in", "kind"), [("a", "missing_tensor"), ("b", "unexpected_tensor")])
def test_a_pair_that_is_not_equal_is_not_tied(tmp_path: Path, flip_in: str, kind: str) -> None:
    untied = {**make_tied(), HEAD: flip_bit(make_tied()[HEAD], 32 * 8)}
    states = (untied, make_state()) if flip_in == "a" else (make_state(), untied)
    comparison = compare_states(tmp_path, *states)
    assert list_kinds(comparison) == [(kind, HEAD)]
    assert comparison.tied == ()
    assert "is not the same tensor: 1 of 77 elements differ, the first at (1, 1)" in comparison.differences[0].message


@pytest.mark.parametrize("place", ["A", "B", "A and B"])
def test_a_config_that_denies_tying_makes_the_absent_name_a_difference(tmp_path: Path, place: str) -> None:
    a, b = save_dcp(tmp_path / "a", make_tied()), save_consolidated(tmp_path / "b", make_state())
    for label, directory in (("A", a), ("B", b)):
        if label in place.split():
            (directory / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    comparison = compare_checkpoints(a, b)
    assert list_kinds(comparison) == [("missing_tensor", HEAD)]
    assert f"config.json of {place} says that it is not tied" in comparison.differences[0].message


def test_equal_bytes_alone_make_no_pair(tmp_path: Path) -> None:
    state = {**make_state(), "model.copy.weight": make_state()[EMBED]}
    assert list_kinds(compare_states(tmp_path, state, make_state())) == [("missing_tensor", "model.copy.weight")]


def test_both_sides_storing_both_are_compared_name_by_name(tmp_path: Path) -> None:
    a, b = make_tied(), {**make_tied(), HEAD: make_tied()[HEAD] + 1}
    comparison = compare_states(tmp_path, a, b)
    assert list_kinds(comparison) == [("value", HEAD)]


# --- what cannot be compared -----------------------------------------------------------------


def test_a_missing_file_is_refused_with_its_problems(tmp_path: Path) -> None:
    a, b = save_dcp(tmp_path / "a", make_state()), save_dcp(tmp_path / "b", make_state())
    (b / "__1_0.distcp").unlink()
    with pytest.raises(CorruptCheckpointError, match="nothing was compared; restore it") as caught:
        compare_checkpoints(a, b)
    assert ("missing_file", "__1_0.distcp") in [(p.kind, p.where) for p in caught.value.problems]


def test_equal_damage_is_not_equality(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_dcp(tmp_path / name, make_state())
        (tmp_path / name / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError):
        compare_checkpoints(tmp_path / "a", tmp_path / "b")


def test_nothing_at_a_path_is_refused(tmp_path: Path) -> None:
    a = save_dcp(tmp_path / "a", make_state())
    with pytest.raises(CheckpointNotFoundError):
        compare_checkpoints(a, tmp_path / "absent")


@pytest.mark.parametrize("position", ["first", "second"])
def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path, position: str) -> None:
    a = save_dcp(tmp_path / "a", make_state())
    (tmp_path / "empty").mkdir()
    pair = (tmp_path / "empty", a) if position == "first" else (a, tmp_path / "empty")
    with pytest.raises(CheckpointError):
        compare_checkpoints(*pair)


# --- bounds ----------------------------------------------------------------------------------

MEASURE = """
import resource, sys
from pathlib import Path
from ckpt_verify import compare_checkpoints

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert compare_checkpoints(Path(sys.argv[1]), Path(sys.argv[2])).is_equal
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, "torch" in sys.modules)
"""


@pytest.mark.parametrize("writer", ["dcp by rows", "dcp by columns", "dcp in a grid", "safetensors by rows"])
def test_memory_stays_bounded_and_torch_away(tmp_path: Path, writer: str) -> None:
    state = {"w": torch.arange(64 * 2**20, dtype=torch.int32).reshape(8192, 8192)}  # 256 MiB
    a, b = WRITERS[writer](tmp_path / "a", state), save_consolidated(tmp_path / "b", state)
    command = [sys.executable, "-c", MEASURE, str(a), str(b)]
    measured = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603  our own interpreter
    megabytes, imports_torch = measured.stdout.split()
    assert int(megabytes) < 64
    assert imports_torch == "False"
