"""transformers opens what was converted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ckpt_convert import convert
from testbed.sharded import Cut, cut_columns, cut_rows, save_dcp
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    # Parameters only: a loader computes the buffers of rotary embeddings anew, in float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


@pytest.mark.parametrize("shard_size", ["one file", "several files"])
@pytest.mark.parametrize("cut", [cut_rows(4), cut_columns(4)], ids=["rows", "columns"])
def test_transformers_opens_the_result_with_equal_logits(
    tmp_path: Path, model: LlamaForCausalLM, cut: Cut, shard_size: str
) -> None:
    source = save_dcp(tmp_path / "dcp", {"model": model.state_dict()}, ranks=4, cut=cut)
    model.save_pretrained(tmp_path / "base")
    limit = 10**9 if shard_size == "one file" else 20_000
    convert(source, tmp_path / "out", assets=tmp_path / "base", max_shard_size=limit)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    ids = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert AutoConfig.from_pretrained(tmp_path / "out").vocab_size == 97
    assert loaded.dtype == torch.bfloat16
