"""Drivers: they drain, follow by policy, stand by, take over, and stop when told."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from tests.support.fake_pipelines import LinesSink, ListSource, listed
from tests.support.heartbeats import beaten_between_takes
from tests.support.waiting import until
from tidelog.catalog.memory import MemoryCatalog
from tidelog.clock import RandomIds, SystemClock
from tidelog.connectors.source import Bounds, SourcePartition, SourceRange
from tidelog.context import Context, LogSettings
from tidelog.errors import FencedError, InvalidError, NotFoundError, UnavailableError
from tidelog.model import layout
from tidelog.model.pipeline import Begin
from tidelog.pipeline.base import LocalWorkers, Pipeline, Task, TaskOutcome
from tidelog.pipeline.cycle import Cycle, LostError
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.failures import read_failures
from tidelog.pipeline.policy import Due, FilePolicy
from tidelog.pipeline.shard import PipelineShard, request_flush, share_of
from tidelog.store.memory import MemoryStore


class Home:
    """Substrates, a source and a pipeline."""

    def __init__(self, partitions: int = 3) -> None:
        self.store = MemoryStore(SystemClock())
        self.context = Context(
            self.store,
            MemoryCatalog(),
            SystemClock(),
            RandomIds(),
            random.Random(1),
            LogSettings(lease_ttl_ms=300),
        )
        self.source = ListSource(partitions, 60)
        self.pipeline = Pipeline("a", "inc", self.source, LinesSink(self.store), LocalWorkers(2))

    def driver(self, **how: object) -> Driver:
        return Driver(self.context, self.pipeline, DriverOptions(**how))  # type: ignore[arg-type]

    def check(self) -> None:
        expected = Counter(v for held in self.source.events.values() for v in held.values())
        assert Counter(listed(self.store)) == expected


@pytest.fixture
def home() -> Home:
    return Home()


def grow(home: Home, to: int) -> None:
    for partition, held in home.source.events.items():
        held.update({n: f"{partition.name}:{n}" for n in range(home.source.ends[partition], to)})
        home.source.ends[partition] = to


def test_it_drains_what_is_there_and_ends(home: Home) -> None:
    events = sum(map(len, home.source.events.values()))
    assert home.driver().run() == events
    home.check()
    assert home.driver().run() == 0
    grow(home, 70)
    assert home.driver().run() == 30
    home.check()


def test_it_follows_by_policy_and_stops_when_told(home: Home) -> None:
    stop = threading.Event()
    driver = home.driver(follow=True, stop=stop, policy=FilePolicy(max_age_ms=50))
    thread = threading.Thread(target=driver.run)
    thread.start()
    end = time.monotonic() + 60
    while len(listed(home.store)) < sum(map(len, home.source.events.values())):
        assert time.monotonic() < end
        time.sleep(0.02)
    grow(home, 65)
    while "0:64" not in listed(home.store):
        assert time.monotonic() < end
        time.sleep(0.02)
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    home.check()


def test_a_flush_lays_down_what_came_before_it_wherever_the_driver_is(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where events and request come in the moment after it has looked at the source."""
    bounds = home.source.bounds
    looks = 0

    def late(partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        nonlocal looks
        found = bounds(partitions)
        looks += 1
        if looks == 2:
            grow(home, 65)
            request_flush(home.context, "inc")
        return found

    monkeypatch.setattr(home.source, "bounds", late)
    stop = threading.Event()
    request_flush(home.context, "inc")  # was before the driver: not for it
    driver = home.driver(follow=True, stop=stop, policy=FilePolicy(max_age_ms=3_600_000))
    thread = threading.Thread(target=driver.run)
    thread.start()
    try:
        end = time.monotonic() + 60
        while "0:64" not in listed(home.store):
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        stop.set()
        thread.join(60)
    home.check()


def test_new_partitions_are_picked_up_while_it_runs(home: Home) -> None:
    stop = threading.Event()
    driver = home.driver(follow=True, stop=stop, policy=FilePolicy(max_age_ms=20))
    thread = threading.Thread(target=driver.run)
    thread.start()
    fresh = SourcePartition("t", "9")
    home.source.firsts[fresh], home.source.ends[fresh] = 0, 5
    home.source.events[fresh] = {n: f"9:{n}" for n in range(5)}
    end = time.monotonic() + 60
    while "9:4" not in listed(home.store):
        assert time.monotonic() < end
        time.sleep(0.02)
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    home.check()


class StuckWorkers:
    """A job that hangs until it is let go."""

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()

    def run(self, tasks: list[Task]) -> Iterator[TaskOutcome]:
        self.began.set()
        assert self.go.wait(60)
        return LocalWorkers().run(tasks)


def test_a_standby_waits_while_a_long_job_beats_and_goes_on_after_it(home: Home) -> None:
    stuck = StuckWorkers()
    slow = Pipeline("a", "inc", home.source, LinesSink(home.store), stuck)  # type: ignore[arg-type]
    first = threading.Thread(target=Driver(home.context, slow, DriverOptions()).run)
    first.start()
    assert stuck.began.wait(60)
    done: list[int] = []
    second = threading.Thread(target=lambda: done.append(home.driver().run()))
    with beaten_between_takes() as refused:
        second.start()
        began_s = time.monotonic()
        while time.monotonic() - began_s < 1.0 or refused.count < 4:  # over thrice the time to live
            assert time.monotonic() - began_s < 60
            assert second.is_alive()
            time.sleep(0.02)
        assert done == []
        stuck.go.set()
        first.join(60)
        second.join(60)
    assert done == [0]
    home.check()


def test_a_silent_driver_is_taken_over_and_stops_at_its_next_write(home: Home) -> None:
    stuck = StuckWorkers()
    slow = Pipeline("a", "inc", home.source, LinesSink(home.store), stuck)  # type: ignore[arg-type]
    told: list[BaseException] = []

    def drive() -> None:
        driver = Driver(home.context, slow, DriverOptions())
        driver._heartbeats = silent  # type: ignore[method-assign,assignment]
        try:
            driver.run()
        except FencedError as exc:
            told.append(exc)

    class silent:  # noqa: N801 - stands for a method
        def __init__(self, _: PipelineShard) -> None: ...

        def __enter__(self) -> threading.Event:
            return threading.Event()

        def __exit__(self, *_: object) -> None: ...

    first = threading.Thread(target=drive)
    first.start()
    assert stuck.began.wait(60)
    home.driver().run()
    home.check()
    stuck.go.set()
    first.join(60)
    assert len(told) == 1
    home.check()


def test_shards_share_the_partitions_of_a_source() -> None:
    home = Home(partitions=8)
    events = [home.driver(shard=number, shards=3).run() for number in range(3)]
    assert sum(events) == sum(map(len, home.source.events.values()))
    assert sum(1 for count in events if count) > 1
    home.check()


def test_number_of_shards_can_be_changed() -> None:
    """Epochs of heads grow, no matter which epochs the shards have had."""
    home = Home(partitions=8)
    for shards in (1, 1, 1, 2, 3, 2, 1, 5):
        for number in range(shards):
            home.driver(shard=number, shards=shards).run()
        home.check()
        grow(home, home.source.ends[SourcePartition("t", "0")] + 10)


def test_driver_of_another_number_of_shards_waits_or_takes_over() -> None:
    home = Home(partitions=4)
    home.context = dataclasses.replace(home.context, settings=LogSettings(lease_ttl_ms=120_000))
    stop = threading.Event()
    fenced: list[FencedError] = []

    def follow() -> None:
        try:
            home.driver(follow=True, stop=stop, policy=FilePolicy(max_age_ms=10)).run()
        except FencedError as exc:
            fenced.append(exc)

    old = threading.Thread(target=follow, daemon=True)
    old.start()
    until(lambda: home.context.catalog.get(layout.pipeline_shards("inc"), "shard/000001/000000"))
    ended = threading.Event()
    waits = home.driver(shard=0, shards=2, stop=ended)
    new = threading.Thread(target=waits.run, daemon=True)
    new.start()
    events = sum(map(len, home.source.events.values()))
    until(lambda: len(listed(home.store)) == events)
    row = home.context.catalog.get(layout.pipeline_shards("inc"), "shard/000002/000000")
    assert row is None, "it waits as a standby"
    ended.set()
    new.join(60)
    grow(home, 70)
    for number in range(2):
        home.driver(shard=number, shards=2, take_over=True).run()
    grow(home, 80)  # what the old one tries now is fenced
    old.join(60)
    assert len(fenced) == 1
    assert read_failures(home.context, "inc") == {}, "one that was replaced reports no failure"
    for number in range(2):
        home.driver(shard=number, shards=2).run()
    home.check()


@pytest.mark.parametrize("shards", [2, 3, 4, 8])
@pytest.mark.parametrize("topic", ["t", "orders", "clicks", "a.b", "ü"])
def test_partitions_of_a_topic_are_shared_out_evenly(topic: str, shards: int) -> None:
    counts = Counter(share_of(SourcePartition(topic, str(n)), shards) for n in range(2 * shards))
    assert counts == dict.fromkeys(range(shards), 2)
    named = Counter(share_of(SourcePartition(f"{topic}-{n}", "0"), 2) for n in range(100))
    assert min(named.values()) > 25


def test_a_lasting_error_ends_the_run_and_the_next_goes_on(home: Home) -> None:
    home.driver().run()
    grow(home, 80)
    home.source.firsts[SourcePartition("t", "1")] = 70
    with pytest.raises(LostError, match="--accept-loss"):
        home.driver().run()
    assert home.driver(accept_loss=True).run() > 0
    assert "1:69" not in listed(home.store)
    assert "1:70" in listed(home.store)
    assert "0:65" in listed(home.store)


def test_an_error_that_passes_is_tried_again(home: Home) -> None:
    real_read, left = home.source.read, [2]

    def read(range: object) -> object:
        if left[0]:
            left[0] -= 1
            raise UnavailableError("the broker is away")
        return real_read(range)  # type: ignore[arg-type]

    home.source.read = read  # type: ignore[method-assign,assignment]
    home.driver().run()
    home.check()


@pytest.mark.parametrize("accept_loss", [True, False])
def test_what_another_driver_commits_after_the_look_does_not_end_a_partition(
    home: Home, accept_loss: bool
) -> None:
    """Ends that were read before the head say nothing about a source that was made again."""
    home.driver().run()
    real = home.source.bounds

    def then_commit(partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        seen = real(partitions)
        home.source.bounds = real  # type: ignore[method-assign]
        grow(home, 80)
        other = Cycle(home.context, home.pipeline, epoch=1)
        for partition, held in seen.items():
            other.adopt(partition, Begin(held.first, held.begins, 0))
        assert other.run(dict.fromkeys(seen, "80"), real(partitions)).events
        return seen

    home.source.bounds = then_commit  # type: ignore[method-assign]
    home.driver(accept_loss=accept_loss).run()
    grow(home, 90)
    home.driver().run()
    home.check()


@pytest.mark.parametrize("call", ["reader", "read"])
@pytest.mark.parametrize("accept_loss", [True, False])
def test_range_that_was_trimmed_since_it_was_planned_is_planned_again(
    home: Home, call: str, accept_loss: bool
) -> None:
    """The loss is what a person decides on, and not that the range was planned too early."""
    partition, real = SourcePartition("t", "1"), getattr(home.source, call)

    def trimmed(range: SourceRange) -> object:
        if range.partition == partition and not home.source.firsts[partition]:
            home.source.firsts[partition] = 11
            raise NotFoundError("t/1: 0 is gone")
        return real(range)

    setattr(home.source, call, trimmed)
    with contextlib.nullcontext() if accept_loss else pytest.raises(LostError, match="--accept"):
        home.driver(accept_loss=accept_loss).run()
    found = listed(home.store)
    assert ("1:11" in found) == accept_loss
    assert "1:9" not in found
    assert {"0:0", "2:58"} <= set(found)


def test_range_that_the_source_never_holds_ends_the_run(home: Home) -> None:
    """Its bounds say that it does, so that planning again does not help."""
    tried: list[SourceRange] = []

    def missing(range: SourceRange) -> object:
        tried.append(range)
        raise NotFoundError(f"{range.partition.text}: is gone")

    home.source.reader = missing  # type: ignore[method-assign,assignment]
    with pytest.raises(NotFoundError, match="is gone"):
        home.driver().run()
    assert len(tried) == 5 * len(home.source.events)


def test_starting_at_the_end_leaves_out_what_was_there(home: Home) -> None:
    assert home.driver(start="latest").run() == 0
    grow(home, 62)
    assert home.driver(start="latest").run() == 6


def test_due_by_size_or_by_age() -> None:
    due = Due(FilePolicy(max_bytes=10_000, max_age_ms=1_000))
    partition = SourcePartition("t", "0")
    assert not due.is_due(partition, 0, 0.0)
    assert not due.is_due(partition, 5, 1.0)
    assert not due.is_due(partition, 5, 1.9)
    assert due.is_due(partition, 5, 2.0)
    assert due.is_due(partition, 100, 1.0)
    due.done(partition, 5, 500)
    assert not due.is_due(partition, 5, 2.5)
    assert due.is_due(partition, 5, 3.5)
    for bad in ({"max_bytes": 0}, {"max_age_ms": 0}):
        with pytest.raises(InvalidError):
            FilePolicy(**bad)
    for how in ({"shard": 1}, {"start": "middle"}):
        with pytest.raises(InvalidError):
            DriverOptions(**how)  # type: ignore[arg-type]
