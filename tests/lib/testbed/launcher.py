"""Start real gloo ranks, run one function on all of them, and say what became of each.

Every launch forks fresh processes from one server that has the imports done (see
`testbed.preload`), so a launch is cheap and none sees what an earlier one left behind: a
rank that raised, hung or was killed cannot poison the next test. The parent imports no torch.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal

from testbed.rank import DUMP_SIGNAL, FunctionReference, Job, RankContext, run_rank

PRELOAD = "testbed.preload"
_LOG_TAIL = 6000
_DUMP_SECONDS = 0.2
_EXIT_SECONDS = 5.0
"""How long a rank may take to leave once it is released; then it is killed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one rank."""

    rank: int
    kind: Literal["returned", "raised", "died", "hung"]
    value: Any = None
    """What the function returned."""
    error: str = ""
    """`package.ErrorType: message`, or how the process ended."""
    detail: str = ""
    """The traceback, or the end of what the rank printed."""

    @property
    def headline(self) -> str:
        """One line."""
        return f"rank {self.rank} {self.kind}: {self.error}"


def _order_by_blame(outcome: Outcome) -> int:
    return ("died", "raised", "hung", "returned").index(outcome.kind)


class RankFailure(RuntimeError):  # noqa: N818  it names what it reports
    """At least one rank did not return; all outcomes are in `outcomes`."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        lines = [outcome.headline for outcome in outcomes if outcome.kind != "returned"]
        # The others mostly failed in the same way, or because of this one.
        first = min(outcomes, key=_order_by_blame)
        shown = [outcome for outcome in outcomes if outcome is first or outcome.kind == "hung"]
        details = [f"rank {outcome.rank}:\n{outcome.detail}" for outcome in shown]
        super().__init__("\n".join([*lines, *details]).rstrip())


@dataclass(slots=True)
class _Rank:
    number: int
    process: ForkServerProcess
    channel: connection.Connection
    log: Path
    outcome: Outcome | None = None

    def read_answer(self) -> None:
        try:
            kind, *fields = pickle.loads(self.channel.recv_bytes())  # noqa: S301  bytes of our own child
        except EOFError:
            self.outcome = self._report_death()
            return
        if kind == "returned":
            self.outcome = Outcome(self.number, "returned", value=fields[0])
        else:
            self.outcome = Outcome(self.number, "raised", error=fields[0], detail=fields[1])

    def report_hang(self) -> None:
        if self.process.pid is not None:
            os.kill(self.process.pid, DUMP_SIGNAL)
            time.sleep(_DUMP_SECONDS)
        self.outcome = Outcome(self.number, "hung", error="gave no answer in time", detail=self._read_log())

    def _report_death(self) -> Outcome:
        self.process.join(5)
        code = self.process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        return Outcome(self.number, "died", error=how, detail=self._read_log())

    def _read_log(self) -> str:
        return self.log.read_text(errors="replace")[-_LOG_TAIL:] if self.log.exists() else ""

    def stop(self) -> None:
        self.channel.close()
        if self.outcome is not None and self.outcome.kind == "returned":
            self.process.join(_EXIT_SECONDS)
        self.process.kill()
        self.process.join()
        self.process.close()


@dataclass(frozen=True, slots=True)
class RankLauncher:
    """Runs functions on gloo ranks that are forked from one preloaded server."""

    timeout: float = 120.0
    """Seconds after which a rank that gave no answer counts as hung."""
    _context: multiprocessing.context.ForkServerContext = field(
        default_factory=lambda: multiprocessing.get_context("forkserver"), repr=False
    )

    def run(self, function: Callable[..., Any], *args: object, ranks: int, **options: Any) -> list[Any]:  # noqa: ANN401
        """Run `function(context, *args)` on every rank and return the results in rank order.

        Raises:
            RankFailure: a rank raised, died or hung; each is named, with its traceback or signal.
        """
        outcomes = self.launch(function, *args, ranks=ranks, **options)
        if any(outcome.kind != "returned" for outcome in outcomes):
            raise RankFailure(outcomes)
        return [outcome.value for outcome in outcomes]

    def launch(
        self,
        function: Callable[..., Any],
        *args: object,
        ranks: int,
        group: bool = True,
        grace: float = 3.0,
        timeout: float | None = None,
    ) -> list[Outcome]:
        """Run `function(context, *args)` on every rank and say what became of each.

        Args:
            function: Module-level function; found again in the rank by its file and name.
            args: Plain values; they are pickled.
            ranks: World size.
            group: Whether the default process group exists when the function starts.
            grace: Seconds that the other ranks get once one of them failed.
            timeout: In place of the launcher's own.
        """
        job = Job(FunctionReference.of(function), pickle.dumps(args), group=group)
        self.ensure_server()
        with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
            started: list[_Rank] = []
            try:
                for number in range(ranks):
                    started.append(self._start_rank(RankContext(number, ranks, Path(scratch)), job))  # noqa: PERF401  a failed start must leave the others known
                _collect_answers(started, timeout or self.timeout, grace)
            finally:
                for rank in started:
                    rank.stop()
            return [rank.outcome for rank in started if rank.outcome is not None]

    def ensure_server(self) -> None:
        """Start the fork server unless it runs."""
        self._context.set_forkserver_preload([PRELOAD])
        with _python_path_of_this_process():
            forkserver.ensure_running()

    def _start_rank(self, context: RankContext, job: Job) -> _Rank:
        channel, far_end = self._context.Pipe()
        process = self._context.Process(target=run_rank, args=(far_end, context, job), daemon=True)
        process.start()
        far_end.close()
        return _Rank(context.rank, process, channel, context.log)


def _collect_answers(ranks: list[_Rank], timeout: float, grace: float) -> None:
    deadline = time.monotonic() + timeout
    waiting: dict[object, _Rank] = {rank.channel: rank for rank in ranks}
    while waiting:
        ready = connection.wait([rank.channel for rank in waiting.values()], max(0.0, deadline - time.monotonic()))
        for channel in ready:
            rank = waiting.pop(channel)
            rank.read_answer()
            if rank.outcome is not None and rank.outcome.kind != "returned":
                deadline = min(deadline, time.monotonic() + grace)
        if not ready:
            for rank in waiting.values():
                rank.report_hang()
            return


@contextmanager
def _python_path_of_this_process() -> Iterator[None]:
    """Let the server import what this process can: Python 3.11's fork server drops sys.path."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
