"""The topic sink under a real cycle: dying after every call, two drivers at once, sweeps anywhere.

Invariant: each source event is in the topic once, and the events of a source partition stand in
each partition of the topic in their order.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from tests.support.fake_pipelines import ListSource
from tests.support.rounds import rounds
from tidelog.catalog.base import Put
from tidelog.catalog.memory import MemoryCatalog
from tidelog.codec.event_batch import table_of, with_position
from tidelog.connectors.source import Chunk, SourceRange
from tidelog.connectors.topic.segments import EventLimit
from tidelog.connectors.topic.sink import TopicSettings, TopicSink
from tidelog.context import Context
from tidelog.errors import CorruptError, FencedError, TidelogError
from tidelog.log.ledger import announce_erasure, enter_erased
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.partition_reader import Reader
from tidelog.log.topics import create_topic, find_topic
from tidelog.maintenance.pipeline_sweep import PipelineSweep, sweep_pipeline
from tidelog.model import layout
from tidelog.model.event import Event
from tidelog.model.pipeline import Begin
from tidelog.model.times import Backoff
from tidelog.model.topic import Topic
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.store.memory import MemoryStore
from tidelog.store.wrappers import RetryingStore
from tidelog.testing.faults import Fault, Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash, FakeClock, Scheduler, seeded_ids

T = TypeVar("T")
PIPELINE = "pipe"
PARTITIONS = 3
STEP = 9  # offsets of a range
RATES = {
    Fault.LOSE_REQUEST: 0.02,
    Fault.LOSE_REPLY: 0.05,
    Fault.DUPLICATE: 0.03,
    Fault.DELAY: 0.12,
    Fault.CRASH_BEFORE: 0.008,
    Fault.CRASH_AFTER: 0.008,
}


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range makes several segments, and a segment has several pieces."""
    monkeypatch.setattr("tidelog.log.producer.staged.SEGMENT_EVENTS_MAX", 4)


class KeyedSource(ListSource):
    """Some events have keys, some have none."""

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        for chunk in super().read(range):
            if chunk.batch.num_rows == 0:
                yield chunk
                continue
            offset = chunk.batch.column("offset")[0].as_py()
            value = chunk.batch.column("value")[0].as_py()
            key = b"%d" % (offset % 5) if offset % 4 else None
            table = table_of([Event(value, key)], 0)
            where = (range.partition.topic, int(range.partition.name), offset)
            yield Chunk(with_position(table.to_batches()[0], *where), chunk.position)


class World:
    """A topic in memory, and drivers that bring events into it."""

    def __init__(self, source: ListSource | None = None) -> None:
        self.clock = FakeClock()
        self.rows, self.objects = MemoryCatalog(), MemoryStore(self.clock)
        self.source = source or KeyedSource(2, 25)
        self.epoch = self.seed = 0
        self.plain = Context(self.objects, self.rows, self.clock, seeded_ids(7), random.Random(7))
        wanted = Topic("t", self.plain.ids.new(), PARTITIONS, 0)
        self.topic = create_topic(self.plain, wanted)

    def context(self, faults: Faults, scheduler: Scheduler | None = None) -> Context:
        clock = scheduler.clock if scheduler else self.clock
        self.seed += 1  # ids of two processes never meet
        chance, ids = random.Random(self.seed), seeded_ids(1_000 + self.seed)
        store = RetryingStore(
            FaultyStore(self.objects, faults),
            clock=clock,
            random=chance,
            backoff=Backoff(attempts=3),
        )
        return Context(store, FaultyCatalog(self.rows, faults, clock), clock, ids, chance)

    def sink(self, context: Context) -> TopicSink:
        @contextlib.contextmanager
        def open_context() -> Iterator[Context]:
            yield context

        settings = TopicSettings(self.topic, "memory:", False, EventLimit(1 << 20))
        return TopicSink(open_context, settings, lambda _: context.store)

    def drive(self, context: Context) -> bool:
        """A driver that drains what is there; whether another one took a partition meanwhile."""
        self.epoch += 1
        pipeline = Pipeline("p", PIPELINE, self.source, self.sink(context), LocalWorkers())
        cycle = Cycle(context, pipeline, f"driver-{self.epoch}")
        partitions = self.source.partitions()
        bounds = self.source.bounds(partitions)
        for _ in range(60):
            for partition in partitions:
                if not cycle.is_ready(partition):
                    cycle.claim(partition, Begin("0", "earliest"))
            limits = {
                p: str(min(int(bounds[p].end), int(cycle.position(p)) + STEP)) for p in partitions
            }
            report = cycle.run(limits, bounds)
            if report.claimed_elsewhere:
                return True
            for error in report.errors.values():
                if isinstance(error, FencedError | CorruptError):
                    raise error
            done = [cycle.is_ready(p) and cycle.position(p) == bounds[p].end for p in partitions]
            if all(done):
                return False
        return False

    def sweep(self, context: Context | None = None) -> None:
        """Everything that a sweep may delete, without any grace."""
        context = context or self.plain
        sweep_home(context, 0)
        home: Any = SimpleNamespace(context=context, store=context.store)
        sweep_pipeline(home.context, PIPELINE, context.store, 0, PipelineSweep())

    def stored(self, partition: int) -> list[str]:
        topic = find_topic(self.plain, "t")
        stretches = Reader(self.plain, topic, partition).read(0)
        return [(e.value or b"").decode() for stretch in stretches for e in stretch.events()]

    def check_no_doubles(self) -> None:
        found = Counter(value for p in range(PARTITIONS) for value in self.stored(p))
        assert not [value for value, count in found.items() if count > 1]

    def check(self) -> None:
        expected = Counter(v for held in self.source.events.values() for v in held.values())
        found: Counter[str] = Counter()
        for partition in range(PARTITIONS):
            values = self.stored(partition)
            found.update(values)
            by_source: dict[str, list[int]] = defaultdict(list)
            for value in values:
                name, _, offset = value.partition(":")
                by_source[name].append(int(offset))
            assert all(offsets == sorted(offsets) for offsets in by_source.values())
        assert found == expected
        assert verify_topic(self.plain, self.topic).errors == 0
        for each in self.source.partitions():
            where = layout.pipeline_partition(PIPELINE, each.text)
            assert self.rows.get(where, "intent") is None

    def staged(self) -> list[str]:
        return [info.key for info in self.objects.list("staging/")]


