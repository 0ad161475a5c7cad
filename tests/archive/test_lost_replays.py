"""Replays that a restored catalog has forgotten: their events are in the folder once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pipeline.test_forgotten_ranges import Stalls, cycle
from tests.support.archive_look import AT, AT_OR_WHEN, a_home, an_archive, fill
from tests.support.forgotten_ranges import forget
from tests.support.rounds import rounds
from tidelog import Event, Home
from tidelog.archive.archive import find_archive
from tidelog.archive.dead_letters import ReplayOptions, ReplayResult, replay
from tidelog.archive.finalize import FinalizeOptions, finalize
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.catalog.base import Change, Put, Row
from tidelog.coordination.pipeline_rows import read_progress, replay_pipeline
from tidelog.erasure.rewrite import erase_from_archive
from tidelog.errors import FencedError, TidelogError
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.forgotten_ranges import read_aside
from tidelog.pipeline.source_state import SourceState
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.testing.faults import Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash

EVENTS = 10
PARSED = {n for n in range(EVENTS) if n % 7}  # the others are dead letters of every parser


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        fill(made, range(EVENTS))
        yield made


def replay_all(home: Home, archive: Archive, generation: int | None = None) -> ReplayResult:
    """Tries the dead letters of a generation again, with a parser that finds every time."""
    how = ReplayOptions(generation=generation, parser=AT_OR_WHEN)
    return replay(home.context, archive, how, LocalWorkers(1))


def with_parser(archive: Archive, parser: str) -> Archive:
    """The archive after its code was fixed: its parser accepts more events."""
    written_as = msgspec.structs.replace(archive.format_of(), parser=parser)
    return msgspec.structs.replace(archive, formats={archive.generation: written_as})


def a_forgotten_replay(home: Home, name: str) -> Archive:
    """An archive whose only range, and the replay of its dead letters, the catalog lost."""
    archive = an_archive(home, name, parser=AT)
    assert cycle(home, archive, 1).errors == {}
    assert replay_all(home, archive).replayed == 3
    forget(home, archive)
    forget(home, archive, replay_pipeline(archive.pipeline()))
    return with_parser(archive, AT_OR_WHEN)


def listed(home: Home, archive: Archive, generation: int | None = None) -> Counter[int]:
    """The offsets that a reader finds who lists the folder of a generation."""
    found = home.store.list(f"{archive.folder(generation)}/")
    files = [home.store.get(each.key) for each in found if each.key.endswith(".parquet")]
    tables = [pq.ParquetFile(pa.BufferReader(file)).read(columns=["offset"]) for file in files]
    return Counter(offset for table in tables for offset in table["offset"].to_pylist())


def check_listed_once(
    home: Home, archive: Archive, wanted: set[int] = PARSED, generation: int | None = None
) -> None:
    assert listed(home, archive, generation) == Counter(wanted)
    how = ArchiveVerifyOptions(deep=True, generation=generation)
    verified = verify_archive(home.context, archive, how)
    assert verified.problem_count == 0, verified.problems


def records(home: Home, archive: Archive, generation: int | None = None) -> list[int]:
    """The events of each range of a replay that was set aside."""
    pipeline = replay_pipeline(archive.pipeline(generation))
    return [each.events for each in read_aside(home.context, pipeline)]


def test_run_sets_a_forgotten_replay_aside(home: Home) -> None:
    archive = a_forgotten_replay(home, "daily")
    report = cycle(home, archive, 2)
    assert report.errors == {}
    assert sorted(each.events for each in report.aside) == [3, 5]
    assert records(home, archive) == [3]
    check_listed_once(home, archive)


def test_files_of_a_forgotten_replay_are_set_aside_as_an_erasure_left_them(home: Home) -> None:
    archive = an_archive(home, "daily", parser=AT)
    cycle(home, archive, 1)
    replay_all(home, archive)
    assert erase_from_archive(home.context, archive, 1, {"t/0": [2, 3]}).events == 2
    forget(home, archive)
    forget(home, archive, replay_pipeline(archive.pipeline()))
    report = cycle(home, with_parser(archive, AT_OR_WHEN), 2)
    assert sum(each.events for each in report.aside) == 6  # by either manifest of a range
    assert sum(records(home, archive)) == 2
    check_listed_once(home, archive)


def send(home: Home, numbers: range, *fields: bytes) -> None:
    """Appends events with their times in these fields, in turn."""
    times = [(fields[n % len(fields)], 86_400 + n) for n in numbers]
    home.append("timed", [Event(b'{"%s": %d}' % each) for each in times])


def saved_rows(home: Home, archive: Archive, pipeline: str) -> Callable[[], None]:
    """A copy of a pipeline's rows; the result puts them back."""
    places = [layout.pipeline_partition(pipeline, "timed/0"), layout.pipeline_members(pipeline)]
    saved: dict[str, list[Row]] = {where: list(home.catalog.scan(where)) for where in places}

    def restore() -> None:
        forget(home, archive, pipeline)
        for where, rows in saved.items():
            for row in rows:
                home.catalog.write(where, Put(row.row, row.value), write_id=home.context.ids.new())

    return restore


