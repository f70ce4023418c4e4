"""Read safetensors that hold whole tensors: one file, a set with an index, a set without."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from ckpt_core.checkpoint_files import describe_entry, find_size
from ckpt_core.completeness import compare_with_record
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, Problem
from ckpt_core.layout import CheckpointLayout, is_safetensors_weights
from ckpt_core.record import read_record
from ckpt_core.safetensors_header import (
    INDEX_NAME,
    SHARDING_KEY,
    SINGLE_NAME,
    HeaderEntry,
    SafetensorsHeader,
    read_header,
    read_index,
    read_sharding,
)
from ckpt_core.spec import Chunk, Nesting, ObjectSpec, StoredRange, TensorData, TensorSpec

SUFFIX = ".safetensors"
_PART_NAME = re.compile(r"(?P<stem>.*?)-?(?P<part>\d{1,9})-of-(?P<count>\d{1,9})\.safetensors")
_LISTED_PARTS = 100


class SafetensorsFiles:
    """The headers of the files of one checkpoint, those that can be read and what is wrong with the others."""

    def __init__(self, directory: Path, names: list[str]) -> None:
        """Read the header of each file.

        Raises:
            CorruptCheckpointError, CheckpointNotFoundError: None of them can be used.
        """
        self.headers: dict[str, SafetensorsHeader] = {}
        self.problems: list[Problem] = []
        first: CheckpointError | None = None
        for name in names:
            try:
                self.headers[name] = read_header(directory / name)
            except CheckpointNotFoundError as err:
                found = describe_entry(directory / name)
                self.problems.append(Problem("missing_file", name, f"expected a file of the set, found {found}"))
                first = first or err
            except CorruptCheckpointError as err:
                self.problems += err.problems or [Problem("bad_header", name, str(err))]
                first = first or err
        if first is not None and not self.headers:
            raise first

    def iter_entries(self) -> Iterator[tuple[str, str, HeaderEntry]]:
        """Yield file, name and entry of every tensor in every readable file."""
        for file, header in self.headers.items():
            for fqn, entry in header.entries.items():
                yield file, fqn, entry


class SafetensorsReader:
    """A `CheckpointReader` for whole tensors in one or several safetensors files."""

    layout: CheckpointLayout = CheckpointLayout.SAFETENSORS

    def __init__(self, path: Path) -> None:
        """Read the index and every header.

        Args:
            path: A directory, or one file, which then is the checkpoint.

        Raises:
            CheckpointError: No file can be used, or the index is damaged.
        """
        self.path = path
        self.directory = path if path.is_dir() else path.parent
        self._weight_map = self._read_weight_map()
        self._files = SafetensorsFiles(self.directory, self._list_files())
        self._record = read_record(self.directory) if path.is_dir() else None
        self._places: dict[str, list[str]] = defaultdict(list)
        self.tensors: Mapping[str, TensorSpec] = MappingProxyType(self._collect())
        self.objects: Mapping[str, ObjectSpec] = MappingProxyType({})
        self.nesting: Mapping[str, Nesting] = MappingProxyType({})

    def check(self) -> list[Problem]:
        """Compare headers, index, file names and record with one another."""
        problems = [*self._files.problems, *self._find_duplicates(), *self._find_chunks(), *self._check_file_names()]
        if self._weight_map is not None:
            problems += self._check_index(self._weight_map)
        if self._record is not None:
            problems += compare_with_record(self.directory, self._record, self.tensors)
        elif self._weight_map is None and len(self._files.headers) > 1:
            message = "several files without an index or a record: none of them would be missed"
            problems.append(Problem("unproven", self.path.name, message))
        return list(dict.fromkeys(problems))

    def locate(self, spec: TensorSpec, chunk: Chunk) -> TensorData:
        """Find the elements of `chunk`; nothing needs to be read, as the headers were."""
        return locate_raw(self.directory, spec, chunk)

    def _read_weight_map(self) -> Mapping[str, str] | None:
        index = self.directory / INDEX_NAME
        return read_index(index).weight_map if self.path.is_dir() and os.path.lexists(index) else None

    def _list_files(self) -> list[str]:
        if not self.path.is_dir():
            return [self.path.name]
        if self._weight_map is not None:
            return sorted(set(self._weight_map.values()))
        return list_safetensors(self.directory)

    def _collect(self) -> dict[str, TensorSpec]:
        specs: dict[str, TensorSpec] = {}
        for file, fqn, entry in self._files.iter_entries():
            self._places[fqn].append(file)
            if fqn not in specs:
                specs[fqn] = _make_whole(fqn, file, entry)
        return specs

    def _find_duplicates(self) -> Iterator[Problem]:
        for fqn, files in self._places.items():
            if len(files) > 1:
                yield Problem("duplicate_tensor", fqn, f"expected in one file, found in {', '.join(files)}")

    def _find_chunks(self) -> Iterator[Problem]:
        """Find what a header declares to be a part of a tensor; here every entry is read as a whole."""
        for file, header in self._files.headers.items():
            if SHARDING_KEY not in header.metadata:
                continue
            places = read_sharding(header)
            if places is None:
                yield Problem("bad_header", file, f"expected {SHARDING_KEY} that can be read")
                continue
            for fqn in header.entries:
                if fqn in places and not _begins_at_zero(places[fqn]):
                    message = f"expected a whole tensor, found a chunk in {file} that begins elsewhere than at 0"
                    yield Problem("hole", fqn, message)

    def _check_index(self, weight_map: Mapping[str, str]) -> Iterator[Problem]:
        if not weight_map:
            yield Problem("bad_header", INDEX_NAME, "expected a weight_map with names, found an empty one")
        for fqn, file in weight_map.items():
            if file in self._files.headers and file not in self._places.get(fqn, ()):
                yield Problem("missing_tensor", fqn, f"the index places it in {file}, which does not hold it")
        for fqn, files in self._places.items():
            if fqn not in weight_map:
                yield Problem("unexpected_tensor", fqn, f"{files[0]} holds it, the index does not list it")
        for name in list_safetensors(self.directory):
            if name in weight_map.values():
                continue
            if name == SINGLE_NAME:
                yield Problem("unexpected_tensor", name, "the index does not refer to it, but loaders prefer it")
            else:
                yield Problem("stray_file", name, "the index does not refer to it")

    def _check_file_names(self) -> Iterator[Problem]:
        """Without an index, the names of a set still tell which files belong to it."""
        names = list(self._files.headers)
        parts = {name: match for name in names if (match := _PART_NAME.fullmatch(name))}
        if self._weight_map is not None:
            return
        if not self.path.is_dir():
            yield from (_doubt_part(name, match) for name, match in parts.items() if int(match["count"]) > 1)
            return
        yield from _find_missing_parts(parts)
        if len(names) > 1 and (strays := [name for name in names if name not in parts]):
            for name in strays:
                message = (
                    f"every loader would read it together with the {len(names) - 1} others, and no index allows it"
                )
                yield Problem("unexpected_tensor", name, message)


def _begins_at_zero(place: object) -> bool:
    offsets = place.get("saved_offsets") if isinstance(place, dict) else None
    return isinstance(offsets, list) and not any(offsets)


def list_safetensors(directory: Path) -> list[str]:
    """List what lies in a directory itself under the name of a safetensors file, an adapter's left out.

    Entries that are no files are among them: a link into a cache that was cleared still says
    that a file belongs there.
    """
    return sorted(entry.name for entry in directory.iterdir() if is_safetensors_weights(entry.name))


def locate_raw(directory: Path, spec: TensorSpec, chunk: Chunk) -> TensorData:
    """Find row-major elements at a known place, if the file still reaches that far.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError: The file changed since it was opened.
    """
    stored = chunk.stored
    path = directory / stored.file
    size = find_size(path)
    if size is None:
        msg = f"{path}: expected a file of the checkpoint, found none; copy the checkpoint again"
        raise CheckpointNotFoundError(msg)
    if size < stored.offset + stored.length:
        msg = f"{path}: expected {spec.fqn!r} to end at byte {stored.offset + stored.length}, found {size} bytes"
        raise CorruptCheckpointError(msg)
    return TensorData(stored.file, stored.offset, chunk.sizes, find_row_major_strides(chunk.sizes))


def find_row_major_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a box that is stored row by row."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(1, sizes[dim])
    return tuple(strides)


def _make_whole(fqn: str, file: str, entry: HeaderEntry) -> TensorSpec:
    stored = StoredRange(file, entry.offset, entry.length, "raw")
    chunks = (Chunk((0,) * len(entry.shape), entry.shape, stored),) if entry.length else ()
    return TensorSpec(fqn, entry.dtype, entry.shape, chunks)


def _doubt_part(name: str, match: re.Match[str]) -> Problem:
    return Problem("unproven", name, f"by its name it is one of {int(match['count'])} files; name their directory")


def _find_missing_parts(parts: Mapping[str, re.Match[str]]) -> Iterator[Problem]:
    """Find the numbers that are not there in `NAME-00001-of-00003.safetensors`, and those that cannot be."""
    there: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name, match in parts.items():
        there[match["stem"], match["count"]].add(int(match["part"]))
        if not 1 <= int(match["part"]) <= int(match["count"]):
            yield Problem("unexpected_tensor", name, f"it is no part of a set of {int(match['count'])} files")
    if len(there) > 1:
        found = ", ".join(f"{stem}-*-of-{count}" for stem, count in sorted(there)[:_LISTED_PARTS])
        yield Problem("unexpected_tensor", next(iter(parts)), f"expected the files of one set, found those of {found}")
    for (stem, count), numbers in there.items():
        missing = (number for number in range(1, int(count) + 1) if number not in numbers)
        for number in islice(missing, _LISTED_PARTS):
            name = f"{stem}-{number:0{len(count)}d}-of-{count}{SUFFIX}"
            yield Problem("missing_file", name, f"the other files of the set say that there are {int(count)}")
