from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTED = re.compile(r"^[*-] (?P<name>\w+)(?:\(.*\))? -> (?P<says>.+)$", re.MULTILINE)
ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<says>.+) \|$", re.MULTILINE)
CALL = re.compile(r"nox (?:-R )?-s \"?(?P<names>[a-z]+(?: [a-z]+)*)")


@pytest.fixture(scope="module")
def sessions() -> dict[str, str]:
    """What `nox -l` says of each session, by name."""
    command = [sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), "-l"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603  our own noxfile
    return dict(LISTED.findall(listed))


def list_called(path: Path) -> set[str]:
    return {name for names in CALL.findall(path.read_text()) for name in names.split()}


def test_the_table_of_sessions_says_what_nox_says(sessions: dict[str, str]) -> None:
    assert dict(ROW.findall((ROOT / "README.md").read_text())) == sessions


@pytest.mark.parametrize("path", [".ci/run", ".github/workflows/ci.yml", "README.md", "CONTRIBUTING.md"])
def test_only_sessions_that_exist_are_called(path: str, sessions: dict[str, str]) -> None:
    called = list_called(ROOT / path)
    assert called
    assert called <= set(sessions)


def test_both_gates_run_every_gating_session() -> None:
    gating = {"tests", "distributed", "demo", "lint", "typecheck", "wheels"}
    assert list_called(ROOT / ".ci/run") | {"tests"} >= gating
    assert list_called(ROOT / ".github/workflows/ci.yml") >= gating
