"""What one call of the manager saves or loads, and the calls that do it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_core import automodel_compat as compat
from ckpt_core.collective import Step, agree, is_rank_zero
from ckpt_core.errors import LoadError
from ckpt_core.stored_objects import restrict_unpickling


@dataclass(frozen=True, slots=True)
class WritePaths:
    """Directories as the writers expect them: `model` and `optim` are appended by them."""

    model: str
    optim: str | None
    tokenizer: str | None


@dataclass(frozen=True, slots=True)
class TrainingObjects:
    """The live objects of a save or load."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    scheduler: Any = None
    tokenizer: Any = None
    peft_config: Any = None

    def write(self, checkpointer: Any, paths: WritePaths) -> None:  # noqa: ANN401  nemo_automodel is not typed
        """Let the Checkpointer write; the tokenizer is written once, by rank 0."""
        compat.clear_plan_caches()
        beside = self.tokenizer if paths.tokenizer is None else None
        checkpointer.save_model(
            model=self.model, weights_path=paths.model, peft_config=self.peft_config, tokenizer=beside
        )
        if self.optimizer is not None and paths.optim:
            compat.clear_plan_caches()
            checkpointer.save_optimizer(
                optimizer=self.optimizer, model=self.model, weights_path=paths.optim, scheduler=self.scheduler
            )
        if self.tokenizer is not None and paths.tokenizer and is_rank_zero():
            self.tokenizer.save_pretrained(paths.tokenizer)

    def read(self, checkpointer: Any, model_directory: Path, optimizer_directory: Path | None) -> None:  # noqa: ANN401
        """Let the Checkpointer fill the model and then the optimizer.

        Raises:
            LoadError: On every rank; the message says what may have been changed.
        """
        step = Step(f"{model_directory}: reading failed, the model may be partly changed", LoadError)
        with restrict_unpickling():
            agree(step, lambda: checkpointer.load_model(model=self.model, model_path=str(model_directory)))
        if self.optimizer is None or optimizer_directory is None:
            return
        step = Step(f"{optimizer_directory}: reading failed after the model's weights were replaced", LoadError)
        with restrict_unpickling():
            agree(
                step,
                lambda: checkpointer.load_optimizer(
                    optimizer=self.optimizer,
                    model=self.model,
                    weights_path=str(optimizer_directory.parent),
                    scheduler=self.scheduler,
                ),
            )
