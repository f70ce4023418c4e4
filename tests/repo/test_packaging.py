from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("ckpt-core", "ckpt-convert", "ckpt-verify")
FLOOR = re.compile(r"[a-z-]+>=[0-9.]+$")


def read_project(package: str) -> dict[str, Any]:
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


def list_requirements(package: str) -> list[str]:
    project = read_project(package)
    extras = project.get("optional-dependencies", {}).values()
    return [*project["dependencies"], *(line for extra in extras for line in extra)]


def test_the_packages_have_one_version() -> None:
    assert len({read_project(package)["version"] for package in PACKAGES}) == 1


def test_the_changelog_names_the_version() -> None:
    assert f"\n## [{read_project('ckpt-core')['version']}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_pinned_to_the_same_version_and_others_have_floors(package: str) -> None:
    version = read_project(package)["version"]
    for requirement in list_requirements(package):
        if requirement.startswith("ckpt-"):
            assert requirement.endswith(f"=={version}")
        else:
            assert FLOOR.match(requirement), requirement


@pytest.mark.parametrize("package", PACKAGES)
def test_requirements_go_in_one_direction(package: str) -> None:
    siblings = [re.split(r"[\[=]", line)[0] for line in list_requirements(package) if line.startswith("ckpt-")]
    assert all(PACKAGES.index(sibling) < PACKAGES.index(package) for sibling in siblings)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_ship_their_types(package: str) -> None:
    assert (ROOT / "packages" / package / "src" / package.replace("-", "_") / "py.typed").is_file()


def test_training_stack_is_an_extra() -> None:
    plain = [line for package in PACKAGES for line in read_project(package)["dependencies"]]
    assert not [line for line in plain if line.startswith(("nemo", "transformers", "peft"))]
    assert set(read_project("ckpt-core")["optional-dependencies"]) == {"automodel"}
    assert read_project("ckpt-verify")["optional-dependencies"]["demo"][0].startswith("ckpt-core[automodel]")
