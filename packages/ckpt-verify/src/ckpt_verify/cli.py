"""The `ckpt-verify` command.

Exit codes of `compare`: 0 equal, 1 different, 2 not comparable (damaged, unreadable, nothing
there, or wrong usage), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ckpt_core.recovery import recover_source
from ckpt_core.terminal import EXIT_DONE, EXIT_FOUND, PrintVersion, run_command

from ckpt_verify.compare import compare_checkpoints
from ckpt_verify.report import build_comparison_json, render_comparison


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _build_parser().parse_args(arguments)
    return run_command("ckpt-verify", lambda: _compare(options), as_json=options.json)


def _compare(options: argparse.Namespace) -> int:
    for path in (options.a, options.b):
        recover_source(path)
    comparison = compare_checkpoints(options.a, options.b)
    print(json.dumps(build_comparison_json(comparison), indent=2) if options.json else render_comparison(comparison))
    return EXIT_DONE if comparison.is_equal else EXIT_FOUND


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ckpt-verify", description="Prove what a checkpoint holds.")
    parser.add_argument(
        "--version", action=PrintVersion, nargs=0, const="ckpt-verify", help="print the version and exit"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    compare = commands.add_parser(
        "compare",
        help="compare the tensors of two checkpoints bit for bit",
        description="Compare the tensors of two checkpoints of any layouts, bit for bit. "
        "Wrapper prefixes and nesting come off the names; objects, optimizer state and "
        "extra states of modules are not compared.",
        epilog="exit codes: 0 equal, 1 different, 2 not comparable, 130 interrupted",
    )
    compare.add_argument("a", metavar="A", type=Path, help="the expected checkpoint")
    compare.add_argument("b", metavar="B", type=Path, help="the checkpoint to check against it")
    compare.add_argument("--json", action="store_true", help="print every difference as JSON")
    return parser
