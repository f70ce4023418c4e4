"""What can be run on a clean clone: `nox -l` lists it, `nox -s NAME -- ARGS` passes ARGS on.

`tests`, `distributed`, `demo` and `bench` share one environment of about 3 GB, which the
session `training` builds; the others install only what they need.
"""

from __future__ import annotations

import os
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.error_on_external_run = True

PINNED = ("-c", "constraints.txt")
PACKAGES = ("packages/ckpt-core", "packages/ckpt-convert", "packages/ckpt-verify")
# An extra cannot stand in a constraints file, but it can stand on the line of an editable install.
EDITABLE = ("-e", "packages/ckpt-core[automodel]", "-e", "packages/ckpt-convert", "-e", "packages/ckpt-verify")
SCRIPTS = ("ckpt-inspect", "ckpt-convert", "ckpt-verify")


@nox.session(default=False, reuse_venv=True)
def training(session: nox.Session) -> None:
    """Build the environment that demo, tests, distributed and bench share."""
    session.install(*PINNED, *EDITABLE, "hypothesis", "nox", "peft", "pytest")


def run_in_training(session: nox.Session, *command: str) -> None:
    """Run `python COMMAND` in the environment of the session `training`."""
    scripts = session.env_dir.resolve().parent / "training" / "bin"
    path = os.pathsep.join([str(scripts), os.environ["PATH"]])
    # Benchmarks make their checkpoints as the tests do.
    env = {"PATH": path, "PYTHONPATH": str(Path("tests/lib").resolve()), "OMP_NUM_THREADS": "1"}
    session.run(str(scripts / "python"), *command, env=env)


@nox.session(venv_backend="none", requires=["training"])
def demo(session: nox.Session) -> None:
    """Train, save, convert, compare and open a tiny model: the main job."""
    run_in_training(session, "-m", "ckpt_verify.demo", *session.posargs)


@nox.session(venv_backend="none", requires=["training"])
def tests(session: nox.Session) -> None:
    """Run the tests that need one process."""
    run_in_training(session, "-m", "pytest", "-m", "not distributed", *session.posargs)


@nox.session(venv_backend="none", requires=["training"])
def distributed(session: nox.Session) -> None:
    """Run the tests that start real gloo processes."""
    run_in_training(session, "-m", "pytest", "-m", "distributed", *session.posargs)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Check the code with ruff: every rule but those with a reason, and the format."""
    session.install(*PINNED, "ruff")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")


@nox.session(reuse_venv=True)
def typecheck(session: nox.Session) -> None:
    """Check the types of packages, tests and this file with mypy in strict mode."""
    session.install(*PINNED, "mypy", "hypothesis", "nox", "numpy", "pytest", "safetensors", "torch", "types-tqdm")
    session.run("mypy", *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build the three wheels, install them without the tree, import them, run each script."""
    outside = session.create_tmp()
    session.run("pip", "wheel", "-q", "--no-deps", "-w", outside, *PACKAGES)
    session.install(*PINNED, *map(str, Path(outside).glob("*.whl")))
    session.chdir(outside)
    session.run("python", "-c", "import ckpt_core, ckpt_convert, ckpt_verify as v; print(v.__file__, v.__version__)")
    for script in SCRIPTS:
        session.run(script, "--version")
        session.run(script, "--help", silent=True)


@nox.session(default=False, reuse_venv=True)
@nox.parametrize("automodel", ["0.5.0", "0.6.0", "0.7.0"])
def compat(session: nox.Session, automodel: str) -> None:
    """Run the manager's saves and loads through one nemo-automodel release."""
    pinned = ("-c", "tests/compat/constraints.txt")
    session.install(*pinned, *EDITABLE, f"nemo-automodel=={automodel}", "hypothesis", "peft", "pytest")
    session.run("pytest", "-m", "compat", *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["training"])
def bench(session: nox.Session) -> None:
    """Measure time and memory beside `cp -r` and torch's own tools."""
    for script in sorted(Path("benchmarks").glob("bench_*.py")):
        run_in_training(session, "-m", f"benchmarks.{script.stem}", *session.posargs)
