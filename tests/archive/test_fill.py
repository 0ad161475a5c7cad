"""Promote and rollback lose nothing: what a source no longer holds comes from the live files."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow.compute as pc
import pytest

from tests.archive.test_archive import an_archive, fill, payload
from tests.support.waiting import until
from tidelog import Event, Home
from tidelog.archive import generations
from tidelog.archive.archive import open_pipeline
from tidelog.archive.coverage import MissingRange
from tidelog.archive.generations import begin_backfill, drop_generation, promote, rollback
from tidelog.archive.restore import RestoreOptions, restore
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.clock import SystemClock
from tidelog.connectors.source import Chunk
from tidelog.coordination.commits import read_manifests
from tidelog.coordination.pipeline_rows import (
    change_archive,
    read_partitions,
    read_progress,
)
from tidelog.errors import FencedError, InvalidError, TidelogError
from tidelog.home import World, create_home
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.model import layout, limits
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pipeline import CycleReport
from tidelog.pipeline.ranges import FilePolicy
from tidelog.pipeline.tasks import LocalWorkers, Task, TaskOutcome, run_task
from tidelog.settings import Settings
from tidelog.testing.scheduler import Crash

BY_HOUR = ArchiveFormat(parser="json:at", layout={"granularity": "hour"})
COLUMNS = {"schema": "n INT, at BIGINT", "keep_value": False}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    with create_home(settings, world=World(environ={}))[0] as made:
        made.create_topic("t", 1)
        yield made


def drive(home: Home, archive: Archive, generation: int | None = None, **how: Any) -> int:
    workers = how.pop("workers", None) or LocalWorkers(2)
    pipeline = open_pipeline(home.context, archive, workers, generation)
    return Driver(home.context, pipeline, DriverOptions(**how)).run()


def backfill(
    home: Home, name: str = "daily", written_as: ArchiveFormat = BY_HOUR, **how: Any
) -> Archive:
    built, generation = begin_backfill(home.context, name, written_as)
    drive(home, built, generation, **how)
    return built


def trim(home: Home, offset: int, topic: str = "t") -> None:
    home.trim(topic, ToOffsets({0: offset}), past_readers=True)


def listed(home: Home, archive: Archive, generation: int | None = None) -> Counter[int]:
    folder = f"{home.store.url.removeprefix('file://')}/{archive.folder(generation)}"
    rows = duckdb.sql(f"SELECT value FROM read_parquet('{folder}/**/*.parquet')").fetchall()
    return Counter(json.loads(value)["n"] for (value,) in rows)


def live(home: Home, name: str = "daily") -> Counter[int]:
    """What the live generation's folder has; its account adds up."""
    archive = home.archives.get(name).info
    report = verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True))
    assert [each for each in report.problems if each.kind != "let-go"] == []
    return listed(home, archive)


def keys(home: Home, prefix: str) -> list[str]:
    return [info.key for info in home.store.list(prefix)]


def test_promote_keeps_events_that_the_topic_has_trimmed(home: Home) -> None:
    fill(home, 110)
    drive(home, an_archive(home, "daily", parser="json:at"))
    trim(home, 60)
    backfill(home)
    promote(home.context, "daily")
    assert live(home) == Counter(range(110))
    assert drive(home, home.archives.get("daily").info) == 0


def test_dead_letters_that_only_the_files_have_are_tried_by_the_new_parser(home: Home) -> None:
    home.append("t", [Event(b"rubbish"), Event(payload(1)), Event(b"{}")])
    drive(home, an_archive(home, "daily", parser="json:at", dead_share_max=1.0))
    trim(home, 3)
    backfill(home, written_as=ArchiveFormat(parser="timestamp"))
    promoted = promote(home.context, "daily")
    head = read_progress(home.context, promoted.pipeline(), "t/0")
    assert head is not None
    assert (head.position, head.ordinal, head.totals.dead, head.totals.filled) == ("3", 3, 0, 3)


