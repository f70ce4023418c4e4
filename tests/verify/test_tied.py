from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ckpt_core.reader import open_checkpoint
from ckpt_verify.tied import OUTPUT_OF_EMBEDDING, denies_tying, find_twin
from safetensors.torch import save_file


@pytest.mark.parametrize(("embedding", "output"), OUTPUT_OF_EMBEDDING.items())
def test_each_name_of_a_pair_finds_the_other(embedding: str, output: str) -> None:
    assert find_twin(output, {embedding, "x"}) == embedding
    assert find_twin(embedding, {output, "x"}) == output


@pytest.mark.parametrize("fqn", ["lm_head.bias", "model.lm_head.weight", "model.layers.0.weight"])
def test_other_names_have_no_twin(fqn: str) -> None:
    assert find_twin(fqn, {*OUTPUT_OF_EMBEDDING, *OUTPUT_OF_EMBEDDING.values()}) is None


def test_a_name_without_its_partner_has_no_twin() -> None:
    assert find_twin("lm_head.weight", {"output.weight"}) is None


@pytest.mark.parametrize("place", [".", ".hf_metadata"])
@pytest.mark.parametrize(
    ("config", "denied"),
    [
        ({"tie_word_embeddings": False}, True),
        ({"tie_word_embeddings": True}, False),
        ({}, False),
        ({"text_config": {"tie_word_embeddings": False}}, True),
        ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}, False),
        ({"text_config": None}, False),
        (["tie_word_embeddings"], False),
    ],
)
def test_only_a_config_that_says_so_denies_tying(tmp_path: Path, place: str, config: object, *, denied: bool) -> None:
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "config.json").write_text(json.dumps(config))
    assert denies_tying(tmp_path) is denied


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_config_that_cannot_be_read_denies_nothing(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    assert denies_tying(tmp_path) is False


def test_no_config_denies_nothing(tmp_path: Path) -> None:
    assert denies_tying(tmp_path) is False


def test_the_config_of_a_single_file_lies_beside_it(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    assert denies_tying(open_checkpoint(tmp_path / "model.safetensors").directory)
