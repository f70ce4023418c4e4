"""What a checkpoint on disk holds, and whether a live model and optimizer can take it.

Rank 0 reads the metadata and judges; the others hear the result. No tensor bytes are read,
except of a head that a model with tied embeddings would lose, and nothing live is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ckpt_core import automodel_compat as compat
from ckpt_core.collective import Step, combine, on_rank_zero
from ckpt_core.errors import KeyMismatchError, LayoutError, LoadError, Problem
from ckpt_core.key_check import compare_groups, compare_optimizers, compare_requested, compare_states
from ckpt_core.layout import CheckpointLayout
from ckpt_core.state_description import StateDescription, describe_training, find_origin, merge_descriptions
from ckpt_core.stored_state import (
    StoredState,
    read_stored_state,
    require_equal_head,
    require_same_id,
    require_same_save,
)
from ckpt_core.training_objects import TrainingObjects

_SAVE_FORMATS = {
    CheckpointLayout.DCP: "torch_save",
    CheckpointLayout.SAFETENSORS: "safetensors",
    CheckpointLayout.SAFETENSORS_SHARDED: "safetensors",
    CheckpointLayout.ADAPTER: "safetensors",
}


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A complete model directory and perhaps a complete optimizer directory."""

    model: StoredState
    optimizer: StoredState | None

    @classmethod
    def read(cls, model_directory: Path, optimizer_directory: Path | None) -> Self:
        """Read both from their metadata; collective.

        Raises:
            CheckpointNotFoundError: If a directory does not exist.
            CorruptCheckpointError: If one is not complete, or they are of two saves.
            LayoutError: If one is of a layout that is not loaded into live models.
        """
        step = Step(f"{model_directory}: cannot be read", LoadError)
        return on_rank_zero(step, lambda: cls._read(model_directory, optimizer_directory))

    @classmethod
    def _read(cls, model_directory: Path, optimizer_directory: Path | None) -> Self:
        model = read_stored_state(model_directory)
        if model.layout not in _SAVE_FORMATS:
            raise LayoutError(
                f"{model_directory}: holds layout {model.layout.value}, expected one of "
                f"{[layout.value for layout in _SAVE_FORMATS]}; convert it first"
            )
        if optimizer_directory is None:
            return cls(model, None)
        compat.require_optimizer_path(str(optimizer_directory), is_peft=model.layout is CheckpointLayout.ADAPTER)
        optimizer = read_stored_state(optimizer_directory)
        require_same_save(model, optimizer)
        return cls(model, optimizer)

    @property
    def save_format(self) -> tuple[str, bool]:
        """`(model_save_format, is_peft)` as the Checkpointer's configuration names it."""
        return _SAVE_FORMATS[self.model.layout], self.model.layout is CheckpointLayout.ADAPTER

    def require_fit(self, checkpointer: Any, state: TrainingObjects, requested: Sequence[str] | None) -> None:  # noqa: ANN401
        """Refuse what the live objects cannot take exactly; collective.

        Args:
            checkpointer: nemo_automodel's, configured for this checkpoint.
            state: The live model, optimizer and scheduler.
            requested: Keys that the checkpoint must have; None for those of the model.

        Raises:
            KeyMismatchError: With everything that differs, on every rank.
        """
        combine(
            Step(f"{self.model.path}: cannot be compared with the model", LoadError),
            lambda: describe_training(checkpointer, state),
            lambda parts: self._judge(parts, requested),
        )

    def require_unchanged(self) -> None:
        """Refuse what was loaded if a save replaced it meanwhile; collective.

        Raises:
            LoadError: On every rank.
        """
        step = Step(f"{self.model.path}: cannot be read again", LoadError)
        on_rank_zero(step, self._require_same_ids)

    def _require_same_ids(self) -> None:
        for part in (self.model, self.optimizer):
            if part is not None:
                require_same_id(part)

    def _judge(self, parts: Sequence[StateDescription], requested: Sequence[str] | None) -> None:
        live = merge_descriptions(parts)
        found = {label: problems for label, problems in self._compare(live, requested).items() if problems}
        if found:
            problems = [problem for listed in found.values() for problem in listed]
            error = KeyMismatchError(
                f"{self.model.path}: is not a checkpoint of {' and '.join(found)}; nothing was changed",
                problems=problems,
            )
            origin = find_origin(parts, [problem.where for problem in problems])
            raise error if origin is None else error.on_rank(origin)
        tied = live.rules.tied
        if tied is not None and tied.embedding is not None and tied.head in self.model.state.tensors:
            require_equal_head(self.model.path, tied.head, tied.embedding)

    def _compare(self, live: StateDescription, requested: Sequence[str] | None) -> dict[str, list[Problem]]:
        stored = self.model.state
        compared = {"the model": min((compare_states(n.named, stored, live.rules) for n in live.namings), key=len)}
        if requested is not None:
            compared["model_state_dict_keys"] = compare_requested(requested, live.native, stored.names, live.rules)
        if self.optimizer is not None and live.optimizer is not None:
            compared["the optimizer and scheduler"] = [
                *compare_optimizers(live.optimizer.named, self.optimizer.state),
                *compare_groups(live.groups, self.optimizer.options),
            ]
        return compared
