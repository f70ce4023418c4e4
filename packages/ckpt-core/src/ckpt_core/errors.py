"""What can go wrong with a checkpoint, as one family of exceptions.

`CheckpointError` is the base. Each leaf is also the builtin that a caller who has never
heard of this package would catch. A message names the path, what was expected, what was
found and what to do. Where several things are wrong, all of them are in `problems`.
"""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

ProblemKind = Literal[
    "missing_file",
    "short_file",
    "long_file",
    "bad_header",
    "missing_tensor",
    "unexpected_tensor",
    "duplicate_tensor",
    "hole",
    "overlap",
    "out_of_bounds",
    "shape",
    "dtype",
    "value",
    "stray_file",
    "unsupported",
    "unproven",
]
"""What a `Problem` is about.

`stray_file` and `unproven` are warnings (see `Problem.severity`); every other kind makes
a checkpoint unusable.
"""

_WARNINGS: frozenset[ProblemKind] = frozenset({"stray_file", "unproven"})
_SHOWN = 20
_LONGEST = 80
_LARGEST = 2**64


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a checkpoint, or one difference between two."""

    kind: ProblemKind
    where: str
    """The file name or FQN that the problem is about."""
    message: str
    """What was expected and what was found."""

    @property
    def severity(self) -> Literal["error", "warning"]:
        """Whether the checkpoint can be used in spite of the problem."""
        return "warning" if self.kind in _WARNINGS else "error"

    def to_json(self) -> dict[str, object]:
        """Return the problem as JSON types."""
        return {"kind": self.kind, "severity": self.severity, "where": self.where, "message": self.message}

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


class CheckpointError(Exception):
    """Base of every error that this project raises on purpose."""

    def __init__(self, message: str, *, problems: Iterable[Problem] = (), rank: int | None = None) -> None:
        """Keep every problem; under the message, list the first 20 of each kind and the counts.

        Args:
            message: Path, what was expected, what was found, what to do.
            problems: Everything that is wrong, where it is more than one thing.
            rank: Rank of the process group where it began; None if there is no group.
        """
        self.message = message
        self.problems = tuple(problems)
        self.rank = rank
        first = message if rank is None else f"rank {rank}: {message}"
        super().__init__("\n".join([first, *_list_by_kind(self.problems)]))

    def on_rank(self, rank: int) -> Self:
        """The same error, saying where it began; one that says so already stays as it is."""
        return self if self.rank is not None else type(self)(self.message, problems=self.problems, rank=rank)

    def __reduce__(self) -> tuple[Callable[..., CheckpointError], tuple[object, ...]]:
        return _rebuild, (type(self), self.message, self.problems, self.rank)


def describe_value(value: object) -> str:
    """Spell a value that came from outside for a message, in bounded time and length.

    `repr` is neither: tuples that hold one tuple twice double with every level, and deep ones
    end in a RecursionError.

    >>> describe_value("a" * 1000)[:8], describe_value(3), describe_value(((), ()))
    ("'aaaaaaa", '3', 'a tuple')
    """
    if isinstance(value, str):
        return repr(value[:_LONGEST]) + "..." * (len(value) > _LONGEST)
    if isinstance(value, int) and abs(value) > _LARGEST:
        return f"a number of {value.bit_length():,} bits"
    if value is None or isinstance(value, int | float):
        return repr(value)
    return f"a {type(value).__name__}"


def _list_by_kind(problems: tuple[Problem, ...]) -> list[str]:
    lines: list[str] = []
    for kind in dict.fromkeys(problem.kind for problem in problems):
        same = [problem for problem in problems if problem.kind == kind]
        lines.append(f"  {kind.replace('_', ' ')} ({len(same)}):")
        lines += [f"    - {problem}" for problem in same[:_SHOWN]]
        if len(same) > _SHOWN:
            lines.append(f"    ... and {len(same) - _SHOWN} more")
    return lines


def _rebuild(
    kind: type[CheckpointError], message: str, problems: tuple[Problem, ...], rank: int | None
) -> CheckpointError:
    return kind(message, problems=problems, rank=rank)


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Nothing is there."""

    # FileNotFoundError builds its text from errno fields that are not set here.
    __str__ = Exception.__str__


class LayoutError(CheckpointError, ValueError):
    """The path holds no layout that can be read here, or more than one."""


class CorruptCheckpointError(CheckpointError, ValueError):
    """The checkpoint is incomplete, overlapping, truncated or contradicts itself."""


class UnsafePickleError(CheckpointError, pickle.UnpicklingError):
    """A pickle names something that is not on the allow-list; nothing was executed."""


class KeyMismatchError(CheckpointError, RuntimeError):
    """Keys, shapes or dtypes differ from those that were asked for."""


class VerificationError(CheckpointError, ValueError):
    """What was written is not what the source holds; it was not published."""


class ConfigError(CheckpointError, ValueError):
    """An option or a combination of options is impossible."""


class TargetError(CheckpointError, FileExistsError):
    """The place to write to is taken, locked, or the source itself."""

    __str__ = Exception.__str__


class LockHeldError(TargetError):
    """Another writer is at work on the same target."""


class SpaceError(CheckpointError, OSError):
    """The file system cannot hold the result."""

    __str__ = Exception.__str__


class SaveError(CheckpointError, RuntimeError):
    """A save failed; what stood at the target before is untouched."""


class LoadError(CheckpointError, RuntimeError):
    """A load failed; the model may have been changed only if the message says so."""


@contextmanager
def translate_os_errors(path: Path, failure: str) -> Iterator[None]:
    """Turn what the operating system says while writing into an error of this family.

    Args:
        path: What the caller was working on; the message begins with it.
        failure: What did not work, such as "cannot be written".

    Raises:
        SpaceError: The file system is full, or a quota or size limit is reached.
        SaveError: The storage reports an error.
        TargetError: Anything else: permissions, a read-only file system, a file in the way.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        about = "" if error.filename is None else f": {error.filename}"
        message = f"{path}: {failure} ({error.strerror}{about})"
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise SpaceError(f"{message}; free some space, or choose another place, and try again") from error
        if error.errno == errno.EIO:
            raise SaveError(f"{message}; the storage reports an error") from error
        raise TargetError(f"{message}; check the permissions, or choose another place") from error
