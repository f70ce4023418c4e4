from __future__ import annotations

import os
from pathlib import Path

import pytest
from ckpt_core.checkpoint_files import iter_files


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
