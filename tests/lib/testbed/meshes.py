"""Shapes of rank meshes, and the device meshes that a sharded model lives on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True, slots=True)
class MeshShape:
    """How many ranks there are and what each dimension does."""

    dp: int = 1
    tp: int = 1
    ep: int = 1
    """Expert parallel size; it divides the data parallel ranks and adds none."""

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.dp * self.tp

    def __str__(self) -> str:
        return f"dp{self.dp}tp{self.tp}" + (f"ep{self.ep}" if self.ep > 1 else "")


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
