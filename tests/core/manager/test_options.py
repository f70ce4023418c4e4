"""Options: what they are normalized to, what is refused, what one call leaves to the next."""

from __future__ import annotations

import copy
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from ckpt_core import automodel_compat as compat
from ckpt_core.errors import (
    ConfigError,
)
from ckpt_core.manager import AutomodelCheckpointManager
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, CheckpointingConfig
from safetensors.torch import load_file
from testbed.single_rank import (
    FORMATS,
    Trained,
    assert_same,
    load,
    save,
)
from torch.distributed.device_mesh import DeviceMesh

pytestmark = pytest.mark.compat


@pytest.mark.parametrize("is_peft", [False, True])
@pytest.mark.parametrize("save_format", FORMATS)
def test_requirement_01_addons_are_those_of_a_new_checkpointer(
    mesh: DeviceMesh, save_format: str, is_peft: bool
) -> None:
    manager = AutomodelCheckpointManager(mesh, mesh)
    manager.init_checkpointer({"model_save_format": "safetensors" if save_format == "torch_save" else "torch_save"})
    manager.update_checkpointer_config({"model_save_format": save_format, "is_peft": is_peft})
    config = CheckpointingConfig(model_save_format="safetensors", save_consolidated=False, is_peft=is_peft)
    config.model_save_format = manager.checkpointer.config.model_save_format
    fresh = Checkpointer(config, dp_rank=0, tp_rank=0, pp_rank=0)
    assert [type(a) for a in manager.checkpointer._addons] == [type(a) for a in fresh._addons]


def test_requirement_02_arguments_that_a_function_lacks_are_left_out() -> None:
    def old(a: int, b: int = 0) -> tuple[int, int]:
        return a, b

    def new(a: int, **rest: int) -> tuple[int, dict[str, int]]:
        return a, rest

    assert compat.call_supported(old, 1, b=2, c=3) == (1, 2)
    assert compat.call_supported(new, 1, b=2, c=3) == (1, {"b": 2, "c": 3})


@pytest.mark.parametrize("value", [True, "true", "every", "TRUE"])
def test_requirement_03_consolidation_is_normalized_and_happens(
    manager: AutomodelCheckpointManager, tmp_path: Path, value: object
) -> None:
    trained = Trained(1)
    save(manager, trained, tmp_path, model_save_format="safetensors", save_consolidated=value)
    consolidated = load_file(tmp_path / "weights/model/consolidated/model-00001-of-00001.safetensors")
    assert_same(consolidated, dict(trained.model.state_dict()))


@pytest.mark.parametrize(
    "updates",
    [
        {"no_such_option": 1},
        {"model_save_format": None},
        {"model_save_format": "FOO"},
        {"save_consolidated": "sometimes"},
        {"save_consolidated": None},
    ],
)
def test_requirement_03_impossible_updates_are_refused_and_set_nothing(
    manager: AutomodelCheckpointManager, mesh: DeviceMesh, updates: dict[str, Any]
) -> None:
    before = copy.copy(manager.checkpointer.config)
    with pytest.raises(ConfigError, match=next(iter(updates))):
        manager.update_checkpointer_config({"is_peft": True} | updates, "/elsewhere")
    assert manager.checkpointer.config == before
    with pytest.raises(ValueError, match=next(iter(updates))):
        AutomodelCheckpointManager(mesh, mesh).init_checkpointer(updates)


@pytest.mark.parametrize("name", ["checkpoint_dir", "model_state_dict_keys"])
def test_requirement_03_every_known_field_can_be_given_to_init(mesh: DeviceMesh, name: str) -> None:
    manager = AutomodelCheckpointManager(mesh, mesh)
    manager.init_checkpointer({name: ["a"] if name == "model_state_dict_keys" else "elsewhere"})
    assert getattr(manager.checkpoint_config, name) in (["a"], "elsewhere")


def test_requirement_03_what_the_constructor_refuses_is_our_error(mesh: DeviceMesh) -> None:
    with pytest.raises(ConfigError, match="consolidation_timeout_minutes"):
        AutomodelCheckpointManager(mesh, mesh).init_checkpointer({"consolidation_timeout_minutes": 0})


def test_requirement_06_the_format_is_that_of_init_whatever_was_saved_or_loaded_since(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    save(manager, Trained(1), tmp_path / "a", model_save_format="torch_save")
    load(manager, Trained(2), tmp_path / "a")
    save(manager, Trained(1), tmp_path / "b", save_consolidated=True)
    save(manager, Trained(1), tmp_path / "c")
    assert not list((tmp_path / "c/weights/model").glob("*.distcp"))
    assert not (tmp_path / "c/weights/model/consolidated").exists()
    manager.update_checkpointer_config({"model_save_format": "torch_save"})
    save(manager, Trained(1), tmp_path / "d")
    assert list((tmp_path / "d/weights/model").glob("*.distcp"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_save_format": "torch_save", "save_consolidated": True}, "ckpt-convert"),
        ({"model_save_format": "safetensors", "save_consolidated": "final"}, "save_consolidated=True"),
    ],
)
def test_consolidation_that_will_not_happen_is_said(
    manager: AutomodelCheckpointManager,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, object],
    words: str,
) -> None:
    save(manager, Trained(1), tmp_path, **config)
    assert any(words in record.message for record in caplog.records if record.name == "ckpt_core.manager")


def test_requirement_15_the_supported_releases_are_declared() -> None:
    declared = [line.replace(" ", "") for line in requires("ckpt-core") or []]
    assert any(line.startswith("nemo-automodel>=0.5;extra==") for line in declared)


def test_requirement_03_a_refused_update_is_not_remembered_for_later_saves(
    manager: AutomodelCheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "has_accelerator", lambda: False)
    with pytest.raises(ConfigError, match="accelerator"):
        manager.update_checkpointer_config({"model_save_format": "torch_save", "is_async": True})
    save(manager, Trained(1), tmp_path)
    assert not list((tmp_path / "weights/model").glob("*.distcp"))
