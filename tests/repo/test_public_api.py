from __future__ import annotations

import ast
import importlib
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

MODULES = ("ckpt_core", "ckpt_convert", "ckpt_verify")


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def list_reexports(module: ModuleType) -> set[str]:
    """Public names that the package's `__init__` takes from its own modules."""
    assert module.__file__ is not None
    imports = [n for n in ast.walk(ast.parse(Path(module.__file__).read_text())) if isinstance(n, ast.ImportFrom)]
    own = [n for n in imports if (n.module or "").startswith(module.__name__)]
    return {alias.asname or alias.name for node in own for alias in node.names}


def test_all_is_sorted_and_without_duplicates(module: ModuleType) -> None:
    assert module.__all__ == sorted(set(module.__all__))


def test_all_names_every_reexport(module: ModuleType) -> None:
    assert {*module.__all__} - {"__version__"} == list_reexports(module)


def test_the_version_is_that_of_the_installed_package(module: ModuleType) -> None:
    assert module.__version__ == version(module.__name__.replace("_", "-"))


def test_every_name_in_all_can_be_imported(module: ModuleType) -> None:
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_another_name_is_an_attribute_error(module: ModuleType) -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = module.nonsense


def test_every_public_object_has_a_docstring(module: ModuleType) -> None:
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value):
            assert value.__doc__, name
