"""Appending once by a key: repeats, crashes after every call, two at once in a bad world."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tidelog.catalog.base import Delete
from tidelog.catalog.memory import MemoryCatalog
from tidelog.context import Context
from tidelog.errors import (
    AlreadyExistsError,
    InvalidError,
    NotFoundError,
    PartialAppendError,
    TidelogError,
    UnknownOutcomeError,
)
from tidelog.log.maintenance.obsolete_rows import PRODUCER_EXPIRES_MS
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.partition_reader import Reader
from tidelog.log.producer import idempotent_append as once
from tidelog.log.producer.append import Appender
from tidelog.log.producer.idempotent_append import append_once
from tidelog.log.topics import create_topic, delete_topic
from tidelog.model import layout
from tidelog.model.event import Event, Positions
from tidelog.model.topic import Topic
from tidelog.store.memory import MemoryStore
from tidelog.testing.faults import Fault, Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash, FakeClock, Scheduler, seeded_ids

EVENTS = [Event(b"v%d" % n, b"k%d" % n if n % 3 else None) for n in range(12)]
RATES = {
    Fault.LOSE_REQUEST: 0.05,
    Fault.LOSE_REPLY: 0.1,
    Fault.DUPLICATE: 0.05,
    Fault.DELAY: 0.3,
    Fault.CRASH_BEFORE: 0.02,
    Fault.CRASH_AFTER: 0.02,
}


class World:
    """A topic of three partitions, on memory."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.rows, self.objects = MemoryCatalog(), MemoryStore(self.clock)
        self.good = Context(self.objects, self.rows, self.clock, seeded_ids(1), random.Random(1))
        self.topic = create_topic(self.good, Topic("t", self.good.ids.new(), 3, 0))

    def context(self, faults: Faults, scheduler: Scheduler | None = None, seed: int = 2) -> Context:
        clock = scheduler.clock if scheduler else self.clock
        catalog = FaultyCatalog(self.rows, faults, clock)
        store = FaultyStore(self.objects, faults)
        return Context(store, catalog, clock, seeded_ids(seed), random.Random(seed))

    def stored(self) -> dict[tuple[int, int], bytes | None]:
        return {
            (partition, event.offset or 0): event.value
            for partition in range(3)
            for stretch in Reader(self.good, self.topic, partition).read(0)
            for event in stretch.events()
        }

    def check(self, positions: Positions) -> None:
        """Each event stands where it was said to, and nothing else is there."""
        found = self.stored()
        assert len(found) == len(EVENTS)
        for event, at in zip(EVENTS, positions, strict=True):
            assert found[at.partition, at.offset] == event.value


def test_repeats_get_the_first_positions_and_store_nothing() -> None:
    world = World()
    first = append_once(world.good, world.topic, "key", EVENTS)
    world.check(first)
    for _ in range(3):
        assert list(append_once(world.good, world.topic, "key", EVENTS)) == list(first)
    world.check(first)


def test_another_key_stores_the_same_events_again() -> None:
    world = World()
    append_once(world.good, world.topic, "key", EVENTS)
    append_once(world.good, world.topic, "other", EVENTS)
    assert len(world.stored()) == 2 * len(EVENTS)


def test_a_key_that_was_used_for_other_events_is_refused() -> None:
    world = World()
    append_once(world.good, world.topic, "key", EVENTS)
    for events in (EVENTS[:-1], [*EVENTS, Event(b"more")], [Event(b"else"), *EVENTS[1:]]):
        with pytest.raises(AlreadyExistsError, match="key of its own"):
            append_once(world.good, world.topic, "key", events)
    assert len(world.stored()) == len(EVENTS)


@pytest.mark.parametrize("key", [b"k1", b"k2", b"k3", b"k4", None])
@pytest.mark.parametrize("other", [b"k1", b"k2", b"k3", b"k4", None])
def test_a_key_is_refused_for_other_events_wherever_they_go(
    key: bytes | None, other: bytes | None
) -> None:
    world = World()
    first = append_once(world.good, world.topic, "key", [Event(b"one", key)])
    with pytest.raises(AlreadyExistsError, match="key of its own"):
        append_once(world.good, world.topic, "key", [Event(b"other", other)])
    assert list(world.stored().values()) == [b"one"]
    again = append_once(world.good, world.topic, "key", [Event(b"one", key)])
    assert list(again) == list(first)


