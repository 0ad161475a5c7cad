"""An erasure is a standing fact: no generation that is built later brings an event back."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.archive.test_archive import an_archive
from tests.archive.test_fill import drive
from tidelog import Event, Home, ToOffsets
from tidelog.archive import erased_events as erased_before
from tidelog.archive.account import read_account
from tidelog.archive.archive import open_pipeline
from tidelog.archive.dead_letters import ReplayOptions, replay
from tidelog.archive.derived_archives import Origin
from tidelog.archive.erased_events import ErasedBefore
from tidelog.archive.generations import begin_backfill, promote
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.connectors.source import SourcePartition, SourceRange
from tidelog.coordination.audit import Why, read_audit
from tidelog.coordination.pipeline_rows import read_partitions
from tidelog.erasure import delete_archived, unfinished_ranges
from tidelog.erasure.delete import delete_events
from tidelog.erasure.delete_archived import erase_archived
from tidelog.erasure.event_search import FoundEvent
from tidelog.errors import UnknownOutcomeError
from tidelog.home import World, create_home
from tidelog.maintenance.erase import purge
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.maintenance.turn import ArchiveEraser
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.tasks import NO_ERASED_ROWS, ErasedRows, LocalWorkers, Task
from tidelog.settings import Settings
from tidelog.spark import workers
from tidelog.testing.scheduler import Crash

WHY = Why("asked", "me")
LEFT = ["e0", "e1", "e2", "e4", "e5"]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    with create_home(settings, world=World(environ={}))[0] as made:
        made.create_topic("t", 1)
        yield made


def fill(home: Home, first: int = 0, end: int = 6) -> None:
    home.append("t", [Event(b"x", id=f"e{n}") for n in range(first, end)])


def write_events(folder: Path, name: str, events: list[tuple[str, int, str]]) -> str:
    """Put events with ids, offsets and times into a file; the source that reads the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "id": event,
            "key": "k",
            "value": "v",
            "topic": "x",
            "partition": 0,
            "offset": offset,
            "timestamp": time,
            "headers": [],
            "type": "",
        }
        for event, offset, time in events
    ]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"file:{folder}?mode=events"


def numbered(count: int) -> list[tuple[str, int, str]]:
    return [(f"e{n}", n, "2025-01-01T00:00:00Z") for n in range(count)]


def built(home: Home, name: str = "daily", source: str = "") -> Archive:
    """A promoted generation that was built from a source."""
    archive, generation = begin_backfill(home.context, name, ArchiveFormat(source=source))
    drive(home, archive, generation)
    return promote(home.context, name)


def folder_of(home: Home, archive: Archive, generation: int | None = None) -> Path:
    return Path(home.store.url.removeprefix("file://")) / archive.folder(generation)


def ids(home: Home, archive: Archive, generation: int | None = None) -> list[str]:
    files = folder_of(home, archive, generation).rglob("*.parquet")
    return sorted(each for file in files for each in pq.ParquetFile(file).read()["id"].to_pylist())


def check_account(home: Home, archive: Archive, erased: int) -> None:
    """The live generation counts the erased events, and is as its account says."""
    context, pipeline = home.context, archive.pipeline()
    accounts = [
        read_account(context, pipeline, each) for each in read_partitions(context, pipeline)
    ]
    assert sum(each.erased for each in accounts if each is not None) == erased
    report = verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True))
    assert report.problems == []


def test_backfill_leaves_out_what_was_erased_from_the_archive(home: Home, tmp_path: Path) -> None:
    source = write_events(tmp_path / "src", "a.jsonl", numbered(6))
    archive = an_archive(home, "daily", source)
    drive(home, archive)
    assert erase_archived(home.context, archive, WHY, ["e3"]).events == 1
    archive = built(home)
    assert ids(home, archive) == LEFT
    check_account(home, archive, erased=1)


def test_backfill_leaves_out_events_of_an_erased_key(home: Home, tmp_path: Path) -> None:
    source = write_events(tmp_path / "src", "a.jsonl", numbered(6))
    archive = an_archive(home, "daily", source)
    drive(home, archive)
    assert erase_archived(home.context, archive, WHY, key=b"k").events == 6
    archive = built(home)
    assert ids(home, archive) == []
    check_account(home, archive, erased=6)


