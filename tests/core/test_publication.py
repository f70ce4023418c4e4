from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_core.publication import Recovery
from ckpt_core.staging import recover
from testbed.file_sets import NEW, OLD, list_names, publish_set, read_set, start_python, write_set

# For each line of its input it forks a process that runs one action and kills itself before the n-th operation that
# the interpreter reports. Every change to the file system lies between two reported ones, so every state between two
# changes is reached.
VICTIM = f"""
import os, signal, sys
from pathlib import Path
from ckpt_core import publication, staging

NEW = {NEW!r}

if sys.argv[1] == "renames":
    publication._exchange = lambda one, other: False


def arm(nth):
    left = nth

    def count(event, _arguments):
        nonlocal left
        if event.partition(".")[0] in {{"open", "os", "shutil", "ctypes"}}:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def publish(target):
    with staging.stage_directory(target, replace=True) as stage:
        for name, content in NEW.items():
            path = stage.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        stage.publish()


for line in sys.stdin:
    action, nth, target = line.rstrip("\\n").split(" ", 2)
    pid = os.fork()
    if pid == 0:
        arm(int(nth))
        publish(Path(target)) if action == "publish" else staging.recover(Path(target))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def run_victim(process: subprocess.Popen[str], action: str, nth: int, target: Path) -> bool:
    """Return whether the action came to its end before the n-th operation."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{action} {nth} {target}\n")
    process.stdin.flush()
    status = int(process.stdout.readline())
    assert status in {0, -signal.SIGKILL}
    return status == 0


def kill_at_every_step(tmp_path: Path, action: str, mode: str, start_from: Path | None) -> Iterator[Path]:
    """Yield the parent directory as each kill left it, the last one after an undisturbed run."""
    with start_python(VICTIM, mode) as process:
        for nth in range(1, 500):
            parent = tmp_path / f"{action}-{nth}"
            if start_from is None:
                parent.mkdir()
            else:
                shutil.copytree(start_from, parent)
            finished = run_victim(process, action, nth, parent / "model")
            yield parent
            if finished:
                return
    pytest.fail("the action did not end within 500 operations")


@pytest.fixture
def with_old_set(tmp_path: Path) -> Path:
    write_set(tmp_path / "start" / "model", OLD)
    return tmp_path / "start"


@pytest.mark.parametrize("mode", ["exchange", "renames"])
def test_a_kill_while_replacing_leaves_the_old_set_or_the_new_one(
    tmp_path: Path, with_old_set: Path, mode: str
) -> None:
    seen: list[tuple[bool, bool]] = []
    for parent in kill_at_every_step(tmp_path, "publish", mode, with_old_set):
        target = parent / "model"
        was_there = target.exists()
        outcome = recover(target)
        assert (outcome is Recovery.RESTORED) is not was_there
        assert read_set(target) in (OLD, NEW)
        seen.append((was_there, read_set(target) == NEW))
        # Reading removes nothing; the next save goes through and clears what is left.
        assert list_names(parent) <= {"model", ".model.partial", ".model.swap", ".model.old", ".model.lock"}
        publish_set(target, NEW, replace=True)
        assert read_set(target) == NEW
        assert list_names(parent) == {"model"}
    assert {is_new for _, is_new in seen} == {False, True}
    assert [is_new for _, is_new in seen] == sorted(is_new for _, is_new in seen)
    assert any(not was_there for was_there, _ in seen) == (mode == "renames")


def test_a_kill_while_publishing_leaves_nothing_or_the_new_set(tmp_path: Path) -> None:
    seen: list[bool] = []
    for parent in kill_at_every_step(tmp_path, "publish", "exchange", None):
        assert recover(parent / "model") in {Recovery.NOTHING, Recovery.LEFT}
        seen.append((parent / "model").exists())
        if seen[-1]:
            assert read_set(parent / "model") == NEW
    assert seen == sorted(seen)
    assert set(seen) == {False, True}


def test_a_kill_while_recovering_can_be_recovered(tmp_path: Path, with_old_set: Path) -> None:
    """Every state that a killed publication leaves for `recover`, with a kill at every step of `recover`."""
    interrupted = [
        parent
        for parent in kill_at_every_step(tmp_path, "publish", "renames", with_old_set)
        if list_names(parent) & {".model.old", ".model.swap"}
    ]
    # Absent with the old set beside; new with the old set beside; old with the new set aside, and the reverse.
    states = {(frozenset(list_names(p)), read_set(p / "model") == NEW): p for p in interrupted}
    assert len(states) == 4
    for number, parent in enumerate(states.values()):
        shutil.copytree(parent, tmp_path / f"state-{number}" / "start")
        expected = NEW if read_set(parent / "model") == NEW else OLD
        for after in kill_at_every_step(tmp_path / f"state-{number}", "recover", "renames", parent):
            recover(after / "model")
            assert read_set(after / "model") == expected
            publish_set(after / "model", NEW, replace=True)
            assert list_names(after) == {"model"}
    for parent in interrupted:
        # A removal that was cut short must not come back as half a set, whatever becomes of the target.
        shutil.rmtree(parent / "model", ignore_errors=True)
        if recover(parent / "model") is Recovery.RESTORED:
            assert read_set(parent / "model") == OLD
