from __future__ import annotations

import io
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ckpt_core.dcp_reader import DcpReader
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from ckpt_core.reader import open_checkpoint
from ckpt_core.record import CheckpointRecord, TensorRecord, measure_files, write_record
from ckpt_core.stream import read_tensor
from ckpt_core.torch_archive import ArchiveFinder
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed.sharded import cut_rows, save_dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

STATE = {"a": torch.arange(24.0).reshape(6, 4), "b": torch.arange(5), "c": torch.tensor(1.5), "step": 3}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_dcp(tmp_path / "dcp", STATE, ranks=3)


def kinds(path: Path) -> list[tuple[str, str]]:
    return [(problem.kind, problem.where) for problem in DcpReader(path).check()]


def save_quietly(state: dict[str, object], writer: FileSystemWriter) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(state, storage_writer=writer, no_dist=True)


def test_a_whole_checkpoint_has_no_problems(path: Path) -> None:
    assert DcpReader(path).check() == []


@pytest.mark.parametrize("threads", [1, 2])
def test_what_dcp_save_writes_is_read_back(tmp_path: Path, threads: int) -> None:
    state = {"model": {"w": torch.arange(6.0).reshape(2, 3).t(), "n": torch.tensor(4)}, "step": 5}
    save_quietly(state, FileSystemWriter(tmp_path / "d", thread_count=threads))
    reader = open_checkpoint(tmp_path / "d")
    assert torch.equal(read_tensor(reader, "model.w"), state["model"]["w"])  # type: ignore[index]
    assert torch.equal(read_tensor(reader, "model.n"), torch.tensor(4))
    assert list(reader.objects) == ["step"]
    assert reader.nesting["model.w"] == ("model", "w")
    assert reader.check() == []


def test_one_file_per_item_is_read(tmp_path: Path) -> None:
    save_quietly({"a": torch.ones(2), "b": torch.zeros(3)}, FileSystemWriter(tmp_path, single_file_per_rank=False))
    reader = open_checkpoint(tmp_path)
    assert torch.equal(read_tensor(reader, "b"), torch.zeros(3))
    assert reader.check() == []


def test_a_rank_without_anything_to_save_is_no_stray(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "d", {"a": torch.ones(2, 2)}, ranks=3, cut=cut_rows(2))
    assert (path / "__2_0.distcp").stat().st_size == 0
    assert kinds(path) == []


def test_empty_chunks_are_no_strays_either(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "d", {"a": torch.ones(2, 2)}, ranks=3)
    assert (path / "__2_0.distcp").stat().st_size > 0
    assert kinds(path) == []


def test_a_missing_file_is_named(path: Path) -> None:
    (path / "__1_0.distcp").unlink()
    assert kinds(path) == [("missing_file", "__1_0.distcp")]


def test_a_file_cut_short_is_named(path: Path) -> None:
    file = path / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    assert kinds(path) == [("short_file", "__1_0.distcp")]


def test_a_file_left_by_an_earlier_save_is_a_warning(path: Path) -> None:
    shutil.copy(path / "__1_0.distcp", path / "__7_0.distcp")
    problems = DcpReader(path).check()
    assert [(p.kind, p.where, p.severity) for p in problems] == [("stray_file", "__7_0.distcp", "warning")]


def edit(path: Path, change: Callable[[Metadata], None]) -> None:
    """Change the metadata as torch sees it."""
    metadata = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301  written by this test
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_hole_and_an_overlap_are_found(path: Path) -> None:
    def drop_and_shift(metadata: Metadata) -> None:
        chunks = metadata.state_dict_metadata
        del chunks["a"].chunks[0]  # type: ignore[union-attr]
        chunks["b"].chunks[1].sizes = torch.Size([3])  # type: ignore[union-attr]

    edit(path, drop_and_shift)
    assert [kind for kind, where in kinds(path) if where == "a"] == ["unexpected_tensor", "hole"]
    assert ("overlap", "b") in kinds(path)


def test_two_items_on_the_same_bytes_are_found(path: Path) -> None:
    """One flipped bit in a file name does that: rank 1's items would be read twice, rank 0's never."""
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"__1_0.distcp"))
    found = kinds(path)
    assert ("overlap", "__1_0.distcp") in found
    assert ("stray_file", "__0_0.distcp") in found


def test_a_missing_metadata_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"\.metadata"):
        DcpReader(tmp_path)


