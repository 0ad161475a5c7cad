"""The newest events of a topic, and new ones as they come, without a consumer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidelog import Event, Home, create_home
from tidelog.errors import InvalidError, NotFoundError
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.settings import Settings

TIME_MS = 1_700_000_000_000


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    with create_home(settings)[0] as home:
        home.create_topic("orders", partitions=3)
        yield home


def fill(home: Home, numbers: range) -> None:
    home.append(
        "orders",
        [Event(b"%d" % n, key=b"%d" % n, id=f"o-{n}", timestamp=TIME_MS + n) for n in numbers],
    )


def values(events: Iterator[Event] | list[Event]) -> list[int]:
    return [int(event.value or b"-1") for event in events]


def test_peek_returns_the_newest_of_all_partitions_by_time(home: Home) -> None:
    assert home.peek("orders") == []
    fill(home, range(100))
    assert values(home.peek("orders")) == list(range(90, 100))
    assert values(home.peek("orders", 1_000)) == list(range(100))
    assert home.lag("orders") == [], "no consumer is left behind"
    with pytest.raises(InvalidError, match="1 or more"):
        home.peek("orders", 0)


def test_peek_reads_further_back_where_events_were_erased(home: Home) -> None:
    fill(home, range(100))
    home.delete("orders", [f"o-{n}" for n in range(40, 100)])
    assert values(home.peek("orders", 5)) == list(range(35, 40))


def test_read_without_a_partition_yields_all_of_them(home: Home) -> None:
    fill(home, range(100))
    assert sorted(values(home.read("orders"))) == list(range(100))
    assert sum(batch.num_rows for batch in home.read_arrow("orders")) == 100
    with pytest.raises(InvalidError, match="give a partition too"):
        next(home.read("orders", start=1))
    first = [event.offset for event in home.read("orders", 0)]
    home.trim("orders", ToOffsets({0: 3}))
    assert [event.offset for event in home.read("orders", 0)] == first[3:]


def test_tail_yields_what_comes_later_once(home: Home) -> None:
    fill(home, range(10))
    events = home.tail("orders", wait_s=0.01)
    fill(home, range(10, 4_000))
    found = values(list(itertools.islice(events, 3_990)))
    assert sorted(found) == list(range(10, 4_000))
    fill(home, range(4_000, 4_003))
    assert sorted(values(list(itertools.islice(events, 3)))) == [4_000, 4_001, 4_002]


def test_tail_skips_trimmed_events_and_ends_with_its_topic(home: Home) -> None:
    home.create_topic("one")
    events = home.tail("one", wait_s=0.01)
    home.append("one", [Event(b"%d" % n) for n in range(10)])
    home.trim("one", ToOffsets({0: 6}), past_readers=True)
    assert values(list(itertools.islice(events, 4))) == [6, 7, 8, 9]
    home.delete_topic("one")
    home.create_topic("one")
    with pytest.raises(NotFoundError, match="created again"):
        next(events)


def test_lag_does_not_count_trimmed_events(home: Home) -> None:
    home.create_topic("one")
    home.append("one", [Event(b"%d" % n) for n in range(10)])
    with home.consumer("one", "billing") as consumer:
        consumer.poll(2)
        consumer.commit()
    home.trim("one", ToOffsets({0: 6}), past_readers=True)
    assert [lag.events for lag in home.lag("one")] == [4]
