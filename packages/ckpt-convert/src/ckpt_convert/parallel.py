"""Threads over items, with one place where progress is counted and a stop takes effect."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeVar

from ckpt_core.errors import ConfigError, describe_value

MOST_THREADS = 64
"""No more than these run at a time: storage answers no faster, and each holds two buffers."""
_ABSURD_THREADS = 1024

Item = TypeVar("Item")


def count_threads(threads: object) -> int:
    """Return how many threads run at most when `threads` are asked for.

    Raises:
        ConfigError: That is no number of threads.
    """
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= _ABSURD_THREADS:
        raise ConfigError(f"threads {describe_value(threads)}: expected a number from 1 to {_ABSURD_THREADS:,}")
    return min(threads, MOST_THREADS)


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

        Items are drawn one by one, so they may be made lazily. Where the system starts fewer
        threads than asked for, those that started do the work. An interrupt of the calling
        thread stops the workers before it is raised again.
        """
        _Run(items, work, self.meter).finish(self.threads)


class _Run:
    """One call of `Workers.run`."""

    def __init__(self, items: Iterable[Item], work: Callable[[Item], None], meter: Meter) -> None:
        self._queue: Iterator[object] = iter(items)
        self._drawing = threading.Lock()
        self._work: Callable[..., None] = work
        self._meter = meter
        self._errors: list[BaseException] = []

    def finish(self, threads: int) -> None:
        waiting = list(islice(self._queue, threads))
        self._queue = chain(waiting, self._queue)
        workers: list[tuple[threading.Thread, threading.Event]] = []
        try:
            self._start(workers, len(waiting))
            if not workers:
                self._drain(threading.Event())
            # Not join: in Python 3.11 a join that was interrupted takes the thread for dead.
            _wait(workers)
        except BaseException:
            self._meter.stop()
            _wait(workers)
            raise
        finally:
            for worker, _ in workers:
                if worker.is_alive():
                    worker.join()
        if self._errors:
            raise self._errors[0]

    def _start(self, workers: list[tuple[threading.Thread, threading.Event]], count: int) -> None:
        """Append up to `count` running threads, fewer where the system has no room for them."""
        # An interrupt between two starts would leave a thread that nobody stops; it is held back meanwhile.
        # Another thread may still let it in; so a thread is noted first, and one that begins late finds the stop.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            while len(workers) < count:
                ended = threading.Event()
                worker = threading.Thread(target=self._drain, args=(ended,))
                workers.append((worker, ended))
                worker.start()
        except RuntimeError:
            workers.pop()  # "can't start new thread": a limit on processes or memory
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

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


def _wait(workers: list[tuple[threading.Thread, threading.Event]]) -> None:
    for worker, ended in workers:
        if worker.is_alive():
            ended.wait()
