"""Checkpoints of other systems, told by file names, and the tool that is right for each."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForeignLayout:
    """A layout that is not read here."""

    name: str
    remedy: str


_VERL = ForeignLayout("verl FSDP, one file per rank", "merge it with `python -m verl.model_merger merge`")
_MEGATRON = ForeignLayout("Megatron", "export it to Hugging Face with Megatron-Bridge")
_ZERO = ForeignLayout("DeepSpeed ZeRO", "run the zero_to_fp32.py that DeepSpeed leaves beside it")

_VERL_FILE = re.compile(r"model_world_size_\d+_rank_\d+\.pt")
_ZERO_FILE = re.compile(r"(.*_)?zero_pp_rank_\d+_mp_rank_\d+_(model|optim)_states\.pt|mp_rank_\d+_model_states\.pt")
_MEGATRON_DIRECTORY = re.compile(r"mp_rank_\d+(_\d+)?(_\d+)?")


def find_foreign_layout(names: Collection[str]) -> ForeignLayout | None:
    """Recognise a directory of another system by the names of its entries; None if it is none."""
    if any(_VERL_FILE.fullmatch(name) for name in names):
        return _VERL
    if "zero_to_fp32.py" in names or any(_ZERO_FILE.fullmatch(name) for name in names):
        return _ZERO
    # A .metadata and .distcp files may be there too: Megatron builds on DCP, with classes of its own.
    if {"metadata.json", "common.pt"} <= set(names) or "latest_checkpointed_iteration.txt" in names:
        return _MEGATRON
    return _MEGATRON if any(_MEGATRON_DIRECTORY.fullmatch(name) for name in names) else None
