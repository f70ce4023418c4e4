"""Objects of a checkpoint, read by torch's restricted unpickler and never by the other one.

Option values, counters and extra states are pickles inside the data files. torch's own
planner loads them without restriction, which runs whatever they hold.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ckpt_core.checkpoint_files import read_range
from ckpt_core.errors import CorruptCheckpointError, UnsafePickleError
from ckpt_core.reader import CheckpointReader


def read_objects(reader: CheckpointReader) -> dict[str, object]:
    """Read every object of a checkpoint.

    Raises:
        UnsafePickleError: If one needs a class that torch does not consider safe; nothing
            was executed.
        CorruptCheckpointError: If one cannot be read.
    """
    # Most options have the same value for every parameter, and then the same bytes.
    known: dict[bytes, object] = {}
    values: dict[str, object] = {}
    for fqn, spec in reader.objects.items():
        path = reader.directory / spec.stored.file
        data = read_range(path, spec.stored.offset, spec.stored.length)
        if data not in known:
            known[data] = _load(data, f"{path}: object {fqn!r}")
        values[fqn] = known[data]
    return values


def _load(data: bytes, what: str) -> object:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafePickleError(
            f"{what} holds what torch does not consider safe to load; nothing was executed. If you trust it, allow "
            f"its classes with torch.serialization.add_safe_globals. {_first_line(error)}"
        ) from None
    except (EOFError, RuntimeError, ValueError) as error:
        raise CorruptCheckpointError(f"{what} cannot be read: {_first_line(error)}; the file is damaged") from error


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


@contextmanager
def restrict_unpickling() -> Iterator[None]:
    """Make `torch.load` restricted for as long as somebody else's code loads, whatever it asks for."""
    load = torch.load

    def load_restricted(*args: Any, **options: Any) -> Any:  # noqa: ANN401  torch's own signature
        return load(*args, **(options | {"weights_only": True}))

    torch.load = load_restricted
    try:
        yield
    finally:
        torch.load = load
