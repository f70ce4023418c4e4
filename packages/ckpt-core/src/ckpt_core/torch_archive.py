"""Where the elements of a tensor lie inside an archive that `torch.save` wrote.

Such an archive is a zip whose entries are stored uncompressed: `NAME/data.pkl` describes
the tensor, `NAME/data/KEY` holds its storage. So the elements can be used in place, once
the two have been found:

1. The central directory at the end of the archive lists the entries (zip64 included).
2. `data.pkl` is read as inert data; exactly one tensor over one storage is accepted.
3. The entry of that storage, behind its local header, is where the elements begin.

Source: torch/serialization.py `_save`, torch/_utils.py `_rebuild_tensor_v2` and `_v3`, and
PKWARE's APPNOTE 6.3 for the zip structures.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ckpt_core.checkpoint_files import read_range
from ckpt_core.dtypes import DTYPE_OF_STORAGE, DTYPE_OF_TORCH
from ckpt_core.errors import CorruptCheckpointError
from ckpt_core.inert_pickle import (
    Construct,
    Global,
    Record,
    allow_records,
    load_pickle,
    make_empty_dict,
    refuse_call,
)
from ckpt_core.spec import DTYPE_BITS, find_shape_fault

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_HEAD = 2048  # what precedes the storage of a one-tensor archive takes about 700 bytes
_TAIL = 4096  # its directory takes about 600 bytes
_PICKLE_LIMIT = 1 << 20  # a tensor's own data.pkl takes about 150 bytes
_U16 = 0xFFFF
_U32 = 0xFFFFFFFF

ARCHIVE_MAGIC = b"PK\x03\x04"
"""First bytes of an archive."""


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """A tensor inside an archive; `offset` is in bytes of the file, sizes and strides in elements."""

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Entry:
    header: int
    length: int


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: str | None
    """None for an untyped storage, whose `numel` is in bytes."""
    numel: int


class ArchiveFinder:
    """Finds tensors in archives, and remembers what archives begin with.

    The archives of chunks of one dtype and shape differ in the elements and in an identifier
    at the end only. So if one begins with the same bytes, up to the storage, as an earlier
    one of the same length, it holds the same tensor at the same place.
    """

    def __init__(self) -> None:
        """Start without memories."""
        self._known: dict[tuple[int, Hashable], tuple[bytes, ArchivedTensor]] = {}

    def find(self, path: Path, start: int, length: int, hint: Hashable = None) -> ArchivedTensor:
        """Find the tensor in the archive that fills `length` bytes of `path` from `start` on.

        Args:
            path: The file.
            start: Where the archive begins, in bytes.
            length: Of the archive, in bytes.
            hint: Equal for archives that are expected to be alike; nothing else depends on it.

        Raises:
            CorruptCheckpointError: The archive is damaged, compressed, or not of one plain tensor.
            UnsafePickleError: Its pickle names something that a plain tensor does not need.
            CheckpointNotFoundError: No such file.
        """
        archive = _Archive(path, start, length)
        known = self._known.get((length, hint))
        if known is not None and archive.head.startswith(known[0]):
            return replace(known[1], offset=start + known[1].offset)
        found, storage_start = _find_tensor(archive)
        if storage_start <= len(archive.head):
            self._known[length, hint] = archive.head[:storage_start], found
        return replace(found, offset=start + found.offset)


class _Archive:
    """A zip archive inside a file, read piece by piece."""

    def __init__(self, path: Path, start: int, length: int) -> None:
        self.path = path
        self.start = start
        self.length = length
        self.head = read_range(path, start, min(length, _HEAD))

    def fault(self, found: str) -> CorruptCheckpointError:
        """Describe a fault of this archive."""
        return CorruptCheckpointError(
            f"{self.path}: expected one plain tensor as torch.save writes it in {self.length} bytes"
            f" at offset {self.start}, found {found}"
        )

    @cached_property
    def tail(self) -> bytes:
        size = min(self.length, _TAIL)
        return read_range(self.path, self.start + self.length - size, size)

    def read(self, offset: int, length: int) -> bytes:
        """Read a part of the archive; most parts lie at its ends, which are read once."""
        end = offset + length
        if offset < 0 or end > self.length:
            found = f"a reference to {length} bytes at {offset} of the archive"
            raise self.fault(found)
        if end <= len(self.head):
            return self.head[offset:end]
        tail_start = self.length - len(self.tail)
        if offset >= tail_start:
            return self.tail[offset - tail_start : end - tail_start]
        return read_range(self.path, self.start + offset, length)

    def list_entries(self) -> tuple[str, dict[str, _Entry]]:
        """Return the common first component of the names, and the entries by name."""
        count, size, offset = self._find_directory()
        directory = self.read(offset, size)
        entries: dict[str, _Entry] = {}
        pos = 0
        for _ in range(count):
            name, entry, pos = self._parse_entry(directory, pos)
            if name in entries:
                found = f"two entries {name!r}"
                raise self.fault(found)
            entries[name] = entry
        root = next((name[: -len("/data.pkl")] for name in entries if name.endswith("/data.pkl")), "")
        return root, entries

    def _find_directory(self) -> tuple[int, int, int]:
        at = self.tail.rfind(b"PK\x05\x06")
        if at < 0 or at + _END.size > len(self.tail):
            found = "no zip directory at the end"
            raise self.fault(found)
        _, _, _, _, count, size, offset, _ = _END.unpack_from(self.tail, at)
        if count == _U16 or _U32 in (size, offset):
            return self._find_directory64(self.length - len(self.tail) + at - _LOCATOR64.size)
        return count, size, offset

    def _find_directory64(self, at: int) -> tuple[int, int, int]:
        magic, _, end, _ = _LOCATOR64.unpack(self.read(at, _LOCATOR64.size))
        if magic != b"PK\x06\x07":
            raise self.fault("no zip64 locator")
        fields = _END64.unpack(self.read(end, _END64.size))
        if fields[0] != b"PK\x06\x06":
            raise self.fault("no zip64 directory end")
        return fields[7], fields[8], fields[9]

    def _parse_entry(self, directory: bytes, pos: int) -> tuple[str, _Entry, int]:
        if pos + _CENTRAL.size > len(directory):
            raise self.fault("a zip directory that is cut short")
        fields = _CENTRAL.unpack_from(directory, pos)
        if fields[0] != b"PK\x01\x02":
            raise self.fault("a damaged zip directory")
        flags, method, packed, unpacked, header = fields[3], fields[4], fields[8], fields[9], fields[16]
        pos += _CENTRAL.size
        name, extra = directory[pos : pos + fields[10]], directory[pos + fields[10] : pos + fields[10] + fields[11]]
        unpacked, packed, header = self._widen(extra, (unpacked, packed, header))
        text = name.decode("utf-8", "replace")
        if method != 0 or flags & 1 or packed != unpacked:
            found = f"the compressed or encrypted entry {text!r}"
            raise self.fault(found)
        return text, _Entry(header, unpacked), pos + fields[10] + fields[11] + fields[12]

    def _widen(self, extra: bytes, narrow: tuple[int, int, int]) -> tuple[int, int, int]:
        """Replace each value that is all ones by the next one of the zip64 extra field."""
        wide = _find_zip64_values(extra)
        values = []
        for value in narrow:
            if value == _U32 and not wide:
                raise self.fault("a zip64 entry without its sizes")
            values.append(wide.pop(0) if value == _U32 else value)
        return values[0], values[1], values[2]

    def find_data(self, entry: _Entry) -> int:
        """Return where an entry's bytes begin in the archive: behind its local header."""
        fields = _LOCAL.unpack(self.read(entry.header, _LOCAL.size))
        if fields[0] != ARCHIVE_MAGIC:
            raise self.fault("a damaged local header")
        data = entry.header + _LOCAL.size + int(fields[9]) + int(fields[10])
        if data + entry.length > self.length:
            raise self.fault("an entry that does not fit in the archive")
        return data

    def read_entry(self, entry: _Entry | None, what: str) -> bytes:
        if entry is None or entry.length > _PICKLE_LIMIT:
            found = f"no usable {what} in it"
            raise self.fault(found)
        return self.read(self.find_data(entry), entry.length)

    def load_tensor(self, entry: _Entry | None) -> Record:
        data = self.read_entry(entry, "data.pkl")
        source = f"{self.path} at offset {self.start}"
        value = load_pickle(data, _ALLOWED, source=source, resolve_id=_resolve_storage)
        if not isinstance(value, Record):
            found = f"a {type(value).__name__}"
            raise self.fault(found)
        return value

    def check_byte_order(self, entry: _Entry | None) -> None:
        if entry is not None and self.read_entry(entry, "byteorder") != b"little":
            raise self.fault("elements that are not little-endian")


