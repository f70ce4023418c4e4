from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ckpt_verify import __version__
from ckpt_verify.cli import main
from testbed.sharded import save_dcp

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.arange(10, 14)}

VALUE_MESSAGE = "1 of 6 elements differ, the first at (1, 2): A has 5.0 (0x40a00000), B has 9.0 (0x41100000)"


@pytest.fixture
def a(tmp_path: Path) -> str:
    return str(save_dcp(tmp_path / "a", STATE))


@pytest.fixture
def b(tmp_path: Path) -> str:
    return str(save_dcp(tmp_path / "b", STATE, ranks=3))


@pytest.fixture
def other(tmp_path: Path) -> str:
    changed = STATE["a.weight"].clone()
    changed[1, 2] = 9.0
    return str(save_dcp(tmp_path / "other", {"a.weight": changed, "c.weight": STATE["b.weight"]}))


def test_equal_checkpoints_exit_0(a: str, b: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", a, b]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"A  dcp                        2 tensors   {a}",
        f"B  dcp                        2 tensors   {b}",
        "equal, bit for bit (tensors: 2, bytes: 56)",
    ]


def test_different_checkpoints_exit_1_and_list_why(a: str, other: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", a, other]) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "different: 1 missing_tensor, 1 unexpected_tensor, 1 value (compared tensors: 1, bytes: 24)",
        f"  value              a.weight: {VALUE_MESSAGE}",
        "  missing_tensor     b.weight: I64 of shape (4,) is in A only",
        "  unexpected_tensor  c.weight: I64 of shape (4,) is in B only",
    ]


def test_json_holds_every_difference(a: str, other: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", a, other, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["equal"] is False
    assert report["counts"] == {"missing_tensor": 1, "unexpected_tensor": 1, "value": 1}
    assert report["compared"] == {"tensors": 1, "bytes": 24}
    assert (report["a"]["path"], report["a"]["layout"], report["a"]["tensors"]) == (a, "dcp", 2)
    value = next(d for d in report["differences"] if d["kind"] == "value")
    assert (value["where"], value["index"], value["count"]) == ("a.weight", [1, 2], 1)
    assert {d["severity"] for d in report["differences"]} == {"error"}


def test_json_of_equal_checkpoints(a: str, b: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--json", a, b]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["equal"], report["differences"], report["counts"]) == (True, [], {})


def test_only_the_first_20_differences_are_printed(tmp_path: Path, a: str, capsys: pytest.CaptureFixture[str]) -> None:
    many = save_dcp(tmp_path / "many", {**STATE, **{f"x{n:02d}": torch.tensor(n) for n in range(25)}})
    assert main(["compare", a, str(many)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("different: 25 unexpected_tensor ")
    assert len(lines) == 3 + 20 + 1
    assert lines[-1] == "  ... and 5 more"
    assert main(["compare", a, str(many), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["differences"]) == 25


def test_a_damaged_checkpoint_exits_2_with_its_problems(a: str, b: str, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(b) / "__0_0.distcp").unlink()
    assert main(["compare", a, b]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"ckpt-verify: {b}: is damaged or ambiguous, so nothing was compared")
    assert "__0_0.distcp" in printed.err
    assert main(["compare", a, b, "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert [p["kind"] for p in report["problems"]] == ["missing_file"]


def test_a_path_without_anything_exits_2(a: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", a, str(tmp_path / "absent")]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["compare"], ["compare", "x"], ["compare", "x", "y", "z"], ["measure"]])
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: ckpt-verify" in capsys.readouterr().err


def test_names_cannot_drive_the_terminal(tmp_path: Path, a: str, capsys: pytest.CaptureFixture[str]) -> None:
    nasty = save_dcp(tmp_path / "nasty", {**STATE, "evil\x1b[2J\nname": torch.ones(1), "größe": torch.ones(1)})
    assert main(["compare", a, str(nasty)]) == 1
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert r"evil\x1b[2J\nname: F32" in printed
    assert "größe: F32" in printed


def run_module(*arguments: str, encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "utf8=0", "-m", "ckpt_verify", *arguments]
    return subprocess.run(  # noqa: S603  our own interpreter and module
        command, check=False, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": encoding}
    )


def test_the_module_is_the_command(a: str, b: str) -> None:
    result = run_module("compare", a, b)
    assert (result.returncode, result.stderr) == (0, "")
    assert "equal, bit for bit" in result.stdout


def test_a_terminal_of_another_encoding_gets_the_whole_report(tmp_path: Path, a: str) -> None:
    other = save_dcp(tmp_path / "other", {**STATE, "größe": torch.ones(1)})
    result = run_module("compare", a, str(other), encoding="ascii")
    assert (result.returncode, result.stderr) == (1, "")
    assert r"gr\xf6\xdfe: F32" in result.stdout


def test_the_version_is_printed() -> None:
    assert run_module("--version").stdout == f"ckpt-verify {__version__}\n"
