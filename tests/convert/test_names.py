from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ckpt_convert.names import change_names
from ckpt_core import open_checkpoint
from ckpt_core.errors import KeyMismatchError
from testbed.sharded import save_dcp

W = torch.ones(2)


def test_nesting_and_wrapper_prefixes_come_off_and_are_reported(tmp_path: Path) -> None:
    state = {"model": {"module._orig_mod.layers.0._checkpoint_wrapped_module.w": W, "model.norm": W, "head": W}}
    names = change_names(open_checkpoint(save_dcp(tmp_path, state)))
    assert set(names.kept) == {"layers.0.w", "model.norm", "head"}
    assert names.renamed["model.model.norm"] == "model.norm"
    (line,) = names.describe()
    assert line.startswith("renamed: 3 tensors, nesting under 'model' and wrapper prefixes taken off (model.")
    assert "renamed: model.head -> head" in list(names.list_all())


def test_names_without_wrappers_stay_and_nothing_is_reported(tmp_path: Path) -> None:
    names = change_names(open_checkpoint(save_dcp(tmp_path, {"model.w": W, "embed_optim_state.lora": W})))
    assert dict(names.kept) == {"model.w": "model.w", "embed_optim_state.lora": "embed_optim_state.lora"}
    assert names.describe() == []
    assert list(names.list_all()) == []


def test_objects_optimizer_entries_and_extra_states_are_left_out_by_name(tmp_path: Path) -> None:
    state = {
        "model": {"w": W, "attn._extra_state": W, "te._extra_state": {"amax": W}, "extra_state.w": W},
        "optim": {"state": {"w": {"exp_avg": W}}, "lr": 1e-3},
        "step": 7,
    }
    names = change_names(open_checkpoint(save_dcp(tmp_path, state)))
    assert set(names.kept) == {"w", "extra_state.w"}
    assert {kind: set(left) for kind, left in names.left_out.items()} == {
        "objects": {"optim.lr", "step"},
        "tensors outside the model": {"optim.state.w.exp_avg"},
        "module extra states": {"model.attn._extra_state", "model.te._extra_state.amax"},
    }
    text = "\n".join(names.describe())
    assert "left out: 1 tensors outside the model (optim.state.w.exp_avg)" in text
    assert "left out (module extra states): model.attn._extra_state" in list(names.list_all())
    assert names.to_json()["left_out"] == {kind: list(left) for kind, left in names.left_out.items()}


def test_two_names_that_would_become_one_are_refused(tmp_path: Path) -> None:
    reader = open_checkpoint(save_dcp(tmp_path, {"_orig_mod.w": W, "w": 2 * W, "b": W}))
    with pytest.raises(KeyMismatchError, match=f"{tmp_path}: 1 names stand for several tensors") as caught:
        change_names(reader)
    (problem,) = caught.value.problems
    assert problem.kind == "duplicate_tensor"
    assert "'_orig_mod.w'" in str(problem)


def test_a_name_cannot_move_the_cursor_of_a_terminal(tmp_path: Path) -> None:
    names = change_names(open_checkpoint(save_dcp(tmp_path, {"w": W, "evil\x1b[2J": 1, "_orig_mod.a\x1b": W})))
    assert not any("\x1b" in line for line in [*names.describe(), *names.list_all()])
