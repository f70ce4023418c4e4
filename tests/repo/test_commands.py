"""What holds for each of the three commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from testbed.sharded import save_dcp

EVIL = "evil\x1b[2J"
STATE = {"w": torch.arange(6.0).reshape(2, 3), f"_orig_mod.{EVIL}": torch.ones(2)}

Arguments = Callable[[Path, Path], list[str]]
COMMANDS: dict[str, tuple[str, Arguments]] = {
    "ckpt-inspect": ("ckpt_core.cli", lambda path, _: [str(path)]),
    "ckpt-convert": ("ckpt_convert.cli", lambda path, other: [str(path), str(other / "out")]),
    "ckpt-verify": ("ckpt_verify.cli", lambda path, _: ["compare", str(path), str(path)]),
}


def run_command(module: str, *arguments: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    program = f"import sys; from {module} import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603  our own


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_dcp(tmp_path / "dcp", STATE)


@pytest.fixture(params=COMMANDS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def call(name: str, source: Path, *options: str) -> int:
    module, arguments = COMMANDS[name]
    code: int = import_module(module).main([*arguments(source, source.parent), *options])
    return code


def test_a_replacement_that_was_cut_short_is_recovered_first(name: str, source: Path) -> None:
    source.rename(source.with_name(".dcp.old"))
    assert call(name, source) == 0
    assert source.is_dir()


@pytest.mark.parametrize("below", ["damage", "nothing"])
def test_an_error_as_json_is_all_that_stands_on_stdout(
    name: str, source: Path, below: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / ".metadata").write_bytes(b"cos\nsystem\n.")
    path, error = (source, "UnsafePickleError") if below == "damage" else (source / "absent", "CheckpointNotFoundError")
    assert call(name, path, "--json") in {1, 2}
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["error"], list(found)) == (error, ["error", "message", "problems"])
    assert printed.err.startswith(f"{name}: ")
    assert found["message"] in printed.err


def test_names_of_tensors_cannot_act_on_a_terminal(name: str, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(name, source, *(["-v"] if name == "ckpt-convert" else [])) == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err


def test_names_in_problems_cannot_act_on_a_terminal(
    name: str, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = source / ".metadata"
    # A file of another name is missing, and that name is as long.
    metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", b"__0_\x1b.distcp"))
    assert call(name, source) in {1, 2}
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert r"__0_\x1b.distcp" in printed.out + printed.err


def test_a_reader_that_went_away_is_no_error(name: str, source: Path) -> None:
    module, arguments = COMMANDS[name]
    reading, writing = os.pipe()
    os.close(reading)
    done = run_command(module, *arguments(source, source.parent), stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_disk_behind_stdout_is_one_message(name: str, source: Path) -> None:
    module, arguments = COMMANDS[name]
    with Path("/dev/full").open("w") as full:
        done = run_command(module, *arguments(source, source.parent), stdout=full.fileno())
    # What ckpt-convert is asked for is the directory, and that is there.
    assert done.returncode == (0 if name == "ckpt-convert" else 2)
    assert done.stderr.startswith(f"{name}: ")
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


def test_the_version_is_that_of_the_command(name: str) -> None:
    module, _ = COMMANDS[name]
    done = run_command(module, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{name} {version('ckpt-core')}\n", "")
