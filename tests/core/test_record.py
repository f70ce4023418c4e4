from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ckpt_core.errors import CheckpointError, ConfigError, CorruptCheckpointError, LayoutError, TargetError
from ckpt_core.layout import CheckpointLayout
from ckpt_core.record import (
    RECORD_NAME,
    CheckpointRecord,
    TensorRecord,
    check_record,
    explain_unsafe_name,
    measure_files,
    read_record,
    write_record,
)
from ckpt_core.spec import DTYPE_BITS, find_shape_fault
from hypothesis import given
from hypothesis import strategies as st

RECORD = CheckpointRecord(
    tool_version="0.1.0",
    files={"model.safetensors": 123, ".hf_metadata/config.json": 0, "größe 模型.bin": 2**40},
    tensors={
        "lm_head.weight": TensorRecord("BF16", (32, 16), "sha256:0aff"),
        "scale": TensorRecord("F32", ()),
        "empty": TensorRecord("I64", (0, 3)),
    },
    source_layout=CheckpointLayout.DCP,
    save_id="8c1f",
)
UNSAFE_NAMES = ["/etc/passwd", "..", "../x", "a/../b", "a//b", "a/", "", ".", "./a", "a\0b", "a\\b", "\ud800"]
SAFE_NAMES = ["model.safetensors", "consolidated/model.safetensors", ".hf_metadata/x", "a..b", "...", "é\n", "\udcff"]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_record(tmp_path, RECORD)
    assert read_record(tmp_path) == RECORD


names = st.text().filter(lambda name: explain_unsafe_name(name) is None)
sizes = st.integers(0, 2**62 - 1) | st.integers(0, 10**4)
tensors = st.builds(
    TensorRecord,
    st.sampled_from(sorted(DTYPE_BITS)),
    st.lists(sizes, max_size=4).map(tuple).filter(lambda shape: find_shape_fault(shape) is None),
    st.none() | st.from_regex(r"[a-z0-9]+:[0-9a-f]+", fullmatch=True),
)
records = st.builds(
    CheckpointRecord,
    st.text(min_size=1),
    st.dictionaries(names, sizes, max_size=4),
    st.dictionaries(st.text(), tensors, max_size=4),
    st.none() | st.sampled_from(CheckpointLayout),
    st.none() | st.text(),
)


@given(record=records)
def test_any_record_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, record: CheckpointRecord
) -> None:
    directory = tmp_path_factory.mktemp("record")
    write_record(directory, record)
    assert read_record(directory) == record


def test_equal_records_give_equal_bytes_whatever_their_order(tmp_path: Path) -> None:
    shuffled = CheckpointRecord(
        RECORD.tool_version,
        dict(reversed(list(RECORD.files.items()))),
        dict(reversed(list(RECORD.tensors.items()))),
        RECORD.source_layout,
        RECORD.save_id,
    )
    written = []
    for name, record in (("a", RECORD), ("b", shuffled)):
        (tmp_path / name).mkdir()
        write_record(tmp_path / name, record)
        written.append((tmp_path / name / RECORD_NAME).read_bytes())
    assert written[0] == written[1]


def test_the_file_holds_what_was_given_and_nothing_else(tmp_path: Path) -> None:
    write_record(tmp_path, RECORD)
    content = json.loads((tmp_path / RECORD_NAME).read_text())
    assert content == {
        "format_version": 1,
        "tool_version": "0.1.0",
        "source_layout": "dcp",
        "save_id": "8c1f",
        "files": dict(RECORD.files),
        "tensors": {
            "lm_head.weight": {"dtype": "BF16", "shape": [32, 16], "digest": "sha256:0aff"},
            "scale": {"dtype": "F32", "shape": []},
            "empty": {"dtype": "I64", "shape": [0, 3]},
        },
    }


def test_no_record_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert read_record(tmp_path) is None
    assert read_record(tmp_path / "absent") is None
    assert read_record(tmp_path / "file") is None


def test_writing_where_there_is_no_directory_is_a_target_error(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="cannot be written"):
        write_record(tmp_path / "absent", RECORD)


# --- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNSAFE_NAMES)
def test_a_name_that_leads_out_of_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    assert explain_unsafe_name(name) is not None
    with pytest.raises(ConfigError, match="file name"):
        CheckpointRecord("1", {name: 1}, {})
    (tmp_path / RECORD_NAME).write_text(json.dumps(VALID | {"files": {name: 1}}))
    with pytest.raises(CorruptCheckpointError, match="file name"):
        read_record(tmp_path)


@pytest.mark.parametrize("name", SAFE_NAMES)
def test_a_name_inside_the_directory_is_accepted(name: str) -> None:
    assert explain_unsafe_name(name) is None
    assert CheckpointRecord("1", {name: 1}, {}).files == {name: 1}


# --- damage ----------------------------------------------------------------------------------

TENSOR: dict[str, Any] = {"dtype": "F32", "shape": [2]}
VALID: dict[str, Any] = {"format_version": 1, "tool_version": "1", "files": {"a": 1}, "tensors": {"w": TENSOR}}


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in VALID.items() if k != key}


