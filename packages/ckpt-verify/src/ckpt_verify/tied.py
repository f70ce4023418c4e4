"""Pairs of names that models of known families tie: two names of one tensor.

A checkpoint may store such a tensor once or twice. The pair is known by its names, never
from equal bytes alone, and a config.json that says the two are not tied is believed.
"""

from __future__ import annotations

import json
from pathlib import Path

from ckpt_core.checkpoint_files import read_whole
from ckpt_core.errors import CheckpointError

OUTPUT_OF_EMBEDDING: dict[str, str] = {
    "model.embed_tokens.weight": "lm_head.weight",
    "model.language_model.embed_tokens.weight": "lm_head.weight",
    "language_model.model.embed_tokens.weight": "language_model.lm_head.weight",
    "model.decoder.embed_tokens.weight": "lm_head.weight",
    "model.embeddings.weight": "lm_head.weight",
    "backbone.embeddings.weight": "lm_head.weight",
    "transformer.wte.weight": "lm_head.weight",
    "transformer.word_embeddings.weight": "lm_head.weight",
    "gpt_neox.embed_in.weight": "embed_out.weight",
    "shared.weight": "lm_head.weight",
    "tok_embeddings.weight": "output.weight",
}
"""Name of the input embedding -> name of the output layer, by model family."""


def find_twin(fqn: str, names: set[str]) -> str | None:
    """Return the name among `names` of the tensor that `fqn` may be tied to; None if there is none."""
    pairs = OUTPUT_OF_EMBEDDING.items()
    twins = [output for embedding, output in pairs if embedding == fqn]
    twins += [embedding for embedding, output in pairs if output == fqn]
    return next((twin for twin in twins if twin in names), None)


def denies_tying(directory: Path) -> bool:
    """Whether a config.json beside the weights in `directory` says that the embeddings are not tied.

    The top level decides; a model of several parts may say it in `text_config` only.
    """
    for place in (directory, directory / ".hf_metadata"):
        try:
            config = json.loads(read_whole(place / "config.json"))
        except (CheckpointError, ValueError, RecursionError):
            continue
        if isinstance(config, dict):
            return _find_flag(config) is False
    return False


def _find_flag(config: dict[str, object]) -> object:
    text = config.get("text_config")
    nested = text.get("tie_word_embeddings") if isinstance(text, dict) else None
    return config.get("tie_word_embeddings", nested)
