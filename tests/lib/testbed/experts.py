"""Automodel's own mixture-of-experts models, with expert parallel meshes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from nemo_automodel.components.distributed.config import FSDP2Config
from nemo_automodel.components.distributed.mesh import MeshContext, ParallelismSizes
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v3.model import DeepseekV3ForCausalLM
from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM
from nemo_automodel.components.moe.parallelizer import parallelize_model
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import DeepseekV3Config, PretrainedConfig, Qwen3MoeConfig

from testbed.dense import VOCABULARY, compute_token_loss, draw_tokens, scatter_values
from testbed.meshes import Meshes, build_meshes
from testbed.values import MeshShape

_CPU = torch.device("cpu")
_BACKEND = {
    "attn": "sdpa",
    "linear": "torch",
    "rms_norm": "torch",
    "rope_fusion": False,
    "experts": "torch",
    "dispatcher": "torch",
}
# The experts' inner size is neither the hidden size nor half of it: adapters on experts tell the
# two projections apart by their shapes.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "dtype": "float32",
}


@dataclass(frozen=True, slots=True)
class ExpertModel:
    """A mixture of eight experts."""

    model_class: Callable[..., Any]
    config: PretrainedConfig
    peft_config: None = None

    def build(self, seed: int) -> nn.Module:
        """Build the whole model with values that depend on the seed."""
        torch.manual_seed(seed)
        # The rotary embedding asks for the CUDA device at construction even where there is none.
        with mock.patch("torch.cuda.current_device", return_value=0):
            model = self.model_class(self.config, backend=BackendConfig(**_BACKEND))
        model.initialize_weights(buffer_device=_CPU, dtype=torch.float32)
        scatter_values(model, seed)
        whole: nn.Module = model
        return whole

    def shard(self, model: nn.Module, shape: MeshShape) -> Meshes:
        """Spread the experts over the ep ranks and everything over all ranks; one rank stays plain."""
        if shape.ranks == 1:
            return build_meshes(shape)
        context = MeshContext.build(FSDP2Config(), ParallelismSizes(ep_size=shape.ep))
        parallelize_model(
            model,
            context.device_mesh,
            context.moe_mesh,
            **context.parallelize_axis_kwargs(),
            # Automodel's default computes in bfloat16.
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32),
        )
        return Meshes(context.device_mesh["dp"], context.device_mesh["tp"], context.moe_mesh)

    def draw_batch(self, seed: int) -> torch.Tensor:
        """Return a global batch of token ids."""
        return draw_tokens(seed)

    def compute_loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the batch."""
        return compute_token_loss(model, batch)


QWEN3_MOE = ExpertModel(
    Qwen3MoeForCausalLM,
    Qwen3MoeConfig(
        **_SIZES,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        # An auxiliary loss depends on which rows share a rank, so on the mesh.
        router_aux_loss_coef=0.0,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    ),
)
DEEPSEEK_V3 = ExpertModel(
    DeepseekV3ForCausalLM,
    DeepseekV3Config(
        **_SIZES,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        tie_word_embeddings=False,
        architectures=["DeepseekV3ForCausalLM"],
    ),
)
