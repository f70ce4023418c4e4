"""Which layout does a path hold?"""

from __future__ import annotations

from enum import StrEnum


class CheckpointLayout(StrEnum):
    """Arrangement of a checkpoint on disk."""

    DCP = "dcp"
    SAFETENSORS = "safetensors"
    SAFETENSORS_SHARDED = "safetensors-sharded"
    ADAPTER = "adapter"
    TORCH = "torch"
