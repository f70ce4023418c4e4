from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from ckpt_convert.parallel import Meter, Workers


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

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        Workers(1, 1, meter).run(["endless"], work)
    assert threading.active_count() == before
