"""The outcome of comparing two checkpoints, as a value."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.errors import Problem
from ckpt_core.layout import CheckpointLayout


@dataclass(frozen=True, slots=True)
class ValueProblem(Problem):
    """A `Problem` of kind `value`: one tensor, of equal dtype and shape, with other elements."""

    index: tuple[int, ...]
    """Where the first differing element lies; `()` in a 0-dim tensor."""
    count: int
    """Number of elements that differ."""

    def to_json(self) -> dict[str, object]:
        """Return the problem as JSON types."""
        # A class with slots is made anew, and super() without arguments would name the first one.
        return Problem.to_json(self) | {"index": list(self.index), "count": self.count}


@dataclass(frozen=True, slots=True)
class TiedPair:
    """A tensor that has two names in one checkpoint and was stored once in the other."""

    fqn: str
    """The name that only one side stores."""
    twin: str
    """The name under which the other side stores the same elements."""
    stored_once_in: str
    """`"A"` or `"B"`."""


@dataclass(frozen=True, slots=True)
class ComparedSide:
    """One of the two checkpoints."""

    path: Path
    layout: CheckpointLayout
    tensors: int
    """Number of tensors that take part, tied duplicates included."""
    objects: tuple[str, ...]
    """Entries that are no tensors, by stored name; not compared."""
    outside: tuple[str, ...]
    """Tensors that lie beside the model in the saved state, such as an optimizer's; not compared."""
    extra_states: tuple[str, ...]
    """Tensors that modules keep beside their weights (`_extra_state`), by stored name; not compared."""
    warnings: tuple[Problem, ...]
    """What is doubtful but does not keep the checkpoint from being read."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that was found; `differences` is empty when the checkpoints are equal."""

    a: ComparedSide
    b: ComparedSide
    compared: int
    """Number of tensors whose every bit was held against the other side's."""
    compared_bytes: int
    """Bytes of those, counted once."""
    tied: tuple[TiedPair, ...]
    differences: tuple[Problem, ...]

    @property
    def is_equal(self) -> bool:
        """Whether both sides hold the same tensors, bit for bit."""
        return not self.differences

    @property
    def counts(self) -> dict[str, int]:
        """Number of differences by kind."""
        return dict(sorted(Counter(problem.kind for problem in self.differences).items()))
