"""What a running model or optimizer would write: names, shapes, dtypes and boxes.

Each rank describes its own part with DCP's own planner, so that what is checked is what
would be written. Merged over all ranks, the description answers two questions before a
byte moves: do the chunks tile every tensor exactly once, and which names will be stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from ckpt_core.coverage import Box, check_tiling
from ckpt_core.dtypes import torch_dtype_name
from ckpt_core.errors import Problem
from ckpt_core.key_check import Entry, NamedState


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor as a running job holds it, over one rank or over all."""

    entry: Entry
    boxes: frozenset[Box] = field(repr=False)
    """The chunks that would be written; identical ones of several ranks count once."""


@dataclass(frozen=True, slots=True)
class LiveState:
    """A state dict by stored name, and what is already wrong with it."""

    tensors: Mapping[str, LiveTensor]
    objects: frozenset[str]
    problems: tuple[Problem, ...] = ()

    @property
    def named(self) -> NamedState:
        """What a comparison with a checkpoint needs of it."""
        return NamedState({fqn: tensor.entry for fqn, tensor in self.tensors.items()}, self.objects)


def describe_state(state_dict: Mapping[str, Any]) -> LiveState:
    """Describe what this rank would write of `state_dict`.

    Args:
        state_dict: Possibly nested, as handed to `dcp.save`; DTensors of any placement.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state_dict), is_coordinator=True)
    tensors: dict[str, LiveTensor] = {}
    objects: set[str] = set()
    problems: list[Problem] = []
    for item in planner.create_local_plan().items:
        if item.tensor_data is None:
            objects.add(item.index.fqn)
            continue
        tensor = _live_tensor(item)
        known = tensors.get(item.index.fqn)
        tensors[item.index.fqn] = tensor if known is None else _join(known, tensor)
        problems += _check_local_shape(item, planner.state_dict[item.index.fqn])
    return LiveState(tensors, frozenset(objects), tuple(problems))


def merge_states(states: Iterable[LiveState]) -> LiveState:
    """Join the descriptions of all ranks; ranks that disagree on a tensor are a problem."""
    tensors: dict[str, LiveTensor] = {}
    objects: set[str] = set()
    problems: list[Problem] = []
    for state in states:
        objects |= state.objects
        problems += state.problems
        for fqn, tensor in state.tensors.items():
            known = tensors.setdefault(fqn, tensor)
            if known.entry != tensor.entry:
                message = f"ranks disagree: {known.entry} and {tensor.entry}"
                problems.append(Problem("shape", fqn, message))
            elif known is not tensor:
                tensors[fqn] = _join(known, tensor)
    return LiveState(tensors, frozenset(objects), tuple(dict.fromkeys(problems)))


def check_plan(state: LiveState) -> list[Problem]:
    """List the tensors whose chunks, over all ranks, do not tile their shape exactly once."""
    problems = list(state.problems)
    for fqn, tensor in state.tensors.items():
        problems += check_tiling(fqn, tensor.entry.shape, sorted(tensor.boxes))
    return problems


def _live_tensor(item: WriteItem) -> LiveTensor:
    data = item.tensor_data
    if data is None:
        raise TypeError(f"{item.index.fqn} is no tensor")
    dtype = torch_dtype_name(data.properties.dtype)
    shape, offsets, sizes = (_count_elements(dtype, n) for n in (data.size, data.chunk.offsets, data.chunk.sizes))
    return LiveTensor(Entry(dtype, shape), frozenset([(offsets, sizes)]))


def _count_elements(dtype: str, counts: Sequence[int]) -> tuple[int, ...]:
    """One element of torch's F4 dtype holds two, along the last dimension."""
    return (*counts[:-1], 2 * counts[-1]) if dtype == "F4" and counts else tuple(counts)


def _join(a: LiveTensor, b: LiveTensor) -> LiveTensor:
    return LiveTensor(a.entry, a.boxes | b.boxes)


def _check_local_shape(item: WriteItem, value: object) -> list[Problem]:
    """A DTensor made by `from_local` may hold other rows than its placements say."""
    if not isinstance(value, DTensor) or item.tensor_data is None:
        return []
    held = tuple(value.to_local().shape)
    planned = tuple(item.tensor_data.chunk.sizes)
    if held == planned or torch.Size(held).numel() == torch.Size(planned).numel() == 0:
        return []
    message = f"a rank holds a local shape {held} where placements {value.placements} imply {planned}"
    return [Problem("shape", item.index.fqn, message)]