def test_a_deleted_topic_of_a_pattern_archive_is_carried_over(home: Home) -> None:
    fill(home, 30)
    home.create_topic("u", 1)
    home.append("u", [Event(payload(n)) for n in range(100, 140)])
    archive = an_archive(home, "daily", parser="json:at")
    drive(home, archive)
    drive(home, reading(home, "topic:u"))
    reading(home, "topic:t")
    home.delete_topic("u")
    backfill(home)
    promote(home.context, "daily")
    assert live(home) == Counter([*range(30), *range(100, 140)])


def reading(home: Home, source: str, name: str = "daily") -> Archive:
    """An archive whose source is another one now, as if a pattern had matched both."""
    return change_archive(
        home.context, name, lambda found: msgspec.structs.replace(found, source=source)
    )


def test_archive_whose_only_topic_was_deleted_is_built_again_from_its_files(home: Home) -> None:
    fill(home, 40)
    drive(home, an_archive(home, "daily", parser="json:at"))
    home.delete_topic("t")
    backfill(home)
    promote(home.context, "daily")
    assert live(home) == Counter(range(40))


def test_topics_that_only_a_backup_has_stay_out(home: Home) -> None:
    fill(home, 30)
    home.create_topic("u", 1)
    home.append("u", [Event(payload(n)) for n in range(100, 140)])
    drive(home, an_archive(home, "raw"))
    drive(home, reading(home, "topic:u", "raw"))
    drive(home, an_archive(home, "daily", parser="json:at"))
    written_as = ArchiveFormat(parser="json:at", source="archive:raw")
    backfill(home, written_as=written_as)
    promoted = promote(home.context, "daily")
    assert read_partitions(home.context, promoted.pipeline()) == ["t/0"]
    assert live(home) == Counter(range(30))


def test_a_gap_of_a_backup_is_filled_from_the_live_generation(home: Home) -> None:
    fill(home, 50)
    drive(home, an_archive(home, "raw"))
    drive(home, an_archive(home, "daily", parser="json:at"))
    fill(home, 50, first=50)
    drive(home, home.archives.get("daily").info)
    trim(home, 80)
    drive(home, home.archives.get("raw").info, accept_loss=True)
    backfill(home, written_as=ArchiveFormat(parser="json:at", source="archive:raw"))
    promote(home.context, "daily")
    assert live(home) == Counter(range(100))


def test_a_gap_that_the_live_generation_has_does_not_stop_a_promote(home: Home) -> None:
    fill(home, 50)
    drive(home, an_archive(home, "daily", parser="json:at"))
    fill(home, 50, first=50)
    trim(home, 80)
    drive(home, home.archives.get("daily").info, accept_loss=True)
    backfill(home)
    promoted = promote(home.context, "daily")
    assert live(home) == Counter([*range(50), *range(80, 100)])
    head = read_progress(home.context, promoted.pipeline(), "t/0")
    assert head is not None
    assert [(gap.start, gap.end, gap.reason) for gap in head.gaps] == [("50", "80", "retention")]


def test_files_without_raw_values_cannot_fill_and_the_refusal_lists_the_ranges(home: Home) -> None:
    fill(home, 110)
    archive = an_archive(home, "daily", parser="json:at", format_settings=COLUMNS)
    drive(home, archive)
    trim(home, 60)
    backfill(home)
    with pytest.raises(InvalidError, match=re.escape("`t/0` from 0 to 60")):
        promote(home.context, "daily")
    assert home.archives.get("daily").info.generation == 1
    fill(home, 10, first=110)
    assert drive(home, home.archives.get("daily").info) == 10, "its heads are released"
    forced = promote(home.context, "daily", force=True)
    assert [each.ranges for each in forced.forced] == [(("t/0", "0", "60"),)]
    assert live(home) == Counter(range(60, 120))
    with pytest.raises(InvalidError, match=re.escape("`t/0` from 0 to 60")):
        drop_generation(home.context, "daily", 1)
    drop_generation(home.context, "daily", 1, force=True)
    assert list(home.archives.get("daily").info.formats) == [2]


