"""The README's examples, run in order in one empty directory, as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"`(?P<module>ckpt_\w+)\.(?P<name>\w+)")


@dataclass(frozen=True, slots=True)
class Example:
    language: str
    text: str


EXAMPLES = [Example(*groups) for groups in BLOCK.findall(README)]
NEWCOMER, *USE = EXAMPLES


def run_example(example: Example, directory: Path) -> str:
    program = (
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c"]
        if example.language == "python"
        else ["bash", "-ec"]
    )
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(  # noqa: S603  our own README
        [*program, example.text],
        cwd=directory,
        env={**os.environ, "PATH": scripts},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{example.text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_example_runs_where_the_ones_before_it_ran(tmp_path: Path) -> None:
    outputs = [run_example(example, tmp_path) for example in USE]
    assert {example.language for example in USE} == {"python", "sh"}
    assert all(outputs)


def test_the_newcomer_needs_two_commands() -> None:
    commands = [line for line in NEWCOMER.text.splitlines() if line]
    assert [command.rpartition(" && ")[2].strip() for command in commands] == [
        ".venv/bin/nox -s demo",
        ".venv/bin/nox -s tests",
    ]
