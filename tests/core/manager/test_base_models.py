"""The weights that training starts from."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from ckpt_core import automodel_compat as compat
from ckpt_core.errors import (
    KeyMismatchError,
    LayoutError,
)
from ckpt_core.manager import AutomodelCheckpointManager
from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules
from testbed.single_rank import (
    assert_same,
    build_llama,
)
from transformers import LlamaForCausalLM

pytestmark = pytest.mark.compat


def _cache(root: Path, model: LlamaForCausalLM) -> str:
    """Lay out a hub cache that holds `model` as org/tiny."""
    snapshot = root / "models--org--tiny" / "snapshots" / "0123"
    model.save_pretrained(snapshot)
    return str(root)


def test_requirement_04_of_several_snapshots_the_current_one_is_taken(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    cache, old = _cache(tmp_path, build_llama(seed=1)), tmp_path / "models--org--tiny" / "snapshots" / "9999"
    current = build_llama(seed=2)
    current.save_pretrained(old)
    model = build_llama(seed=3)
    with pytest.raises(LayoutError, match=r"2 snapshots.*0123.*9999"):
        manager.load_base_model(model, "org/tiny", hf_cache_dir=cache)
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("9999")
    manager.load_base_model(model, "org/tiny", hf_cache_dir=cache)
    assert_same(model.state_dict(), current.state_dict())


def test_requirement_04_a_base_model_is_found_in_the_hub_cache_without_cuda(
    manager: AutomodelCheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = build_llama(seed=1)
    monkeypatch.setattr(compat, "HF_HUB_CACHE", _cache(tmp_path, base))
    model = build_llama(seed=2)
    manager.load_base_model(model, "org/tiny")
    assert_same(model.state_dict(), base.state_dict())
    assert next(model.parameters()).device.type == "cpu"


def test_requirement_05_a_model_on_meta_is_filled(manager: AutomodelCheckpointManager, tmp_path: Path) -> None:
    base = build_llama(seed=1)
    base.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = LlamaForCausalLM(base.config)
    manager.load_base_model(model, str(tmp_path))
    assert_same(model.state_dict(), base.state_dict())
    tokens = torch.arange(8)[None]
    assert_same(model.eval()(tokens).logits, base.eval()(tokens).logits)


def test_requirement_05_a_base_model_is_loaded_under_an_adapter(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    base = build_llama(seed=1)
    base.save_pretrained(tmp_path)
    model = build_llama(seed=2)
    peft = PeftConfig(target_modules=["*q_proj"], dim=2, alpha=4, use_triton=False)
    apply_lora_to_linear_modules(model, peft)
    manager.load_base_model(model, str(tmp_path), peft_init_method="xavier")
    state = model.state_dict()
    assert_same({name: state[name] for name in base.state_dict()}, dict(base.state_dict()))
    lora_b = [value for name, value in state.items() if "lora_B" in name]
    assert lora_b
    assert not any(value.any() for value in lora_b)


def test_requirement_05_a_base_model_that_is_not_here_is_named(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="'org/absent'.*" + re.escape(str(tmp_path))):
        manager.load_base_model(build_llama(), "org/absent", hf_cache_dir=str(tmp_path))


def test_requirement_05_a_base_model_that_lacks_parameters_is_refused(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    build_llama(tied=True, seed=1).save_pretrained(tmp_path)
    model = build_llama(seed=2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyMismatchError, match=r"lm_head\.weight"):
        manager.load_base_model(model, str(tmp_path))
    assert_same(model.state_dict(), before)


def test_requirement_05_a_head_that_a_tied_model_would_lose_is_refused(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    build_llama(seed=1).save_pretrained(tmp_path)
    with pytest.raises(KeyMismatchError, match=r"lm_head\.weight.*embed_tokens"):
        manager.load_base_model(build_llama(tied=True, seed=2), str(tmp_path))
