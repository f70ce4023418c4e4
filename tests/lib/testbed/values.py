"""Plain values that go between the launching process and its ranks; reading them imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MeshShape:
    """How many ranks there are and what each dimension does."""

    dp: int = 1
    tp: int = 1
    ep: int = 1
    """Expert parallel size; it divides the data parallel ranks and adds none."""

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.dp * self.tp

    def __str__(self) -> str:
        return f"dp{self.dp}tp{self.tp}" + (f"ep{self.ep}" if self.ep > 1 else "")


@dataclass(frozen=True, slots=True)
class Case:
    """A model that is saved once, in several formats."""

    model: str
    mesh: MeshShape
    formats: tuple[str, ...] = ("torch_save", "safetensors", "consolidated")

    with_keys: bool = False
    """Whether the managers are told the whole model's keys."""

    def __str__(self) -> str:
        return f"{self.model}-{self.mesh}"


@dataclass(frozen=True, slots=True)
class Saved:
    """What a rank reports after saving."""

    changes: list[str]
    """What the saves changed in the live run."""
    next_losses: list[float]
    """Losses of the uninterrupted run after the save."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a rank reports after loading."""

    differences: list[str]
    """Everything that is not bit for bit as it was when saved."""
    next_losses: list[float]
    """Losses of the resumed run."""


@dataclass(frozen=True, slots=True)
class Failed:
    """What a rank reports after a call that must fail."""

    error: str
    """Name of the error's class."""
    message: str
    changes: list[str]
    """What the call changed in the live run."""


@dataclass(frozen=True, slots=True)
class Place:
    """A model on a mesh, and where and how it is saved."""

    model: str
    mesh: MeshShape
    format_name: str
    root: Path


@dataclass(frozen=True, slots=True)
class Kill:
    """A death in the middle of a save."""

    victims: tuple[int, ...] = ()
    """Ranks that die together; the first decides when."""
    at: int | None = None
    """At which of the first victim's writes, from 1 on; None for no death at all."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What a rank reports after another library opened a checkpoint."""

    complaints: dict[str, list[str]]
    """Keys that the library missed, did not expect, or could not fit."""
    largest_difference: float
    """Of the logits, from those of the live model."""
    largest_logit: float
