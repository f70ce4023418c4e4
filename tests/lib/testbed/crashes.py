"""Kills at a chosen write of a save, real failures of one rank, and what a fresh set of ranks finds."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from testbed.checkpoints import (
    EXPECTED,
    FORMATS,
    build_manager,
    continue_run,
    load_run,
    report_failure,
    save_run,
    start_other_run,
    start_saved_run,
)
from testbed.rank import RankContext
from testbed.training import compare_snapshots, read_snapshot, take_snapshot, write_snapshot
from testbed.values import Failed, Kill, Place

OLD = EXPECTED
"""Snapshot of the run at its first save."""
NEW = "new.pt"
"""Snapshot of the same run at its second save, over the first."""
STEP = "step"

_CHANGES = frozenset({"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink"})


@dataclass(slots=True)
class WriteCounter:
    """Counts the calls of this process that change files under a directory, before each happens."""

    directory: str
    kill_at: int | None = None
    """Which call is not survived, from 1 on; None survives all."""
    victims: list[int] = field(default_factory=list)
    """Processes to kill then, this one last."""
    count: int = 0

    def install(self) -> None:
        """Start counting; an audit hook cannot be taken out again."""
        sys.addaudithook(self.see)

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count one event."""
        if not self._is_change(event, arguments):
            return
        self.count += 1
        if self.count == self.kill_at:
            self._kill()

    def _is_change(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event != "open" and event not in _CHANGES:
            return False
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return False
        path = arguments[0]
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.directory)

    def _kill(self) -> NoReturn:
        for victim in self.victims:
            os.kill(victim, signal.SIGKILL)
        # A signal to another process may take a moment, and this one must not go on.
        while True:
            time.sleep(1)


def save_old(_context: RankContext, place: Place) -> None:
    """Save a run for the first time, and prepare the snapshot of its second save."""
    run = start_saved_run(place.model, place.mesh)
    write_snapshot(take_snapshot(run), place.root / OLD)
    save_run(build_manager(run, place.root), run, place.root / STEP, FORMATS[place.format_name])
    continue_run(run)
    write_snapshot(take_snapshot(run), place.root / NEW)


def save_new(context: RankContext, place: Place, kill: Kill) -> int:
    """Save the run again over its first save; the first victim kills all victims at one of its writes.

    Returns:
        How many writes this rank made.
    """
    run = start_saved_run(place.model, place.mesh)
    continue_run(run)
    manager = build_manager(run, place.root)
    pids = _gather_pids()
    counter = WriteCounter(str(place.root / STEP))
    if context.rank in kill.victims[:1]:
        counter.kill_at = kill.at
        counter.victims = [pids[victim] for victim in reversed(kill.victims)]
    counter.install()
    save_run(manager, run, place.root / STEP, FORMATS[place.format_name])
    return counter.count


def _gather_pids() -> list[int]:
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


def identify_state(_context: RankContext, place: Place) -> str:
    """Load into other ranks and say whether all of it is the old state, or the new one.

    Returns:
        "old", "new", or what differs from both.
    """
    run = start_other_run(place.model, place.mesh)
    load_run(build_manager(run, place.root), run, place.root / STEP)
    found = take_snapshot(run)
    states = {"old": OLD, "new": NEW}
    differences = {name: compare_snapshots(read_snapshot(place.root / path), found) for name, path in states.items()}
    return next((name for name, lines in differences.items() if not lines), f"a mix: {differences}")


def fail_to_plan(_context: RankContext, place: Place) -> Failed:
    """Save what cannot be saved."""
    run = start_saved_run(place.model, place.mesh)
    manager = build_manager(run, place.root)
    return report_failure(run, lambda: save_run(manager, run, place.root / STEP, FORMATS[place.format_name]))


def fail_to_write(context: RankContext, place: Place, culprit: int, limit: int) -> Failed:
    """Save again where one rank's files may not grow beyond a limit, in bytes."""
    run = start_saved_run(place.model, place.mesh)
    continue_run(run)
    manager = build_manager(run, place.root)
    if context.rank == culprit:
        # Past the limit a write fails with EFBIG, as on a full disk; Python ignores the signal.
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return report_failure(run, lambda: save_run(manager, run, place.root / STEP, FORMATS[place.format_name]))


def fail_to_read(context: RankContext, place: Place, culprit: int) -> Failed:
    """Load where one rank cannot open another file."""
    run = start_other_run(place.model, place.mesh)
    manager = build_manager(run, place.root)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def load() -> None:
        if context.rank == culprit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
        try:
            load_run(manager, run, place.root / STEP)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return report_failure(run, load)


def load_with_odd_rank(context: RankContext, place: Place, culprit: int) -> Failed:
    """Load where one rank's model has a buffer that nobody saved."""
    run = start_other_run(place.model, place.mesh)
    if context.rank == culprit:
        run.model.register_buffer("surplus", torch.ones(2))
    manager = build_manager(run, place.root)
    return report_failure(run, lambda: load_run(manager, run, place.root / STEP))


def save_with_wrong_keys(_context: RankContext, place: Place) -> Failed:
    """Save a model that lacks a key of those that the manager validates against."""
    run = start_saved_run(place.model, place.mesh)
    manager = build_manager(run, place.root)
    manager.set_model_state_dict_keys([*run.model.state_dict(), "head.absent"])
    return report_failure(run, lambda: save_run(manager, run, place.root / STEP, FORMATS[place.format_name]))
