"""The makers of sharded checkpoints that other tests build on."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from testbed.sharded import Cut, cut_columns, cut_rows, save_dcp, split_tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

STATE = {
    "model": {"w": torch.arange(35.0).reshape(7, 5), "s": torch.tensor(2), "e": torch.empty(0, 3)},
    "two": torch.arange(2),
    "step": 5,
}


@pytest.mark.parametrize("cut", [cut_rows(1), cut_rows(4), cut_columns(4), lambda _n, t: (2, 2)[: t.dim()]])
def test_dcp_load_gives_back_what_was_saved(tmp_path: Path, cut: Cut) -> None:
    path = save_dcp(tmp_path / "d", STATE, ranks=4, cut=cut)
    target = {
        "model": {fqn: torch.full_like(tensor, 9) for fqn, tensor in STATE["model"].items()},  # type: ignore[attr-defined]
        "two": torch.zeros(2, dtype=torch.int64),
        "step": 0,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(target, checkpoint_id=path, no_dist=True)
    assert target["step"] == 5
    assert torch.equal(target["two"], STATE["two"])  # type: ignore[arg-type]
    assert all(torch.equal(target["model"][k], v) for k, v in STATE["model"].items())  # type: ignore[attr-defined, index]


def test_every_rank_writes_its_own_file(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "d", STATE, ranks=3)
    assert sorted(file.name for file in path.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "__2_0.distcp",
    ]


def test_pieces_are_uneven_and_empty_as_torch_cuts_them(tmp_path: Path) -> None:
    pieces = split_tensor(torch.arange(5), (4,))
    assert [piece.tensor.tolist() for piece in pieces] == [[0, 1], [2, 3], [4], []]
    assert [piece.offsets for piece in pieces] == [(0,), (2,), (4,), (5,)]
    path = save_dcp(tmp_path / "d", {"x": torch.arange(5)}, ranks=4)
    entry = FileSystemReader(path).read_metadata().state_dict_metadata["x"]
    assert isinstance(entry, TensorStorageMetadata)
    assert [tuple(chunk.sizes) for chunk in entry.chunks] == [(2,), (2,), (1,), (0,)]
