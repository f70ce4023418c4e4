"""Dense causal language models of transformers, with tensor parallel plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from nemo_automodel.components.distributed.parallel_styles import translate_to_lora
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from testbed.meshes import Meshes, build_meshes
from testbed.values import MeshShape

BATCH = 4
LENGTH = 8
VOCABULARY = 64
# Every dimension is a multiple of 4, so that no mesh of up to four ranks shards one unevenly.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "dtype": "float32",
    "attn_implementation": "sdpa",
}


def scatter_values(model: nn.Module, seed: int) -> None:
    """Add noise to every parameter and persistent float buffer.

    Norms start as ones and biases as zeros in every model: a load that skips them would not show.
    """
    noise = torch.Generator().manual_seed(seed)
    held = [*model.parameters(), *_list_persistent_buffers(model)]
    with torch.no_grad():
        for tensor in held:
            if tensor.is_floating_point():
                tensor.add_(0.05 * torch.randn(tensor.shape, generator=noise).to(tensor.dtype))


def _list_persistent_buffers(model: nn.Module) -> list[torch.Tensor]:
    names = model.state_dict().keys()
    return [buffer for name, buffer in model.named_buffers() if name in names]


def draw_tokens(seed: int) -> torch.Tensor:
    """Return a global batch of token ids, int64 (BATCH, LENGTH)."""
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def compute_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next tokens."""
    logits = model(input_ids=tokens).logits[:, :-1]
    return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def plan_tensor_parallel(config: PretrainedConfig) -> dict[str, ParallelStyle]:
    """Return the usual plan: the first matrix of each pair by columns, the second by rows.

    Tied embeddings stay whole: distributing them would make two parameters of one.
    """
    plan: dict[str, ParallelStyle] = {}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"{prefix}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"{prefix}.{name}"] = RowwiseParallel()
    if not config.tie_word_embeddings:
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return plan


@dataclass(frozen=True, slots=True)
class CausalModel:
    """A decoder of transformers, trained in full."""

    model_class: type[PreTrainedModel]
    config: PretrainedConfig
    peft_config: None = None

    def build(self, seed: int) -> nn.Module:
        """Build the whole model with values that depend on the seed."""
        torch.manual_seed(seed)
        model: nn.Module = self.model_class(self.config)
        scatter_values(model, seed)
        return model

    def shard(self, model: nn.Module, shape: MeshShape) -> Meshes:
        """Apply tensor parallelism, then fully_shard layer by layer; one rank stays plain."""
        meshes = build_meshes(shape)
        if shape.ranks == 1:
            return meshes
        if shape.tp > 1:
            plan = plan_tensor_parallel(self.config)
            if any("lora_" in name for name, _ in model.named_parameters()):
                plan = {name: translate_to_lora(style) for name, style in plan.items()}
            parallelize_module(model, meshes.tp, plan)
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mesh=meshes.dp)
        fully_shard(model, mesh=meshes.dp)
        return meshes

    def draw_batch(self, seed: int) -> torch.Tensor:
        """Return a global batch of token ids."""
        return draw_tokens(seed)

    def compute_loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the batch."""
        return compute_token_loss(model, batch)


LLAMA = CausalModel(LlamaForCausalLM, LlamaConfig(**_SIZES, tie_word_embeddings=False))
QWEN2_TIED = CausalModel(Qwen2ForCausalLM, Qwen2Config(**_SIZES, tie_word_embeddings=True))
