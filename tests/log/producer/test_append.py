"""Committing: lost replies above all, settled by the producer's row and by the run itself."""

from __future__ import annotations

import random

import pytest

from tidelog.catalog.base import Delete
from tidelog.catalog.memory import MemoryCatalog
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_staged
from tidelog.context import Context
from tidelog.errors import FencedError, NotFoundError, UnavailableError, UnknownOutcomeError
from tidelog.log.partition_reader import Reader
from tidelog.log.producer.append import Appender
from tidelog.log.topics import create_topic, delete_topic
from tidelog.model import layout
from tidelog.model.event import Event
from tidelog.model.topic import Topic
from tidelog.store.memory import MemoryStore
from tidelog.testing.faults import Fault, Faults, FaultyCatalog
from tidelog.testing.scheduler import FakeClock, seeded_ids


class Fixture:
    """A topic on memory, and a log whose catalog is reached over a bad network."""

    def __init__(self) -> None:
        self.rows, self.objects = MemoryCatalog(), MemoryStore(FakeClock())
        self.faults = Faults(random.Random(1))
        clock = FakeClock()
        self.good = Context(self.objects, self.rows, clock, seeded_ids(1), random.Random(1))
        lossy = FaultyCatalog(self.rows, self.faults, clock)
        self.context = Context(self.objects, lossy, clock, seeded_ids(2), random.Random(2))
        self.topic = create_topic(self.good, Topic("t", self.good.ids.new(), 1, 0))
        self.appender = Appender(self.context, self.topic, "~me")

    def append(self, *values: bytes, appender: Appender | None = None) -> int:
        segment = encode_staged([(0, table_of([Event(v) for v in values], 0))])
        appender = appender or self.appender
        return appender.commit(appender.upload(segment), segment.pieces[0])[0]

    def stored(self) -> list[bytes | None]:
        stretches = Reader(self.good, self.topic, 0).read(0)
        return [event.value for stretch in stretches for event in stretch.events()]


@pytest.fixture
def world() -> Fixture:
    return Fixture()


@pytest.mark.parametrize("lost", range(1, 6))
def test_lost_replies_are_settled(world: Fixture, lost: int) -> None:
    world.append(b"before")
    world.faults.on_next("write", *[Fault.LOSE_REPLY] * lost)
    assert world.append(b"a", b"b") == 1
    assert world.append(b"after") == 3
    assert world.stored() == [b"before", b"a", b"b", b"after"]


@pytest.mark.parametrize("lost", range(1, 6))
def test_lost_requests_are_sent_again(world: Fixture, lost: int) -> None:
    world.faults.on_next("write", *[Fault.LOSE_REQUEST] * lost)
    assert world.append(b"a") == 0
    assert world.stored() == [b"a"]


def test_a_lost_reply_is_settled_also_when_another_has_appended_since(world: Fixture) -> None:
    other = Appender(world.good, world.topic, "~other")
    landed = world.rows.write

    def write_and_overtake(*args: object, **options: object) -> None:
        world.rows.write = landed  # type: ignore[method-assign]
        landed(*args, **options)  # type: ignore[arg-type]
        world.append(b"overtakes", appender=other)

    world.rows.write = write_and_overtake  # type: ignore[method-assign,assignment]
    world.faults.on_next("write", Fault.LOSE_REPLY)
    assert world.append(b"mine") == 0
    assert world.stored() == [b"mine", b"overtakes"]


def test_a_lost_reply_is_settled_by_the_run_when_the_producers_row_was_swept(
    world: Fixture,
) -> None:
    other = Appender(world.good, world.topic, "~other")
    where = layout.topic_partition(world.topic.incarnation, 0)
    landed = world.rows.write

    def write_then_sweep(*args: object, **options: object) -> None:
        world.rows.write = landed  # type: ignore[method-assign]
        landed(*args, **options)  # type: ignore[arg-type]
        landed(where, Delete(layout.producer_row("~me")), write_id="sweep")
        world.append(b"overtakes", appender=other)

    world.rows.write = write_then_sweep  # type: ignore[method-assign,assignment]
    world.faults.on_next("write", Fault.LOSE_REPLY)
    world.append(b"mine")
    assert world.stored() == [b"mine", b"overtakes"]


def test_conflicts_are_retried_at_the_new_end(world: Fixture) -> None:
    other = Appender(world.good, world.topic, "~other")
    assert world.append(b"1") == 0
    assert world.append(b"2", appender=other) == 1
    assert world.append(b"3") == 2
    assert world.append(b"4", appender=other) == 3


def test_a_newer_epoch_fences(world: Fixture) -> None:
    old = Appender(world.good, world.topic, "named")
    old.open_named()
    world.append(b"1", appender=old)
    Appender(world.good, world.topic, "named").open_named()
    with pytest.raises(FencedError):
        world.append(b"2", appender=old)
    assert world.stored() == [b"1"]


def test_a_deleted_topic_takes_nothing_more(world: Fixture) -> None:
    world.append(b"1")
    delete_topic(world.good, "t")
    with pytest.raises(NotFoundError):
        world.append(b"2")


def test_a_server_that_never_answers_ends_as_unknown(world: Fixture) -> None:
    world.faults.rates = {Fault.LOSE_REQUEST: 1.0}
    with pytest.raises((UnknownOutcomeError, UnavailableError)):
        world.append(b"1")
    world.faults.rates = {}
    assert world.stored() == []
