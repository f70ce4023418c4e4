from __future__ import annotations

from pathlib import Path

import pytest
from ckpt_core.errors import TargetError
from ckpt_core.recovery import recover_source


def set_aside(directory: Path, content: str) -> None:
    """Leave what a replacement of `directory` leaves that is killed between two renames."""
    old = directory.with_name(f".{directory.name}.old")
    old.mkdir(parents=True)
    (old / "held").write_text(content)
    directory.with_name(f".{directory.name}.lock").touch()


def test_a_checkpoint_that_was_set_aside_is_put_back(tmp_path: Path) -> None:
    set_aside(tmp_path / "step", "old")
    recover_source(tmp_path / "step")
    assert (tmp_path / "step" / "held").read_text() == "old"
    assert not (tmp_path / ".step.old").exists()


@pytest.mark.parametrize("below", ["held", "absent/deeper"])
def test_so_is_the_directory_that_the_path_lies_in(tmp_path: Path, below: str) -> None:
    set_aside(tmp_path / "step", "old")
    recover_source(tmp_path / "step" / below)
    assert (tmp_path / "step" / "held").read_text() == "old"


def test_a_path_from_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_aside(tmp_path / "step", "old")
    monkeypatch.chdir(tmp_path)
    recover_source("step")
    assert Path("step/held").read_text() == "old"


def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run" / "step").mkdir(parents=True)
    (tmp_path / ".run.old").mkdir()
    recover_source(tmp_path / "run" / "step")
    recover_source(tmp_path / "nowhere")
    recover_source("/")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".run.old", "run"]


def test_what_cannot_be_put_back_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(target))

    set_aside(tmp_path / "step", "old")
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(TargetError, match=r"previous checkpoint is at .*\.step\.old.* rename it yourself"):
        recover_source(tmp_path / "step")
