"""Compaction of commits: fewer rows and manifests, and every reader finds what it found before."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deltalake import DeltaTable

from tests.pipeline.test_cycle import Archive as InMemory
from tests.support.archive_look import AT, AT_OR_WHEN, a_home, an_archive, drive, fill
from tests.support.fake_pipelines import ListSource
from tests.support.races import race_two
from tests.support.rounds import rounds
from tidelog import Home
from tidelog.archive.dead_letters import ReplayOptions, dead_letters, replay
from tidelog.archive.finalize import finalize
from tidelog.archive.read import ReadRequest, archived_rows, find_event
from tidelog.archive.status import read_status
from tidelog.archive.tables import change_tables, register
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.catalog.base import Delete, Put, Row
from tidelog.connectors.by_url import source_at
from tidelog.connectors.source import SourcePartition, SourceRange
from tidelog.context import Context
from tidelog.coordination.commits import read_commit_rows, read_commits, read_manifests
from tidelog.coordination.pipeline_rows import (
    counting_files,
    dead_files,
    read_partitions,
    replay_pipeline,
)
from tidelog.erasure.rewrite import erase_from_archives
from tidelog.errors import AlreadyExistsError, NotFoundError
from tidelog.maintenance import pipeline_sweep as compact
from tidelog.maintenance.pipeline_sweep import (
    REPLACED_KEPT_MS,
    compact_commits,
    drop_replaced,
    sweep_archives,
)
from tidelog.model import layout, limits
from tidelog.model.archive import Archive
from tidelog.pipeline.forgotten_ranges import read_aside
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.testing.faults import Faults
from tidelog.testing.scheduler import Crash

LATER_MS = 2 * REPLACED_KEPT_MS
T0 = SourcePartition("t", "0")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows or four are merged, and the two newest are not."""
    monkeypatch.setattr(limits, "COMMITS_UNMERGED", 2)
    monkeypatch.setattr(compact, "_MIN", 3)
    monkeypatch.setattr(compact, "_AT_ONCE", 4)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        yield made


def grow(home: Home, archive: Archive, ranges: int, first: int = 0) -> None:
    for number in range(ranges):
        fill(home, range(first + number * 10, first + number * 10 + 10))
        drive(home, archive)


def merge(context: Context, pipeline: str, now_ms: int = 0) -> int:
    """All that one sweep after another merges."""
    merged = 0
    for _ in range(10):
        for partition in read_partitions(context, pipeline):
            drop_replaced(context, pipeline, partition, now_ms + LATER_MS)
            merged += compact_commits(context, pipeline, partition, now_ms, limits.MERGES_MAX)
    return merged


def merge_all(home: Home, archive: Archive) -> int:
    every = [archive.pipeline(generation) for generation in archive.formats]
    return sum(
        merge(home.context, each) + merge(home.context, replay_pipeline(each)) for each in every
    )


def rows(context: Context, pipeline: str, partition: str = "t/0") -> int:
    return len(list(read_commit_rows(context, pipeline, partition)))


def ranges(context: Context, pipeline: str, partition: str = "t/0") -> list[Any]:
    """All that readers may know of ranges, from every ordinal on."""
    every = list(read_commits(context, pipeline, partition))
    ordinals = range(sum(each.events for each in every) + 1)
    plain = [msgspec.structs.replace(each, manifest="") for each in every]
    starts = [
        [each.start for each in read_commits(context, pipeline, partition, first)]
        for first in ordinals
    ]
    return [plain, starts, list(read_manifests(context, pipeline, partition))]


def as_plain(found: Any) -> list[Any]:
    return [batch.to_pylist() for batch in found]


