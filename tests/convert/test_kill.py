"""A conversion that is killed, or that meets another one, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ckpt_convert import convert
from ckpt_core.errors import TargetError
from testbed.sharded import save_dcp
from testbed.tensors import describe, make_tensor, read_safetensors

STATE = {f"layers.{i}.w": make_tensor(torch.float32, (64, 16), i) for i in range(6)}

SLOWED = """
import os, sys, time
from ckpt_convert import cli, execute, verify_output
from ckpt_core import staging

def stop_here():
    print("here", flush=True)
    time.sleep(600)

def hold(module, name, call=1, after=False):
    real, calls = getattr(module, name), [0]
    def held(*arguments, **options):
        calls[0] += 1
        if calls[0] == call and not after:
            stop_here()
        result = real(*arguments, **options)
        if calls[0] == call and after:
            stop_here()
        return result
    setattr(module, name, held)

exec(sys.argv[1])
sys.exit(cli.main(sys.argv[2:]))
"""

POINTS = {
    "before the first byte": "hold(execute, 'write_files')",
    "in the middle of the first file": "hold(os, 'copy_file_range', call=2)",
    "between two files": "hold(os, 'copy_file_range', call=7)",
    "after the last tensor": "hold(execute, 'write_files', after=True)",
    "while verifying": "hold(execute, 'verify_files')",
    "before the record": "hold(execute, 'write_record')",
    "after the record": "hold(execute, 'write_record', after=True)",
    "before publishing": "hold(staging.Stage, 'publish')",
}


def start_held(point: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOWED, point, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: S603  our own command
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


def list_loadable(folder: Path) -> list[str]:
    """List the directories that a loader would take for a model: hidden ones are nobody's model path."""
    return [path.name for path in folder.iterdir() if not path.name.startswith(".") and any(path.glob("*.safetensors"))]


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_leaves_nothing_that_a_loader_accepts_and_a_rerun_succeeds(tmp_path: Path, point: str) -> None:
    source = save_dcp(tmp_path / "dcp", STATE, ranks=2)
    process = start_held(POINTS[point], source, tmp_path / "out", "--max-shard-size", "9KB", "--threads", 1)
    process.kill()
    process.communicate()
    assert list_loadable(tmp_path) == []
    convert(source, tmp_path / "out")
    assert describe(read_safetensors(tmp_path / "out")) == describe(STATE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "out"]


@pytest.mark.parametrize("point", ["in the middle of the first file", "before publishing"])
def test_a_kill_while_replacing_leaves_the_earlier_result(tmp_path: Path, point: str) -> None:
    source = save_dcp(tmp_path / "dcp", STATE, ranks=2)
    earlier = {"w": make_tensor(torch.int8, (5,))}
    convert(save_dcp(tmp_path / "earlier", earlier), tmp_path / "out")
    process = start_held(POINTS[point], source, tmp_path / "out", "--overwrite")
    process.kill()
    process.communicate()
    assert describe(read_safetensors(tmp_path / "out")) == describe(earlier)


def test_an_interrupt_stops_a_running_copy_and_removes_what_it_wrote(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "dcp", STATE, ranks=2)
    process = start_held("hold(execute, 'verify_files')", source, tmp_path / "out")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "is complete or as it was before" in errors
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


def test_a_second_converter_on_the_same_target_is_refused(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "dcp", STATE, ranks=2)
    process = start_held("hold(execute, 'verify_files')", source, tmp_path / "out")
    try:
        with pytest.raises(TargetError, match=f"process {process.pid} "):
            convert(source, tmp_path / "out")
    finally:
        process.kill()
        process.communicate()
    assert not os.path.lexists(tmp_path / "out")
