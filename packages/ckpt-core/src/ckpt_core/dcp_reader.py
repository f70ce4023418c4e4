"""Read a DCP: a directory with `.metadata` and `.distcp` files, as torch.distributed.checkpoint writes it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path

from ckpt_core.checkpoint_files import describe_entry, find_size, read_range, read_whole
from ckpt_core.completeness import compare_with_record
from ckpt_core.coverage import check_tiling
from ckpt_core.dcp_metadata import DcpMetadata, parse_dcp_metadata
from ckpt_core.errors import CheckpointError, CorruptCheckpointError, Problem
from ckpt_core.layout import DCP_METADATA, CheckpointLayout
from ckpt_core.record import read_record
from ckpt_core.safetensors_header import SafetensorsHeader, read_header
from ckpt_core.safetensors_reader import find_row_major_strides
from ckpt_core.spec import Chunk, Nesting, ObjectSpec, StoredRange, TensorData, TensorSpec
from ckpt_core.torch_archive import ARCHIVE_MAGIC, ArchivedTensor, ArchiveFinder

DATA_SUFFIX = ".distcp"
_LISTED = 20
_METADATA_LIMIT = 2**30  # a chunk takes about 300 bytes; three million chunks are more than anybody has


class DcpReader:
    """A `CheckpointReader` for DCP; `.metadata` alone says what is stored where."""

    def __init__(self, path: Path) -> None:
        """Read the metadata of the DCP at `path`.

        Raises:
            CheckpointNotFoundError: There is no `.metadata`.
            CorruptCheckpointError, UnsafePickleError: It cannot be used.
        """
        self.path = path
        self._metadata = _load_metadata(path / DCP_METADATA)
        self._record = read_record(path)
        self._blobs: dict[str, tuple[int, SafetensorsHeader | None]] = {}
        self._finder = ArchiveFinder()

    @property
    def directory(self) -> Path:
        """The DCP itself."""
        return self.path

    @property
    def layout(self) -> CheckpointLayout:
        """Always DCP."""
        return CheckpointLayout.DCP

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor by FQN, in the order of the metadata."""
        return self._metadata.tensors

    @property
    def objects(self) -> Mapping[str, ObjectSpec]:
        """Every entry that is no tensor."""
        return self._metadata.objects

    @property
    def nesting(self) -> Mapping[str, Nesting]:
        """Path of each FQN in the nested state dict, from `planner_data`."""
        return self._metadata.nesting

    def check(self) -> list[Problem]:
        """Compare the metadata with itself and with the files."""
        problems = list(self._metadata.problems)
        for spec in self.tensors.values():
            problems += check_tiling(spec.fqn, spec.shape, [(c.offsets, c.sizes) for c in spec.chunks])
        for file, ranges in self._ranges_by_file.items():
            problems += self._check_file(file, ranges)
        problems += self._find_strays()
        if self._record is not None:
            problems += compare_with_record(self.path, self._record, self.tensors)
        return list(dict.fromkeys(problems))

    def locate(self, spec: TensorSpec, chunk: Chunk) -> TensorData:
        """Find the elements of `chunk` inside its archive.

        Raises:
            CheckpointNotFoundError: The file is missing.
            CorruptCheckpointError: The archive is damaged or holds another tensor.
        """
        found = self._find_stored(spec, chunk)
        if found.dtype != spec.dtype or found.sizes != chunk.sizes:
            raise CorruptCheckpointError(
                f"{self.path / chunk.stored.file}: expected {spec.dtype} of sizes {chunk.sizes} for {spec.fqn!r} at"
                f" offset {chunk.stored.offset}, found {found.dtype} of sizes {found.sizes}; file and metadata belong"
                " to different saves"
            )
        return TensorData(chunk.stored.file, found.offset, found.sizes, found.strides)

    def _find_stored(self, spec: TensorSpec, chunk: Chunk) -> ArchivedTensor:
        stored = chunk.stored
        blob = self._find_blob(stored)
        if blob is None:
            path, hint = self.path / stored.file, (spec.dtype, chunk.sizes)
            return _unpack_elements(self._finder.find(path, stored.offset, stored.length, hint))
        entry = blob.entries.get(spec.fqn)
        if entry is None:
            raise CorruptCheckpointError(
                f"{self.path / stored.file}: expected {spec.fqn!r} in the safetensors data at offset"
                f" {stored.offset}, found {len(blob.entries)} others"
            )
        return ArchivedTensor(entry.dtype, entry.shape, find_row_major_strides(entry.shape), entry.offset)

    def _find_blob(self, stored: StoredRange) -> SafetensorsHeader | None:
        """Return the header if one safetensors blob lies there instead of archives.

        torch 2.13 writes the tensors of a file as one blob when it is asked for safetensors,
        and records where the blob begins as the place of every tensor in it. Whether a file
        holds archives shows at any tensor in it.
        """
        if stored.file not in self._blobs:
            self._blobs[stored.file] = stored.offset, _read_blob_header(self.path / stored.file, stored.offset)
        offset, header = self._blobs[stored.file]
        return header if stored.offset == offset else None

    @cached_property
    def _ranges_by_file(self) -> dict[str, list[tuple[StoredRange, str]]]:
        ranges: dict[str, list[tuple[StoredRange, str]]] = defaultdict(list)
        for fqn, stored in self._metadata.stored:
            ranges[stored.file].append((stored, fqn))
        return dict(sorted(ranges.items()))

    def _check_file(self, file: str, ranges: list[tuple[StoredRange, str]]) -> Iterator[Problem]:
        size = find_size(self.path / file)
        if size is None:
            found = f"{len(ranges)} items are stored in it, {ranges[0][1]!r} among them; found"
            yield Problem("missing_file", file, f"{found} {describe_entry(self.path / file)}")
            return
        end = max(stored.offset + stored.length for stored, _ in ranges)
        if size < end:
            yield Problem("short_file", file, f"expected at least {end} bytes, found {size}; the file is cut short")
        yield from _find_shared_bytes(file, self._join_blob(ranges))

    def _join_blob(self, ranges: list[tuple[StoredRange, str]]) -> list[tuple[StoredRange, str]]:
        """Keep one of the ranges that begin together if a blob lies there."""
        starts = Counter(stored.offset for stored, _ in ranges)
        together = [item for item in ranges if starts[item[0].offset] > 1]
        if not together or self._find_blob(together[0][0]) is None:
            return ranges
        return [item for item in ranges if item[0].offset != together[0][0].offset] + together[:1]

    def _find_strays(self) -> Iterator[Problem]:
        for path in sorted(self.path.iterdir()):
            # A rank that has nothing to save leaves an empty file, which no item refers to.
            if path.suffix == DATA_SUFFIX and path.name not in self._ranges_by_file and find_size(path) != 0:
                yield Problem("stray_file", path.name, "the metadata does not refer to it; left by an earlier save")


