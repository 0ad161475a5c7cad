"""Erasing from archives while others work: drivers, sweeps, registers, other erasures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.support.archive_look import AT, AT_OR_WHEN, a_home, an_archive, drive, fill, value
from tests.support.sql_catalog import open_sql_catalog
from tidelog import Event, Home
from tidelog.archive.dead_letters import ReplayOptions, replay
from tidelog.archive.delta import DeltaLog
from tidelog.archive.derived_archives import archives_of
from tidelog.archive.iceberg import IcebergTable
from tidelog.archive.read import ArchiveFiles, ReadRequest, archived_rows
from tidelog.archive.tables import change_tables, register
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.connectors.archive.staging import StagedFiles
from tidelog.connectors.by_url import source_at
from tidelog.connectors.source import SourceRange
from tidelog.erasure import rewrite as erase
from tidelog.erasure.rewrite import erase_from_archives
from tidelog.erasure.rewrite_range import FileRewriter
from tidelog.errors import CorruptError
from tidelog.maintenance import pipeline_sweep as sweep
from tidelog.maintenance.erase import purge
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.maintenance.turn import ArchiveEraser
from tidelog.model.archive import Archive
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.testing.scheduler import Crash


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        yield made


def people(home: Home, *names: str, topic: str = "t") -> None:
    home.append(topic, [Event(name.encode(), id=name) for name in names], partition=0)


def values(home: Home, archive: Archive) -> list[str]:
    rows = archived_rows(home.context, home.archives.get(archive.name).info, ReadRequest())
    return [value.decode() for batch in rows for value in batch.column("value").to_pylist()]


def problems(home: Home, archive: Archive) -> list[Any]:
    return list(verify_archive(home.context, archive, ArchiveVerifyOptions()).problems)


def damage(home: Home, archive: Archive) -> None:
    folder = Path(home.store.url.removeprefix("file://")) / archive.folder()
    path = next(folder.rglob("[0-9]*.parquet"))
    path.chmod(0o644)
    path.write_bytes(b"garbage")


def test_a_topic_that_was_made_anew_is_another_one(home: Home) -> None:
    people(home, "a", "b", "same", "d")
    archive = an_archive(home)
    drive(home, archive)
    home.delete_topic("t")
    home.create_topic("t", 1)
    people(home, "e", "f", "same", "h")
    home.delete("t", ["same", "h"])
    purge(home.context, home.topic("t"), grace_ms=0)
    ArchiveEraser(home.context).turn()
    assert values(home, archive) == ["a", "b", "same", "d"]
    assert home.prove_erased("t", ids=["same"]).is_erased


def test_what_is_copied_is_erased_before_its_copies(home: Home) -> None:
    people(home, "a")
    drive(home, an_archive(home, "z-first"))
    drive(home, an_archive(home, "b-copy", "archive:z-first"))
    drive(home, an_archive(home, "a-copy-of-copy", "archive:b-copy"))
    names = [archive.name for archive, _ in archives_of(home.context, home.topic("t"))]
    assert names == ["z-first", "b-copy", "a-copy-of-copy"]


class Paused:
    """A driver whose task has read its range, and stages it when it is told to."""

    def __init__(self, home: Home, archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
        real, own = StagedFiles.add, threading.current_thread()
        self.go, there = threading.Event(), threading.Event()

        def add(uploads: StagedFiles, *given: Any) -> None:
            if threading.current_thread() is not own:
                there.set()
                assert self.go.wait(60)
            real(uploads, *given)

        monkeypatch.setattr(StagedFiles, "add", add)
        self.thread = threading.Thread(target=drive, args=(home, archive))
        self.thread.start()
        assert there.wait(60)


def deleted_while_it_is_archived(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> tuple[Archive, Paused]:
    """An event that was read for the archive, and deleted before it got there."""
    people(home, "a", "gone", "c")
    archive = an_archive(home)
    paused = Paused(home, archive, monkeypatch)
    home.delete("t", ["gone"])
    return archive, paused


def test_no_proof_is_given_while_a_range_is_under_way(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, paused = deleted_while_it_is_archived(home, monkeypatch)
    topic = home.topic("t")
    assert [each.waiting for each in purge(home.context, topic, 0, wait_ms=0).archives] == [1]
    proof = home.prove_erased(topic.name, ids=["gone"])
    (trace,) = proof.traces
    assert trace.do.startswith("if no driver works on it, run `tidelog archive run daily`")
    paused.go.set()
    paused.thread.join()
    assert values(home, archive) == ["a", "gone", "c"]
    assert not home.prove_erased(topic.name, ids=["gone"]).is_erased, "it came into the archive"
    purge(home.context, topic, 0)
    assert home.prove_erased(topic.name, ids=["gone"]).is_erased


def test_an_erasure_waits_for_a_range_under_way(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, paused = deleted_while_it_is_archived(home, monkeypatch)
    threading.Timer(0.3, paused.go.set).start()
    (report,) = purge(home.context, home.topic("t"), 0, wait_ms=60_000).archives
    paused.thread.join()
    assert (report.events, report.waiting) == (1, 0)
    assert values(home, archive) == ["a", "c"]
    assert home.prove_erased("t", ids=["gone"]).is_erased


def tabled(home: Home, tmp_path: Path, kind: str) -> tuple[Archive, Callable[[], tuple[int, int]]]:
    """An archive with an empty table; and how many rows this tells of, and readers find in it."""
    fill(home, range(1, 100))
    archive = an_archive(home, "daily", parser=AT_OR_WHEN)
    drive(home, archive)
    name = "delta"
    if kind == "iceberg":
        name = f"iceberg:sqlite:///{tmp_path}/ice.db?warehouse=file://{tmp_path}/w#ns.t"
    archive = change_tables(home.context, archive, name, keep=True)

    def rows() -> tuple[int, int]:
        if kind == "delta":
            delta = DeltaTable(str(tmp_path / "o" / archive.folder()))
            told = delta.get_add_actions().column("num_records").to_pylist()
            return sum(told), delta.to_pyarrow_table().num_rows
        catalog = open_sql_catalog(f"sqlite:///{tmp_path}/ice.db")
        iceberg = catalog.load_table("ns.t")
        told = iceberg.inspect.files()["record_count"].to_pylist()
        return sum(told), iceberg.scan().to_arrow().num_rows

    return archive, rows


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_what_is_erased_while_a_table_is_told_of_it_is_told_again(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dies: bool
) -> None:
    archive, rows = tabled(home, tmp_path, kind)
    table: Any = DeltaLog if kind == "delta" else IcebergTable
    seam = "_stats" if kind == "delta" else "_data_files"  # the size is known, not yet committed
    real, add = getattr(table, seam), table.add
    erased: list[object] = []

    def late(*given: Any) -> Any:
        known = real(*given)
        if not erased:
            erased.append(True)
            erase_from_archives(home.context, home.topic("t"), {0: range(3, 90)})
        return known

    def dying(*given: Any) -> None:
        add(*given)
        raise Crash("after its commit")

    with monkeypatch.context() as patch:
        patch.setattr(table, seam, late)
        if dies:
            patch.setattr(table, "add", dying)
            with pytest.raises(Crash):
                register(home.context, archive)
        else:
            register(home.context, archive)
    assert erased
    register(home.context, archive)
    there = sum(batch.num_rows for batch in archived_rows(home.context, archive, ReadRequest()))
    assert there < 20
    assert rows() == (there, there)
    fill(home, range(100, 110))
    drive(home, archive)
    register(home.context, archive)
    there += sum(n % 7 > 0 for n in range(100, 110))
    assert rows() == (there, there)


def test_a_table_is_not_told_twice_of_the_same(home: Home, tmp_path: Path) -> None:
    archive, rows = tabled(home, tmp_path, "delta")
    register(home.context, archive)
    erase_from_archives(home.context, home.topic("t"), {0: range(3, 90)})
    folder = str(tmp_path / "o" / archive.folder())
    version = DeltaTable(folder).version()
    register(home.context, archive)
    assert DeltaTable(folder).version() == version
    assert rows()[0] == rows()[1] < 20


def dead_after_intending(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """An erasure that died after its first step, and a driver with a later epoch since."""

    def die(*_: object) -> None:
        raise Crash("after step 1")

    with monkeypatch.context() as patch:
        patch.setattr(erase.PartitionRewriter, "_decide", die)
        with pytest.raises(Crash):
            erase_from_archives(home.context, home.topic("t"), {0: {1}})
    people(home, "later")
    drive(home, home.archives.get("daily").info)


@pytest.mark.parametrize("finishes", [False, True])
def test_a_sweep_leaves_alone_what_an_erasure_stages(
    home: Home, monkeypatch: pytest.MonkeyPatch, finishes: bool
) -> None:
    """Also where the sweep finishes the same erasure before it goes on."""
    people(home, "a", "gone", "c")
    archive = an_archive(home)
    drive(home, archive)
    dead_after_intending(home, monkeypatch)
    close, swept = StagedFiles.close, list[int]()

    def swept_meanwhile(uploads: StagedFiles) -> Any:
        entries = close(uploads)
        if swept:
            return entries
        with monkeypatch.context() as inner:
            inner.setattr(StagedFiles, "close", close)
            if not finishes:
                inner.setattr(sweep, "finish_rewrites", lambda *_: None)
            swept.append(sweep_archives(home.context, grace_ms=-1).objects_deleted)
        return entries

    with monkeypatch.context() as patch:
        patch.setattr(StagedFiles, "close", swept_meanwhile)
        (report,) = erase_from_archives(home.context, home.topic("t"), {0: {1}})
    if not finishes:
        assert (report.events, swept) == (1, [0])
    assert values(home, archive) == ["a", "c", "later"]
    assert list(home.store.list("staging/")) == []


def test_an_erasure_whose_staged_copies_are_gone_begins_anew(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    people(home, "a", "gone", "c")
    archive = an_archive(home)
    drive(home, archive)
    close, lost = StagedFiles.close, list[str]()

    def losing(uploads: StagedFiles) -> Any:
        entries = close(uploads)
        if not lost:
            lost.extend(entry.staged for entry in entries)
            home.store.delete(lost)
        return entries

    with monkeypatch.context() as patch:
        patch.setattr(StagedFiles, "close", losing)
        (report,) = erase_from_archives(home.context, home.topic("t"), {0: {1}})
    assert lost
    assert report.events == 1
    assert values(home, archive) == ["a", "c"]
    assert problems(home, archive) == []


@pytest.fixture
def half_replaced(home: Home, monkeypatch: pytest.MonkeyPatch) -> Archive:
    """An archive whose erasure died at its second file, and whose staged copies are gone."""
    fill(home, range(1, 100))
    archive = an_archive(home, "daily", parser=AT_OR_WHEN)
    drive(home, archive)
    replace = erase.PartitionRewriter._replace

    def half(lane: Any, before: Any, after: Any) -> None:
        replace(lane, before, after)
        home.store.delete([info.key for info in home.store.list("staging/")])
        raise Crash("with all that is staged")

    with monkeypatch.context() as patch:
        patch.setattr(erase.PartitionRewriter, "_replace", half)
        with pytest.raises(Crash):
            erase_from_archives(home.context, home.topic("t"), {0: range(3, 90)})
    return archive


def test_lost_copies_of_a_range_that_is_half_replaced_are_staged_again(
    home: Home, half_replaced: Archive
) -> None:
    erase_from_archives(home.context, home.topic("t"), {0: range(3, 95)})
    deep = ArchiveVerifyOptions(deep=True)
    assert verify_archive(home.context, half_replaced, deep).problems == []
    rows = archived_rows(home.context, half_replaced, ReadRequest())
    offsets = [each for batch in rows for each in batch.column("offset").to_pylist()]
    assert sorted(offsets) == [0, 1, 2, 95, 96, 98]  # 97 is a dead letter
    assert list(home.store.list("staging/")) == []


def test_lost_copies_that_come_out_different_are_reported(
    home: Home, half_replaced: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_bytes = FileRewriter._of_events
    monkeypatch.setattr(
        FileRewriter, "_of_events", lambda *given: (own_bytes(*given)[0] + b" ", None)
    )
    with pytest.raises(CorruptError, match="restore that copy, or these files as they were before"):
        erase_from_archives(home.context, home.topic("t"), {0: range(3, 90)})


def test_an_erasure_that_another_one_overtakes_is_done_too(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    people(home, "a", "gone", "c")
    archive = an_archive(home)
    drive(home, archive)
    real, others = erase.PartitionRewriter._replace, list[object]()

    class Overtaken:
        """A store in which another erasure ends just before a staged copy is read."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def get(self, key: str) -> bytes:
            if key.startswith("staging/") and not others:
                others.append(True)
                others.append(erase_from_archives(home.context, home.topic("t"), {0: {1}}))
            return bytes(self._inner.get(key))

    def replace(lane: Any, *given: Any) -> None:
        if not others:
            lane._store = Overtaken(lane._store)
        real(lane, *given)

    with monkeypatch.context() as patch:
        patch.setattr(erase.PartitionRewriter, "_replace", replace)
        erase_from_archives(home.context, home.topic("t"), {0: {1}})
    assert len(others) == 2
    assert values(home, archive) == ["a", "c"]


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "staged copy is gone"])
def test_dead_letters_that_a_replay_removed_do_not_stop_an_erasure_that_died(
    home: Home, monkeypatch: pytest.MonkeyPatch, staged: bool
) -> None:
    """It had decided on a file that a replay has replaced since; sweeps and erasures go on."""
    archive = an_archive(home, parser=AT)
    home.append("t", [Event(value(3), id="three"), Event(value(6), id="six")], partition=0)
    drive(home, archive)
    home.delete("t", ["three"])
    with monkeypatch.context() as patch:
        patch.setattr(erase.PartitionRewriter, "_replace", _dies)
        with pytest.raises(Crash):
            erase_from_archives(home.context, home.topic("t"), {0: {0}})
    staging = [info.key for info in home.store.list("") if "staging/" in info.key]
    assert staging
    replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers(1))
    if not staged:
        home.store.delete(staging)
    sweep_archives(home.context, 0)
    purge(home.context, home.topic("t"), grace_ms=0)
    assert home.prove_erased("t", ids=["three"]).is_erased
    assert problems(home, archive) == []
    assert values(home, archive) == [value(6).decode()]


