"""The models of the matrix by name, and what each can do."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from testbed import dense, experts, lora, odd
from testbed.meshes import Meshes
from testbed.values import MeshShape


class Architecture(Protocol):
    """A tiny model that can be built whole, sharded, and trained.

    A global batch has a row for each rank, or a multiple, so that all ranks have equal parts.
    """

    @property
    def peft_config(self) -> Any:  # noqa: ANN401  Automodel's type is not typed
        """The adapters' configuration, or None where all of the model trains."""

    def build(self, seed: int) -> nn.Module:
        """Build the whole model; every value depends on the seed, and is the same on all ranks."""

    def shard(self, model: nn.Module, shape: MeshShape) -> Meshes:
        """Shard the model in place; a single rank is left plain."""

    def draw_batch(self, seed: int) -> torch.Tensor:
        """Return the global batch of a seed."""

    def compute_loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch, 0-dim."""


ARCHITECTURES: dict[str, Architecture] = {
    "llama": dense.LLAMA,
    "qwen2_tied": dense.QWEN2_TIED,
    "odd": odd.ODD,
    "uneven_twice": odd.UNEVEN,
    "lora_llama": lora.LORA_LLAMA,
    "lora_qwen3_moe": lora.LORA_QWEN3_MOE,
    "deepseek_v3": experts.DEEPSEEK_V3,
    "qwen3_moe": experts.QWEN3_MOE,
}