def answers(home: Home, name: str) -> dict[str, Any]:
    """What everything that reads commits says of an archive."""
    archive = home.archives.get(name).info
    own = archive.pipeline()
    source = source_at(home.context, f"archive:{name}")
    borders = [each.start for each in read_commits(home.context, own, "t/0")]
    end = source.bounds([T0])[T0].end
    verified = verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True, source=True))
    status = read_status(home.context, archive)
    return {
        "ranges": ranges(home.context, own),
        "replays": ranges(home.context, replay_pipeline(own)),
        "rows": as_plain(archived_rows(home.context, archive, ReadRequest())),
        "dead": as_plain(dead_letters(home.context, archive)),
        "dead files": dead_files(home.context, own, "t/0"),
        "counting": list(counting_files(home.context, own, "t/0")),
        "find": [
            dataclasses.replace(
                find_event(home.context, archive, "t/0", offset, read=True), row=None
            )
            for offset in range(0, int(end) + 2, 3)
        ],
        "verified": verified,
        "status": dataclasses.replace(status, read_ms=0, drivers=0, silent=0),
        "bounds": source.bounds([T0]),
        "cuts": [source.cut(start, end, 15) for start in borders],
        "counts": [source.count(start, end) for start in borders],
        "before": [source.before(start, end) for start in borders],
        "read": [
            as_plain(chunk.batch for chunk in source.read(SourceRange(T0, start, end)))
            for start in borders[::3]
        ],
    }


def test_every_reader_finds_the_same_after_compaction(home: Home) -> None:
    archive = an_archive(home, parser=AT)
    grow(home, archive, 8)
    erase_from_archives(home.context, home.topic("t"), {0: [11, 12, 50]})
    for _ in range(5):  # each pass is a range of the replays
        replay(home.context, home.archives.get("daily").info, ReplayOptions(), LocalWorkers())
    before = answers(home, "daily")
    own = archive.pipeline()
    assert merge_all(home, archive) > 0
    assert rows(home.context, own) < 6
    assert answers(home, "daily") == before
    assert before["verified"].problems == []
    grow(home, archive, 2, 80)
    assert (
        verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True, source=True)).problems
        == []
    )


def test_a_generation_made_of_an_archive_reads_on_over_merged_ranges(home: Home) -> None:
    first = an_archive(home, "first")
    copy = an_archive(home, "copy", "archive:first")
    grow(home, first, 3)
    drive(home, copy)
    grow(home, first, 9, 30)
    assert merge_all(home, first) > 0
    drive(home, copy)
    found = Counter(
        offset
        for batch in archived_rows(home.context, copy, ReadRequest())
        for offset in batch.column("offset").to_pylist()
    )
    assert found == Counter(range(120))
    assert (
        verify_archive(home.context, copy, ArchiveVerifyOptions(deep=True, source=True)).problems
        == []
    )


def test_tables_and_finalize_go_on_over_merged_ranges(home: Home) -> None:
    archive = an_archive(home, parser=AT_OR_WHEN)
    change_tables(home.context, archive, "delta", keep=True)
    archive = home.archives.get("daily").info
    grow(home, archive, 6)
    register(home.context, archive)
    finalize(home.context, archive)
    grow(home, archive, 6, 60)
    assert merge_all(home, archive) > 0
    finalize(home.context, archive)
    (registered,) = register(home.context, archive)
    assert registered.files_added > 0
    assert register(home.context, archive)[0].files_added == 0, "each range once"
    offsets = DeltaTable(registered.where).to_pyarrow_table().column("offset").to_pylist()
    assert Counter(offsets) == Counter(n for n in range(120) if n % 7)
    where = layout.pipeline_members(archive.pipeline())
    counted = sum(
        msgspec.msgpack.decode(row.value)["events"]
        for row in home.catalog.scan(where, "folder/", "folder0")
    )
    assert counted == len(offsets)
    erase_from_archives(home.context, home.topic("t"), {0: [1, 2, 61, 119]})
    assert DeltaTable(registered.where).to_pyarrow_table().num_rows == len(offsets) - 3


def test_events_of_merged_ranges_are_erased(home: Home) -> None:
    archive = an_archive(home, parser=AT)
    grow(home, archive, 10)
    merge_all(home, archive)
    (report,) = erase_from_archives(home.context, home.topic("t"), {0: [1, 2, 44, 99]})
    assert (report.events, report.ranges) == (4, 3)
    assert {find_event(home.context, archive, "t/0", n).status for n in (1, 2, 44, 99)} == {
        "erased"
    }
    assert verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True)).problems == []
    merge_all(home, archive)
    (again,) = erase_from_archives(home.context, home.topic("t"), {0: [1, 2, 44, 99]})
    assert (again.events, again.ranges) == (0, 0)
    assert find_event(home.context, archive, "t/0", 45).is_there
    assert list(home.store.list("staging/")) == []