def run_rivals(seed: int) -> set[bytes]:
    """Three processes use one key for two requests in a bad world. Returns what is stored."""
    world = World()
    scheduler = Scheduler(seed)
    faults = Faults(scheduler.random, RATES, scheduler)
    requests = [[Event(b"%d-%d" % (n, k), b"k%d" % k) for k in range(n + 1, n + 3)] for n in (0, 1)]

    def rival(number: int) -> None:
        for attempt in range(3):
            context = world.context(faults, scheduler, seed=number * 10 + attempt)
            with contextlib.suppress(TidelogError):
                append_once(context, world.topic, f"key-{seed}", requests[number % 2])
            scheduler.sleep(scheduler.random.random())

    for number in range(3):
        scheduler.spawn(str(number), functools.partial(rival, number))
    scheduler.run()
    found = [value or b"" for value in world.stored().values()]
    assert len(found) == len(set(found)), f"seed {seed}: an event is stored twice"
    return set(found)


def test_a_key_is_for_the_events_of_one_request_in_a_bad_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mixed(seed: int) -> bool:
        return len({value[:1] for value in run_rivals(seed)}) > 1

    assert not [seed for seed in range(60) if mixed(seed)]
    monkeypatch.setattr(once._Request, "_claim", lambda request: None)
    assert any(map(mixed, range(60))), "it would not notice a key that no request claims"


