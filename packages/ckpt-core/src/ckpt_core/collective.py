"""Let all ranks of a process group succeed together or fail with the same error.

A rank that raises alone leaves the others waiting inside a collective. So each step of a
save or load runs through `agree`, which exchanges outcomes before anyone goes on. Without
a default process group there is one rank, and nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ckpt_core.errors import CheckpointError, SaveError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Outcome:
    value: Any
    error: CheckpointError | None


def has_group() -> bool:
    """Whether a default process group exists, so that ranks can talk."""
    return dist.is_available() and dist.is_initialized()


def is_rank_zero() -> bool:
    """Whether this is the rank that touches directories on behalf of all."""
    return not has_group() or dist.get_rank() == 0


def agree(step: Callable[[], T], *, error: type[CheckpointError] = SaveError, what: str) -> list[T]:
    """Run `step` on every rank and return every rank's result, in rank order.

    Args:
        step: Work of this rank; its result must be picklable.
        error: Class for failures that are not a `CheckpointError` already.
        what: What was being done, with the path; opens the message of such failures.

    Raises:
        CheckpointError: If any rank failed: the error of the lowest failing rank, the same
            on every rank.
    """
    outcome = _attempt(step, error, what)
    outcomes = _gather(outcome)
    for rank, each in enumerate(outcomes):
        if each.error is not None:
            _raise(rank, each.error, outcome.error)
    return [each.value for each in outcomes]


def on_rank_zero(step: Callable[[], T], *, error: type[CheckpointError] = SaveError, what: str) -> T:
    """Run `step` on rank 0 only; every rank returns its result or raises its error."""
    return cast("T", agree(lambda: step() if is_rank_zero() else None, error=error, what=what)[0])


def _attempt(step: Callable[[], T], error: type[CheckpointError], what: str) -> _Outcome:
    try:
        return _Outcome(step(), None)
    except CheckpointError as failure:
        return _Outcome(None, failure)
    except (KeyboardInterrupt, SystemExit):
        raise
    # DCP's CheckpointException derives from BaseException, and must not escape as such.
    except BaseException as failure:  # noqa: BLE001
        wrapped = error(f"{what}: {describe(failure)}")
        wrapped.__cause__ = failure
        return _Outcome(None, wrapped)


def describe(failure: BaseException) -> str:
    """One line for any exception; for DCP's, the cause and the rank where it began."""
    failures = getattr(failure, "failures", None)
    if not failures:
        return f"{type(failure).__name__}: {failure}"
    rank, (cause, _) = min(failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def _gather(outcome: _Outcome) -> list[_Outcome]:
    if not has_group() or dist.get_world_size() == 1:
        return [outcome]
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    return outcomes


def _raise(rank: int, failure: CheckpointError, own: CheckpointError | None) -> None:
    """Raise what `rank` reported; where that is this rank, keep the original cause."""
    if has_group() and dist.get_world_size() > 1:
        failure = failure.on_rank(rank)
    raise failure from (own.__cause__ if own is not None else None)
