"""A Kafka group that is ahead of its range, or behind it: refused, without a broker."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sinks.ranges import batch_of, stage
from tidelog.errors import InvalidError
from tidelog.model.address import parse_address
from tidelog.model.event import Event
from tidelog.sinks import kafka
from tidelog.sinks.kafka import KafkaSettings, KafkaSink
from tidelog.store.memory import MemoryStore
from tidelog.testing.clock import FakeClock


class Group:
    """Transactions of a group that has come to some number."""

    number: int | None = None
    sent: list[int]

    def __init__(self, *_: object) -> None:
        pass

    def reached(self) -> int | None:
        return self.number

    def send(self, batch: Any, where: int | None, number: int) -> None:
        self.sent += range(number, number + batch.num_rows)

    def finish(self, end: int) -> None:
        type(self).number = end

    def close(self) -> None:
        pass


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> type[Group]:
    class Fresh(Group):
        sent: list[int] = []  # noqa: RUF012 - of this test

    monkeypatch.setattr(kafka, "Transactions", Fresh)
    monkeypatch.setattr(kafka, "_look", lambda *_: ("topic", 1))
    return Fresh


@pytest.fixture
def sink() -> KafkaSink:
    clock = FakeClock()
    store = MemoryStore(clock)
    place = kafka._place_of(parse_address("kafka://127.0.0.1:9/t"), {})
    settings = KafkaSettings("memory:", 1, "topic", keep_partition=False)
    return KafkaSink(place, settings, lambda _: store, clock)


def test_group_that_is_ahead_of_a_restored_catalog_is_refused(
    group: type[Group], sink: KafkaSink
) -> None:
    """It has sent numbers that the range gives to other events."""
    manifest = stage(sink, [batch_of([Event(b"%d" % n) for n in range(5)])], ordinal=10)
    group.number = 16
    with pytest.raises(InvalidError, match=r"`from/0` comes to number 15 only: the catalog was"):
        sink.publish(manifest)
    assert group.sent == []
    assert group.number == 16


@pytest.mark.parametrize(("reached", "sent"), [(10, 5), (12, 3), (15, 0)])
def test_group_inside_of_the_range_goes_on(
    group: type[Group], sink: KafkaSink, reached: int, sent: int
) -> None:
    manifest = stage(sink, [batch_of([Event(b"%d" % n) for n in range(5)])], ordinal=10)
    group.number = reached
    sink.publish(manifest)
    assert group.sent == list(range(15 - sent, 15))
    assert group.number == 15


@pytest.mark.parametrize("reached", [None, 9])
def test_group_that_is_behind_the_range_is_refused(
    group: type[Group], sink: KafkaSink, reached: int | None
) -> None:
    manifest = stage(sink, [batch_of([Event(b"x")])], ordinal=10)
    group.number = reached
    with pytest.raises(InvalidError, match="came to number 10 at least: Kafka has forgotten it"):
        sink.publish(manifest)
    assert group.sent == []
