from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from ckpt_convert.parallel import MOST_THREADS, Meter, Workers, count_threads
from ckpt_core.errors import ConfigError


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_item_is_worked_on_once_and_counted(threads: int) -> None:
    counted: list[int] = []
    seen: list[int] = []
    meter = Meter(counted.append)

    def work(item: int) -> None:
        seen.append(item)
        meter.advance(item)

    Workers(threads, 1, meter).run(range(1, 101), work)
    assert sorted(seen) == list(range(1, 101))
    assert sum(counted) == 5050


def test_the_first_error_reaches_the_caller_and_stops_the_rest() -> None:
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for item in range(1, 1000):
            drawn.append(item)
            yield item

    def work(item: int) -> None:
        if item == 3:
            raise ValueError("third")

    with pytest.raises(ValueError, match="third"):
        Workers(1, 1, Meter(bool)).run(items(), work)
    assert drawn == [1, 2, 3]


def test_an_error_stops_a_worker_in_the_middle_of_its_item() -> None:
    meter = Meter(bool)
    failed = threading.Event()

    def work(item: str) -> None:
        if item == "fails":
            failed.set()
            raise ValueError(item)
        while True:
            meter.advance(1)

    with pytest.raises(ValueError, match="fails"):
        Workers(2, 1, meter).run(["endless", "fails"], work)
    assert failed.is_set()


def test_an_interrupt_of_the_caller_stops_the_workers() -> None:
    meter = Meter(bool)

    def work(_: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            meter.advance(1)

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        Workers(1, 1, meter).run(["endless"], work)
    for worker in set(threading.enumerate()) - before:
        # A worker that has said that it is done may still be on its way out.
        worker.join(5)
        assert not worker.is_alive()


def start_only(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system run out of threads as it does under a limit on processes or memory."""
    real = threading.Thread.start
    left = iter(range(count))

    def start(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("started", [0, 1, 3])
def test_the_threads_that_could_be_started_do_the_work(monkeypatch: pytest.MonkeyPatch, started: int) -> None:
    start_only(started, monkeypatch)
    seen: list[int] = []
    Workers(8, 1, Meter(bool)).run(range(1, 101), seen.append)
    assert sorted(seen) == list(range(1, 101))


def test_an_error_is_raised_where_no_thread_could_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(item: int) -> None:
        raise ValueError(item)

    start_only(0, monkeypatch)
    with pytest.raises(ValueError, match="7"):
        Workers(2, 1, Meter(bool)).run([7], fail)


def test_no_more_threads_are_started_than_there_are_items() -> None:
    names: set[str] = set()
    meeting = threading.Barrier(3)

    def work(_: int) -> None:
        names.add(threading.current_thread().name)
        meeting.wait(timeout=30)

    before = threading.active_count()
    counts: list[int] = []
    Workers(50, 1, Meter(lambda _: counts.append(threading.active_count()))).run(range(3), work)
    assert len(names) == 3
    assert max(counts) <= before + 3


@pytest.mark.parametrize(("asked", "count"), [(1, 1), (64, 64), (400, MOST_THREADS), (1024, MOST_THREADS)])
def test_threads_are_capped(asked: int, count: int) -> None:
    assert count_threads(asked) == count


@pytest.mark.parametrize("asked", [0, -1, 1025, 10**9, 10**4000, "2", 2.0, None, True])
def test_what_is_no_number_of_threads_is_refused(asked: object) -> None:
    with pytest.raises(ConfigError, match="expected a number from 1 to 1,024"):
        count_threads(asked)


def test_an_interrupt_that_another_thread_lets_in_between_two_starts_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start
    started: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        real(thread)
        started.append(thread)
        if len(started) == 2:
            raise KeyboardInterrupt

    def work(_: int) -> None:
        while True:
            meter.advance(1)

    meter = Meter(bool)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        Workers(5, 1, meter).run(range(5), work)
    assert len(started) == 2
    assert not any(thread.is_alive() for thread in started)
