from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from testbed.sharded import cut_columns, cut_rows, save_dcp, save_sharded_safetensors
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

SOURCES = Path(__file__).parents[2] / "packages"
TRAINING = ("nemo_automodel", "transformers", "peft", "hypothesis")
HEAVY = ("torch", "numpy", "safetensors", "tqdm", *TRAINING)
METADATA = ("zipfile", "email")  # what looking up the version of a distribution imports
STATE = {"w": torch.arange(12.0).reshape(3, 4), "s": torch.tensor(1.0)}
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


def find_imported(program: str, *names: str, arguments: tuple[str, ...] = ()) -> set[str]:
    """Run `program` in a fresh interpreter; return those of `names` that it imported."""
    at_exit = f"import atexit, sys; atexit.register(lambda: print('imported', *({set(names)!r} & set(sys.modules))))"
    command = [sys.executable, "-c", f"{at_exit}\n{program}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  our own program
    assert done.returncode == 0, done.stderr
    first, *imported = done.stdout.splitlines()[-1].split()
    assert first == "imported"
    return set(imported)


def test_find_imported_sees_an_import() -> None:
    assert find_imported("import json", "json", "torch") == {"json"}


@pytest.mark.parametrize("module", ["ckpt_core", "ckpt_core.cli", "ckpt_convert", "ckpt_convert.cli"])
def test_importing_what_reads_and_converts_imports_nothing_heavy(module: str) -> None:
    assert find_imported(f"import {module}", *HEAVY, *METADATA) == set()


@pytest.mark.parametrize("module", ["ckpt_core", "ckpt_convert", "ckpt_verify"])
def test_all_that_a_package_offers_leaves_the_training_stack_alone(module: str) -> None:
    manager = "AutomodelCheckpointManager"
    program = f"import {module} as m; [getattr(m, name) for name in m.__all__ if name != {manager!r}]"
    assert find_imported(program, *TRAINING) == set()


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("ckpt_core.cli", HEAVY + METADATA),
        ("ckpt_convert.cli", HEAVY + METADATA),
        ("ckpt_verify.cli", ("torch", *TRAINING)),
    ],
)
def test_help_needs_nothing_heavy(module: str, names: tuple[str, ...]) -> None:
    assert find_imported(f"from {module} import main; main()", *names, arguments=("--help",)) == set()


def test_help_answers_at_once() -> None:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "ckpt_convert", "--help"], capture_output=True, check=True)
        times.append(time.perf_counter() - start)
    # The goal is 0.15 s on an idle machine; an import of numpy or torch would take more than this.
    assert min(times) < 0.3


def test_inspecting_a_dcp_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    save(STATE, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    program = "from ckpt_core.cli import main; main()"
    assert find_imported(program, *HEAVY, arguments=(str(tmp_path),)) == set()


@pytest.mark.parametrize(
    ("saved", "needed"),
    [("rows", {"safetensors"}), ("columns", {"safetensors", "numpy"}), ("sharded", {"safetensors"})],
)
def test_a_conversion_needs_safetensors_and_numpy_only_for_columns(
    tmp_path: Path, saved: str, needed: set[str]
) -> None:
    if saved == "sharded":
        source = save_sharded_safetensors(tmp_path / "in", STATE, ranks=2)
    else:
        source = save_dcp(tmp_path / "in", STATE, ranks=2, cut=cut_rows(2) if saved == "rows" else cut_columns(2))
    program = f"import ckpt_convert; ckpt_convert.convert({str(source)!r}, {str(tmp_path / 'out')!r})"
    assert find_imported(program, *HEAVY) == needed
