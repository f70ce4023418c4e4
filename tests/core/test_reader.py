from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ckpt_core.reader import open_checkpoint
from safetensors.torch import save_file
from testbed.sharded import save_dcp, save_sharded_safetensors

STATE = {"w": torch.arange(6.0).reshape(2, 3)}


def save_one_file(path: Path) -> Path:
    path.mkdir()
    save_file(STATE, path / "model.safetensors")
    return path / "model.safetensors"


def save_adapter(path: Path) -> Path:
    path.mkdir()
    save_file(STATE, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    return path


SAVERS: dict[str, Callable[[Path], Path]] = {
    "dcp": lambda path: save_dcp(path, STATE, ranks=2),
    "sharded": lambda path: save_sharded_safetensors(path, STATE, ranks=2),
    "a file of a sharded set": lambda path: next(save_sharded_safetensors(path, STATE, ranks=1).glob("*.safetensors")),
    "one file": save_one_file,
    "adapter": save_adapter,
}


@pytest.mark.parametrize("layout", SAVERS)
def test_the_names_of_files_are_relative_to_the_directory(tmp_path: Path, layout: str) -> None:
    reader = open_checkpoint(SAVERS[layout](tmp_path / "saved"))
    assert reader.directory == tmp_path / "saved"
    assert all((reader.directory / chunk.stored.file).is_file() for chunk in reader.tensors["w"].chunks)
