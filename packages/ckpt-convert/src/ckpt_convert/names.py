"""Which entries of the source become tensors of the output, and under which names?

What wrappers and nesting put in front of a name comes off; everything else keeps its name.
Objects, module extra states and tensors that lie outside the model (an optimizer's, say) are
no weights: they are left out, and named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpt_core.errors import KeyMismatchError
from ckpt_core.key_mapping import find_canonical_names, is_extra_state
from ckpt_core.reader import CheckpointReader
from ckpt_core.terminal import escape_controls, list_some

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class NameChanges:
    """What became of every name of a source."""

    kept: Mapping[str, str]
    """Stored FQN of each tensor that is written, by its name in the output."""
    nest: tuple[str | int, ...]
    """Path in the saved state dict under which the model lies; `()` if at the top."""
    left_out: Mapping[str, tuple[str, ...]]
    """Stored FQNs of what is not written, by what it is."""

    @property
    def renamed(self) -> dict[str, str]:
        """Name in the output of each stored FQN that changed."""
        return {stored: fqn for fqn, stored in self.kept.items() if fqn != stored}

    def describe(self) -> list[str]:
        """Say it in a few lines for people, with examples."""
        lines = []
        if self.renamed:
            stored, fqn = next(iter(self.renamed.items()))
            nest = f"nesting under {'.'.join(map(str, self.nest))!r} and " if self.nest else ""
            example = escape_controls(f"{stored} -> {fqn}")
            lines.append(f"renamed: {len(self.renamed):,} tensors, {nest}wrapper prefixes taken off ({example})")
        lines += [f"left out: {len(names):,} {kind} ({_join(names)})" for kind, names in self.left_out.items() if names]
        return lines

    def list_all(self) -> Iterator[str]:
        """Say it in one line for each name that changed or is left out."""
        yield from (escape_controls(f"renamed: {stored} -> {fqn}") for stored, fqn in self.renamed.items())
        for kind, names in self.left_out.items():
            yield from (escape_controls(f"left out ({kind}): {name}") for name in names)

    def to_json(self) -> dict[str, object]:
        """Return every rename and everything left out as JSON values."""
        return {"renamed": self.renamed, "left_out": {kind: list(names) for kind, names in self.left_out.items()}}


def change_names(reader: CheckpointReader) -> NameChanges:
    """Decide about every name of `reader`.

    Raises:
        KeyMismatchError: Two tensors would get one name; `problems` lists them.
    """
    found = find_canonical_names(reader.tensors, reader.nesting)
    if found.problems:
        raise KeyMismatchError(
            f"{reader.path}: {len(found.problems)} names stand for several tensors each once wrapper prefixes and "
            "nesting come off; save one model, or save the models apart",
            problems=found.problems,
        )
    outside = frozenset(found.outside)
    extra = tuple(fqn for fqn in reader.tensors if fqn not in outside and is_extra_state(fqn))
    skipped = outside.union(extra)
    kept = {fqn: stored for stored, fqn in found.names.items() if stored not in skipped}
    left_out = {
        "objects": tuple(reader.objects),
        "tensors outside the model": found.outside,
        "module extra states": extra,
    }
    return NameChanges(kept, found.nest, left_out)


def _join(names: tuple[str, ...]) -> str:
    return escape_controls(", ".join(list_some(names, _SHOWN)))
