"""A model folder as one gets it from a hub, made on the spot."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "a checkpoint is the model that is left when the job is over"


def make_base_model(folder: Path) -> None:
    """Write an untrained Llama and a tokenizer of whole words."""
    _make_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def _make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))  # noqa: S106  a token of text
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([TEXT], trainers.WordLevelTrainer(special_tokens=["<unk>"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")  # noqa: S106  as above


def read_tokens(folder: Path) -> torch.Tensor:
    """Tokenize `TEXT` with the tokenizer of a model folder; int64 of shape (1, words)."""
    tokens: torch.Tensor = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    return tokens


@torch.no_grad()
def compute_logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Compute float32 logits of shape (1, words, vocabulary)."""
    logits: torch.Tensor = model.eval()(input_ids=tokens).logits
    return logits
