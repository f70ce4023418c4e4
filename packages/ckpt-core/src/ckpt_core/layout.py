"""Which layout does a path hold?

`detect_layout` answers for reading: it accepts any level of the trees that trainers write,
looks into safetensors headers where names do not tell, and refuses what is ambiguous.
`detect_checkpoint_format` and `_infer_checkpoint_root` answer as NeMo RL's functions of
these names do, from names alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ckpt_core._foreign import find_foreign_layout
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, LayoutError
from ckpt_core.safetensors_header import INDEX_NAME, SHARDING_KEY, read_header
from ckpt_core.terminal import list_some


class CheckpointLayout(StrEnum):
    """Arrangement of a checkpoint on disk."""

    DCP = "dcp"
    SAFETENSORS = "safetensors"
    SAFETENSORS_SHARDED = "safetensors-sharded"
    ADAPTER = "adapter"
    TORCH = "torch"


@dataclass(frozen=True, slots=True)
class DetectedLayout:
    """A layout, and the directory or file that holds it."""

    layout: CheckpointLayout
    path: Path


DCP_METADATA = ".metadata"
"""Name of the file that makes a directory a DCP."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_ADAPTER_FILES = (ADAPTER_WEIGHTS, "adapter_model.bin", ADAPTER_CONFIG)
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
# Written beside weights by trainers; never the weights themselves.
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "random_states", "meta", "scaler", "adapter")
_OPTIMIZER_PARTS = frozenset({"optim", "optimizer", "optimizer_0"})
_OTHER_PARTS = frozenset({"tokenizer", "runs", "wandb"})
# Other forms of the model that lies one level up; looked into only where that is empty.
_COPIES = ("consolidated", "sharded")
_DEPTH = 6  # run/step_N/policy/weights/model is five levels
_LISTED = 20


def detect_layout(path: str | os.PathLike[str]) -> DetectedLayout:
    """Find the one model checkpoint at or below `path`.

    Any level of a trainer's tree will do: a step, `policy`, `weights`, `model`, one file, a
    snapshot in a Hugging Face cache. Optimizer and tokenizer parts, hidden and unfinished
    (`tmp_*`) directories below `path` are passed over.

    Raises:
        CheckpointNotFoundError: Nothing is there.
        LayoutError: No layout known here, another system's, or several candidates.
    """
    try:
        return _detect(Path(path))
    except CheckpointError:
        raise
    except OSError as err:
        raise LayoutError(
            f"{err.filename or path}: cannot be looked into: {err.strerror}; check the permissions"
        ) from err


def _detect(start: Path) -> DetectedLayout:
    if not start.exists():
        raise CheckpointNotFoundError(f"{start}: expected a checkpoint, found nothing; check the path")
    if start.is_file():
        return _detect_file(start)
    # Who names an optimizer's directory wants the optimizer.
    skipped = _OTHER_PARTS if start.name in _OPTIMIZER_PARTS else _OTHER_PARTS | _OPTIMIZER_PARTS
    candidates = list(_walk(start, skipped, {}, _DEPTH))
    unique = {candidate.path.resolve(): candidate for candidate in reversed(candidates)}
    if len(unique) == 1:
        return next(iter(unique.values()))
    if not unique:
        raise LayoutError(
            f"{start}: expected a checkpoint (DCP, safetensors, an adapter), found none there or below;"
            " name the directory that holds the weights"
        )
    listed = list_some([f"{c.path} ({c.layout})" for c in reversed(unique.values())], _LISTED)
    lines = [f"{start}: expected one checkpoint, found {len(unique)}; name one of them:", *listed]
    raise LayoutError("\n  - ".join(lines))


def _detect_file(path: Path) -> DetectedLayout:
    if path.name == DCP_METADATA or path.suffix == ".distcp":
        return DetectedLayout(CheckpointLayout.DCP, path.parent)
    if path.name in _ADAPTER_FILES:
        return DetectedLayout(CheckpointLayout.ADAPTER, path.parent)
    if path.name == INDEX_NAME:
        return DetectedLayout(CheckpointLayout.SAFETENSORS, path.parent)
    if path.suffix == ".safetensors":
        return DetectedLayout(_tell_sharded([path]), path)
    if path.suffix in _TORCH_SUFFIXES:
        return DetectedLayout(CheckpointLayout.TORCH, path)
    raise LayoutError(f"{path}: expected a file of a checkpoint, found none by that name; name its directory")


