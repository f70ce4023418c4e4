"""May this target be written, and can it hold these tensors?"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from ckpt_core.checkpoint_files import iter_files
from ckpt_core.errors import ConfigError, Problem, TargetError, translate_os_errors
from ckpt_core.record import RECORD_NAME, read_record
from ckpt_core.safetensors_header import build_header
from ckpt_core.spec import TensorSpec
from ckpt_core.terminal import list_some
from safetensors import SafetensorError, deserialize

_SHOWN = 5


def check_target(target: Path, sources: tuple[Path, ...], *, overwrite: bool) -> bool:
    """Refuse a target that would damage something.

    Args:
        target: Directory to write.
        sources: The path that was named as the source, and the directory where its layout was found.
        overwrite: Whether the result of an earlier conversion may be replaced.

    Returns:
        Whether something stands at the target and will be replaced.

    Raises:
        TargetError: The target is a file, holds files that no record lists, or it and the
            source lie in one another. With `overwrite`: it is no result of a conversion.
    """
    for source in sources:
        _check_apart(target, source)
    if not os.path.lexists(target):
        return False
    if not target.is_dir():
        raise TargetError(f"{target}: expected a new or empty directory, found a file; choose another target")
    found = _list_files(target)
    if found and not overwrite:
        raise TargetError(
            f"{target}: expected a new or empty directory, found {_join(found)}; choose another target, or "
            "--overwrite a result of an earlier conversion"
        )
    if found:
        _check_replaceable(target, found)
    return True


def _check_replaceable(target: Path, found: list[str]) -> None:
    """Refuse to replace what was not converted here: above all the checkpoint of a training run."""
    record = read_record(target)
    if record is not None and (record.source_layout is None or record.save_id is not None):
        raise TargetError(
            f"{target}: --overwrite replaces only the result of a conversion, found a checkpoint that a training run "
            "saved; choose another target"
        )
    foreign = sorted(set(found) - ({RECORD_NAME, *record.files} if record else set()))
    if foreign:
        raise TargetError(
            f"{target}: --overwrite replaces only what this program wrote, found {_join(foreign)}, which "
            f"{RECORD_NAME} does not list; move them or choose another target"
        )


def check_tensors(tensors: Mapping[str, TensorSpec]) -> None:
    """Refuse names and dtypes that no safetensors file can hold.

    Args:
        tensors: Specs by the name they get in the output.

    Raises:
        ConfigError: `problems` lists every tensor that cannot be written.
    """
    accepted = {dtype: _holds_dtype(dtype) for dtype in {spec.dtype for spec in tensors.values()}}
    problems = [
        Problem("unsupported", fqn, f"dtype {spec.dtype} is none that safetensors can hold")
        for fqn, spec in tensors.items()
        if not accepted[spec.dtype]
    ]
    problems += [Problem("unsupported", ascii(fqn), reason) for fqn in tensors if (reason := _explain_bad_name(fqn))]
    if problems:
        raise ConfigError(
            f"{len(problems)} tensors cannot be written as safetensors; leave them out when saving, or save them "
            "under another dtype or name",
            problems=problems,
        )


def _check_apart(target: Path, source: Path) -> None:
    here, there = Path(os.path.realpath(target)), Path(os.path.realpath(source))
    if here == there:
        raise TargetError(f"{target}: is the source itself; choose another target")
    if there in here.parents:
        raise TargetError(f"{target}: lies inside the source {source}; choose a target outside of it")
    if here in there.parents:
        raise TargetError(f"{target}: holds the source {source}; choose another target")


def _list_files(target: Path) -> list[str]:
    """List everything below a directory that is no directory itself; what cannot be listed may be anything."""
    with translate_os_errors(target, "cannot be listed, and what is not known is not replaced"):
        return sorted(path.relative_to(target).as_posix() for path in iter_files(target))


def _join(names: list[str]) -> str:
    return ", ".join(list_some(names, _SHOWN))


def _holds_dtype(dtype: str) -> bool:
    """Ask the installed safetensors, by an empty tensor, rather than keep a list of its dtypes."""
    try:
        deserialize(build_header([("x", dtype, (0,), 0)], {}))  # type: ignore[no-untyped-call]
    except SafetensorError:
        return False
    return True


def _explain_bad_name(fqn: str) -> str | None:
    if fqn == "__metadata__":
        return "the name is reserved in safetensors headers"
    try:
        json.dumps(fqn, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "the name is no valid Unicode"
    return None