def test_dead_letters_that_a_replay_removes_meanwhile_do_not_stop_an_erasure(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = an_archive(home, parser=AT)
    home.append("t", [Event(value(3), id="three"), Event(value(6), id="six")], partition=0)
    drive(home, archive)
    home.delete("t", ["three"])
    batches = ArchiveFiles.batches

    def replayed(files: ArchiveFiles, manifest: Any, file: Any) -> Any:
        monkeypatch.setattr(ArchiveFiles, "batches", batches)
        replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers(1))
        return batches(files, manifest, file)

    monkeypatch.setattr(ArchiveFiles, "batches", replayed)
    purge(home.context, home.topic("t"), grace_ms=0)
    assert home.prove_erased("t", ids=["three"]).is_erased
    assert problems(home, archive) == []


@pytest.mark.parametrize("changed_by", ["replay", "erasure"])
def test_proof_beside_files_that_are_changed_says_to_prove_again(
    home: Home, monkeypatch: pytest.MonkeyPatch, changed_by: str
) -> None:
    archive = an_archive(home, parser=AT)
    for number, name in ((1, "one"), (2, "two"), (3, "dead")):
        home.append("t", [Event(value(number), id=name)], partition=0)
    drive(home, archive)
    home.delete("t", ["one"])
    purge(home.context, home.topic("t"), grace_ms=0)
    batches = ArchiveFiles.batches

    def changing(files: ArchiveFiles, manifest: Any, file: Any) -> Any:
        monkeypatch.setattr(ArchiveFiles, "batches", batches)
        if changed_by == "replay":
            replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers(1))
        else:
            erase_from_archives(home.context, home.topic("t"), {0: {1}})
        return batches(files, manifest, file)

    monkeypatch.setattr(ArchiveFiles, "batches", changing)
    proof = home.prove_erased("t", ids=["one"])
    assert {trace.what for trace in proof.traces} == {"was changed while it was searched"}
    assert home.prove_erased("t", ids=["one"]).is_erased


