"""Drivers: they drain, follow by policy, share partitions, take over, and stop when told."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.fake_pipelines import LinesSink, ListSource, listed
from tests.support.heartbeats import beaten_between_looks
from tests.support.waiting import until
from tidelog.catalog.base import Catalog
from tidelog.catalog.memory import MemoryCatalog
from tidelog.clock import RandomIds, SystemClock
from tidelog.connectors.source import Bounds, SourcePartition, SourceRange
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.errors import FencedError, InvalidError, NotFoundError, UnavailableError
from tidelog.model import layout
from tidelog.model.pipeline import Begin
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.failures import read_failures
from tidelog.pipeline.gaps import LostError
from tidelog.pipeline.pipeline import CycleReport, Pipeline
from tidelog.pipeline.ranges import FilePolicy, WaitingEvents
from tidelog.pipeline.share import request_flush
from tidelog.pipeline.source_state import ClaimedError
from tidelog.pipeline.tasks import LocalWorkers, Task, TaskOutcome
from tidelog.settings import LogSettings
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


def test_run_that_waits_goes_on_after_a_long_job_of_another_driver(home: Home) -> None:
    stuck = StuckWorkers()
    slow = Pipeline("a", "inc", home.source, LinesSink(home.store), stuck)  # type: ignore[arg-type]
    long = Driver(home.context, slow, DriverOptions())
    first = threading.Thread(target=long.run)
    first.start()
    assert stuck.began.wait(60)
    done: list[int] = []
    second = threading.Thread(target=lambda: done.append(home.driver(wait=True).run()))
    with beaten_between_looks(long._members):
        second.start()
        time.sleep(1.0)  # more than three times the time to live
        assert second.is_alive()
        assert done == []
        stuck.go.set()
        first.join(60)
        second.join(60)
    assert done == [0]
    home.check()


def test_run_that_drains_leaves_other_drivers_their_partitions(home: Home) -> None:
    stuck = StuckWorkers()
    slow = Pipeline("a", "inc", home.source, LinesSink(home.store), stuck)  # type: ignore[arg-type]
    long = Driver(home.context, slow, DriverOptions())
    first = threading.Thread(target=long.run)
    first.start()
    assert stuck.began.wait(60)
    fresh = SourcePartition("t", "9")
    home.source.firsts[fresh], home.source.ends[fresh] = 0, 5
    home.source.events[fresh] = {n: f"9:{n}" for n in range(5)}
    left: list[tuple[int, int]] = []
    with beaten_between_looks(long._members):
        assert home.driver(on_left=lambda *counts: left.append(counts)).run() == 5
    assert left == [(3, 4)]
    assert Counter(listed(home.store)) == Counter(home.source.events[fresh].values())
    stuck.go.set()
    first.join(60)
    home.check()


def test_runs_that_wait_for_each_other_both_end(home: Home) -> None:
    stuck = StuckWorkers()
    slow = Pipeline("a", "inc", home.source, LinesSink(home.store), stuck)  # type: ignore[arg-type]
    done: list[int] = []

    def run(driver: Driver) -> None:
        done.append(driver.run())

    first = threading.Thread(
        target=run, args=(Driver(home.context, slow, DriverOptions(wait=True)),)
    )
    first.start()
    assert stuck.began.wait(60)
    fresh = SourcePartition("t", "9")
    home.source.firsts[fresh], home.source.ends[fresh] = 0, 5
    home.source.events[fresh] = {n: f"9:{n}" for n in range(5)}
    second = threading.Thread(target=run, args=(home.driver(wait=True),))
    second.start()
    until(lambda: "9:4" in listed(home.store))
    assert done == []
    stuck.go.set()
    first.join(60)
    second.join(60)
    assert sum(done) == sum(map(len, home.source.events.values()))
    home.check()


class SilentHeartbeats:
    """Stands for ``Driver._heartbeats`` of one that stalls: no beats, and nothing is released."""

    def __init__(self, _: Cycle) -> None: ...

    def __enter__(self) -> threading.Event:
        return threading.Event()

    def __exit__(self, *_: object) -> None: ...


def test_silent_driver_loses_its_partitions_and_commits_nothing_more(home: Home) -> None:
    stuck = StuckWorkers()
    slow = Pipeline("a", "inc", home.source, LinesSink(home.store), stuck)  # type: ignore[arg-type]
    reports: list[CycleReport] = []

    def drive() -> None:
        driver = Driver(home.context, slow, DriverOptions(on_cycle=reports.append))
        driver._heartbeats = SilentHeartbeats  # type: ignore[method-assign,assignment]
        driver.run()

    first = threading.Thread(target=drive)
    first.start()
    assert stuck.began.wait(60)
    home.driver().run()
    home.check()
    stuck.go.set()
    first.join(60)
    assert reports[0].claimed_elsewhere == set(home.source.events)
    assert not reports[0].errors
    assert not any(report.committed for report in reports)
    assert read_failures(home.context, "inc") == {}
    home.check()


class Followers:
    """Drivers that follow one pipeline, each in a thread, with what each has."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.stops: dict[int, threading.Event] = {}
        self.has: dict[int, int] = {}
        self.errors: list[BaseException] = []
        self._threads: dict[int, threading.Thread] = {}

    def start(self, number: int, **how: object) -> None:
        stop = self.stops[number] = threading.Event()
        driver = self.home.driver(
            follow=True,
            stop=stop,
            policy=FilePolicy(max_age_ms=10),
            on_share=lambda has, _: self.has.update({number: has}),
            **how,
        )

        def run() -> None:
            try:
                driver.run()
            except FencedError as exc:
                self.errors.append(exc)
            self.has.pop(number, None)

        thread = self._threads[number] = threading.Thread(target=run, daemon=True)
        thread.start()

    def stop(self, number: int) -> None:
        self.stops[number].set()
        self._threads[number].join(60)

    def shares(self) -> list[int]:
        return sorted(self.has.values())

    def __enter__(self) -> Followers:
        return self

    def __exit__(self, *_: object) -> None:
        for number in self.stops:
            self.stop(number)


