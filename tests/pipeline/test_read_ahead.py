"""Reading ahead: the next range is read while the last one is published, each event once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.pipeline.test_cycle import Archive
from tests.support.cut_workers import CutWorkers
from tests.support.fake_pipelines import LinesSink, ListSource
from tidelog.connectors.source import Chunk, SourcePartition, SourceRange
from tidelog.context import Context
from tidelog.coordination.commits import read_manifests
from tidelog.coordination.pipeline_rows import read_intent
from tidelog.erasure.unfinished_ranges import is_under_way
from tidelog.errors import UnavailableError
from tidelog.maintenance.pipeline_sweep import _read_named
from tidelog.model import layout
from tidelog.model.pipeline import Begin, Manifest, read_manifest
from tidelog.pipeline import ranges
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pipeline import CycleReport, Pipeline
from tidelog.pipeline.ranges import FilePolicy, NextRange, WaitingEvents
from tidelog.pipeline.tasks import LocalWorkers, Workers
from tidelog.testing.faults import Faults
from tidelog.testing.scheduler import Crash

PARTITION = SourcePartition("t", "0")
STEP = 9


class AheadArchive(Archive):
    """An archive whose drivers read ahead, nine offsets at a time."""

    def __init__(self, source: ListSource | None = None, workers: Workers | None = None) -> None:
        super().__init__(source or ListSource(1, 40))
        self.workers = workers or LocalWorkers()
        self.publish: Callable[[Manifest], None] = lambda _: None

    def cycle(self, context: Context, accept_loss: bool = False) -> Cycle:
        self.epoch += 1
        sink = WatchedSink(context, self)
        pipeline = Pipeline("a", "inc", self.source, sink, self.workers)
        cycle = Cycle(context, pipeline, f"driver-{self.epoch}", accept_loss)
        run = cycle.run
        cycle.run = lambda limits, bounds: run(limits, bounds, None, self.next_range)  # type: ignore[assignment, misc, method-assign]
        return cycle

    def next_range(self, partition: SourcePartition, start: str) -> NextRange | None:
        end = self.source.ends[partition]
        return NextRange(str(min(end, int(start) + STEP)), 2) if int(start) < end else None

    def run_once(self) -> CycleReport:
        """One cycle of a new driver, which reads everything."""
        cycle = self.cycle(self.context())
        cycle.claim(PARTITION, Begin("0", "earliest"))
        return cycle.run({PARTITION: str(STEP)}, self.source.bounds([PARTITION]))

    def ranges(self) -> list[tuple[str, str]]:
        return [(each.start, each.end) for each in read_manifests(self.context(), "inc", "t/0")]


class WatchedSink(LinesSink):
    def __init__(self, context: Context, archive: AheadArchive) -> None:
        super().__init__(context.store)
        self._archive = archive

    def publish(self, manifest: Manifest) -> int:
        self._archive.publish(manifest)
        return super().publish(manifest)


def read_first(call: Callable[[], Any]) -> Future[Any]:
    """Reads ahead before the last range is published, in the same thread."""
    done: Future[Any] = Future()
    done.set_result(call())
    return done


def read_last(call: Callable[[], Any]) -> Future[Any]:
    """Reads ahead after the last range is committed."""

    class Later(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            return call()

    done = Later()
    done.set_result(None)
    return done


def test_next_range_is_read_while_the_last_one_is_published() -> None:
    read, published = threading.Event(), threading.Event()

    class Source(ListSource):
        def read(self, range: SourceRange) -> Iterator[Chunk]:
            if range.start == "9":
                read.set()
                assert published.wait(10), "it is published only after the next one was read"
            yield from super().read(range)

    def publish(manifest: Manifest) -> None:
        if manifest.start == "0":
            assert read.wait(10), "nothing reads the next range"
            published.set()

    archive = AheadArchive(Source(1, 20))
    archive.publish = publish
    report = archive.run_once()
    assert not report.errors
    archive.check()
    assert archive.ranges() == [("0", "9"), ("9", "18"), ("18", "20")]
    assert report.events == len(archive.source.events[PARTITION])
    assert list(archive.objects.list("staging/")) == []


def test_second_stop_signal_does_not_wait_for_what_is_read_ahead() -> None:
    begun, end = threading.Event(), threading.Event()

    class Source(ListSource):
        def read(self, range: SourceRange) -> Iterator[Chunk]:
            if range.start == "9":
                begun.set()
                end.wait(10)
            yield from super().read(range)

    def interrupt(manifest: Manifest) -> None:
        assert begun.wait(10)
        raise KeyboardInterrupt

    archive = AheadArchive(Source(1, 20))
    archive.publish = interrupt
    with pytest.raises(KeyboardInterrupt):
        archive.run_once()
    (thread,) = [each for each in threading.enumerate() if each.name == "tidelog-ahead"]
    assert thread.daemon
    end.set()
    thread.join()
    archive.publish = lambda _: None
    archive.drive(archive.context())
    archive.check()


def test_reading_ahead_saves_the_write_of_each_intent() -> None:
    archive, writes = AheadArchive(), 0
    write = archive.rows.write

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal writes
        writes += 1
        write(*args, **kwargs)

    archive.rows.write = counted  # type: ignore[method-assign]
    archive.run_once()
    assert archive.ranges()[-1] == ("36", "40")
    assert writes == 2 + 1 + 2 * len(archive.ranges())  # list and take, intend, record and commit


def test_cycle_without_more_to_read_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "run_in_thread", None)
    archive = AheadArchive(ListSource(1, STEP))
    archive.run_once()
    archive.check()


@pytest.mark.parametrize("order", [read_first, read_last])
@pytest.mark.parametrize("call", range(1, 27))
def test_driver_that_dies_after_any_call_is_finished_by_the_next(
    call: int, order: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "run_in_thread", order)
    archive = AheadArchive(ListSource(1, 12))
    faults = Faults(crash_after_call=call)
    died = False
    try:
        archive.drive(archive.context(faults))
    except Crash:
        died = True
    assert died or faults.calls < call
    archive.drive(archive.context())
    archive.check()


def test_what_is_read_ahead_is_under_way_until_it_is_committed() -> None:
    archive, seen = AheadArchive(ListSource(1, 20)), []

    def look(manifest: Manifest) -> None:
        context = archive.context()
        intent = read_intent(context, "inc", "t/0")
        assert intent is not None
        under_way = [is_under_way(context, "inc", "t/0", np.array([at])) for at in (0, 9, 18)]
        folder = layout.manifest_folder("t/0")
        seen.append((intent.start, intent.reach, under_way))
        may_decide = _read_named(context, "inc").may_decide(folder, 1)
        assert may_decide == (intent.ahead is not None), "a sweep deletes what is staged"

    archive.publish = look
    archive.run_once()
    assert seen == [
        ("0", "18", [True, True, False]),
        ("9", "20", [False, True, True]),
        ("18", "20", [False, False, True]),
    ]


def test_nothing_that_was_read_ahead_counts_if_the_range_before_fails() -> None:
    archive = AheadArchive()

    def fail(manifest: Manifest) -> None:
        if manifest.start == "9":
            raise UnavailableError("the store does not answer")

    archive.publish = fail
    report = archive.run_once()
    assert isinstance(report.errors[PARTITION], UnavailableError)
    assert archive.ranges() == [("0", "9")]
    intent = read_intent(archive.context(), "inc", "t/0")
    assert intent is not None
    assert (intent.start, intent.reach) == ("9", "27")
    decided = read_manifest(archive.objects.get(intent.manifest), intent.manifest).files
    staged = {each.key for each in archive.objects.list("staging/")}
    assert staged == {each.staged for each in decided}
    archive.publish = lambda _: None
    archive.drive(archive.context())
    archive.check()


def test_next_range_begins_where_one_that_ended_early_has_ended() -> None:
    workers = CutWorkers(random.Random(2), ends_early=0.4)
    archive = AheadArchive(ListSource(1, 60), workers)
    archive.run_once()
    ranges = archive.ranges()
    assert workers.ended_early
    assert any(int(end) - int(start) < STEP for start, end in ranges[:-1])
    assert all(end == start for (_, end), (start, _) in pairwise(ranges))
    archive.check()


def test_failure_of_what_is_read_ahead_is_reported_after_the_range_before() -> None:
    class Source(ListSource):
        def read(self, range: SourceRange) -> Iterator[Chunk]:
            if range.start == "9":
                raise UnavailableError("the source does not answer")
            yield from super().read(range)

    archive = AheadArchive(Source(1, 20))
    reports: list[CycleReport] = []
    cycle = archive.cycle(archive.context())
    cycle.claim(PARTITION, Begin("0", "earliest"))
    bounds = archive.source.bounds([PARTITION])
    Cycle.run(cycle, {PARTITION: "9"}, bounds, None, archive.next_range, reports.append)
    assert [sorted(each.committed) for each in reports] == [[PARTITION], []]
    assert [sorted(each.errors) for each in reports] == [[], [PARTITION]]
    archive.source.__class__ = ListSource
    archive.drive(archive.context())
    archive.check()


# Drivers.


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitingEvents, "events_max", lambda _: STEP)


def drive(archive: Archive, **how: Any) -> list[CycleReport]:
    """Runs a driver. Returns its reports with commits."""
    reports: list[CycleReport] = []

    def on_cycle(report: CycleReport) -> None:
        reports.append(report)
        if report.committed and how.get("follow"):
            options.stop.set()

    policy = FilePolicy(max_bytes=STEP * 500)
    options = DriverOptions(on_cycle=on_cycle, policy=policy, **how)
    sink = LinesSink(archive.objects)
    Driver(
        archive.context(), Pipeline("a", "inc", archive.source, sink, LocalWorkers()), options
    ).run()
    return [report for report in reports if report.committed]


@pytest.mark.usefixtures("small_ranges")
def test_driver_reads_ahead_to_the_end_that_it_saw() -> None:
    looks = 0

    def look(*_: int) -> None:
        nonlocal looks
        looks += 1

    archive = AheadArchive()
    reports = drive(archive, on_share=look)
    archive.check()
    assert [each.committed[PARTITION].end for each in reports] == ["9", "18", "27", "36", "40"]
    assert looks == 2  # one for all of these ranges, and one that finds no more


@pytest.mark.usefixtures("small_ranges")
def test_driver_that_is_stopped_ends_after_what_it_reads() -> None:
    archive = AheadArchive()
    reports = drive(archive, follow=True)
    ends = [each.committed[PARTITION].end for each in reports]
    assert ends == ["9", "18"]
    assert read_intent(archive.context(), "inc", "t/0") is None


@pytest.mark.usefixtures("small_ranges")
def test_driver_that_follows_leaves_less_than_a_file_for_later() -> None:
    archive = AheadArchive(ListSource(1, STEP + 4))
    reports = drive(archive, follow=True)
    assert [each.committed[PARTITION].end for each in reports] == ["9"]
