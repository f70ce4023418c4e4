from __future__ import annotations

import os
import pathlib
import pickle
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_core.dcp_metadata import DcpMetadata, parse_dcp_metadata
from ckpt_core.errors import CheckpointError, CorruptCheckpointError, UnsafePickleError
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed.sharded import cut_columns, save_dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

STATE = {
    "model": {"w": torch.arange(30.0).reshape(6, 5), "b": torch.tensor(2, dtype=torch.int64), "e": torch.empty(0, 2)},
    "optim": {"state": {"w": {"exp_avg": torch.ones(6, 5, dtype=torch.bfloat16)}}, "param_groups": [{"lr": 0.1}]},
    "step": 7,
}


def parse(metadata: object, protocol: int = 4) -> DcpMetadata:
    return parse_dcp_metadata(pickle.dumps(metadata, protocol), "dir/.metadata")


def describe(
    fqn: str = "w",
    dtype: torch.dtype = torch.float32,
    **info: Any,  # noqa: ANN401  fields of _StorageInfo
) -> Metadata:
    """Describe a tensor of shape (4, 2) in one chunk."""
    box = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 2]))
    stored = {"relative_path": "__0_0.distcp", "offset": 0, "length": 1500, **info}
    return Metadata(
        {fqn: TensorStorageMetadata(TensorProperties(dtype), torch.Size([4, 2]), [box])},
        planner_data={fqn: (fqn,)},
        storage_data={MetadataIndex(fqn, torch.Size([0, 0]), 0): _StorageInfo(**stored)},
        storage_meta=StorageMeta(Path("/some/where"), "an-id"),
        version="1.0.0",
    )


@pytest.mark.parametrize("ranks", [1, 3])
def test_it_says_what_torch_reads(tmp_path: Path, ranks: int) -> None:
    path = save_dcp(tmp_path / "d", STATE, ranks=ranks, cut=cut_columns(ranks))
    expected = FileSystemReader(path).read_metadata()
    found = parse_dcp_metadata((path / ".metadata").read_bytes(), "x")
    tensors = {k: v for k, v in expected.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
    assert list(found.tensors) == list(tensors)
    assert set(found.objects) == set(expected.state_dict_metadata) - set(tensors)
    assert dict(found.nesting) == {fqn: tuple(nest) for fqn, nest in expected.planner_data.items()}
    for fqn, tensor in tensors.items():
        spec = found.tensors[fqn]
        assert spec.shape == tuple(tensor.size)
        stored = [(c.offsets, c.sizes, c.stored.file, c.stored.offset, c.stored.length) for c in spec.chunks]
        infos = [
            (box, expected.storage_data[MetadataIndex(fqn, box.offsets)]) for box in tensor.chunks if box.sizes.numel()
        ]
        assert stored == [
            (tuple(box.offsets), tuple(box.sizes), info.relative_path, info.offset, info.length) for box, info in infos
        ]
    assert found.problems == ()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_reads_the_same(protocol: int) -> None:
    found = parse(describe(), protocol)
    assert (found.tensors, found.nesting) == (parse(describe()).tensors, {"w": ("w",)})


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "F32"),
        (torch.bfloat16, "BF16"),
        (torch.bool, "BOOL"),
        (torch.uint64, "U64"),
        (torch.float8_e5m2, "F8_E5M2"),
        (torch.float8_e8m0fnu, "F8_E8M0"),
        (torch.complex64, "C64"),
        (torch.complex128, "C128"),
    ],
)
def test_dtypes_are_named_as_safetensors_names_them(dtype: torch.dtype, name: str) -> None:
    assert parse(describe(dtype=dtype)).tensors["w"].dtype == name