def owners(home: Home) -> dict[str, int]:
    """How many source partitions each driver has, by the heads."""
    found = (read_progress(home.context, "inc", each.text) for each in home.source.events)
    return dict(Counter(head.owner if head else "" for head in found))


def test_drivers_share_the_partitions_and_take_over_from_those_that_leave() -> None:
    home = Home(partitions=8)
    home.context = dataclasses.replace(home.context, log_settings=LogSettings(lease_ttl_ms=2_000))
    with Followers(home) as drivers:
        for count, shares in ((1, [8]), (2, [4, 4]), (3, [2, 3, 3])):
            drivers.start(count)
            until(lambda shares=shares: drivers.shares() == shares)
            until(lambda shares=shares: sorted(owners(home).values()) == shares)
            grow(home, home.source.ends[SourcePartition("t", "0")] + 10)
        drivers.stop(1)
        until(lambda: drivers.shares() == [4, 4])
        grow(home, home.source.ends[SourcePartition("t", "0")] + 10)
        events = sum(map(len, home.source.events.values()))
        until(lambda: len(listed(home.store)) == events)
    assert drivers.errors == []
    assert owners(home) == {"": 8}, "those that end release what they have"
    where = layout.pipeline_members("inc")
    assert not list(home.context.catalog.scan(where, "member/", "member0"))
    home.check()


def test_driver_that_takes_over_stops_the_others() -> None:
    home = Home(partitions=4)
    with Followers(home) as drivers:
        drivers.start(1)
        until(lambda: drivers.shares() == [4])
        grow(home, 70)
        before = home.driver(take_over=True)
        before.run()
        until(lambda: len(drivers.errors) == 1)
    assert read_failures(home.context, "inc") == {}, "one that was replaced reports no failure"
    grow(home, 80)
    home.driver().run()
    home.check()


