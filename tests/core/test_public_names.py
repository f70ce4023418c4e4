from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import ckpt_core
import pytest


def test_exported_names_are_sorted_and_there() -> None:
    assert list(ckpt_core.__all__) == sorted(ckpt_core.__all__)
    assert all(hasattr(ckpt_core, name) for name in ckpt_core.__all__)


def test_the_version_is_that_of_the_distribution() -> None:
    assert ckpt_core.__version__ == version("ckpt-core")


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = ckpt_core.nonsense


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = (
        "torch",
        "numpy",
        "safetensors",
        "nemo_automodel",
        "transformers",
        "peft",
        "hypothesis",
        "zipfile",
        "email",
    )
    code = f"import sys, ckpt_core; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603  our own
    assert found.stdout.strip() == "[]"
