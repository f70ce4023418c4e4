"""Which tensor goes into which safetensors file, and where in it?

The files are what Hugging Face loaders look for: `model.safetensors`, or
`model-00001-of-0000N.safetensors` and an index. Names decide the order, layers counted as
numbers, so that every sharding of the same tensors gives the same files. Within a file wide
dtypes come first, as the safetensors writer does it, which aligns every tensor to its
element size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ckpt_core.errors import ConfigError
from ckpt_core.safetensors_header import MAX_HEADER_BYTES, SINGLE_NAME, build_header
from ckpt_core.spec import DTYPE_BITS, TensorSpec

_LENGTH_BYTES = 8
"""Before the JSON of a header, which is what readers limit."""
# Several consumers read `metadata["format"]` without asking whether it is there.
_METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of an output file."""

    fqn: str
    """Name in the output."""
    spec: TensorSpec = field(repr=False)
    """What the source holds, under the name it has there."""
    offset: int
    """Of the first byte in the output file."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One safetensors file, complete but for the bytes of its tensors."""

    name: str
    header: bytes = field(repr=False)
    """What stands before the tensors: length, JSON, padding."""
    tensors: tuple[PlannedTensor, ...] = field(repr=False)
    """In the order of their offsets."""
    size: int
    """In bytes, the header included."""


def lay_out_files(tensors: dict[str, TensorSpec], max_shard_size: int) -> tuple[PlannedFile, ...]:
    """Distribute tensors over files.

    Args:
        tensors: Specs by the name they get in the output.
        max_shard_size: Bytes of tensors in a file; a larger tensor gets a file of its own.

    Returns:
        The files in order, at least one.

    Raises:
        ConfigError: A header is longer than safetensors readers accept.
    """
    groups = _split_groups(sorted(tensors.items(), key=lambda item: (_count_layers(item[0]), item[0])), max_shard_size)
    return tuple(_lay_out_file(_name_file(i, len(groups)), group) for i, group in enumerate(groups))


def build_index(files: Sequence[PlannedFile]) -> bytes:
    """Write the index that names the file of every tensor; `total_size` is in bytes of tensors."""
    content = {
        "metadata": {"total_size": sum(file.size - len(file.header) for file in files)},
        "weight_map": {tensor.fqn: file.name for file in files for tensor in file.tensors},
    }
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _split_groups(tensors: Iterable[tuple[str, TensorSpec]], limit: int) -> list[list[tuple[str, TensorSpec]]]:
    groups: list[list[tuple[str, TensorSpec]]] = [[]]
    filled = 0
    for fqn, spec in tensors:
        if groups[-1] and filled + spec.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append((fqn, spec))
        filled += spec.nbytes
    return groups


def _lay_out_file(name: str, tensors: list[tuple[str, TensorSpec]]) -> PlannedFile:
    # The sort is stable: tensors of one width stay in the order of their names.
    ordered = sorted(tensors, key=lambda item: -DTYPE_BITS[item[1].dtype])
    header = build_header(((fqn, spec.dtype, spec.shape, spec.nbytes) for fqn, spec in ordered), _METADATA)
    if len(header) - _LENGTH_BYTES > MAX_HEADER_BYTES:
        raise ConfigError(
            f"{name}: a header of {len(header):,} bytes for {len(ordered):,} tensors, safetensors readers accept "
            f"{MAX_HEADER_BYTES:,}; choose a smaller --max-shard-size"
        )
    planned = []
    offset = len(header)
    for fqn, spec in ordered:
        planned.append(PlannedTensor(fqn, spec, offset))
        offset += spec.nbytes
    return PlannedFile(name, header, tuple(planned), offset)


def _name_file(index: int, count: int) -> str:
    return SINGLE_NAME if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _count_layers(fqn: str) -> list[tuple[int, str]]:
    """Make `layers.2` sort before `layers.10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", fqn)]
