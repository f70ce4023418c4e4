"""Adapters, beside full models and into them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from ckpt_core.errors import (
    ConfigError,
    KeyMismatchError,
    LayoutError,
)
from ckpt_core.manager import AutomodelCheckpointManager
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from testbed.single_rank import (
    FORMATS,
    PEFT,
    Odd,
    Trained,
    assert_same,
    build_lora,
    load,
    save,
)

pytestmark = pytest.mark.compat


def test_requirement_06_an_adapter_save_does_not_leak_into_the_next(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    adapter, full = Trained(1, build_lora), Trained(2)
    manager.save_checkpoint(
        adapter.model, str(tmp_path / "a"), checkpointing_cfg={}, lora_enabled=True, peft_config=PEFT
    )
    save(manager, full, tmp_path / "b")
    manager.load_checkpoint(adapter.model, str(tmp_path / "a"))
    save(manager, full, tmp_path / "c")
    for root in (tmp_path / "b", tmp_path / "c"):
        target = Trained(3)
        load(manager, target, root)
        assert_same(target.state(), full.state())


def test_requirement_06_an_adapter_needs_its_configuration_and_parameters(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="peft_config"):
        manager.save_checkpoint(Trained(1, build_lora).model, str(tmp_path / "w"), checkpointing_cfg={"is_peft": True})
    with pytest.raises(ConfigError, match=r"nemo_automodel's PeftConfig.*found peft\..*LoraConfig"):
        manager.save_checkpoint(
            Trained(1, build_lora).model,
            str(tmp_path / "w"),
            checkpointing_cfg={},
            lora_enabled=True,
            peft_config=LoraConfig(target_modules=["wide"]),
        )
    with pytest.raises(ConfigError, match="LoRA parameters"):
        manager.save_checkpoint(Odd(), str(tmp_path / "w"), checkpointing_cfg={}, lora_enabled=True, peft_config=PEFT)
    assert not (tmp_path / "w").exists()


def test_an_adapter_comes_back_and_the_base_stays(manager: AutomodelCheckpointManager, tmp_path: Path) -> None:
    source, target = Trained(1, build_lora), Trained(2, build_lora)
    base = copy.deepcopy({n: v for n, v in target.model.state_dict().items() if "lora_" not in n})
    manager.save_checkpoint(
        source.model,
        str(tmp_path / "w"),
        source.optimizer,
        str(tmp_path / "o"),
        source.scheduler,
        checkpointing_cfg={},
        lora_enabled=True,
        peft_config=PEFT,
    )
    manager.load_checkpoint(target.model, str(tmp_path / "w"), target.optimizer, str(tmp_path / "o"), target.scheduler)
    found = target.model.state_dict()
    assert_same({n: v for n, v in found.items() if "lora_" not in n}, base)
    expected = source.model.state_dict()
    assert sum("lora_" in n for n in expected) == 2
    assert_same({n: v for n, v in found.items() if "lora_" in n}, {n: v for n, v in expected.items() if "lora_" in n})
    assert_same(target.optimizer.state_dict(), source.optimizer.state_dict())


def test_requirement_07_an_adapter_and_a_full_model_in_one_place_are_refused(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    save(manager, Trained(1), tmp_path, model_save_format="torch_save")
    target = Trained(2)
    before = target.state()
    save_file({"x": torch.ones(1)}, tmp_path / "weights/model/adapter_model.safetensors")
    with pytest.raises(LayoutError):
        load(manager, target, tmp_path)
    (tmp_path / "weights/model/adapter_model.safetensors").unlink()
    save_file({"x": torch.ones(1)}, tmp_path / "weights/model/model.safetensors")
    with pytest.raises(LayoutError):
        load(manager, target, tmp_path)
    assert_same(target.state(), before)


@pytest.mark.parametrize("save_format", FORMATS)
def test_requirement_07_a_name_with_adapter_in_it_is_only_a_name(
    manager: AutomodelCheckpointManager, tmp_path: Path, save_format: str
) -> None:
    source, target, root = Trained(1), Trained(2), tmp_path / "lora-adapter"
    save(manager, source, root, model_save_format=save_format)
    (root / "weights/model/adapter_notes.txt").write_text("of a full model")
    load(manager, target, root)
    assert_same(target.state(), source.state())


def test_requirement_08_an_adapter_must_match_the_models_own(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    manager.save_checkpoint(
        Trained(1, build_lora).model, str(tmp_path / "w"), checkpointing_cfg={}, lora_enabled=True, peft_config=PEFT
    )
    with pytest.raises(KeyMismatchError, match="unexpected tensor"):
        manager.load_checkpoint(Odd(), str(tmp_path / "w"))
    path = tmp_path / "w/model/adapter_model.safetensors"
    tensors = load_file(path)
    tensors["base_model.model.other.lora_A.weight"] = tensors.pop("base_model.model.wide.lora_A.weight")
    save_file(tensors, path)
    (tmp_path / "w/model/ckpt_record.json").unlink()
    with pytest.raises(KeyMismatchError, match=r"missing tensor \(1\)"):
        manager.load_checkpoint(Trained(2, build_lora).model, str(tmp_path / "w"))
