"""The README's examples, run in order in one empty directory, as a reader would.

A `text` block is what the example before it prints.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(python|sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"\bckpt_\w+(?:\.\w+)+")
NEWCOMER, *BLOCKS = BLOCK.findall(README)
PROGRAMS = {"python": [sys.executable, "-c"], "sh": ["bash", "-ec"]}


def run_examples(directory: Path) -> Iterator[tuple[str, str]]:
    """Run every example in order; yield what it prints and what the README says that it prints."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for (language, text), (following, output) in pairwise([*BLOCKS, ("end", "")]):
        if language not in PROGRAMS:
            continue
        done = subprocess.run(  # noqa: S603  our own README
            [*PROGRAMS[language], text],
            cwd=directory,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        yield done.stdout, output if following == "text" else done.stdout


def test_every_example_runs_where_the_ones_before_it_ran(tmp_path: Path) -> None:
    outputs = list(run_examples(tmp_path))
    assert len(outputs) > 5
    assert [printed for printed, _ in outputs] == [said for _, said in outputs]


def test_the_newcomer_needs_two_commands() -> None:
    commands = NEWCOMER[1].splitlines()
    assert [command.rpartition(" && ")[2] for command in commands] == [
        ".venv/bin/nox -s demo",
        ".venv/bin/nox -s tests",
    ]


def test_names_in_the_documents_exist() -> None:
    texts = [(ROOT / document).read_text() for document in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    names = {name for text in texts for name in NAME.findall(text) if not name.endswith(".py")}
    assert len(names) > 5
    assert all(resolve_name(name) for name in names)
