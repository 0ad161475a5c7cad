"""Reading ahead: in order, a bounded number at a time, and errors in their turn."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from tidelog.errors import NotFoundError
from tidelog.store.fetch import fetch_ahead, fetch_ahead_in_threads


def test_everything_comes_in_order_though_fetched_side_by_side() -> None:
    at_once: set[int] = set()
    most = []

    def fetch(number: int) -> bytes:
        at_once.add(number)
        most.append(len(at_once))
        time.sleep(0.002 * (number % 3))
        at_once.discard(number)
        return b"%d" % number

    found = list(fetch_ahead_in_threads(fetch, range(50)))
    assert found == [(number, b"%d" % number) for number in range(50)]
    assert max(most) > 1


def test_nothing_wanted_gives_nothing() -> None:
    assert list(fetch_ahead_in_threads(lambda _: b"", [])) == []


def test_slow_reader_has_only_a_few_in_memory() -> None:
    fetched: list[int] = []

    def fetch(number: int) -> bytes:
        fetched.append(number)
        return b""

    reading = fetch_ahead_in_threads(fetch, count())
    for expected in range(5):
        number, _ = next(reading)
        assert number == expected
        time.sleep(0.02)
        assert len(fetched) <= expected + 1 + 3
    reading.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("tidelog-fetch")]


def test_error_comes_after_the_results_before_it() -> None:
    def fetch(number: int) -> bytes:
        if number == 4:
            raise NotFoundError("it is gone")
        return b"x"

    reading = fetch_ahead_in_threads(fetch, range(10))
    assert [next(reading)[0] for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(NotFoundError):
        next(reading)


def test_without_a_pool_each_thing_is_fetched_when_it_is_wanted() -> None:
    fetched: list[int] = []

    def fetch(number: int) -> int:
        fetched.append(number)
        return number

    reading = fetch_ahead(None, fetch, range(3), ahead=2)
    assert next(reading) == (0, 0)
    assert fetched == [0]
    assert [number for number, _ in reading] == [1, 2]


def test_what_is_not_fetched_yet_is_cancelled_with_the_iteration() -> None:
    go_on = threading.Event()
    fetched: list[int] = []

    def fetch(number: int) -> bytes:
        fetched.append(number)
        if number:
            go_on.wait(60)
        return b""

    with ThreadPoolExecutor(1) as pool:
        reading = fetch_ahead(pool, fetch, range(10), ahead=5)
        next(reading)
        reading.close()
        go_on.set()
    assert fetched in ([0], [0, 1])