def test_replay_that_is_forgotten_after_an_earlier_one_is_set_aside(home: Home) -> None:
    home.create_topic("timed", 1)
    send(home, range(4), b"when", b"at")
    archive = an_archive(home, "daily", "topic:timed", parser=AT)
    cycle(home, archive, 1)
    assert replay_all(home, archive).replayed == 2
    own = archive.pipeline()
    restores = [saved_rows(home, archive, each) for each in (own, replay_pipeline(own))]
    send(home, range(4, 10), b"when", b"at")
    cycle(home, archive, 2)
    assert replay_all(home, archive).replayed == 3
    for restore in restores:
        restore()
    archive = with_parser(archive, AT_OR_WHEN)
    cycle(home, archive, 3)
    assert records(home, archive) == [3]
    check_listed_once(home, archive, set(range(10)))


def test_range_does_not_reuse_the_name_of_a_file_that_a_forgotten_replay_wrote(home: Home) -> None:
    home.create_topic("timed", 1)
    send(home, range(4), b"when")
    archive = an_archive(home, "daily", "topic:timed", parser=AT)
    cycle(home, archive, 1)
    assert replay_all(home, archive).replayed == 4  # it also deletes the file of dead letters
    forget(home, archive)
    forget(home, archive, replay_pipeline(archive.pipeline()))
    cycle(home, with_parser(archive, AT_OR_WHEN), 2)
    check_listed_once(home, archive, set(range(4)))
    send(home, range(4, 6), b"when")
    cycle(home, archive, 3)
    assert replay_all(home, archive).replayed == 2  # its driver finds the lost manifest, too
    check_listed_once(home, archive, set(range(6)))


@pytest.mark.parametrize("how", ["backfill", "redo"])
def test_generation_whose_number_a_forgotten_one_had_lists_each_event_once(
    home: Home, how: str
) -> None:
    made = home.archives.create("daily", source="topic:t", parser=AT, dead_share=1.0)
    made.run()
    row = home.catalog.get(layout.REGISTRY, layout.archive_row("daily"))
    assert row is not None
    days = ["2026-11-15", "2026-11-16"]
    made.backfill() if how == "backfill" else made.redo(dates=days)
    assert made.replay(generation=2, parser=AT_OR_WHEN).replayed == 3
    second = find_archive(home.context, "daily").pipeline(2)
    for pipeline in (second, replay_pipeline(second)):
        forget(home, find_archive(home.context, "daily"), pipeline)
    home.catalog.write(layout.REGISTRY, Put(row.row, row.value), write_id=home.context.ids.new())
    made = home.archives.get("daily")
    if how == "backfill":
        made.backfill(parser=AT_OR_WHEN)
    else:
        made.redo(dates=days)
    made.promote()
    archive = find_archive(home.context, "daily")
    wanted = PARSED if how == "backfill" else {n for n in PARSED if n % 3}
    check_listed_once(home, archive, wanted, 2)
    assert records(home, archive, 2) == [3]


def test_marker_of_a_folder_with_files_of_a_forgotten_replay_is_put_again(home: Home) -> None:
    home.create_topic("timed", 1)
    send(home, range(4), b"when", b"at")
    archive = an_archive(home, "daily", "topic:timed", parser=AT)
    cycle(home, archive, 1)
    replay_all(home, archive)
    how = FinalizeOptions(delay_ms=0)
    assert [each.events for each in finalize(home.context, archive, how).notices] == [4]
    forget(home, archive)
    forget(home, archive, replay_pipeline(archive.pipeline()))
    archive = with_parser(archive, AT_OR_WHEN)
    cycle(home, archive, 2)
    notices = finalize(home.context, archive, how).notices
    assert [(each.event, each.events) for each in notices] == [("reopened", 4), ("final", 4)]
    check_listed_once(home, archive, set(range(4)))


@pytest.mark.parametrize("first", rounds(3, every=3))
def test_driver_that_dies_after_any_call_is_succeeded_by_another(home: Home, first: int) -> None:
    at, calls = first - 2, 0
    while at <= calls:  # until no call is left to die after
        at += 3
        archive = a_forgotten_replay(home, f"a{at}")
        faults = Faults(crash_after_call=at)
        with suppress(Crash):
            cycle(home, archive, 10, faults)
        calls = faults.calls
        assert cycle(home, archive, 20).errors == {}
        assert records(home, archive) == [3]
        check_listed_once(home, archive)
    assert at > 50


@pytest.mark.parametrize("first", rounds(3, every=3))
def test_driver_that_stalls_at_any_call_harms_nothing(home: Home, first: int) -> None:
    at, calls = first - 2, 0
    while at <= calls:  # until no call is left to stall at
        at += 3
        archive = a_forgotten_replay(home, f"a{at}")
        faults = Stalls()
        faults.wait(at, lambda: cycle(home, archive, 20))  # noqa: B023
        with suppress(FencedError):
            cycle(home, archive, 10, faults)
        calls = faults.calls
        assert cycle(home, archive, 30).errors == {}
        assert records(home, archive) == [3]
        check_listed_once(home, archive)
    assert at > 50


