"""Whose write landed is proved, never guessed; and an unknown outcome is never called "not stored".

Two processes share a producer's name, replies get lost, reads fail after them, uploads fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tidelog.catalog.base import Change, Put, Row
from tidelog.catalog.memory import MemoryCatalog
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_staged
from tidelog.context import Context
from tidelog.errors import FencedError, InvalidError, UnavailableError, UnknownOutcomeError
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.partition_reader import Reader
from tidelog.log.producer.append import Appender
from tidelog.log.producer.copier import Copier, append_staged
from tidelog.log.producer.idempotent_append import append_once
from tidelog.log.producer.staged import StagedSegment
from tidelog.log.topics import create_topic
from tidelog.model.event import Event
from tidelog.model.topic import Topic
from tidelog.store.memory import MemoryStore
from tidelog.testing.faults import Fault, Faults, FaultyStore
from tidelog.testing.scheduler import FakeClock, seeded_ids


class Hooked:
    """A catalog whose writes of commits, and reads, a test may interfere with."""

    def __init__(self, inner: MemoryCatalog) -> None:
        self.inner = inner
        self.url = inner.url
        self.scan = inner.scan
        self.close = inner.close
        self.on_commit: list[Callable[[Callable[[], None]], None]] = []
        self.reads_fail = False

    def get(self, partition: str, row: str) -> Row | None:
        if self.reads_fail:
            raise UnavailableError("catalog: no answer (injected): try again")
        return self.inner.get(partition, row)

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        def land() -> None:
            self.inner.write(partition, *changes, write_id=write_id)

        is_commit = any(isinstance(c, Put) and c.row.startswith("run/") for c in changes)
        if is_commit and self.on_commit:
            self.on_commit.pop(0)(land)
        else:
            land()


class World:
    """A topic in memory, seen by one process that tests interfere with and by one that is fine."""

    def __init__(self, partitions: int = 1) -> None:
        self.rows, self.clock = MemoryCatalog(), FakeClock()
        objects = MemoryStore(self.clock)
        self.hooked = Hooked(self.rows)
        self.faults = Faults(random.Random(1))
        self.good = Context(objects, self.rows, self.clock, seeded_ids(1), random.Random(1))
        store = FaultyStore(objects, self.faults)
        self.context = Context(store, self.hooked, self.clock, seeded_ids(2), random.Random(2))
        self.topic = create_topic(self.good, Topic("t", self.good.ids.new(), partitions, 0))

    def opened(self, context: Context, name: str = "named") -> Appender:
        appender = Appender(context, self.topic, name)
        appender.open_named()
        return appender

    def append(self, appender: Appender, *values: bytes, first: int | None = None) -> int:
        segment = encode_staged([(0, table_of([Event(value) for value in values], 0))])
        sequences = None if first is None else range(first, first + len(values))
        stored = appender.upload(segment)
        return appender.commit(stored, segment.pieces[0], sequences)[0]

    def stored(self, partition: int = 0) -> list[bytes | None]:
        stretches = Reader(self.good, self.topic, partition).read(0)
        return [event.value for stretch in stretches for event in stretch.events()]


@pytest.fixture
def world() -> World:
    return World()


def _unknown() -> UnknownOutcomeError:
    return UnknownOutcomeError("catalog: the reply was lost (injected): read back")


def _lose(land: Callable[[], None]) -> None:
    land()
    raise _unknown()


def _drop(land: Callable[[], None]) -> None:
    raise _unknown()


@pytest.mark.parametrize("batches", [1, 3, 12])
def test_batch_of_a_newer_process_is_not_taken_for_ours(world: World, batches: int) -> None:
    """It has the same sequence and the same offset, as both go on where the name was."""
    old = world.opened(world.context)

    def overtake(land: Callable[[], None]) -> None:
        new = world.opened(world.good)
        for number in range(batches):
            world.append(new, b"newer", first=number)
        raise _unknown()

    world.hooked.on_commit = [overtake]
    with pytest.raises(FencedError):
        world.append(old, b"older", first=0)
    assert world.stored() == [b"newer"] * batches


@pytest.mark.parametrize("batches", [1, 3, 12])
def test_batch_that_landed_before_the_fence_is_acknowledged(world: World, batches: int) -> None:
    """Also when the newer process has stored more batches since than the row keeps."""
    old = world.opened(world.context)

    def land_then_overtake(land: Callable[[], None]) -> None:
        land()
        new = world.opened(world.good)
        for number in range(batches):
            world.append(new, b"newer", first=1 + number)
        raise _unknown()

    world.hooked.on_commit = [land_then_overtake]
    assert world.append(old, b"older", first=0) == 0
    assert world.stored() == [b"older", *[b"newer"] * batches]


def test_fenced_appender_stays_fenced_in_every_partition() -> None:
    world = World(partitions=2)
    old = world.opened(world.good)
    world.append(old, b"1", first=0)
    Appender(world.good, world.topic, "named").open_named()
    segment = encode_staged([(1, table_of([Event(b"2")], 0))])
    for _ in range(3):
        with pytest.raises(FencedError):
            world.append(old, b"2", first=1)
        with pytest.raises(FencedError):
            old.commit(old.upload(segment), segment.pieces[0], range(1, 2))
    assert world.stored() == [b"1"]
    assert world.stored(1) == []


def test_fence_is_seen_by_an_appender_that_has_read_the_newer_row(world: World) -> None:
    """A row that is read again after a conflict may be a newer process's."""
    old = world.opened(world.good)
    world.opened(world.good)
    old._forget(0)
    with pytest.raises(FencedError):
        world.append(old, b"x", first=0)
    assert world.stored() == []


