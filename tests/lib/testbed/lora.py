"""Adapters of nemo_automodel on the other models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules
from torch import nn

from testbed.dense import LLAMA, CausalModel, compute_token_loss, draw_tokens, scatter_values
from testbed.experts import QWEN3_MOE, ExpertModel
from testbed.meshes import Meshes
from testbed.values import MeshShape

BASE_SEED = 1000


@dataclass(frozen=True, slots=True)
class LoraModel:
    """A decoder whose base is frozen under adapters; every seed has the same base."""

    base: CausalModel | ExpertModel
    peft_config: PeftConfig

    def build(self, seed: int) -> nn.Module:
        """Build the base, add adapters, and scatter the adapters' values by the seed."""
        model = self.base.build(BASE_SEED)
        apply_lora_to_linear_modules(model, self.peft_config)
        adapters = nn.ParameterList(parameter for parameter in model.parameters() if parameter.requires_grad)
        scatter_values(adapters, seed)
        return model

    def shard(self, model: nn.Module, shape: MeshShape) -> Meshes:
        """Shard as the base does."""
        return self.base.shard(model, shape)

    def draw_batch(self, seed: int) -> torch.Tensor:
        """Return a global batch of token ids."""
        return draw_tokens(seed)

    def compute_loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the batch."""
        return compute_token_loss(model, batch)


def _target(*modules: str) -> PeftConfig:
    # The memory-efficient variant fuses modules, and falls back to this one on DTensors.
    return PeftConfig(target_modules=[*modules], dim=4, alpha=8, use_memory_efficient_lora=False)


LORA_LLAMA = LoraModel(LLAMA, _target("*.q_proj", "*.o_proj", "*.up_proj"))
LORA_QWEN3_MOE = LoraModel(QWEN3_MOE, _target("*.q_proj", "*.o_proj", "*.experts"))
