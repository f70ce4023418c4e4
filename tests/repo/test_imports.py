from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

SOURCES = Path(__file__).parents[2] / "packages"
TRAINING = ("nemo_automodel", "transformers", "peft", "hypothesis")
MANAGER = {"manager.py", "automodel_compat.py"}


def list_modules(package: str) -> list[Path]:
    modules = sorted((SOURCES / package).rglob("*.py"))
    assert modules
    return modules


def list_imports(path: Path) -> Iterator[str]:
    """Top-level package of every import in a file, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [("ckpt-core", {"ckpt_convert", "ckpt_verify"}), ("ckpt-convert", {"ckpt_verify"})],
)
def test_no_import_goes_against_the_arrows(package: str, forbidden: set[str]) -> None:
    wrong = [(path.name, sorted(hit)) for path in list_modules(package) if (hit := forbidden & {*list_imports(path)})]
    assert not wrong


def test_only_the_manager_imports_nemo_automodel() -> None:
    importers = {p.name for p in SOURCES.rglob("*.py") if "nemo_automodel" in list_imports(p)}
    assert importers <= MANAGER


@pytest.mark.parametrize("package", ["ckpt-core", "ckpt-convert", "ckpt-verify"])
def test_what_a_package_imports_it_requires(package: str) -> None:
    project = tomllib.loads((SOURCES / package / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project.get("optional-dependencies", {}).get("automodel", [])]
    required = {re.split(r"[\[=>]", line)[0].replace("-", "_") for line in lines}
    # The demo has an extra; huggingface_hub is what transformers loads with.
    modules = [path for path in list_modules(package) if path.parent.name != "demo"]
    imported = {name for path in modules for name in list_imports(path)} - {"huggingface_hub"}
    assert imported - sys.stdlib_module_names - {package.replace("-", "_")} <= required


def find_imported(program: str, *names: str, arguments: tuple[str, ...] = ()) -> list[str]:
    """Run `program` in a fresh interpreter; list those of `names` that it imported."""
    at_exit = f"import atexit, sys; atexit.register(lambda: print('imported', *({set(names)!r} & set(sys.modules))))"
    command = [sys.executable, "-c", f"{at_exit}\n{program}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  our own program
    assert done.returncode == 0, done.stderr
    first, *imported = done.stdout.splitlines()[-1].split()
    assert first == "imported"
    return imported


def test_find_imported_sees_an_import() -> None:
    assert find_imported("import json", "json", "torch") == ["json"]


@pytest.mark.parametrize(
    "program", ["import ckpt_core", "from ckpt_core import open_checkpoint", "import ckpt_convert"]
)
def test_reading_and_converting_leave_torch_and_the_training_stack_alone(program: str) -> None:
    assert find_imported(program, "torch", *TRAINING) == []


def test_the_converter_leaves_the_training_stack_alone() -> None:
    assert find_imported("from ckpt_convert import *", *TRAINING) == []


@pytest.mark.parametrize("module", ["ckpt_core.cli", "ckpt_convert.cli", "ckpt_verify.cli"])
def test_help_does_not_import_torch(module: str) -> None:
    assert find_imported(f"from {module} import main; main()", "torch", *TRAINING, arguments=("--help",)) == []


def test_inspecting_a_dcp_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    save({"weight": torch.arange(12.0).reshape(3, 4)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    program = "from ckpt_core.cli import main; main()"
    assert find_imported(program, "torch", "numpy", arguments=(str(tmp_path),)) == []
