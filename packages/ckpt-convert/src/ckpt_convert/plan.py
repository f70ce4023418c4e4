"""What would a conversion do?

`plan_conversion` reads metadata only, decides everything, and refuses what cannot be done
exactly: a source that is incomplete, a target that would damage something, names and dtypes
that the target cannot hold. Carrying the plan out is for `ckpt_convert.execute`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_core.errors import ConfigError, CorruptCheckpointError, LayoutError, Problem, describe_value
from ckpt_core.layout import CheckpointLayout
from ckpt_core.reader import CheckpointReader, open_checkpoint
from ckpt_core.record import RECORD_NAME
from ckpt_core.safetensors_header import INDEX_NAME
from ckpt_core.staging import require_writable
from ckpt_core.terminal import format_bytes, join_lines

from ckpt_convert.assets import Asset, describe_missing, find_assets
from ckpt_convert.byte_sizes import read_size
from ckpt_convert.names import NameChanges, change_names
from ckpt_convert.output_files import PlannedFile, build_index, lay_out_files
from ckpt_convert.target_check import check_target, check_tensors

DEFAULT_SHARD_SIZE = 5 * 10**9
"""Bytes of tensors in a file: what model hubs recommend."""
MEMORY_BYTES = 64 * 10**6
_RECORD_BYTES = 256
"""Of one tensor in the record, generously: its name comes on top."""


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """Every decision of a conversion; carrying it out decides nothing more."""

    source: Path
    """Directory or file in which the layout was found."""
    source_layout: CheckpointLayout
    target: Path
    target_layout: CheckpointLayout
    replaces: bool
    """Whether something stands at the target, which is an empty directory or our own."""
    overwrite: bool
    files: tuple[PlannedFile, ...]
    index: bytes | None = field(repr=False)
    """Content of the index, where there is more than one file."""
    assets: tuple[Asset, ...]
    names: NameChanges
    """What became of the source's names, and what is left out."""
    doubts: tuple[Problem, ...]
    """What is doubtful about the source, but keeps no tensor from being read."""
    missing: tuple[str, ...]
    """What a loader of the result will miss."""
    reader: CheckpointReader = field(repr=False, compare=False)
    """The opened source."""

    @property
    def tensor_count(self) -> int:
        """Number of tensors that are written."""
        return sum(len(file.tensors) for file in self.files)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are written."""
        return sum(file.size - len(file.header) for file in self.files)

    @property
    def warnings(self) -> list[str]:
        """Everything that is doubtful, as text."""
        return [*map(str, self.doubts), *self.missing]

    @property
    def disk_needed(self) -> int:
        """Bytes that have to be free beside the target."""
        record = sum(_RECORD_BYTES + len(tensor.fqn) for file in self.files for tensor in file.tensors)
        small = len(self.index or b"") + sum(asset.size for asset in self.assets)
        return sum(file.size for file in self.files) + small + record

    def describe_findings(self) -> list[str]:
        """Say what was renamed, left out and doubted, one line each."""
        return [*self.names.describe(), *(f"warning: {warning}" for warning in self.warnings)]

    def __str__(self) -> str:
        width = max(len(file.name) for file in self.files)
        assets = ", ".join(asset.name for asset in self.assets)
        return join_lines(
            [
                f"{self.source} ({self.source_layout})",
                f"-> {self.target} ({self.target_layout})" + (", replaced" if self.overwrite and self.replaces else ""),
                *(
                    f"  {file.name:<{width}}  {format_bytes(file.size):>9}  {len(file.tensors):,} tensors"
                    for file in self.files
                ),
                *([f"  {INDEX_NAME}"] if self.index else []),
                *([f"  copied beside: {assets}"] if assets else []),
                *self.describe_findings(),
                f"disk needed: {format_bytes(self.disk_needed)}; memory: at most {format_bytes(MEMORY_BYTES)}",
            ]
        )

    def to_json(self) -> dict[str, object]:
        """Return the plan as JSON values, sizes in bytes."""
        return {
            "source": str(self.source),
            "source_layout": self.source_layout,
            "target": str(self.target),
            "target_layout": self.target_layout,
            "files": {file.name: file.size for file in self.files},
            "assets": {asset.name: str(asset.source) for asset in self.assets},
            "tensors": self.tensor_count,
            "tensor_bytes": self.nbytes,
            "disk_needed": self.disk_needed,
            **self.names.to_json(),
            "warnings": [
                *(problem.to_json() for problem in self.doubts),
                *({"severity": "warning", "message": text} for text in self.missing),
            ],
        }


def plan_conversion(  # noqa: PLR0913  each is a flag of the command
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str = CheckpointLayout.SAFETENSORS,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    assets: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> ConversionPlan:
    """Decide how to convert `src` to `dst`, without reading or writing a tensor.

    Args:
        src: A checkpoint, from any level of the directories that trainers make around it.
        dst: Directory to write: absent, empty, or with `overwrite` one that this program wrote.
        to: Layout to write; `"safetensors"` is the consolidated one.
        max_shard_size: Bytes of tensors in one output file, or a text such as `"5GB"`; a
            larger tensor gets its own.
        assets: Directory of config and tokenizer; None looks where trainers leave them.
        overwrite: Whether an earlier result at `dst` may be replaced.

    Raises:
        ConfigError: An option is impossible, or a tensor cannot be written under this layout.
        CheckpointNotFoundError: Nothing is at `src` or `assets`.
        LayoutError: `src` holds no layout that can be read, several, or no model tensor.
        CorruptCheckpointError: The source is incomplete; `problems` holds everything found.
        KeyMismatchError: Two tensors would get one name.
        TargetError: `dst` is taken or cannot be written, or it and `src` lie in one another.
    """
    if to != CheckpointLayout.SAFETENSORS:
        raise ConfigError(f"target layout {describe_value(to)}: expected {CheckpointLayout.SAFETENSORS.value!r}")
    shard_size = read_size(max_shard_size)
    source, target = _read_path("src", src), _read_path("dst", dst)
    reader = _open_model(source)
    replaces = check_target(target, (source, reader.path), overwrite=overwrite)
    require_writable(target, replace=replaces)
    doubts = _prove_complete(reader)
    names = change_names(reader)
    tensors = {fqn: reader.tensors[stored] for fqn, stored in names.kept.items()}
    _require_tensors(reader, names)
    check_tensors(tensors)
    files = lay_out_files(tensors, shard_size)
    found = _find_assets(reader, assets)
    return ConversionPlan(
        source=reader.path,
        source_layout=reader.layout,
        target=target,
        target_layout=CheckpointLayout.SAFETENSORS,
        replaces=replaces,
        overwrite=overwrite,
        files=files,
        index=build_index(files) if len(files) > 1 else None,
        assets=found,
        names=names,
        doubts=tuple(doubts),
        missing=tuple(describe_missing(found)),
        reader=reader,
    )


def _read_path(name: str, value: object) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name} is {describe_value(value)}: expected a path")
    return Path(value)


def _open_model(source: Path) -> CheckpointReader:
    reader = open_checkpoint(source)
    if reader.layout is CheckpointLayout.ADAPTER:
        raise LayoutError(
            f"{reader.path}: expected the weights of a whole model, found an adapter; peft opens it as it is"
        )
    return reader


def _prove_complete(reader: CheckpointReader) -> list[Problem]:
    problems = reader.check()
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise CorruptCheckpointError(
            f"{reader.path}: expected a complete {reader.layout} checkpoint, found {len(errors)} problems; "
            "copy it again, or use an earlier one",
            problems=errors,
        )
    return problems


def _require_tensors(reader: CheckpointReader, names: NameChanges) -> None:
    if names.kept:
        return
    found = "; ".join(names.describe()) or "nothing"
    raise LayoutError(
        f"{reader.path}: expected the tensors of a model, found none ({found}); name the directory of the weights, "
        "which trainers write beside the optimizer's"
    )


def _find_assets(reader: CheckpointReader, assets: str | os.PathLike[str] | None) -> tuple[Asset, ...]:
    directory = None if assets is None else _read_path("assets", assets)
    return find_assets(reader.directory, directory, exclude=frozenset({RECORD_NAME}))
