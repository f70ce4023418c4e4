"""What a process pays for: which modules stay away, measured in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import ckpt_convert
import pytest
import torch
from testbed.sharded import cut_columns, cut_rows, save_dcp, save_sharded_safetensors

HEAVY = ("torch", "numpy", "safetensors", "tqdm", "nemo_automodel", "transformers", "peft", "hypothesis")
STATE = {"w": torch.arange(12.0).reshape(3, 4), "s": torch.tensor(1.0)}


def list_heavy(code: str) -> set[str]:
    """Run `code` in a fresh process; return which of the heavy modules it loaded."""
    report = f"import json, sys; print(json.dumps(sorted({set(HEAVY)!r} & sys.modules.keys())))"
    command = [sys.executable, "-c", f"{code}\n{report}"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603  our own command
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import ckpt_convert",
        "import ckpt_convert.cli",
        "from ckpt_convert.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass",
    ],
)
def test_help_needs_nothing_heavy(code: str) -> None:
    assert list_heavy(code) == set()


def test_help_answers_at_once() -> None:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "ckpt_convert", "--help"], capture_output=True, check=True)
        times.append(time.perf_counter() - start)
    # The goal is 0.15 s on an idle machine; an import of numpy or torch would take more than this.
    assert min(times) < 0.3


def test_a_dcp_of_rows_is_converted_with_safetensors_alone(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "dcp", STATE, ranks=2, cut=cut_rows(2))
    assert list_heavy(f"import ckpt_convert; ckpt_convert.convert({str(source)!r}, {str(tmp_path / 'out')!r})") == {
        "safetensors"
    }


def test_columns_need_numpy_and_no_torch(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "dcp", STATE, ranks=2, cut=cut_columns(2))
    assert list_heavy(f"import ckpt_convert; ckpt_convert.convert({str(source)!r}, {str(tmp_path / 'out')!r})") == {
        "safetensors",
        "numpy",
    }


def test_sharded_safetensors_need_no_torch(tmp_path: Path) -> None:
    source = save_sharded_safetensors(tmp_path / "sharded", STATE, ranks=2)
    assert "torch" not in list_heavy(
        f"import ckpt_convert; ckpt_convert.convert({str(source)!r}, {str(tmp_path / 'out')!r})"
    )


def test_all_is_sorted_complete_and_importable() -> None:
    assert ckpt_convert.__all__ == sorted(ckpt_convert.__all__)
    assert all(callable(getattr(ckpt_convert, name)) for name in ckpt_convert.__all__)
    assert ckpt_convert.__version__ == "0.1.0"
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = ckpt_convert.absent