def test_replay_takes_its_partition_from_a_driver_that_died_there(home: Home) -> None:
    archive = a_forgotten_replay(home, "daily")

    def die(*_: object) -> None:
        raise Crash

    with pytest.MonkeyPatch.context() as patch, suppress(Crash):
        patch.setattr(Cycle, "release", die)
        cycle(home, archive, 2)
    replays = replay_pipeline(archive.pipeline())
    head = read_progress(home.context, replays, "t/0")
    assert head is not None
    assert head.owner == "driver-2"
    replay_all(home, archive)
    head = read_progress(home.context, replays, "t/0")
    assert head is not None
    assert (head.epoch, head.owner) == (2, "")
    assert cycle(home, archive, 3).errors == {}
    check_listed_once(home, archive)


def leave_undecided_manifest(home: Home, archive: Archive, topic: str) -> None:
    """A driver of the generation dies between a manifest and the intent that would name it."""
    real = Cycle._write

    def dies(self: Cycle, state: SourceState, *changes: Change) -> str:
        if state.intent is not None:
            raise Crash
        return real(self, state, *changes)

    fill(home, range(EVENTS, 20), topic)
    with pytest.MonkeyPatch.context() as patch, suppress(Crash):
        patch.setattr(Cycle, "_write", dies)
        cycle(home, archive, 5)


def test_decided_range_of_a_replay_is_committed_and_not_set_aside(home: Home) -> None:
    archive = an_archive(home, "daily", parser=AT)
    cycle(home, archive, 1)
    leave_undecided_manifest(home, archive, "t")

    def die(*_: object) -> int:
        raise Crash

    with pytest.MonkeyPatch.context() as patch, suppress(Crash, TidelogError):
        patch.setattr(Cycle, "_publish", die)
        replay_all(home, archive)
    assert cycle(home, archive, 10).errors == {}
    head = read_progress(home.context, replay_pipeline(archive.pipeline()), "t/0")
    assert head is not None
    assert (head.totals.commits, head.owner) == (1, "")
    assert read_aside(home.context, replay_pipeline(archive.pipeline())) == []
    replayed = {n for n in PARSED if n % 3 == 0}
    check_listed_once(home, archive, {n for n in range(20) if n % 7 and n % 3} | replayed)


@pytest.mark.parametrize("first", rounds(3, every=3))
def test_replay_beside_a_driver_that_looks_for_lost_ranges_archives_each_event_once(
    home: Home, first: int
) -> None:
    at, calls = first - 2, 0
    while at <= calls:  # until no call is left to stall at
        at += 3
        topic = f"t{at}"
        home.create_topic(topic, 1)
        fill(home, range(EVENTS), topic)
        archive = an_archive(home, f"a{at}", f"topic:{topic}", parser=AT)
        cycle(home, archive, 1)
        leave_undecided_manifest(home, archive, topic)
        faults = Stalls()
        faults.wait(at, lambda: cycle(home, archive, 20))  # noqa: B023
        catalog, store = FaultyCatalog(home.catalog, faults), FaultyStore(home.store, faults)
        context = replace(home.context, catalog=catalog, store=store)
        how = ReplayOptions(parser=AT_OR_WHEN)
        with suppress(TidelogError):  # it finds that it has lost the partition
            replay(context, archive, how, LocalWorkers(1))
        calls = faults.calls
        assert cycle(home, archive, 30).errors == {}
        replay_all(home, archive)
        assert records(home, archive) == []
        check_listed_once(home, archive, {n for n in range(20) if n % 7})
    assert at > 20


def test_file_that_a_later_replay_wrote_again_is_not_set_aside(home: Home) -> None:
    """The forgotten replay has a higher ordinal: it was the second one to try these letters."""
    home.create_topic("timed", 1)
    send(home, range(4), b"when", b"at")
    archive = an_archive(home, "daily", "topic:timed", parser=AT)
    cycle(home, archive, 1)
    own = archive.pipeline()
    restores = [saved_rows(home, archive, each) for each in (own, replay_pipeline(own))]
    letters = {each.key: home.store.get(each.key) for each in home.store.list(f"{archive.dead}/")}
    send(home, range(4, 6), b"at")
    cycle(home, archive, 2)
    before = {each.key for each in home.store.list(f"{archive.folder()}/")}
    replay(home.context, archive, ReplayOptions(), LocalWorkers(1))  # it places nothing
    assert replay_all(home, archive).replayed == 2
    for restore in restores:
        restore()
    replayed = {each.key for each in home.store.list(f"{archive.folder()}/")} - before
    home.store.delete(replayed)  # as a drop does that dies before it deletes manifests
    for key, data in letters.items():
        home.store.put(key, data)
    assert replay_all(home, archive).replayed == 2
    assert cycle(home, archive, 3).errors == {}
    assert records(home, archive) == []
    check_listed_once(home, archive, set(range(6)))