class Halving:
    """Workers whose transform drops events of odd offsets."""

    def run(self, tasks: Sequence[Task]) -> Iterator[TaskOutcome]:
        for task in tasks:
            if task.transform:
                reader: Any = _Even(task.reader)
                task = dataclasses.replace(task, reader=reader, transform="")  # noqa: PLW2901
                outcome = run_task(task)
                read = reader.read_all
                assert outcome.produced is not None, outcome.error
                yield dataclasses.replace(
                    outcome, produced=dataclasses.replace(outcome.produced, read=read)
                )
            else:
                yield run_task(task)


class _Even:
    drops = 1  # bits of an offset that must not be set

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.range = reader.range
        self.read_all = 0

    def read(self) -> Iterator[Chunk]:
        for chunk in self._reader.read():
            self.read_all += chunk.batch.num_rows
            even = pc.equal(pc.bit_wise_and(chunk.batch.column("offset"), self.drops), 0)
            yield dataclasses.replace(chunk, batch=chunk.batch.filter(even))


def test_output_of_a_transform_is_carried_over_as_it_is(home: Home) -> None:
    fill(home, 20)
    archive = an_archive(home, "daily", parser="json:at", transform="m:f")
    drive(home, archive, workers=Halving())
    trim(home, 20)
    backfill(
        home, written_as=ArchiveFormat(parser="timestamp", transform="m:f")
    )  # no transform runs here
    promoted = promote(home.context, "daily")
    assert live(home) == Counter(range(0, 20, 2))
    (manifest,) = read_manifests(home.context, promoted.pipeline(), "t/0")
    assert (manifest.filled, manifest.as_is, manifest.read) == (1, True, 10)
    assert [(gap.reason, gap.offsets) for gap in manifest.lost] == [("transform", 10)]


def test_what_a_transform_of_a_backup_dropped_comes_from_the_live_generation(home: Home) -> None:
    fill(home, 20)
    raw = an_archive(home, "raw", transform="m:f")
    drive(home, raw, workers=Halving())
    drive(home, an_archive(home, "daily", parser="json:at"))
    chained = an_archive(home, "copy", source="archive:raw")
    drive(home, chained)
    trim(home, 20)
    backfill(home, written_as=ArchiveFormat(parser="json:at", source="archive:copy"))
    promote(home.context, "daily")
    assert live(home) == Counter(range(20))


def test_rollback_brings_the_kept_generation_up_to_date(home: Home) -> None:
    fill(home, 50)
    drive(home, an_archive(home, "daily", parser="json:at"))
    backfill(home)
    promoted = promote(home.context, "daily")
    assert promoted.in_state("kept") == [1]
    fill(home, 50, first=50)
    drive(home, promoted)
    trim(home, 90)  # 50 to 89 are in the live generation only
    back = rollback(home.context, "daily")
    assert (back.generation, back.in_state("kept")) == (1, [2])
    assert live(home) == Counter(range(100))
    fill(home, 10, first=100)
    assert drive(home, back) == 10
    again = rollback(home.context, "daily")
    assert again.generation == 2
    assert live(home) == Counter(range(110))
    assert drive(home, again) == 0


def test_a_driver_of_the_live_generation_does_not_go_on_in_one_that_is_rolled_back_to(
    home: Home,
) -> None:
    fill(home, 30)
    archive = an_archive(home, "daily", parser="json:at")
    drive(home, archive)
    backfill(home)
    promote(home.context, "daily")
    change_archive(  # where a rollback begins
        home.context, "daily", lambda found: msgspec.structs.replace(found, states={1: "building"})
    )
    fill(home, 10, first=30)
    with pytest.raises(FencedError, match="generation 1 is building"):
        drive(home, archive)
    assert rollback(home.context, "daily").generation == 1


def test_rollback_without_a_kept_generation_is_refused(home: Home) -> None:
    fill(home, 10)
    drive(home, an_archive(home, "daily", parser="json:at"))
    with pytest.raises(InvalidError, match="keeps no other generation"):
        rollback(home.context, "daily")
    backfill(home)
    for generation in (None, 2):  # it was never live
        with pytest.raises(InvalidError, match="generation 2 is being built"):
            rollback(home.context, "daily", generation=generation)
    promote(home.context, "daily")
    begin_backfill(home.context, "daily", ArchiveFormat(parser="timestamp"))
    with pytest.raises(InvalidError, match="generation 3 is being built"):
        rollback(home.context, "daily")


