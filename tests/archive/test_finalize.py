"""Finalizing: markers and watermark over crashes, late files, two at once and a bad network."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import pytest

from tests.log.test_targets import answering
from tests.support.fake_pipelines import ListSource
from tidelog.archive.finalize import (
    FinalizeOptions,
    Finalizer,
    FinalizeResult,
    FolderNotice,
    Listener,
)
from tidelog.catalog.base import Put
from tidelog.catalog.memory import MemoryCatalog
from tidelog.codec.parsers import FolderSettings
from tidelog.connectors.source import SourcePartition
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import read_archive
from tidelog.errors import InvalidError, TidelogError, UnavailableError, UnknownOutcomeError
from tidelog.log.notify_targets import open_target
from tidelog.model import layout
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.model.decoding import seal_json
from tidelog.model.pipeline import Commit, FileEntry, ListedPartition, Manifest, Progress
from tidelog.model.times import Backoff
from tidelog.model.topic import decode_row, encode_row
from tidelog.pipeline.date_folders import DateFolders
from tidelog.store.memory import MemoryStore
from tidelog.store.wrappers import RetryingStore
from tidelog.testing.faults import Fault, Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash, FakeClock, Scheduler, seeded_ids

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
RATES = {
    Fault.LOSE_REQUEST: 0.02,
    Fault.LOSE_REPLY: 0.05,
    Fault.DUPLICATE: 0.05,
    Fault.DELAY: 0.2,
    Fault.CRASH_BEFORE: 0.01,
    Fault.CRASH_AFTER: 0.01,
}
HOUR = FinalizeOptions(delay_ms=HOUR_MS)
SECONDS = FinalizeOptions(delay_ms=200)


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


NOON = ms("2026-11-17T12:00")


class Recorder:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.trouble: TidelogError | None = None

    def send(self, notification: FolderNotice) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.told.append((notification.event, notification.folder))


class World:
    """An archive in memory whose commits are made by hand."""

    def __init__(self, partitions: int = 1, parser: str = "timestamp", **names: str) -> None:
        self.rows, self.clock = MemoryCatalog(), FakeClock(NOON)
        self.objects = MemoryStore(self.clock)
        self.source = ListSource(partitions, 0)
        self.told, self.parser = Recorder(), parser
        self.layout = FolderSettings(**names)
        self.truth: dict[str, tuple[int, int]] = {}  # files and events that each folder has
        made = Archive(
            name="a",
            incarnation="inc",
            source="list:",
            kind="partition" if parser else "backup",
            store="memory:",
            root="archives/a",
            created_ms=0,
            formats={1: ArchiveFormat(parser=parser, layout=names)},
            state="ready",
        )
        change = Put(layout.archive_row("a"), encode_row(made))
        self.rows.write(layout.REGISTRY, change, write_id="made")
        for partition in self.source.partitions():
            row = Put(
                layout.partition_row(partition.text), encode_row(ListedPartition(partition.text))
            )
            self.rows.write(layout.pipeline_members("inc.1"), row, write_id=partition.text)

    def context(self, faults: Faults | None = None, scheduler: Scheduler | None = None) -> Context:
        clock = scheduler.clock if scheduler else self.clock
        chance = random.Random(7)
        if faults is None:
            return Context(
                self.objects, self.rows, clock, seeded_ids(random.getrandbits(40)), chance
            )
        faulty = FaultyStore(self.objects, faults)
        backoff = Backoff(attempts=3)
        store = RetryingStore(faulty, clock=clock, random=chance, backoff=backoff)
        ids = seeded_ids(faults.random.getrandbits(40))
        return Context(store, FaultyCatalog(self.rows, faults, clock), clock, ids, chance)

    def commit(self, times: Sequence[str], partition: int = 0, waiting: int = 0) -> None:
        """One event of each time archived as one range; ``waiting`` more are not archived yet."""
        name = f"t/{partition}"
        where = layout.pipeline_partition("inc.1", name)
        row = self.rows.get(where, "head")
        head = decode_row(row.value, Progress, "head") if row else Progress("0", 0, 1)
        first, end = head.ordinal, head.ordinal + len(times)
        files = [self._file(partition, first + n, ms(time)) for n, time in enumerate(times)]
        manifest = Manifest("inc.1", name, str(first), str(end), first, len(times), len(times))
        manifest = msgspec.structs.replace(manifest, files=tuple(files))
        key = f"manifests/{partition}/{first}"
        self.objects.put(key, seal_json(manifest))
        done = Commit(key, str(first), str(end), len(times), len(files), 0, 1)
        totals = head.totals.plus(manifest, self.clock.now_ms())
        after = msgspec.structs.replace(head, position=str(end), ordinal=end, totals=totals)
        self.rows.write(
            where,
            Put(layout.commit_row(first, str(first)), encode_row(done)),
            Put("head", encode_row(after)),
            write_id=f"{name}/{first}",
        )
        self.source.ends[SourcePartition("t", str(partition))] = end + waiting

    def _file(self, partition: int, offset: int, time_ms: int) -> FileEntry:
        """A file with one event of a time, in the folder that it belongs in."""
        if not self.parser:
            target = f"archives/a/g1/t/1_{partition}_{offset:020}.parquet"
            return FileEntry("", target, 1, 0, 1, offset, offset, time_ms, time_ms)
        name = datetime.fromtimestamp(time_ms / 1000, UTC).strftime(self.layout.path_format)
        target = f"archives/a/g1/t/{name}/1_{partition}_{offset:020}.parquet"
        parts = name.split("/")
        for depth in range(1, len(parts) + 1):
            folder = "/".join(["t", *parts[:depth]])
            files, events = self.truth.get(folder, (0, 0))
            self.truth[folder] = (files + 1, events + 1)
        return FileEntry("", target, 1, 0, 1, offset, offset, time_ms, time_ms, path_ms=time_ms)

    def finalizer(self, context: Context, told: Listener | None = None) -> Finalizer:
        archive = read_archive(context, "a")
        return Finalizer(context, archive, [self.source], context.store, told or self.told)

    def run(self, how: FinalizeOptions = HOUR, context: Context | None = None) -> FinalizeResult:
        return self.finalizer(context or self.context()).run(how)

    @property
    def watermark_ms(self) -> int | None:
        return read_archive(self.context(), "a").watermark_ms

    def markers(self) -> dict[str, dict[str, object]]:
        found = [info.key for info in self.objects.list("archives/a/g1/")]
        return {
            key.removeprefix("archives/a/g1/").removesuffix("/_SUCCESS"): json.loads(
                self.objects.get(key)
            )
            for key in found
            if key.endswith("/_SUCCESS")
        }

    def check(self, *folders: str) -> None:
        """Exactly these folders are marked, with all the files and events that they have."""
        markers = self.markers()
        assert set(markers) == set(folders)
        for folder, said in markers.items():
            assert (said["files"], said["events"]) == self.truth[folder], folder

    def unsettled(self) -> list[str]:
        where = layout.pipeline_members("inc.1")
        return [row.row for row in self.rows.scan(where, "unsettled/", "unsettled0")]

    def waiting(self) -> list[str]:
        where = layout.pipeline_members("inc.1")
        return [row.row for row in self.rows.scan(where, "waiting/", "waiting0")]


def test_folders_that_are_over_are_marked_and_the_watermark_says_it() -> None:
    world = World(2)
    world.commit(["2026-11-15T10:00", "2026-11-16T10:00", "2026-11-17T10:00"])
    world.commit(["2026-11-15T11:00", "2026-11-17T11:30"], partition=1)
    done = world.run()
    world.check("t/dt=2026-11-15", "t/dt=2026-11-16")
    assert world.watermark_ms == done.watermark_ms == NOON - HOUR_MS
    assert world.markers()["t/dt=2026-11-15"] == {
        "archive": "a",
        "folder": "t/dt=2026-11-15",
        "watermark": "2026-11-17T11:00:00.000Z",
        "files": 2,
        "events": 2,
    }
    assert world.told.told == [("final", "t/dt=2026-11-15"), ("final", "t/dt=2026-11-16")]
    assert world.unsettled() == []
    again = world.run()
    assert again.notices == []
    assert len(world.told.told) == 2


def test_a_partition_that_is_behind_holds_the_watermark_and_a_quiet_one_does_not() -> None:
    world = World(3)
    world.commit(["2026-11-15T10:00", "2026-11-17T10:00"])
    world.commit(["2026-11-10T10:00"], partition=1)  # quiet since
    assert world.source.ends[SourcePartition("t", "2")] == 0  # never had an event
    world.commit(["2026-11-15T10:00", "2026-11-16T00:30"], waiting=5)
    world.run()
    world.check("t/dt=2026-11-10")
    assert world.watermark_ms == ms("2026-11-15T23:30")
    world.commit(["2026-11-16T01:00"], waiting=4)
    world.run()
    world.check("t/dt=2026-11-10", "t/dt=2026-11-15")


def test_events_that_nobody_has_read_hold_everything() -> None:
    world = World(2)
    world.commit(["2026-11-15T10:00"])
    world.source.ends[SourcePartition("t", "1")] = 1
    assert world.run().watermark_ms is None
    world.check()
    assert world.watermark_ms is None


def test_an_event_from_the_future_marks_no_folder_of_events_that_wait() -> None:
    world = World()
    world.commit(["2026-11-15T10:00", "2026-11-16T10:00", "2199-01-01T00:00"], waiting=3)
    world.run()
    assert world.watermark_ms == ms("2026-11-16T09:00")
    world.check("t/dt=2026-11-15")
    world.commit(["2026-11-17T18:00"], waiting=3)  # a wrong time zone
    world.run()
    assert world.watermark_ms == ms("2026-11-16T09:00")
    world.commit(["2026-11-17T10:00"], waiting=3)
    world.run()
    assert world.watermark_ms == ms("2026-11-17T09:00")
    world.check("t/dt=2026-11-15", "t/dt=2026-11-16")


def test_partition_that_a_person_ended_holds_nothing() -> None:
    world = World(2)
    world.commit(["2026-11-16T10:00"])
    world.commit(["2026-11-15T10:00"], partition=1, waiting=3)
    where = layout.pipeline_partition("inc.1", "t/1")
    row = world.rows.get(where, "head")
    assert row is not None
    head = decode_row(row.value, Progress, "head")
    ended = msgspec.structs.replace(head, ended="remade", incarnation="before")
    world.source.incarnation = "now"
    world.rows.write(where, Put("head", encode_row(ended)), write_id="ended")
    world.run()
    assert world.watermark_ms == NOON - HOUR_MS
    world.check("t/dt=2026-11-15", "t/dt=2026-11-16")


def test_events_of_the_future_alone_hold_everything_until_all_is_read() -> None:
    world = World(2)
    world.commit(["2026-11-16T10:00"])
    world.commit(["2199-01-01T00:00"], partition=1, waiting=3)
    world.run()
    assert world.watermark_ms == 0
    world.check()
    world.commit(["2026-11-16T10:00"] * 3, partition=1)
    world.run()
    assert world.watermark_ms == NOON - HOUR_MS
    world.check("t/dt=2026-11-16")


def test_time_that_a_clock_ahead_committed_holds_everything() -> None:
    world = World()
    world.clock.jump(3 * 24 * 3600)
    world.commit(["2026-11-16T10:00", "2026-11-18T10:00"], waiting=3)
    world.clock.jump(-3 * 24 * 3600)
    assert world.run().watermark_ms is None
    world.check()


def test_a_clock_that_is_ahead_does_not_move_the_watermark_past_the_store_s_time() -> None:
    world = World()
    world.commit(["2026-11-16T10:00", "2026-11-17T10:00"])
    world.run(context=replace(world.context(), clock=FakeClock(NOON + 365 * 24 * HOUR_MS)))
    assert world.watermark_ms == NOON - HOUR_MS
    world.check("t/dt=2026-11-16")


def test_the_watermark_never_goes_back() -> None:
    world = World()
    world.commit(["2026-11-17T11:00"])
    world.run()
    world.commit(["2026-11-12T11:00"], waiting=7)
    assert world.run().watermark_ms == world.watermark_ms == NOON - HOUR_MS
    world.clock.jump(-7200)
    world.run()
    assert world.watermark_ms == NOON - HOUR_MS


def test_late_files_reopen_a_folder_until_a_delay_has_passed_without_more() -> None:
    world = World()
    world.commit(["2026-11-15T10:00", "2026-11-17T10:00"])
    world.run()
    world.check("t/dt=2026-11-15")
    world.commit(["2026-11-15T23:00"])
    done = world.run()
    world.check()
    assert [(n.event, n.folder, n.files) for n in done.notices] == [
        ("reopened", "t/dt=2026-11-15", 2)
    ]
    assert world.watermark_ms == NOON - HOUR_MS
    world.clock.advance(1800)
    world.commit(["2026-11-15T22:00"])  # another late one prolongs it
    assert world.run().notices == []
    world.clock.advance(1801)
    world.run()
    world.check()
    world.clock.advance(1800)
    world.run()
    world.check("t/dt=2026-11-15")
    events = [event for event, _ in world.told.told]
    assert events == ["final", "reopened", "final"]
    world.clock.advance(3600)
    world.run()
    assert world.unsettled() == []


def test_folders_get_their_marker_however_long_ago_they_ended() -> None:
    world = World()
    days = [f"2026-11-{day:02}T10:00" for day in range(1, 18)]
    world.commit(days)
    world.clock.advance(-2 * 86_400)
    world.run(FinalizeOptions(HOUR_MS))
    world.check(*(f"t/dt=2026-11-{day:02}" for day in range(1, 15)))
    world.clock.advance(40 * 86_400)
    world.commit(["2026-11-12T10:00", "2026-10-03T10:00"])
    world.run(FinalizeOptions(HOUR_MS))
    others = [f"t/dt=2026-11-{day:02}" for day in range(1, 18) if day != 12]
    world.check("t/dt=2026-10-03", *others)
    world.clock.advance(3600)
    world.run(FinalizeOptions(HOUR_MS))
    world.check("t/dt=2026-10-03", "t/dt=2026-11-12", *others)
    assert world.waiting() == []


def test_hours_are_final_before_their_day() -> None:
    world, how = World(granularity="hour"), FinalizeOptions(HOUR_MS)
    world.commit(["2026-11-16T22:10", "2026-11-16T23:59", "2026-11-17T09:30", "2026-11-17T11:59"])
    world.run(how)
    world.check(
        *("t/dt=2026-11-16", "t/dt=2026-11-16/hr=22", "t/dt=2026-11-16/hr=23"),
        "t/dt=2026-11-17/hr=09",
    )
    world.commit(["2026-11-16T22:20"])
    world.run(how)
    world.check("t/dt=2026-11-16/hr=23", "t/dt=2026-11-17/hr=09")


def test_a_backup_and_folders_without_time_have_a_watermark_alone() -> None:
    for world in (World(parser=""), World(date_format="all")):
        world.commit(["2026-11-15T10:00"])
        assert world.run().notices == []
        assert world.markers() == {}
        assert world.watermark_ms == NOON - HOUR_MS


def test_a_range_of_very_many_folders_is_counted_once() -> None:
    world = World(granularity="minute")
    start = ms("2026-11-17T08:00")
    times = [datetime.fromtimestamp(start / 1000 + 60 * n, UTC) for n in range(35)]
    world.commit([f"{time:%Y-%m-%dT%H:%M}" for time in times] * 2)
    world.run(FinalizeOptions(HOUR_MS))
    assert len(world.markers()) == 36
    world.check(*(folder for folder in world.truth if folder != "t/dt=2026-11-17"))


def test_a_dry_run_tells_the_same_and_changes_nothing() -> None:
    world = World()
    world.commit(["2026-11-15T10:00", "2026-11-16T10:00"])
    world.run()
    world.commit(["2026-11-15T10:00", "2026-11-14T10:00"])
    before = (world.markers(), list(world.rows.scan(layout.pipeline_members("inc.1"))))
    foreseen = world.run(FinalizeOptions(HOUR_MS, dry_run=True))
    assert before == (world.markers(), list(world.rows.scan(layout.pipeline_members("inc.1"))))
    assert len(world.told.told) == 2
    done = world.run()
    assert {(n.event, n.folder, n.files, n.watermark) for n in foreseen.notices} == {
        (n.event, n.folder, n.files, n.watermark) for n in done.notices
    }
    assert foreseen.watermark_ms == done.watermark_ms


def test_who_could_not_be_told_is_told_by_the_next_one() -> None:
    world = World()
    world.commit(["2026-11-15T10:00", "2026-11-16T10:00"])
    world.told.trouble = UnavailableError("no answer")
    done = world.run()
    assert len(done.errors) == 2
    assert done.notices == []
    world.told.trouble = None
    world.run()
    world.run()
    assert [folder for _, folder in world.told.told] == ["t/dt=2026-11-15", "t/dt=2026-11-16"]
    world.check("t/dt=2026-11-15", "t/dt=2026-11-16")


def test_a_webhook_is_told() -> None:
    world = World()
    world.commit(["2026-11-16T10:00"])
    with answering(503) as server:
        target = open_target(server.url, {"TIDELOG_NOTIFY_LOCAL": "1"})
        assert len(world.finalizer(world.context(), target).run(HOUR).errors) == 1  # type: ignore[arg-type]
        assert world.finalizer(world.context(), target).run(HOUR).errors == []  # type: ignore[arg-type]
        assert len(server.requests) == 2
        assert server.requests[1][2] == {
            "archive": "a",
            "folder": "t/dt=2026-11-16",
            "event": "final",
            "watermark": "2026-11-17T11:00:00.000Z",
            "files": 1,
            "events": 1,
        }


def lively(world: World) -> None:
    """Folders to mark, one to reopen, and one that waits to be marked again."""
    world.commit(["2026-11-13T10:00", "2026-11-14T10:00"])
    world.run()
    world.commit(["2026-11-13T11:00"])
    world.run()
    world.clock.advance(3600)
    world.commit(["2026-11-14T11:00", "2026-11-15T10:00", "2026-11-16T09:00"])


def settled(world: World, how: FinalizeOptions = HOUR) -> None:
    """What must be there in the end, whatever happened on the way."""
    for _ in range(3):
        world.run(how)
        world.clock.advance(3601)
    world.check(*(folder for folder in world.truth if folder != "t/dt=2026-11-17"))
    assert world.unsettled() == []
    markers = {folder for event, folder in world.told.told if event == "final"}
    assert set(world.markers()) <= markers


@pytest.mark.parametrize("call", range(1, 50))
def test_one_that_dies_after_any_call_is_finished_by_the_next(call: int) -> None:
    world = World()
    lively(world)
    faults = Faults(crash_after_call=call)
    died = False
    try:
        world.run(context=world.context(faults))
    except Crash:
        died = True
    assert died or faults.calls < call
    settled(world)


def test_the_last_of_those_calls_is_beyond_the_end() -> None:
    world = World()
    lively(world)
    faults = Faults()
    world.run(context=world.context(faults))
    assert 30 < faults.calls <= 48


@pytest.mark.parametrize("block", range(6))
def test_two_at_once_in_a_bad_world_beside_a_driver(block: int) -> None:
    for seed in range(block * 15, block * 15 + 15):
        world, scheduler = World(4), Scheduler(seed)
        world.clock, world.objects = scheduler.time, MemoryStore(scheduler.time)
        scheduler.time.jump((NOON - scheduler.time.now_ms()) / 1000)
        faults = Faults(scheduler.random, RATES, scheduler)
        ends_s = scheduler.time.monotonic_s() + 3

        def finalize(
            world: World = world,
            faults: Faults = faults,
            s: Scheduler = scheduler,
            ends_s: float = ends_s,
        ) -> None:
            while s.time.monotonic_s() < ends_s:
                with contextlib.suppress(UnavailableError, UnknownOutcomeError, Crash):
                    world.run(SECONDS, world.context(faults, s))
                s.clock.sleep(s.random.random() * 0.1)

        def drive(world: World = world, s: Scheduler = scheduler, ends_s: float = ends_s) -> None:
            while s.time.monotonic_s() < ends_s:
                days = [s.random.randrange(14, 17) for _ in range(s.random.randrange(1, 4))]
                times = [f"2026-11-{day}T{s.random.randrange(24):02}:00" for day in days]
                for partition in s.random.sample(range(4), 3):
                    world.commit(times, partition=partition)
                for _ in range(s.random.randrange(40)):
                    s.pause("driver")
                s.clock.sleep(s.random.random() * 0.5)

        scheduler.spawn("one", finalize)
        scheduler.spawn("two", finalize)
        scheduler.spawn("driver", drive)
        scheduler.run()
        for effect in faults.late:
            effect()
        try:
            settled(world, SECONDS)
        except AssertionError as exc:
            raise AssertionError(f"seed {seed}") from exc


def test_a_marker_that_a_stalled_one_put_or_deleted_too_late_is_mended() -> None:
    world, folder = World(), "t/dt=2026-11-15"
    marker = f"archives/a/g1/{folder}/_SUCCESS"
    world.commit(["2026-11-15T10:00"])
    world.run()
    stale = world.objects.get(marker)
    world.commit(["2026-11-15T11:00"])
    world.run()
    world.objects.put(marker, stale)  # while it is open
    world.run()
    world.check()
    world.clock.advance(3600)
    faults = Faults()
    faults.on_next("put", Fault.CRASH_BEFORE)
    with pytest.raises(Crash):
        world.run(context=world.context(faults))
    world.objects.put(marker, stale)  # while it is marked again
    world.run()
    world.check(folder)
    world.objects.delete([marker])
    world.run()
    world.check(folder)


@pytest.mark.parametrize("wrong", [{"delay_ms": -1}])
def test_contradictory_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidError, match="give a delay"):
        FinalizeOptions(**wrong)  # type: ignore[arg-type]


SPANS = [
    ({}, "red/dt=2026-11-15", "2026-11-15T10:00", ["red/dt=2026-11-15 2026-11-16T00:00"]),
    ({}, "dt=2026-11-17", "2026-11-15T10:00", []),  # the name is not of that time
    ({}, "offset=100", "2026-11-15T10:00", []),
    ({}, "dt=9999-12-31", "9999-12-31T10:00", []),
    ({}, "dt=9999-12-30/hr=01", "9999-12-31T23:59", []),
    # What a replay named with other units, or in another time zone.
    ({}, "t/dt=2026-11-15/hr=10", "2026-11-15T10:00", ["t/dt=2026-11-15 2026-11-16T00:00"]),
    (
        {"granularity": "hour"},
        "t/dt=2026-11-15",
        "2026-11-15T10:00",
        ["t/dt=2026-11-15 2026-11-16T00:00"],
    ),
    (
        {"granularity": "hour"},
        "t/dt=2026-11-16/hr=00/min=05",
        "2026-11-15T10:05",
        ["t/dt=2026-11-16 2026-11-17T00:00", "t/dt=2026-11-16/hr=00 2026-11-16T01:00"],
    ),
    ({"date_format": "%Y/%m"}, "2026/02", "2026-02-27T10:00", ["2026/02 2026-03-01T00:00"]),
    ({"date_format": "%G-W%V"}, "2026-W46", "2026-11-15T10:00", ["2026-W46 2026-11-16T00:00"]),
    ({"date_format": "%m-%d"}, "11-15", "2026-11-15T10:00", []),  # comes again each year
    ({"date_format": "%Y-%d"}, "2026-15", "2026-11-15T10:00", []),  # and each month
    (
        {"granularity": "hour", "time_zone": "America/New_York"},  # the hour comes twice
        "dt=2026-11-01/hr=01",
        "2026-11-01T05:30",
        ["dt=2026-11-01 2026-11-02T05:00", "dt=2026-11-01/hr=01 2026-11-01T07:00"],
    ),
    (
        {"granularity": "hour", "time_zone": "America/New_York"},  # the next hour is left out
        "dt=2026-03-08/hr=01",
        "2026-03-08T06:30",
        ["dt=2026-03-08 2026-03-09T04:00", "dt=2026-03-08/hr=01 2026-03-08T07:00"],
    ),
]


@pytest.mark.parametrize(("names", "folder", "time", "expected"), SPANS)
def test_until_when_a_folder_lasts(
    names: dict[str, str], folder: str, time: str, expected: list[str]
) -> None:
    found = DateFolders(FolderSettings(**names)).spans(folder, ms(time))
    ends = [datetime.fromtimestamp(span.end_ms / 1000, UTC) for span in found]
    shown = [f"{span.folder} {end:%Y-%m-%dT%H:%M}" for span, end in zip(found, ends, strict=True)]
    assert shown == expected
