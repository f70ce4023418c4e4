"""Which entries of the source become tensors of the output, and under which names?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_core.reader import CheckpointReader

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class NameChanges:
    """What became of every name of a source."""

    kept: Mapping[str, str]
    """Stored FQN of each tensor that is written, by its name in the output."""
    left_out: Mapping[str, tuple[str, ...]]
    """Stored FQNs of what is not written, by what it is."""

    def describe(self) -> list[str]:
        """Say it in lines for people."""
        return [f"left out: {len(names):,} {kind} ({_join(names)})" for kind, names in self.left_out.items() if names]

    def to_json(self) -> dict[str, object]:
        """Return every rename and everything left out as JSON values."""
        renamed = {stored: fqn for fqn, stored in self.kept.items() if fqn != stored}
        return {"renamed": renamed, "left_out": {kind: list(names) for kind, names in self.left_out.items()}}


def change_names(reader: CheckpointReader) -> NameChanges:
    """TEMP"""
    kept = {(fqn[6:] if reader.nesting.get(fqn, ("",))[0]=="model" and len(reader.nesting[fqn])>1 else fqn): fqn for fqn in reader.tensors}
    return NameChanges(kept, {"objects": tuple(reader.objects)})


def _join(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
