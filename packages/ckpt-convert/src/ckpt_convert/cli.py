"""The `ckpt-convert` command.

Exit codes: 0 done and verified (or, as asked, not verified), 1 the result differs from the
source and was not published, 2 bad input or usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpt_core.terminal import EXIT_DONE, PrintVersion, drop_output, escape_controls, run_command

if TYPE_CHECKING:
    from ckpt_convert.plan import ConversionPlan
    from ckpt_convert.report import ConversionReport


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command on `arguments` (those of the process by default); return its exit code."""
    options = _build_parser().parse_args(arguments)
    return run_command(
        "ckpt-convert",
        lambda: _run(options),
        as_json=options.json,
        interrupted=f"interrupted; {options.dst} is complete or as it was before",
    )


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ckpt-convert",
        description="Convert a distributed checkpoint into what Hugging Face loaders open, bit for bit, "
        "streaming from file to file. The result appears whole or not at all.",
        epilog="Exit codes: 0 done and verified, 1 verification failed, 2 bad input or usage, 130 interrupted.",
    )
    parser.add_argument("src", metavar="SRC", help="checkpoint to read, at any level of its directories")
    parser.add_argument("dst", metavar="DST", help="directory to write: absent or empty")
    parser.add_argument("--to", choices=["safetensors"], default="safetensors", help="layout to write")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="tensors in a file (default: 5GB)")
    parser.add_argument("--assets", metavar="DIR", help="where config and tokenizer are, if not beside the source")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier result at DST")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    parser.add_argument("--no-verify", action="store_true", help="do not read the result back and compare it")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads that copy (default: 2)")
    parser.add_argument("--json", action="store_true", help="print the plan or report as JSON")
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument("-q", "--quiet", action="store_true", help="say only what was doubtful, renamed or left out")
    loudness.add_argument("-v", "--verbose", action="store_true", help="print the plan first, and every name")
    parser.add_argument(
        "--version", action=PrintVersion, nargs=0, const="ckpt-convert", help="print the version and exit"
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    # Only now: help and usage errors answer at once.
    from ckpt_core.recovery import recover_source  # noqa: PLC0415

    from ckpt_convert.byte_sizes import parse_size  # noqa: PLC0415
    from ckpt_convert.execute import execute_plan, require_runnable  # noqa: PLC0415
    from ckpt_convert.plan import plan_conversion  # noqa: PLC0415

    recover_source(options.src)
    plan = plan_conversion(
        options.src,
        options.dst,
        to=options.to,
        max_shard_size=parse_size(options.max_shard_size),
        assets=options.assets,
        overwrite=options.overwrite,
    )
    if options.dry_run:
        require_runnable(plan, threads=options.threads)
        _print_result(plan, plan, options)
        return EXIT_DONE
    if options.verbose and not options.json:
        print(plan)
    verify = not options.no_verify
    with _show_progress(plan.nbytes * (1 + verify), quiet=options.quiet) as progress:
        report = execute_plan(plan, verify=verify, threads=options.threads, progress=progress)
    try:
        _print_result(report, plan, options)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # The job is done all the same, and a script must learn that from the exit code.
        drop_output()
        text = f"ckpt-convert: {plan.target} is published, but the report cannot be printed ({error.strerror})"
        print(escape_controls(text), file=sys.stderr)
    return EXIT_DONE


def _print_result(result: ConversionPlan | ConversionReport, plan: ConversionPlan, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(result.to_json(), indent=2))
    elif options.quiet:
        for text in [*plan.warnings, *plan.names.describe()]:
            print(f"ckpt-convert: warning: {escape_controls(text)}", file=sys.stderr)
    else:
        print(result)
        if options.verbose:
            print(*plan.names.list_all(), sep="\n")


@contextmanager
def _show_progress(total: int, *, quiet: bool) -> Iterator[Callable[[int], object]]:
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield bool
        return
    from tqdm import tqdm  # noqa: PLC0415

    with tqdm(total=total, unit="B", unit_scale=True, dynamic_ncols=True, leave=False) as bar:
        yield bar.update