@pytest.mark.parametrize(
    "content",
    [
        [],
        None,
        "text",
        without("format_version"),
        without("files"),
        without("tensors"),
        VALID | {"format_version": 0},
        VALID | {"format_version": True},
        VALID | {"format_version": 1.5},
        VALID | {"format_version": "1"},
        VALID | {"tool_version": 1},
        VALID | {"save_id": 1},
        VALID | {"source_layout": "tape"},
        VALID | {"files": ["a"]},
        VALID | {"files": {"a": -1}},
        VALID | {"files": {"a": 1.0}},
        VALID | {"files": {"a": True}},
        VALID | {"files": {"a": "1"}},
        VALID | {"files": {"a": None}},
        VALID | {"files": {"a": 2**62}},
        VALID | {"tensors": []},
        VALID | {"tensors": {"w": []}},
        VALID | {"tensors": {"w": {"dtype": "F32"}}},
        VALID | {"tensors": {"w": {"shape": [2]}}},
        VALID | {"tensors": {"w": TENSOR | {"dtype": "float32"}}},
        VALID | {"tensors": {"w": TENSOR | {"dtype": 32}}},
        VALID | {"tensors": {"w": TENSOR | {"shape": [-2]}}},
        VALID | {"tensors": {"w": TENSOR | {"shape": [2.0]}}},
        VALID | {"tensors": {"w": TENSOR | {"shape": [True]}}},
        VALID | {"tensors": {"w": TENSOR | {"shape": 2}}},
        VALID | {"tensors": {"w": TENSOR | {"shape": [2**62] * 300}}},
        VALID | {"tensors": {"w": TENSOR | {"shape": [1] * 65}}},
        VALID | {"tensors": {"w": TENSOR | {"digest": "0aff"}}},
        VALID | {"tensors": {"w": TENSOR | {"digest": 5}}},
    ],
    ids=repr,
)
def test_a_record_that_nobody_wrote_is_refused_with_its_path(tmp_path: Path, content: object) -> None:
    (tmp_path / RECORD_NAME).write_text(json.dumps(content))
    with pytest.raises(CorruptCheckpointError, match="restore it or remove it") as caught:
        read_record(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / RECORD_NAME))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe{}",
        b'{"format_version": 1, "format_version": 1}',
        b'{"format_version": 1, "tool_version": "1", "files": {"a": 1, "a": 2}, "tensors": {}}',
        b'{"format_version": 1, "tool_version": "1", "files": {"a": NaN}, "tensors": {}}',
        b'{"format_version": 1, "tool_version": "1", "files": {"a": ' + b"9" * 5000 + b'}, "tensors": {}}',
        b"[" * 100_000,
    ],
    ids=lambda raw: repr(raw[:40]),
)
def test_bytes_that_are_no_record_are_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / RECORD_NAME).write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match="not a record that this project wrote"):
        read_record(tmp_path)


def test_a_future_format_asks_for_an_update(tmp_path: Path) -> None:
    (tmp_path / RECORD_NAME).write_text(json.dumps({"format_version": 2, "whatever": []}))
    with pytest.raises(LayoutError, match="record format 2, this release reads up to 1; update ckpt-core"):
        read_record(tmp_path)


def test_any_flipped_bit_gives_a_record_or_one_of_our_errors(tmp_path: Path) -> None:
    write_record(tmp_path, RECORD)
    path = tmp_path / RECORD_NAME
    raw = path.read_bytes()
    refused = 0
    for position in range(len(raw) * 8):
        flipped = bytearray(raw)
        flipped[position // 8] ^= 1 << position % 8
        path.write_bytes(flipped)
        try:
            read_record(tmp_path)
        except CheckpointError:
            refused += 1
    assert refused > len(raw)


def test_a_directory_in_the_place_of_the_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / RECORD_NAME).mkdir()
    with pytest.raises(CorruptCheckpointError, match="expected a regular file, found a directory"):
        read_record(tmp_path)


# --- files -----------------------------------------------------------------------------------


def make_directory(directory: Path) -> CheckpointRecord:
    (directory / "consolidated").mkdir()
    (directory / "model-1.bin").write_bytes(b"12345")
    (directory / "consolidated" / "model.bin").write_bytes(b"123")
    record = CheckpointRecord("1", measure_files(directory), {})
    write_record(directory, record)
    return record


def test_every_file_is_measured_but_the_record(tmp_path: Path) -> None:
    make_directory(tmp_path)
    assert measure_files(tmp_path) == {"consolidated/model.bin": 3, "model-1.bin": 5}


def test_names_beyond_unicode_are_measured_and_recorded(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.bin")).write_bytes(b"1")
    write_record(tmp_path, CheckpointRecord("1", measure_files(tmp_path), {}))
    record = read_record(tmp_path)
    assert record is not None
    assert record.files == {"\udcff.bin": 1}
    assert check_record(tmp_path, record) == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def turn_into_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", ["model-1.bin", "consolidated/model.bin"])
@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (Path.unlink, "missing_file", "not there"),
        (turn_into_directory, "missing_file", "not there"),
        (truncate, "short_file", "has"),
        (extend, "long_file", "has"),
    ],
)
def test_each_damaged_file_is_one_problem(
    tmp_path: Path, name: str, damage: Callable[[Path], None], kind: str, message: str
) -> None:
    record = make_directory(tmp_path)
    assert check_record(tmp_path, record) == []
    damage(tmp_path / name)
    (problem,) = check_record(tmp_path, record)
    assert (problem.kind, problem.where, problem.severity) == (kind, name, "error")
    assert message in problem.message
    assert f"recorded with {record.files[name]} bytes" in problem.message


def test_a_directory_that_is_gone_misses_every_file(tmp_path: Path) -> None:
    record = make_directory(tmp_path)
    problems = check_record(tmp_path / "absent", record)
    assert [problem.where for problem in problems] == ["consolidated/model.bin", "model-1.bin"]
