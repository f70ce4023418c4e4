"""A model of everything that is unusual about a tensor: no dimension, too few rows, another dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from testbed.dense import scatter_values
from testbed.meshes import Meshes, build_meshes
from testbed.values import MeshShape


class OddNetwork(nn.Module):
    """Odd sizes, scalars, a parameter smaller than the mesh, and a bfloat16 part."""

    steps: torch.Tensor
    average: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rise = nn.Linear(6, 8)
        self.fall = nn.Linear(8, 6)
        self.narrow = nn.Linear(6, 5)
        self.uneven = nn.Linear(5, 7)
        self.coarse = nn.Linear(7, 7).to(torch.bfloat16)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.single = nn.Parameter(torch.ones(1))
        self.few = nn.Parameter(torch.ones(3))
        self.register_buffer("steps", torch.tensor(seed, dtype=torch.int64))
        self.register_buffer("average", torch.tensor(0.25))
        self.register_buffer("mask", torch.tensor([True, False, seed % 2 == 0]))
        self.register_buffer("scratch", torch.tensor(float(seed)), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map (n, 6) to (n, 7); the buffers follow the number of calls, not the data."""
        self.steps += 1
        self.average.mul_(0.9).add_(0.1 * self.steps)
        rows = rows + self.fall(torch.relu(self.rise(rows)))
        rows = self.uneven(self.narrow(rows))
        rows = self.coarse(rows.to(torch.bfloat16)).float()
        result: torch.Tensor = rows * self.scalar * self.single + self.few.sum()
        return result


class OddModel:
    """Builds, shards and trains an `OddNetwork`."""

    peft_config: Any = None

    def build(self, seed: int) -> nn.Module:
        """Build the whole model with values that depend on the seed."""
        torch.manual_seed(seed)
        model = OddNetwork(seed)
        scatter_values(model, seed)
        return model

    def shard(self, model: nn.Module, shape: MeshShape) -> Meshes:
        """Shard 7x5 by columns over tp and by rows over dp, unevenly both times.

        No dimension is sharded unevenly by both: torch 2.13 plans such a save wrongly.
        """
        meshes = build_meshes(shape)
        if shape.ranks == 1 or not isinstance(model, OddNetwork):
            return meshes
        if shape.tp > 1:
            plan = {
                "rise": ColwiseParallel(),
                "fall": RowwiseParallel(),
                "uneven": RowwiseParallel(input_layouts=Replicate()),
            }
            parallelize_module(model, meshes.tp, plan)
        # One group of fully_shard takes one dtype, and no scalars.
        fully_shard(model.coarse, mesh=meshes.dp)
        fully_shard(model, mesh=meshes.dp, ignored_params={model.scalar})
        return meshes

    def draw_batch(self, seed: int) -> torch.Tensor:
        """Return a global batch, float32 (4, 6)."""
        return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))

    def compute_loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the output."""
        loss: torch.Tensor = model(batch).square().mean()
        return loss


class UnevenModel:
    """Seven rows that tp and dp shard both: on (3, 2) ranks torch 2.13 computes wrong offsets for them."""

    peft_config: Any = None

    def build(self, seed: int) -> nn.Module:
        """Build one matrix, 7x6."""
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 7, bias=False))

    def shard(self, model: nn.Module, shape: MeshShape) -> Meshes:
        """Shard the rows over tp, then over dp."""
        meshes = build_meshes(shape)
        parallelize_module(model, meshes.tp, {"0": ColwiseParallel(output_layouts=Replicate())})
        fully_shard(model, mesh=meshes.dp)
        return meshes

    def draw_batch(self, seed: int) -> torch.Tensor:
        """Return a global batch, float32 (3, 6)."""
        return torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))

    def compute_loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the output."""
        loss: torch.Tensor = model(batch).square().mean()
        return loss


ODD = OddModel()
UNEVEN = UnevenModel()