def _walk(
    directory: Path, skipped: frozenset[str], seen: dict[tuple[int, int], int], depth: int
) -> Iterator[DetectedLayout]:
    """Yield the layouts at a directory; below it only if there are none.

    Args:
        directory: Where to look.
        skipped: Names of directories that are passed over.
        seen: Depth below each directory without a layout so far, by device and inode; a link
            back to one leads nowhere new.
        depth: How many levels below may be looked into.
    """
    names = sorted(entry.name for entry in directory.iterdir())
    if foreign := find_foreign_layout(names):
        raise LayoutError(
            f"{directory}: found a checkpoint of {foreign.name}, which is not read here; {foreign.remedy}"
        )
    here = [DetectedLayout(layout, directory) for layout in _find_layouts(directory, names)]
    if len(here) > 1:
        kinds = ", ".join(found.layout for found in here)
        raise LayoutError(f"{directory}: expected one layout, found {kinds} side by side; remove what is left over")
    yield from here
    status = directory.stat()
    key = status.st_dev, status.st_ino
    if here or depth <= seen.get(key, 0):
        return
    seen[key] = depth
    below = [name for name in names if not (name in skipped or name in _COPIES or name.startswith((".", "tmp_")))]
    for name in [*below, *(name for name in _COPIES if name in names)]:
        if (directory / name).is_dir():
            yield from _walk(directory / name, skipped, seen, depth - 1)


def _find_layouts(directory: Path, names: list[str]) -> list[CheckpointLayout]:
    """Return every layout whose files lie in the directory itself."""
    found: list[CheckpointLayout] = []
    if DCP_METADATA in names:
        found.append(CheckpointLayout.DCP)
    elif any(name.endswith(DCP_METADATA) for name in names):
        raise LayoutError(
            f"{directory}: expected one {DCP_METADATA}, found one per rank; save with collectives to get a DCP"
            " that can be read as a whole"
        )
    elif any(name.endswith(".distcp") for name in names):
        raise LayoutError(
            f"{directory}: expected {DCP_METADATA} beside the .distcp files, found none;"
            " the save did not finish, or the file was not copied"
        )
    if ADAPTER_WEIGHTS in names:
        found.append(CheckpointLayout.ADAPTER)
    weights = [name for name in names if is_safetensors_weights(name)]
    if INDEX_NAME in names:
        found.append(CheckpointLayout.SAFETENSORS)
    elif weights:
        found.append(_tell_sharded([directory / name for name in weights]))
    if not found and any(_is_torch_weights(name) for name in names):
        found.append(CheckpointLayout.TORCH)
    return found


def is_safetensors_weights(name: str) -> bool:
    """Whether a file of that name holds weights of a model as safetensors; an adapter's are not."""
    return name.endswith(".safetensors") and not name.startswith(("adapter_model", "."))


def _is_torch_weights(name: str) -> bool:
    return name.endswith(_TORCH_SUFFIXES) and not name.startswith(_NO_WEIGHTS)


def _tell_sharded(paths: list[Path]) -> CheckpointLayout:
    """Tell chunks of ranks from whole tensors by the metadata of the first header that can be read."""
    for path in paths:
        try:
            sharded = SHARDING_KEY in read_header(path).metadata
        except CheckpointError:
            continue
        return CheckpointLayout.SAFETENSORS_SHARDED if sharded else CheckpointLayout.SAFETENSORS
    return CheckpointLayout.SAFETENSORS


def detect_checkpoint_format(weights_path: str | os.PathLike[str]) -> tuple[str, bool]:
    """Tell the save format of nemo_automodel, and whether it is an adapter, from file names alone.

    Args:
        weights_path: Directory of the weights, such as `.../weights/model`; everything below
            it counts, its own name does not.

    Returns:
        `("torch_save", ...)` for DCP or pickled files, `("safetensors", ...)` for safetensors
        and for a directory that is empty or absent; and whether adapter files are there,
        outside `optim` and `consolidated`.
    """
    names, is_peft = set(), False
    for parts in _list_files(weights_path):
        names.add(parts[-1])
        is_peft |= parts[-1] in _ADAPTER_FILES and not {"optim", "consolidated"} & set(parts[:-1])
    for suffixes, save_format in _FORMATS:
        if any(name.endswith(suffixes) for name in names):
            return save_format, is_peft
    return "safetensors", is_peft


_FORMATS = (((".distcp",), "torch_save"), ((".safetensors",), "safetensors"), (_TORCH_SUFFIXES, "torch_save"))


def _list_files(root: str | os.PathLike[str]) -> list[tuple[str, ...]]:
    """List the files below `root` by their components; what cannot be listed is left out."""
    try:
        top = os.fspath(root)  # as it is: the empty path is nothing, not the current directory
        return [
            (*Path(os.path.relpath(parent, top)).parts, name) for parent, _, names in os.walk(top) for name in names
        ]
    except (TypeError, ValueError):
        return []


def _infer_checkpoint_root(weights_path: str | os.PathLike[str]) -> str:
    """Return the directory above `weights` for `.../weights/model`, the parent for any other path."""
    parent = os.path.dirname(os.path.normpath(os.fspath(weights_path)))  # noqa: PTH120  the result is a string, "" included
    return os.path.dirname(parent) if os.path.basename(parent) == "weights" else parent  # noqa: PTH119, PTH120  as above
