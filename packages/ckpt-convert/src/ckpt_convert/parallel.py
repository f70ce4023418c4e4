"""Threads over items, with one place where progress is counted and a stop takes effect."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


class StoppedError(Exception):
    """Raised inside a worker after `Meter.stop`; never leaves `Workers.run`."""


class Meter:
    """Counts bytes for a progress bar, and stops the workers that report to it."""

    def __init__(self, report: Callable[[int], object]) -> None:
        """Pass every count on to `report`, from one thread at a time."""
        self._report = report
        self._lock = threading.Lock()
        self._stopped = False

    def advance(self, nbytes: int) -> None:
        """Count `nbytes` more bytes.

        Raises:
            StoppedError: Somebody called `stop`.
        """
        if self._stopped:
            raise StoppedError
        with self._lock:
            self._report(nbytes)

    def stop(self) -> None:
        """Make the next `advance` of every worker raise."""
        self._stopped = True


@dataclass(frozen=True, slots=True)
class Workers:
    """How many threads work at a time, with what buffers, and where they report."""

    threads: int
    block_bytes: int
    """Size of a buffer; a thread holds at most two."""
    meter: Meter

    def run(self, items: Iterable[Item], work: Callable[[Item], None]) -> None:
        """Call `work` on every item, in order; the first error stops all and is raised.

        Items are drawn one by one, so they may be made lazily. An interrupt of the calling
        thread stops the workers before it is raised again.
        """
        _Run(items, work, self.meter).finish(self.threads)


class _Run:
    """One call of `Workers.run`."""

    def __init__(self, items: Iterable[Item], work: Callable[[Item], None], meter: Meter) -> None:
        self._queue = iter(items)
        self._drawing = threading.Lock()
        self._work: Callable[..., None] = work
        self._meter = meter
        self._errors: list[BaseException] = []

    def finish(self, threads: int) -> None:
        ended = [threading.Event() for _ in range(threads)]
        workers = [threading.Thread(target=self._drain, args=(event,)) for event in ended]
        try:
            _start(workers)
            # Not join: in Python 3.11 a join that was interrupted takes the thread for dead.
            _wait(ended)
        except BaseException:
            self._meter.stop()
            _wait(ended)
            raise
        finally:
            for worker in workers:
                worker.join()
        if self._errors:
            raise self._errors[0]

    def _drain(self, ended: threading.Event) -> None:
        try:
            while (item := self._draw()) is not None:
                # An item without bytes reports none, and must not outlive a stop either.
                self._meter.advance(0)
                self._work(item)
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001  raised again by the calling thread
            self._errors.append(error)
            self._meter.stop()
        finally:
            ended.set()

    def _draw(self) -> object | None:
        with self._drawing:
            return next(self._queue, None)


def _start(workers: list[threading.Thread]) -> None:
    # An interrupt between two starts would leave a thread that nobody stops; it is held back meanwhile.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for worker in workers:
            worker.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _wait(events: list[threading.Event]) -> None:
    for event in events:
        event.wait()
