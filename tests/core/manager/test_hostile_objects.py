"""Pickles inside a checkpoint, which must not run."""

from __future__ import annotations

import dataclasses
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ckpt_core.errors import (
    UnsafePickleError,
)
from ckpt_core.manager import AutomodelCheckpointManager
from ckpt_core.stored_objects import restrict_unpickling
from testbed.single_rank import (
    Trained,
    assert_same,
    load,
    save,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

pytestmark = pytest.mark.compat


class _Hostile:
    """Unpickling it makes a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.proof,)


def _plant(directory: Path, value: object) -> str:
    """Put a pickle of `value` in the place of an object of a DCP; return its name."""
    metadata = FileSystemReader(directory).read_metadata()
    index = next(
        i for i in metadata.storage_data if isinstance(metadata.state_dict_metadata[i.fqn], BytesStorageMetadata)
    )
    place = metadata.storage_data[index]
    buffer = io.BytesIO()
    torch.save(value, buffer)
    path = directory / place.relative_path
    end = path.stat().st_size
    path.write_bytes(path.read_bytes() + buffer.getvalue())
    metadata.storage_data[index] = dataclasses.replace(place, offset=end, length=len(buffer.getvalue()))
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    (directory / "ckpt_record.json").unlink()
    return str(index.fqn)


def test_requirement_08_nothing_in_a_checkpoint_is_executed(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    save(manager, Trained(1), tmp_path)
    name = _plant(tmp_path / "optimizer/optim", _Hostile(tmp_path / "executed"))
    target = Trained(2)
    before = target.state()
    with pytest.raises(UnsafePickleError, match=re.escape(repr(name))):
        load(manager, target, tmp_path)
    assert_same(target.state(), before)
    assert not (tmp_path / "executed").exists()
    _Hostile(tmp_path / "executed").__reduce__()[0](tmp_path / "executed")
    assert (tmp_path / "executed").exists()


def test_objects_are_loaded_under_restriction_even_by_the_library(tmp_path: Path) -> None:
    torch.save(_Hostile(tmp_path / "executed"), tmp_path / "hostile.pt")
    with restrict_unpickling(), pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "hostile.pt", weights_only=False)
    assert not (tmp_path / "executed").exists()
