"""Is everything there that was saved? The record that a writer left can tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ckpt_core.errors import Problem
from ckpt_core.record import CheckpointRecord, TensorRecord, check_record
from ckpt_core.spec import TensorSpec


def compare_with_record(
    directory: Path, record: CheckpointRecord, tensors: Mapping[str, TensorSpec]
) -> Iterator[Problem]:
    """Yield every difference between a directory and its record: files, sizes, tensors, shapes, dtypes."""
    yield from check_record(directory, record)
    for fqn, recorded in record.tensors.items():
        yield from _compare_tensor(fqn, tensors.get(fqn), recorded)
    for fqn in tensors:
        if fqn not in record.tensors:
            yield Problem("unexpected_tensor", fqn, "there, but not in the record of its directory")


def _compare_tensor(fqn: str, spec: TensorSpec | None, recorded: TensorRecord) -> Iterator[Problem]:
    if spec is None:
        yield Problem("missing_tensor", fqn, f"recorded as {recorded.dtype} {list(recorded.shape)}, not there")
        return
    if spec.dtype != recorded.dtype:
        yield Problem("dtype", fqn, f"recorded as {recorded.dtype}, found {spec.dtype}")
    if spec.shape != recorded.shape:
        yield Problem("shape", fqn, f"recorded as {list(recorded.shape)}, found {list(spec.shape)}")