def test_a_packed_f4_element_counts_as_two() -> None:
    spec = parse(describe(dtype=torch.float4_e2m1fn_x2)).tensors["w"]
    assert (spec.dtype, spec.shape, spec.chunks[0].sizes, spec.nbytes) == ("F4", (4, 4), (4, 4), 8)


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint32, torch.bits8])
def test_a_dtype_that_cannot_be_read_is_a_problem_by_name(dtype: torch.dtype) -> None:
    found = parse(describe(dtype=dtype))
    assert [(p.kind, p.where) for p in found.problems] == [("unsupported", "w")]
    assert str(dtype) in found.problems[0].message
    assert not found.tensors


def test_a_sparse_tensor_is_a_problem() -> None:
    metadata = describe()
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.properties.layout = torch.sparse_coo
    assert [p.kind for p in parse(metadata).problems] == ["unsupported"]


def test_transformed_bytes_are_a_problem() -> None:
    found = parse(describe(transform_descriptors=["zstd"]))
    assert [(p.kind, p.where) for p in found.problems] == [("unsupported", "w")]
    assert parse(describe(transform_descriptors=[])).problems == ()


def test_attributes_of_newer_releases_are_passed_over() -> None:
    metadata = describe()
    metadata.shiny = {"new": [1, 2.5, (None, True, b"x")]}  # type: ignore[attr-defined]
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.checksum = "abc"  # type: ignore[attr-defined]
    entry.chunks[0].node = 3  # type: ignore[attr-defined]
    assert parse(metadata).tensors == parse(describe()).tensors


def test_attributes_of_older_releases_may_be_missing() -> None:
    metadata = describe()
    del metadata.storage_meta, metadata.version
    metadata.planner_data = None
    found = parse(metadata)
    assert found.tensors == parse(describe()).tensors
    assert not found.nesting


def rename(data: bytes, replacements: dict[str, str]) -> bytes:
    """Rename classes in a pickle of protocol 2, as an older release would have named them."""
    for new, old in replacements.items():
        data = data.replace(f"c{new.replace(':', chr(10))}\n".encode(), f"c{old.replace(':', chr(10))}\n".encode())
    return data


@pytest.mark.parametrize(
    "replacements",
    [
        {
            "torch.distributed.checkpoint.metadata:TensorProperties": (
                "torch.distributed._shard.sharded_tensor.metadata:TensorProperties"
            ),
            "torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING": (
                "torch.distributed._shard.sharded_tensor.metadata:MEM_FORMAT_ENCODING"
            ),
        },
        {
            f"torch.distributed.checkpoint.metadata:{name}": f"torch.distributed._shard.checkpoint.metadata:{name}"
            for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata")
        }
        | {
            "torch.distributed.checkpoint.filesystem:_StorageInfo": (
                "torch.distributed._shard.checkpoint.filesystem:_StorageInfo"
            )
        },
    ],
    ids=["torch 2.0", "torch 1.13"],
)
def test_classes_of_older_releases_are_known(replacements: dict[str, str]) -> None:
    old = rename(pickle.dumps(describe(), 2), replacements)
    assert old != pickle.dumps(describe(), 2)
    assert parse_dcp_metadata(old, "x").tensors == parse(describe()).tensors


def test_an_enum_member_pickled_by_name_is_read() -> None:
    """Python 3.11.0 pickled `getattr(Enum, "MEMBER")`."""
    data = pickle.dumps(describe(), 3)
    by_value = re.compile(rb"(c[\w.]+\n_MEM_FORMAT_ENCODING\n(?:q.)?)K\x00\x85(?:q.)?R", re.DOTALL)
    by_name = by_value.sub(lambda found: b"cbuiltins\ngetattr\n" + found[1] + b"X\x03\x00\x00\x00TCF\x86R", data)
    assert by_name != data
    assert parse_dcp_metadata(by_name, "x").tensors == parse(describe()).tensors


@pytest.mark.parametrize("target", [b"cpathlib\nPosixPath\n", b"ctorch\nSize\n", b"K\x01"])
def test_getattr_on_anything_else_is_refused(target: bytes) -> None:
    with pytest.raises(UnsafePickleError, match=r"dir/\.metadata.*getattr"):
        parse_dcp_metadata(b"cbuiltins\ngetattr\n" + target + b"X\x04\x00\x00\x00open\x86R.", "dir/.metadata")