def test_each_take_over_raises_the_epoch_of_the_head(home: Home) -> None:
    partition = SourcePartition("t", "0")
    epochs = []
    for number in range(3):
        cycle = Cycle(home.context, home.pipeline, f"driver-{number}")
        cycle.claim(partition, Begin("0", "earliest"))
        head = read_progress(home.context, "inc", partition.text)
        assert head is not None
        assert head.owner == f"driver-{number}"
        epochs.append(head.epoch)
        if number == 1:  # the same driver keeps its epoch, another one takes it from there
            cycle.claim(partition, Begin("0", "earliest"))
            again = read_progress(home.context, "inc", partition.text)
            assert again is not None
            assert again.epoch == head.epoch
    assert epochs == [1, 2, 3]
    cycle.release(partition)
    free = read_progress(home.context, "inc", partition.text)
    assert free is not None
    assert (free.owner, free.epoch) == ("", 3)


class DiedError(BaseException):
    """A process has ended."""


class DyingCatalog:
    """The catalog of a process that dies after some calls."""

    def __init__(self, real: Catalog, last: int) -> None:
        self._real = real
        self.left = last

    def __getattr__(self, name: str) -> Any:
        if name not in ("get", "scan", "write"):
            return getattr(self._real, name)

        def call(*args: object, **how: object) -> object:
            if self.left <= 0:
                raise DiedError
            self.left -= 1
            return getattr(self._real, name)(*args, **how)

        return call


class KnownProcesses:
    """Knows which processes have ended."""

    def __init__(self, name: str) -> None:
        self.name = name

    def mark(self) -> str:
        return self.name

    def is_dead(self, mark: str) -> bool:
        return mark == "dead"


def dying_driver(home: Home, last: int, **how: object) -> DyingCatalog:
    """Run a driver whose process dies after some calls; the catalog as it saw it."""
    catalog = DyingCatalog(home.context.catalog, last)
    context = dataclasses.replace(
        home.context,
        catalog=catalog,  # type: ignore[arg-type]
        processes=KnownProcesses("dead"),
    )
    with contextlib.suppress(DiedError):
        Driver(context, home.pipeline, DriverOptions(**how)).run()  # type: ignore[arg-type]
    return catalog


@pytest.mark.parametrize("take_over", [False, True])
def test_driver_that_dies_after_any_call_is_taken_over(take_over: bool) -> None:
    """Each step of joining, taking, working, releasing and leaving: P4 over the crash table."""
    last = 0
    while True:
        last += 1
        home = Home(partitions=2)
        settings = LogSettings(lease_ttl_ms=120_000)  # no heartbeat comes between the calls
        home.context = dataclasses.replace(
            home.context, processes=KnownProcesses("alive"), log_settings=settings
        )
        if take_over:  # from a driver that died in the middle of its ranges
            dying_driver(home, 25)
        catalog = dying_driver(home, last, take_over=take_over)
        home.driver().run()
        home.check()
        assert owners(home) == {"": 2}
        if catalog.left:
            break
    assert last > 20


def test_driver_that_stalls_in_a_take_over_does_no_harm(home: Home) -> None:
    """It has decided that the owner is dead, and writes after another one took the partition."""
    partition = SourcePartition("t", "0")
    stalled = Cycle(home.context, home.pipeline, "stalled", may_claim=lambda _: late())
    Cycle(home.context, home.pipeline, "dead").claim(partition, Begin("0", "earliest"))
    other = Cycle(home.context, home.pipeline, "other")
    taken: list[bool] = []

    def late() -> bool:
        if taken:
            return False  # its owner is alive
        other.claim(partition, Begin("0", "earliest"))
        taken.append(True)
        return True

    with pytest.raises(ClaimedError):
        stalled.claim(partition, Begin("0", "earliest"))
    bounds = home.source.bounds([partition])
    assert other.run({partition: "10"}, bounds).events > 0


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
        other = Cycle(home.context, home.pipeline, "other")
        for partition, held in seen.items():
            other.claim(partition, Begin(held.first, held.begins, 0))
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
    due = WaitingEvents(FilePolicy(max_bytes=10_000, max_age_ms=1_000))
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
    with pytest.raises(InvalidError):
        DriverOptions(start="middle")