@pytest.mark.parametrize("after", range(1, 40, 6))
def test_rows_that_are_merged_while_an_erasure_works_are_erased_from(
    home: Home, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Every write of the erasure may find that its row was merged before it."""
    archive = an_archive(home)
    grow(home, archive, 7)
    calls, real = [0], home.catalog.get

    def get(partition: str, row: str) -> Row | None:
        calls[0] += 1
        if calls[0] == after:
            monkeypatch.setattr(home.catalog, "get", real)
            merge_all(home, archive)
        return real(partition, row)

    monkeypatch.setattr(home.catalog, "get", get)
    erase_from_archives(home.context, home.topic("t"), {0: [5, 15, 25, 35, 45]})
    monkeypatch.undo()
    statuses = [find_event(home.context, archive, "t/0", n).status for n in (5, 15, 25, 35, 45)]
    assert statuses == ["erased"] * 5
    assert verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True)).problems == []


@pytest.mark.parametrize("offset", [5, 15, 35])
def test_rows_that_an_erasure_changes_are_not_merged_by_what_was_read_before(
    home: Home, offset: int
) -> None:
    archive = an_archive(home)
    grow(home, archive, 8)
    real = home.catalog.write

    def write(partition: str, *changes: Any, write_id: str) -> None:
        home.catalog.write = real  # type: ignore[method-assign]
        erase_from_archives(home.context, home.topic("t"), {0: [offset]})
        real(partition, *changes, write_id=write_id)

    home.catalog.write = write  # type: ignore[assignment,method-assign]
    own = archive.pipeline()
    before = len(list(home.store.list(layout.manifests(own))))
    assert compact_commits(home.context, own, "t/0", 0, 1) == 0
    assert len(list(home.store.list(layout.manifests(own)))) == before + 1, "only the erasure's"
    assert find_event(home.context, archive, "t/0", offset).status == "erased"
    merge_all(home, archive)
    assert find_event(home.context, archive, "t/0", offset).status == "erased"


# In memory: crashes, races and scans.


def many(count: int = 12) -> InMemory:
    """A source partition with so many ranges."""
    archive = InMemory(ListSource(1, count * 5))
    archive.drive(archive.context(), step=5)
    return archive


def swept(context: Context, now_ms: int) -> None:
    """One turn of a sweep, as far as commits are concerned."""
    drop_replaced(context, "inc", "t/0", now_ms)
    compact_commits(context, "inc", "t/0", now_ms, limits.MERGES_MAX)


def dangling(archive: InMemory) -> list[str]:
    """Manifests that rows name and that are not there."""
    there = {info.key for info in archive.objects.list("pipelines/")}
    named = {row.committed.manifest for row in read_commit_rows(archive.context(), "inc", "t/0")}
    return sorted(named - there)


def test_compaction_that_dies_after_any_call_changes_no_answer_and_is_finished() -> None:
    calls = 0
    while True:
        calls += 1
        archive = many()
        before = ranges(archive.context(), "inc")
        faults = Faults(crash_after_call=calls)
        context = archive.context(faults)
        died = False
        try:
            for turn in range(4):
                swept(context, turn * LATER_MS)
        except Crash:
            died = True
        assert ranges(archive.context(), "inc") == before, calls
        for turn in range(4, 9):
            swept(archive.context(), turn * LATER_MS)
        assert ranges(archive.context(), "inc") == before, calls
        assert rows(archive.context(), "inc") <= 6
        for row in read_commit_rows(archive.context(), "inc", "t/0"):
            assert not row.committed.replaced
        archive.check()
        archive.drive(archive.context())
        if not died:
            break
    assert calls > 20


@pytest.mark.parametrize("block", rounds(4, every=2))
def test_two_compactors_beside_drivers_in_a_bad_world_change_no_answer(block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        archive = many(9)
        before = ranges(archive.context(), "inc")
        first = len(before[0])

        def act(
            faults: Any,
            scheduler: Any,
            archive: InMemory = archive,
            turn: list[int] = [0],  # noqa: B006
        ) -> None:
            context = archive.context(faults, scheduler)
            turn[0] += 1
            if turn[0] % 3 == 0:
                part = archive.source.partitions()[0]
                end = archive.source.ends[part]
                archive.source.events[part][end] = f"0:{end}"
                archive.source.ends[part] = end + 1
                archive.drive(context, step=1)
            else:
                swept(context, turn[0] * LATER_MS)
                found = list(read_commits(context, "inc", "t/0"))
                assert found[0].start == "0"
                assert all(one.end == other.start for one, other in pairwise(found))

        race_two(seed, 5, act, lambda: None)
        assert dangling(archive) == []
        archive.drive(archive.context())
        archive.check()
        found = ranges(archive.context(), "inc")
        assert [found[0][:first], found[2][:first]] == [before[0], before[2]]


def sparse() -> InMemory:
    """Ranges of one offset, some without events: these share an ordinal, and 10 is before 9."""
    source = ListSource(1, 16)
    held = source.events[T0]
    for offset in (7, 8, 9, 10, 11):
        held.pop(offset, None)
    archive = InMemory(source)
    archive.drive(archive.context(), step=1)
    assert len(list(read_commits(archive.context(), "inc", "t/0"))) == 16
    return archive


def test_ranges_without_events_are_merged_too() -> None:
    archive = sparse()
    before = ranges(archive.context(), "inc")
    assert merge(archive.context(), "inc") > 6
    assert ranges(archive.context(), "inc") == before


@pytest.mark.parametrize("make", [many, sparse])
@pytest.mark.parametrize("page", range(1, 12))
def test_a_scan_beside_compaction_sees_every_range_once(
    page: int, make: Callable[[], InMemory]
) -> None:
    archive = make()
    before = ranges(archive.context(), "inc")
    context = archive.context()
    scan = context.catalog.scan
    turn = [0]

    def paged(where: str, *given: Any, **named: Any) -> Iterator[Row]:
        for number, row in enumerate(list(scan(where, *given, **named)), 1):
            now = archive.rows.get(where, row.row)  # a later page shows what is there by then
            if now is not None:
                yield now
            if number == page and turn[0] < 3:
                turn[0] += 1
                swept(archive.context(), turn[0] * LATER_MS)

    context.catalog.scan = paged  # type: ignore[assignment,method-assign]
    found = [msgspec.structs.replace(c, manifest="") for c in read_commits(context, "inc", "t/0")]
    assert found == before[0]
    assert turn[0] > 0


def test_manifests_that_are_replaced_stay_for_a_day() -> None:
    archive = many()
    held = list(read_commits(archive.context(), "inc", "t/0"))
    compact_commits(archive.context(), "inc", "t/0", 1_000, 1)
    (merged, *_) = read_commit_rows(archive.context(), "inc", "t/0")
    assert list(merged.committed.replaced) == [each.manifest for each in held[:4]]
    assert drop_replaced(archive.context(), "inc", "t/0", REPLACED_KEPT_MS) == 0
    assert archive.objects.get(held[0].manifest)
    assert drop_replaced(archive.context(), "inc", "t/0", 1_000 + REPLACED_KEPT_MS) == 4
    with pytest.raises(NotFoundError):
        archive.objects.get(held[0].manifest)


def test_a_compactor_that_slept_while_a_sweep_took_its_manifest_merges_nothing() -> None:
    """A driver of a later epoch has written the head: its sweep may delete what no row names."""
    archive = many()
    before = ranges(archive.context(), "inc")
    context = archive.context()
    write = context.catalog.write

    def slept(where: str, *changes: Any, write_id: str) -> None:
        context.catalog.write = write  # type: ignore[method-assign]
        part = archive.source.partitions()[0]
        archive.source.ends[part] += 5
        archive.drive(archive.context())
        every = {
            row.committed.manifest for row in read_commit_rows(archive.context(), "inc", "t/0")
        }
        unnamed = [i.key for i in archive.objects.list("pipelines/") if i.key not in every]
        assert len(unnamed) == 1
        archive.objects.delete(unnamed)
        write(where, *changes, write_id=write_id)

    context.catalog.write = slept  # type: ignore[assignment,method-assign]
    assert compact_commits(context, "inc", "t/0", 0, 1) == 0
    assert dangling(archive) == []
    assert ranges(archive.context(), "inc")[2][: len(before[2])] == before[2]


def test_a_sweep_merges_a_bounded_number_and_leaves_few_rows(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = an_archive(home)
    grow(home, archive, 20)
    own = archive.pipeline()
    monkeypatch.setattr(limits, "MERGES_MAX", 1)
    assert sweep_archives(home.context, 0).commits_merged == 3
    monkeypatch.setattr(limits, "MERGES_MAX", 50)
    assert sweep_archives(home.context, 0).commits_merged > 3
    assert rows(home.context, own) < 9
    assert len(list(read_commits(home.context, own, "t/0"))) == 20
    assert len(list(home.store.list(layout.manifests(own)))) > 20, "those replaced wait for a day"
    monkeypatch.setattr(compact, "REPLACED_KEPT_MS", 0)
    sweep_archives(home.context, 0)
    sweep_archives(home.context, 0)
    assert len(list(home.store.list(layout.manifests(own)))) < 12
    assert (
        verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True, source=True)).problems
        == []
    )


def test_large_ranges_are_merged_as_far_as_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = many(20)
    before = ranges(archive.context(), "inc")
    monkeypatch.setattr(limits, "MERGED_FILES_MAX", 7)  # each range has three
    merge(archive.context(), "inc")
    sizes = [row.committed.files for row in read_commit_rows(archive.context(), "inc", "t/0")]
    assert max(sizes) <= 7
    assert len(sizes) <= 12
    monkeypatch.setattr(limits, "MERGED_FILES_MAX", 1_000)
    monkeypatch.setattr(limits, "MERGED_BYTES_MAX", 5_000)
    merge(archive.context(), "inc")
    named = {row.committed.manifest for row in read_commit_rows(archive.context(), "inc", "t/0")}
    assert max(len(archive.objects.get(key)) for key in named) <= 5_000
    assert ranges(archive.context(), "inc") == before


def test_a_damaged_manifest_is_not_merged_and_stops_no_other(home: Home) -> None:
    archive = an_archive(home)
    grow(home, archive, 12)
    own = archive.pipeline()
    damaged = list(read_commits(home.context, own, "t/0"))[1].manifest
    home.store.delete([damaged])
    assert merge_all(home, archive) > 0
    (problem,) = verify_archive(home.context, archive, ArchiveVerifyOptions()).problems[:1]
    assert damaged in problem.what


def test_files_of_merged_ranges_that_a_restored_catalog_has_forgotten_are_set_aside(
    home: Home,
) -> None:
    """Their own manifests may be gone by then: the merged one says what their files are."""
    archive = an_archive(home)
    own = archive.pipeline()
    where = layout.pipeline_partition(own, "t/0")
    grow(home, archive, 2)
    before = list(home.catalog.scan(where))
    copied = {i.key: home.store.get(i.key) for i in home.store.list(layout.manifests(own))}
    grow(home, archive, 8, 20)
    merge_all(home, archive)
    for key, data in copied.items():  # as the guide says: from the copy of the store
        with suppress(AlreadyExistsError):
            home.store.put(key, data)
    for row in list(home.catalog.scan(where)):
        home.catalog.write(where, Delete(row.row), write_id=home.context.ids.new())
    for row in before:
        home.catalog.write(where, Put(row.row, row.value), write_id=home.context.ids.new())
    assert rows(home.context, own) == 2
    drive(home, archive)
    aside = sorted(read_aside(home.context, own), key=lambda each: int(each.start))
    assert [(each.start, each.end) for each in aside] == [
        (str(n), str(n + 10)) for n in range(20, 100, 10)
    ]
    offsets = Counter(
        offset
        for batch in archived_rows(home.context, archive, ReadRequest())
        for offset in batch.column("offset").to_pylist()
    )
    assert offsets == Counter(range(100))
