from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from ckpt_convert import __version__
from ckpt_convert.cli import main
from safetensors.torch import save_file
from testbed.sharded import save_dcp
from testbed.tensors import describe, make_tensor, read_safetensors

STATE = {"w": make_tensor(torch.float32, (4, 3)), "b": make_tensor(torch.float32, (3,), 1)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_dcp(tmp_path / "dcp", {**STATE, "step": 3}, ranks=2)


def run_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt_convert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  our own command


def test_a_conversion_says_where_and_what_and_that_it_is_proven(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(source), str(tmp_path / "out")]) == 0
    output = capsys.readouterr()
    assert f"{tmp_path / 'out'}: 2 tensors, 60 B, every tensor read back and equal to the source" in output.out
    assert "step" in output.out
    assert "warning: no config.json found" in output.out
    assert not output.err
    assert describe(read_safetensors(tmp_path / "out")) == describe(STATE)


def test_quiet_says_warnings_only_and_on_stderr(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-q", str(source), str(tmp_path / "out")]) == 0
    output = capsys.readouterr()
    assert not output.out
    assert "no config.json found" in output.err


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(source), str(tmp_path / "out"), "--dry-run", "--max-shard-size", "50B"]) == 0
    output = capsys.readouterr().out
    for text in ("model-00002-of-00002.safetensors", "index.json", "disk needed", "memory", "step", "(dcp)"):
        assert text in output
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


