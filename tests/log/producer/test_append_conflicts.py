"""Appends that meet other writers decide again from the rows that a conflict returns."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tidelog.catalog.base import Row
from tidelog.catalog.memory import MemoryCatalog
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_staged
from tidelog.context import Context
from tidelog.errors import FencedError, NotFoundError
from tidelog.log.partition_reader import Reader
from tidelog.log.producer.append import Appender
from tidelog.log.topics import create_topic, delete_topic
from tidelog.model.event import Event
from tidelog.model.topic import Topic
from tidelog.store.memory import MemoryStore
from tidelog.testing.faults import Faults, FaultyCatalog
from tidelog.testing.scheduler import FakeClock, seeded_ids


class CountingCatalog(MemoryCatalog):
    """Counts the rows that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def get(self, partition: str, row: str) -> Row | None:
        self.reads += 1
        return super().get(partition, row)


class Fixture:
    """A topic whose catalog is reached through the same layer as a remote one."""

    def __init__(self) -> None:
        self.rows, clock = CountingCatalog(), FakeClock()
        lossy = FaultyCatalog(self.rows, Faults(random.Random(1)), clock)
        self.context = Context(MemoryStore(clock), lossy, clock, seeded_ids(1), random.Random(1))
        self.topic = create_topic(self.context, Topic("t", self.context.ids.new(), 1, 0))

    def append(self, appender: Appender, value: bytes) -> int:
        segment = encode_staged([(0, table_of([Event(value)], 0))])
        return appender.commit(appender.upload(segment), segment.pieces[0])[0]

    def stored(self) -> list[bytes | None]:
        stretches = Reader(self.context, self.topic, 0).read(0)
        return [event.value for stretch in stretches for event in stretch.events()]


@pytest.fixture
def world() -> Fixture:
    return Fixture()


def test_conflicts_cost_no_reads(world: Fixture) -> None:
    writers = [Appender(world.context, world.topic, f"~{number}") for number in range(8)]
    world.rows.reads = 0
    for turn in range(20):
        for number, writer in enumerate(writers):
            # Every head that a writer remembers is old: each append meets one conflict.
            assert world.append(writer, b"%d/%d" % (number, turn)) == turn * 8 + number
    assert world.rows.reads == 2 * len(writers)  # the head and the producer's row, once each
    assert len(world.stored()) == 160


def test_fenced_producer_learns_it_from_the_conflict(world: Fixture) -> None:
    older = Appender(world.context, world.topic, "named")
    older.open_named()
    assert world.append(older, b"1") == 0
    newer = Appender(world.context, world.topic, "named")
    newer.open_named()
    world.rows.reads = 0
    with pytest.raises(FencedError, match="opened elsewhere"):
        world.append(older, b"2")
    assert world.rows.reads == 0
    assert world.append(newer, b"3") == 1


def test_append_to_a_deleted_topic_is_refused(world: Fixture) -> None:
    appender = Appender(world.context, world.topic, "~me")
    world.append(appender, b"1")
    delete_topic(world.context, "t")
    with pytest.raises(NotFoundError, match="was deleted"):
        world.append(appender, b"2")


def test_append_beside_a_busy_writer_succeeds(world: Fixture) -> None:
    busy, other = (Appender(world.context, world.topic, f"~{name}") for name in ("busy", "other"))
    world.append(other, b"first")

    class Waiting(FakeClock):
        """The busy writer commits during every wait of another one."""

        waits = 0

        def sleep(self, seconds: float) -> None:
            self.waits += 1
            world.append(busy, b"busy")

    clock = Waiting()
    late = Appender(replace(world.context, clock=clock), world.topic, "~late")
    world.append(late, b"1")
    for number in range(20):
        world.append(busy, b"busy")
        world.append(late, b"%d" % number)
    assert clock.waits == 0
