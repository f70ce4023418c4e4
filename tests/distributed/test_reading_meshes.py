"""Checkpoints that real ranks save from DTensors on a 2x2 mesh, read back by one process."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ckpt_core.reader import open_checkpoint
from ckpt_core.stream import read_tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import spawn

pytestmark = pytest.mark.distributed

RANKS = 4


def make_full_state() -> dict[str, torch.Tensor]:
    """Make the tensors as one process would hold them; no two elements of one are equal."""
    shapes = {"both": (6, 8), "rows": (7, 3), "columns": (3, 9), "copies": (5,), "strided": (8, 4), "short": (1, 4)}
    return {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        for name, shape in shapes.items()
    } | {"up.weight": torch.arange(32.0).reshape(8, 4), "down.weight": torch.arange(32.0).reshape(4, 8) + 100}


def make_local_state() -> dict[str, object]:
    """Cut the tensors over the mesh, two of them by FSDP2 over tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements = {
        "both": (Shard(0), Shard(1)),
        "rows": (Shard(0), Replicate()),
        "columns": (Replicate(), Shard(1)),
        "copies": (Replicate(), Replicate()),
        "strided": (Shard(0), Shard(0)),
        "short": (Shard(0), Replicate()),
    }
    full = make_full_state()
    model = torch.nn.Sequential()
    model.add_module("up", torch.nn.Linear(4, 8, bias=False))
    model.add_module("down", torch.nn.Linear(8, 4, bias=False))
    model.load_state_dict({name: full[name] for name in ("up.weight", "down.weight")})
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return {n: distribute_tensor(full[n], mesh, p) for n, p in placements.items()} | dict(model.state_dict())


def save_on_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = make_local_state()
        save(state, storage_writer=FileSystemWriter(f"{folder}/flat"))
        save({"model": state, "step": 3}, storage_writer=FileSystemWriter(f"{folder}/nested"))
        save(state, storage_writer=HuggingFaceStorageWriter(f"{folder}/hf", save_distributed=True))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("mesh")
    (folder / "hf").mkdir()
    spawn(save_on_rank, (str(folder),), nprocs=RANKS)  # type: ignore[no-untyped-call]
    return folder


@pytest.mark.parametrize(("name", "prefix"), [("flat", ""), ("nested", "model.")])
def test_a_dcp_of_four_ranks_reads_back_bit_for_bit(folder: Path, name: str, prefix: str) -> None:
    reader = open_checkpoint(folder / name)
    assert reader.check() == []
    for fqn, tensor in make_full_state().items():
        assert torch.equal(read_tensor(reader, prefix + fqn), tensor), fqn
        assert reader.nesting[prefix + fqn] == ((fqn,) if not prefix else ("model", fqn))


def test_sharded_safetensors_of_four_ranks_read_back_bit_for_bit(folder: Path) -> None:
    reader = open_checkpoint(folder / "hf")
    assert [problem.kind for problem in reader.check()] == ["unproven"]
    for name, tensor in make_full_state().items():
        assert torch.equal(read_tensor(reader, name), tensor), name
