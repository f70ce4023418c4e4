"""What the `.metadata` of a DCP says, as frozen values of this package.

The file is one pickle of torch's `Metadata`. It is read as inert records (see
`inert_pickle`), never by unpickling, and taken apart here:

- `state_dict_metadata`: FQN -> tensor (dtype, global shape, chunks) or bytes;
- `storage_data`: (FQN, offsets of a chunk) -> file, offset and length of the item;
- `planner_data`: FQN -> path in the nested state dict it was flattened from.

An attribute that is not known is passed over, so that files of newer releases can be read; a
class that is not known is refused. Chunks without elements are left out: nothing can be read
from them, and old releases recorded them at the offsets of other chunks.

Source: torch/distributed/checkpoint/metadata.py and filesystem.py (2.0 to 2.13), and their
predecessors in torch/distributed/_shard/checkpoint (1.13).
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeGuard

from ckpt_core.checkpoint_files import find_name_fault
from ckpt_core.coverage import Box
from ckpt_core.dtypes import DTYPE_OF_TORCH
from ckpt_core.errors import CorruptCheckpointError, Problem, describe_value
from ckpt_core.inert_pickle import (
    Construct,
    ForbiddenCallError,
    Global,
    Record,
    allow_records,
    load_pickle,
    make_empty_dict,
    refuse_call,
)
from ckpt_core.spec import MAX_DIMS, Chunk, Nesting, ObjectSpec, StoredRange, TensorSpec, find_shape_fault, is_count

_Where = tuple[str, tuple[int, ...] | None]
_MAX_NESTING = 256  # a path deeper than that is none of a state dict

_CHECKPOINT_MODULES = ("torch.distributed.checkpoint", "torch.distributed._shard.checkpoint")
_METADATA_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_PATH_CLASSES = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path", "PurePath")
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """The contents of a `.metadata` file."""

    tensors: Mapping[str, TensorSpec]
    objects: Mapping[str, ObjectSpec]
    nesting: Mapping[str, Nesting]
    stored: tuple[tuple[str, StoredRange], ...]
    """FQN and place of every item in the files, also of those without elements."""
    problems: tuple[Problem, ...]
    """What the file says that cannot be read here, or that contradicts itself."""


def parse_dcp_metadata(data: bytes, source: str) -> DcpMetadata:
    """Read a `.metadata` file.

    Args:
        data: Its bytes.
        source: What to call it in errors: its path.

    Raises:
        UnsafePickleError: It names a class or function that does not belong there.
        CorruptCheckpointError: It is truncated, malformed, or no `Metadata`.
    """
    root = load_pickle(data, _ALLOWED, source=source)
    if not _is_record(root, "Metadata"):
        raise _fault(source, "a Metadata", root)
    return _MetadataReader(source, len(data)).read(root)


def _make_size(args: tuple[object, ...]) -> object:
    """Stand for `torch.Size(sequence)`."""
    sizes = args[0] if args else ()
    if not isinstance(sizes, tuple | list):
        raise TypeError("a torch.Size that is no tuple")
    # Also because each call copies a list, which a few bytes can name again and again.
    if len(sizes) > MAX_DIMS:
        raise ValueError(f"a torch.Size of {len(sizes):,} dimensions, more than the {MAX_DIMS} that can be read")
    return tuple(sizes)


def _get_enum_member(args: tuple[object, ...]) -> object:
    """Stand for `getattr(enum, name)`, as Python 3.11.0 pickles a member; for no other getattr."""
    match args:
        case (Global(name=owner), str(member)) if owner.upper().endswith("MEM_FORMAT_ENCODING"):
            return Record(owner, (member,))
    raise ForbiddenCallError("getattr on something else than an enumeration")


_ALLOWED: dict[str, Construct] = {
    **allow_records(*(f"{module}.metadata.{name}" for module in _CHECKPOINT_MODULES for name in _METADATA_CLASSES)),
    **allow_records(*(f"{module}.filesystem._StorageInfo" for module in _CHECKPOINT_MODULES)),
    **allow_records("nemo_automodel.components.checkpoint._backports.filesystem._StorageInfo"),
    **allow_records("torch.distributed._shard.metadata.ShardMetadata"),
    **allow_records(*(f"{_SHARDED_TENSOR}.{name}" for name in ("TensorProperties", "MEM_FORMAT_ENCODING"))),
    **allow_records(f"{_SHARDED_TENSOR}.ShardedTensorMetadata"),
    **allow_records(*(f"pathlib.{name}" for name in _PATH_CLASSES)),
    **allow_records(*(f"pathlib._local.{name}" for name in _PATH_CLASSES)),
    **allow_records("torch.serialization._get_layout", "torch.device"),
    "torch.Size": _make_size,
    "collections.OrderedDict": make_empty_dict,
    "builtins.dict": make_empty_dict,
    "builtins.getattr": _get_enum_member,
    **dict.fromkeys((f"torch.{name}" for name in DTYPE_OF_TORCH), refuse_call),
    **dict.fromkeys((f"torch.{name}" for name in ("quint8", "qint8", "qint32", "quint4x2", "quint2x4")), refuse_call),
    **dict.fromkeys((f"torch.{s}int{bits}" for s in ("", "u") for bits in range(1, 8)), refuse_call),
    **dict.fromkeys(("torch.bits8", "torch.bits16", "torch.bits1x8", "torch.bits2x4", "torch.bits4x2"), refuse_call),
}
"""Every name that a `.metadata` may hold; what is made of it is inert."""


def _fault(source: str, expected: str, found: object) -> CorruptCheckpointError:
    name = found.name if isinstance(found, Record | Global) else type(found).__name__
    return CorruptCheckpointError(f"{source}: expected {expected}, found {name}; the metadata is damaged")


def _is_record(value: object, name: str) -> TypeGuard[Record]:
    return isinstance(value, Record) and value.name.rpartition(".")[2] == name


def _find_fields(record: Record) -> Mapping[str, object]:
    """Return the attributes of an instance: from its dict, its slots, or both."""
    state = record.state
    # Views, not copies: many records may share one large dict.
    parts = state[:2] if isinstance(state, tuple) else (state,)
    return ChainMap(*(part for part in reversed(parts) if isinstance(part, dict)))


class _MetadataReader:
    """Takes a `Metadata` record apart; everything unexpected is an error that names the file."""

    def __init__(self, source: str, nbytes: int) -> None:
        self.source = source
        self.chunks_left = nbytes
        """No writer names one list of chunks for many tensors, which would be quadratic work."""
        self.problems: list[Problem] = []
        self.tensors: dict[str, TensorSpec] = {}
        self.objects: dict[str, ObjectSpec] = {}

    def read(self, root: Record) -> DcpMetadata:
        fields = _find_fields(root)
        stored = self._read_storage(fields.get("storage_data"))
        items = tuple((fqn, place) for (fqn, _), place in stored.items())
        for fqn, entry in self._expect_dict(fields.get("state_dict_metadata"), "state_dict_metadata").items():
            self._read_entry(fqn, entry, stored)
        self.problems += [
            Problem("unexpected_tensor", fqn, f"stored at {offsets}, but the metadata lists no such entry")
            for fqn, offsets in stored
        ]
        return DcpMetadata(
            MappingProxyType(self.tensors),
            MappingProxyType(self.objects),
            MappingProxyType(self._read_nesting(fields.get("planner_data"))),
            items,
            tuple(self.problems),
        )

    def _expect_dict(self, value: object, what: str) -> Mapping[object, object]:
        if not isinstance(value, dict):
            raise _fault(self.source, f"{what} to be a dict", value)
        return value

    # storage_data

    def _read_storage(self, value: object) -> dict[_Where, StoredRange]:
        stored: dict[_Where, StoredRange] = {}
        for key, info in self._expect_dict(value, "storage_data").items():
            where = self._read_index(key)
            if where in stored:
                msg = f"{self.source}: expected one place per chunk, found two for {where[0]!r} at {where[1]}"
                raise CorruptCheckpointError(msg)
            stored[where] = self._read_info(where[0], info)
        return stored

    def _read_index(self, key: object) -> _Where:
        if not _is_record(key, "MetadataIndex"):
            raise _fault(self.source, "a MetadataIndex as key of storage_data", key)
        fields = _find_fields(key)
        fqn, offset = fields.get("fqn"), fields.get("offset")
        if not isinstance(fqn, str):
            raise _fault(self.source, "a MetadataIndex with a name", fqn)
        return fqn, None if offset is None else self._read_counts(offset, fqn)

    def _read_info(self, fqn: str, info: object) -> StoredRange:
        if not _is_record(info, "_StorageInfo"):
            raise _fault(self.source, f"a _StorageInfo for {fqn!r}", info)
        fields = _find_fields(info)
        file, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
        fault = find_name_fault(file)
        if fault is not None or not isinstance(file, str):
            msg = f"{self.source}: expected {fqn!r} in a file beside it, found {describe_value(file)}: {fault}"
            raise CorruptCheckpointError(msg)
        if not (is_count(offset) and is_count(length)):
            raise _fault(self.source, f"an offset and a length for {fqn!r}", offset)
        if fields.get("transform_descriptors"):
            message = "its bytes were transformed on writing (compressed, for instance); that cannot be undone here"
            self.problems.append(Problem("unsupported", fqn, message))
        return StoredRange(file, offset, length, "torch_save")

    # state_dict_metadata

    def _read_entry(self, fqn: object, entry: object, stored: dict[_Where, StoredRange]) -> None:
        if not isinstance(fqn, str):
            raise _fault(self.source, "names in state_dict_metadata", fqn)
        if _is_record(entry, "BytesStorageMetadata"):
            self._read_object(fqn, stored)
        elif _is_record(entry, "TensorStorageMetadata"):
            self._read_tensor(fqn, _find_fields(entry), stored)
        else:
            raise _fault(self.source, f"a tensor or bytes as {fqn!r}", entry)

    def _read_object(self, fqn: str, stored: dict[_Where, StoredRange]) -> None:
        place = stored.pop((fqn, None), None)
        if place is None:
            self.problems.append(Problem("missing_tensor", fqn, "the metadata lists this object, but no place for it"))
        else:
            self.objects[fqn] = ObjectSpec(fqn, place)

    def _read_tensor(self, fqn: str, fields: Mapping[str, object], stored: dict[_Where, StoredRange]) -> None:
        shape = self._read_counts(fields.get("size"), fqn)
        if fault := find_shape_fault(shape):
            raise CorruptCheckpointError(f"{self.source}: the shape of {describe_value(fqn)} has {fault}")
        boxes = self._read_boxes(fqn, fields.get("chunks"))
        chunks = self._place_chunks(fqn, boxes, stored)
        dtype = self._read_dtype(fqn, fields.get("properties"))
        if dtype is None:
            return
        scale = 2 if dtype == "F4" and shape else 1
        self.tensors[fqn] = TensorSpec(fqn, dtype, _scale(shape, scale), tuple(_scale_chunk(c, scale) for c in chunks))

    def _read_boxes(self, fqn: str, chunks: object) -> list[Box]:
        if not isinstance(chunks, list):
            raise _fault(self.source, f"a list of chunks for {fqn!r}", chunks)
        self.chunks_left -= len(chunks)
        if self.chunks_left < 0:
            raise CorruptCheckpointError(f"{self.source}: lists more chunks than it has bytes; the metadata is damaged")
        boxes = []
        for chunk in chunks:
            if not _is_record(chunk, "ChunkStorageMetadata"):
                raise _fault(self.source, f"a ChunkStorageMetadata in {fqn!r}", chunk)
            fields = _find_fields(chunk)
            boxes.append((self._read_counts(fields.get("offsets"), fqn), self._read_counts(fields.get("sizes"), fqn)))
        return boxes

    def _place_chunks(self, fqn: str, boxes: list[Box], stored: dict[_Where, StoredRange]) -> list[Chunk]:
        chunks = []
        places = {offsets: stored.get((fqn, offsets)) for offsets, _ in boxes}
        for offsets, sizes in boxes:
            place = places[offsets]
            if not math.prod(sizes):
                continue
            if place is None:
                message = f"no file is named for the chunk at {offsets} of sizes {sizes}"
                self.problems.append(Problem("hole", fqn, message))
            else:
                chunks.append(Chunk(offsets, sizes, place))
        for offsets in places:
            stored.pop((fqn, offsets), None)
        return chunks

    def _read_dtype(self, fqn: str, properties: object) -> str | None:
        """Return the dtype string, or None after reporting why the tensor cannot be read."""
        if not _is_record(properties, "TensorProperties"):
            raise _fault(self.source, f"the properties of {fqn!r}", properties)
        dtype, layout = self._read_properties(fqn, properties)
        if not isinstance(dtype, Global):
            raise _fault(self.source, f"a dtype for {fqn!r}", dtype)
        name = dtype.name.removeprefix("torch.")
        if name not in DTYPE_OF_TORCH:
            self.problems.append(Problem("unsupported", fqn, f"dtype {dtype.name} cannot be read"))
            return None
        if _is_record(layout, "_get_layout") and layout.args != ("torch.strided",):
            self.problems.append(Problem("unsupported", fqn, "the tensor is sparse; only strided tensors can be read"))
            return None
        return DTYPE_OF_TORCH[name]

    def _read_properties(self, fqn: str, properties: Record) -> tuple[object, object]:
        """Return dtype and layout: the first two of a tuple, or attributes by name."""
        match properties.state:
            case (dtype, layout, _, _, *_):
                return dtype, layout
            case dict() as fields if "dtype" in fields:
                return fields["dtype"], fields.get("layout")
        raise _fault(self.source, f"the properties of {fqn!r}", properties.state)

    def _read_counts(self, value: object, fqn: str) -> tuple[int, ...]:
        if isinstance(value, tuple | list) and len(value) > MAX_DIMS:
            raise CorruptCheckpointError(
                f"{self.source}: {describe_value(fqn)} has {len(value):,} dimensions, more than the {MAX_DIMS} that "
                "can be read"
            )
        if isinstance(value, tuple | list) and all(is_count(item) for item in value):
            return tuple(value)
        raise _fault(self.source, f"sizes or offsets of {fqn!r}", value)

    # planner_data

    def _read_nesting(self, value: object) -> dict[str, Nesting]:
        """Keep the entries that are paths; other planners may record something else."""
        if not isinstance(value, dict):
            return {}
        return {
            fqn: tuple(path)
            for fqn, path in value.items()
            if isinstance(fqn, str)
            and isinstance(path, tuple | list)
            and len(path) <= _MAX_NESTING
            and all(type(p) in (str, int) for p in path)
        }


def _scale(sizes: tuple[int, ...], factor: int) -> tuple[int, ...]:
    """Count the elements of the last dimension one by one where a byte holds two of them."""
    return sizes if factor == 1 else (*sizes[:-1], sizes[-1] * factor)


def _scale_chunk(chunk: Chunk, factor: int) -> Chunk:
    if factor == 1:
        return chunk
    return Chunk(_scale(chunk.offsets, factor), _scale(chunk.sizes, factor), chunk.stored)
