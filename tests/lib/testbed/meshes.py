"""The device meshes that a sharded model lives on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from testbed.values import MeshShape


@dataclass(frozen=True, slots=True)
class Meshes:
    """The device meshes of a run, as the checkpoint manager takes them."""

    dp: DeviceMesh
    tp: DeviceMesh
    moe: DeviceMesh | None = None


def build_meshes(shape: MeshShape) -> Meshes:
    """Lay the ranks of the default group out as (dp, tp)."""
    mesh = init_device_mesh("cpu", (shape.dp, shape.tp), mesh_dim_names=("dp", "tp"))
    return Meshes(mesh["dp"], mesh["tp"])


def take_slice(batch: torch.Tensor, meshes: Meshes) -> torch.Tensor:
    """Return this rank's equal part of a global batch, along the first dimension."""
    return batch.chunk(meshes.dp.size())[meshes.dp.get_local_rank()]
