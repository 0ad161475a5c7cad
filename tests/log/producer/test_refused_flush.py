"""Segments of a living producer's flushes that failed for good are listed as unused."""

from __future__ import annotations

import pytest

from tests.support.topic_upkeep import House
from tidelog.errors import ConflictError
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.unused_objects import read_unused
from tidelog.log.producer.producer import Producer
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
