"""Headers and indexes of safetensors files: parse, validate, build.

A file is an 8-byte little-endian length, that many bytes of JSON, and the tensors' bytes
without gaps. What is accepted is what the safetensors library accepts, so that a file read
here can be read everywhere: https://github.com/huggingface/safetensors#format.

Nothing in a file is trusted: a length, an offset, a shape, a dtype or a name that cannot be
right becomes one error that lists every fault.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ckpt_core.checkpoint_files import describe_entry, find_name_fault, find_size, read_range, read_whole
from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError, Problem, ProblemKind, describe_value
from ckpt_core.spec import DTYPE_BITS, MAX_DIMS, find_shape_fault, is_count
from ckpt_core.strict_json import parse_strict_json

MAX_HEADER_BYTES = 100_000_000
"""The library refuses larger headers."""

INDEX_NAME = "model.safetensors.index.json"
"""File that says which file of a set holds which tensor."""

SINGLE_NAME = "model.safetensors"
"""The file of a model that takes only one; loaders open it without asking an index."""

SHARDING_KEY = "DCP_SHARDING_INFO"
"""Metadata key of the JSON that places a rank's chunks; only sharded files have it."""

_LENGTH_BYTES = 8
_ALIGNMENT = 8  # tensors begin at a multiple of this many bytes
_FOREIGN_DTYPES = frozenset({"C32", "C128"})  # named in DTYPE_BITS, unknown to safetensors
_METADATA_KEY = "__metadata__"


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Of the first byte in the file."""
    length: int
    """In bytes."""


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A validated header."""

    entries: Mapping[str, HeaderEntry]
    """By name, in the order of the header."""
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SafetensorsIndex:
    """A validated index of a set of files."""

    weight_map: Mapping[str, str]
    """Name of each tensor -> name of the file that holds it."""


def read_header(path: Path, *, start: int = 0, end: int | None = None) -> SafetensorsHeader:
    """Read and validate the header of a file, or of a file inside another one.

    Args:
        path: The file.
        start: Where the safetensors data begin, in bytes.
        end: Where they end; the end of the file if None.

    Raises:
        CheckpointNotFoundError: No such file.
        CorruptCheckpointError: The header or the size of the file cannot be right; `problems`
            says in which ways (`bad_header`, `short_file`).
    """
    size = find_size(path)
    if size is None:
        msg = f"{path}: expected a safetensors file, found {describe_entry(path)}"
        raise CheckpointNotFoundError(msg)
    end = size if end is None else end
    raw = _read_json(path, start, end)
    return _HeaderParser(path, start + _LENGTH_BYTES + len(raw), end).parse(raw)


def build_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """Build the bytes that precede the tensors of a file, the length included.

    Args:
        tensors: Name, dtype string, shape in elements and length in bytes, in the order in
            which the tensors' bytes follow.
        metadata: Text by key; left out if empty. Several consumers need `{"format": "pt"}`.
    """
    content: dict[str, object] = {_METADATA_KEY: dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape, length in tensors:
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + length]}
        end += length
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_index(path: Path) -> SafetensorsIndex:
    """Read and validate a `model.safetensors.index.json`.

    Raises:
        CheckpointNotFoundError: No such file.
        CorruptCheckpointError: It is no JSON index, no regular file, or names a file outside its directory.
    """
    content = _load_object(path, read_whole(path))
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict):
        raise _refuse(path, f"expected a weight_map of names, found {type(weight_map).__name__}")
    for name, file in weight_map.items():
        if fault := find_name_fault(file):
            raise _refuse(path, f"expected {name!r} in a file beside the index, found {describe_value(file)}: {fault}")
    return SafetensorsIndex(MappingProxyType(weight_map))


