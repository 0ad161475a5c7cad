"""Cuts of ranges: several tasks read a range, and it is archived as if one had."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from tests.pipeline.test_cycle import Archive
from tests.support.cut_workers import CutWorkers
from tests.support.fake_pipelines import LinesSink, ListSource, listed
from tests.support.races import race_two
from tidelog.connectors.sink import RecordRefusedError, WriterResult
from tidelog.connectors.source import DirectReader, SourcePartition, SourceRange, even_cuts
from tidelog.context import Context
from tidelog.coordination.commits import read_manifests
from tidelog.coordination.pipeline_rows import read_intent
from tidelog.errors import InternalError, NotFoundError, UnavailableError
from tidelog.model.limits import RANGE_CUTS_MAX
from tidelog.model.pipeline import Begin, FileEntry
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.pipeline import CycleReport, Pipeline
from tidelog.pipeline.ranges import (
    FilePolicy,
    WaitingEvents,
    choose_cuts,
    divide_reader,
    in_waves,
    join_parts,
    parts_of,
    run_ranges,
)
from tidelog.pipeline.tasks import Task, TaskOutcome, TaskOutput, run_task
from tidelog.testing.faults import Faults
from tidelog.testing.scheduler import Crash, Scheduler

PARTITION = SourcePartition("t", "0")


class CutArchive(Archive):
    """An archive whose ranges are cut into three, and drivers on it."""

    def __init__(self, source: ListSource | None = None, workers: CutWorkers | None = None) -> None:
        super().__init__(source or ListSource(2, 40))
        self.workers = workers or CutWorkers(random.Random(1))

    def cycle(self, context: Context, accept_loss: bool = False) -> Cycle:
        self.epoch += 1
        pipeline = Pipeline("a", "inc", self.source, LinesSink(context.store), self.workers)
        cycle = Cycle(context, pipeline, f"driver-{self.epoch}", accept_loss)
        run = cycle.run
        cycle.run = lambda limits, bounds: run(limits, bounds, dict.fromkeys(limits, 3))  # type: ignore[assignment, misc, method-assign]
        return cycle

    def run_once(self, limit: str = "30") -> CycleReport:
        """One cycle of a new driver on the first partition."""
        context = self.context()
        cycle = self.cycle(context)
        cycle.claim(PARTITION, Begin("0", "earliest"))
        return cycle.run({PARTITION: limit}, self.source.bounds([PARTITION]))


def test_cuts_of_a_range_are_one_commit_with_all_files_in_order() -> None:
    archive = CutArchive(ListSource(1, 40))
    report = archive.run_once("40")
    assert archive.workers.tasks == 3
    (manifest,) = read_manifests(archive.context(), "inc", "t/0")
    assert manifest == report.committed[PARTITION]
    assert (manifest.start, manifest.end, manifest.read) == ("0", "40", 34)
    firsts = [file.first_offset for file in manifest.files]
    assert sorted(firsts, key=lambda offset: (offset >= 13) + (offset >= 26)) == firsts
    archive.check()
    assert list(archive.objects.list("staging/")) == []


def test_intent_records_the_cuts_and_another_driver_keeps_to_them() -> None:
    archive = CutArchive(ListSource(1, 40), CutWorkers(random.Random(1), fails=1))
    assert archive.run_once("30").errors
    intent = read_intent(archive.context(), "inc", "t/0")
    assert intent is not None
    assert intent.cuts == ("10", "20")
    archive.workers.fails, archive.workers.tasks = 0, 0
    report = archive.run_once("40")
    assert archive.workers.tasks == 3
    assert report.committed[PARTITION].end == "30"


@dataclass
class FailingCut(CutWorkers):
    """Runs all cuts, except that one fails or ends early."""

    cut: int = 1
    error: Exception | None = None
    end: str = ""

    def _run(self, task: Task) -> TaskOutcome:
        if task.part != self.cut:
            return run_task(task)
        if self.error is None:
            return run_task(replace(task, reader=task.reader.part(task.range.start, self.end)))  # type: ignore[attr-defined]
        return TaskOutcome(task.range.partition, error=self.error, part=task.part)  # type: ignore[arg-type]


def test_what_is_before_a_cut_that_failed_is_committed() -> None:
    error = UnavailableError("executor lost")
    archive = CutArchive(ListSource(1, 40), FailingCut(random.Random(1), error=error))
    report = archive.run_once()
    assert report.committed[PARTITION].end == "10"
    assert report.errors == {PARTITION: error}
    assert report.withdrawn == {PARTITION}
    assert list(archive.objects.list("staging/")) == []
    archive.workers = CutWorkers(random.Random(1))
    archive.drive(archive.context())
    archive.check()


def test_nothing_is_committed_if_the_first_cut_failed() -> None:
    error = UnavailableError("executor lost")
    archive = CutArchive(ListSource(1, 40), FailingCut(random.Random(1), cut=0, error=error))
    report = archive.run_once()
    assert not report.committed
    assert report.errors == {PARTITION: error}
    assert not report.withdrawn
    assert list(archive.objects.list("staging/")) == []


def test_loss_in_a_later_cut_is_planned_again() -> None:
    error = NotFoundError("20 is gone")
    archive = CutArchive(ListSource(1, 40), FailingCut(random.Random(1), cut=2, error=error))
    report = archive.run_once()
    assert report.committed[PARTITION].end == "20"
    assert report.withdrawn == {PARTITION}
    assert read_intent(archive.context(), "inc", "t/0") is None


def test_cuts_after_one_that_ended_early_are_discarded() -> None:
    archive = CutArchive(ListSource(1, 40), FailingCut(random.Random(1), end="15"))
    report = archive.run_once()
    assert report.committed[PARTITION].end == "15"
    assert not report.errors
    assert set(listed(archive.objects)) == {f"0:{n}" for n in range(15) if n % 7 != 3}
    assert list(archive.objects.list("staging/")) == []
    archive.workers = CutWorkers(random.Random(1))
    archive.drive(archive.context())
    archive.check()


def test_refused_record_in_a_later_cut_ends_the_range_before_that_cut() -> None:
    error = RecordRefusedError("no event", offset=14, time_ms=0)
    archive = CutArchive(ListSource(1, 40), FailingCut(random.Random(1), error=error))
    report = archive.run_once()
    assert report.committed[PARTITION].end == "10"
    assert report.withdrawn == {PARTITION}


def test_refused_record_in_the_first_cut_ends_the_range_before_it() -> None:
    class Refusing(CutWorkers):
        def _run(self, task: Task) -> TaskOutcome:
            if int(task.range.limit) <= 4 or task.part:
                return run_task(task)
            error = RecordRefusedError("no event", offset=4, time_ms=0)
            return TaskOutcome(task.range.partition, error=error, part=task.part)

    archive = CutArchive(ListSource(1, 40), Refusing(random.Random(1)))
    report = archive.run_once()
    assert report.committed[PARTITION].end == "4"
    assert isinstance(report.errors[PARTITION], RecordRefusedError)
    assert list(archive.objects.list("staging/")) == []


@pytest.mark.parametrize("call", range(1, 45, 2))
def test_driver_that_dies_among_cuts_is_finished_by_the_next(call: int) -> None:
    archive = CutArchive(ListSource(1, 20))
    faults = Faults(crash_after_call=call)
    died = False
    try:
        archive.drive(archive.context(faults))
    except Crash:
        died = True
    assert died or faults.calls < call
    archive.drive(archive.context())
    archive.check()


@pytest.mark.parametrize("block", range(2))
def test_two_drivers_cut_ranges_at_once_in_a_bad_world(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        workers = CutWorkers(random.Random(seed), fails=0.1, ends_early=0.2)
        archive = CutArchive(ListSource(2, 30), workers)

        def act(faults: Faults, scheduler: Scheduler, archive: CutArchive = archive) -> None:
            archive.drive(archive.context(faults, scheduler))

        race_two(seed, 4, act, archive.check_listed)
        workers.fails = workers.ends_early = 0
        archive.drive(archive.context())
        archive.check()


# The parts, by themselves.


def _range(start: str, limit: str) -> SourceRange:
    return SourceRange(PARTITION, start, limit)


def test_even_cuts_divide_a_range_of_offsets() -> None:
    assert even_cuts(_range("10", "40"), 3) == ("20", "30")
    assert even_cuts(_range("0", "7"), 3) == ("2", "4")
    assert even_cuts(_range("5", "7"), 9) == ("6",)
    assert even_cuts(_range("5", "5"), 3) == even_cuts(_range("5", "6"), 3) == ()


class WholeSource:
    """A source whose events the pipeline numbers."""

    def __getattr__(self, name: str) -> object:
        if name == "divide":
            raise AttributeError(name)
        return getattr(ListSource(1, 40), name)


def test_source_that_cannot_be_divided_is_read_by_one_task() -> None:
    divided, whole = ListSource(1, 40), WholeSource()
    assert choose_cuts(divided, _range("0", "40"), 1) == ()
    assert choose_cuts(divided, _range("0", "40"), 2) == ("20",)
    assert choose_cuts(whole, _range("0", "40"), 2) == ()
    reader = DirectReader(whole, _range("0", "40"))
    assert divide_reader(divided, reader, ("20",)) == [reader]


def test_cuts_outside_of_what_a_reader_reads_do_not_count() -> None:
    source = ListSource(1, 40)
    reader = source.reader(_range("10", "25"))
    parts = divide_reader(source, reader, ("10", "20", "25", "30"))
    assert [(each.range.start, each.range.limit) for each in parts] == [("10", "20"), ("20", "25")]


def _task(source: ListSource, cut: int, start: str, limit: str) -> Task:
    return Task(source.reader(_range(start, limit)), None, "", part=cut)  # type: ignore[arg-type]


def _file(offset: int) -> FileEntry:
    return FileEntry(f"s{offset}", f"t{offset}", 1, 0, 1, offset, offset, 0, 0)


def _done(cut: int, end: str, offset: int) -> TaskOutcome:
    staged = WriterResult((_file(offset),), 1, 2, 3)
    return TaskOutcome(PARTITION, TaskOutput(end, 6, staged), part=cut)


def test_outputs_of_cuts_add_up() -> None:
    source = ListSource(1, 40)
    tasks = [_task(source, 0, "0", "10"), _task(source, 1, "10", "20")]
    found = join_parts(tasks, [_done(0, "10", 1), _done(1, "20", 11)])
    assert found.produced == TaskOutput("20", 12, WriterResult((_file(1), _file(11)), 2, 4, 6))
    assert found.error is None
    assert found.unused == ()


def test_workers_that_give_a_part_twice_are_refused() -> None:
    class Twice:
        def run(self, tasks: Sequence[Task]) -> Iterator[TaskOutcome]:
            yield _done(0, "10", 1)
            yield _done(0, "10", 1)

    source = ListSource(1, 40)
    pipeline = Pipeline("a", "inc", source, None, Twice())  # type: ignore[arg-type]
    tasks = [_task(source, 0, "0", "10"), _task(source, 1, "10", "20")]
    with pytest.raises(InternalError, match="part 0 of 2 has two outcomes"):
        list(run_ranges(pipeline, tasks))


def _waiting(*events: int) -> dict[SourcePartition, int]:
    return {SourcePartition("t", str(number)): each for number, each in enumerate(events)}


def _parts(*events: int, tasks: int, events_min: int = 100) -> list[int]:
    return list(parts_of(_waiting(*events), tasks, events_min).values())


def test_parts_follow_from_work_and_cores() -> None:
    assert _parts(10_000, tasks=2) == [2]
    assert _parts(10_000, tasks=8) == [8]
    assert _parts(10_000, tasks=1_000) == [100]  # each has enough to do
    assert _parts(199, tasks=8) == [1]  # a small cycle stays one task
    assert _parts(5_000, 5_000, 5_000, 5_000, tasks=2) == [1, 1, 1, 1]
    assert _parts(10_000, 10, 10, 10, tasks=4) == [4, 1, 1, 1]
    assert _parts(0, tasks=4) == [1]
    assert _parts(10**9, tasks=10**6) == [RANGE_CUTS_MAX]


def test_range_is_as_many_waves_of_tasks_long_as_its_events_need() -> None:
    def parts(at_once: int, events: int, waves_max: int = 4, whole_files: bool = False) -> int:
        return in_waves(at_once, events, 100, waves_max, whole_files)

    assert parts(2, 150) == 2
    assert parts(2, 400) == 4
    assert parts(2, 401) == 6  # the cores end together
    assert parts(2, 10**9) == 8
    assert parts(2, 10**9, waves_max=1) == 2
    assert parts(1, 10**9) == 4
    assert parts(100, 10**9) == RANGE_CUTS_MAX
    assert parts(300, 10**9) == 300
    assert parts(2, 599, whole_files=True) == 4
    assert parts(2, 99, whole_files=True) == 2


def test_run_that_follows_cuts_only_what_makes_whole_files() -> None:
    due = WaitingEvents(FilePolicy(max_bytes=200_000_000))
    assert due.events_max() == due.cut_events_min(follow=True) == 400_000
    assert due.cut_events_min(follow=False) == 64_000
    assert WaitingEvents(FilePolicy(max_bytes=1_000_000)).cut_events_min(follow=False) == 2_000
