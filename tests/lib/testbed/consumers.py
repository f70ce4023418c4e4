"""What transformers and peft make of a checkpoint, beside the live model that it was saved from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer  # noqa: F401  patches DCP as in training
from torch import nn
from transformers import AutoModelForCausalLM

from testbed.architectures import ARCHITECTURES
from testbed.checkpoints import EXPECTED, LOADED_SEED, SAVED_SEED
from testbed.dense import LLAMA
from testbed.lora import BASE_SEED
from testbed.rank import RankContext
from testbed.training import read_snapshot
from testbed.values import Opened

_PROMPT_SEED = 700


def open_consolidated(_context: RankContext, name: str, root: Path) -> Opened:
    """Open a consolidated checkpoint with transformers."""
    directory = root / "consolidated" / "policy" / "weights" / "model" / "consolidated"
    opened, report = AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, local_files_only=True, trust_remote_code=False
    )
    return _compare_logits(opened, restore_model(name, root, LOADED_SEED), name, report)


def open_adapter(_context: RankContext, name: str, root: Path, base: Path) -> Opened:
    """Open an adapter with peft, over a base that transformers saved."""
    expected = restore_model(name, root, SAVED_SEED)
    LLAMA.build(BASE_SEED).save_pretrained(base)  # type: ignore[operator]
    model = AutoModelForCausalLM.from_pretrained(base, local_files_only=True)
    opened = peft.PeftModel.from_pretrained(model, str(root / "safetensors" / "policy" / "weights" / "model"))
    return _compare_logits(opened, expected, name, {})


def restore_model(name: str, root: Path, seed: int) -> nn.Module:
    """Rebuild the live model as it was when it was saved, whole, without any checkpoint."""
    model = ARCHITECTURES[name].build(seed)
    snapshot = read_snapshot(root / EXPECTED)
    state = {key: snapshot[f"model.{key}"] for key in model.state_dict()}
    model.load_state_dict(state, strict=True)
    return model


@torch.no_grad()
def _compare_logits(opened: nn.Module, expected: nn.Module, name: str, report: dict[str, Any]) -> Opened:
    tokens = ARCHITECTURES[name].draw_batch(_PROMPT_SEED)
    found = opened.eval()(input_ids=tokens).logits
    wanted = expected.eval()(input_ids=tokens).logits
    complaints = {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}
    return Opened(complaints, (found - wanted).abs().max().item(), wanted.abs().max().item())
