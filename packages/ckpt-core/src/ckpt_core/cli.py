"""The `ckpt-inspect` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from ckpt_core.errors import CorruptCheckpointError, UnsafePickleError
from ckpt_core.inspect import inspect_checkpoint, render_json, render_text
from ckpt_core.recovery import recover_source
from ckpt_core.terminal import EXIT_DONE, EXIT_FOUND, PrintVersion, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what a checkpoint is.

    Returns:
        0 if it can be read, 1 if something is wrong with it, 2 if it is no checkpoint or the
        command line is wrong. Warnings alone leave it at 0 unless `--strict` is given.
    """
    options = _build_parser().parse_args(arguments)
    # A checkpoint too damaged to be opened is a finding as well.
    damage = (CorruptCheckpointError, UnsafePickleError)
    return run_command("ckpt-inspect", lambda: _inspect(options), as_json=options.json, findings=damage)


def _inspect(options: argparse.Namespace) -> int:
    recover_source(options.path)
    inspection = inspect_checkpoint(options.path)
    print(json.dumps(render_json(inspection), indent=2) if options.json else render_text(inspection))
    severities = {problem.severity for problem in inspection.problems}
    return EXIT_FOUND if "error" in severities or (options.strict and severities) else EXIT_DONE


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ckpt-inspect",
        description="Say what a checkpoint is, from its metadata alone: layout, tensors, dtypes, files, problems.",
        epilog="Exit codes: 0 readable, 1 problems found, 2 not a checkpoint or wrong usage, 130 interrupted.",
    )
    parser.add_argument("path", metavar="PATH", help="a checkpoint, any directory above one, or one of its files")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--strict", action="store_true", help="count warnings as problems")
    parser.add_argument("--version", action=PrintVersion, nargs=0, const="ckpt-core", help="print the version and exit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
