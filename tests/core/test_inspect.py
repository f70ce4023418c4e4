from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ckpt_core.cli import main
from ckpt_core.inspect import DtypeUsage, inspect_checkpoint, render_text
from ckpt_core.layout import CheckpointLayout
from safetensors.torch import save_file
from testbed.sharded import save_dcp, save_sharded_safetensors

STATE = {
    "model": {"w": torch.ones(8, 4, dtype=torch.bfloat16), "v": torch.ones(3), "u": torch.tensor(1.0)},
    "optim": {"state": {"w": {"exp_avg": torch.ones(8, 4)}}},
    "step": 4,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_dcp(tmp_path / "dcp", STATE, ranks=2)


def test_a_checkpoint_in_numbers(path: Path) -> None:
    found = inspect_checkpoint(path.parent)
    assert (found.path, found.layout) == (str(path), CheckpointLayout.DCP)
    assert (found.tensors, found.parameters, found.nbytes) == (4, 32 + 3 + 1 + 32, 64 + 12 + 4 + 128)
    assert dict(found.dtypes) == {"F32": DtypeUsage(3, 144), "BF16": DtypeUsage(1, 64)}
    assert (found.chunks, found.files, found.objects) == (7, 2, ("step",))
    assert (found.nest, found.outside) == (("model",), 1)
    assert found.problems == ()


def test_text_is_aligned_and_says_everything(path: Path) -> None:
    text = render_text(inspect_checkpoint(path))
    lines = text.splitlines()
    column = lines[0].index(str(path))
    assert all(line[column - 1] == " " and line[column] != " " for line in lines[:-1])
    for part in ("dcp", "4, 68 elements, 208 B", "BF16", "7 in 2 files", "1: step", "model", "none found"):
        assert part in text


def test_json_carries_the_same(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"] == "dcp"
    assert found["dtypes"]["BF16"] == {"tensors": 1, "nbytes": 64}
    assert found["nest"] == ["model"]
    assert found["problems"] == []


def test_an_adapter_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"x.lora_A.weight": torch.ones(2, 4)}, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["x"], "base_model_name_or_path": "a/b"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in ("adapter", "LORA", "2, 4", "a/b"))
    assert main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["adapter"]["r"] == 2


def test_exit_code_1_means_problems(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path / "__1_0.distcp").unlink()
    assert main([str(path)]) == 1
    assert "error: missing_file: __1_0.distcp" in capsys.readouterr().out
    assert main([str(path), "--json"]) == 1
    problem = json.loads(capsys.readouterr().out)["problems"][0]
    assert (problem["kind"], problem["where"], problem["severity"]) == ("missing_file", "__1_0.distcp", "error")


def test_a_damaged_checkpoint_is_a_problem_without_traceback(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(data[:100])
    assert main([str(path)]) == 1
    assert str(path / ".metadata") in capsys.readouterr().err
    (path / ".metadata").write_bytes(b"cos\nsystem\n(X\x04\x00\x00\x00exittR.")
    assert main([str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"] == "UnsafePickleError"


def test_warnings_count_with_strict_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_sharded_safetensors(tmp_path / "s", {"w": torch.ones(4, 2)}, ranks=2)
    assert main([str(path)]) == 0
    assert "warning: unproven" in capsys.readouterr().out
    assert main([str(path), "--strict"]) == 1


@pytest.mark.parametrize("make", [lambda p: p / "nowhere", lambda p: p])
def test_exit_code_2_means_no_checkpoint(tmp_path: Path, make: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(make)
    assert main([str(make(tmp_path))]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ckpt-inspect: ")


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--unknown", "a"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: ckpt-inspect" in capsys.readouterr().err


def test_version_and_help_exit_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--version", "--help"):
        with pytest.raises(SystemExit) as caught:
            main([option])
        assert caught.value.code == 0
        assert capsys.readouterr().out.startswith(("ckpt-inspect ", "usage: ckpt-inspect"))


def test_many_problems_are_cut_short_in_text_but_not_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_index(tmp_path, {f"w{i}": f"{i}.safetensors" for i in range(30)})
    save_file({"w0": torch.ones(2)}, tmp_path / "0.safetensors")
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.count("missing_file") == 20
    assert "... and 9 more" in out
    assert main([str(tmp_path), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 29


def write_index(path: Path, weight_map: dict[str, str]) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_names_cannot_act_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[2J\x1b]0;owned\x07\r\n\u202e"
    path = save_dcp(tmp_path / "d", {"w": torch.ones(1), evil: [1]}, ranks=1)
    assert main([str(path)]) == 0
    assert "a\\x1b[2J" in capsys.readouterr().out
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes().replace(b"__0_0.distcp", b"__0_\x1b.distcp"))
    assert main([str(path)]) == 1
    assert "\x1b" not in capsys.readouterr().out


def run_python(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603  this interpreter, our own script
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, env=os.environ | env
    )


def test_names_outside_the_encoding_of_the_terminal_are_spelled_out(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "d", {"w": torch.ones(1), "é": [1]}, ranks=1)
    found = run_python("from ckpt_core.cli import main; main()", str(path), PYTHONIOENCODING="ascii")
    assert found.returncode == 0, found.stderr
    assert "\\xe9" in found.stdout
