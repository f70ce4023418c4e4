"""Is everything there that was saved? The record that a writer left can tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpt_core.errors import Problem
from ckpt_core.record import TensorRecord
from ckpt_core.spec import TensorSpec


def compare_with_record(tensors: Mapping[str, TensorSpec], recorded: Mapping[str, TensorRecord]) -> Iterator[Problem]:
    """Yield every difference between the tensors that are there and those that were recorded."""
    for fqn, record in recorded.items():
        spec = tensors.get(fqn)
        if spec is None:
            yield Problem("missing_tensor", fqn, f"recorded as {record.dtype} {list(record.shape)}, not there")
            continue
        if spec.dtype != record.dtype:
            yield Problem("dtype", fqn, f"recorded as {record.dtype}, found {spec.dtype}")
        if spec.shape != record.shape:
            yield Problem("shape", fqn, f"recorded as {list(record.shape)}, found {list(spec.shape)}")
    for fqn in tensors:
        if fqn not in recorded:
            yield Problem("unexpected_tensor", fqn, "there, but not in the record of its directory")
