"""The directories that one save writes: staged together, published one after the other.

A save writes `model/` and perhaps `optim/` and a tokenizer's directory, at places that
need not share a parent. Each is staged beside its target. When all are complete they get
records with one save id and are published, the model last, so that a crash between two of
them leaves ids that do not match, which a load refuses.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from ckpt_core.errors import CheckpointError, ConfigError, SaveError, translate_os_errors
from ckpt_core.key_check import NamedState
from ckpt_core.reader import open_checkpoint
from ckpt_core.record import RECORD_NAME, CheckpointRecord, TensorRecord, measure_files, read_record, write_record
from ckpt_core.staging import Stage, open_stage

PartName = Literal["optim", "tokenizer", "model"]
"""Parts in the order in which they are published."""

_CHECKPOINT_NAMES = frozenset({".metadata", ".hf_metadata", "consolidated", "consolidate.sh"})
_CHECKPOINT_SUFFIXES = (".distcp", ".safetensors", ".json", ".bin", ".pt", ".pth")
"""What savers leave in a checkpoint's directory; with the next save it is stale."""

_ORDER: tuple[PartName, ...] = ("optim", "tokenizer", "model")


@dataclass(slots=True)
class SaveSet:
    """The stages of one save, held by the rank that publishes."""

    targets: Mapping[PartName, Path]
    save_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _stages: dict[PartName, Stage] = field(default_factory=dict)

    def open(self, directories: Mapping[PartName, Sequence[str]]) -> dict[PartName, str]:
        """Lock every target and create its stage; return where to write each part.

        Args:
            directories: What the writers would otherwise make inside each stage.

        Raises:
            ConfigError: If publishing one part would remove another.
            TargetError: If a target is locked, is a file, or cannot be written.
        """
        _require_apart(self.targets)
        try:
            for name, target in self.targets.items():
                stage = self._stages[name] = open_stage(target, replace=True)
                for directory in directories.get(name, ()):
                    (stage.path / directory).mkdir()
        except BaseException:
            self.discard()
            raise
        return {name: str(stage.path) for name, stage in self._stages.items()}

    def complete(self, states: Mapping[PartName, NamedState]) -> None:
        """Write the records and check against them what was staged; nothing is visible yet.

        Args:
            states: What each part was asked to store, by stored name.

        Raises:
            SaveError: If a stage does not hold what it should.
        """
        for name, stage in self._stages.items():
            if name == "tokenizer":
                _write_record(stage.path, NamedState({}), self.save_id)
                continue
            _lift(stage.path, name)
            _rewrite_paths(stage, name)
            _write_record(stage.path, states[name], self.save_id)
            _check_staged(stage.path, states[name])
            _carry_over(stage)

    def publish(self) -> None:
        """Put every part at its target: optimizer, tokenizer, model.

        Whatever can be found out is found out before the first one is replaced.

        Raises:
            SaveError, SpaceError, TargetError: If one could not be put in place; the message
                names those that already were.
        """
        for stage in self._stages.values():
            stage.sync()
            stage.check_publishable()
        done: list[str] = []
        for name in (part for part in _ORDER if part in self._stages):
            stage = self._stages[name]
            try:
                _publish_part(name, stage)
            except CheckpointError as error:
                if not done:
                    raise
                raise SaveError(f"{error.message}; of the same save, {' and '.join(done)} already replaced") from error
            done.append(str(stage.target))

    def discard(self) -> None:
        """Remove what is not published; targets keep what they held."""
        for stage in self._stages.values():
            if stage.is_open:
                # The failure that led here is what matters; the next save removes a leftover.
                with suppress(CheckpointError):
                    stage.discard()


def _require_apart(targets: Mapping[PartName, Path]) -> None:
    """Refuse a part inside another one that is replaced whole."""
    real = {name: Path(os.path.realpath(target)) for name, target in targets.items()}
    for outer in ("model", "optim"):
        for name, target in real.items():
            if outer in real and name != outer and target.is_relative_to(real[outer]):
                raise ConfigError(
                    f"{targets[name]}: the {name} would lie in {targets[outer]}, which a save replaces whole; "
                    "give it a directory of its own"
                )


