"""The side of a launch that runs inside a rank."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

DUMP_SIGNAL = signal.SIGUSR1
"""Makes a rank write its stack to its log."""

_GLOO_TIMEOUT = timedelta(minutes=5)
"""Longer than any launch: the launcher decides what hangs, never gloo."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """Which rank this is, of how many."""

    rank: int
    world_size: int
    scratch: Path
    """A directory that all ranks of a launch share and that goes with it."""

    @property
    def log(self) -> Path:
        """Where the rank's standard output and error go."""
        return self.scratch / f"rank-{self.rank}.log"


@dataclass(frozen=True, slots=True)
class FunctionReference:
    """A module-level function, to be found again in a process that cannot import test files by name."""

    module: str
    path: str
    name: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionReference:
        """Take the function's module, file and name."""
        path = sys.modules[function.__module__].__file__
        if path is None or "<" in function.__qualname__:
            raise TypeError(f"{function.__qualname__} must be a module-level function of a file")
        return cls(function.__module__, path, function.__qualname__)

    def resolve(self) -> Callable[..., Any]:
        """Import the file, unless its module is there already, and return the function."""
        module = sys.modules.get(self.module) or self._import_file()
        function: Callable[..., Any] = getattr(module, self.name)
        return function

    def _import_file(self) -> ModuleType:
        spec = importlib.util.spec_from_file_location(self.module, self.path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{self.path}: not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        spec.loader.exec_module(module)
        return module


@dataclass(frozen=True, slots=True)
class Job:
    """A call to make on every rank."""

    function: FunctionReference
    arguments: bytes
    """Pickled apart, so that the function's module is there when they are read."""
    group: bool


def run_rank(channel: Connection, context: RankContext, job: Job) -> None:
    """Run the job, send its result or its exception, and stay until the launcher closes the channel.

    A rank that left at once could take a connection from a peer in its last collective.
    """
    _redirect_output(context.log)
    # The launcher asks a rank that hangs where it is.
    faulthandler.register(DUMP_SIGNAL, all_threads=False)
    try:
        answer = pickle.dumps(("returned", _run_job(context, job)))
    except BaseException as error:  # noqa: BLE001  CheckpointException and SystemExit are no Exception
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        answer = pickle.dumps(("raised", f"{kind}: {error}", traceback.format_exc()))
    channel.send_bytes(answer)
    with suppress(EOFError):
        channel.recv_bytes()


def _run_job(context: RankContext, job: Job) -> Any:  # noqa: ANN401  whatever the function returns
    # The server swallows an ImportError of its preload; here it shows.
    importlib.import_module("testbed.preload")
    function = job.function.resolve()
    arguments = pickle.loads(job.arguments)  # noqa: S301  bytes of our own parent
    if job.group:
        _join_group(context)
    return function(context, *arguments)


def _join_group(context: RankContext) -> None:
    import torch.distributed as dist  # noqa: PLC0415  the launcher imports this module without torch

    if sys.platform == "linux":
        # The host's name need not resolve where tests run.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{context.scratch / 'rendezvous'}",
        rank=context.rank,
        world_size=context.world_size,
        timeout=_GLOO_TIMEOUT,
    )


def _redirect_output(log: Path) -> None:
    """Send the process's own output to a file, the libraries' C++ output included."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
