"""Reading ahead: in order, a bounded number at a time, and errors in their turn."""

from __future__ import annotations

import threading
import time
from itertools import count

import pytest

from tidelog.errors import NotFoundError
from tidelog.store.wrappers import fetched_ahead


def test_everything_comes_in_order_though_fetched_side_by_side() -> None:
    at_once: set[int] = set()
    most = []

    def fetch(number: int) -> bytes:
        at_once.add(number)
        most.append(len(at_once))
        time.sleep(0.002 * (number % 3))
        at_once.discard(number)
        return b"%d" % number

    found = list(fetched_ahead(range(50), fetch))
    assert found == [(number, b"%d" % number) for number in range(50)]
    assert max(most) > 1


def test_nothing_wanted_gives_nothing() -> None:
    assert list(fetched_ahead([], lambda _: b"")) == []


def test_who_reads_slowly_holds_a_few_only() -> None:
    fetched: list[int] = []

    def fetch(number: int) -> bytes:
        fetched.append(number)
        return b""

    reading = fetched_ahead(count(), fetch)
    for expected in range(5):
        number, _ = next(reading)
        assert number == expected
        time.sleep(0.02)
        assert len(fetched) <= expected + 1 + 3
    reading.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("tidelog-fetch")]


def test_an_error_comes_after_what_stands_before_it() -> None:
    def fetch(number: int) -> bytes:
        if number == 4:
            raise NotFoundError("it is gone")
        return b"x"

    reading = fetched_ahead(range(10), fetch)
    assert [next(reading)[0] for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(NotFoundError):
        next(reading)
