"""A training run of a tiny model: deterministic steps, and snapshots of all that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler, StepLR

from testbed.architectures import ARCHITECTURES, Architecture
from testbed.meshes import Meshes, take_slice
from testbed.values import MeshShape

Snapshot = dict[str, torch.Tensor | str]
"""Full tensors, and other values as text, under `model.`, `optimizer.` and `scheduler.` names."""


@dataclass(frozen=True, slots=True)
class Run:
    """A sharded model with its optimizer and scheduler."""

    architecture: Architecture
    meshes: Meshes
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    keys: list[str]
    """Names in the state dict of the whole model, taken before it was sharded."""

    @property
    def is_peft(self) -> bool:
        """Whether only adapters train and are saved."""
        return self.architecture.peft_config is not None


def start_run(name: str, shape: MeshShape, seed: int) -> Run:
    """Build a model from a seed on all ranks, shard it, and give it AdamW and a step schedule."""
    architecture = ARCHITECTURES[name]
    model = architecture.build(seed)
    keys = list(model.state_dict())
    meshes = architecture.shard(model, shape)
    optimizer = torch.optim.AdamW(_group_parameters(model), lr=1e-2, foreach=False)
    return Run(architecture, meshes, model, optimizer, StepLR(optimizer, step_size=2, gamma=0.5), keys)


def _group_parameters(model: nn.Module) -> list[dict[str, object]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    groups: list[dict[str, object]] = [{"params": matrices, "weight_decay": 0.1}]
    return [*groups, {"params": others, "weight_decay": 0.0, "lr": 2e-2}] if others else groups


def train_steps(run: Run, count: int, first_seed: int) -> list[float]:
    """Train on `count` global batches and return the loss of each, averaged over the global batch."""
    return [_train_step(run, run.architecture.draw_batch(first_seed + step)) for step in range(count)]


def _train_step(run: Run, batch: torch.Tensor) -> float:
    run.optimizer.zero_grad()
    loss = run.architecture.compute_loss(run.model, take_slice(batch, run.meshes))
    torch.autograd.backward(loss)
    _average_plain_gradients(run)
    _average_expert_gradients(run)
    run.optimizer.step()
    run.scheduler.step()
    return _average(loss.detach(), run.meshes).item()


def _average_plain_gradients(run: Run) -> None:
    """Do for parameters outside of fully_shard what it does for its own."""
    for parameter in run.model.parameters():
        if parameter.grad is not None and not isinstance(parameter, DTensor):
            parameter.grad.copy_(_average(parameter.grad, run.meshes))


def _average_expert_gradients(run: Run) -> None:
    """Divide the experts' gradients as Automodel's recipes do.

    A group of ep ranks shares its experts, whose gradients are summed over its rows but
    averaged over ep_shard only. AdamW hides a wrong factor until its state goes to another mesh.
    """
    if run.meshes.moe is None:
        return
    factor = run.meshes.dp.size() / run.meshes.moe["ep_shard"].size()
    for parameter in run.model.parameters():
        if parameter.grad is not None and _is_expert(parameter):
            parameter.grad.div_(factor)


def _is_expert(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())


def _average(value: torch.Tensor, meshes: Meshes) -> torch.Tensor:
    total = value.clone()
    dist.all_reduce(total, group=meshes.dp.get_group())
    return total / meshes.dp.size()


def take_snapshot(run: Run) -> Snapshot:
    """Gather everything that a checkpoint must bring back; every rank must call, every rank gets it."""
    snapshot: Snapshot = {f"model.{name}": gather(tensor) for name, tensor in run.model.state_dict().items()}
    for name, value in _list_optimizer_values(run):
        snapshot[f"optimizer.{name}"] = gather(value) if isinstance(value, torch.Tensor) else repr(value)
    for name, value in run.scheduler.state_dict().items():
        snapshot[f"scheduler.{name}"] = repr(value)
    return snapshot


def _list_optimizer_values(run: Run) -> Iterator[tuple[str, object]]:
    """List the optimizer's state and settings by parameter name, whatever their order in the groups."""
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    for group in run.optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            name = names[parameter]
            yield from ((f"{name}.group.{key}", value) for key, value in sorted(settings.items()))
            yield from ((f"{name}.{key}", value) for key, value in sorted(run.optimizer.state[parameter].items()))


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the whole tensor; collective where it is sharded."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def compare_snapshots(expected: Mapping[str, torch.Tensor | str], found: Mapping[str, torch.Tensor | str]) -> list[str]:
    """Return one line for each name that is missing, unexpected, or not the same bit for bit."""
    lines = [f"{name}: missing" for name in expected.keys() - found.keys()]
    lines += [f"{name}: unexpected" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        if not _is_same(expected[name], found[name]):
            lines.append(f"{name}: expected {_describe(expected[name])}, found {_describe(found[name])}")
    return sorted(lines)


def _is_same(expected: torch.Tensor | str, found: torch.Tensor | str) -> bool:
    if isinstance(expected, str) or isinstance(found, str):
        return expected == found
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return False
    # Bits, so that -0.0 is not 0.0 and a NaN equals itself.
    return expected.contiguous().flatten().view(torch.uint8).equal(found.contiguous().flatten().view(torch.uint8))


def _describe(value: torch.Tensor | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value.dtype} {tuple(value.shape)} {value.flatten()[:3].tolist()}"


def write_snapshot(snapshot: Snapshot, path: Path) -> None:
    """Write a snapshot, on rank 0 only, and let every rank wait for it."""
    if dist.get_rank() == 0:
        torch.save(snapshot, path)
    dist.barrier()


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot back."""
    snapshot: Snapshot = torch.load(path, weights_only=True)
    return snapshot
