"""What the three commands share: text that is safe to print, and one way to end.

`run_command` maps what a command returns or raises to an exit code and one message. Names in
a checkpoint are any text at all, so that whatever is printed for people goes through
`escape_controls` first.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence

from ckpt_core.errors import CheckpointError, Problem, VerificationError

EXIT_DONE, EXIT_FOUND, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
"""Done and nothing wrong; done and something is wrong; bad input or usage; interrupted."""
EXIT_CLOSED = 141
"""Whoever read the output stopped; what a shell reports of a program that SIGPIPE ended."""


def escape_controls(text: str) -> str:
    r"""Spell out every character that is not printable, so that a name cannot move a cursor.

    >>> escape_controls("a\x1b[2J")
    'a\\x1b[2J'
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def join_lines(lines: Iterable[str]) -> str:
    """Join lines for people, each of them free of control characters."""
    return "\n".join(map(escape_controls, lines))


def format_bytes(count: int) -> str:
    """Format a number of bytes for people, in powers of 1,000.

    >>> format_bytes(2_345_678)
    '2.35 MB'
    """
    if count < 1000:  # noqa: PLR2004  below one kilobyte
        return f"{count} B"
    value, unit = count / 1000, "kB"
    for larger in ("MB", "GB", "TB", "PB"):
        if value < 1000:  # noqa: PLR2004  the next unit begins here
            break
        value, unit = value / 1000, larger
    return f"{value:.2f} {unit}"


def list_some(items: Sequence[object], limit: int) -> list[str]:
    """Return the first `limit` items as text, and how many more there are.

    >>> ", ".join(list_some("abcd", 2))
    'a, b, ... and 2 more'
    """
    more = len(items) - limit
    return [*map(str, items[:limit]), *([f"... and {more:,} more"] if more > 0 else [])]


def render_error(error: CheckpointError | OSError) -> str:
    """Return the message of an error with its problems, each line free of control characters."""
    return join_lines(_describe(error).split("\n"))


def build_error_json(error: CheckpointError | OSError) -> dict[str, object]:
    """Return an error as JSON types: its class, its message, every problem."""
    message: str = _describe(error)
    problems: tuple[Problem, ...] = ()
    if isinstance(error, CheckpointError):
        message, problems = error.message, error.problems
    return {
        "error": type(error).__name__,
        "message": message,
        "problems": [problem.to_json() for problem in problems],
    }


def _describe(error: CheckpointError | OSError) -> str:
    if isinstance(error, CheckpointError) or error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


class PrintVersion(argparse.Action):
    """Print the version of the distribution that `const` names; looking it up takes as long as all of the help."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print and exit."""
        from importlib.metadata import version  # noqa: PLC0415  see above

        print(f"{parser.prog} {version(str(self.const))}")
        parser.exit()


def run_command(
    prog: str,
    work: Callable[[], int],
    *,
    as_json: bool = False,
    findings: tuple[type[CheckpointError], ...] = (VerificationError,),
    interrupted: str = "interrupted",
) -> int:
    """Run the work of a command; say in one message on stderr why it could not be done.

    Args:
        prog: Name of the command; its messages begin with it.
        work: Prints the result, returns the exit code.
        as_json: Whether an error is printed on stdout too, as JSON.
        findings: Errors that are what the command looks for, not what keeps it from looking.
        interrupted: What to say after an interrupt.

    Returns:
        What `work` returns; 1 after one of `findings`, 2 after any other error of a checkpoint
        or the operating system, 130 after an interrupt, 141 if the output has no reader.
    """
    _spell_out_what_cannot_be_printed()
    try:
        code = _report_errors(prog, work, as_json=as_json, findings=findings, interrupted=interrupted)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # Only printing fails here; what is still buffered would fail again when the process ends.
        drop_output()
        if isinstance(error, BrokenPipeError):
            return EXIT_CLOSED
        print(f"{prog}: {render_error(error)}", file=sys.stderr)
        return EXIT_USAGE
    return code


def _report_errors(
    prog: str,
    work: Callable[[], int],
    *,
    as_json: bool,
    findings: tuple[type[CheckpointError], ...],
    interrupted: str,
) -> int:
    try:
        return work()
    except KeyboardInterrupt:
        print(f"{prog}: {escape_controls(interrupted)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        raise
    except (CheckpointError, OSError) as error:
        if as_json:
            print(json.dumps(build_error_json(error), indent=2))
        print(f"{prog}: {render_error(error)}", file=sys.stderr)
        return EXIT_FOUND if isinstance(error, findings) else EXIT_USAGE


def _spell_out_what_cannot_be_printed() -> None:
    """Names are any Unicode, terminals and pipes are not; a message must never fail for that."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_output() -> None:
    """Send what is still buffered for stdout nowhere, after printing has failed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
