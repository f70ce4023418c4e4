from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ckpt_core.key_mapping import find_canonical_names, is_extra_state, strip_wrapper_prefixes
from ckpt_core.reader import open_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from testbed.sharded import save_dcp

COMPONENTS = st.sampled_from(
    [
        "_orig_mod",
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
        "module",
        "model",
        "layers",
        "0",
        "weight",
        "é",
        "",
    ]
)
NAMES = st.lists(COMPONENTS, min_size=1, max_size=6).map(".".join)


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("_orig_mod.layers.0.weight", "layers.0.weight"),
        ("layers.0._orig_mod.weight", "layers.0.weight"),
        ("_fsdp_wrapped_module.a._fsdp_wrapped_module._checkpoint_wrapped_module.weight", "a.weight"),
        ("module.layers.0.weight", "layers.0.weight"),
        ("module._orig_mod.module.x", "x"),
        ("_orig_mod.module.x", "x"),
        ("layers.module.weight", "layers.module.weight"),
        ("modules.weight", "modules.weight"),
        ("module", "module"),
        ("module.module", "module"),
        ("module.", "module."),
        ("_orig_mod", "_orig_mod"),
        ("a._orig_mod", "a._orig_mod"),
        ("my_orig_mod.x", "my_orig_mod.x"),
        ("", ""),
    ],
)
def test_wrapper_components_come_off(stored: str, canonical: str) -> None:
    assert strip_wrapper_prefixes(stored) == canonical


@given(name=NAMES | st.text(max_size=20))
def test_stripping_twice_is_stripping_once(name: str) -> None:
    once = strip_wrapper_prefixes(name)
    assert strip_wrapper_prefixes(once) == once


@given(name=NAMES)
def test_the_last_component_always_stays(name: str) -> None:
    assert strip_wrapper_prefixes(name).rpartition(".")[2] == name.rpartition(".")[2]


def test_names_of_wrapped_modules_become_those_of_the_plain_ones() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    compiled = torch.compile(plain, backend="eager")
    assert isinstance(compiled, torch.nn.Module)
    wrapped = torch.nn.ModuleDict({"module": compiled})
    assert list(map(strip_wrapper_prefixes, wrapped.state_dict())) == list(plain.state_dict())


@given(names=st.lists(NAMES, unique=True, max_size=8))
def test_the_mapping_is_one_to_one_or_says_so(names: list[str]) -> None:
    found = find_canonical_names(names, {})
    assert list(found.names) == names
    distinct = len(set(found.names.values())) == len(names)
    assert distinct or found.problems


def test_names_that_become_equal_are_reported_and_kept() -> None:
    found = find_canonical_names(["a.w", "a._orig_mod.w", "b.w"], {})
    assert dict(found.names) == {"a.w": "a.w", "a._orig_mod.w": "a._orig_mod.w", "b.w": "b.w"}
    assert [(p.kind, p.where) for p in found.problems] == [("duplicate_tensor", "a.w")]
    assert "'a._orig_mod.w'" in found.problems[0].message


@given(names=st.lists(NAMES, unique=True, max_size=8))
def test_canonical_names_of_canonical_names_are_the_same(names: list[str]) -> None:
    once = find_canonical_names(names, {})
    if not once.problems:
        again = find_canonical_names(once.names.values(), {})
        assert list(again.names.values()) == list(once.names.values())


W = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("state", "nest", "names"),
    [
        ({"model.w": W}, (), {"model.w": "model.w"}),
        ({"model": {"w": W}}, ("model",), {"model.w": "w"}),
        (
            {"model": {"model.w": W, "lm_head.w": W}},
            ("model",),
            {"model.model.w": "model.w", "model.lm_head.w": "lm_head.w"},
        ),
        ({"model": {"_orig_mod.w": W}}, ("model",), {"model._orig_mod.w": "w"}),
        ({"state_dict": {"w": W, "v": W}}, ("state_dict",), {"state_dict.w": "w", "state_dict.v": "v"}),
        ({"app": {"model": {"w": W}, "optim": {"state": {"w": W}}}}, ("app", "model"), {"app.model.w": "w"}),
        ({"model": {"w": W}, "optimizer": {"state.w.exp_avg": W}, "step": W}, ("model",), {"model.w": "w"}),
        ({"a": {"w": W}, "b": {"w": W}}, (), {"a.w": "a.w", "b.w": "b.w"}),
        ({"encoder": {"w": W}}, (), {"encoder.w": "encoder.w"}),
        ({"w": W, "b": W}, (), {"w": "w", "b": "b"}),
    ],
)
def test_nesting_is_told_from_module_names(
    tmp_path: Path, state: dict[str, object], nest: tuple[str, ...], names: dict[str, str]
) -> None:
    reader = open_checkpoint(save_dcp(tmp_path / "d", state, ranks=1))
    found = find_canonical_names(reader.tensors, reader.nesting)
    assert found.nest == nest
    assert {fqn: name for fqn, name in found.names.items() if fqn not in found.outside} == names
    assert set(found.outside) == set(reader.tensors) - set(names)
    assert not found.problems


def test_optimizer_state_alone_keeps_its_names(tmp_path: Path) -> None:
    reader = open_checkpoint(save_dcp(tmp_path / "d", {"optim": {"state": {"w": {"exp_avg": W}}}}, ranks=1))
    found = find_canonical_names(reader.tensors, reader.nesting)
    assert (found.nest, found.outside) == ((), ("optim.state.w.exp_avg",))
    assert found.names["optim.state.w.exp_avg"] == "optim.state.w.exp_avg"


def test_lists_in_a_state_dict_have_numbers_in_their_paths() -> None:
    found = find_canonical_names(["x.0", "x.1"], {"x.0": ("x", 0), "x.1": ("x", 1)})
    assert found.nest == ()
    assert dict(found.names) == {"x.0": "x.0", "x.1": "x.1"}
    found = find_canonical_names(["model.0", "model.1"], {"model.0": ("model", 0), "model.1": ("model", 1)})
    assert found.nest == ("model",)
    assert dict(found.names) == {"model.0": "0", "model.1": "1"}


@pytest.mark.parametrize(
    ("fqn", "expected"),
    [
        ("_extra_state", True),
        ("model.attn._extra_state", True),
        ("attn._extra_state.amax.0", True),
        ("attn.extra_state", False),
        ("attn.my_extra_state.weight", False),
        ("", False),
    ],
)
def test_extra_state_is_known_by_a_whole_component_anywhere(fqn: str, *, expected: bool) -> None:
    assert is_extra_state(fqn) is expected
