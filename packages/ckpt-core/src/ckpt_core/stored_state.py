"""Read from its metadata what a checkpoint holds, and refuse one that is not whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError, KeyMismatchError, LayoutError, LoadError
from ckpt_core.key_check import GROUPS_PREFIX, Entry, NamedState
from ckpt_core.layout import CheckpointLayout
from ckpt_core.reader import CheckpointReader, open_checkpoint
from ckpt_core.record import read_record
from ckpt_core.staging import recover
from ckpt_core.stored_objects import read_objects
from ckpt_core.stream import tensors_equal


@dataclass(frozen=True, slots=True)
class StoredState:
    """One complete directory of a checkpoint."""

    path: Path
    layout: CheckpointLayout
    state: NamedState
    save_id: str | None
    """The same in every directory of one save; None where another tool wrote it."""
    options: Mapping[str, object]
    """Values of an optimizer's `param_groups`, by stored name."""


def read_stored_state(directory: Path) -> StoredState:
    """Read names, shapes, dtypes and objects of a checkpoint directory; no tensor bytes.

    A replacement that was interrupted is undone first.

    Raises:
        CheckpointNotFoundError: If the directory does not exist.
        CorruptCheckpointError: If it is not complete, with everything that is wrong.
        UnsafePickleError: If loading an object would run code.
    """
    reader = _open_complete(directory)
    for spec in reader.tensors.values():
        for chunk in spec.chunks:
            # A damaged header would otherwise be met when half of the model is loaded.
            reader.locate(spec, chunk)
    options = {name: value for name, value in read_objects(reader).items() if name.startswith(GROUPS_PREFIX)}
    record = read_record(directory)
    tensors = {fqn: Entry(spec.dtype, spec.shape) for fqn, spec in reader.tensors.items()}
    state = NamedState(tensors, frozenset(reader.objects))
    return StoredState(directory, reader.layout, state, record.save_id if record else None, options)


def require_same_save(model: StoredState, optimizer: StoredState) -> None:
    """Refuse a model and an optimizer that two different saves wrote.

    Raises:
        CorruptCheckpointError: If both name a save and the two differ.
    """
    if model.save_id and optimizer.save_id and model.save_id != optimizer.save_id:
        raise CorruptCheckpointError(
            f"{model.path} was written by save {model.save_id}, {optimizer.path} by save {optimizer.save_id}; "
            "expected one save; a save was interrupted, or only one part was saved again: load the model "
            "alone, or take another checkpoint"
        )


def require_same_id(stored: StoredState) -> None:
    """Refuse a directory that was replaced since it was read.

    Raises:
        LoadError: If its record names another save now.
    """
    record = read_record(stored.path)
    if (record.save_id if record else None) != stored.save_id:
        raise LoadError(
            f"{stored.path}: was replaced by another save while it was loaded, so what was loaded may be of both; "
            "load it again"
        )


def require_equal_head(directory: Path, head: str, embedding: str) -> None:
    """Refuse a stored head that a model with tied embeddings would lose.

    Raises:
        KeyMismatchError: If the stored bytes of the two differ.
    """
    reader = _open_complete(directory)
    if embedding in reader.tensors and tensors_equal(reader, head, embedding):
        return
    raise KeyMismatchError(
        f"{directory}: holds {head!r} with other values than {embedding!r}, expected them to be equal because the "
        "model ties them; load it into a model with tie_word_embeddings=False"
    )


def _open_complete(directory: Path) -> CheckpointReader:
    recover(directory)
    if not directory.exists():
        raise CheckpointNotFoundError(f"{directory}: expected a checkpoint directory, found nothing")
    reader = open_checkpoint(directory)
    if reader.path.resolve() != directory.resolve():
        raise LayoutError(f"{directory}: expected a checkpoint in it, found one at {reader.path}; name that directory")
    problems = [problem for problem in reader.check() if problem.severity == "error"]
    if problems:
        raise CorruptCheckpointError(f"{directory}: is not a complete checkpoint; take another one", problems=problems)
    return reader