class _Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("echo executed > executed",)


@pytest.mark.parametrize("place", ["planner_data", "storage_meta", "version", "state_dict_metadata"])
def test_a_hostile_value_anywhere_is_refused_and_not_executed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    metadata = describe()
    setattr(metadata, place, {"w": _Evil()})
    with pytest.raises(UnsafePickleError, match="system"):
        parse(metadata)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_class_is_refused_by_name() -> None:
    metadata = describe()
    metadata.planner_data = sys.version_info[:2], OrderedDict(), pathlib.PurePosixPath("a"), torch.device("cpu")
    parse(metadata)
    metadata.planner_data = re.compile("x")
    with pytest.raises(UnsafePickleError, match=r"re\._compile"):
        parse(metadata)


@pytest.mark.parametrize("name", ["../x.distcp", "/etc/passwd", "a/b.distcp", "", "..", "a\0b", "C:x", "a\\b", 7, None])
def test_a_file_outside_the_directory_is_refused(name: object) -> None:
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        parse(describe(relative_path=name))


@pytest.mark.parametrize("number", [-1, 1 << 70, 1.5, "1", None, True])
@pytest.mark.parametrize("field", ["offset", "length"])
def test_an_impossible_place_is_refused(field: str, number: object) -> None:
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        parse(describe("w", torch.float32, **{field: number}))


def test_a_chunk_without_a_place_is_a_hole() -> None:
    metadata = describe()
    metadata.storage_data = {}
    assert [(p.kind, p.where) for p in parse(metadata).problems] == [("hole", "w")]


def test_a_place_without_an_entry_is_unexpected() -> None:
    metadata = describe()
    metadata.storage_data[MetadataIndex("ghost", torch.Size([0]))] = _StorageInfo("__0_0.distcp", 0, 1)
    assert [(p.kind, p.where) for p in parse(metadata).problems] == [("unexpected_tensor", "ghost")]


def test_an_object_without_a_place_is_missing() -> None:
    metadata = describe()
    metadata.state_dict_metadata["step"] = BytesStorageMetadata()
    assert [(p.kind, p.where) for p in parse(metadata).problems] == [("missing_tensor", "step")]


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        torch.Size([1]),
        ChunkStorageMetadata(torch.Size([]), torch.Size([])),
        Metadata({}, None, None),
        Metadata({"w": 5}, {}, {}),  # type: ignore[dict-item]
        Metadata({5: BytesStorageMetadata()}, {}, {}),  # type: ignore[dict-item]
        Metadata({}, {}, {"w": _StorageInfo("a", 0, 1)}),
        Metadata({}, {}, {MetadataIndex("w"): 5}),
        Metadata({"w": TensorStorageMetadata(5, torch.Size([]), [])}, {}, {}),  # type: ignore[arg-type]
        Metadata({"w": TensorStorageMetadata(TensorProperties(), 5, [])}, {}, {}),  # type: ignore[arg-type]
        Metadata({"w": TensorStorageMetadata(TensorProperties(), torch.Size([]), [5])}, {}, {}),  # type: ignore[list-item]
    ],
)
def test_what_is_no_metadata_is_one_error_that_names_the_file(value: object) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"dir/\.metadata"):
        parse(value)


SAMPLE = pickle.dumps(describe("layers.0.weight"))


@given(end=st.integers(0, len(SAMPLE) - 1))
def test_a_truncated_file_is_refused(end: int) -> None:
    with pytest.raises(CheckpointError):
        parse_dcp_metadata(SAMPLE[:end], "x")


@settings(max_examples=400)
@given(at=st.integers(0, len(SAMPLE) - 1), byte=st.integers(0, 255))
def test_a_damaged_byte_never_leads_to_another_exception(at: int, byte: int) -> None:
    damaged = SAMPLE[:at] + bytes([byte]) + SAMPLE[at + 1 :]
    try:
        found = parse_dcp_metadata(damaged, "x")
    except CheckpointError:
        return
    assert len(found.tensors) + len(found.objects) + len(found.problems) <= 3