def test_reads_that_fail_after_a_lost_reply_leave_the_outcome_unknown(world: World) -> None:
    appender = Appender(world.context, world.topic, "~me")

    def lose_and_fail(land: Callable[[], None]) -> None:
        land()
        world.hooked.reads_fail = True
        raise _unknown()

    world.append(appender, b"first")
    world.hooked.on_commit = [lose_and_fail]
    with pytest.raises(UnknownOutcomeError, match="lost"):
        world.append(appender, b"second")
    assert world.stored() == [b"first", b"second"]


def test_refused_repeat_after_a_lost_reply_is_settled(world: World) -> None:
    """The credentials have expired when the write is sent again, and the first one lands late."""
    appender = world.opened(world.context)
    late: list[Callable[[], None]] = []

    def delay(land: Callable[[], None]) -> None:
        late.append(land)
        raise _unknown()

    def refuse(land: Callable[[], None]) -> None:
        late.pop()()
        raise InvalidError("catalog: the credentials have expired (injected): renew them")

    world.hooked.on_commit = [delay, refuse]
    assert world.append(appender, b"mine") == 0
    assert world.stored() == [b"mine"]


def test_failed_write_without_a_lost_reply_stores_nothing(world: World) -> None:
    appender = Appender(world.context, world.topic, "~me")

    def refuse(land: Callable[[], None]) -> None:
        raise UnavailableError("catalog: refused (injected): try again")

    world.hooked.on_commit = [refuse]
    with pytest.raises(UnavailableError):
        world.append(appender, b"x")
    assert world.stored() == []


@pytest.mark.parametrize("then", ["unavailable", "conflict"])
def test_request_that_lands_late_is_acknowledged(world: World, then: str) -> None:
    """The first request is under way when the second one is refused."""
    appender = world.opened(world.context)
    late: list[Callable[[], None]] = []

    def delay(land: Callable[[], None]) -> None:
        late.append(land)
        raise _unknown()

    def refuse(land: Callable[[], None]) -> None:
        late.pop()()
        if then == "unavailable":
            raise UnavailableError("catalog: refused (injected): try again")
        world.append(world.opened(world.good), b"newer")
        trim_topic(world.good, world.topic, ToOffsets({0: 1}))
        land()  # refused, as no row carries the id of the write any more

    world.hooked.on_commit = [delay, refuse]
    assert world.append(appender, b"mine") == 0
    if then == "unavailable":
        assert world.stored() == [b"mine"]


@pytest.mark.parametrize("fault", [Fault.LOSE_REQUEST, Fault.LOSE_REPLY])
def test_failed_upload_alone_stores_nothing_and_says_so(world: World, fault: Fault) -> None:
    appender = Appender(world.context, world.topic, "~me")
    world.faults.on_next("put", fault)
    with pytest.raises(UnavailableError, match="nothing was stored"):
        world.append(appender, b"x")
    world.faults.on_next("put", fault)
    with pytest.raises(UnavailableError, match="nothing was stored"):
        append_once(world.context, world.topic, "key", [Event(b"x")])
    assert world.stored() == []


def test_failed_copy_of_a_staged_segment_stores_nothing_and_says_so(world: World) -> None:
    segment = encode_staged([(0, table_of([Event(b"x")], 0))])
    world.good.store.put("staged", segment.data)
    staged = StagedSegment("staged", segment.pieces)
    world.faults.on_next("copy", Fault.LOSE_REPLY)
    with pytest.raises(UnavailableError, match="nothing was stored"):
        append_staged(Copier(world.context, world.topic, "driver"), [staged])
    assert world.stored() == []
    append_staged(Copier(world.context, world.topic, "driver"), [staged])
    assert world.stored() == [b"x"]


def test_two_drivers_store_the_same_staged_piece_once(world: World) -> None:
    """The other driver's commit has the same sequences; it is not ours, and it is enough."""
    segment = encode_staged([(0, table_of([Event(b"x")], 0))])
    world.good.store.put("staged", segment.data)
    staged = StagedSegment("staged", segment.pieces)

    def overtake(land: Callable[[], None]) -> None:
        append_staged(Copier(world.good, world.topic, "driver"), [staged])
        raise _unknown()

    world.hooked.on_commit = [overtake]
    append_staged(Copier(world.context, world.topic, "driver"), [staged])
    assert world.stored() == [b"x"]
