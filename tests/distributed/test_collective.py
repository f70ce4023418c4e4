"""Steps that all ranks take together, on real gloo ranks."""

from __future__ import annotations

import pytest
from testbed.launcher import RankLauncher
from testbed.rank import RankContext

pytestmark = pytest.mark.distributed


class _FromAnotherTree(BaseException):
    """Like DCP's own exception, which `except Exception` does not catch."""


def _fail_on_one(context: RankContext, function: str, failing: int) -> tuple[str, str, bool]:
    """Run one step that fails on one rank; say what this rank saw."""
    from ckpt_core import collective
    from ckpt_core.errors import LoadError

    def work() -> int:
        if context.rank == failing:
            raise _FromAnotherTree("the disk is gone")
        return context.rank

    step = collective.Step("/checkpoint: could not be read", LoadError)
    try:
        if function == "agree":
            collective.agree(step, work)
        elif function == "combine":
            collective.combine(step, work, list)
        else:
            collective.on_rank_zero(step, work)
    except LoadError as error:
        return type(error).__name__, str(error), isinstance(error.__cause__, _FromAnotherTree)
    return "", "", False


@pytest.mark.parametrize(("function", "failing"), [("agree", 1), ("agree", 0), ("combine", 2), ("on_rank_zero", 0)])
def test_a_failure_of_one_rank_is_raised_alike_by_all(launcher: RankLauncher, function: str, failing: int) -> None:
    seen = launcher.run(_fail_on_one, function, failing, ranks=3)
    expected = f"rank {failing}: /checkpoint: could not be read: _FromAnotherTree: the disk is gone"
    assert [(kind, text) for kind, text, _ in seen] == [("LoadError", expected)] * 3
    assert [has_cause for _, _, has_cause in seen] == [rank == failing for rank in range(3)]


def _merge_on_rank_zero(context: RankContext, refuse: bool) -> object:
    from collections.abc import Sequence

    from ckpt_core import collective
    from ckpt_core.errors import CheckpointError, KeyMismatchError, Problem, SaveError

    def merge(parts: Sequence[int]) -> list[int]:
        if refuse:
            raise KeyMismatchError("keys differ", problems=[Problem("missing_tensor", "a.weight", "not there")])
        return sorted(parts)

    try:
        return collective.combine(collective.Step("/c", SaveError), lambda: context.rank * 10, merge)
    except CheckpointError as error:
        return type(error).__name__, str(error), [problem.where for problem in error.problems]


def test_results_of_all_ranks_are_merged_once_and_heard_by_all(launcher: RankLauncher) -> None:
    assert launcher.run(_merge_on_rank_zero, False, ranks=3) == [[0, 10, 20]] * 3


def test_a_refusal_keeps_its_class_and_problems_on_every_rank(launcher: RankLauncher) -> None:
    seen = launcher.run(_merge_on_rank_zero, True, ranks=3)
    text = "rank 0: keys differ\n  missing tensor (1):\n    - a.weight: not there"
    assert seen == [("KeyMismatchError", text, ["a.weight"])] * 3