def test_backfill_from_another_archive_leaves_out_what_was_erased(home: Home) -> None:
    fill(home)
    for name in ("daily", "raw"):
        drive(home, an_archive(home, name))
    home.delete_topic("t")
    erase_archived(home.context, home.archives.get("daily").info, WHY, ["e3"])
    archive = built(home, source="archive:raw")
    assert ids(home, archive) == LEFT
    assert ids(home, home.archives.get("raw").info) == sorted([*LEFT, "e3"])
    check_account(home, archive, erased=1)


def test_dead_letter_that_a_replay_leaves_out_is_accounted_for(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(home)
    drive(home, an_archive(home, "daily", parser="json:at"))
    home.delete_topic("t", past_readers=True)
    archive = home.archives.get("daily").info

    def die(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(delete_archived, "erase_from_archive", die)
        with pytest.raises(Crash):
            erase_archived(home.context, archive, WHY, ["e3"])
    replay(home.context, archive, ReplayOptions(), LocalWorkers(1))
    delete_archived.finish_archive(home.context, archive)
    check_account(home, archive, erased=1)


def test_archive_made_of_an_erased_one_leaves_out_what_was_erased_there(
    home: Home, tmp_path: Path
) -> None:
    source = write_events(tmp_path / "src", "a.jsonl", numbered(6))
    first = an_archive(home, "first", source)
    drive(home, first)
    shutil.copytree(folder_of(home, first), tmp_path / "copy")
    drive(home, an_archive(home, "daily", "archive:first"))
    erase_archived(home.context, first, WHY, ["e3"])
    archive = built(home, source=f"file:{tmp_path}/copy")
    assert ids(home, archive) == LEFT
    check_account(home, archive, erased=1)


@pytest.mark.parametrize("deleted", [False, True])
def test_copy_of_before_a_delete_brings_no_event_back(
    home: Home, tmp_path: Path, deleted: bool
) -> None:
    fill(home)
    archive = an_archive(home, "daily")
    drive(home, archive)
    shutil.copytree(folder_of(home, archive), tmp_path / "copy")
    delete_events(home.context, home.amender("t", WHY), ["e3"])
    purge(home.context, home.topic("t"), grace_ms=0)
    if deleted:
        home.delete_topic("t")
    archive = built(home, source=f"file:{tmp_path}/copy")
    assert ids(home, archive) == LEFT
    check_account(home, archive, erased=1)


def test_deletes_of_a_deleted_topic_are_in_the_audit_of_its_archives(home: Home) -> None:
    fill(home)
    archive = an_archive(home, "daily")
    home.delete("t", ["e3"], why="asked", who="me")  # before the archive has read it
    drive(home, archive)
    (before,) = home.audit("t")
    home.delete_topic("t")
    (record,) = read_audit(home.context, archive)
    assert (record.id, record.at_ms, record.why) == (before.id, before.at_ms, "asked")
    assert [event.offset for event in record.events] == [3]
    assert record.sources[0].partition == "t/0"


def test_event_that_was_sent_again_after_the_erasure_is_archived(
    home: Home, tmp_path: Path
) -> None:
    source = write_events(tmp_path / "src", "a.jsonl", numbered(6))
    archive = an_archive(home, "daily", source)
    drive(home, archive)
    erase_archived(home.context, archive, WHY, ["e3"])
    later = [*numbered(6), ("e3", 6, "2099-01-01T00:00:00Z"), ("e3", 7, "2025-01-01T00:00:00Z")]
    write_events(tmp_path / "src", "a.jsonl", later)
    drive(home, archive)
    assert ids(home, archive) == sorted([*LEFT, "e3"])
    check_account(home, archive, erased=2)


def test_event_of_a_deleted_id_that_a_producer_sent_again_is_in_a_new_generation(
    home: Home, tmp_path: Path
) -> None:
    fill(home)
    archive = an_archive(home, "daily")
    drive(home, archive)
    delete_events(home.context, home.amender("t", WHY), ["e3"])
    home.append("t", [Event(b"again", id="e3", timestamp=0)])
    drive(home, archive)
    shutil.copytree(folder_of(home, archive), tmp_path / "copy")
    purge(home.context, home.topic("t"), grace_ms=0)
    archive = built(home, source=f"file:{tmp_path}/copy")
    assert ids(home, archive) == sorted([*LEFT, "e3"])


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("deleted", [False, True])
def test_late_event_of_an_id_or_key_that_was_erased_after_a_trim_stays_in_new_generations(
    home: Home, by_key: bool, deleted: bool
) -> None:
    home.append("t", [Event(b"old", key=b"k", id="again", timestamp=1), Event(b"x", id="e1")])
    daily = home.archives.create("daily", source="topic:t")
    other = home.archives.create("other", source="topic:t")
    for each in (daily, other):
        each.run()
    home.trim("t", ToOffsets({0: 2}))
    home.erase("t", key=b"k") if by_key else home.erase("t", ids=["again"])
    new = "new" if by_key else "again"
    home.append("t", [Event(b"late", key=b"k", id=new, timestamp=2)])
    for each in (daily, other):
        each.run()
    if deleted:
        home.delete_topic("t", past_readers=True)
    daily.backfill(source="" if deleted else "archive:other")
    daily.promote()
    chain = home.archives.create("chain", source="archive:daily")
    chain.run()
    for each in (daily, chain):
        found = [row for batch in each.read() for row in batch.column("value").to_pylist()]
        assert sorted(found) == [b"late", b"x"], each.name
        assert each.verify(deep=True).problems == []


def trimmed_after_a_copy(home: Home, folder: Path) -> str:
    """Trim the first of two events of a key, which only a copied folder has; its address."""
    home.append("t", [Event(b"old", key=b"k"), Event(b"gone", key=b"k"), Event(b"x", id="x")])
    full = home.archives.create("full", source="topic:t")
    full.run()
    shutil.copytree(folder_of(home, home.archives.get("full").info), folder)
    full.delete(files=True)
    home.trim("t", ToOffsets({0: 1}))
    return f"file:{folder}?mode=events"


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("deleted", [False, True])
def test_older_events_of_an_erased_key_do_not_come_from_a_copied_folder(
    home: Home, tmp_path: Path, trimmed: bool, deleted: bool
) -> None:
    source = trimmed_after_a_copy(home, tmp_path / "copied")
    daily = home.archives.create("daily", source="topic:t")
    daily.run()
    if trimmed:
        home.trim("t", ToOffsets({0: 3}))
    assert home.erase("t", key=b"k").verdict == "erased"
    home.append("t", [Event(b"late", key=b"k", timestamp=2)])
    daily.run()
    if deleted:
        home.delete_topic("t", past_readers=True)
    daily.backfill(source=source, start="earliest")
    daily.promote()
    found = [row for batch in daily.read() for row in batch.column("value").to_pylist()]
    assert sorted(found) == [b"late", b"x"]
    check_account(home, home.archives.get("daily").info, erased=2)


@pytest.mark.parametrize("trimmed", [False, True], ids=["in the topic", "in archives alone"])
@pytest.mark.parametrize("by", ["key", "id"])
def test_older_events_of_other_partitions_do_not_come_from_a_copied_folder(
    home: Home, tmp_path: Path, by: str, trimmed: bool
) -> None:
    home.create_topic("two", 2)
    home.append("two", [Event(b"old", key=b"k", id="e"), Event(b"x")], partition=0)
    home.append("two", [Event(b"gone", key=b"k", id="e"), Event(b"y")], partition=1)
    full = home.archives.create("full", source="topic:two")
    full.run()
    shutil.copytree(folder_of(home, home.archives.get("full").info), tmp_path / "copied")
    full.delete(files=True)
    home.trim("two", ToOffsets({0: 1}))  # no archive has read it
    daily = home.archives.create("daily", source="topic:two")
    daily.run()
    if trimmed:
        home.trim("two", ToOffsets({1: 1}))
    erased = home.erase("two", key=b"k") if by == "key" else home.erase("two", ids=["e"])
    assert erased.verdict == "erased"
    daily.backfill(source=f"file:{tmp_path / 'copied'}?mode=events", start="earliest")
    daily.promote()
    found = [row for batch in daily.read() for row in batch.column("value").to_pylist()]
    assert sorted(found) == [b"x", b"y"]
    check_account(home, home.archives.get("daily").info, erased=2)


@pytest.mark.parametrize("is_slow", [False, True])
def test_delete_beside_a_backfill_from_a_copied_folder_finds_what_that_brings(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    source = trimmed_after_a_copy(home, tmp_path / "copied")
    archive = an_archive(home, "daily", "topic:t")
    drive(home, archive)
    home.trim("t", ToOffsets({0: 3}))
    archive, building = begin_backfill(
        home.context, "daily", ArchiveFormat(source=source, start="earliest")
    )
    settled, searched = delete_archived.settled_offsets, list[int]()

    def build_after_the_search(*given: Any) -> Any:
        searched.append(1)
        if searched == [1] and not is_slow:
            drive(home, archive, building)
        return settled(*given)

    monkeypatch.setattr(delete_archived, "settled_offsets", build_after_the_search)
    if is_slow:
        under_way = {(archive.pipeline(building), "t/0", "0", 1)}
        monkeypatch.setattr(unfinished_ranges, "ranges_under_way", lambda *_: set(under_way))
        monkeypatch.setattr(unfinished_ranges, "_WAIT_S", 0.1)
        with pytest.raises(UnknownOutcomeError, match="is being read into generation 2"):
            home.delete_key("t", b"k")
        return
    assert home.delete_key("t", b"k").archived == 2
    purge(home.context, home.topic("t"), grace_ms=0)
    promote(home.context, "daily")
    assert ids(home, home.archives.get("daily").info) == ["x"]


@pytest.mark.parametrize("is_promoted", [False, True])
def test_delete_finds_what_a_backfill_brings_that_begins_before_its_record(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_promoted: bool
) -> None:
    source = trimmed_after_a_copy(home, tmp_path / "copied")
    drive(home, an_archive(home, "daily", "topic:t"))
    home.trim("t", ToOffsets({0: 3}))
    recorded, records = delete_archived.record_deletes, list[int]()

    def build_before_the_record(*given: Any) -> None:
        records.append(1)
        if records == [1]:
            how = ArchiveFormat(source=source, start="earliest")
            drive(home, *begin_backfill(home.context, "daily", how))
            if is_promoted:
                promote(home.context, "daily")
        recorded(*given)

    monkeypatch.setattr(delete_archived, "record_deletes", build_before_the_record)
    assert home.delete_key("t", b"k").archived == 2
    purge(home.context, home.topic("t"), grace_ms=0)
    if not is_promoted:
        promote(home.context, "daily")
    assert ids(home, home.archives.get("daily").info) == ["x"]


@pytest.mark.parametrize("deleted", [False, True])
def test_event_without_a_known_place_is_erased_from_all_partitions(
    home: Home, deleted: bool
) -> None:
    topic = home.create_topic("two", 2)
    home.append("two", [Event(b"x", id=f"e{n}") for n in range(9)])
    archive = an_archive(home, "daily", "topic:two")
    drive(home, archive)
    origin = Origin("two/0", topic.incarnation)
    found = {(origin, -1): FoundEvent("e", 1)}
    places = delete_archived.TopicPlaces({origin: 0})
    delete_archived.record_deletes(home.context, topic, WHY, found, places, None)
    if deleted:
        home.delete_topic("two", past_readers=True)
    erased = ErasedBefore(home.context, archive, 1, with_topic=True)
    assert [erased(f"two/{n}").ids.has("e") for n in range(2)] == [True, True]


def test_running_eraser_covers_generations_that_were_made_since(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(home)
    archive = an_archive(home, "daily")
    drive(home, archive)
    shutil.copytree(folder_of(home, archive), tmp_path / "copy")
    delete_events(home.context, home.amender("t", WHY), ["e3"])
    eraser = ArchiveEraser(home.context)
    eraser.turn()
    monkeypatch.setattr(erased_before.ErasedBefore, "__call__", lambda *_: NO_ERASED_ROWS)
    archive = built(home, source=f"file:{tmp_path}/copy")
    assert "e3" in ids(home, archive)
    eraser.turn()
    assert ids(home, archive) == LEFT
    assert eraser.turn() == []


STEPS = ("_intend", "_tasks", "_record", "_publish", "_finish")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_erasure_at_any_step_of_a_backfill_leaves_nothing(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    source = write_events(tmp_path / "src", "a.jsonl", numbered(6))
    archive = an_archive(home, "daily", source)
    drive(home, archive)
    real, erased = getattr(Cycle, step), []

    def erase() -> None:
        if not erased:
            erased.append(True)
            erase_archived(home.context, home.archives.get("daily").info, WHY, ["e3"])

    def beside(self: Cycle, *args: Any) -> Any:
        if not after:
            erase()
        done = real(self, *args)
        erase()
        return done

    monkeypatch.setattr(Cycle, step, beside)
    monkeypatch.setattr(unfinished_ranges, "_WAIT_S", 0)  # the range waits for this erasure
    archive = built(home)
    assert erased
    ArchiveEraser(home.context).turn()
    sweep_archives(home.context, grace_ms=-1)
    assert {record.state for record in read_audit(home.context, archive)} == {"done"}
    for generation in (1, 2):
        assert ids(home, archive, generation) == LEFT
    held = [info.key for info in home.store.list("") if b'"e3"' in home.store.get(info.key)]
    assert held == []
    check_account(home, archive, erased=1)


def test_range_with_a_transform_counts_what_it_leaves_out(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both halves of a Spark task, in this process: the transform never sees erased events."""
    fill(home)
    archive = an_archive(home, "daily")
    pipeline = open_pipeline(home.context, archive, LocalWorkers())
    reader = pipeline.source.reader(SourceRange(SourcePartition("t", "0"), "0", "6"))
    erased = ErasedRows(np.array([3, 5], np.int64))
    task = Task(reader, pipeline.sink, f"staging/{archive.pipeline()}/0/x", "m:f", erased=erased)

    context = SimpleNamespace(taskAttemptId=lambda: 7)
    monkeypatch.setattr(workers, "_context", lambda: context)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))  # as Spark does for its workers
    numbers = iter([pa.record_batch([pa.array([0])], ["id"])])
    given = list(workers._read([pickle.dumps(task)], None, numbers))
    assert [each for batch in given for each in batch.column("offset").to_pylist()] == [0, 1, 2, 4]
    produced = workers._written(task, iter([batch.slice(1) for batch in given]))
    staged = produced.staged
    assert (produced.read, staged.events, staged.left_out) == (6, 3, 2)


@pytest.mark.parametrize("by", ["id", "key"])
def test_older_event_that_comes_from_another_partition_later_is_left_out(
    home: Home, tmp_path: Path, by: str
) -> None:
    source = write_events(tmp_path / "src", "a.jsonl", numbered(3))
    archive = an_archive(home, "daily", source)
    drive(home, archive)
    wanted, key = (["e1"], None) if by == "id" else ([], b"k")
    assert erase_archived(home.context, archive, WHY, wanted, key).is_clean
    old, new = "2025-01-01T00:00:00Z", "2100-01-01T00:00:00Z"
    write_events(tmp_path / "src", "b.jsonl", [("e1", 0, old), ("e7", 1, old), ("e1", 2, new)])
    drive(home, archive)
    assert len(read_partitions(home.context, archive.pipeline())) == 2
    assert ids(home, archive) == (["e0", "e1", "e2", "e7"] if by == "id" else ["e1"])
    check_account(home, archive, erased=2 if by == "id" else 5)


def copied_folder(home: Home, folder: Path) -> list[Path]:
    """Copy the archive of a topic, and delete both; its two files of three events each."""
    full = home.archives.create("full", source="topic:t")
    for first in (0, 3):
        home.append("t", [Event(b"x", id=f"e{n}", key=b"k") for n in range(first, first + 3)])
        full.run()
    shutil.copytree(folder_of(home, full.info), folder)
    full.delete(files=True)
    home.delete_topic("t")
    return sorted(folder.rglob("*.parquet"))


@pytest.mark.parametrize("by", ["id", "key"])
@pytest.mark.parametrize("brought_by", ["driver", "backfill"])
def test_erasure_finds_what_is_archived_between_its_search_and_its_record(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brought_by: str, by: str
) -> None:
    full, source, is_driver = tmp_path / "full", tmp_path / "source", brought_by == "driver"
    files = copied_folder(home, full)
    shutil.copytree(full, source)
    lacking = files[-1 if is_driver else 0]
    (source / lacking.relative_to(full)).unlink()
    archive = an_archive(home, "daily", f"file:{source}?mode=events")
    drive(home, archive)
    recorded, brought = delete_archived.put_record, list[int]()

    def bring_before_the_record(*given: Any) -> str:
        if not brought:
            brought.append(1)
            if is_driver:
                shutil.copy(lacking, source / lacking.relative_to(full))
                drive(home, archive)
            else:
                how = ArchiveFormat(source=f"file:{full}?mode=events", start="earliest")
                drive(home, *begin_backfill(home.context, "daily", how))
        return recorded(*given)

    monkeypatch.setattr(delete_archived, "put_record", bring_before_the_record)
    wanted, key = (["e0", "e4"], None) if by == "id" else ([], b"k")
    erased = erase_archived(home.context, archive, WHY, wanted, key)
    assert erased.is_clean
    assert (erased.events, erased.found) == ((2, 2) if by == "id" else (6, 6))
    if not is_driver:
        archive = promote(home.context, "daily")
    assert ids(home, archive) == (["e1", "e2", "e3", "e5"] if by == "id" else [])
    check_account(home, archive, erased=2 if by == "id" else 6)
