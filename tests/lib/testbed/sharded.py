"""Checkpoints as several ranks would write them, made in one process by torch's own planners and writers.

Every byte on disk comes from torch: the plans of all ranks go through `DefaultSavePlanner`
(replicas deduplicated, coverage validated) and each rank's plan through the storage writer,
just as `dcp.save` does it. Only the collectives are left out.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank holds of a tensor of global shape `shape`."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


Cut = Callable[[str, torch.Tensor], Sequence[int]]
"""Number of cuts per dimension for a tensor: `(2, 4)` gives 8 chunks, `()` a replicated tensor."""


def cut_rows(ranks: int) -> Cut:
    """Cut dimension 0 of every tensor that has one, as FSDP2 does."""
    return lambda _fqn, tensor: (ranks,) if tensor.dim() else ()


def cut_columns(ranks: int) -> Cut:
    """Cut dimension 1 where there is one; other tensors are replicated."""
    return lambda _fqn, tensor: (1, ranks) if tensor.dim() > 1 else ()


def split_tensor(tensor: torch.Tensor, cuts: Sequence[int]) -> list[Piece]:
    """Cut a tensor as DTensor's `Shard` does per dimension: uneven and empty pieces included.

    An empty piece lies at the end of its dimension, and is written like any other.
    """
    spans = [_spans(size, n) for size, n in zip(tensor.shape, cuts, strict=False)]
    pieces = []
    for box in product(*spans):
        part = tensor
        for dim, (start, length) in enumerate(box):
            part = part.narrow(dim, start, length)
        offsets = (*(start for start, _ in box), *(0 for _ in tensor.shape[len(box) :]))
        pieces.append(Piece(part, offsets, tuple(tensor.shape)))
    return pieces


def _spans(size: int, cuts: int) -> list[tuple[int, int]]:
    step = max(1, math.ceil(size / cuts))
    return [(min(i * step, size), max(0, min(step, size - i * step))) for i in range(cuts)]


def save_dcp(path: Path, state: Mapping[str, Any], *, ranks: int = 2, cut: Cut | None = None) -> Path:
    """Write `state` (nested dicts allowed) as a DCP of `ranks` ranks.

    Args:
        path: Directory to write.
        state: Full tensors and objects; tensors are cut by `cut`.
        ranks: Number of ranks, hence of `.distcp` files (a rank with nothing to save writes an empty one).
        cut: How to cut each tensor; rows by default. A tensor cut into fewer pieces than
            ranks is whole or replicated on the others, and stored once.
    """
    _write(FileSystemWriter(path, sync_files=False), state, ranks, cut or cut_rows(ranks))
    return path


def save_sharded_safetensors(path: Path, state: Mapping[str, Any], *, ranks: int = 2, cut: Cut | None = None) -> Path:
    """Write `state` as `shard-*-model-*.safetensors`, one file per rank, as torch's Hugging Face writer does."""
    path.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
    _write(writer, state, ranks, cut or cut_rows(ranks))
    return path


class _RankPlanner(DefaultSavePlanner):
    """Plans the pieces of one rank; everything else is planned as torch plans it."""

    def create_local_plan(self) -> SavePlan:
        pieces = {fqn: v for fqn, v in self.state_dict.items() if isinstance(v, Piece)}
        others = {fqn: v for fqn, v in self.state_dict.items() if not isinstance(v, Piece)}
        plan = create_default_local_save_plan(others, self.is_coordinator)
        items = [*plan.items, *(_plan_piece(fqn, piece) for fqn, piece in pieces.items())]
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> object:
        value = self.state_dict[index.fqn]
        return value.tensor if isinstance(value, Piece) else value


def _plan_piece(fqn: str, piece: Piece) -> WriteItem:
    offsets = torch.Size(piece.offsets)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets, piece.tensor.size()),
        properties=TensorProperties.create_from_tensor(piece.tensor),
        size=torch.Size(piece.shape),
    )
    return WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)


def _write(writer: FileSystemWriter, state: Mapping[str, Any], ranks: int, cut: Cut) -> None:
    planners = [_RankPlanner() for _ in range(ranks)]
    for rank, planner in enumerate(planners):
        planner.set_up_planner(_rank_state(state, rank, cut, ""), is_coordinator=rank == 0)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    writer.set_up_storage_writer(is_coordinator=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint", category=UserWarning)
        plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    results = [
        writer.write_data(planner.finish_plan(replace(plan, planner_data=None)), planner).value()
        for plan, planner in zip(plans, planners, strict=True)
    ]
    writer.finish(metadata, results)


def _rank_state(state: Mapping[str, Any], rank: int, cut: Cut, prefix: str) -> dict[str, Any]:
    """Return the part of `state` that `rank` holds; tensors without a piece for it are left out."""
    local: dict[str, Any] = {}
    for key, value in state.items():
        fqn = f"{prefix}{key}"
        if isinstance(value, dict):
            local[key] = _rank_state(value, rank, cut, f"{fqn}.")
        elif isinstance(value, torch.Tensor):
            local.update(_rank_piece(key, value, rank, cut(fqn, value)))
        else:
            local[key] = value
    return local


def _rank_piece(key: str, tensor: torch.Tensor, rank: int, cuts: Sequence[int]) -> dict[str, torch.Tensor | Piece]:
    if not cuts:
        return {key: tensor}
    pieces = split_tensor(tensor, cuts)
    return {key: pieces[rank]} if rank < len(pieces) else {}
