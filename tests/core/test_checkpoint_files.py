from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from ckpt_core.adapter import read_adapter_config
from ckpt_core.checkpoint_files import DESCRIPTION_LIMIT, iter_files, read_range, read_whole
from ckpt_core.dcp_reader import DcpReader
from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError
from ckpt_core.record import read_record
from ckpt_core.safetensors_header import read_header, read_index

READERS: dict[str, Callable[[Path], object]] = {
    "ckpt_record.json": lambda path: read_record(path.parent),
    "adapter_config.json": lambda path: read_adapter_config(path.parent),
    ".metadata": lambda path: DcpReader(path.parent),
    "model.safetensors.index.json": read_index,
    "any.json": read_whole,
    "data": lambda path: read_range(path, 0, 1),
}


@pytest.mark.parametrize("name", READERS)
def test_a_fifo_is_refused_and_never_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CorruptCheckpointError, match="expected a regular file, found a FIFO"):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("target", "found"), [("/dev/zero", "a device"), (".", "a directory"), ("nowhere", "a link that leads nowhere")]
)
def test_what_is_no_file_is_named(tmp_path: Path, name: str, target: str, found: str) -> None:
    (tmp_path / name).symlink_to(target)
    error = CheckpointNotFoundError if (name, target) == ("data", "nowhere") else CorruptCheckpointError
    with pytest.raises(error, match=found if error is CorruptCheckpointError else "found none"):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("name", [name for name in READERS if name != "data"])
def test_a_description_of_absurd_size_is_refused_unread(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CorruptCheckpointError, match=r"expected at most [\d,]+ bytes, found 1,099,511,627,776"):
        READERS[name](tmp_path / name)


def test_a_description_may_have_as_many_bytes_as_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    assert read_whole(tmp_path / "a", 4) == b"1234"
    assert DESCRIPTION_LIMIT > 10**8


def test_a_safetensors_file_that_is_a_fifo_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointNotFoundError, match="expected a safetensors file, found a FIFO"):
        read_header(tmp_path / "model.safetensors")


def list_below(directory: Path) -> list[str]:
    return [path.relative_to(directory).as_posix() for path in iter_files(directory)]


def test_every_file_is_listed_and_no_directory(tmp_path: Path) -> None:
    for name in ("b", "a/2/y", "a/1/x", ".hidden/z"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    assert list_below(tmp_path) == ["b", ".hidden/z", "a/1/x", "a/2/y"]


def test_a_link_is_an_entry_and_what_lies_behind_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "to_directory").symlink_to(tmp_path / "outside")
    (tmp_path / "here" / "to_file").symlink_to(tmp_path / "outside" / "file")
    (tmp_path / "here" / "to_nothing").symlink_to(tmp_path / "absent")
    assert list_below(tmp_path / "here") == ["to_directory", "to_file", "to_nothing"]
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    assert list_below(tmp_path / "link") == ["file"]


def test_a_directory_that_cannot_be_listed_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def refuse(path: str) -> object:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="closed"):
        list_below(tmp_path)
