from __future__ import annotations

import errno
import json

import pytest
from ckpt_core.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    Problem,
    SpaceError,
    VerificationError,
)
from ckpt_core.terminal import escape_controls, format_bytes, join_lines, list_some, render_error, run_command
from hypothesis import given
from hypothesis import strategies as st

HOLE = Problem("hole", "w\r", "x")


@given(text=st.text())
def test_escaped_text_is_printable_and_keeps_what_was(text: str) -> None:
    escaped = escape_controls(text)
    assert escaped.isprintable()
    assert "".join(c for c in text if c.isprintable()) == text or escaped != text
    assert escape_controls(escaped) == escaped


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (2_345_678, "2.35 MB"),
        (5 * 10**9, "5.00 GB"),
        (10**18, "1000.00 PB"),
    ],
)
def test_bytes_are_formatted_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("limit", "shown"),
    [(0, ["... and 3 more"]), (2, ["a", "b", "... and 1 more"]), (3, ["a", "b", "c"]), (4, ["a", "b", "c"])],
)
def test_a_list_is_cut_with_the_number_of_those_left_out(limit: int, shown: list[str]) -> None:
    assert list_some(["a", "b", "c"], limit) == shown


def test_a_large_number_of_those_left_out_has_separators() -> None:
    assert list_some(range(1234), 0) == ["... and 1,234 more"]


def test_a_line_break_in_a_line_does_not_break_it() -> None:
    assert join_lines(["a\nb", "c"]) == "a\\nb\nc"


def test_an_error_keeps_its_lines_and_loses_its_control_characters() -> None:
    error = CorruptCheckpointError("a\x1b[2Jb", problems=[HOLE])
    assert render_error(error) == "a\\x1b[2Jb\n  hole (1):\n    - w\\r: x"


def run(error: BaseException, *, as_json: bool = False) -> int:
    def work() -> int:
        raise error

    return run_command("ckpt-x", work, as_json=as_json, interrupted="interrupted\x1b")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("odd"), 2, "odd"),
        (SpaceError("full"), 2, "full"),
        (VerificationError("differs"), 1, "differs"),
        (OSError(errno.EACCES, "denied", "/x\x1b"), 2, "/x\\x1b: denied"),
        (OSError(errno.EIO, "broken"), 2, "broken"),
        (OSError("only a text"), 2, "only a text"),
        (KeyboardInterrupt(), 130, "interrupted\\x1b"),
    ],
)
def test_what_ends_a_command_is_one_message_and_a_code(
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(error) == code
    assert capsys.readouterr() == ("", f"ckpt-x: {text}\n")


@pytest.mark.parametrize("code", [0, 1])
def test_the_code_of_the_work_is_that_of_the_command(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("ckpt-x", lambda: code) == code
    assert capsys.readouterr() == ("", "")


def test_what_a_command_looks_for_is_no_failure_of_the_command() -> None:
    def work() -> int:
        raise CorruptCheckpointError("damaged")

    assert run_command("ckpt-x", work) == 2
    assert run_command("ckpt-x", work, findings=(CorruptCheckpointError,)) == 1


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (
            CheckpointError("a\x1b", problems=[HOLE], rank=3),
            {
                "error": "CheckpointError",
                "message": "a\x1b",
                "problems": [{"kind": "hole", "severity": "error", "where": "w\r", "message": "x"}],
            },
        ),
        (
            PermissionError(errno.EACCES, "denied", "/x"),
            {"error": "PermissionError", "message": "/x: denied", "problems": []},
        ),
    ],
)
def test_an_error_as_json_has_class_message_and_problems(
    error: Exception, found: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(error, as_json=True) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out) == found
    assert printed.err.startswith("ckpt-x: ")


def test_other_exceptions_are_faults_of_the_program_and_pass() -> None:
    with pytest.raises(ZeroDivisionError):
        run(ZeroDivisionError())
