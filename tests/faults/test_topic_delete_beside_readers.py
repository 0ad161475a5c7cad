"""Reading while a topic is deleted, and created again: deleted, never damaged, never mixed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from tests.support.topic_upkeep import House
from tidelog.connectors.source import SourcePartition, SourceRange
from tidelog.connectors.topic.source import TopicSource
from tidelog.context import Context
from tidelog.errors import NotFoundError
from tidelog.journal.lookup import Lookups
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.partition_reader import Reader, find_offset
from tidelog.log.topics import create_topic, delete_topic, find_topic, read_head
from tidelog.model.topic import Topic
from tidelog.playback.merge import play_events
from tidelog.testing.faults import Faults
from tidelog.testing.scheduler import Crash, Scheduler

OLD = [f"old {number}" for number in range(6)]
NEW = [f"new {number}" for number in range(9)]
PARTS = (5, 6, 7, 8, 10, 12)  # calls of a delete; the fifth closes the head


class Between:
    """Does something once, before a call that a reader makes."""

    def __init__(self, call: int, act: Callable[[], object]) -> None:
        self.calls_left = call
        self.act = act

    def pause(self, label: str) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            self.act()


def read(context: Context, topic: Topic) -> list[str]:
    return _values(e.value for s in Reader(context, topic, 0).read(0) for e in s.events())


def play(context: Context, topic: Topic) -> list[str]:
    return _values(event.value for event in play_events(context, topic.name, 0, 10**12))


def find(context: Context, topic: Topic) -> list[str]:
    find_offset(context, topic, 0, 10**12)
    return OLD


def look_up(context: Context, topic: Topic) -> list[str]:
    with contextlib.suppress(NotFoundError):
        Lookups(context, None).of(topic).get("no such id")
    return OLD


def verify(context: Context, topic: Topic) -> list[str]:
    assert verify_topic(context, topic).errors == 0
    return OLD


def pump(context: Context, topic: Topic) -> list[str]:
    @contextlib.contextmanager
    def open_context() -> Iterator[Context]:
        yield context

    source = TopicSource(open_context, topic.name)
    range_ = SourceRange(SourcePartition(topic.name, "0"), "0", "6", 0, topic.incarnation)
    chunks = list(source.read(range_))
    return _values(v.as_py() for chunk in chunks for v in chunk.batch.column("value"))


def _values(found: Iterator[bytes | None]) -> list[str]:
    return [(value or b"").decode() for value in found]


READERS = [read, play, find, look_up, verify, pump]


def filled() -> tuple[House, Topic]:
    house = House()
    topic = house.topic("t")
    for number, value in enumerate(OLD):
        house.append(topic, [value], at_ms=number * 1_000)
    return house, topic


def replace(house: House) -> None:
    delete_topic(house.context, "t")
    create_topic(house.context, Topic("t", house.ids.new(), 1, 0))
    again = find_topic(house.context, "t")
    for number, value in enumerate(NEW):
        house.append(again, [value], at_ms=number * 1_000)


def delete_in_part(calls: int) -> Callable[[House], None]:
    def delete(house: House) -> None:
        with contextlib.suppress(Crash):
            delete_topic(house.faulty(Faults(crash_after_call=calls)), "t")

    return delete


@pytest.mark.parametrize("reader", READERS, ids=lambda each: each.__name__)
@pytest.mark.parametrize(
    "act",
    [replace, *(delete_in_part(calls) for calls in PARTS)],
    ids=["replaced", *(f"{calls} calls" for calls in PARTS)],
)
def test_reader_says_that_the_topic_was_deleted(
    reader: Callable[[Context, Topic], list[str]], act: Callable[[House], None]
) -> None:
    """A delete, or a part of one, comes before any of a reader's calls."""
    refused = 0
    for call in range(1, 200):
        house, topic = filled()
        between = Between(call, lambda house=house: act(house))  # type: ignore[misc]
        context = house.faulty(Faults(scheduler=cast(Scheduler, between)))
        try:
            found = reader(context, topic)
        except NotFoundError as exc:
            refused += "delete" in str(exc) or "not found" in str(exc)
        else:  # one that goes by the name may begin after it was created again
            assert found == OLD or (reader is play and found == NEW)
        if between.calls_left > 0:
            break
    else:
        pytest.fail("the reader never ended")
    assert refused or reader is look_up


def test_closed_head_is_a_deleted_topic() -> None:
    house, topic = filled()
    delete_in_part(5)(house)
    with pytest.raises(NotFoundError, match="is being deleted"):
        read_head(house.context, topic, 0)
    delete_topic(house.context, "t")
    with pytest.raises(NotFoundError, match="was deleted"):
        read_head(house.context, topic, 0)


def test_consumer_of_a_deleted_topic_leaves_no_name_behind() -> None:
    from tidelog.log.consumer.leases import Leases

    house, topic = filled()
    replace(house)
    member = Leases(house.context, topic, "c", "earliest")
    with pytest.raises(NotFoundError, match="another one has its name now"):
        member.join()
    assert list(house.catalog.scan(f"consumer/{topic.incarnation}", "consumer/")) == []


def test_consumer_that_stalls_before_it_is_listed_leaves_no_name_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The topic is deleted between the look at it and the write."""
    from tidelog.log.consumer import leases

    house, topic = filled()
    member = leases.Leases(house.context, topic, "c", "earliest")
    real = leases.check_exists

    def stall(*given: Any) -> Any:
        found = real(*given)
        monkeypatch.setattr(leases, "check_exists", real)
        delete_topic(house.context, "t")
        return found

    monkeypatch.setattr(leases, "check_exists", stall)
    with pytest.raises(NotFoundError, match="was deleted"):
        member.join()
    rows = [row.row for row in house.catalog.scan(f"consumer/{topic.incarnation}")]
    assert rows == ["closed"]
