"""The `ckpt-inspect` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TextIO

from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, LayoutError
from ckpt_core.inspect import escape_controls, inspect_checkpoint, render_json, render_text

_READABLE, _PROBLEMS, _NO_CHECKPOINT = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what a checkpoint is.

    Returns:
        0 if it can be read, 1 if something is wrong with it, 2 if it is no checkpoint or the
        command line is wrong. Warnings alone leave it at 0 unless `--strict` is given.
    """
    options = _build_parser().parse_args(arguments)
    try:
        inspection = inspect_checkpoint(options.path)
    except CheckpointError as err:
        return _report_error(err, as_json=options.json)
    if options.json:
        print(json.dumps(render_json(inspection), indent=2))
    else:
        _print_text(render_text(inspection))
    severities = {problem.severity for problem in inspection.problems}
    return _PROBLEMS if "error" in severities or (options.strict and severities) else _READABLE


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ckpt-inspect",
        description="Say what a checkpoint is, from its metadata alone: layout, tensors, dtypes, files, problems.",
        epilog="Exit codes: 0 readable, 1 problems found, 2 not a checkpoint or wrong usage.",
    )
    parser.add_argument("path", metavar="PATH", help="a checkpoint, any directory above one, or one of its files")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--strict", action="store_true", help="count warnings as problems")
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version and exit")
    return parser


class _PrintVersion(argparse.Action):
    """Look the version up only when it is asked for; that takes longer than an inspection."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002  the signature is argparse's
        values: object,  # noqa: ARG002  as above
        option_string: str | None = None,  # noqa: ARG002  as above
    ) -> None:
        from importlib.metadata import version  # noqa: PLC0415  see above

        print(f"{parser.prog} {version('ckpt-core')}")
        parser.exit()


def _report_error(err: CheckpointError, *, as_json: bool) -> int:
    """Print one error; a damaged checkpoint is a problem, something else is no checkpoint."""
    code = _NO_CHECKPOINT if isinstance(err, LayoutError | CheckpointNotFoundError) else _PROBLEMS
    if as_json:
        print(json.dumps({"error": type(err).__name__, "message": str(err)}, indent=2))
    else:
        message = "\n".join(escape_controls(line) for line in str(err).splitlines())
        _print_text(f"ckpt-inspect: {message}", sys.stderr)
    return code


def _print_text(text: str, file: TextIO | None = None) -> None:
    """Print text, with what the stream's encoding lacks spelled out."""
    file = file or sys.stdout
    encoding = file.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=file)


if __name__ == "__main__":
    sys.exit(main())