def test_json_is_all_that_stands_on_stdout(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(source), str(tmp_path / "out"), "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main([str(source), str(tmp_path / "out"), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert planned["tensors"] == done["tensors"] == 2
    assert planned["files"]["model.safetensors"] == done["files"]["model.safetensors"]
    assert done["verified"]
    assert done["digests"].keys() == STATE.keys()


def test_verbose_prints_the_plan_first(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-v", str(source), str(tmp_path / "out")]) == 0
    assert "disk needed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent", "out"], "absent"),
        (["x" * 5000, "out"], "File name too long"),
        (["dcp", "dcp"], "dcp: is the source itself; choose another target"),
        (["dcp", "dcp/hf"], "dcp/hf: lies inside the source dcp"),
        (["dcp", "full"], "full: expected a new or empty directory, found file"),
        (["dcp", "full", "--overwrite"], "found file, which ckpt_record.json does not list"),
        (["dcp", "out", "--max-shard-size", "big"], "size 'big': expected a positive number"),
        (["dcp", "out", "--threads", "0"], "threads 0: expected a number from 1 to 1,024"),
        (["dcp", "out", "--assets", "nowhere"], "nowhere: expected a directory with config.json"),
    ],
)
def test_a_mistake_gets_one_message_and_exit_code_2(
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(source.parent)
    Path("full").mkdir()
    Path("full/file").write_bytes(b"")
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert not output.out
    assert output.err.startswith("ckpt-convert: ")
    assert message in output.err
    assert sorted(path.name for path in Path().iterdir()) == ["dcp", "full"]


def test_a_missing_shard_is_refused_before_any_output(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "__1_0.distcp").unlink()
    assert main([str(source), str(tmp_path / "out")]) == 2
    assert "__1_0.distcp" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


def test_a_difference_is_exit_code_1(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_file_range = os.copy_file_range

    def flip(src: int, dst: int, count: int, *, offset_src: int, offset_dst: int) -> int:
        copied = copy_file_range(src, dst, count, offset_src=offset_src, offset_dst=offset_dst)
        os.pwrite(dst, bytes([os.pread(src, 1, offset_src)[0] ^ 128]), offset_dst)
        return copied

    monkeypatch.setattr(os, "copy_file_range", flip)
    assert main([str(source), str(tmp_path / "out")]) == 1
    assert "w: byte 0 of 48 differs from the source" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


def test_an_interrupt_is_exit_code_130_and_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "copy_file_range", interrupt)
    assert main([str(source), str(tmp_path / "out")]) == 130
    assert "is complete or as it was before" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


@pytest.mark.parametrize("options", [["-v"], ["-q"], ["--dry-run"]])
def test_names_of_files_cannot_act_on_a_terminal(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "code\x1b[2J.py").write_text("x = 1")
    (source / "stray\x1b[2J.distcp").write_bytes(b"left over")
    assert main([str(source), str(tmp_path / "out"), "--assets", str(tmp_path / "assets"), *options]) == 0
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err
    assert r"stray\x1b[2J.distcp" in output.out + output.err
    assert (r"code\x1b[2J.py" in output.out) is ("-q" not in options)


def test_json_has_the_doubts_about_the_source_as_problems(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "__7_0.distcp").write_bytes(b"left over")
    assert main([str(source), str(tmp_path / "out"), "--json"]) == 0
    stray, *missing = json.loads(capsys.readouterr().out)["warnings"]
    assert (stray["kind"], stray["severity"], stray["where"]) == ("stray_file", "warning", "__7_0.distcp")
    assert [(warning["severity"], warning["message"][:9]) for warning in missing] == [
        ("warning", "no config"),
        ("warning", "no tokeni"),
    ]


@pytest.mark.parametrize("arguments", [[], ["only-one"], ["a", "b", "--to", "zip"], ["a", "b", "-q", "-v"]])
def test_wrong_usage_is_exit_code_2_without_a_traceback(arguments: list[str]) -> None:
    result = run_command(*arguments)
    assert result.returncode == 2
    assert "usage: ckpt-convert" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_module_runs_as_the_command_does(source: Path, tmp_path: Path) -> None:
    result = run_command(source, tmp_path / "out")
    assert (result.returncode, result.stderr) == (0, "")
    assert describe(read_safetensors(tmp_path / "out")) == describe(STATE)


def test_help_names_every_flag_and_exit_code_and_version_the_version() -> None:
    text = run_command("--help").stdout
    flags = ["--to", "--max-shard-size", "--assets", "--overwrite", "--dry-run", "--no-verify", "--threads", "--json"]
    assert all(flag in text for flag in [*flags, "-q", "-v", "--version", "130"])
    assert run_command("--version").stdout == f"ckpt-convert {__version__}\n"


def test_a_terminal_sees_progress_and_a_pipe_does_not(source: Path, tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    command = [sys.executable, "-m", "ckpt_convert", str(source), str(tmp_path / "out")]
    subprocess.run(command, stderr=terminal, stdout=subprocess.DEVNULL, check=True)  # noqa: S603  our own command
    assert b"B/s" in os.read(master, 10_000)
    os.close(terminal)
    os.close(master)
    assert not run_command(source, tmp_path / "again").stderr


@pytest.mark.parametrize(("redirection", "said"), [(">/dev/full", "is published"), ("2>&-", "")])
def test_a_result_that_cannot_be_reported_is_still_a_result(tmp_path: Path, redirection: str, said: str) -> None:
    save_file({"a": torch.arange(6)}, tmp_path / "source.safetensors")
    command = f'"$0" -m ckpt_convert "$1/source.safetensors" "$1/out" {redirection}'
    ended = subprocess.run(  # noqa: S603
        ["/bin/sh", "-c", command, sys.executable, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, (tmp_path / "out" / "model.safetensors").exists()) == (0, True)
    assert said in ended.stderr


def test_a_quiet_run_still_names_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_dcp(tmp_path / "d", {"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2)}}, ranks=1)
    assert main([str(tmp_path / "d"), str(tmp_path / "out"), "--quiet"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "ema.w" in printed.err


def test_a_dry_run_refuses_what_the_run_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a": torch.arange(6)}, tmp_path / "source.safetensors")
    arguments = [str(tmp_path / "source.safetensors"), str(tmp_path / "out"), "--dry-run", "--threads", "0"]
    assert main(arguments) == 2
    assert "threads" in capsys.readouterr().err
