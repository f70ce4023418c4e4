from __future__ import annotations

import pytest
from ckpt_core.dtypes import holds_every_value
from ckpt_core.key_check import (
    Entry,
    KeyRules,
    NamedState,
    TiedHead,
    compare_optimizers,
    compare_requested,
    compare_states,
)

F32 = Entry("F32", (2, 3))
TIED = KeyRules(tied=TiedHead("lm_head.weight", "embed.weight"))
UNTIED_IN_MEMORY = KeyRules(tied=TiedHead("lm_head.weight", None))


def _state(*names: str) -> NamedState:
    return NamedState(dict.fromkeys(names, F32))


def _kinds(expected: NamedState, stored: NamedState, rules: KeyRules | None = None) -> list[tuple[str, str]]:
    return [(p.kind, p.where) for p in compare_states(expected, stored, rules or KeyRules())]


def test_equal_states_have_no_problems() -> None:
    assert _kinds(_state("a", "b"), _state("b", "a")) == []


def test_missing_and_unexpected_names_are_listed_in_order() -> None:
    assert _kinds(_state("c", "b", "same"), _state("z", "y", "same")) == [
        ("missing_tensor", "b"),
        ("missing_tensor", "c"),
        ("unexpected_tensor", "y"),
        ("unexpected_tensor", "z"),
    ]


def test_an_object_in_place_of_a_tensor_is_a_name_like_others() -> None:
    assert _kinds(NamedState({}, frozenset({"a"})), NamedState({}, frozenset())) == [("missing_tensor", "a")]


@pytest.mark.parametrize(
    ("stored", "kind"),
    [(Entry("F32", (3, 2)), "shape"), (Entry("F64", (2, 3)), "dtype"), (Entry("I64", (2, 3)), "dtype")],
)
def test_shapes_must_be_equal_and_values_must_fit(stored: Entry, kind: str) -> None:
    assert _kinds(_state("a"), NamedState({"a": stored})) == [(kind, "a")]


@pytest.mark.parametrize(
    ("wide", "narrow", "fits"),
    [
        ("F32", "BF16", True),
        ("F32", "F16", True),
        ("F64", "F32", True),
        ("BF16", "F8_E5M2", True),
        ("F16", "F8_E4M3", True),
        ("BF16", "F32", False),
        ("BF16", "F16", False),
        ("F16", "BF16", False),
        ("I64", "I32", False),
        ("F32", "I8", False),
        ("U8", "U8", True),
    ],
)
def test_a_dtype_holds_another_only_if_every_value_survives(wide: str, narrow: str, fits: bool) -> None:
    assert holds_every_value(wide, narrow) is fits


@pytest.mark.parametrize("name", ["a._extra_state", "a._extra_state.scale"])
def test_extra_state_may_be_on_one_side_only(name: str) -> None:
    assert _kinds(_state("a", name), _state("a")) == []
    assert _kinds(_state("a"), _state("a", name)) == []


def test_a_tied_head_may_be_stored_or_not() -> None:
    assert _kinds(_state("embed.weight"), _state("embed.weight", "lm_head.weight"), TIED) == []
    assert _kinds(_state("embed.weight", "lm_head.weight"), _state("embed.weight"), UNTIED_IN_MEMORY) == []
    assert _kinds(_state("embed.weight", "lm_head.weight"), _state("embed.weight")) == [
        ("missing_tensor", "lm_head.weight")
    ]


def test_an_optimizer_may_not_lack_state_but_may_not_know_every_option() -> None:
    live = _state("optim.state.w.exp_avg", "optim.param_groups.w.lr")
    assert compare_optimizers(live, _state(*live.names, "optim.param_groups.w.foreach", "sched.last_epoch")) == []
    problems = compare_optimizers(live, _state("optim.state.w.momentum", "optim.param_groups.w.lr"))
    assert [(p.kind, p.where) for p in problems] == [
        ("missing_tensor", "optim.state.w.exp_avg"),
        ("unexpected_tensor", "optim.state.w.momentum"),
    ]


NATIVE = frozenset({"embed.weight", "experts.w"})
STORED = frozenset({"embed.weight", "experts.0.w", "experts.1.w"})


def _requested(keys: list[str], rules: KeyRules | None = None) -> list[tuple[str, str]]:
    problems = compare_requested(keys, NATIVE, STORED, rules or KeyRules())
    return [(p.kind, p.where) for p in problems]


@pytest.mark.parametrize("names", [NATIVE, STORED])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module."])
def test_keys_may_be_requested_in_native_or_stored_names(names: frozenset[str], prefix: str) -> None:
    assert _requested([prefix + name for name in names]) == []


def test_other_requested_keys_are_compared_with_the_side_that_is_nearer() -> None:
    assert _requested(["embed.weight", "experts.0.w", "nonsense"]) == [
        ("missing_tensor", "nonsense"),
        ("unexpected_tensor", "experts.1.w"),
    ]


def test_transient_buffers_and_tied_heads_may_be_requested() -> None:
    rules = KeyRules(tied=TIED.tied, transient=frozenset({"rope.inv_freq"}))
    assert _requested([*NATIVE, "rope.inv_freq", "lm_head.weight"], rules) == []
    assert _requested([*NATIVE, "rope.inv_freq"]) == [("missing_tensor", "rope.inv_freq")]


def test_with_an_adapter_only_its_own_names_count() -> None:
    stored = frozenset({"base_model.model.a.lora_A.weight", "base_model.model.a.lora_B.weight"})
    rules = KeyRules(is_peft=True)

    def compare(*keys: str) -> list[str]:
        problems = compare_requested(keys, frozenset(), stored, rules)
        return [p.where for p in problems]

    assert compare("a.weight") == []
    assert compare("a.weight", "a.lora_A.weight", "_orig_mod.a.lora_B.weight") == []
    assert compare("a.weight", "a.lora_A.weight") == ["a.lora_B.weight"]
