from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ckpt_core.layout import CheckpointLayout
from ckpt_core.reader import open_checkpoint
from ckpt_core.record import CheckpointRecord, TensorRecord, measure_files, write_record
from ckpt_core.sharded_reader import ShardedSafetensorsReader
from ckpt_core.stream import read_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from testbed.sharded import Cut, cut_columns, cut_rows, save_sharded_safetensors
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

STATE = {
    "w": torch.arange(35.0).reshape(7, 5),
    "h": torch.arange(24, dtype=torch.bfloat16).reshape(6, 4),
    "scalar": torch.tensor(2.5),
    "ids": torch.arange(3),
    "flag": torch.tensor([True, False]),
    "empty": torch.empty(0, 3),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_sharded_safetensors(tmp_path / "s", STATE, ranks=3)


def kinds(path: Path) -> list[tuple[str, str]]:
    return [(problem.kind, problem.where) for problem in ShardedSafetensorsReader(path).check()]


@pytest.mark.parametrize("cut", [cut_rows(1), cut_rows(4), cut_columns(4), lambda _n, t: (2, 2)[: t.dim()]])
def test_chunks_and_shapes_are_those_that_torch_reads(tmp_path: Path, cut: Cut) -> None:
    path = save_sharded_safetensors(tmp_path / "s", STATE, ranks=4, cut=cut)
    reader = open_checkpoint(path)
    assert reader.layout is CheckpointLayout.SAFETENSORS_SHARDED
    expected = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    assert set(reader.tensors) == set(expected)
    for fqn, tensor in expected.items():
        assert isinstance(tensor, TensorStorageMetadata)
        spec = reader.tensors[fqn]
        assert spec.shape == tuple(tensor.size)
        boxes = {(tuple(c.offsets), tuple(c.sizes)) for c in tensor.chunks if c.sizes.numel()}
        assert {(c.offsets, c.sizes) for c in spec.chunks} == boxes
        assert torch.equal(read_tensor(reader, fqn), STATE[fqn])


def test_completeness_cannot_be_proven_without_a_record(path: Path) -> None:
    problems = ShardedSafetensorsReader(path).check()
    assert [(p.kind, p.severity) for p in problems] == [("unproven", "warning")]


def record_of(path: Path) -> CheckpointRecord:
    tensors = {fqn: TensorRecord(s.dtype, s.shape) for fqn, s in ShardedSafetensorsReader(path).tensors.items()}
    return CheckpointRecord("1", measure_files(path), tensors)


def test_a_record_proves_completeness(path: Path) -> None:
    write_record(path, record_of(path))
    assert kinds(path) == []


def test_with_a_record_a_missing_last_shard_is_seen(path: Path) -> None:
    """Without one, what is left tiles smaller tensors exactly."""
    last = path / "shard-00003-model-00001-of-00001.safetensors"
    record = record_of(path)
    last.unlink()
    assert [kind for kind, _ in kinds(path)] == ["unproven"]
    write_record(path, record)
    found = kinds(path)
    assert ("missing_file", last.name) in found
    assert ("hole", "w") in found
    assert ShardedSafetensorsReader(path).tensors["w"].shape == (7, 5)


def test_a_missing_inner_shard_is_a_hole(path: Path) -> None:
    (path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    assert {where for kind, where in kinds(path) if kind == "hole"} >= {"w", "h"}


def test_a_shard_cut_short_is_named(path: Path) -> None:
    shard = path / "shard-00002-model-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert ("short_file", shard.name) in kinds(path)


def test_a_shard_of_an_earlier_save_overlaps(path: Path) -> None:
    stale = path / "shard-00009-model-00001-of-00001.safetensors"
    stale.write_bytes((path / "shard-00001-model-00001-of-00001.safetensors").read_bytes())
    assert {("overlap", "w"), ("overlap", "h")} <= set(kinds(path))


def test_with_a_record_a_stray_file_is_refused(path: Path) -> None:
    write_record(path, record_of(path))
    header = {"DCP_SHARDING_INFO": json.dumps({"new": {"saved_offsets": [0]}})}
    save_file({"new": torch.ones(2)}, path / "extra.safetensors", header)
    found = [p for p in ShardedSafetensorsReader(path).check() if p.severity == "error"]
    assert [(p.kind, p.where) for p in found] == [
        ("unexpected_tensor", "new"),
        ("unexpected_tensor", "extra.safetensors"),
    ]


def rewrite(path: Path, info: object) -> None:
    """Replace where a shard says that its chunks lie."""
    tensors = load_file(path)
    save_file(tensors, path, {"DCP_SHARDING_INFO": info if isinstance(info, str) else json.dumps(info)})


@pytest.mark.parametrize(
    "offsets", [None, [0], [0, 0, 0], [0, -1], [0, 1.5], ["0", "0"], [True, 0], [1 << 63, 0], {"0": 0}]
)
def test_impossible_offsets_are_reported_and_left_out(tmp_path: Path, offsets: object) -> None:
    path = save_sharded_safetensors(tmp_path / "s", {"w": torch.ones(4, 2)}, ranks=2)
    shard = path / "shard-00002-model-00001-of-00001.safetensors"
    rewrite(shard, {"w": {"saved_offsets": offsets}})
    assert ("bad_header", shard.name) in kinds(path)


@pytest.mark.parametrize("info", ["", "[]", "{", '{"w": 5}', '{"w":{},"w":{}}', "[" * 100_000])
def test_unreadable_sharding_information_is_reported(tmp_path: Path, info: str) -> None:
    path = save_sharded_safetensors(tmp_path / "s", {"w": torch.ones(4, 2)}, ranks=2)
    shard = path / "shard-00002-model-00001-of-00001.safetensors"
    rewrite(shard, info)
    assert ("bad_header", shard.name) in kinds(path)


def test_a_whole_tensor_among_shards_is_reported(path: Path) -> None:
    save_file({"w": torch.zeros(7, 5)}, path / "zzz.safetensors", {"format": "pt"})
    assert ("bad_header", "zzz.safetensors") in kinds(path)


def test_chunks_of_different_dtypes_are_reported(tmp_path: Path) -> None:
    path = save_sharded_safetensors(tmp_path / "s", {"w": torch.ones(4, 2)}, ranks=2)
    shard = path / "shard-00002-model-00001-of-00001.safetensors"
    save_file(
        {"w": torch.ones(2, 2, dtype=torch.int32)},
        shard,
        {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [2, 0]}})},
    )
    assert ("dtype", "w") in kinds(path)


@settings(max_examples=25)
@given(rows=st.integers(0, 9), columns=st.integers(1, 4), ranks=st.integers(1, 5))
def test_uneven_and_empty_shards_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: int, columns: int, ranks: int
) -> None:
    tensor = torch.arange(rows * columns, dtype=torch.int32).reshape(rows, columns)
    path = save_sharded_safetensors(tmp_path_factory.mktemp("s") / "d", {"x": tensor}, ranks=ranks)
    reader = open_checkpoint(path)
    assert [p.kind for p in reader.check()] == ["unproven"]
    assert torch.equal(read_tensor(reader, "x"), tensor)