def test_an_empty_metadata_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").touch()
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata"):
        DcpReader(tmp_path)


def test_a_file_of_another_save_is_refused(tmp_path: Path) -> None:
    ours = save_dcp(tmp_path / "ours", {"a": torch.ones(3, 4)}, ranks=1)
    theirs = save_dcp(tmp_path / "theirs", {"a": torch.ones(4, 3)}, ranks=1)
    shutil.copy(theirs / "__0_0.distcp", ours / "__0_0.distcp")
    reader = DcpReader(ours)
    spec = reader.tensors["a"]
    with pytest.raises(CorruptCheckpointError, match="different saves"):
        reader.locate(spec, spec.chunks[0])


def test_located_bytes_are_those_of_the_tensor(path: Path) -> None:
    reader = DcpReader(path)
    spec = reader.tensors["a"]
    for chunk in spec.chunks:
        data = reader.locate(spec, chunk)
        assert data.is_contiguous
        raw = (path / data.file).read_bytes()[data.offset :]
        rows = torch.frombuffer(bytearray(raw), dtype=torch.float32, count=chunk.numel).reshape(chunk.sizes)
        assert torch.equal(rows, STATE["a"][chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]])  # type: ignore[index]


def test_a_safetensors_blob_is_read_by_its_own_header(tmp_path: Path) -> None:
    """torch records the same offset for every tensor of a blob, and cannot load it back."""
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4), "step": 5}
    writer = FileSystemWriter(tmp_path / "d", serialization_format=SerializationFormat.SAFETENSORS)
    save_quietly(state, writer)
    reader = open_checkpoint(tmp_path / "d")
    assert reader.check() == []
    for fqn in ("a", "b"):
        assert torch.equal(read_tensor(reader, fqn), state[fqn])  # type: ignore[arg-type]


def test_a_tensor_that_a_blob_lacks_is_refused(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path / "d", serialization_format=SerializationFormat.SAFETENSORS)
    save_quietly({"aa": torch.ones(2), "bb": torch.zeros(3)}, writer)
    file = tmp_path / "d" / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b'"bb"', b'"cc"'))
    with pytest.raises(CorruptCheckpointError, match="'bb'"):
        read_tensor(open_checkpoint(tmp_path / "d"), "bb")


def record_of(path: Path, **changes: TensorRecord) -> CheckpointRecord:
    tensors = {fqn: TensorRecord(spec.dtype, spec.shape) for fqn, spec in DcpReader(path).tensors.items()}
    return CheckpointRecord("1", measure_files(path), tensors | changes)


def test_a_matching_record_adds_no_problem(path: Path) -> None:
    write_record(path, record_of(path))
    assert kinds(path) == []


def test_a_record_that_differs_is_reported(path: Path) -> None:
    write_record(path, record_of(path, a=TensorRecord("F32", (7, 4)), d=TensorRecord("F32", ())))
    (path / "__2_0.distcp").write_bytes((path / "__2_0.distcp").read_bytes() + b"more")
    found = kinds(path)
    assert ("shape", "a") in found
    assert ("missing_tensor", "d") in found
    assert any(where == "__2_0.distcp" for _, where in found)


def archive(value: object, **options: bool) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def repack(data: bytes, compression: int, drop: str = "", **replaced: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(stream, "w", compression) as target:
        for name in source.namelist():
            if not drop or not name.endswith(drop):
                target.writestr(name, replaced.get(name.rpartition("/")[2], source.read(name)))
    return stream.getvalue()


def find(tmp_path: Path, data: bytes) -> bytes:
    """Return the bytes of the tensor found in an archive that lies amid other bytes."""
    (tmp_path / "f").write_bytes(b"before" + data + b"after")
    found = ArchiveFinder().find(tmp_path / "f", 6, len(data))
    return (tmp_path / "f").read_bytes()[found.offset :][: 4 * 6]


SIX = torch.arange(6, dtype=torch.int32)
RAW = bytes(SIX.view(torch.uint8).numpy())


def test_an_archive_is_found_amid_other_bytes(tmp_path: Path) -> None:
    assert find(tmp_path, archive(SIX)) == RAW


def test_zip64_sizes_and_offsets_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 20)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 2)
    data = repack(archive(SIX), zipfile.ZIP_STORED)
    assert b"PK\x06\x06" in data
    assert find(tmp_path, data) == RAW


