"""Readers of commits beside drivers that commit and sweeps that merge rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.pipeline.test_cycle import Archive as InMemory
from tests.support.archive_look import AT, a_home, an_archive, drive, fill
from tests.support.fake_pipelines import ListSource
from tidelog.archive import coverage
from tidelog.archive.coverage import read_covered
from tidelog.catalog.base import Delete, Put, Row
from tidelog.connectors.archive import source as archive_source
from tidelog.connectors.by_url import source_at
from tidelog.connectors.source import SourcePartition
from tidelog.context import Context
from tidelog.coordination.commits import CommitRow, read_commits
from tidelog.model import layout
from tidelog.model.pipeline import Begin, Commit, MergedRange, Progress
from tidelog.model.topic import encode_row

T0 = SourcePartition("t", "0")
WHERE = layout.pipeline_partition("inc", "t/0")


def committed(start: str, end: str, events: int) -> Commit:
    return Commit(
        manifest="m", start=start, end=end, events=events, files=0, dead=0, committed_ms=0
    )


def put(context: Context, *changes: Put | Delete) -> None:
    context.catalog.write(WHERE, *changes, write_id=context.ids.new())


def tiled(context: Context, chance: random.Random) -> list[Commit]:
    """Rows of ranges of some events each, or of none: these share an ordinal with the next one."""
    borders = list(accumulate(chance.randint(1, 3) for _ in range(chance.randint(4, 14))))
    found = [
        committed(str(start), str(end), chance.choice([0, 0, end - start]))
        for start, end in pairwise(borders)
    ]
    ordinal = 0
    for each in found:
        put(context, Put(layout.commit_row(ordinal, each.start), encode_row(each)))
        ordinal += each.events
    return found


def merge_some(context: Context, scan: Any, chance: random.Random) -> None:
    """Merge two neighbours as a sweep may; the two newest rows stay."""
    rows = {
        row.committed.start: row for row in map(CommitRow.of, scan(WHERE, "commit/", "commit0"))
    }
    in_order = sorted(rows.values(), key=lambda row: int(row.committed.start))[:-2]
    pairs = [(one, other) for one, other in pairwise(in_order) if one.name < other.name]
    if not pairs:
        return
    one, other = chance.choice(pairs)
    parts = [*one.committed.each_range, *other.committed.each_range]
    whole = msgspec.structs.replace(
        committed(parts[0].start, parts[-1].end, sum(each.events for each in parts)),
        ranges=tuple(MergedRange(each.start, each.end, each.events, 0, 0, 0, 0) for each in parts),
    )
    put(context, Put(one.name, encode_row(whole), one.version), Delete(other.name, other.version))


def with_merges(context: Context, chance: random.Random) -> Context:
    """A log whose scans have one row in a page; rows are merged between two pages."""
    scan = context.catalog.scan

    def paged(where: str, start: str, end: str, reverse: bool = False) -> Iterator[Row]:
        while (row := next(iter(scan(where, start, end, reverse=reverse)), None)) is not None:
            yield row
            start, end = (start, row.row) if reverse else (f"{row.row}\0", end)
            while chance.random() < 0.6:
                merge_some(context, scan, chance)

    context.catalog.scan = paged  # type: ignore[assignment,method-assign]
    return context


def test_reader_beside_merges_sees_every_range_once_from_any_ordinal_on() -> None:
    for seed in range(400):
        chance = random.Random(seed)
        context = InMemory(ListSource(1, 0)).context()
        every = tiled(context, chance)
        ordinals = list(accumulate((each.events for each in every), initial=0))[:-1]
        first = chance.choice(ordinals)
        expected = [
            each.start for ordinal, each in zip(ordinals, every, strict=True) if ordinal >= first
        ]
        found = read_commits(with_merges(context, chance), "inc", "t/0", first)
        assert [each.start for each in found] == expected, seed


def test_first_range_that_is_committed_since_the_head_was_read_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_home(tmp_path) as home:
        home.create_topic("t", 1)
        archive = an_archive(home, "a", parser=AT)
        drive(home, archive)
        fill(home, range(10))
        source = source_at(home.context, "archive:a")
        real = archive_source.read_progress

        def then_commit(*given: Any) -> Progress | None:
            head = real(*given)
            monkeypatch.setattr(archive_source, "read_progress", real)
            drive(home, archive)
            return head

        monkeypatch.setattr(archive_source, "read_progress", then_commit)
        assert source.bounds([T0])[T0].end == "0"
        assert source.bounds([T0])[T0].end == "10"


def test_coverage_ends_at_the_head_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that are no offsets: only the borders of ranges say what is covered."""
    context = InMemory(ListSource(1, 0)).context()
    head = Progress("c", 2, 1, begin=Begin("a", "earliest", 0))
    rows = [committed("a", "b", 1), committed("b", "c", 1), committed("c", "d", 1)]
    for ordinal, each in enumerate(rows):
        put(context, Put(layout.commit_row(ordinal, each.start), encode_row(each)))
    monkeypatch.setattr(coverage, "read_progress", lambda *_: head)
    found = read_covered(context, "inc", "t/0")
    assert found is not None
    assert found.borders == ("a", "b", "c")
