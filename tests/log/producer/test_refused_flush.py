"""Segments of a living producer's flushes that failed for good are listed as unused."""

from __future__ import annotations

import pytest

from tests.support.topic_upkeep import House
from tidelog.errors import AlreadyExistsError, ConflictError
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.producer.producer import Producer
from tidelog.log.unused_objects import read_unused
from tidelog.model.event import Event


@pytest.mark.parametrize("goes_on", [True, False])
def test_refused_flush_is_listed_by_the_next_commit_or_at_the_end(goes_on: bool) -> None:
    house = House()
    topic = house.topic()
    with Producer(house.context, topic) as producer:
        producer.append([Event(b"a")], partition=0)
        before = house.objects()
        with pytest.raises(ConflictError):
            producer.append([Event(b"refused")], partition=0, expected_offset=7)
        [refused] = house.objects() - before
        if goes_on:
            producer.append([Event(b"b")], partition=0)
            assert [row.objects for row in read_unused(house.context, topic, 0)] == [(refused,)]
    assert [row.objects for row in read_unused(house.context, topic, 0)] == [(refused,)]
    report = sweep_home(house.context, 0)
    assert (report.objects_doubted, report.refused) == (0, ())
    assert refused not in house.objects()
    assert house.values(topic) == (["a", "b"] if goes_on else ["a"])


def test_conflict_asks_for_another_offset_and_uploads_once() -> None:
    house = House()
    topic = house.topic()
    with Producer(house.context, topic) as producer, Producer(house.context, topic) as other:
        events = producer.checked([Event(b"b")])
        before = house.objects()
        ends = iter([0, 1])

        def find_end() -> int:
            end = next(ends)
            if not end:
                other.append([Event(b"a")], partition=0)
            return end

        [position] = producer.append_at(events, partition=0, find_end=find_end)
        assert position.offset == 1
        assert len(house.objects() - before) == 2
    assert house.values(topic) == ["a", "b"]


def test_events_that_are_refused_after_a_conflict_leave_those_behind_them_alone() -> None:
    house = House()
    topic = house.topic()
    with Producer(house.context, topic) as producer:
        behind = []

        def find_end() -> int:
            behind.append(producer.send(b"behind"))
            raise AlreadyExistsError("refused")

        with pytest.raises(AlreadyExistsError, match="refused"):
            producer.append_at(producer.checked([Event(b"a")]), partition=0, find_end=find_end)
        producer.flush()
        assert [future.result().offset for future in behind] == [0]
    assert house.values(topic) == ["behind"]