def test_a_slice_of_a_larger_storage_is_found(tmp_path: Path) -> None:
    whole = torch.arange(-4, 20, dtype=torch.int32)
    assert find(tmp_path, archive(whole[4:10])) == RAW


def test_strides_are_those_of_the_saved_tensor(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(data := archive(SIX.reshape(2, 3).t()))
    found = ArchiveFinder().find(tmp_path / "f", 0, len(data))
    assert (found.sizes, found.strides) == ((3, 2), (1, 3))


def test_an_archive_like_an_earlier_one_is_found_as_if_it_were_the_first(tmp_path: Path) -> None:
    """Same length and same hint, yet other strides, another dtype, another place in the file."""
    values = [SIX.reshape(2, 3), SIX.reshape(3, 2).t(), SIX.reshape(2, 3) + 7, SIX.reshape(2, 3).float()]
    finder = ArchiveFinder()
    for value in values * 2:
        (tmp_path / "f").write_bytes(b"x" * 11 + (data := archive(value)))
        found = finder.find(tmp_path / "f", 11, len(data), "always the same hint")
        assert found == ArchiveFinder().find(tmp_path / "f", 11, len(data))
        assert found.strides == value.stride()


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (repack(archive(SIX), zipfile.ZIP_DEFLATED), "compressed"),
        (repack(archive(SIX), zipfile.ZIP_STORED, drop="data/0"), "storage '0'"),
        (repack(archive(SIX), zipfile.ZIP_STORED, drop="data.pkl"), "data.pkl"),
        (repack(archive(SIX), zipfile.ZIP_STORED, byteorder=b"big"), "little-endian"),
        (archive({"a": SIX}), "dict"),
        (archive([SIX]), "list"),
        (archive(torch.complex(SIX.float(), SIX.float()).conj()), "conjugated"),
        (archive(SIX, _use_new_zipfile_serialization=False), "no zip directory"),
        (b"", "no zip directory"),
        (b"PK\x05\x06" + b"\0" * 18, "data.pkl"),
        (archive(torch.nn.Parameter(SIX.float())), "_rebuild_parameter"),
        (archive(torch.empty(3, device="meta")), "_rebuild_meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_archive_that_is_not_one_plain_tensor_is_refused(tmp_path: Path, data: bytes, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        find(tmp_path, data)


WHOLE = archive(SIX)


@settings(max_examples=300)
@given(at=st.integers(0, len(WHOLE) - 1), byte=st.integers(0, 255), end=st.integers(0, len(WHOLE)))
def test_a_damaged_archive_never_leads_to_another_exception(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, end: int
) -> None:
    damaged = WHOLE[:at] + bytes([byte]) + WHOLE[at + 1 :]
    for data in (damaged, damaged[:end]):
        file = tmp_path_factory.getbasetemp() / "damaged"
        file.write_bytes(data)
        try:
            found = ArchiveFinder().find(file, 0, len(data))
        except CheckpointError:
            continue
        assert 0 <= found.offset <= len(data)


def test_a_stride_that_no_element_is_reached_by_may_be_any_number(tmp_path: Path) -> None:
    state = {"a": torch.arange(3.0).as_strided((3, 1), (1, 2**62)), "b": torch.ones(2)}
    save_quietly(dict(state), FileSystemWriter(tmp_path / "d"))
    assert torch.equal(read_tensor(open_checkpoint(tmp_path / "d"), "a"), state["a"])


def test_a_tensor_of_more_dimensions_than_can_be_read_is_refused_when_opened(tmp_path: Path) -> None:
    save_quietly({"a": torch.ones([1] * 65)}, FileSystemWriter(tmp_path / "d"))
    with pytest.raises(CorruptCheckpointError, match="65 dimensions, more than the 64 that can be read"):
        open_checkpoint(tmp_path / "d")


def test_of_many_items_that_share_bytes_the_first_are_listed(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "d", {f"w{n}": torch.full((2,), n) for n in range(100)}, ranks=1)
    metadata = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301  written above
    first = next(iter(metadata.storage_data.values()))
    metadata.storage_data = dict.fromkeys(metadata.storage_data, first)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    problems = [problem for problem in DcpReader(path).check() if problem.kind == "overlap"]
    assert len(problems) == 21
    assert problems[-1].message == "more than 20 items share bytes"