def test_driver_resumes_after_a_promote_that_was_refused_or_died(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(home, 30)
    drive(home, an_archive(home, "daily", parser="json:at"))
    backfill(home)
    with monkeypatch.context() as patch:
        patch.setattr(generations, "missing_ranges", dying_after(generations.missing_ranges, 1))
        with pytest.raises(Crash):
            promote(home.context, "daily")
    found = home.archives.get("daily").info
    assert found.promotion is not None
    head = read_progress(home.context, found.pipeline(), "t/0")
    assert head is not None
    assert head.frozen == found.promotion.id
    monkeypatch.setattr(limits, "PROMOTION_MS", -1)
    fill(home, 30, first=30)
    assert drive(home, found) == 30
    assert home.archives.get("daily").info.promotion is None
    assert live(home) == Counter(range(60))


class AheadClock(SystemClock):
    """The clock of a machine that is a year ahead."""

    def now_ms(self) -> int:
        return super().now_ms() + 365 * 86_400_000


@pytest.mark.parametrize("has_clock", [True, False])
def test_a_promote_by_a_wrong_clock_holds_drivers_up_no_longer(
    home: Home, monkeypatch: pytest.MonkeyPatch, has_clock: bool
) -> None:
    """The store's clock dates a promote, so one that died is withdrawn after a minute anywhere.

    A folder has the machine's clock, which was put right since.
    """
    monkeypatch.setattr("tidelog.coordination.trusted_time.has_own_clock", lambda store: has_clock)
    fill(home, 30)
    drive(home, an_archive(home, "daily", parser="json:at"))
    backfill(home)
    right = home.context
    monkeypatch.setattr(home, "context", dataclasses.replace(right, clock=AheadClock()))
    with monkeypatch.context() as patch:
        patch.setattr(generations, "missing_ranges", dying_after(generations.missing_ranges, 1))
        with pytest.raises(Crash):
            promote(home.context, "daily")
    monkeypatch.setattr(home, "context", right)
    if has_clock:
        monkeypatch.setattr(limits, "PROMOTION_MS", -1)
    fill(home, 30, first=30)
    assert drive(home, home.archives.get("daily").info) == 30


def dying_after(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    done = 0

    def wrapped(*given: Any) -> Any:
        nonlocal done
        done += 1
        if done > calls:
            raise Crash
        return function(*given)

    return wrapped


def test_a_promote_that_stalls_too_long_switches_nothing(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(home, 30)
    drive(home, an_archive(home, "daily", parser="json:at"))
    backfill(home)
    before = generations.missing_ranges
    calls = 0

    def stalling(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        found = before(*given)
        if calls == 2:  # compared under the freeze; now a driver withdraws it
            monkeypatch.setattr(limits, "PROMOTION_MS", -1)
            fill(home, 30, first=30)
            assert drive(home, home.archives.get("daily").info) == 30
        return found

    with monkeypatch.context() as patch:
        patch.setattr(generations, "missing_ranges", stalling)
        with pytest.raises(InvalidError, match="drivers have resumed"):
            promote(home.context, "daily")
    assert home.archives.get("daily").info.generation == 1
    promote(home.context, "daily")
    assert live(home) == Counter(range(60))


def test_events_that_come_during_a_promote_are_in_the_new_generation(home: Home) -> None:
    fill(home, 30)
    archive = an_archive(home, "daily", parser="json:at")
    stop = threading.Event()
    ends: list[BaseException] = []

    def follow() -> None:
        try:
            drive(home, archive, follow=True, stop=stop, policy=FilePolicy(max_age_ms=20))
        except TidelogError as exc:
            ends.append(exc)

    thread = threading.Thread(target=follow)
    thread.start()
    until(lambda: read_progress(home.context, archive.pipeline(), "t/0"))
    backfill(home)
    stopped = threading.Event()

    def append() -> None:
        n = 30
        while not stopped.is_set():
            fill(home, 1, first=n)
            n += 1
        numbers.append(n)

    numbers: list[int] = []
    appender = threading.Thread(target=append)
    appender.start()
    promoted = promote(home.context, "daily")
    until(lambda: not thread.is_alive())
    stopped.set()
    appender.join()
    stop.set()
    assert isinstance(ends[0], FencedError), ends
    drive(home, promoted)
    assert live(home) == Counter(range(numbers[0]))


def test_promote_ends_although_its_source_never_does(home: Home) -> None:
    fill(home, 30)
    drive(home, an_archive(home, "daily", parser="json:at"))
    begin_backfill(home.context, "daily", BY_HOUR)
    n = 30

    class Growing(LocalWorkers):
        """Each range that is read lets more come in."""

        def run(self, tasks: Sequence[Task]) -> Iterator[TaskOutcome]:
            nonlocal n
            assert n < 60, "it reads on and on"
            yield from super().run(tasks)
            fill(home, 10, first=n)
            n += 10

    promoted = promote(home.context, "daily", workers=Growing())
    drive(home, promoted)
    assert live(home) == Counter(range(n))


def test_a_range_under_way_is_settled_when_its_generation_is_kept(home: Home) -> None:
    """What was decided is committed, what was not is withdrawn: no erasure waits for it."""
    fill(home, 30)
    archive = an_archive(home, "daily", parser="json:at")
    drive(home, archive)
    backfill(home)
    fill(home, 10, first=30)

    class Dying:
        def run(self, tasks: Sequence[Task]) -> Iterator[TaskOutcome]:
            raise Crash

    with pytest.raises(Crash):
        drive(home, archive, workers=Dying())
    where = layout.pipeline_partition(archive.pipeline(), "t/0")
    assert home.catalog.get(where, "intent") is not None
    promote(home.context, "daily")
    assert home.catalog.get(where, "intent") is None
    drive(home, home.archives.get("daily").info)
    assert live(home) == Counter(range(40))


def test_restore_resumes_after_a_promote_and_a_rollback(home: Home) -> None:
    home.create_topic("again", 1)
    fill(home, 30)
    drive(home, an_archive(home, "daily", parser="json:at"))
    assert restore(home.context, RestoreOptions("daily", "topic:again"), LocalWorkers()) == 30
    backfill(home)
    promote(home.context, "daily")
    fill(home, 10, first=30)
    drive(home, home.archives.get("daily").info)
    assert restore(home.context, RestoreOptions("daily", "topic:again"), LocalWorkers()) == 10
    rollback(home.context, "daily")
    assert restore(home.context, RestoreOptions("daily", "topic:again"), LocalWorkers()) == 0


def prepared(home: Home) -> None:
    """An archive whose topic was trimmed, and a generation that fills the rest from files."""
    fill(home, 40)
    drive(home, an_archive(home, "daily", parser="json:at"))
    fill(home, 40, first=40)
    drive(home, home.archives.get("daily").info)
    trim(home, 60)


def test_reports_of_a_backfill_count_what_was_filled(home: Home) -> None:
    prepared(home)
    reports: list[CycleReport] = []
    built = backfill(home, on_cycle=reports.append)
    assert sum(report.events for report in reports) == 80
    head = read_progress(home.context, built.pipeline(2), "t/0")
    assert head is not None
    assert head.totals.filled == 60


def test_forced_promote_says_how_many_lost_ranges_it_does_not_list(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(home, 30)
    drive(home, an_archive(home, "daily", parser="json:at"))
    backfill(home)
    lost = [MissingRange("t/0", str(n), str(n + 1)) for n in range(7)]
    monkeypatch.setattr(limits, "FORCED_RANGES_MAX", 3)
    monkeypatch.setattr(generations, "missing_ranges", lambda *_: lost)
    (forced,) = promote(home.context, "daily", force=True).forced
    assert (len(forced.ranges), forced.more) == (3, 4)