def _publish_part(name: PartName, stage: Stage) -> None:
    if name == "tokenizer" and not _is_replaceable(stage.target):
        with translate_os_errors(stage.target, "cannot take the tokenizer's files"):
            _publish_files(stage)
    else:
        stage.publish()


def _lift(stage: Path, name: str) -> None:
    """Move `stage/name/*` up, because the writer appends the last component itself."""
    inner = stage / name
    if not inner.is_dir():
        raise SaveError(f"{inner}: expected what the Checkpointer wrote, found nothing; nothing was published")
    # A file in the directory may have the directory's own name.
    moved = inner.rename(stage / f".{name}.staged")
    for entry in sorted(moved.iterdir()):
        entry.rename(stage / entry.name)
    moved.rmdir()


def _carry_over(stage: Stage) -> None:
    """Take files along that no checkpoint consists of: they are somebody's, and the target is replaced whole."""
    if not stage.target.is_dir():
        return
    record = read_record(stage.target)
    known = set(record.files) | {RECORD_NAME} if record else {RECORD_NAME}
    for name in measure_files(stage.target).keys() - known:
        if _is_checkpoint_file(name) or (stage.path / name).exists():
            continue
        (stage.path / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(stage.target / name, stage.path / name)
        except OSError:
            shutil.copy2(stage.target / name, stage.path / name)


def _is_checkpoint_file(name: str) -> bool:
    top = name.split("/", 1)[0]
    return top in _CHECKPOINT_NAMES or name.endswith(_CHECKPOINT_SUFFIXES)


def _rewrite_paths(stage: Stage, name: PartName) -> None:
    """Let the consolidation script name the directory that people will find it in."""
    script = stage.path / "consolidate.sh"
    if script.is_file():
        text = script.read_text(encoding="utf-8")
        staged = str(stage.path / name)
        script.write_text(text.replace(staged, str(stage.target)), encoding="utf-8")


def _check_staged(stage: Path, state: NamedState) -> None:
    try:
        reader = open_checkpoint(stage)
        problems = [problem for problem in reader.check() if problem.severity == "error"]
    except CheckpointError as error:
        raise SaveError(f"{stage}: what was written cannot be read back, nothing was published: {error}") from error
    if problems:
        raise SaveError(f"{stage}: what was written is incomplete; nothing was published", problems=problems)
    lost = sorted(state.objects - reader.objects.keys())
    if lost:
        raise SaveError(f"{stage}: {len(lost)} objects were not written, such as {lost[0]!r}; nothing was published")


def _write_record(directory: Path, state: NamedState, save_id: str) -> None:
    tensors = {name: TensorRecord(entry.dtype, entry.shape) for name, entry in state.tensors.items()}
    record = CheckpointRecord(version("ckpt-core"), measure_files(directory), tensors, save_id=save_id)
    write_record(directory, record)


def _is_replaceable(target: Path) -> bool:
    """Whether a tokenizer's directory holds nothing but an earlier save's files."""
    if not target.is_dir():
        return True
    record = read_record(target)
    known = set(record.files) if record else set()
    return measure_files(target).keys() <= known


def _publish_files(stage: Stage) -> None:
    """Move a tokenizer's files into a directory that holds other things as well.

    File by file, the record last: a kill in between leaves some of each save.
    """
    old, new = read_record(stage.target), measure_files(stage.path)
    for entry in sorted(stage.path.iterdir(), key=lambda path: path.name == RECORD_NAME):
        if entry.is_dir() and (stage.target / entry.name).is_dir():
            shutil.rmtree(stage.target / entry.name)
        entry.replace(stage.target / entry.name)
    for name in (old.files if old else {}).keys() - new:
        (stage.target / name).unlink(missing_ok=True)
    stage.discard()