def _dies(*_: object) -> None:
    raise Crash


def test_erasures_and_sweeps_at_once_end_well(home: Home) -> None:
    fill(home, range(1, 200))
    archive = an_archive(home, "daily", parser=AT_OR_WHEN, format="jsonlines")
    drive(home, archive)
    errors: list[Exception] = []

    def work(turn: int) -> None:
        try:
            for first in range(0, 60, 6):
                erase_from_archives(
                    home.context, home.topic("t"), {0: range(first, first + 3 + turn)}
                )
                sweep_archives(home.context, grace_ms=0)
        except Exception as exc:  # noqa: BLE001 - told below
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert problems(home, archive) == []


def test_an_archive_as_a_source_is_read_as_an_erasure_left_it(home: Home) -> None:
    people(home, "a", "gone", "c")
    drive(home, an_archive(home))
    people(home, "d")
    drive(home, home.archives.get("daily").info)
    source = source_at(home.context, "archive:daily")
    (partition,) = source.partitions()
    bounds = source.bounds([partition])[partition]
    home.delete("t", ["gone"])
    purge(home.context, home.topic("t"), grace_ms=0)
    for start in (bounds.first, "1", "3"):
        chunks = source.read(SourceRange(partition, start, bounds.end, 0))
        found = [v for chunk in chunks for v in chunk.batch.column("value").to_pylist()]
        assert found == [b"a", b"c", b"d"][-3 if start == "0" else {"1": -2, "3": -1}[start] :]


def test_one_damaged_archive_does_not_stop_the_others(home: Home) -> None:
    home.create_topic("u", 1)
    archives = []
    for name, topic in (("a", "t"), ("b", "t"), ("c", "u")):
        people(home, f"gone-{name}", f"stays-{name}", topic=topic)
        archives.append(an_archive(home, name, f"topic:{topic}"))
    for archive in archives:
        drive(home, archive)
    damage(home, archives[0])
    home.delete("t", ["gone-a", "gone-b"])
    home.delete("u", ["gone-c"])
    eraser = ArchiveEraser(home.context)
    assert [report.archive for report in eraser.turn()] == ["b", "c"]
    assert [type(each) for each in eraser.troubles] == [CorruptError]
    assert values(home, archives[1]) == ["stays-a", "stays-b"]
    assert values(home, archives[2]) == ["stays-c"]
    assert [report.archive for report in eraser.turn()] == ["b"], "what failed is tried again"
    with pytest.raises(CorruptError):
        purge(home.context, home.topic("t"), grace_ms=0)
