"""Archives, pumps and restores whose ranges are cut: the same events, once, in the same order."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

from tests.archive.test_archive import an_archive, fill, listed, payload
from tests.archive.test_fill import BY_HOUR, live, trim
from tests.support.cut_workers import CutWorkers
from tidelog import Event, Home
from tidelog.archive.archive import open_pipeline
from tidelog.archive.fill import FillSource
from tidelog.archive.generations import begin_backfill, promote
from tidelog.archive.restore import RestoreOptions, restore
from tidelog.connectors.archive.reader import CarriedRange, CarriedReader, CompletedReader
from tidelog.connectors.by_url import source_at
from tidelog.connectors.source import DividingReader, RangeReader, Source, SourceRange
from tidelog.coordination.commits import read_manifests
from tidelog.errors import InvalidError
from tidelog.home import World, create_home
from tidelog.model.archive import Archive
from tidelog.pipeline import ranges
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.ranges import FilePolicy
from tidelog.settings import Settings

SMALL = FilePolicy(max_bytes=600_000)  # 1,200 events, as events are taken to have 500 bytes


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    with create_home(settings, world=World(environ={}))[0] as made:
        made.create_topic("t", 1)
        yield made


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> CutWorkers:
    monkeypatch.setattr(ranges, "_CUT_BYTES_MIN", 100_000)
    return CutWorkers(random.Random(5))


def drive(home: Home, archive: Archive, workers: CutWorkers, generation: int | None = None) -> int:
    pipeline = open_pipeline(home.context, archive, workers, generation)
    return Driver(home.context, pipeline, DriverOptions(policy=SMALL)).run()


def whole_range(source: Source) -> SourceRange:
    (partition,) = source.partitions()
    bounds = source.bounds([partition])[partition]
    return SourceRange(partition, bounds.first, bounds.end)


def events_of(*readers: RangeReader) -> pa.Table:
    return pa.Table.from_batches([chunk.batch for each in readers for chunk in each.read()])


def check_parts(reader: RangeReader, cuts: tuple[str, ...]) -> None:
    """The parts read what the whole reads, and each ends at its limit."""
    assert isinstance(reader, DividingReader)
    parts = []
    for start, limit in pairwise([reader.range.start, *cuts, reader.range.limit]):
        part = reader.part(start, limit)
        assert part is not None
        assert (part.range.start, part.range.limit) == (start, limit)
        assert list(part.read())[-1].position == limit
        parts.append(part)
    assert events_of(*parts).equals(events_of(reader))


def test_parts_of_a_topic_read_what_the_whole_reads(home: Home) -> None:
    fill(home, 900)
    home.compile("t")
    fill(home, 300, 900)
    home.append("t", [Event(b"{}", id="x")])
    home.delete("t", ["x"], why="test")
    source = source_at(home.context, "topic:t")
    reader = source.reader(whole_range(source))
    check_parts(reader, ("1", "400", "500", "1150"))


def test_parts_of_an_archive_read_what_the_whole_reads(home: Home, workers: CutWorkers) -> None:
    fill(home, 2_000)
    home.append("t", [Event(b"rubbish"), Event(b"{}")])
    archive = an_archive(home, "daily", parser="json:at", dead_share_max=1.0)
    workers.parallelism = 1
    drive(home, archive, workers)
    source = source_at(home.context, "archive:daily")
    wanted = whole_range(source)
    check_parts(source.reader(wanted), ("7", "1000", "1300", "2001"))
    (cut,) = source.divide(wanted, 2)  # type: ignore[attr-defined]
    assert cut == "1200"  # where the first commit ends
    assert source.divide(wanted, 9) == (cut,)  # type: ignore[attr-defined]


def test_parts_of_a_completed_range_read_what_the_whole_reads(home: Home) -> None:
    fill(home, 900)
    topic = source_at(home.context, "topic:t")
    archive = an_archive(home, "raw")
    drive(home, archive, CutWorkers(random.Random(1), parallelism=1))
    files = source_at(home.context, "archive:raw")
    whole = whole_range(topic)
    part = SourceRange(whole.partition, "200", "600")
    completed = CompletedReader(topic.reader(whole), files.reader(part), 1)
    check_parts(completed, ("100", "200", "400", "650"))
    carried = CarriedReader(files.reader(whole), CarriedRange(1, as_is=False))
    check_parts(carried, ("300",))
    assert isinstance(carried.part("0", "300"), CarriedReader)


def test_ranges_are_cut_by_the_work_and_archived_once(home: Home, workers: CutWorkers) -> None:
    fill(home, 5_000)
    archive = an_archive(home, "daily", parser="json:at")
    assert drive(home, archive, workers) == 5_000
    assert listed(home, archive) == Counter(range(5_000))
    assert workers.cuts
    manifests = list(read_manifests(home.context, archive.pipeline(), "t/0"))
    assert (manifests[0].start, manifests[0].end) == ("0", "3600")  # three full files
    live(home)


def test_range_of_waves_is_archived_once_though_cuts_fail(home: Home, workers: CutWorkers) -> None:
    fill(home, 9_000)
    workers.waves, workers.parallelism = 4, 2
    archive = an_archive(home, "raw")
    assert drive(home, archive, workers) == 9_000
    (manifest,) = read_manifests(home.context, archive.pipeline(), "t/0")
    # Four waves of two: 9,000 events are seven and a half files.
    assert [file.first_offset for file in manifest.files] == list(range(0, 9_000, 1_125))
    workers.fails, workers.ends_early = 0.2, 0.3
    other = an_archive(home, "other")
    while drive(home, other, workers):
        pass
    assert min(workers.failed, workers.ended_early)
    for each in (archive, other):
        assert listed(home, each) == Counter(range(9_000))


def test_sinks_that_send_ranges_and_rates_have_one_wave(home: Home, workers: CutWorkers) -> None:
    fill(home, 5_000)
    home.create_topic("copy", 1)
    workers.waves, workers.parallelism = 4, 2
    how = DriverOptions(policy=SMALL)
    pump = open_pump(home.context, PumpOptions("topic:t", "copy"), workers)
    limited = open_pipeline(home.context, an_archive(home, "raw"), workers)
    for pipeline in (pump, replace(limited, rate=1e9)):
        assert Driver(home.context, pipeline, how).run() == 5_000
        manifests = read_manifests(home.context, pipeline.id, "t/0")
        assert next(iter(manifests)).end == "2400"


def test_small_cycle_stays_one_task(home: Home, workers: CutWorkers) -> None:
    fill(home, 300)
    assert drive(home, an_archive(home, "raw"), workers) == 300
    assert (workers.tasks, workers.cuts) == (1, 0)


def test_backfill_reads_the_live_files_and_the_topic_in_cuts(
    home: Home, workers: CutWorkers
) -> None:
    fill(home, 3_000)
    drive(home, an_archive(home, "daily", parser="json:at"), workers)
    trim(home, 1_700)
    fill(home, 2_000, 3_000)
    workers.cuts = 0
    built, generation = begin_backfill(home.context, "daily", BY_HOUR)
    drive(home, built, workers, generation)
    assert workers.cuts
    manifests = list(read_manifests(home.context, built.pipeline(generation), "t/0"))
    assert [each.end for each in manifests if each.filled][-1] == "1700"
    promote(home.context, "daily")
    assert live(home) == Counter(range(5_000))


def test_cut_ends_where_another_source_of_a_backfill_begins(
    home: Home, workers: CutWorkers
) -> None:
    fill(home, 3_000)
    drive(home, an_archive(home, "daily", parser="json:at"), workers)
    trim(home, 1_700)
    built, generation = begin_backfill(home.context, "daily", BY_HOUR)
    source = open_pipeline(home.context, built, workers, generation).source
    assert isinstance(source, FillSource)
    assert source.divide(whole_range(source), 3) == ("1000", "2000")
    drive(home, built, workers, generation)
    promote(home.context, "daily")
    assert live(home) == Counter(range(3_000))


def test_restore_and_pump_keep_the_order_of_cut_ranges(home: Home, workers: CutWorkers) -> None:
    fill(home, 4_000)
    workers.fails = workers.ends_early = 0.1
    archive = an_archive(home, "raw")
    while drive(home, archive, workers):
        pass
    for name in ("back", "copy"):
        home.create_topic(name, 1)
    how = DriverOptions(policy=SMALL)
    restore(home.context, RestoreOptions("raw", "topic:back"), workers, how)
    pump = open_pump(home.context, PumpOptions("topic:t", "copy"), workers)
    Driver(home.context, pump, how).run()
    assert min(workers.cuts, workers.failed, workers.ended_early)
    for name in ("back", "copy"):
        source = source_at(home.context, f"topic:{name}")
        values = events_of(source.reader(whole_range(source))).column("value").to_pylist()
        assert [json.loads(each)["n"] for each in values] == list(range(4_000))


def test_archive_of_an_archive_is_cut_where_commits_end(home: Home, workers: CutWorkers) -> None:
    fill(home, 4_000)
    drive(home, an_archive(home, "raw"), CutWorkers(random.Random(1), parallelism=1))
    daily = an_archive(home, "daily", "archive:raw", parser="json:at")
    drive(home, daily, workers)
    assert workers.cuts
    assert listed(home, daily) == Counter(range(4_000))


def fill_with_dead(home: Home, dead: set[int]) -> None:
    """Appends three cuts of 1,200 events; those at these offsets have no time."""
    home.append("t", [Event(b"{}" if n in dead else payload(n)) for n in range(3_600)])


def test_dead_letters_of_one_cut_are_a_share_of_the_whole_range(
    home: Home, workers: CutWorkers
) -> None:
    dead = set(range(1_200, 1_350))  # 12.5 % of the second cut, 4.2 % of all
    fill_with_dead(home, dead)
    archive = an_archive(home, "daily", parser="json:at")
    assert drive(home, archive, workers) == 3_600
    assert workers.cuts == 2
    assert listed(home, archive) == Counter(set(range(3_600)) - dead)
    (manifest,) = read_manifests(home.context, archive.pipeline(), "t/0")
    assert (manifest.written, manifest.dead) == (3_450, 150)


def test_too_many_dead_letters_of_all_cuts_stop_the_range(home: Home, workers: CutWorkers) -> None:
    dead = {n for n in range(3_600) if n % 1_200 < 80}  # fewer than 100 in each cut
    fill_with_dead(home, dead)
    archive = an_archive(home, "daily", parser="json:at", dead_share_max=0.0)
    with pytest.raises(InvalidError, match="240 of 3600 events are dead letters") as refused:
        drive(home, archive, workers)
    assert refused.value.context["offset"] in dead
    assert workers.cuts == 2
    assert list(read_manifests(home.context, archive.pipeline(), "t/0")) == []
    kept = [info.key for info in home.store.list("") if info.key.endswith(".parquet")]
    assert kept == []
    assert list(home.store.list("staging/")) == []