def _find_zip64_values(extra: bytes) -> list[int]:
    pos = 0
    while pos + 4 <= len(extra):
        tag, size = struct.unpack_from("<2H", extra, pos)
        if tag == 1:
            body = extra[pos + 4 : pos + 4 + size]
            return [int.from_bytes(body[i : i + 8], "little") for i in range(0, len(body) - 7, 8)]
        pos += 4 + size
    return []


_ALLOWED: dict[str, Construct] = {
    **allow_records("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"),
    "collections.OrderedDict": make_empty_dict,
    "torch.storage.UntypedStorage": refuse_call,
    **dict.fromkeys((f"torch.{name}" for name in DTYPE_OF_STORAGE), refuse_call),
    **dict.fromkeys((f"torch.{name}" for name in DTYPE_OF_TORCH), refuse_call),
}


def _resolve_storage(value: object) -> object:
    """Read `('storage', class, key, device, numel)`, the one kind of persistent id that torch writes."""
    match value:
        case ("storage", Global(name=name), str(key), str(), int(numel)) if numel >= 0:
            kind = name.removeprefix("torch.")
            if kind == "storage.UntypedStorage":
                return _Storage(key, None, numel)
            if kind in DTYPE_OF_STORAGE:
                return _Storage(key, DTYPE_OF_STORAGE[kind], numel)
    raise ValueError("a persistent id that names no storage")