def test_error_shows_what_is_stored_when_the_key_expires_and_is_used_for_other_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another request with the key commits between two commits of this one."""
    world = World()
    store = once._Request.store

    def interrupted(self: Any, parts: Any) -> Iterator[Any]:
        for number, each in enumerate(store(self, parts)):
            yield each
            if number == 0 and len(parts) == 3:
                where = layout.topic_partition(world.topic.incarnation, parts[0].partition)
                row = layout.producer_row(self._producer)
                world.rows.write(where, Delete(row), write_id="swept")
                key = parts[2].table.column("key")[0].as_py()  # goes to the third partition
                append_once(world.good, world.topic, "key", [Event(b"other", key)])

    monkeypatch.setattr(once._Request, "store", interrupted)
    with pytest.raises(PartialAppendError, match="append the remainder with another key") as told:
        append_once(world.good, world.topic, "key", EVENTS)
    assert isinstance(told.value.__cause__, AlreadyExistsError)
    found = world.stored()
    for event, at in zip(EVENTS, told.value.positions, strict=True):
        assert at is None or found[at.partition, at.offset] == event.value
    rest = [EVENTS[index] for index in told.value.remainder]
    assert len(found) == 1 + len(EVENTS) - len(rest)
    append_once(world.good, world.topic, "another key", rest)
    assert sorted(world.stored().values()) == sorted([*(e.value for e in EVENTS), b"other"])


@pytest.mark.parametrize(
    ("meanwhile", "error", "match"),
    [("delete", NotFoundError, "was deleted"), ("expire", UnknownOutcomeError, "has expired")],
)
def test_row_of_another_request_that_goes_is_explained(
    monkeypatch: pytest.MonkeyPatch, meanwhile: str, error: type[Exception], match: str
) -> None:
    """Another request stores under the key, and its row goes before this one reads it."""
    world = World()
    event, find, looks = EVENTS[0], once._Request.stored, 0

    def look(self: Any, part: Any) -> int | None:
        nonlocal looks
        looks += 1
        if looks == 3:  # this request, after its commit was refused
            if meanwhile == "delete":
                delete_topic(world.good, "t")
            where = layout.topic_partition(world.topic.incarnation, part.partition)
            world.rows.write(where, Delete(layout.producer_row(self._producer)), write_id="gone")
        found = find(self, part)
        if looks == 1:
            append_once(world.good, world.topic, "key", [event])
        return found

    monkeypatch.setattr(once._Request, "stored", look)
    with pytest.raises(error, match=match):
        append_once(world.good, world.topic, "key", [event])
    assert looks == 3


def test_bad_events_are_refused_before_anything_is_stored() -> None:
    world = World()
    with pytest.raises(InvalidError):
        append_once(world.good, world.topic, "key", [])
    with pytest.raises(InvalidError):
        append_once(world.good, world.topic, "key", [*EVENTS, Event(b"x" * (2 << 20))])
    assert world.stored() == {}
    assert list(world.objects.list()) == []


def test_sweeps_forget_keys_a_week_after_one_found_them_silent() -> None:
    world = World()
    first = append_once(world.good, world.topic, "key", EVENTS)
    world.clock.advance(PRODUCER_EXPIRES_MS / 1000 - 60)
    sweep_home(world.good, 0)
    assert list(append_once(world.good, world.topic, "key", EVENTS)) == list(first)
    world.clock.advance(120)
    Appender(world.good, world.topic, "later").open_named()  # the topic itself shows a later time
    assert sweep_home(world.good, 0).producers_removed == 0
    assert list(append_once(world.good, world.topic, "key", EVENTS)) == list(first)
    world.clock.advance(PRODUCER_EXPIRES_MS / 1000 + 60)
    Appender(world.good, world.topic, "later").open_named()
    assert sweep_home(world.good, 0).producers_removed == 3
    append_once(world.good, world.topic, "key", EVENTS)
    assert len(world.stored()) == 2 * len(EVENTS)


def test_a_crash_after_every_call_is_mended_by_a_repeat() -> None:
    crashed = 0
    for call in range(1, 100):
        world = World()
        try:
            append_once(world.context(Faults(crash_after_call=call)), world.topic, "key", EVENTS)
            done = True
        except Crash:
            done = False
        world.check(append_once(world.good, world.topic, "key", EVENTS))
        if done:
            break
        crashed += 1
    assert crashed >= 10


@pytest.mark.parametrize("lost", [Fault.LOSE_REPLY, Fault.LOSE_REQUEST, Fault.DUPLICATE])
@pytest.mark.parametrize("write", range(3))
def test_lost_and_doubled_writes_are_settled(lost: Fault, write: int) -> None:
    world = World()
    faults = Faults()
    faults.on_next("write", *[Fault.NONE] * write, lost)
    world.check(append_once(world.context(faults), world.topic, "key", EVENTS))


@pytest.mark.parametrize("block", range(4))
def test_several_at_once_in_a_bad_world_store_one(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        world = World()
        scheduler = Scheduler(seed)
        faults = Faults(scheduler.random, RATES, scheduler)
        told: list[Positions] = []

        def repeat(
            number: int,
            world: World = world,
            scheduler: Scheduler = scheduler,
            faults: Faults = faults,
            told: list[Positions] = told,
        ) -> None:
            for attempt in range(5):
                context = world.context(faults, scheduler, seed=number * 10 + attempt)
                try:
                    told.append(append_once(context, world.topic, "key", EVENTS))
                except AlreadyExistsError:
                    raise
                except TidelogError:
                    pass  # the next attempt tells
                scheduler.sleep(scheduler.random.random())

        for number in range(3):
            scheduler.spawn(str(number), lambda number=number: repeat(number))  # type: ignore[misc]
        scheduler.run()
        last = append_once(world.good, world.topic, "key", EVENTS)
        world.check(last)
        for positions in told:
            assert list(positions) == list(last), f"seed {seed}"


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_requests_with_one_key_one_is_refused(first: int) -> None:
    world = World()
    requests = [[Event(b"one", b"k")], [Event(b"other", b"k")]]

    class Late(FaultyCatalog):
        """Finds no row; and then somebody else is there before it writes."""

        def write(self, *given: Any, **named: Any) -> None:
            if not world.stored():
                append_once(world.good, world.topic, "key", requests[first])
            super().write(*given, **named)

    context = world.context(Faults())
    context = replace(context, catalog=Late(world.rows, Faults(), world.clock))
    with pytest.raises(AlreadyExistsError, match="other events"):
        append_once(context, world.topic, "key", requests[1 - first])
    assert list(world.stored().values()) == [requests[first][0].value]
