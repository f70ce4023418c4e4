from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from ckpt_core.safetensors_header import MAX_HEADER_BYTES, build_header, read_header, read_index
from ckpt_core.spec import DTYPE_BITS
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import save, save_file

STATE = {
    "a": torch.arange(6.0).reshape(2, 3),
    "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 4),
    "bytes": torch.arange(3, dtype=torch.uint8),
    'odd ü \n" name': torch.tensor([True]),
}


def write(tmp_path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return tmp_path / "x.safetensors"


def read_by_library(blob: bytes) -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors = deserialize(blob)  # type: ignore[no-untyped-call]
    return {name: (info["dtype"], tuple(info["shape"])) for name, info in tensors}


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_file_of_the_library_reads_as_it_was_saved(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "x.safetensors", {"format": "pt", "more": "text"})
    header = read_header(tmp_path / "x.safetensors")
    assert dict(header.metadata) == {"format": "pt", "more": "text"}
    assert {name: e.shape for name, e in header.entries.items()} == {n: tuple(t.shape) for n, t in STATE.items()}
    raw = (tmp_path / "x.safetensors").read_bytes()
    for name, tensor in STATE.items():
        found = header.entries[name]
        assert raw[found.offset : found.offset + found.length] == bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def test_a_header_inside_another_file_is_read(tmp_path: Path) -> None:
    blob = save(STATE)
    (tmp_path / "f").write_bytes(b"12345" + blob + b"tail")
    header = read_header(tmp_path / "f", start=5, end=5 + len(blob))
    found = header.entries["bytes"]
    assert (tmp_path / "f").read_bytes()[found.offset : found.offset + 3] == b"\x00\x01\x02"


def test_a_built_header_is_byte_for_byte_what_the_library_builds() -> None:
    tensors = {"one": torch.arange(3.0), "two": torch.arange(4, dtype=torch.int64), "é": torch.tensor(1.0)}
    expected = save(tensors, {"format": "pt"})
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    names = {torch.float32: "F32", torch.int64: "I64"}
    built = build_header(
        ((n, names[tensors[n].dtype], tuple(tensors[n].shape), tensors[n].nbytes) for n in order), {"format": "pt"}
    )
    assert expected.startswith(built)
    assert len(built) % 8 == 0


def test_a_header_without_metadata_has_none() -> None:
    assert b"__metadata__" not in build_header([("a", "U8", (0,), 0)], {})


NAMES = st.text(st.characters(codec="utf-8"), max_size=20).filter(lambda name: name != "__metadata__")


SHAPES = st.lists(st.integers(0, 4), max_size=4)


@given(
    tensors=st.dictionaries(
        NAMES,
        st.tuples(
            st.sampled_from(["F64", "BF16", "I8", "BOOL", "F8_E4M3", "C64"]), st.lists(st.integers(0, 4), max_size=4)
        ),
        max_size=6,
    ),
    metadata=st.dictionaries(NAMES, st.text(st.characters(codec="utf-8"), max_size=10), max_size=3),
)
def test_what_is_built_is_parsed_by_the_library_and_by_us(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, tuple[str, list[int]]],
    metadata: dict[str, str],
) -> None:
    sized = [
        (name, dtype, tuple(shape), torch.Size(shape).numel() * DTYPE_BITS[dtype] // 8)
        for name, (dtype, shape) in tensors.items()
    ]
    blob = build_header(sized, metadata) + b"\x01" * sum(length for *_, length in sized)
    path = tmp_path_factory.getbasetemp() / "built.safetensors"
    path.write_bytes(blob)
    header = read_header(path)
    assert dict(header.metadata) == metadata
    found = {name: (e.dtype, e.shape, e.length) for name, e in header.entries.items()}
    assert found == {name: (dtype, shape, length) for name, dtype, shape, length in sized}
    assert read_by_library(blob) == {name: (dtype, shape) for name, dtype, shape, _ in sized}


TWO = b"\x00" * 8


@pytest.mark.parametrize(
    ("header", "data", "fault"),
    [
        (b"[]", b"", "begins with '{'"),
        (b"", b"", "begins with '{'"),
        (b"{", b"", "valid JSON"),
        (b'{"a":NaN}', b"", "NaN"),
        (b"{\xff}", b"", "valid JSON"),
        (b'{"a":' * 100_000, b"", "nested too deeply"),
        (b'{"a":1' + b"0" * 5000 + b"}", b"", "valid JSON"),
        (b'{"\\ud800":1}', b"", "valid JSON"),
        (b'{"a":1,"a":2}', b"", "'a' twice"),
        (b'{"__metadata__":{"k":"1","k":"2"}}', b"", "'k' twice"),
        ({"__metadata__": {"k": 1}}, b"", "__metadata__"),
        ({"__metadata__": []}, b"", "__metadata__"),
        ({"a": 5}, b"", "'a': expected dtype"),
        ({"a": {}}, b"", "'a': expected dtype"),
        ({"a": {"dtype": "F32", "shape": [2]}}, TWO, "'a': expected dtype"),
        ({"a": entry(dtype=4)}, TWO, "'a': expected dtype"),
        ({"a": entry(dtype="F31")}, TWO, "'F31' is not known"),
        ({"a": entry(dtype="C128")}, TWO, "'C128' is not known"),
        ({"a": entry(shape="2")}, TWO, "'a': expected dtype"),
        ({"a": entry(shape=[-2])}, TWO, "list of at most 64 sizes"),
        ({"a": entry(shape=[2.0])}, TWO, "list of at most 64 sizes"),
        ({"a": entry(shape=[True, 2])}, TWO, "list of at most 64 sizes"),
        ({"a": entry(shape=[1] * 65)}, TWO, "list of at most 64 sizes"),
        ({"a": entry(shape=[1 << 62, 1 << 62])}, TWO, "list of at most 64 sizes"),
        ({"a": entry(shape=[1 << 40] * 60)}, TWO, "more elements than 64 bits can count"),
        ({"a": entry(shape=[0, 1 << 40, 1 << 40], offsets=[0, 0])}, TWO, "more elements than 64 bits can count"),
        ({"a": entry(shape=[3])}, TWO, "expected data_offsets that fit"),
        ({"a": entry(offsets=[0])}, TWO, "'a': expected dtype"),
        ({"a": entry(offsets=[8, 0])}, TWO, "expected data_offsets that fit"),
        ({"a": entry(offsets=[-8, 0])}, TWO, "two offsets"),
        ({"a": entry(offsets=[0.0, 8])}, TWO, "'a': expected dtype"),
        ({"a": entry(offsets=[4, 12])}, b"\x00" * 12, "to begin at byte 0, found 4"),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, b"\x00" * 12, "'b': expected to begin at byte 8, found 4"),
        ({"a": entry(), "b": entry(offsets=[12, 20])}, b"\x00" * 20, "'b': expected to begin at byte 8, found 12"),
        ({"a": entry()}, b"\x00" * 7, "expected 8 bytes of tensors, found 7"),
        ({"a": entry()}, b"\x00" * 9, "expected 8 bytes of tensors, found 9"),
        ({"a": entry(dtype="F4", shape=[3], offsets=[0, 2])}, b"\x00" * 2, "expected data_offsets that fit"),
    ],
)
def test_a_malformed_header_is_one_error_that_names_the_fault(
    tmp_path: Path, header: object, data: bytes, fault: str
) -> None:
    path = write(tmp_path, header, data)
    with pytest.raises(CorruptCheckpointError, match=re.escape(fault)) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert caught.value.problems[0].where == "x.safetensors"


