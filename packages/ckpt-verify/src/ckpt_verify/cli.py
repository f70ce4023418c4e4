"""The `ckpt-verify` command.

Exit codes of `compare`: 0 equal, 1 different, 2 not comparable (damaged, unreadable, nothing
there, or wrong usage).
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ckpt_core.errors import CheckpointError
from ckpt_core.staging import recover

from ckpt_verify import __version__
from ckpt_verify.compare import compare_checkpoints
from ckpt_verify.report import build_comparison_json, build_problems_json, render_comparison, render_error

_EQUAL, _DIFFERENT, _NOT_COMPARABLE, _INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name that the terminal's encoding lacks must not end the report.
            stream.reconfigure(errors="backslashreplace")
    options = _build_parser().parse_args(arguments)
    try:
        return _run_compare(options.a, options.b, as_json=options.json)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED


def _run_compare(a: Path, b: Path, *, as_json: bool) -> int:
    try:
        for path in (a, b):
            recover(path)
        comparison = compare_checkpoints(a, b)
    except CheckpointError as error:
        if as_json:
            print(json.dumps({"error": str(error), "problems": build_problems_json(error.problems)}, indent=2))
        print(f"ckpt-verify: {render_error(error)}", file=sys.stderr)
        return _NOT_COMPARABLE
    print(json.dumps(build_comparison_json(comparison), indent=2) if as_json else render_comparison(comparison))
    return _EQUAL if comparison.is_equal else _DIFFERENT


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ckpt-verify", description="Prove what a checkpoint holds.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    compare = commands.add_parser(
        "compare",
        help="compare the tensors of two checkpoints bit for bit",
        description="Compare the tensors of two checkpoints of any layouts, bit for bit. "
        "Wrapper prefixes and nesting come off the names; objects, optimizer state and "
        "extra states of modules are not compared.",
        epilog="exit codes: 0 equal, 1 different, 2 not comparable",
    )
    compare.add_argument("a", metavar="A", type=Path, help="the expected checkpoint")
    compare.add_argument("b", metavar="B", type=Path, help="the checkpoint to check against it")
    compare.add_argument("--json", action="store_true", help="print every difference as JSON")
    return parser
