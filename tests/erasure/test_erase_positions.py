"""A position is an incarnation, a source partition and an offset: an erasure takes no other event.

A topic that is created again has other events at the same offsets, and so has another archive of a
stream without offsets, whose events each archive numbers for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.connectors.kinesis.test_archive import HOUR_MS, put
from tests.connectors.kinesis.test_archive import an_archive as a_kinesis_archive
from tests.connectors.kinesis.test_source import Stream
from tests.servers.moto import KEYS
from tests.support.archive_look import AT, FIRST_S, a_home, an_archive, drive
from tests.support.kinesis_server import running_kinesis
from tidelog import Event, Home
from tidelog.archive import fill
from tidelog.archive.archive import open_pipeline
from tidelog.archive.generations import begin_backfill, drop_generation, promote
from tidelog.archive.read import ArchiveFiles
from tidelog.connectors.by_url import store_at
from tidelog.coordination.audit import AuditedSource, Why, read_audit
from tidelog.coordination.pipeline_rows import counting_files
from tidelog.erasure.delete_archived import erase_archived
from tidelog.home import World, create_home
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings

WHY = Why("ada", "asked for")
COLUMNS = {"schema": "at BIGINT", "keep_value": False}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        yield made


def topic(home: Home, prefix: str) -> str:
    """Create the topic with five events; returns its incarnation."""
    incarnation = home.create_topic("t", 1).incarnation
    values = [b'{"at": %d}' % (FIRST_S + number) for number in range(5)]
    events = [Event(each, id=f"{prefix}-{n}") for n, each in enumerate(values)]
    home.append("t", events, partition=0)
    return incarnation


def build(home: Home, name: str, written_as: ArchiveFormat) -> int:
    archive, generation = begin_backfill(home.context, name, written_as)
    pipeline = open_pipeline(home.context, archive, LocalWorkers(2), generation)
    Driver(home.context, pipeline, DriverOptions()).run()
    return generation


def ids(home: Home, archive: Archive, generation: int) -> list[str]:
    """The ids in the files of a generation, also where these are columns only."""
    reader = ArchiveFiles(store_at(home.context, archive.store), archive.format_of(generation))
    files = counting_files(home.context, archive.pipeline(generation), "t/0")
    batches = [batch for manifest, file in files for batch in reader.batches(manifest, file)]
    return sorted(each for batch in batches for each in batch.column("id").to_pylist())


def every(prefix: str, *but: int) -> list[str]:
    return [f"{prefix}-{number}" for number in range(5) if number not in but]


def test_other_archive_keeps_its_event_at_the_offset_of_an_erased_one(home: Home) -> None:
    old = topic(home, "old")
    drive(home, an_archive(home, "raw", parser=AT))
    home.delete_topic("t")
    topic(home, "new")
    drive(home, an_archive(home, "daily", parser=AT))
    begin_backfill(home.context, "daily", ArchiveFormat(parser=AT, source="archive:raw"))
    erase_archived(home.context, home.archives.get("raw").info, WHY, ids=["old-2"])
    assert ids(home, home.archives.get("raw").info, 1) == every("old", 2)
    assert ids(home, home.archives.get("daily").info, 1) == every("new")
    (record,) = read_audit(home.context, home.archives.get("raw").info)
    assert (record.state, record.sources) == ("done", (AuditedSource("t/0", old),))


def test_generation_of_a_topic_created_again_keeps_its_event_at_that_offset(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A backfill refuses another topic of the name, unless it cannot tell the two apart.
    monkeypatch.setattr(fill.FillSource, "_usable", lambda self, partition, old, source: source)
    monkeypatch.setattr(fill, "without_remade", lambda context, pipeline, bounds: bounds)
    topic(home, "old")
    drive(home, an_archive(home, "daily", parser=AT, format_settings=COLUMNS))
    home.delete_topic("t")
    topic(home, "new")
    build(home, "daily", ArchiveFormat(parser=AT))
    daily = home.archives.get("daily").info
    assert ids(home, daily, 2) == every("new")
    erase_archived(home.context, daily, WHY, ids=["old-2"])
    assert ids(home, daily, 1) == every("old", 2)
    assert ids(home, daily, 2) == every("new")


def test_generation_that_a_dropped_one_filled_is_erased_from(home: Home) -> None:
    topic(home, "old")
    drive(home, an_archive(home, "raw", parser=AT))
    drive(home, an_archive(home, "daily", parser=AT))
    home.delete_topic("t")
    build(home, "daily", ArchiveFormat(parser=AT, source="archive:raw"))
    promote(home.context, "daily")
    build(home, "daily", ArchiveFormat(parser=AT, codec="gzip"))
    promote(home.context, "daily")
    drop_generation(home.context, "daily", 2)
    assert ids(home, home.archives.get("daily").info, 3) == every("old")
    erase_archived(home.context, home.archives.get("raw").info, WHY, ids=["old-2"])
    for generation in (1, 3):
        assert ids(home, home.archives.get("daily").info, generation) == every("old", 2)


def test_numbers_of_one_archive_mean_nothing_in_another_one_of_the_stream(tmp_path: Path) -> None:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    with (
        running_kinesis() as service,
        create_home(settings, world=World(environ=KEYS))[0] as home,
    ):
        stream = Stream(service.endpoint)
        first = a_kinesis_archive(home, stream.url(), "first")
        put(stream, range(10))
        drive(home, first)
        service.ahead_ms += 25 * HOUR_MS
        put(stream, range(10, 30))
        later = a_kinesis_archive(home, stream.url(), "later")  # numbers 10 to 29 from 0 on
        drive(home, later)
        copy = a_kinesis_archive(home, "archive:first", "copy")
        drive(home, copy)
        begin_backfill(home.context, "later", ArchiveFormat(source="archive:first"))

        def values(archive: Archive) -> list[int]:
            reader = ArchiveFiles(store_at(home.context, archive.store), archive.format_of())
            files = counting_files(home.context, archive.pipeline(), f"{stream.name}/0")
            found = [batch for manifest, file in files for batch in reader.batches(manifest, file)]
            return sorted(int(v) for batch in found for v in batch.column("value").to_pylist())

        assert values(later) == list(range(10, 30))
        before = len(values(first))
        erased = erase_archived(home.context, home.archives.get("first").info, WHY, key=b"key-3")
        assert erased.events > 0
        assert len(values(first)) == len(values(copy)) == before - erased.events
        assert values(later) == list(range(10, 30))