def test_what_the_library_refuses_is_refused_here(tmp_path: Path) -> None:
    for header in ({"a": entry(offsets=[4, 12])}, {"a": entry(shape=[3])}, {"a": entry(dtype="F31")}):
        blob = write(tmp_path, header, b"\x00" * 12).read_bytes()
        with pytest.raises(SafetensorError):
            read_by_library(blob)
        with pytest.raises(CorruptCheckpointError):
            read_header(tmp_path / "x.safetensors")


def test_what_the_library_passes_over_is_passed_over_here(tmp_path: Path) -> None:
    header = {"__metadata__": None, "a": {**entry(), "comment": "x"}}
    path = write(tmp_path, header, TWO)
    assert list(read_by_library(path.read_bytes())) == ["a"]
    assert list(read_header(path).entries) == ["a"]


@pytest.mark.parametrize("raw", [b"", b"\x00" * 7, (100).to_bytes(8, "little") + b"{}"])
def test_a_file_that_ends_in_its_header_is_short(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(CorruptCheckpointError) as caught:
        read_header(tmp_path / "x.safetensors")
    assert [p.kind for p in caught.value.problems] == ["short_file"]


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_an_enormous_length_is_refused_without_reading(tmp_path: Path, length: int) -> None:
    (tmp_path / "x.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(CorruptCheckpointError, match="at most 100000000"):
        read_header(tmp_path / "x.safetensors")


def test_every_fault_of_a_header_is_listed(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": entry(dtype="X"), "b": 5, "c": entry(shape=[9])})
    with pytest.raises(CorruptCheckpointError) as caught:
        read_header(path)
    assert len(caught.value.problems) == 3


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"nothing\.safetensors"):
        read_header(tmp_path / "nothing.safetensors")


WHOLE = save({"a": torch.arange(3.0), "b": torch.arange(4, dtype=torch.int16)}, {"format": "pt"})


@settings(max_examples=300)
@given(at=st.integers(0, len(WHOLE) - 1), byte=st.integers(0, 255), end=st.integers(0, len(WHOLE)))
def test_damage_is_a_checkpoint_error_or_read_as_the_library_reads_it(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, end: int
) -> None:
    damaged = WHOLE[:at] + bytes([byte]) + WHOLE[at + 1 :]
    for blob in (damaged, damaged[:end]):
        path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
        path.write_bytes(blob)
        try:
            header = read_header(path)
        except CheckpointError:
            continue
        assert {name: (e.dtype, e.shape) for name, e in header.entries.items()} == read_by_library(blob)


def write_index(tmp_path: Path, content: Any) -> Path:  # noqa: ANN401  malformed on purpose
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_an_index_maps_names_to_files(tmp_path: Path) -> None:
    path = write_index(tmp_path, {"metadata": {"total_size": 8}, "weight_map": {"a": "m-1.safetensors"}})
    assert dict(read_index(path).weight_map) == {"a": "m-1.safetensors"}


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "", ".", "..", "a\\b", "C:x", "a\0b", 5, None, ["a"]],
)
def test_an_index_cannot_name_a_file_elsewhere(tmp_path: Path, file: object) -> None:
    path = write_index(tmp_path, {"weight_map": {"a": file}})
    with pytest.raises(CorruptCheckpointError, match="'a'"):
        read_index(path)


@pytest.mark.parametrize("content", [b"", b"[]", {}, {"weight_map": []}, b'{"weight_map":{"a":"x","a":"y"}}', b"{"])
def test_a_malformed_index_is_one_error_that_names_it(tmp_path: Path, content: object) -> None:
    path = write_index(tmp_path, content)
    with pytest.raises(CorruptCheckpointError, match=r"index\.json"):
        read_index(path)
