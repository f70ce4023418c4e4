"""One save by all ranks: checked, staged, completed, published.

Rank 0 owns the directories; every rank writes its shards into them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt_core import automodel_compat as compat
from ckpt_core.collective import Step, agree, combine, has_group, is_rank_zero, on_rank_zero
from ckpt_core.errors import ConfigError, KeyMismatchError, SaveError
from ckpt_core.key_check import NamedState, compare_requested
from ckpt_core.live_state import check_plan
from ckpt_core.save_set import PartName, SaveSet
from ckpt_core.state_description import StateDescription, describe_training, merge_descriptions
from ckpt_core.training_objects import TrainingObjects, WritePaths
from ckpt_core.write_guard import guard_single_writes

_log = logging.getLogger(__name__)


def part_directory(path: str | os.PathLike[str], part: PartName) -> Path:
    """Directory of a part: `path` itself if it ends in the part's name, else below it.

    Saving and loading use the same rule, so that what was saved is found.
    """
    normal = Path(os.path.normpath(path))
    return normal if normal.name == part else normal / part


class StagedSave:
    """A save that is under way; every rank has one."""

    def __init__(self, checkpointer: Any, state: TrainingObjects, requested: Sequence[str] | None) -> None:  # noqa: ANN401
        """Prepare; nothing is written yet.

        Args:
            checkpointer: nemo_automodel's, configured for this save.
            state: What to save.
            requested: Keys that the checkpoint must have; None for those of the model.
        """
        self._checkpointer = checkpointer
        self._state = state
        self._requested = requested
        self._set: SaveSet | None = None
        self._expected: dict[PartName, NamedState] = {}
        self._where = Path()
        self._is_publisher = True
        self._had_group = False

    def start(self, paths: WritePaths) -> None:
        """Check the state, open the stages and let every rank write; collective.

        With an asynchronous Checkpointer this returns when the state is copied.

        Raises:
            ConfigError: If an adapter is saved without its configuration or parameters, or a
                part would lie inside another one.
            KeyMismatchError: If the keys are not those that were requested.
            SaveError: If the chunks of all ranks do not tile every tensor, or writing failed.
        """
        self._where = part_directory(paths.model, "model")
        self._is_publisher, self._had_group = is_rank_zero(), has_group()
        describing = Step(f"{self._where}: the state cannot be described", SaveError)
        self._expected = combine(describing, self._describe, self._judge)
        try:
            staging = Step(f"{self._where}: cannot be staged", SaveError)
            staged = on_rank_zero(staging, lambda: self._open(paths))
            agree(self._writing, lambda: self._write(staged))
        except BaseException:
            self._abandon()
            raise

    def publish(self) -> None:
        """Wait for the writing, prove that it is complete and put it in place; collective.

        Raises:
            SaveError: If it is not complete, with nothing replaced; or if a part could not be
                put in place, with the parts that were.
        """
        publishing = Step(f"{self._where}: cannot be published", SaveError)
        try:
            if self._had_group and not has_group():
                # The group ended before the process did. What one rank waits for is written by all.
                self._wait()
                if self._is_publisher:
                    self._publish()
                return
            agree(self._writing, self._wait)
            on_rank_zero(publishing, self._publish)
        except BaseException:
            self._abandon()
            raise

    def _wait(self) -> None:
        if self._checkpointer.config.is_async:
            self._checkpointer.async_wait()

    @property
    def _writing(self) -> Step:
        return Step(f"{self._where}: writing failed, nothing was published", SaveError)

    def _describe(self) -> StateDescription:
        if self._checkpointer.config.is_peft:
            self._require_adapter()
        return describe_training(self._checkpointer, self._state)

    def _require_adapter(self) -> None:
        if self._state.peft_config is None:
            raise ConfigError(f"{self._where}: an adapter is saved with its peft_config, found None; pass peft_config")
        if not compat.is_peft_config(self._state.peft_config):
            found = type(self._state.peft_config)
            raise ConfigError(
                f"{self._where}: expected nemo_automodel's PeftConfig as peft_config, found {found.__module__}."
                f"{found.__qualname__}; import it from nemo_automodel.components._peft.lora"
            )
        if not compat.has_lora(self._state.model):
            raise ConfigError(
                f"{self._where}: expected trainable LoRA parameters to save, the model has none; "
                "save it without lora_enabled and is_peft"
            )

    def _judge(self, parts: Sequence[StateDescription]) -> dict[PartName, NamedState]:
        live = merge_descriptions(parts)
        problems = check_plan(live.stored) + (check_plan(live.optimizer) if live.optimizer else [])
        if problems:
            raise SaveError(
                f"{self._where}: the chunks of all ranks do not hold every element exactly once, so the checkpoint "
                "could not be read; nothing was written. Shard the tensor evenly, or over one mesh dimension",
                problems=problems,
            )
        if self._requested is not None:
            differing = compare_requested(self._requested, live.native, live.stored.named.names, live.rules)
            if differing:
                raise KeyMismatchError(
                    f"{self._where}: the model's keys are not model_state_dict_keys; nothing was written",
                    problems=differing,
                )
        states: dict[PartName, NamedState] = {"model": live.stored.named}
        return states | ({"optim": live.optimizer.named} if live.optimizer else {})

    def _open(self, paths: WritePaths) -> WritePaths:
        targets: dict[PartName, Path] = {"model": self._where}
        if paths.optim is not None and self._state.optimizer is not None:
            targets["optim"] = part_directory(paths.optim, "optim")
            compat.require_optimizer_path(str(targets["optim"]), is_peft=self._checkpointer.config.is_peft)
        if paths.tokenizer is not None and self._state.tokenizer is not None:
            targets["tokenizer"] = Path(paths.tokenizer)
        self._set = SaveSet(targets)
        directories: dict[PartName, list[str]] = {
            "model": compat.written_directories(self._checkpointer.config),
            "optim": ["optim"],
        }
        staged = self._set.open(directories)
        return WritePaths(staged["model"], staged.get("optim"), staged.get("tokenizer"))

    def _write(self, staged: WritePaths) -> None:
        config = self._checkpointer.config
        keys = config.model_state_dict_keys
        # A rank knows only its own experts; the consolidated index needs the names of all.
        config.model_state_dict_keys = sorted(self._expected["model"].names)
        try:
            with guard_single_writes(self._checkpointer, self._writing):
                self._state.write(self._checkpointer, staged)
            if config.is_async:
                self._checkpointer.maybe_wait_for_staging()
        finally:
            config.model_state_dict_keys = keys

    def _publish(self) -> None:
        if self._set is not None:
            self._set.complete(self._expected)
            self._set.publish()

    def _abandon(self) -> None:
        """Remove the stages, after whatever still writes into them has ended."""
        try:
            self._wait()
        # This save has failed already, and says so itself.
        except BaseException:  # noqa: BLE001
            _log.debug("a failed save had also failed to write", exc_info=True)
        if self._set is not None:
            self._set.discard()
