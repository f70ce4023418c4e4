"""Threads over items, with one place where progress is counted and a stop takes effect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


class StoppedError(Exception):
    """Raised inside a worker after `Meter.stop`; never leaves `run_threads`."""


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


def run_threads(items: Iterable[Item], work: Callable[[Item], None], *, threads: int, meter: Meter) -> None:
    """Call `work` on every item, in order, from `threads` threads; the first error stops all.

    Items are drawn one by one, so they may be made lazily. An interrupt of the calling
    thread stops the workers before it is raised again.
    """
    queue = iter(items)
    drawing = threading.Lock()
    errors: list[BaseException] = []

    def draw() -> Item | None:
        with drawing:
            return next(queue, None)

    def drain() -> None:
        try:
            while (item := draw()) is not None:
                # An item without bytes reports none, and must not outlive a stop either.
                meter.advance(0)
                work(item)
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001  handed to the caller below
            errors.append(error)
            meter.stop()

    workers = [threading.Thread(target=drain, name=f"ckpt-convert-{i}") for i in range(threads)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except BaseException:
        meter.stop()
        for worker in workers:
            worker.join()
        raise
    if errors:
        raise errors[0]
