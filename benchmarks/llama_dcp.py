"""Write a Llama-shaped bf16 DCP as 4 ranks would; run in a process of its own, because it needs torch."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from testbed.sharded import cut_columns, cut_rows, save_dcp

HIDDEN, KEY_VALUE, INNER, VOCABULARY = 2048, 256, 5632, 32000
LAYER: dict[str, tuple[int, ...]] = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEY_VALUE, HIDDEN),
    "self_attn.v_proj": (KEY_VALUE, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
RANKS = 4


def list_shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """List the tensors of a Llama with as many layers as come nearest to `nbytes` in bf16."""
    ends = {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,)}
    per_layer = sum(torch.Size(shape).numel() for shape in LAYER.values())
    layers = round((nbytes / 2 - 2 * VOCABULARY * HIDDEN) / per_layer)
    return ends | {f"model.layers.{i}.{name}": shape for i in range(max(1, layers)) for name, shape in LAYER.items()}


def main(path: str, nbytes: str, cut: str) -> None:
    """Save under `path` about `nbytes` of tensors, cut by "rows" or "columns"."""
    shapes = list_shapes(int(nbytes))
    # One tensor for each shape: memory stays small, and what the bytes are does not matter here.
    tensors = {shape: torch.randn(shape).to(torch.bfloat16) for shape in set(shapes.values())}
    state = {f"{name}.weight": tensors[shape] for name, shape in shapes.items()}
    save_dcp(Path(path), state, ranks=RANKS, cut=cut_columns(RANKS) if cut == "columns" else cut_rows(RANKS))


if __name__ == "__main__":
    main(*sys.argv[1:])
