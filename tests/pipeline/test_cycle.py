"""The cycle: P4 over crashes at every step, two drivers at once, and lost replies."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.fake_pipelines import LinesSink, ListSource, listed
from tests.support.races import race_two
from tidelog.catalog.memory import MemoryCatalog
from tidelog.connectors.source import Chunk, SourcePartition, SourceRange
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import read_partitions, read_progress
from tidelog.errors import CorruptError, UnavailableError
from tidelog.model import layout
from tidelog.model.pipeline import Begin, Gap, Intent, Progress
from tidelog.model.times import Backoff
from tidelog.model.topic import decode_row
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.gaps import LostError, RemadeError
from tidelog.pipeline.pipeline import CycleReport, Pipeline
from tidelog.pipeline.source_state import ClaimedError
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.store.memory import MemoryStore
from tidelog.store.wrappers import RetryingStore
from tidelog.testing.faults import Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash, FakeClock, Scheduler, seeded_ids


class Archive:
    """An archive in memory, and drivers on it."""

    def __init__(self, source: ListSource | None = None) -> None:
        self.rows, self.objects = MemoryCatalog(), MemoryStore(FakeClock())
        self.source = source or ListSource(2, 40)
        self.epoch = 0

    def context(self, faults: Faults | None = None, scheduler: Scheduler | None = None) -> Context:
        clock = scheduler.clock if scheduler else FakeClock()
        chance = random.Random(self.epoch)
        ids = seeded_ids(1_000 + self.epoch)
        if faults is None:
            return Context(self.objects, self.rows, clock, ids, chance)
        store = RetryingStore(
            FaultyStore(self.objects, faults),
            clock=clock,
            random=chance,
            backoff=Backoff(attempts=3),
        )
        return Context(store, FaultyCatalog(self.rows, faults, clock), clock, ids, chance)

    def cycle(self, context: Context, accept_loss: bool = False) -> Cycle:
        """A new driver, with a later epoch than all before it."""
        self.epoch += 1
        sink = LinesSink(context.store)
        pipeline = Pipeline("a", "inc", self.source, sink, LocalWorkers())
        return Cycle(context, pipeline, f"driver-{self.epoch}", accept_loss)

    def drive(self, context: Context, step: int = 9, accept_loss: bool = False) -> CycleReport:
        """A driver that drains what is there, in ranges of some offsets."""
        cycle = self.cycle(context, accept_loss)
        report = CycleReport()
        for _ in range(60):
            partitions = self.source.partitions()
            bounds = self.source.bounds(partitions)
            for partition in partitions:
                if not cycle.is_ready(partition):
                    cycle.claim(partition, Begin("0", "earliest"), bounds[partition].incarnation)
            limits = {
                p: str(
                    min(
                        int(bounds[p].end), max(int(cycle.position(p)), int(bounds[p].first)) + step
                    )
                )
                for p in partitions
            }
            report = cycle.run(limits, bounds)
            if report.claimed_elsewhere:
                return report
            if any(isinstance(error, LostError) for error in report.errors.values()):
                return report
            done = [cycle.position(p) == bounds[p].end for p in partitions if cycle.is_ready(p)]
            if all(done) and len(done) == len(partitions):
                return report
        return report

    def check(self) -> None:
        """Each source event once, for who only lists; and the commits are contiguous."""
        expected = Counter(v for held in self.source.events.values() for v in held.values())
        assert Counter(listed(self.objects)) == expected
        for partition in self.source.partitions():
            where = layout.pipeline_partition("inc", partition.text)
            assert self.rows.get(where, "intent") is None
        self.check_listed()
        assert read_partitions(self.context(), "inc") == [p.text for p in self.source.partitions()]

    def check_listed(self) -> None:
        """No source partition has a head and is not listed: it could be forgotten."""
        listed = read_partitions(self.context(), "inc")
        for partition in self.source.partitions():
            where = layout.pipeline_partition("inc", partition.text)
            assert self.rows.get(where, "head") is None or partition.text in listed


def test_everything_is_archived_once_and_staging_is_empty() -> None:
    archive = Archive()
    archive.drive(archive.context())
    archive.check()
    assert list(archive.objects.list("staging/")) == []
    archive.drive(archive.context())
    archive.check()


@pytest.mark.parametrize("call", range(1, 45))
def test_a_driver_that_dies_after_any_call_is_finished_by_the_next(call: int) -> None:
    archive = Archive(ListSource(1, 20))
    faults = Faults(crash_after_call=call)
    died = False
    try:
        archive.drive(archive.context(faults))
    except Crash:
        died = True
    assert died or faults.calls < call
    archive.check_listed()
    archive.drive(archive.context())
    archive.check()


@pytest.mark.parametrize("block", range(5))
def test_two_drivers_at_once_in_a_bad_world(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        race_drivers(Archive(), seed)


def race_drivers(archive: Archive, seed: int) -> None:
    def act(faults: Faults, scheduler: Scheduler) -> None:
        archive.drive(archive.context(faults, scheduler))

    race_two(seed, 4, act, lambda: _holds(archive))
    archive.drive(archive.context())
    archive.check()


def _holds(archive: Archive) -> None:
    archive.check_listed()
    doubled = [value for value, count in Counter(listed(archive.objects)).items() if count > 1]
    assert not doubled, f"archived twice: {doubled}"


def test_driver_that_lost_a_partition_is_fenced_there() -> None:
    archive = Archive()
    context = archive.context()
    partition = SourcePartition("t", "0")
    old, new = archive.cycle(context), archive.cycle(context)
    old.claim(partition, Begin("0", "earliest"))
    new.claim(partition, Begin("0", "earliest"))
    bounds = archive.source.bounds([partition])
    report = old.run({partition: "10"}, bounds)
    assert (report.claimed_elsewhere, report.events, report.errors) == ({partition}, 0, {})
    assert not old.has_claimed(partition)
    living = Cycle(context, old._pipeline, "careful", may_claim=lambda owner: owner != new._owner)
    with pytest.raises(ClaimedError, match="another driver has it"):
        living.claim(partition, Begin("0", "earliest"))
    assert new.run({partition: "10"}, bounds).events > 0


def test_what_a_source_has_lost_stops_loudly_until_it_is_accepted() -> None:
    archive = Archive()
    partition = SourcePartition("t", "0")
    archive.source.firsts[partition] = 12
    report = archive.drive(archive.context())
    assert isinstance(report.errors[partition], LostError)
    assert "run with --accept-loss" in str(report.errors[partition])
    archive.drive(archive.context(), accept_loss=True)
    values = listed(archive.objects)
    assert "0:11" not in values
    assert "0:12" in values
    where = layout.pipeline_partition("inc", partition.text)
    assert len(list(archive.rows.scan(where, "commit/", "commit0"))) > 0


def test_a_source_that_was_made_anew_stops_loudly() -> None:
    archive = Archive()
    archive.drive(archive.context())
    partition = SourcePartition("t", "1")
    archive.source.ends[partition] = 5
    report = archive.drive(archive.context())
    assert "made again: it ends at 5 now" in str(report.errors[partition])


def head_of(archive: Archive, number: int = 0) -> Progress:
    head = read_progress(archive.context(), "inc", f"t/{number}")
    assert head is not None
    return head


def test_a_source_that_was_made_anew_and_outgrew_the_old_one_stops_loudly() -> None:
    archive = Archive(ListSource(1, 40))
    archive.source.incarnation = "first"
    archive.drive(archive.context())
    assert (head_of(archive).position, head_of(archive).incarnation) == ("40", "first")
    archive.source.ends = dict.fromkeys(archive.source.ends, 90)
    archive.source.incarnation = "second"
    report = archive.drive(archive.context())
    error = report.errors[SourcePartition("t", "0")]
    assert isinstance(error, RemadeError)
    assert "was deleted and made again: it is second now" in str(error)
    assert (head_of(archive).position, head_of(archive).incarnation) == ("40", "first")
    archive.check()


def test_accepted_remake_ends_the_partition_and_no_other() -> None:
    archive = Archive(ListSource(2, 40))
    archive.source.incarnation = "first"
    archive.drive(archive.context())
    archive.check()
    before = len(listed(archive.objects))
    remade, other = SourcePartition("t", "0"), SourcePartition("t", "1")
    bounds = archive.source.bounds
    archive.source.ends = dict.fromkeys(archive.source.ends, 90)
    archive.source.events[other].update({n: f"1:{n}" for n in range(40, 90)})

    archive.source.bounds = lambda partitions: {  # type: ignore[method-assign]
        p: replace(b, incarnation="second") if p == remade else b
        for p, b in bounds(partitions).items()
    }
    report = archive.drive(archive.context(), step=60)
    assert set(report.errors) == {remade}
    assert len(listed(archive.objects)) == before + 50, "the other one continues"
    for _ in range(2):
        report = archive.drive(archive.context(), accept_loss=True)
        assert not report.errors
    assert (head_of(archive).ended, head_of(archive).position) == ("remade", "40")
    assert head_of(archive).gaps == (Gap("40", "40", "remade"),)
    report = archive.drive(archive.context())
    assert not report.errors
    assert len(listed(archive.objects)) == before + 50, "nothing of the new one is archived"


def test_remake_of_a_partition_without_commits_begins_again_once_accepted() -> None:
    archive = Archive(ListSource(1, 20))
    archive.source.incarnation = "first"
    with pytest.raises(Crash):
        archive.drive(archive.context(Faults(crash_after_call=6)))
    archive.source.incarnation = "second"
    assert isinstance(
        archive.drive(archive.context()).errors[SourcePartition("t", "0")], RemadeError
    )
    archive.drive(archive.context(), accept_loss=True)
    archive.drive(archive.context())
    assert (head_of(archive).incarnation, head_of(archive).ended) == ("second", "")
    archive.check()


def test_source_that_is_made_again_while_a_range_is_read_is_not_archived() -> None:
    archive = Archive(ListSource(1, 20))
    archive.source.incarnation = "first"
    read = archive.source.read

    def remaking(range: SourceRange) -> Iterator[Chunk]:
        for number, chunk in enumerate(read(range)):
            if number == 3:
                archive.source.incarnation = "second"
            yield chunk

    archive.source.read = remaking  # type: ignore[method-assign]
    cycle, partition = archive.cycle(archive.context()), SourcePartition("t", "0")
    bounds = archive.source.bounds([partition])
    cycle.claim(partition, Begin("0", "earliest"), "first")
    report = cycle.run({partition: "20"}, bounds)
    assert "was deleted and made again since" in str(report.errors[partition])
    assert list(archive.objects.list("archives/")) == []
    assert archive.rows.get(layout.pipeline_partition("inc", "t/0"), "intent") is None
    report = archive.drive(archive.context())
    assert isinstance(report.errors[SourcePartition("t", "0")], RemadeError)
    assert list(archive.objects.list("archives/")) == []


@pytest.mark.parametrize("call", range(1, 14))
def test_driver_that_dies_while_it_ends_a_partition_leaves_a_whole_decision(call: int) -> None:
    archive = Archive(ListSource(1, 20))
    archive.source.incarnation = "first"
    archive.drive(archive.context())
    archive.source.incarnation = "second"
    with contextlib.suppress(Crash):
        archive.drive(archive.context(Faults(crash_after_call=call)), accept_loss=True)
    head = head_of(archive)
    assert (head.ended == "remade") == bool(head.gaps)
    archive.drive(archive.context(), accept_loss=True)
    assert (head_of(archive).ended, len(head_of(archive).gaps)) == ("remade", 1)
    archive.check()


def test_a_range_that_was_begun_is_not_read_from_what_was_made_anew() -> None:
    archive = Archive(ListSource(1, 20))
    archive.source.incarnation = "first"
    faults = Faults(crash_after_call=6)  # head, list, head, intent, and both again
    with pytest.raises(Crash):
        archive.drive(archive.context(faults))
    where = layout.pipeline_partition("inc", "t/0")
    intent = archive.rows.get(where, "intent")
    assert intent is not None
    assert not decode_row(intent.value, Intent, "").manifest
    archive.source.incarnation = "second"
    report = archive.drive(archive.context())
    assert isinstance(report.errors[SourcePartition("t", "0")], LostError)
    assert list(archive.objects.list("archives/")) == []
    archive.source.incarnation = "first"
    archive.drive(archive.context())
    archive.check()


def test_contents_that_are_decided_are_published_whatever_the_source_has_become() -> None:
    archive = Archive(ListSource(1, 9))
    archive.source.incarnation = "first"
    for call in range(1, 60):
        with contextlib.suppress(Crash):
            archive.drive(archive.context(Faults(crash_after_call=call)))
        intent = archive.rows.get(layout.pipeline_partition("inc", "t/0"), "intent")
        if intent is not None and decode_row(intent.value, Intent, "").manifest:
            break
    archive.source.incarnation = "second"
    report = archive.drive(archive.context())
    assert head_of(archive).position == "9"
    assert isinstance(report.errors.get(SourcePartition("t", "0")), LostError | None)
    archive.check()


def test_an_incarnation_is_learnt_when_the_source_begins_to_tell_it() -> None:
    archive = Archive(ListSource(1, 20))
    archive.drive(archive.context())
    assert head_of(archive).incarnation == ""
    archive.source.incarnation = "first"
    archive.drive(archive.context())
    assert head_of(archive).incarnation == "first"
    archive.source.incarnation = ""  # brokers that no longer tell are no reason to stop
    archive.drive(archive.context())
    assert head_of(archive).incarnation == "first"
    archive.check()


def test_a_partition_is_listed_once_and_under_its_whole_name() -> None:
    archive = Archive()
    context = archive.context()
    long = SourcePartition("t" * 2_000, "0")
    for _ in range(2):
        archive.cycle(context).claim(long, Begin("0", "earliest"))
    assert read_partitions(context, "inc") == [long.text]
    assert SourcePartition.named(long.text) == long


def test_an_error_of_one_partition_does_not_stop_the_others() -> None:
    archive = Archive()
    real_read = archive.source.read

    def read(range: object) -> object:
        if range.partition.name == "0":  # type: ignore[attr-defined]
            raise UnavailableError("its broker is down")
        return real_read(range)  # type: ignore[arg-type]

    archive.source.read = read  # type: ignore[method-assign,assignment]
    archive.drive(archive.context())
    assert {value[0] for value in listed(archive.objects)} == {"1"}
    archive.source.read = real_read  # type: ignore[method-assign]
    archive.drive(archive.context())
    archive.check()


def test_a_file_that_somebody_else_wrote_is_not_overwritten() -> None:
    archive = Archive()
    archive.objects.put("archives/a/g1/t/dt=2026-11-13/1_0_00000000000000000000.json", b"theirs")
    report = archive.drive(archive.context())
    assert isinstance(report.errors[SourcePartition("t", "0")], CorruptError)