def test_everything_is_in_the_topic_once_and_staging_is_empty() -> None:
    world = World()
    world.drive(world.plain)
    world.check()
    assert world.staged() == []
    world.drive(world.plain)
    world.check()


def calls_of_a_whole_run() -> int:
    world, faults = World(KeyedSource(1, 20)), Faults()
    world.drive(world.context(faults))
    return faults.calls


def test_a_driver_that_dies_after_any_call_is_finished_by_the_next() -> None:
    calls = calls_of_a_whole_run()
    assert calls > 50
    for call in range(1, calls + 1):
        world = World(KeyedSource(1, 20))
        with contextlib.suppress(Crash):
            world.drive(world.context(Faults(crash_after_call=call)))
        world.check_no_doubles()
        world.clock.advance(60)
        world.sweep()
        world.drive(world.plain)
        world.check()
        world.sweep()
        world.check()
        assert world.staged() == []


class Between(Faults):
    """Something happens before one call."""

    def __init__(self, number: int, what: Callable[[], None]) -> None:
        super().__init__()
        self._number = number
        self._what = what

    def call(self, verb: str, effect: Callable[[], T], lost: Callable[[], Exception]) -> T:
        if self.calls + 1 == self._number:
            self._what()
        return super().call(verb, effect, lost)


@pytest.mark.parametrize("first", rounds(3, every=3))
def test_a_sweep_between_any_two_calls_harms_nothing(first: int) -> None:
    for call in range(first + 1, calls_of_a_whole_run() + 1, 3):
        world = World(KeyedSource(1, 20))

        def sweep(world: World = world) -> None:
            world.clock.advance(60)
            world.sweep()

        world.drive(world.context(Between(call, sweep)))
        world.check()


@pytest.mark.parametrize("first", rounds(3, every=3))
def test_another_driver_may_take_over_between_any_two_calls(first: int) -> None:
    for call in range(first + 1, calls_of_a_whole_run() + 1, 3):
        world = World(KeyedSource(1, 20))

        def other(world: World = world) -> None:
            world.drive(world.plain)
            world.sweep()

        with contextlib.suppress(FencedError):
            world.drive(world.context(Between(call, other)))
        world.check()


class NamedSource(ListSource):
    """Every event has an id."""

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        for chunk in super().read(range):
            if chunk.batch.num_rows:
                offset, value = (chunk.batch.column(n)[0].as_py() for n in ("offset", "value"))
                table = table_of([Event(value, b"%d" % (offset % 5), id=value.decode())], 0)
                where = (range.partition.topic, int(range.partition.name), offset)
                yield Chunk(with_position(table.to_batches()[0], *where), chunk.position)
            else:
                yield chunk


@pytest.mark.parametrize("erased", ["all", "some"])
def test_a_driver_that_slept_while_another_left_out_erased_events_is_fenced(erased: str) -> None:
    """The other one has left them out, committed the range and removed what was staged."""
    fenced = left_out = 0
    for call in range(1, 60):
        world = World(NamedSource(1, 9))
        every = [value for held in world.source.events.values() for value in held.values()]
        gone = every if erased == "all" else every[::2]

        def other(world: World = world, gone: list[str] = gone) -> None:
            audit = layout.audit_partition(world.topic.incarnation)
            world.rows.write(audit, Put("a delete", b""), write_id=world.plain.ids.new())
            enter_erased(world.plain, world.topic, dict.fromkeys(gone, 1 << 50))
            for partition in range(PARTITIONS):
                announce_erasure(world.plain, world.topic, partition)
            world.drive(world.plain)

        try:
            fenced += world.drive(world.context(Between(call, other)))
        except FencedError:
            fenced += 1
        found = Counter(value for p in range(PARTITIONS) for value in world.stored(p))
        assert max(found.values(), default=1) == 1
        assert set(every) - set(found) <= set(gone)
        left_out += not set(gone) & set(found)
    assert min(fenced, left_out) > 10


@pytest.mark.parametrize("seed", rounds(20, every=3))
def test_two_drivers_and_a_sweeper_at_once_in_a_bad_world(seed: int) -> None:
    simulate(seed)


@pytest.mark.long
@pytest.mark.parametrize("block", range(10))
def test_many_such_worlds(block: int) -> None:
    for seed in range(100 + block * 20, 120 + block * 20):
        simulate(seed)


def simulate(seed: int) -> None:
    world, scheduler = World(), Scheduler(seed)
    faults = Faults(scheduler.random, RATES, scheduler)

    def drive() -> None:
        for _ in range(4):
            try:
                world.drive(world.context(faults, scheduler))
            except CorruptError:
                raise
            except TidelogError:
                pass
            scheduler.clock.sleep(scheduler.random.random())

    def sweep() -> None:
        for _ in range(5):
            scheduler.clock.sleep(scheduler.random.random())
            with contextlib.suppress(TidelogError):
                world.sweep(world.context(faults, scheduler))

    scheduler.spawn("one", drive)
    scheduler.spawn("two", drive)
    scheduler.spawn("sweeper", sweep)
    scheduler.run(after_step=world.check_no_doubles)
    world.drive(world.plain)
    world.check()
