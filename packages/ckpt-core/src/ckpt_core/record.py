"""The small JSON file that says what a directory written by this project must hold.

Sharded safetensors name neither the other files nor the global shapes: with the last shard
gone, what is left tiles a smaller tensor exactly. The record, one in each directory that is
written here, makes such a loss visible. It holds no time, host or absolute path, so that
the same input gives the same bytes. Reading trusts nothing in it: names that leave the
directory, negative sizes and unknown format versions are refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_core.checkpoint_files import find_name_fault, iter_files, read_whole
from ckpt_core.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    LayoutError,
    Problem,
    describe_value,
    translate_os_errors,
)
from ckpt_core.layout import CheckpointLayout
from ckpt_core.spec import DTYPE_BITS, find_shape_fault, is_count
from ckpt_core.strict_json import parse_strict_json

RECORD_NAME = "ckpt_record.json"
FORMAT_VERSION = 1

_DIGEST = re.compile(r"[a-z0-9][a-z0-9-]*:[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """What is recorded about one tensor: its global shape, dtype and perhaps its digest."""

    dtype: str
    """A safetensors dtype string (see `ckpt_core.spec.DTYPE_BITS`)."""
    shape: tuple[int, ...]
    digest: str | None = None
    """`algorithm:hex`, or None where the writer did not see the bytes."""

    def __post_init__(self) -> None:
        """Refuse what no tensor has."""
        if self.dtype not in DTYPE_BITS:
            raise ConfigError(f"dtype {self.dtype!r} is unknown; known are {sorted(DTYPE_BITS)}")
        if not all(is_count(n) for n in self.shape):
            raise ConfigError("shape is not made of non-negative integers")
        if fault := find_shape_fault(self.shape):
            raise ConfigError(f"shape has {fault}")
        if self.digest is not None and not _DIGEST.fullmatch(self.digest):
            raise ConfigError(f"digest {self.digest!r} is not of the form algorithm:hex")


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """Files and tensors of one directory, as its writer left them."""

    tool_version: str
    """Version of the package that wrote the directory."""
    files: Mapping[str, int]
    """Size in bytes by name; `/` separates a subdirectory; the record itself is left out."""
    tensors: Mapping[str, TensorRecord]
    """By stored FQN."""
    source_layout: CheckpointLayout | None = None
    """What the directory was converted from, if it was."""
    save_id: str | None = None
    """The same in every directory that one save wrote."""
    format_version: int = field(default=FORMAT_VERSION)

    def __post_init__(self) -> None:
        """Refuse names that leave the directory and sizes that no file has."""
        if self.format_version != FORMAT_VERSION:
            raise ConfigError(f"format version {self.format_version!r} is not {FORMAT_VERSION}")
        for name, size in self.files.items():
            if reason := explain_unsafe_name(name):
                raise ConfigError(f"file name {name!r} {reason}")
            if not is_count(size):
                raise ConfigError(f"size {size!r} of file {name!r} is not a non-negative integer")


def explain_unsafe_name(name: str) -> str | None:
    """Say why `name` must not be joined to a directory; None if it is safe.

    The rule is lexical: `/` may separate plain components, nothing may lead out. What the
    file system makes of it (a link inside the directory) is the owner's decision.
    """
    faults = (fault for part in name.split("/") if (fault := find_name_fault(part)))
    if fault := next(faults, None):
        return f"has a component that is {fault}"
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return "cannot be the name of a file"
    return None


def read_record(directory: Path) -> CheckpointRecord | None:
    """Read the record of `directory`; None if there is none.

    Raises:
        LayoutError: The record has a format version that this release does not know.
        CorruptCheckpointError: The record cannot be read or is not what a writer leaves.
    """
    path = directory / RECORD_NAME
    try:
        raw = read_whole(path)
    except CheckpointNotFoundError:
        return None
    try:
        content = parse_strict_json(raw.decode(), any_keys=True)
        _check_version(path, content)
        return _parse_record(content)
    # UnicodeDecodeError, JSONDecodeError and ConfigError are ValueErrors; LayoutError too, and passes.
    except LayoutError:
        raise
    except ValueError as error:
        message = f"{path}: not a record that this project wrote: {error}; restore it or remove it"
        raise CorruptCheckpointError(message) from error


def write_record(directory: Path, record: CheckpointRecord) -> None:
    """Write `record` into `directory`, durably; the same record gives the same bytes.

    Raises:
        SpaceError: The file system is full.
        TargetError: The directory is absent or cannot be written.
    """
    content = {
        "files": dict(record.files),
        "format_version": record.format_version,
        "save_id": record.save_id,
        "source_layout": record.source_layout,
        "tensors": {fqn: _render_tensor(tensor) for fqn, tensor in record.tensors.items()},
        "tool_version": record.tool_version,
    }
    present = {key: value for key, value in content.items() if value is not None}
    # Escaping everything beyond ASCII keeps names that are no valid Unicode, which file names may be.
    text = json.dumps(present, sort_keys=True, indent=1, ensure_ascii=True) + "\n"
    path = directory / RECORD_NAME
    with translate_os_errors(path, "cannot be written"), path.open("wb") as file:
        file.write(text.encode("ascii"))
        file.flush()
        os.fsync(file.fileno())


def measure_files(directory: Path) -> dict[str, int]:
    """List every file below `directory` with its size in bytes, the record itself left out."""
    files = (path for path in iter_files(directory) if not path.is_dir())
    sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}
    sizes.pop(RECORD_NAME, None)
    return dict(sorted(sizes.items()))


def check_record(directory: Path, record: CheckpointRecord) -> list[Problem]:
    """List recorded files that are absent from `directory` or have another size."""
    return [
        problem for name, size in sorted(record.files.items()) if (problem := _check_file(directory / name, name, size))
    ]


def _check_file(path: Path, name: str, expected: int) -> Problem | None:
    if not path.is_file():
        return Problem("missing_file", name, f"recorded with {expected} bytes, not there")
    found = path.stat().st_size
    if found == expected:
        return None
    return Problem(
        "short_file" if found < expected else "long_file", name, f"recorded with {expected} bytes, has {found}"
    )


def _render_tensor(tensor: TensorRecord) -> dict[str, object]:
    rendered: dict[str, object] = {"dtype": tensor.dtype, "shape": list(tensor.shape)}
    if tensor.digest is not None:
        rendered["digest"] = tensor.digest
    return rendered


def _parse_record(content: object) -> CheckpointRecord:
    fields = _expect_mapping("the record", content)
    tensors = _expect_mapping("tensors", fields.get("tensors"))
    layout = _expect_text("source_layout", fields.get("source_layout"))
    return CheckpointRecord(
        tool_version=_expect_text("tool_version", fields.get("tool_version")) or "unknown",
        files={name: _expect_size(name, size) for name, size in _expect_mapping("files", fields.get("files")).items()},
        tensors={fqn: _parse_tensor(fqn, value) for fqn, value in tensors.items()},
        source_layout=None if layout is None else CheckpointLayout(layout),
        save_id=_expect_text("save_id", fields.get("save_id")),
    )


def _parse_tensor(fqn: str, value: object) -> TensorRecord:
    fields = _expect_mapping(fqn, value)
    shape = fields.get("shape")
    if not isinstance(shape, list):
        raise ConfigError(f"{fqn}: shape is {describe_value(shape)}, expected a list")
    try:
        return TensorRecord(
            dtype=_expect_text("dtype", fields.get("dtype")) or "",
            shape=tuple(_expect_size("shape", n) for n in shape),
            digest=_expect_text("digest", fields.get("digest")),
        )
    except ConfigError as error:
        raise ConfigError(f"{fqn}: {error}") from error


def _check_version(path: Path, content: object) -> None:
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(version, int) and not isinstance(version, bool) and version > FORMAT_VERSION:
        raise LayoutError(
            f"{path}: written with record format {version}, this release reads up to {FORMAT_VERSION}; "
            "update ckpt-core to read this checkpoint"
        )
    if version is True or version != FORMAT_VERSION:
        raise ConfigError(f"format_version is {describe_value(version)}, expected {FORMAT_VERSION}")


def _expect_mapping(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is {type(value).__name__}, expected an object")
    return value


def _expect_text(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{name} is {describe_value(value)}, expected text")
    return value


def _expect_size(name: str, value: object) -> int:
    if not is_count(value):
        raise ConfigError(f"{name}: {describe_value(value)} is not a non-negative integer")
    return value
