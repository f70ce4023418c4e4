from __future__ import annotations

from pathlib import Path

import pytest
from ckpt_convert.target_check import check_target, check_tensors
from ckpt_core.errors import ConfigError, TargetError
from ckpt_core.layout import CheckpointLayout
from ckpt_core.record import CheckpointRecord, measure_files, write_record
from ckpt_core.spec import DTYPE_BITS, TensorSpec
from testbed.file_sets import give_up_root


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "run/weights/model").mkdir(parents=True)
    (tmp_path / "run/weights/model/.metadata").write_bytes(b"")
    return tmp_path / "run/weights/model"


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    target = tmp_path / "ours"
    (target / "code").mkdir(parents=True)
    (target / "model.safetensors").write_bytes(b"12")
    (target / "code/own.py").write_bytes(b"")
    write_record(target, CheckpointRecord("0", measure_files(target), {}, CheckpointLayout.DCP))
    return target


def test_an_absent_target_is_free_and_an_empty_one_is_replaced(source: Path, tmp_path: Path) -> None:
    assert not check_target(tmp_path / "out" / "deep", (source,), overwrite=False)
    (tmp_path / "empty").mkdir()
    assert check_target(tmp_path / "empty", (source,), overwrite=False)


@pytest.mark.parametrize("name", ["", ".", "../model", "../link"])
def test_the_source_itself_is_refused_under_every_name(source: Path, name: str) -> None:
    (source.parent / "link").symlink_to(source)
    with pytest.raises(TargetError, match="is the source itself; choose another target"):
        check_target(source / name, (source,), overwrite=True)


def test_a_target_inside_the_source_is_refused(source: Path) -> None:
    with pytest.raises(TargetError, match="lies inside the source"):
        check_target(source / "hf" / "out", (source,), overwrite=False)


def test_a_target_inside_what_was_named_as_the_source_is_refused(source: Path) -> None:
    named = source.parent.parent
    with pytest.raises(TargetError, match=f"lies inside the source {named}"):
        check_target(named / "hf", (named, source), overwrite=False)


def test_a_target_that_holds_the_source_is_refused(source: Path) -> None:
    with pytest.raises(TargetError, match="holds the source"):
        check_target(source.parent, (source,), overwrite=True)


def test_a_target_that_holds_the_single_file_to_convert_is_refused(ours: Path) -> None:
    with pytest.raises(TargetError, match="holds the source"):
        check_target(ours, (ours / "model.safetensors",), overwrite=True)


def test_a_file_is_no_target(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TargetError, match="file: expected a new or empty directory, found a file"):
        check_target(tmp_path / "file", (source,), overwrite=True)


def test_a_target_with_files_is_refused_and_they_are_named(source: Path, tmp_path: Path) -> None:
    for i in range(7):
        (tmp_path / "full" / f"d{i}").mkdir(parents=True)
        (tmp_path / "full" / f"d{i}" / "file").write_bytes(b"")
    with pytest.raises(TargetError, match=r"found d0/file, d1/file, .* and 2 more; .*--overwrite"):
        check_target(tmp_path / "full", (source,), overwrite=False)


def test_overwrite_replaces_what_a_record_lists(source: Path, ours: Path) -> None:
    assert check_target(ours, (source,), overwrite=True)
    with pytest.raises(TargetError, match="--overwrite a result of an earlier conversion"):
        check_target(ours, (source,), overwrite=False)


@pytest.mark.parametrize("name", ["notes.txt", "code/more.py", ".hidden"])
def test_overwrite_spares_a_directory_with_one_foreign_file(source: Path, ours: Path, name: str) -> None:
    (ours / name).write_bytes(b"")
    with pytest.raises(TargetError, match=f"found {name}, which ckpt_record.json does not list"):
        check_target(ours, (source,), overwrite=True)


def test_overwrite_spares_a_directory_with_a_foreign_link_to_a_directory(source: Path, ours: Path) -> None:
    (ours / "data").symlink_to(source)
    with pytest.raises(TargetError, match="found data, which"):
        check_target(ours, (source,), overwrite=True)


def test_overwrite_spares_a_directory_without_a_record(source: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/model.safetensors").write_bytes(b"")
    with pytest.raises(TargetError, match=r"found model\.safetensors, which"):
        check_target(tmp_path / "full", (source,), overwrite=True)


@pytest.mark.parametrize(("layout", "save_id"), [(None, "1f"), (None, None), (CheckpointLayout.DCP, "1f")])
def test_overwrite_spares_what_a_training_run_saved(
    source: Path, ours: Path, layout: CheckpointLayout | None, save_id: str | None
) -> None:
    (ours / "ckpt_record.json").unlink()
    write_record(ours, CheckpointRecord("0", measure_files(ours), {}, layout, save_id))
    with pytest.raises(TargetError, match="found a checkpoint that a training run saved"):
        check_target(ours, (source,), overwrite=True)


def test_overwrite_spares_what_cannot_be_listed(source: Path) -> None:
    with give_up_root() as directory:
        write_record(directory, CheckpointRecord("0", {}, {}, CheckpointLayout.DCP))
        (directory / "closed").mkdir(mode=0o300)
        with pytest.raises(TargetError, match=r"cannot be listed, .*Permission denied"):
            check_target(directory, (source,), overwrite=True)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_dtypes_that_safetensors_lacks_are_refused_by_name(dtype: str) -> None:
    specs = {"w": TensorSpec("w", dtype, (2,), ())}
    if dtype not in {"C32", "C128"}:
        check_tensors(specs)
        return
    with pytest.raises(ConfigError, match=f"w: dtype {dtype} is none that safetensors can hold") as caught:
        check_tensors(specs)
    assert [problem.where for problem in caught.value.problems] == ["w"]


@pytest.mark.parametrize("fqn", ["", " ", "a/../b", 'q"uote', "чек.вес", "new\nline", "nul\0", "..", "a" * 300])
def test_odd_names_are_accepted(fqn: str) -> None:
    check_tensors({fqn: TensorSpec(fqn, "F32", (), ())})


@pytest.mark.parametrize(("fqn", "reason"), [("__metadata__", "reserved"), ("lone \ud800", "no valid Unicode")])
def test_names_that_a_header_cannot_hold_are_refused(fqn: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        check_tensors({fqn: TensorSpec(fqn, "F32", (), ()), "good": TensorSpec("good", "F32", (), ())})
    assert len(caught.value.problems) == 1
