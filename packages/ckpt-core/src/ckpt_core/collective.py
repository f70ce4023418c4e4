"""Let all ranks of a process group succeed together or fail with the same error.

A rank that raises alone leaves the others waiting inside a collective. So each step of a
save or load runs through one of three functions, which exchange outcomes before anyone
goes on. Where a step has collectives of its own, it must see to it that all ranks reach them:
nothing here can free a rank that waits in one. Without a default process group there is one
rank, and nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch.distributed as dist

from ckpt_core.errors import CheckpointError

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Step:
    """What a step does, for the message of a failure that nobody foresaw."""

    what: str
    """The deed and the path."""
    error: type[CheckpointError]


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    value: T | None
    error: CheckpointError | None
    rank: int


def has_group() -> bool:
    """Whether a default process group exists, so that ranks can talk."""
    return dist.is_available() and dist.is_initialized()


def is_rank_zero() -> bool:
    """Whether this is the rank that touches directories on behalf of all."""
    return _rank() == 0


def agree(step: Step, work: Callable[[], T]) -> T:
    """Do `work` on every rank; return this rank's result once every rank has one.

    Raises:
        CheckpointError: If any rank failed: the error of the lowest failing rank.
    """
    own = _attempt(step, work)
    for rank, error in enumerate([own.error] if _is_alone() else _exchange(own.error)):
        _raise_failure(error, rank, own.error)
    return cast("T", own.value)


def combine(step: Step, work: Callable[[], T], merge: Callable[[Sequence[T]], R]) -> R:
    """Do `work` on every rank and `merge` all results on rank 0; every rank returns that.

    Raises:
        CheckpointError: If `work` failed on any rank, or `merge` did.
    """
    own = _attempt(step, work)
    gathered = [own] if _is_alone() else _gather_on_rank_zero(own)
    first = next((outcome for outcome in gathered if outcome.error is not None), None)
    merged: _Outcome[R]
    if first is not None:
        merged = _Outcome(None, first.error, first.rank)
    elif gathered:
        merged = _attempt(step, lambda: merge([cast("T", outcome.value) for outcome in gathered]))
    else:
        merged = _Outcome(None, None, 0)
    merged = _broadcast(merged)
    _raise_failure(merged.error, merged.rank, own.error)
    return cast("R", merged.value)


def on_rank_zero(step: Step, work: Callable[[], T]) -> T:
    """Do `work` on rank 0 only; every rank returns its result.

    Raises:
        CheckpointError: If it failed, on every rank.
    """
    outcome: _Outcome[T] = _attempt(step, work) if is_rank_zero() else _Outcome(None, None, 0)
    result = _broadcast(outcome)
    _raise_failure(result.error, result.rank, outcome.error)
    return cast("T", result.value)


def wrap_failure(step: Step, failure: BaseException) -> CheckpointError:
    """Turn any exception into the step's error; of DCP's, take the cause and the rank where it began."""
    failures = getattr(failure, "failures", None)
    if not failures:
        return step.error(f"{step.what}: {type(failure).__name__}: {failure}")
    rank = min(failures)
    # DCP wraps each cause with its traceback.
    cause = failures[rank][0]
    return step.error(f"{step.what}: {type(cause).__name__}: {cause}", rank=rank)


def _attempt(step: Step, work: Callable[[], T]) -> _Outcome[T]:
    try:
        return _Outcome(work(), None, _rank())
    except CheckpointError as failure:
        return _Outcome(None, failure, _rank())
    except (KeyboardInterrupt, SystemExit):
        raise
    # DCP's CheckpointException derives from BaseException, and must not escape as such.
    except BaseException as failure:  # noqa: BLE001
        wrapped = wrap_failure(step, failure)
        wrapped.__cause__ = failure
        return _Outcome(None, wrapped, _rank())


def _raise_failure(error: CheckpointError | None, rank: int, own: CheckpointError | None) -> None:
    """Raise `error` of `rank`; where it began here, with its original cause."""
    if error is not None:
        is_own = own is not None and rank == _rank()
        raise (error if _is_alone() else error.on_rank(rank)) from (own.__cause__ if own and is_own else None)


def _rank() -> int:
    return dist.get_rank() if has_group() else 0


def _is_alone() -> bool:
    return not has_group() or dist.get_world_size() == 1


def _exchange(own: CheckpointError | None) -> list[CheckpointError | None]:
    errors: list[CheckpointError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, own)
    return errors


def _gather_on_rank_zero(own: _Outcome[T]) -> list[_Outcome[T]]:
    outcomes: list[_Outcome[T] | None] = [None] * dist.get_world_size()
    dist.gather_object(own, outcomes if _rank() == 0 else None)
    return cast("list[_Outcome[T]]", outcomes) if _rank() == 0 else []


def _broadcast(outcome: _Outcome[R]) -> _Outcome[R]:
    if _is_alone():
        return outcome
    box = [outcome]
    dist.broadcast_object_list(box, src=0)
    return box[0]
