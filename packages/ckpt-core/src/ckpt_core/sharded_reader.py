"""Read sharded safetensors: each rank's chunks in files of their own, as torch and nemo_automodel write them.

Each file says in its metadata, under `DCP_SHARDING_INFO`, at which offsets its chunks lie.
No file says how large a tensor is as a whole, or which files there are: with the last shard
gone, what is left tiles a smaller tensor exactly. Only a record in the directory can prove
that a set is complete; without one `check` says that it cannot be proven.

Source: torch/distributed/checkpoint/hf_storage.py and _hf_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ckpt_core.completeness import compare_with_record
from ckpt_core.coverage import check_tiling
from ckpt_core.errors import CorruptCheckpointError, Problem, describe_value
from ckpt_core.layout import CheckpointLayout
from ckpt_core.record import CheckpointRecord, read_record
from ckpt_core.safetensors_header import SHARDING_KEY, HeaderEntry, SafetensorsHeader, read_sharding
from ckpt_core.safetensors_reader import SafetensorsFiles, list_safetensors, locate_raw
from ckpt_core.spec import (
    Chunk,
    Nesting,
    ObjectSpec,
    StoredRange,
    TensorData,
    TensorSpec,
    find_shape_fault,
    is_count,
)


@dataclass(frozen=True, slots=True)
class _RankChunk:
    """The chunk of a tensor that one rank wrote, which may be empty."""

    file: str
    offsets: tuple[int, ...]
    entry: HeaderEntry


class ShardedSafetensorsReader:
    """A `CheckpointReader` for chunks in many safetensors files."""

    layout: CheckpointLayout = CheckpointLayout.SAFETENSORS_SHARDED

    def __init__(self, path: Path) -> None:
        """Read the header of every safetensors file of a directory, or of one file.

        Raises:
            CheckpointError: No file can be used, or chunks lie where no tensor reaches.
        """
        self.path = path
        self.directory = path if path.is_dir() else path.parent
        self._files = SafetensorsFiles(self.directory, list_safetensors(path) if path.is_dir() else [path.name])
        self._record = read_record(path) if path.is_dir() else None
        self._conflicts: list[Problem] = []
        self.tensors: Mapping[str, TensorSpec] = MappingProxyType(self._assemble())
        self.objects: Mapping[str, ObjectSpec] = MappingProxyType({})
        self.nesting: Mapping[str, Nesting] = MappingProxyType({})

    def check(self) -> list[Problem]:
        """Compare headers, chunks, files and record with one another."""
        problems = [*self._files.problems, *self._conflicts]
        for spec in self.tensors.values():
            problems += check_tiling(spec.fqn, spec.shape, [(c.offsets, c.sizes) for c in spec.chunks])
        if self._record is None:
            message = "the files hold neither the full shapes nor a list of files; a missing last shard would go unseen"
            problems.append(Problem("unproven", self.path.name, message))
        else:
            problems += compare_with_record(self.directory, self._record, self.tensors)
            problems += self._find_strays(self._record)
        return list(dict.fromkeys(problems))

    def locate(self, spec: TensorSpec, chunk: Chunk) -> TensorData:
        """Find the elements of `chunk`; nothing needs to be read, as the headers were."""
        return locate_raw(self.directory, spec, chunk)

    def _find_strays(self, record: CheckpointRecord) -> Iterator[Problem]:
        for name in self._files.headers:
            if name not in record.files:
                message = "not in the record of the directory, but every reader of this layout would read it"
                yield Problem("unexpected_tensor", name, message)

    def _assemble(self) -> dict[str, TensorSpec]:
        found: dict[str, list[_RankChunk]] = {}
        for file, header in self._files.headers.items():
            places = self._read_places(file, header)
            for fqn, entry in header.entries.items():
                if (offsets := places.get(fqn)) is not None:
                    found.setdefault(fqn, []).append(_RankChunk(file, offsets, entry))
        return {fqn: self._join(fqn, chunks) for fqn, chunks in found.items()}

    def _read_places(self, file: str, header: SafetensorsHeader) -> Mapping[str, tuple[int, ...]]:
        """Return the offsets of each chunk of a file, after reporting those that cannot be used."""
        info = read_sharding(header)
        if info is None:
            message = f"expected {SHARDING_KEY} in its metadata, found none that can be read; it belongs to another set"
            self._conflicts.append(Problem("bad_header", file, message))
            return {}
        places = {}
        for fqn, entry in header.entries.items():
            offsets = _read_offsets(info.get(fqn), entry)
            if offsets is None:
                message = f"{fqn!r}: expected {len(entry.shape)} saved_offsets, found none or others"
                self._conflicts.append(Problem("bad_header", file, message))
            else:
                places[fqn] = offsets
        return places

    def _join(self, fqn: str, found: Sequence[_RankChunk]) -> TensorSpec:
        first = found[0].entry
        same = [c for c in found if c.entry.dtype == first.dtype and len(c.offsets) == len(first.shape)]
        for chunk in found:
            if chunk not in same:
                message = f"{first.dtype} with {len(first.shape)} dimensions in {found[0].file}, other in {chunk.file}"
                self._conflicts.append(Problem("dtype", fqn, message))
        chunks = tuple(
            Chunk(c.offsets, c.entry.shape, StoredRange(c.file, c.entry.offset, c.entry.length, "raw"))
            for c in same
            if c.entry.length
        )
        return TensorSpec(fqn, first.dtype, self._find_shape(fqn, same), chunks)

    def _find_shape(self, fqn: str, chunks: Sequence[_RankChunk]) -> tuple[int, ...]:
        """Take the recorded shape, or as much as the chunks reach."""
        reached = tuple(
            max(c.offsets[dim] + c.entry.shape[dim] for c in chunks) for dim in range(len(chunks[0].offsets))
        )
        if fault := find_shape_fault(reached):
            raise CorruptCheckpointError(f"{self.directory}: the chunks of {describe_value(fqn)} reach {fault}")
        recorded = self._record.tensors.get(fqn) if self._record else None
        return recorded.shape if recorded and len(recorded.shape) == len(reached) else reached


def _read_offsets(info: object, entry: HeaderEntry) -> tuple[int, ...] | None:
    offsets = info.get("saved_offsets") if isinstance(info, dict) else None
    if not isinstance(offsets, list) or len(offsets) != len(entry.shape):
        return None
    if not all(is_count(offset) for offset in offsets):
        return None
    if entry.dtype == "F4" and offsets:
        offsets[-1] *= 2  # torch counts two F4 elements as one, the header counts each
    return tuple(offsets)