def _find_tensor(archive: _Archive) -> tuple[ArchivedTensor, int]:
    """Return the tensor, its offset counted from the archive, and where its storage begins.

    The second number is that of the archive's end if the storage does not come last of what
    was read: then what precedes it does not say everything.
    """
    root, entries = archive.list_entries()
    description, byte_order = entries.get(f"{root}/data.pkl"), entries.get(f"{root}/byteorder")
    record = archive.load_tensor(description)
    archive.check_byte_order(byte_order)
    storage, first, sizes, strides, dtype = _read_record(record, archive.fault)
    entry = entries.get(f"{root}/data/{storage.key}")
    if entry is None:
        found = f"no entry for the storage {storage.key!r}"
        raise archive.fault(found)
    itemsize = DTYPE_BITS[dtype] // 8 or 1
    last = first + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if 0 not in sizes and (last + 1) * itemsize > entry.length:
        found = f"{entry.length} bytes of storage for sizes {sizes}, strides {strides} of {dtype}"
        raise archive.fault(found)
    start = archive.find_data(entry)
    comes_last = all(other is None or other.header < entry.header for other in (description, byte_order))
    tensor = ArchivedTensor(dtype, sizes, strides, start + first * itemsize)
    return tensor, start if comes_last else archive.length


def _read_record(
    record: Record, fail: Callable[[str], CorruptCheckpointError]
) -> tuple[_Storage, int, tuple[int, ...], tuple[int, ...], str]:
    """Take a `_rebuild_tensor_v2` or `_v3` call apart, which v3 ends with the dtype."""
    match record.args:
        case (_Storage() as storage, int(first), tuple(sizes), tuple(strides), bool(), dict(), *rest):
            dtype = storage.dtype
            if record.name.endswith("_v3") and rest and isinstance(named := rest.pop(0), Global):
                dtype = DTYPE_OF_TORCH.get(named.name.removeprefix("torch."))
            numbers = (first, *sizes, *strides)
            plain = all(type(n) is int and n >= 0 for n in numbers) and len(sizes) == len(strides)
            if dtype is not None and plain and not any(rest):
                if fault := find_shape_fault(sizes):
                    raise fail(f"a tensor with {fault}")
                # Where there is one element or none, a stride says nothing and may be any number.
                single = 0 in sizes
                used = tuple(1 if single or size == 1 else stride for size, stride in zip(sizes, strides, strict=True))
                return storage, first, tuple(map(int, sizes)), used, dtype
    raise fail("a tensor that is not plain (conjugated, negated, quantized or a subclass)")
