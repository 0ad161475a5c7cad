"""Ranges that a restored catalog has forgotten: set aside once, also beside stalled drivers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.archive_look import AT_OR_WHEN, a_home, an_archive, fill
from tests.support.forgotten_ranges import forget
from tests.support.rounds import rounds
from tidelog import Event, Home
from tidelog.archive.archive import open_pipeline, sink_settings
from tidelog.archive.finalize import FinalizeOptions, finalize
from tidelog.archive.read import ReadRequest, archived_rows
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.catalog.base import Change, Put
from tidelog.connectors.archive.sink import ArchiveSink
from tidelog.connectors.source import SourcePartition
from tidelog.errors import FencedError
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.model.pipeline import Begin, Progress
from tidelog.model.topic import decode_row
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.forgotten_ranges import read_aside
from tidelog.pipeline.pipeline import CycleReport
from tidelog.pipeline.source_state import SourceState
from tidelog.pipeline.tasks import LocalWorkers, Workers
from tidelog.store.base import Store
from tidelog.testing.faults import Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash

T = TypeVar("T")
EVENTS = 10
OLD = SourcePartition("old", "0")


class Stalls(Faults):
    """One call waits, before its effect, until something else is done."""

    def wait(self, at: int, meanwhile: Callable[[], object]) -> None:
        self.at, self.meanwhile = at, meanwhile

    def call(self, verb: str, effect: Callable[[], T], lost: Callable[[], Exception]) -> T:
        self.calls += 1
        if self.calls == self.at:
            self.meanwhile()
        return effect()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        fill(made, range(EVENTS))
        yield made


def cycle(
    home: Home,
    archive: Archive,
    epoch: int,
    faults: Faults | None = None,
    workers: Workers | None = None,
) -> CycleReport:
    """What a driver does under an epoch, until there is nothing to do."""
    pipeline = open_pipeline(home.context, archive, workers or LocalWorkers(1))
    context = home.context
    if faults is not None:
        sink = ArchiveSink(sink_settings(archive))
        store: Store = FaultyStore(sink._store(), faults)
        sink._store = lambda: store  # type: ignore[method-assign]
        catalog = FaultyCatalog(home.catalog, faults)
        context = replace(context, store=FaultyStore(home.store, faults), catalog=catalog)
        pipeline = replace(pipeline, sink=sink)
    mine = Cycle(context, pipeline, f"driver-{epoch}")
    total = CycleReport()
    for _ in range(2):
        bounds = pipeline.source.bounds(pipeline.source.partitions())
        for partition in bounds:
            if not mine.is_ready(partition):
                mine.claim(partition, Begin("0", "earliest"))
        done = mine.run({each: held.end for each, held in bounds.items()}, bounds)
        total.aside += done.aside
        total.errors |= done.errors
    return total


def a_forgotten_range(home: Home, name: str) -> Archive:
    """An archive whose only range, of some folders, the catalog does not know."""
    archive = an_archive(home, name, parser=AT_OR_WHEN)
    assert cycle(home, archive, 1).errors == {}
    forget(home, archive)
    return archive


def an_undecided_range(home: Home, name: str) -> Archive:
    """An archive whose driver died after it had put a manifest, before the intent named it."""
    archive = an_archive(home, name, parser=AT_OR_WHEN)
    real = Cycle._write

    def dies(self: Cycle, state: SourceState, *changes: Change) -> str:
        if state.intent is not None:
            raise Crash
        return real(self, state, *changes)

    with pytest.MonkeyPatch.context() as patch, suppress(Crash):
        patch.setattr(Cycle, "_write", dies)
        cycle(home, archive, 1)
    assert len(list(home.store.list(layout.manifests(archive.pipeline())))) == 1
    return archive


def check_each_event_once(home: Home, archive: Archive) -> None:
    verified = verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True, source=True))
    assert verified.problem_count == 0, verified.problems
    rows = archived_rows(home.context, archive, ReadRequest())
    offsets = Counter(offset for batch in rows for offset in batch.column("offset").to_pylist())
    living = {offset for offset in range(EVENTS) if offset % 7}
    assert offsets == Counter(living)
    listed = home.store.list(f"{archive.folder()}/")
    files = [each.key for each in listed if each.key.endswith(".parquet")]
    assert len(files) == 2


def check_records(home: Home, archive: Archive) -> None:
    """One record names all files, and all are there."""
    (record,) = read_aside(home.context, archive.pipeline())
    assert (record.start, record.end, record.events) == ("0", str(EVENTS), 8)
    moved = {each.key for each in home.store.list(f"{archive.root}/_aside/")}
    assert set(record.files) == moved
    assert len(moved) == 3  # two folders and the dead letters


@pytest.mark.parametrize("first", rounds(3, every=3))
def test_driver_that_stalls_at_any_call_harms_nothing_that_the_next_one_commits(
    home: Home, first: int
) -> None:
    at, calls = first - 2, 0
    while at <= calls:  # until no call is left to stall at
        at += 3
        archive = a_forgotten_range(home, f"a{at}")
        faults = Stalls()
        faults.wait(at, lambda: cycle(home, archive, 20))  # noqa: B023
        with suppress(FencedError):  # it finds that it has lost the partition, sooner or later
            cycle(home, archive, 10, faults)
        calls = faults.calls
        assert cycle(home, archive, 30).errors == {}
        check_each_event_once(home, archive)
        check_records(home, archive)
    assert at > 30


@pytest.mark.parametrize("first", rounds(3, every=3))
def test_driver_that_stalls_beside_an_undecided_range_deletes_nothing(
    home: Home, first: int
) -> None:
    at, calls = first - 2, 0
    while at <= calls:  # until no call is left to stall at
        at += 3
        archive = an_undecided_range(home, f"a{at}")
        faults = Stalls()
        faults.wait(at, lambda: cycle(home, archive, 20))  # noqa: B023
        with suppress(FencedError):
            cycle(home, archive, 10, faults)
        calls = faults.calls
        assert cycle(home, archive, 30).errors == {}
        check_each_event_once(home, archive)
        assert read_aside(home.context, archive.pipeline()) == []
        assert list(home.store.list(f"{archive.root}/_aside/")) == []
    assert at > 20


@pytest.mark.parametrize("first", rounds(3, every=3))
def test_record_of_a_range_names_all_its_files_wherever_its_driver_died(
    home: Home, first: int
) -> None:
    at, calls = first - 2, 0
    while at <= calls:  # until no call is left to die after
        at += 3
        archive = a_forgotten_range(home, f"a{at}")
        faults = Faults(crash_after_call=at)
        with suppress(Crash):
            cycle(home, archive, 10, faults)
        calls = faults.calls
        assert cycle(home, archive, 20).errors == {}
        check_each_event_once(home, archive)
        check_records(home, archive)
    assert at > 30


def test_delete_that_stops_between_two_files_is_finished_and_the_record_stays(home: Home) -> None:
    archive = a_forgotten_range(home, "daily")
    real = ArchiveSink.set_aside

    def dies(self: ArchiveSink, files: list[object], name: str) -> None:
        real(self, files[:1], name)  # type: ignore[arg-type]
        raise Crash

    with pytest.MonkeyPatch.context() as patch, suppress(Crash):
        patch.setattr(ArchiveSink, "set_aside", dies)
        cycle(home, archive, 10)
    report = cycle(home, archive, 20)
    assert [each.events for each in report.aside] == [8]
    check_each_event_once(home, archive)
    check_records(home, archive)


def test_range_forgotten_twice_gets_other_names_each_time(home: Home) -> None:
    archive = a_forgotten_range(home, "daily")
    names: set[str] = set()
    for epoch in (2, 3):
        assert len(cycle(home, archive, epoch).aside) == 1
        found = {each.key for each in home.store.list(f"{archive.folder()}/")}
        assert not found & names
        names |= found
        check_each_event_once(home, archive)
        forget(home, archive)


def send_old(home: Home, events: int) -> None:
    """Events of folders that ended long ago, one of each day."""
    at = [1_577_836_800 + 86_400 * number for number in range(events)]
    home.append("old", [Event(b'{"at": %d}' % each) for each in at], partition=0)


def an_old_archive(home: Home) -> Archive:
    home.create_topic("old", 1)
    send_old(home, 2)
    return an_archive(home, "old", "topic:old", parser=AT_OR_WHEN)


def markers(home: Home) -> list[str]:
    return sorted(each.key for each in home.store.list("") if each.key.endswith("/_SUCCESS"))


def test_marker_of_a_folder_with_files_set_aside_is_put_again_by_finalize(home: Home) -> None:
    archive = an_old_archive(home)
    how = FinalizeOptions(delay_ms=0)
    cycle(home, archive, 1)
    finalize(home.context, archive, how)
    before = markers(home)
    assert len(before) == 2
    own = archive.pipeline()
    places = [layout.pipeline_partition(own, OLD.text), layout.pipeline_members(own)]
    saved = {where: list(home.catalog.scan(where)) for where in places}
    send_old(home, 1)  # into one of the folders
    cycle(home, archive, 2)
    forget(home, archive)
    for where, rows in saved.items():
        for row in rows:
            home.catalog.write(where, Put(row.row, row.value), write_id=home.context.ids.new())
    (head,) = [row for row in saved[places[0]] if row.row == "head"]
    end = {OLD: decode_row(head.value, Progress, "head").position}
    pipeline = open_pipeline(home.context, archive, LocalWorkers(1))
    third = Cycle(home.context, pipeline, "third")
    third.claim(OLD, Begin("0", "earliest"))
    report = third.run(end, pipeline.source.bounds([OLD]))  # it begins no range of its own
    assert [each.events for each in report.aside] == [1]
    told = finalize(home.context, archive, how).notices
    assert [each.event for each in told] == ["reopened", "final"]
    assert markers(home) == before
    verified = verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True))
    assert verified.problem_count == 0, verified.problems


def test_marker_put_after_the_copy_of_the_catalog_is_removed_until_the_folder_has_files(
    home: Home,
) -> None:
    archive = an_old_archive(home)
    how = FinalizeOptions(delay_ms=0)
    cycle(home, archive, 1)
    finalize(home.context, archive, how)
    before = markers(home)
    forget(home, archive)
    pipeline = open_pipeline(home.context, archive, LocalWorkers(1))
    second = Cycle(home.context, pipeline, "second")
    second.claim(OLD, Begin("0", "earliest"))
    second.run({OLD: "0"}, pipeline.source.bounds([OLD]))
    finalize(home.context, archive, how)
    assert markers(home) == []
    cycle(home, archive, 3)
    finalize(home.context, archive, how)
    assert markers(home) == before
    assert verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True)).problem_count == 0
