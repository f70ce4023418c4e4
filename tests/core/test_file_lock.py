from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
from ckpt_core.errors import LockHeldError
from ckpt_core.file_lock import FileLock
from ckpt_core.publication import Recovery
from ckpt_core.staging import open_stage, recover
from testbed.file_sets import NEW, OLD, list_names, publish_set, read_set, start_python, write_set


def test_a_second_writer_is_told_who_writes(tmp_path: Path) -> None:
    stage = open_stage(tmp_path / "model")
    write_set(stage.path, NEW)
    with pytest.raises(LockHeldError, match=rf"process {os.getpid()} on .* is writing here; wait for it or stop it"):
        open_stage(tmp_path / "model")
    assert read_set(stage.path) == NEW
    stage.discard()
    open_stage(tmp_path / "model").discard()


def test_a_link_and_its_directory_share_one_lock(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model")
    stage = open_stage(tmp_path / "model", replace=True)
    with pytest.raises(LockHeldError):
        open_stage(tmp_path / "link", replace=True)
    stage.discard()


@pytest.fixture
def _no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("_no_flock")
def test_without_flock_the_file_is_the_lock(tmp_path: Path) -> None:
    stage = open_stage(tmp_path / "model")
    with pytest.raises(LockHeldError, match="no locks, so make sure that it is gone and delete the file"):
        open_stage(tmp_path / "model")
    stage.publish()
    publish_set(tmp_path / "model", NEW, replace=True)
    assert list_names(tmp_path) == {"model"}


@pytest.mark.usefixtures("_no_flock")
def test_without_flock_a_leftover_is_recovered_once_its_lock_file_is_deleted(tmp_path: Path) -> None:
    write_set(tmp_path / ".model.old", OLD)
    (tmp_path / ".model.lock").write_text("process 1 on nowhere\n")
    assert recover(tmp_path / "model") is Recovery.LEFT
    (tmp_path / ".model.lock").unlink()
    assert recover(tmp_path / "model") is Recovery.RESTORED
    assert read_set(tmp_path / "model") == OLD


def test_a_lock_file_that_its_last_holder_removes_meanwhile_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".model.lock"
    path.touch()
    real = fcntl.flock
    removals = iter([True])

    def flock(descriptor: int, operation: int) -> None:
        if next(removals, False):
            path.unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = FileLock.acquire(path)
    assert path.exists()
    with pytest.raises(LockHeldError):
        FileLock.acquire(path)
    lock.release()
    assert not path.exists()


RACER = """
import os, sys
from pathlib import Path
from ckpt_core.errors import LockHeldError
from ckpt_core.staging import stage_directory

directory, name, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
won = 0
while won < rounds:
    try:
        with stage_directory(directory / "model", replace=True) as stage:
            inside = os.open(directory / "inside", os.O_CREAT | os.O_EXCL)
            for part in range(3):
                (stage.path / f"{part}").write_text(f"{name} {won}")
            os.close(inside)
            os.unlink(directory / "inside")
            stage.publish()
    except LockHeldError:
        continue
    won += 1
"""


def test_racing_writers_are_inside_one_at_a_time(tmp_path: Path) -> None:
    """Each marks that it is inside with a file that must not be there yet."""
    racers = [start_python(RACER, tmp_path, name, 25) for name in ("one", "two", "three")]
    for racer in racers:
        _, errors = racer.communicate(timeout=120)
        assert (racer.returncode, errors) == (0, "")
    assert len(set(read_set(tmp_path / "model").values())) == 1
    assert list_names(tmp_path) == {"model"}


HOLDER = """
import sys, time
from pathlib import Path
from ckpt_core.staging import open_stage

stage = open_stage(Path(sys.argv[1]))
(stage.path / "half").write_text("half")
print("staged", flush=True)
time.sleep(600)
"""


def test_the_stage_of_a_killed_writer_is_a_leftover(tmp_path: Path) -> None:
    holder = start_python(HOLDER, tmp_path / "model")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "staged\n"
    with pytest.raises(LockHeldError, match=f"process {holder.pid} on"):
        open_stage(tmp_path / "model")
    holder.kill()
    holder.communicate()
    assert read_set(tmp_path / ".model.partial") == {"half": b"half"}
    publish_set(tmp_path / "model", NEW)
    assert read_set(tmp_path / "model") == NEW
    assert list_names(tmp_path) == {"model"}