def describe_many(count: int) -> bytes:
    entries, places = {}, {}
    for i in range(count):
        metadata = describe(f"layers.{i}.weight", offset=i * 1500)
        entries.update(metadata.state_dict_metadata)
        places.update(metadata.storage_data)
    return pickle.dumps(Metadata(entries, {fqn: (fqn,) for fqn in entries}, places))


def test_reading_time_is_linear_in_the_number_of_entries() -> None:
    def measure(count: int) -> float:
        data = describe_many(count)
        started = time.process_time()
        assert len(parse_dcp_metadata(data, "x").tensors) == count
        return time.process_time() - started

    small = min(measure(1000) for _ in range(3))
    assert small < 0.5
    assert measure(10_000) < 30 * small


def describe_shape(shape: tuple[int, ...]) -> Metadata:
    """Describe a tensor without chunks; a plain tuple passes where torch.Size would check its numbers."""
    return Metadata({"w": TensorStorageMetadata(TensorProperties(torch.float32), shape, [])}, storage_data={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        ((2**61,) * 60, "more elements than 64 bits can count"),
        ((0, 2**61, 2**61), "more elements than 64 bits can count"),
        ((1,) * 65, "65 dimensions, more than the 64 that can be read"),
        ((2**61,) * 20_000, "20,000 dimensions, more than the 64"),
    ],
)
def test_a_shape_that_no_tensor_has_is_one_error(shape: tuple[int, ...], fault: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=fault):
        parse(describe_shape(shape))


def test_a_shape_of_as_many_dimensions_as_can_be_read_is_read() -> None:
    assert parse(describe_shape((1,) * 64)).tensors["w"].shape == (1,) * 64


def double(levels: int) -> object:
    value: object = ()
    for _ in range(levels):
        value = (value, value)
    return value


def nest(levels: int) -> object:
    value: object = ()
    for _ in range(levels):
        value = (value,)
    return value


@pytest.mark.parametrize("field", ["relative_path", "offset", "length"])
@pytest.mark.parametrize("make", [double, nest])
def test_an_error_about_a_hostile_value_is_short_and_comes_at_once(field: str, make: Callable[[int], object]) -> None:
    info: dict[str, Any] = {field: make(60)}
    data = pickle.dumps(describe(**info), 4)
    started = time.monotonic()
    with pytest.raises(CorruptCheckpointError) as caught:
        parse_dcp_metadata(data, "dir/.metadata")
    assert time.monotonic() - started < 5
    assert len(str(caught.value)) < 300


def test_a_deep_value_in_the_place_of_a_name_is_described_and_not_spelled() -> None:
    data = pickle.dumps(describe(relative_path="PLACE"), 2)
    # The name is one opcode with four bytes of length; 50,000 nested tuples take its place.
    named = b"X\x05\x00\x00\x00PLACE"
    assert data.count(named) == 1
    with pytest.raises(CorruptCheckpointError, match="found a tuple: a tuple instead of a string"):
        parse_dcp_metadata(data.replace(named, b")" + b"\x85" * 50_000), "dir/.metadata")


def test_one_list_is_not_made_a_size_again_and_again() -> None:
    listed = b"](" + b"K\x01" * 300_000 + b"eq\x00"
    data = b"\x80\x02" + listed + b"ctorch\nSize\nq\x01(" + b"h\x01h\x00\x85R" * 300 + b"t."
    with pytest.raises(CorruptCheckpointError, match=r"a torch\.Size of 300,000 dimensions"):
        parse_dcp_metadata(data, "dir/.metadata")


def test_one_list_of_chunks_cannot_stand_for_many_tensors() -> None:
    chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))] * 3000
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4]), chunks)
    metadata = Metadata({f"w{n}": entry for n in range(3000)}, storage_data={})
    with pytest.raises(CorruptCheckpointError, match="lists more chunks than it has bytes"):
        parse(metadata)