def _load_metadata(path: Path) -> DcpMetadata:
    return parse_dcp_metadata(read_whole(path, _METADATA_LIMIT), str(path))


def _read_blob_header(path: Path, offset: int) -> SafetensorsHeader | None:
    try:
        if read_range(path, offset, len(ARCHIVE_MAGIC)) == ARCHIVE_MAGIC:
            return None
        return read_header(path, start=offset)
    except CheckpointError:
        return None  # reading it as an archive says what is wrong


def _unpack_elements(found: ArchivedTensor) -> ArchivedTensor:
    """Count sizes and strides in elements; torch counts two F4 elements as one."""
    if found.dtype != "F4" or not found.sizes:
        return found
    strides = (*(2 * stride for stride in found.strides[:-1]), found.strides[-1])
    return replace(found, sizes=(*found.sizes[:-1], 2 * found.sizes[-1]), strides=strides)


def _find_shared_bytes(file: str, ranges: list[tuple[StoredRange, str]]) -> Iterator[Problem]:
    """Find items that share bytes: no writer does that, so one of them is not where it should be."""
    found = _iter_shared_bytes(file, ranges)
    yield from islice(found, _LISTED)
    if next(found, None):
        yield Problem("overlap", file, f"more than {_LISTED} items share bytes")


def _iter_shared_bytes(file: str, ranges: list[tuple[StoredRange, str]]) -> Iterator[Problem]:
    end, owner = 0, ""
    for stored, fqn in sorted(ranges, key=lambda item: (item[0].offset, item[1])):
        if stored.offset < end:
            yield Problem("overlap", file, f"{fqn!r} at byte {stored.offset} reaches into the bytes of {owner!r}")
        if stored.offset + stored.length > end:
            end, owner = stored.offset + stored.length, fqn
