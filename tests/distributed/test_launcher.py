from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from testbed.launcher import RankFailure, RankLauncher
from testbed.rank import RankContext

pytestmark = pytest.mark.distributed

_LEFT_BEHIND: list[int] = []


def sum_ranks(context: RankContext, offset: int) -> tuple[int, int, int]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([context.rank + offset])
    dist.all_reduce(total)
    return context.rank, dist.get_world_size(), int(total.item())


def ask_for_group(_context: RankContext) -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


def raise_on(context: RankContext, rank: int) -> None:
    import torch.distributed as dist

    if context.rank == rank:
        raise KeyError(f"lost on rank {rank}")
    dist.barrier()


def exit_with(_context: RankContext, code: int) -> None:
    raise SystemExit(code)


def kill_on(context: RankContext, rank: int) -> None:
    import torch.distributed as dist

    print(f"rank {context.rank} was here", flush=True)  # noqa: T201  must not reach the test's output
    if context.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(context: RankContext, rank: int) -> int:
    while context.rank == rank:
        time.sleep(0.1)
    return os.getpid()


def leave_something_behind(_context: RankContext) -> int:
    _LEFT_BEHIND.append(1)
    return len(_LEFT_BEHIND)


def write_output(_context: RankContext) -> None:
    os.write(1, b"to the terminal\n")
    print("to the terminal", file=sys.stderr)  # noqa: T201


def count_preload_seconds(_context: RankContext) -> float:
    started = time.monotonic()
    import testbed.preload  # noqa: F401  the import is what is measured

    return time.monotonic() - started


def _assert_next_launch_is_clean(launcher: RankLauncher) -> None:
    assert launcher.run(sum_ranks, 0, ranks=4) == [(rank, 4, 6) for rank in range(4)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_results_come_in_rank_order_from_one_world(launcher: RankLauncher, ranks: int) -> None:
    total = sum(range(ranks)) + 10 * ranks
    assert launcher.run(sum_ranks, 10, ranks=ranks) == [(rank, ranks, total) for rank in range(ranks)]


def test_a_launch_without_group_has_none(launcher: RankLauncher) -> None:
    assert launcher.run(ask_for_group, ranks=1, group=False) == [False]
    assert launcher.run(ask_for_group, ranks=1) == [True]


def test_a_raise_names_its_rank_and_keeps_its_traceback(launcher: RankLauncher) -> None:
    with pytest.raises(RankFailure, match=r"rank 2 raised: builtins.KeyError: 'lost on rank 2'") as caught:
        launcher.run(raise_on, 2, ranks=4, grace=0.5)
    outcomes = caught.value.outcomes
    assert [outcome.kind for outcome in outcomes] == ["hung", "hung", "raised", "hung"]
    assert "in raise_on" in outcomes[2].detail
    _assert_next_launch_is_clean(launcher)


def test_an_exception_outside_of_exception_is_reported(launcher: RankLauncher) -> None:
    assert [str(outcome.error) for outcome in launcher.launch(exit_with, 3, ranks=2)] == ["builtins.SystemExit: 3"] * 2


def test_a_killed_rank_is_named_with_its_signal(launcher: RankLauncher) -> None:
    outcomes = launcher.launch(kill_on, 1, ranks=4, grace=0.5)
    assert outcomes[1].kind == "died"
    assert outcomes[1].error == "killed by SIGKILL"
    assert outcomes[1].detail == "rank 1 was here\n"
    assert {outcome.kind for outcome in outcomes if outcome.rank != 1} <= {"hung", "raised"}
    _assert_next_launch_is_clean(launcher)


def test_a_hanging_rank_is_named_with_its_stack_and_ended(launcher: RankLauncher) -> None:
    started = time.monotonic()
    outcomes = launcher.launch(hang_on, 3, ranks=4, timeout=2.0)
    assert [outcome.kind for outcome in outcomes] == ["returned", "returned", "returned", "hung"]
    assert "in hang_on" in outcomes[3].detail
    assert time.monotonic() - started < 30.0
    _assert_next_launch_is_clean(launcher)


def test_no_rank_outlives_its_launch(launcher: RankLauncher) -> None:
    pids = launcher.run(hang_on, -1, ranks=2)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_launch_sees_nothing_of_an_earlier_one(launcher: RankLauncher) -> None:
    assert launcher.run(leave_something_behind, ranks=2) == [1, 1]
    assert launcher.run(leave_something_behind, ranks=2) == [1, 1]


def test_ranks_print_nothing(launcher: RankLauncher, capfd: pytest.CaptureFixture[str]) -> None:
    launcher.run(write_output, ranks=2)
    assert capfd.readouterr() == ("", "")


def test_imports_are_done_before_a_rank_starts(launcher: RankLauncher) -> None:
    assert max(launcher.run(count_preload_seconds, ranks=2)) < 0.5


def test_a_function_that_cannot_be_found_again_is_refused(launcher: RankLauncher) -> None:
    with pytest.raises(TypeError, match="module-level"):
        launcher.run(lambda _context: None, ranks=1)
