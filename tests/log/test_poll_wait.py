"""How often idle consumers read: the pace belongs to the consumer, not to one poll."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest

import tidelog
from tidelog import Event, Home
from tidelog.catalog.base import Row
from tidelog.log.partition_reader import FIRST_S, LAST_S, Pace
from tidelog.testing.scheduler import FakeClock

PARTITIONS = 3


class Reads:
    """Counts the reads of heads that the thread of the test makes, partition by partition."""

    def __init__(self, home: Home) -> None:
        self.counts: Counter[str] = Counter()
        self._real = home.catalog.get
        self._thread = threading.get_ident()
        home.catalog.get = self._get  # type: ignore[method-assign]

    def _get(self, partition: str, row: str) -> Row | None:
        if row == "head" and threading.get_ident() == self._thread:
            self.counts[partition] += 1
        return self._real(partition, row)

    def most(self) -> int:
        """The reads of the partition with the most, since the last call."""
        found = max(self.counts.values(), default=0)
        self.counts.clear()
        return found


@pytest.fixture
def home() -> Iterator[Home]:
    with tidelog.open("memory:") as opened:
        object.__setattr__(opened.context, "clock", FakeClock())
        opened.create_topic("t", PARTITIONS)
        yield opened


@pytest.mark.parametrize("every_s", [0.01, 0.1, 0.7])
def test_idle_consumer_reads_once_or_twice_a_second_whatever_its_timeouts(
    home: Home, every_s: float
) -> None:
    clock = home.context.clock
    with home.consumer("t", "c") as consumer:
        assert consumer.poll(timeout_s=0) == []
        for _ in range(int(3 / every_s)):  # until the waits have grown
            clock.sleep(every_s)
            consumer.poll(timeout_s=0)
        reads = Reads(home)
        for _ in range(int(20 / every_s)):
            clock.sleep(every_s)
            assert consumer.poll(timeout_s=0) == []
        assert 10 <= reads.most() <= 21


def test_busy_partition_does_not_make_quiet_ones_be_read(home: Home) -> None:
    clock = home.context.clock
    with home.consumer("t", "c") as consumer:
        reads = Reads(home)
        for _ in range(200):
            home.append("t", [Event(b"x")], partition=1)
            assert len(consumer.poll(timeout_s=0)) == 1
            consumer.commit()
            clock.sleep(0.05)
        counts = sorted(reads.counts.values())
        assert counts[0] <= counts[1] <= 20
        assert counts[2] >= 200


def test_commits_of_this_process_are_seen_at_once(home: Home) -> None:
    with home.consumer("t", "c") as consumer:
        for _ in range(20):
            consumer.poll(timeout_s=0)
            home.context.clock.sleep(0.3)
        for number in range(5):
            assert consumer.poll(timeout_s=0) == []
            home.append("t", [Event(b"%d" % number)], partition=2)
            assert [event.value for event in consumer.poll(timeout_s=0)] == [b"%d" % number]


def test_first_poll_and_a_poll_after_events_look_at_once(home: Home) -> None:
    home.append("t", [Event(b"%d" % n) for n in range(4)], partition=0)
    home.context.wakeups._newest.clear()  # as if another process had committed them
    with home.consumer("t", "c") as consumer:
        assert len(consumer.poll(2, timeout_s=0)) == 2
        assert len(consumer.poll(2, timeout_s=0)) == 2
        home.append("t", [Event(b"more")], partition=0)
        home.context.wakeups._newest.clear()
        assert len(consumer.poll(2, timeout_s=0)) == 1


def test_seek_and_lag_make_the_next_poll_look(home: Home) -> None:
    home.append("t", [Event(b"x")] * 3, partition=0)
    with home.consumer("t", "c") as consumer:
        while not consumer.poll(timeout_s=0):
            pass
        for _ in range(3):
            assert consumer.poll(timeout_s=0) == []
        consumer.seek(0, 1)
        assert len(consumer.poll(timeout_s=0)) == 2
        assert consumer.poll(timeout_s=0) == []
        home.append("t", [Event(b"y")], partition=0)
        home.context.wakeups._newest.clear()
        assert consumer.poll(timeout_s=0) == [], "it has just looked"
        assert not consumer.caught_up()
        assert len(consumer.poll(timeout_s=0)) == 1


def test_waits_double_from_the_first_to_the_last() -> None:
    pace = Pace()
    assert pace.is_due(5.0, 0)
    waits = []
    for _ in range(10):
        pace.looked(0)
        pace.missed(5.0)
        assert not pace.is_due(5.0, 0)
        waits.append(pace.wait_s(5.0))
    assert waits[0] == pytest.approx(FIRST_S)
    assert waits[-1] == pytest.approx(LAST_S)
    assert waits == sorted(waits)
    assert pace.is_due(5.0, 1), "this process has committed something"
    assert pace.is_due(5.0 + LAST_S, 0)
    pace.found()
    assert pace.is_due(5.0, 0)
