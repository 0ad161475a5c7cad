"""Offsets are compared together with incarnations, and gaps of a source are not what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from tests.support.archive_look import a_home, an_archive, fill
from tidelog import Event, Home
from tidelog.archive.archive import open_pipeline
from tidelog.archive.generations import begin_backfill, drop_generation, promote
from tidelog.connectors.source import SourcePartition
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.errors import InvalidError, NotFoundError, UnavailableError
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.model.archive import ArchiveFormat, Start
from tidelog.model.pipeline import Begin, Progress
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.gaps import RemadeError
from tidelog.pipeline.pipeline import CycleReport
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.testing.scheduler import Crash


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        yield made


def run(home: Home, name: str, generation: int | None = None, **how: object) -> int:
    archive = home.archives.get(name).info
    pipeline = open_pipeline(home.context, archive, LocalWorkers(1), generation)
    return Driver(home.context, pipeline, DriverOptions(**how)).run()  # type: ignore[arg-type]


def offsets(folder: Path, name: str, generation: int) -> list[int]:
    files = f"{folder}/o/archives/{name}/g{generation}/**/*.parquet"
    found = duckdb.sql(f"SELECT \"offset\" FROM read_parquet('{files}') ORDER BY 1")
    return [row[0] for row in found.fetchall()]


def make_again(home: Home, events: int, partitions: int = 1) -> None:
    home.delete_topic("t", past_readers=True)
    home.create_topic("t", partitions)
    for partition in range(partitions):
        home.append("t", [Event(b"other")] * events, partition=partition)


def head_of(home: Home, name: str) -> Progress:
    found = read_progress(home.context, home.archives.get(name).info.pipeline(), "t/0")
    assert found is not None
    return found


def test_drop_keeps_what_a_topic_that_was_made_again_does_not_have(
    home: Home, tmp_path: Path
) -> None:
    fill(home, range(60))
    an_archive(home, "d")
    fill(home, range(60, 100))
    run(home, "d", start="latest")
    begin_backfill(home.context, "d", ArchiveFormat(start="earliest"))
    run(home, "d", 2)
    make_again(home, 100)
    with pytest.raises(InvalidError, match="`t/0` from 0 to 60"):
        drop_generation(home.context, "d", 2)
    assert offsets(tmp_path, "d", 2) == list(range(100))


def test_drop_counts_what_the_same_topic_still_holds(home: Home) -> None:
    fill(home, range(60))
    an_archive(home, "d")
    run(home, "d", start="latest")
    begin_backfill(home.context, "d", ArchiveFormat(start="earliest"))
    run(home, "d", 2)
    drop_generation(home.context, "d", 2)
    assert 2 not in home.archives.get("d").info.formats


def test_drop_keeps_what_is_a_gap_of_the_source(home: Home, tmp_path: Path) -> None:
    """The source is an archive that spans the offsets, and has a gap there."""
    an_archive(home, "raw")
    fill(home, range(50))
    run(home, "raw")
    an_archive(home, "d", source="archive:raw")
    run(home, "d")
    begin_backfill(home.context, "d", ArchiveFormat(source="topic:t"))
    fill(home, range(50, 60))
    run(home, "d", 2)
    fill(home, range(60, 90))
    home.trim("t", ToOffsets({0: 80}), past_readers=True)
    run(home, "raw", accept_loss=True)
    with pytest.raises(InvalidError, match="`t/0` from 50 to 60"):
        drop_generation(home.context, "d", 2)
    assert offsets(tmp_path, "d", 2) == list(range(60))


def test_backfill_takes_from_live_files_what_is_in_a_gap_of_its_source(
    home: Home, tmp_path: Path
) -> None:
    """The gap reaches past the end of the live generation."""
    an_archive(home, "raw")
    an_archive(home, "d")
    fill(home, range(50))
    run(home, "raw")
    fill(home, range(50, 60))
    run(home, "d")
    fill(home, range(60, 90))
    home.trim("t", ToOffsets({0: 80}), past_readers=True)
    run(home, "raw", accept_loss=True)
    begin_backfill(home.context, "d", ArchiveFormat(source="archive:raw"))
    run(home, "d", 2)
    promote(home.context, "d")
    run(home, "d")  # reads on in its own source
    assert offsets(tmp_path, "d", 2) == [*range(60), *range(80, 90)]


def test_gap_of_the_source_before_the_live_files_begin_stays_a_gap(
    home: Home, tmp_path: Path
) -> None:
    an_archive(home, "raw")
    fill(home, range(30))
    run(home, "raw")
    fill(home, range(30, 50))
    an_archive(home, "d")
    fill(home, range(50, 60))
    run(home, "d", start="latest")
    fill(home, range(60, 90))
    home.trim("t", ToOffsets({0: 80}), past_readers=True)
    run(home, "raw", accept_loss=True)
    begin_backfill(home.context, "d", ArchiveFormat(source="archive:raw", start="earliest"))
    run(home, "d", 2)
    promote(home.context, "d")
    run(home, "d")  # reads on in its own source
    assert offsets(tmp_path, "d", 2) == [*range(30), *range(50, 60), *range(80, 90)]
    gaps = [(gap.start, gap.end, gap.reason) for gap in head_of(home, "d").gaps]
    assert gaps == [("30", "50", "upstream"), ("60", "80", "upstream")]


def test_run_drains_a_partition_that_begins_again(home: Home, tmp_path: Path) -> None:
    fill(home, range(10))
    an_archive(home, "d")
    run(home, "d", start="latest")  # claims it, and commits nothing
    make_again(home, 7)
    with pytest.raises(RemadeError):
        run(home, "d")
    assert run(home, "d", accept_loss=True) == 7
    assert offsets(tmp_path, "d", 1) == list(range(7))


@pytest.mark.parametrize("accepts_first", [True, False])
def test_new_partitions_of_a_topic_that_was_made_again_are_not_read(
    home: Home, tmp_path: Path, accepts_first: bool
) -> None:
    home.create_topic("copy", 1)
    fill(home, range(10))
    archive = home.archives.create("d", source="topic:t")
    pump = home.pumps.create("p", source="topic:t", topic="copy")
    for each in (archive, pump):
        each.run()
    make_again(home, 7, partitions=3)
    for each in (archive, pump):
        with pytest.raises(RemadeError):
            each.run()
        assert not accepts_first or each.run(accept_loss=True).events == 0
    archive.backfill(codec="gzip")
    archive.promote()
    assert archive.run(accept_loss=True).events == 0
    accounts = [each.account for each in archive.status().partitions]
    assert [(each.archived, [gap.reason for gap in each.gaps]) for each in accounts] == [
        (10, ["remade"]),
        (0, ["remade"]),
        (0, ["remade"]),
    ]
    assert offsets(tmp_path, "d", 2) == list(range(10))
    assert len(list(home.read("copy"))) == 10


def test_partition_without_events_does_not_begin_again_in_a_topic_that_was_made_again(
    home: Home,
) -> None:
    home.create_topic("two", 2)
    home.append("two", [Event(b"old")] * 3, partition=1)
    archive = home.archives.create("d", source="topic:two")
    archive.run()
    home.delete_topic("two", past_readers=True)
    home.create_topic("two", 2)
    home.append("two", [Event(b"other")] * 5, partition=0)
    with pytest.raises(RemadeError):
        archive.run()
    assert archive.run(accept_loss=True).events == 0
    assert archive.run().events == 0
    values = [value for batch in archive.read() for value in batch.column("value").to_pylist()]
    assert values == [b"old"] * 3


def test_generation_of_columns_takes_nothing_of_a_topic_that_was_made_again(home: Home) -> None:
    fill(home, range(10))
    an_archive(home, "d", format_settings={"schema": "n INT", "keep_value": False})
    run(home, "d")
    make_again(home, 10)
    an_archive(home, "copy")
    run(home, "copy")
    begin_backfill(home.context, "d", ArchiveFormat(source="archive:copy"))
    with pytest.raises(NotFoundError, match="neither the source nor a file of"):
        run(home, "d", 2)
    assert read_progress(home.context, home.archives.get("d").info.pipeline(2), "t/0") is None


@pytest.mark.parametrize("accept_loss", [True, False])
@pytest.mark.parametrize("step", ["_record", "_finish"])
def test_partition_waits_for_a_range_of_the_topic_that_was_deleted(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, accept_loss: bool
) -> None:
    """One driver has a range under way or decided; another one begins with the new topic."""
    home.create_topic("two", 2)
    home.append("two", [Event(b"old")] * 3, partition=1)
    archive = home.archives.create("d", source="topic:two")
    first, other = SourcePartition("two", "0"), SourcePartition("two", "1")
    with monkeypatch.context() as patch:
        patch.setattr(Cycle, step, _die)
        with pytest.raises(Crash):
            read_range(home, "one", other, "3", accept_loss=False)
    home.delete_topic("two", past_readers=True)
    home.create_topic("two", 2)
    home.append("two", [Event(b"other")] * 5, partition=0)
    report = read_range(home, "two", first, "5", accept_loss)
    assert not report.committed
    if step == "_record":
        assert isinstance(report.errors[first], UnavailableError)
    elif not accept_loss:
        assert isinstance(report.errors[first], RemadeError)
    else:
        assert report.ended == {first}
    # Now a third driver has all partitions, as the first one is dead.
    pipeline = open_pipeline(home.context, archive.info, LocalWorkers(1))
    Driver(home.context, pipeline, DriverOptions(accept_loss=True, take_over=True)).run()
    values = [value for batch in archive.read() for value in batch.column("value").to_pylist()]
    assert values == ([b"old"] * 3 if step == "_finish" else [b"other"] * 5)


def _die(*_: object) -> None:
    raise Crash


def read_range(
    home: Home, owner: str, partition: SourcePartition, limit: str, accept_loss: bool
) -> CycleReport:
    """Claims a source partition and reads one range of it."""
    archive = home.archives.get("d").info
    pipeline = open_pipeline(home.context, archive, LocalWorkers(1))
    bounds = pipeline.source.bounds([partition])
    cycle = Cycle(home.context, pipeline, owner, accept_loss)
    held = bounds[partition]
    cycle.claim(partition, Begin(held.first, held.begins), held.incarnation)
    return cycle.run({partition: limit}, bounds)


@pytest.mark.parametrize("step", ["_record", "_finish"])
def test_backfill_reads_no_new_topic_beside_a_decided_range_of_the_old_one(
    home: Home, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    home.create_topic("two", 2)
    home.append("two", [Event(b"old")] * 3, partition=1)
    archive = home.archives.create("d", source="topic:two")
    with monkeypatch.context() as patch:
        patch.setattr(Cycle, step, _die)
        with pytest.raises(Crash):
            read_range(home, "one", SourcePartition("two", "1"), "3", accept_loss=False)
    home.delete_topic("two", past_readers=True)
    home.create_topic("two", 2)
    home.append("two", [Event(b"other")] * 5, partition=0)
    begin_backfill(home.context, "d", ArchiveFormat(codec="gzip"))
    if step == "_record":
        with pytest.raises(UnavailableError, match="while a range of it was read"):
            run(home, "d", 2, accept_loss=True)
    else:
        run(home, "d", 2, accept_loss=True)
    run(home, "d", accept_loss=True, take_over=True)
    run(home, "d", 2, accept_loss=True)
    archive.promote()
    values = [value for batch in archive.read() for value in batch.column("value").to_pylist()]
    assert values == ([b"old"] * 3 if step == "_finish" else [b"other"] * 5)


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_topic_that_was_made_again_before_the_first_run_is_reported(
    home: Home, tmp_path: Path, start: Start
) -> None:
    """The creation of the archive has seen its events, which are lost unless it begins at them."""
    fill(home, range(10))
    an_archive(home, "d", start=start)
    make_again(home, 7)
    if start == "earliest":
        with pytest.raises(RemadeError, match=r"made again: it is .* and 0 is committed"):
            run(home, "d")
        assert run(home, "d", accept_loss=True) == 7
        assert [gap.reason for gap in head_of(home, "d").gaps] == ["remade"]
    assert run(home, "d") == (7 if start == "latest" else 0)
    assert offsets(tmp_path, "d", 1) == list(range(7))


def test_empty_topic_that_was_made_again_before_the_first_run_is_no_loss(home: Home) -> None:
    an_archive(home, "d")
    make_again(home, 7)
    assert run(home, "d") == 7
    assert head_of(home, "d").gaps == ()
