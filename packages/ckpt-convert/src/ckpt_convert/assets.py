"""Which small files belong beside the weights, and where do they come from?

A folder of tensors opens nowhere: config, generation config, tokenizer, chat template and
custom code go with them, byte for byte. They are looked for in a directory the user names,
or else where trainers leave them:

- `.hf_metadata/` in the checkpoint, as nemo_automodel writes it beside sharded safetensors;
- the checkpoint's own directory, when a `config.json` lies there;
- `tokenizer/` beside it, or beside the `weights/` that it lies in, as NeMo RL writes
  `policy/tokenizer` beside `policy/weights`.

Weights, their index and the FQN mappings of `.hf_metadata/` describe the source's files and
never go along.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.checkpoint_files import describe_entry, find_size, raise_walk_error
from ckpt_core.errors import CheckpointNotFoundError, LayoutError
from ckpt_core.layout import ADAPTER_CONFIG

_DATA_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
_NESTED_SUFFIXES = frozenset({".py", ".jinja"})
"""Custom code and chat templates may lie in folders of their own."""
_WEIGHT_FILES = ("*.index.json", "fqn_to_*_mapping.json", ADAPTER_CONFIG)
_TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "*.jinja",
    "*processor_config.json",
)


@dataclass(frozen=True, slots=True)
class Asset:
    """A small file to copy beside the weights."""

    name: str
    """Path relative to the output directory, with forward slashes."""
    source: Path
    size: int
    """In bytes."""


def find_assets(checkpoint: Path, assets_dir: Path | None, *, exclude: frozenset[str]) -> tuple[Asset, ...]:
    """Find the files that make a folder of tensors a model.

    Args:
        checkpoint: Directory that holds the checkpoint's layout.
        assets_dir: Where to look, and nowhere else; None looks where trainers leave them.
        exclude: Names that the conversion writes itself.

    Returns:
        Assets sorted by name. Config and code come from one directory, the tokenizer from
        one, so that parts of two models never mix.

    Raises:
        CheckpointNotFoundError: `assets_dir` is no directory, or a file to copy leads nowhere.
        LayoutError: A directory cannot be listed.
    """
    if assets_dir is not None and not assets_dir.is_dir():
        raise CheckpointNotFoundError(f"{assets_dir}: expected a directory with config.json and tokenizer files")
    places = [assets_dir] if assets_dir is not None else _list_places(checkpoint)
    model: dict[str, Asset] = {}
    tokenizer: dict[str, Asset] = {}
    for place in places:
        found = {asset.name: asset for asset in _list_assets(place) if asset.name not in exclude}
        theirs = {name: asset for name, asset in found.items() if _is_tokenizer(name)}
        tokenizer = tokenizer or theirs
        model = model or {name: asset for name, asset in found.items() if name not in theirs}
    return tuple(sorted((model | tokenizer).values(), key=lambda asset: asset.name))


def describe_missing(assets: tuple[Asset, ...]) -> list[str]:
    """Say what a loader will miss; empty when config and tokenizer are both there."""
    missing = []
    if not any(asset.name == "config.json" for asset in assets):
        missing.append("no config.json found: the result holds tensors that no model class is named for")
    if not any(_is_tokenizer(asset.name) for asset in assets):
        missing.append("no tokenizer files found")
    return [f"{text}; name their directory with --assets" for text in missing]


def _list_places(checkpoint: Path) -> list[Path]:
    own = [checkpoint] if (checkpoint / "config.json").is_file() else []
    # NeMo RL: policy/weights/model or policy/weights, beside policy/tokenizer.
    parent = checkpoint.parent
    beside = [parent / "tokenizer", *([parent.parent / "tokenizer"] if parent.name == "weights" else [])]
    return [place for place in (checkpoint / ".hf_metadata", *own, *beside) if place.is_dir()]


def _list_assets(place: Path) -> Iterator[Asset]:
    for path in _list_files(place):
        name = path.relative_to(place)
        suffixes = _NESTED_SUFFIXES if len(name.parts) > 1 else _NESTED_SUFFIXES | _DATA_SUFFIXES
        if path.suffix not in suffixes or name.name.startswith(".") or _is_of_weights(name):
            continue
        size = find_size(path)
        if size is None:
            raise CheckpointNotFoundError(
                f"{path}: expected a file to copy beside the weights, found {describe_entry(path)}; mend or remove it"
            )
        yield Asset(name.as_posix(), path, size)


def _list_files(place: Path) -> list[Path]:
    """List the files below a directory, hidden directories left out."""
    found: list[Path] = []
    try:
        for parent, directories, names in os.walk(place, onerror=raise_walk_error):
            directories[:] = [name for name in directories if not name.startswith((".", "__pycache__"))]
            found += (Path(parent, name) for name in names)
    except OSError as error:
        raise LayoutError(
            f"{error.filename}: cannot be looked into ({error.strerror}), expected config and tokenizer files; "
            "check the permissions, or name another directory with --assets"
        ) from error
    return sorted(found)


def _is_of_weights(name: Path) -> bool:
    return any(name.match(pattern) for pattern in _WEIGHT_FILES)


def _is_tokenizer(name: str) -> bool:
    return any(Path(name).match(pattern) for pattern in _TOKENIZER_FILES)
