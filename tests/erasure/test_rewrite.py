"""Erasing from archives: the events are gone, all others stand once, whatever dies on the way."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.support.archive_look import AT, AT_OR_WHEN, a_home, an_archive, drive, fill
from tests.support.sql_catalog import open_sql_catalog
from tidelog import Event, Home
from tidelog.archive.archive import open_pipeline
from tidelog.archive.dead_letters import ReplayOptions, dead_letters, replay
from tidelog.archive.derived_archives import archives_of
from tidelog.archive.generations import begin_backfill, promote
from tidelog.archive.read import ReadRequest, archived_rows, find_event
from tidelog.archive.tables import change_tables, register
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.catalog.base import ABSENT, Put
from tidelog.erasure import rewrite as erase
from tidelog.erasure.rewrite import ArchiveErasure, erase_from_archive, erase_from_archives
from tidelog.errors import CorruptError, UnavailableError, UnknownOutcomeError
from tidelog.maintenance.erase import erase_until_settled
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.maintenance.turn import ArchiveEraser
from tidelog.model import layout
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.model.pipeline import Intent
from tidelog.model.topic import encode_row
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.testing.faults import Fault, Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash, FakeClock

GONE = {0: [0, 5, 7, 8, 50, 99], 1: [3, 4]}  # 0 and 7 are dead letters of a parser
TYPED = {"schema": "n BIGINT, at BIGINT, `when` BIGINT"}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 2)
        fill(made, range(100))
        fill(made, range(20), partition=1)
        yield made


def left() -> Counter[tuple[int, int]]:
    """What shall be left, by partition and offset."""
    everything = [(0, offset) for offset in range(100)] + [(1, offset) for offset in range(20)]
    return Counter((p, offset) for p, offset in everything if offset not in GONE[p])


def held(home: Home, archive: Archive, generation: int | None = None) -> Counter[tuple[int, int]]:
    """What an archive holds, dead letters too."""
    found: Counter[tuple[int, int]] = Counter()
    rows = archived_rows(home.context, archive, ReadRequest(generation=generation))
    for batches in (rows, dead_letters(home.context, archive, generation)):
        for batch in batches:
            own = "partition" in batch.schema.names
            names = ("partition", "offset") if own else ("_partition", "_offset")
            found.update(zip(*(batch.column(name).to_pylist() for name in names), strict=True))
    return found


def problems(home: Home, archive: Archive, generation: int | None = None) -> list[Any]:
    return list(
        verify_archive(home.context, archive, ArchiveVerifyOptions(generation=generation)).problems
    )


@pytest.mark.parametrize(
    "written_as",
    [
        {},
        {"parser": AT_OR_WHEN},
        {"format": "orc"},
        {"format": "avro"},
        {"format": "jsonlines"},
        {"format": "jsonlines", "format_settings": {"mode": "events"}},
        {"format": "delimited", "codec": "gzip"},
        {"format": "sequence"},
        {"format": "sequence", "format_settings": {"key": "msgpack"}},
        {"parser": AT_OR_WHEN, "format_settings": TYPED},
        {"parser": AT_OR_WHEN, "format_settings": {**TYPED, "keep_value": True}},
        {"parser": AT_OR_WHEN, "format": "orc", "format_settings": TYPED},
        {"parser": AT_OR_WHEN, "format": "avro", "format_settings": TYPED},
    ],
    ids=str,
)
def test_every_format_loses_the_events_and_nothing_else(
    home: Home, written_as: dict[str, Any]
) -> None:
    archive = an_archive(home, "daily", **written_as)
    drive(home, archive)
    topic = home.topic("t")
    (report,) = erase_from_archives(home.context, topic, GONE)
    assert report.events == 8
    assert held(home, archive) == left()
    assert problems(home, archive) == []
    assert find_event(home.context, archive, "t/0", 50).status == "erased"
    assert find_event(home.context, archive, "t/0", 51, read=True).is_there
    (again,) = erase_from_archives(home.context, topic, GONE)
    assert (again.files, again.events) == (0, 0), "it was done"
    assert list(home.store.list("staging/")) == []


def test_a_file_that_loses_all_stays_empty_and_the_archive_goes_on(home: Home) -> None:
    archive = an_archive(home, "daily", parser=AT)
    drive(home, archive)
    files = sorted(info.key for info in home.store.list("archives/daily/g1/"))
    erase_from_archives(home.context, home.topic("t"), {0: range(100), 1: range(20)})
    assert sorted(info.key for info in home.store.list("archives/daily/g1/")) == files
    assert held(home, archive) == Counter()
    assert problems(home, archive) == []
    fill(home, range(100, 130))
    assert drive(home, archive) == 30
    assert held(home, archive) == Counter((0, offset) for offset in range(100, 130))


def test_erasure_that_meets_a_damaged_file_leaves_nothing_staged(home: Home) -> None:
    archive = an_archive(home, "daily", parser=AT_OR_WHEN)
    drive(home, archive)
    topic, before = home.topic("t"), held(home, archive)
    files = sorted(info.key for info in home.store.list("archives/daily/g1/"))
    for key in files:
        data = home.store.get(key)
        home.store.replace(key, b"damaged", home.store.head(key).etag)
        with pytest.raises(CorruptError):
            erase_from_archives(home.context, topic, GONE)
        assert list(home.store.list("staging/")) == []
        home.store.replace(key, data, home.store.head(key).etag)
        if held(home, archive) != before:
            break  # those of the other partition were replaced
    erase_from_archives(home.context, topic, GONE)
    assert held(home, archive) == left()


def test_every_generation_the_copies_of_a_backup_and_replayed_dead_letters_are_reached(
    home: Home,
) -> None:
    backup = an_archive(home, "backup")
    drive(home, backup)
    copy = an_archive(home, "copy", source="archive:backup", parser=AT)
    drive(home, copy)
    live = an_archive(home, "daily", parser=AT)
    drive(home, live)
    replay(home.context, live, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers(1))
    built, generation = begin_backfill(home.context, "daily", ArchiveFormat(parser="timestamp"))
    pipeline_events = drive_generation(home, built, generation)
    assert pipeline_events == 120
    topic = home.topic("t")
    assert {(a.name, g) for a, g in archives_of(home.context, topic)} == {
        ("backup", 1),
        ("copy", 1),
        ("daily", 1),
        ("daily", 2),
    }
    erase_from_archives(home.context, topic, GONE)
    assert find_event(home.context, live, "t/0", 99).says.startswith("was erased"), (
        "of a replay's file"
    )
    for archive, number in archives_of(home.context, topic):
        assert held(home, archive, number) == left(), archive.name
        assert problems(home, archive, number) == [], archive.name
    promoted = promote(home.context, "daily")
    assert held(home, promoted) == left()


def drive_generation(home: Home, archive: Archive, generation: int) -> int:

    pipeline = open_pipeline(home.context, archive, LocalWorkers(2), generation)
    return Driver(home.context, pipeline, DriverOptions()).run()


def test_other_topics_and_other_sources_are_left_alone(home: Home) -> None:
    home.create_topic("u", 1)
    fill(home, range(30), topic="u")
    other = an_archive(home, "other", source="topic:u")
    drive(home, other)
    assert archives_of(home.context, home.topic("t")) == []
    assert erase_from_archives(home.context, home.topic("t"), GONE) == []
    assert sum(held(home, other).values()) == 30


def test_tables_hold_what_the_files_hold(home: Home, tmp_path: Path) -> None:
    archive = an_archive(home, "daily", parser=AT_OR_WHEN)
    drive(home, archive)
    iceberg = f"iceberg:sqlite:///{tmp_path}/ice.db?warehouse=file://{tmp_path}/w#ns.t"
    for name in ("delta", iceberg):
        archive = change_tables(home.context, archive, name, keep=True)
    register(home.context, archive)
    erase_from_archives(home.context, home.topic("t"), GONE)
    alive = Counter(
        (p, offset)
        for p, offset in held(home, archive)
        if find_event(home.context, archive, f"t/{p}", offset).status == "archived"
    )
    fill(home, range(100, 110))
    drive(home, archive)
    register(home.context, archive)
    delta = DeltaTable(str(tmp_path / "o" / archive.folder())).to_pyarrow_table()
    catalog = open_sql_catalog(f"sqlite:///{tmp_path}/ice.db")
    for table in (delta, catalog.load_table("ns.t").scan().to_arrow()):
        pairs = zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True)
        found = Counter(pair for pair in pairs if pair[1] < 100)
        assert found == alive


def test_bounds_of_values_do_not_stay_in_a_tables_history(home: Home, tmp_path: Path) -> None:
    archive = an_archive(home, "typed", parser=AT_OR_WHEN, format_settings=TYPED)
    drive(home, archive)
    name = f"iceberg:sqlite:///{tmp_path}/ice.db?warehouse=file://{tmp_path}/w#ns.t"
    archive = change_tables(home.context, archive, name, keep=True)
    register(home.context, archive)
    catalog = open_sql_catalog(f"sqlite:///{tmp_path}/ice.db")
    bounds = catalog.load_table("ns.t").inspect.files()["lower_bounds"].to_pylist()
    schema = catalog.load_table("ns.t").schema()
    known = {schema.find_field(each).field_id for each in ("offset", "timestamp")}
    assert all({field for field, _ in each} <= known for each in bounds)


@pytest.mark.parametrize("call", [*range(1, 46), *range(46, 122, 3)])
def test_an_erasure_that_dies_after_any_call_is_finished_by_the_next(
    home: Home, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    archive = an_archive(home, "daily", parser=AT, format="jsonlines")
    drive(home, archive)
    faults = Faults(crash_after_call=call)
    with monkeypatch.context() as patch:
        store = FaultyStore(home.store, faults)
        catalog = FaultyCatalog(home.catalog, faults, home.context.clock)
        patch.setattr(
            home, "context", dataclasses.replace(home.context, store=store, catalog=catalog)
        )
        patch.setattr(erase, "files_at", lambda *_: store)
        died = False
        try:
            erase_from_archive(home.context, archive, 1, {"t/0": GONE[0], "t/1": GONE[1]})
        except Crash:
            died = True
    assert died or faults.calls < call
    sweep_archives(home.context, grace_ms=-1)  # between any two steps
    erase_from_archives(home.context, home.topic("t"), GONE)
    assert held(home, home.archives.get("daily").info) == left()
    assert problems(home, archive) == []
    sweep_archives(home.context, grace_ms=-1)
    assert problems(home, archive) == []


@pytest.mark.parametrize("verb", ["write", "replace", "put"])
def test_lost_replies_are_settled(home: Home, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:

    archive = an_archive(home, "daily", parser=AT)
    drive(home, archive)
    faults = Faults()
    faults.on_next(verb, Fault.LOSE_REPLY, Fault.LOSE_REPLY)
    with monkeypatch.context() as patch:
        store = FaultyStore(home.store, faults)
        catalog = FaultyCatalog(home.catalog, faults, home.context.clock)
        patch.setattr(
            home, "context", dataclasses.replace(home.context, store=store, catalog=catalog)
        )
        if verb != "put":  # the home's own store repeats what it must
            patch.setattr(erase, "files_at", lambda *_: store)
        try:
            erase_from_archives(home.context, home.topic("t"), GONE)
        except UnknownOutcomeError:
            assert verb == "put"
    erase_from_archives(home.context, home.topic("t"), GONE)
    assert held(home, archive) == left()
    assert problems(home, archive) == []


def test_a_daemon_carries_deletes_once_and_waits_for_ranges_under_way(home: Home) -> None:
    archive = an_archive(home, "daily")
    home.append("t", [Event(b"x", id="gone"), Event(b"y", id="stays")], partition=0)
    drive(home, archive)
    eraser = ArchiveEraser(home.context)
    assert eraser.turn() == []
    home.delete("t", ["gone"])
    (report,) = eraser.turn()
    assert (report.events, report.waiting) == (1, 0)
    assert eraser.turn() == [], "nothing new"
    assert find_event(home.context, archive, "t/0", 100).status == "erased"
    home.append("t", [Event(b"z", id="late")], partition=0)
    where = layout.pipeline_partition(archive.pipeline(), "t/0")
    intent = Put("intent", encode_row(Intent("102", "103")), expect=ABSENT)
    home.catalog.write(where, intent, write_id=home.context.ids.new())  # a range planned before
    home.delete("t", ["late"])
    assert [report.waiting for report in eraser.turn()] == [1]
    assert [report.waiting for report in eraser.turn()] == [1], "it looks again"
    drive(home, archive)
    assert [report.waiting for report in eraser.turn()] == [0]
    assert eraser.turn() == []


def test_wait_for_a_range_ends_by_a_clock_that_does_not_jump(home: Home) -> None:
    archive = an_archive(home)
    drive(home, archive)
    where = layout.pipeline_partition(archive.pipeline(), "t/0")
    intent = Put("intent", encode_row(Intent("100", "103")), expect=ABSENT)
    home.catalog.write(where, intent, write_id="a range under way")
    clock = FakeClock()
    context = dataclasses.replace(home.context, clock=clock)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        clock.advance(seconds)
        clock.jump(-3_600 if len(looks) % 2 else 7_200)

    clock.sleep = sleep  # type: ignore[method-assign]
    done = erase_until_settled(context, home.topic("t"), {0: {101}}, 10_000, lambda error: None)
    assert [each.waiting for each in done] == [1]
    assert sum(looks) == pytest.approx(10, abs=1)


def test_report_of_several_looks_has_all_that_was_done_and_what_the_last_left() -> None:
    failed = {"delta": UnavailableError("no answer")}
    report = ArchiveErasure("daily", 1, files=1, events=2, ranges=1, waiting=1)
    report.add(ArchiveErasure("daily", 1, 2, 3, 1, updated=4, failed=failed))
    assert report == ArchiveErasure("daily", 1, 3, 5, 2, updated=4, failed=failed)
