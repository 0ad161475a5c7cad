"""Sweeps beside producers: commits between any two calls, stalled uploads, a bad network."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import cast
from unittest import mock

import pytest

from tests.support.topic_upkeep import DAY_S, HOUR_MS, WEEK_S, House
from tidelog.catalog.memory import MemoryCatalog
from tidelog.context import Context
from tidelog.errors import (
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.maintenance import sweep as sweep_module
from tidelog.log.maintenance.object_references import References, check_objects
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.producer.append import Appender
from tidelog.log.topics import create_topic, find_topic, read_head
from tidelog.model import layout
from tidelog.model.times import Backoff
from tidelog.model.topic import Head, Run, Topic, decode_row
from tidelog.store.memory import MemoryStore
from tidelog.store.wrappers import RetryingStore
from tidelog.testing.faults import Fault, Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Scheduler, seeded_ids


class Between:
    """Does something once, between two calls that the sweep makes."""

    def __init__(self, call: int, act: Callable[[], object]) -> None:
        self.calls_left = call
        self.act = act

    def pause(self, _label: str) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            self.act()


def commit_between(call: int) -> None:
    """Segments that are a week old are committed between two calls of a sweep."""
    house = House()
    topic = house.topic(partitions=2)
    appender = house.appender(topic)
    stored = [appender.upload(house.segment([f"p{p}"], p)) for p in range(2)]
    house.clock.advance(WEEK_S)
    house.append(topic, ["old"], 1)

    def commit() -> None:
        for each in stored:
            appender.commit(each, each.segment.pieces[0])

    between = Between(call, commit)
    with mock.patch.object(sweep_module, "_kept_since", lambda info, _: info.modified_ms):
        # Strays of that date go at once, so that nothing but the floor protects the segments.
        sweep_home(house.faulty(Faults(scheduler=cast(Scheduler, between))), HOUR_MS)
    assert between.calls_left <= 0, "the sweep made fewer calls"
    house.clock.advance(WEEK_S)
    sweep_home(house.context, HOUR_MS)
    house.clock.advance(WEEK_S)
    sweep_home(house.context, HOUR_MS)
    assert verify_topic(house.context, topic).findings == ()
    assert (house.values(topic), house.values(topic, 1)) == (["p0"], ["old", "p1"])


SWEEP_CALLS = 26


@pytest.mark.parametrize("call", range(1, SWEEP_CALLS + 1))
def test_a_commit_may_come_between_any_two_of_its_calls(call: int) -> None:
    commit_between(call)


def test_references_read_before_the_floor_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    read, raise_floor = sweep_module.read_whole, sweep_module._raise_floor

    def read_first(
        context: Context, topic: Topic, partition: int, head: Head
    ) -> tuple[Head, References]:
        found = read(context, topic, partition, head)
        raise_floor(context, topic, partition, topic.generation)
        return found

    monkeypatch.setattr(
        sweep_module, "_raise_floor", lambda context, t, p, _: read_head(context, t, p)[0]
    )
    monkeypatch.setattr(sweep_module, "read_whole", read_first)
    caught = 0
    for call in range(1, SWEEP_CALLS + 1):
        try:
            commit_between(call)
        except AssertionError:
            caught += 1
    assert caught >= 2  # once for each partition


@pytest.mark.parametrize("call", range(1, 11))
def test_object_that_goes_with_its_row_between_any_two_calls_is_not_missed(call: int) -> None:
    """A listing may lack an object; before the next look, a trim and a sweep may delete it."""
    house = House()
    topic = house.topic()
    for value in ("a", "b"):
        house.append(topic, [value])
    missing = [house.runs(topic)[0].object]

    def trim_and_sweep() -> None:
        trim_topic(house.context, topic, ToOffsets({0: 1}))
        house.clock.advance(DAY_S)
        assert sweep_home(house.context, HOUR_MS).objects_deleted == 1

    between = Between(call, trim_and_sweep)
    check_objects(house.faulty(Faults(scheduler=cast(Scheduler, between))), topic, missing)
    if between.calls_left > 0:
        trim_and_sweep()
    assert missing[0] not in house.objects()


RATES = {
    Fault.LOSE_REQUEST: 0.02,
    Fault.LOSE_REPLY: 0.08,
    Fault.DUPLICATE: 0.04,
    Fault.DELAY: 0.1,
    Fault.CRASH_BEFORE: 0.002,
    Fault.CRASH_AFTER: 0.002,
    Fault.STALE_LIST: 0.2,
}


class Sweeping:
    """Two sweeps beside producers that stall, in one seed's bad world."""

    def __init__(self, seed: int, rates: dict[Fault, float]) -> None:
        self.scheduler = Scheduler(seed)
        self.faults = Faults(self.scheduler.random, rates, self.scheduler)
        self.store = MemoryStore(self.scheduler.clock)
        self.catalog = MemoryCatalog()
        self.ids = seeded_ids(seed)
        self.quiet = Context(
            self.store, self.catalog, self.scheduler.clock, self.ids, random.Random(seed)
        )
        self.topic = create_topic(self.quiet, Topic("t", self.ids.new(), 2, 0))
        self.acknowledged: dict[str, tuple[int, int]] = {}
        self.deleted = 0

    def context(self) -> Context:
        chance = random.Random(self.scheduler.random.getrandbits(64))
        clock = self.scheduler.clock
        faulty = FaultyStore(self.store, self.faults)
        store = RetryingStore(faulty, clock=clock, random=chance, backoff=Backoff(attempts=4))
        catalog = FaultyCatalog(self.catalog, self.faults, clock)
        return Context(store, catalog, clock, self.ids, chance)

    def stall_s(self, most: int) -> float:
        """Whole days, some beyond the week for which strays stay, so that many wake up together."""
        now_s = self.scheduler.time.monotonic_s()
        woken_s = now_s + 2 * DAY_S * self.scheduler.random.randrange(most)
        return woken_s // DAY_S * DAY_S + DAY_S - now_s

    def produce(self, name: str) -> None:
        context = self.context()
        appender = Appender(context, find_topic(self.quiet, "t"), f"~{name}")
        house = House()
        for number in range(5):
            value = f"{name}-{number}"
            partition = self.scheduler.random.randrange(2)
            segment = house.segment([value], partition)
            try:
                stored = appender.upload(segment)
                if self.scheduler.random.random() < 0.4:
                    context.clock.sleep(self.stall_s(12))
                base, _ = appender.commit(stored, segment.pieces[0])
            except (UnavailableError, UnknownOutcomeError):
                continue  # nobody was told that it is stored
            self.acknowledged[value] = (partition, base)

    def sweep(self) -> None:
        context = self.context()
        for _ in range(6):
            context.clock.sleep(self.stall_s(4))
            with contextlib.suppress(UnavailableError, UnknownOutcomeError):
                self.deleted += sweep_home(context, HOUR_MS).objects_deleted

    def check(self) -> None:
        """The object of every live row exists."""
        keys = {info.key for info in self.store.list()}
        for partition in range(2):
            where = layout.topic_partition(self.topic.incarnation, partition)
            for row in self.catalog.scan(where, "run/", "run0"):
                run = decode_row(row.value, Run, row.row)
                assert run.object in keys, f"offset {run.base} of {partition} is lost"

    def run(self) -> None:
        for name in "abc":
            self.scheduler.spawn(f"producer-{name}", lambda name=name: self.produce(name))
        for number in range(2):
            self.scheduler.spawn(f"sweeper-{number}", self.sweep)
        self.scheduler.run(after_step=self.check)
        for late in self.faults.late:
            late()
        self.check()
        self.scheduler.time.advance(DAY_S)
        assert sweep_home(self.quiet, 0).refused == ()
        sweep_home(self.quiet, 0, ["t"])  # also what producers that died last have left
        report = verify_topic(self.quiet, self.topic)
        assert report.findings == ()
        stored = self.stored()
        assert len(stored) == len(set(stored.values())), "an event is stored twice"
        for value, place in self.acknowledged.items():
            assert stored[place] == value

    def stored(self) -> dict[tuple[int, int], str]:
        house = House()
        house.context = self.quiet
        return {
            (partition, offset): value
            for partition in range(2)
            for offset, value in enumerate(house.values(self.topic, partition))
        }


@pytest.mark.parametrize("seed", range(50))
def test_two_sweeps_and_producers_lose_nothing(seed: int) -> None:
    world = Sweeping(seed, {Fault.DELAY: 0.3})
    world.run()
    assert len(world.acknowledged) == 15


@pytest.mark.parametrize("seed", range(50))
def test_nor_do_they_over_a_bad_network(seed: int) -> None:
    Sweeping(seed, RATES).run()


def test_the_simulation_sweeps_something_and_stalls_somebody() -> None:
    worlds = [Sweeping(seed, {}) for seed in range(5)]
    for world in worlds:
        world.run()
    assert sum(world.deleted for world in worlds) > 5


def test_a_sweep_without_the_floor_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_it(
        context: Context, topic: Topic, partition: int, _raised: object
    ) -> tuple[Head, Head]:
        head, _ = read_head(context, topic, partition)
        return head, head

    monkeypatch.setattr(sweep_module, "raise_head", leave_it)
    caught = 0
    for seed in range(20):
        try:
            Sweeping(seed, {}).run()
        except AssertionError as exc:
            caught += "is lost" in str(exc)
    assert caught > 15
