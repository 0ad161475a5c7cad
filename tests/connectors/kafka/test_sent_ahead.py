"""A Kafka group that is ahead of its range, or behind it: refused, without a broker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.ranges import batch_of, stage
from tidelog.connectors.kafka import sink as kafka
from tidelog.connectors.kafka.sink import KafkaSettings, KafkaSink
from tidelog.connectors.sink import SinkContext
from tidelog.errors import InvalidError
from tidelog.model.address import parse_address
from tidelog.model.event import Event
from tidelog.model.pipeline import Manifest
from tidelog.store.memory import MemoryStore
from tidelog.testing.scheduler import FakeClock

DAY_S = 24 * 3600


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
    place = kafka._sink_address(parse_address("kafka://127.0.0.1:9/t"), {})
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


def test_range_that_was_never_sent_needs_no_number(group: type[Group], sink: KafkaSink) -> None:
    """As after a week without a restore, when Kafka has forgotten the group's offset."""
    clock = sink._clock
    assert isinstance(clock, FakeClock)
    manifest = stage(sink, [batch_of([Event(b"%d" % n) for n in range(5)])], ordinal=10)
    clock.advance(30 * DAY_S)
    sink.publish(manifest)
    assert group.sent == list(range(10, 15))
    sink.discard(manifest)
    assert list(sink._open_store("").list("")) == []


class DyingError(Exception):
    """As if the process had died."""


def dies_in(group: type[Group], sink: KafkaSink, manifest: Manifest, sent: int = 0) -> None:
    """A driver that dies after it has begun to send, and committed some events."""
    send = group.send

    def dying(self: Group, batch: Any, where: int | None, number: int) -> None:
        if sent:
            send(self, batch.slice(0, sent), where, number)
            self.finish(number + sent)
        raise DyingError

    group.send = dying  # type: ignore[method-assign]
    with pytest.raises(DyingError):
        sink.publish(manifest)
    group.send = send  # type: ignore[method-assign]


def test_range_whose_driver_died_at_its_begin_resumes(group: type[Group], sink: KafkaSink) -> None:
    manifest = stage(sink, [batch_of([Event(b"%d" % n) for n in range(5)])], ordinal=10)
    dies_in(group, sink, manifest)
    assert group.number == 10
    sink.publish(manifest)
    assert group.sent == list(range(10, 15))


@pytest.mark.parametrize("later_s", [-30 * DAY_S, 0, 30 * DAY_S])
def test_first_number_that_is_forgotten_is_not_guessed_by_any_clock(
    group: type[Group], sink: KafkaSink, later_s: int
) -> None:
    """The store dates the object; this machine's clock may be weeks behind, or brokers forget."""
    clock = sink._clock
    assert isinstance(clock, FakeClock)
    manifest = stage(sink, [batch_of([Event(b"%d" % n) for n in range(5)])], ordinal=10)
    dies_in(group, sink, manifest, sent=2)
    group.number = None
    clock.advance(later_s)
    with pytest.raises(InvalidError, match="Kafka has forgotten it"):
        sink.publish(manifest)
    group.number = 12  # as a person says
    sink.publish(manifest)
    assert group.sent == list(range(10, 15))


def test_number_forgotten_since_sending_began_is_not_guessed(
    group: type[Group], sink: KafkaSink
) -> None:
    manifest = stage(sink, [batch_of([Event(b"%d" % n) for n in range(5)])], ordinal=10)
    group.number = 10
    dies_in(group, sink, manifest)
    group.number = None
    with pytest.raises(InvalidError, match="Kafka has forgotten it"):
        sink.publish(manifest)
    assert group.sent == []


def test_group_that_is_behind_the_range_is_refused(group: type[Group], sink: KafkaSink) -> None:
    manifest = stage(sink, [batch_of([Event(b"x")])], ordinal=10)
    group.number = 9
    with pytest.raises(InvalidError, match="came to number 10 at least: Kafka has forgotten it"):
        sink.publish(manifest)
    assert group.sent == []


def test_playback_whose_number_is_forgotten_does_not_repeat_its_last_lot(
    group: type[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "open_kafka", lambda *_, **__: None)
    address = parse_address("kafka://127.0.0.1:9/t")
    begun = SinkContext({}, "id", "drill")
    kafka.open_kafka_playback(address, begun)
    assert group.number == 0, "it has one before a lot is planned"
    kafka.open_kafka_playback(address, replace(begun, resumed=True, in_doubt=True))
    group.number = None
    with pytest.raises(InvalidError, match="playback `drill` had begun to send: Kafka has forgot"):
        kafka.open_kafka_playback(address, replace(begun, resumed=True, in_doubt=True))
    kafka.open_kafka_playback(address, replace(begun, resumed=True))  # its last lot is out
    group.number = None
    kafka.open_kafka_playback(address, replace(begun, name=None))
    assert group.number is None, "a playback without a name has no number"