def read_sharding(header: SafetensorsHeader) -> Mapping[str, object] | None:
    """Return what a header says about chunks, by tensor; None if it says nothing that can be read."""
    try:
        content = parse_strict_json(header.metadata.get(SHARDING_KEY) or "null")
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _read_json(path: Path, start: int, end: int) -> bytes:
    if end - start < _LENGTH_BYTES:
        raise _refuse(path, f"expected at least {_LENGTH_BYTES} bytes, found {end - start}", "short_file")
    length = int.from_bytes(read_range(path, start, _LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise _refuse(path, f"expected a header of at most {MAX_HEADER_BYTES} bytes, found a length of {length}")
    if start + _LENGTH_BYTES + length > end:
        found = f"expected a header of {length} bytes, found a file that ends before; the copy is cut short"
        raise _refuse(path, found, "short_file")
    return read_range(path, start + _LENGTH_BYTES, length)


def _refuse(path: Path, fault: str, kind: ProblemKind = "bad_header") -> CorruptCheckpointError:
    return _refuse_all(path, [Problem(kind, path.name, fault)])


def _refuse_all(path: Path, problems: list[Problem]) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path}: cannot be used as a safetensors file or index", problems=problems)


def _load_object(path: Path, raw: bytes) -> dict[str, object]:
    """Parse JSON strictly: UTF-8, one object, no key twice, every key printable as UTF-8."""
    if raw[:1] != b"{":
        raise _refuse(path, "expected JSON that begins with '{', found something else")
    try:
        content = parse_strict_json(raw.decode())
    except ValueError as err:
        raise _refuse(path, f"expected valid JSON, found: {err}") from err
    if not isinstance(content, dict):  # pragma: no cover  JSON that begins with a brace is an object
        raise _refuse(path, "expected a JSON object")
    return content


class _HeaderParser:
    """Collects the entries and the faults of one header."""

    def __init__(self, path: Path, data_start: int, data_end: int) -> None:
        self.path = path
        self.data_start = data_start
        self.data_end = data_end
        self.problems: list[Problem] = []

    def parse(self, raw: bytes) -> SafetensorsHeader:
        content = _load_object(self.path, raw)
        metadata = self._parse_metadata(content.pop(_METADATA_KEY, {}))
        entries = {name: entry for name, value in content.items() if (entry := self._parse_entry(name, value))}
        if not self.problems:
            self._check_bytes(entries)
        if self.problems:
            raise _refuse_all(self.path, self.problems)
        return SafetensorsHeader(MappingProxyType(entries), MappingProxyType(metadata))

    def _report(self, fault: str, kind: ProblemKind = "bad_header") -> None:
        self.problems.append(Problem(kind, self.path.name, fault))

    def _parse_metadata(self, value: object) -> dict[str, str]:
        if value is None:
            return {}
        if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
            return value
        self._report(f"expected {_METADATA_KEY} to map names to text, found {type(value).__name__} or other values")
        return {}

    def _parse_entry(self, name: str, value: object) -> HeaderEntry | None:
        match value:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
                fault = _find_fault(dtype, shape, begin, end)
                if fault is None:
                    return HeaderEntry(dtype, tuple(shape), self.data_start + begin, end - begin)
            case _:
                fault = "expected dtype, shape and data_offsets"
        self._report(f"tensor {name!r}: {fault}")
        return None

    def _check_bytes(self, entries: Mapping[str, HeaderEntry]) -> None:
        """Check that the tensors follow one another without gaps, and fill the file."""
        end = self.data_start
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].length)):
            if entry.offset != end:
                begin = entry.offset - self.data_start
                self._report(f"tensor {name!r}: expected to begin at byte {end - self.data_start}, found {begin}")
                return
            end += entry.length
        described, held = end - self.data_start, self.data_end - self.data_start
        if described > held:
            self._report(f"expected {described} bytes of tensors, found {held}; the copy is cut short", "short_file")
        elif described < held:
            self._report(f"expected {described} bytes of tensors, found {held}; the file was not written in one piece")


def _find_fault(dtype: str, shape: list[object], begin: int, end: int) -> str | None:
    """Say what is wrong with one entry; None if nothing is."""
    if dtype not in DTYPE_BITS or dtype in _FOREIGN_DTYPES:
        return f"dtype {describe_value(dtype)} is not known here"
    if len(shape) > MAX_DIMS or not all(is_count(size) for size in shape):
        return f"the shape is not a list of at most {MAX_DIMS} sizes"
    sizes = [size for size in shape if isinstance(size, int)]
    if fault := find_shape_fault(sizes):
        return f"the shape has {fault}"
    if not (is_count(begin) and is_count(end)):
        return "data_offsets are not two offsets"
    bits = math.prod(sizes) * DTYPE_BITS[dtype]
    if bits != (end - begin) * 8:
        return f"expected data_offsets that fit {dtype} of shape {shape}, found {end - begin} bytes"
    return None
