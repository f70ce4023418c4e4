"""`model_state_dict_keys`: what must be there, and what may differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ckpt_core.errors import (
    KeyMismatchError,
)
from ckpt_core.manager import AutomodelCheckpointManager
from testbed.single_rank import (
    KEYS,
    Trained,
    assert_same,
    build_llama,
    load,
    save,
)
from torch.distributed.device_mesh import DeviceMesh

pytestmark = pytest.mark.compat


@pytest.mark.parametrize(
    "keys", [KEYS, [f"_orig_mod.{key}" for key in KEYS], [*KEYS, "transient"], [*KEYS, "wide._extra_state"]]
)
def test_requirement_14_keys_are_enforced_by_rules(mesh: DeviceMesh, tmp_path: Path, keys: list[str]) -> None:
    manager = AutomodelCheckpointManager(mesh, mesh, keys)
    manager.init_checkpointer()
    source, target = Trained(1), Trained(2)
    save(manager, source, tmp_path)
    load(manager, target, tmp_path)
    assert_same(target.state(), source.state())


def test_requirement_14_other_keys_are_refused_on_save_and_load(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    nonsense = [f"nonsense.{i}" for i in range(25)]
    manager.set_model_state_dict_keys([*KEYS[1:], *nonsense])
    with pytest.raises(KeyMismatchError) as caught:
        save(manager, Trained(1), tmp_path / "run")
    text = str(caught.value)
    assert "missing tensor (25)" in text
    assert "and 5 more" in text
    assert f"unexpected tensor (1):\n    - {KEYS[0]}" in text
    assert not (tmp_path / "run").exists()
    manager.model_state_dict_keys = None
    save(manager, Trained(1), tmp_path / "run")
    manager.set_model_state_dict_keys([*KEYS, "nonsense.0"])
    with pytest.raises(KeyMismatchError, match=r"nonsense\.0"):
        load(manager, Trained(2), tmp_path / "run")


def test_keys_given_to_the_library_are_those_of_the_model(manager: AutomodelCheckpointManager, tmp_path: Path) -> None:
    save(manager, Trained(1), tmp_path)
    mapping = json.loads((tmp_path / "weights/model/.hf_metadata/fqn_to_file_index_mapping.json").read_text())
    assert sorted(mapping) == sorted(KEYS)


@pytest.mark.parametrize("tied_keys", [True, False])
def test_a_tied_head_may_be_in_the_keys_or_not(mesh: DeviceMesh, tmp_path: Path, tied_keys: bool) -> None:
    source, target = build_llama(tied=True, seed=1), build_llama(tied=True, seed=2)
    keys = [key for key in source.state_dict() if tied_keys or key != "lm_head.weight"]
    manager = AutomodelCheckpointManager(mesh, mesh, keys)
    manager.init_checkpointer()
    manager.save_checkpoint(source, str(tmp_path / "w"), checkpointing_cfg={})
    manager.load_checkpoint(target, str(tmp_path / "w"))
    assert_same(target.state_dict(), source.state_dict())
