"""Offsets that no file of a folder has are gaps, since a file of the folder may be missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support.archive_look import a_home
from tidelog import Event, Home
from tidelog.archive.status import Limits, troubles
from tidelog.connectors.files.source import (
    holes_between,
    holes_between_files,
    missing_in_files,
)
from tidelog.connectors.sink import WriterResult
from tidelog.connectors.source import MissingOffsets, SourcePartition, SourceRange
from tidelog.errors import InvalidError
from tidelog.model import limits
from tidelog.model.pipeline import Gap, Intent, Progress, joined_gaps
from tidelog.pipeline.manifest import missing_from
from tidelog.pipeline.source_state import SourceState
from tidelog.pipeline.tasks import ErasedRows, TaskOutput

PART = SourcePartition("t", "0")


def gap(start: int, end: int, offsets: int = 0) -> Gap:
    return Gap(str(start), str(end), "files", offsets or end - start)


def test_holes_are_what_no_file_and_no_event_covers() -> None:
    spans = [(30, 40), (0, 5), (2, 12), (20, 20)]
    assert holes_between_files(spans, 0, 50) == [(12, 30), (40, 50)]
    assert holes_between_files(spans, 8, 35) == [(12, 30)]
    assert holes_between_files([], 3, 5) == [(3, 5)]
    held = np.array([1, 2, 5, 9])
    assert holes_between(held, 0, 12) == [(0, 1), (3, 5), (6, 9), (10, 12)]
    assert holes_between(held, 1, 3) == []
    assert holes_between(held[:0], 4, 6) == [(4, 6)]


def test_longest_holes_are_listed_and_the_others_counted() -> None:
    span = SourceRange(PART, "0", "1000")
    holes = [(at, at + 1) for at in range(0, 100, 10)] + [(500, 700)]
    found = missing_in_files(span, holes, 210)
    assert found.offsets == 210
    assert len(found.gaps) == limits.FILE_GAPS_PER_RANGE + 1
    assert found.gaps[-2:] == (gap(500, 700), gap(0, 1000, 3))
    assert missing_in_files(span, holes, 209).gaps == (gap(0, 1000, 209),), "files have changed"
    assert missing_in_files(span, [], 1000).gaps == (gap(0, 1000),)


def test_scattered_holes_are_one_gap_however_many_ranges_have_them() -> None:
    gaps: tuple[Gap, ...] = ()
    for start in range(0, 1000, 20):
        gaps = joined_gaps(gaps, (gap(start, start + 2), gap(start, start + 10, 3)))
    assert len(gaps) == 51
    assert gaps[1] == gap(0, 990, 150)
    assert joined_gaps((gap(0, 5), gap(0, 9, 2)), (gap(5, 7),)) == (gap(0, 7), gap(0, 9, 2))


@dataclass
class Lacking:
    """A source that lacks what it is given."""

    gaps: tuple[Gap, ...]

    def missing(self, span: SourceRange, read: int) -> MissingOffsets:
        return MissingOffsets(gaps=self.gaps)


def lacked(
    gaps: tuple[Gap, ...], known: tuple[Gap, ...] = (), erased: tuple[int, ...] = ()
) -> MissingOffsets:
    """What a range from 0 to 100 says is missing, of a head that has gaps already."""
    rows = ErasedRows(np.array(erased, np.int64))
    state = SourceState(PART, "", Progress("0", 0, 0, gaps=known), "", erased=rows)
    intent = Intent("0", "100")
    produced = TaskOutput("100", 100 - sum(each.offsets for each in gaps), WriterResult())
    return missing_from(Lacking(gaps), state, intent, produced)


def test_erased_offsets_are_not_what_files_lack() -> None:
    assert lacked((gap(10, 20),), erased=(12, 13, 60)) == MissingOffsets(
        0, 2, (gap(10, 12), gap(14, 20))
    )
    assert lacked((gap(10, 12),), erased=(10, 11)) == MissingOffsets(0, 2)
    assert lacked((gap(0, 100, 9),), erased=(12, 13)) == MissingOffsets(0, 2, (gap(0, 100, 7),))


def test_head_lists_few_holes_of_one_offset_and_then_only_long_ones() -> None:
    some = tuple(gap(1000 + at, 1001 + at) for at in range(0, 200, 2))
    assert len(some) == limits.FILE_GAPS_SHORT
    found = lacked((gap(5, 6), gap(10, 20)), some)
    assert found.gaps == (gap(10, 20), gap(0, 100, 1))
    many = some * (limits.FILE_GAPS_MAX // len(some))
    assert lacked((gap(5, 6), gap(10, 20)), many).gaps == (gap(0, 100, 11),)
    assert found.offsets == 11


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        yield made


def folder_without_a_file(home: Home, tmp_path: Path) -> Path:
    """A copy of an archive's three files of ten offsets, without the second file and event 5."""
    raw = home.archives.create("raw", source="topic:t")
    for start in (0, 10, 20):
        events = [Event(b"%d" % n, id=f"id-{n}") for n in range(start, start + 10)]
        home.append("t", events, partition=0)
        home.delete("t", ["id-5"], why="asked")
        raw.run()
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "o/archives/raw/g1", copy)
    sorted(copy.glob("**/*.parquet"))[1].unlink()
    return copy


def test_archive_of_a_folder_is_calm_about_what_the_folder_lacks(
    home: Home, tmp_path: Path
) -> None:
    copy = folder_without_a_file(home, tmp_path)
    found = home.archives.create("found", source=f"file:{copy}")
    assert found.run().events == 19
    (status,) = found.status().partitions
    account = status.account
    assert account is not None
    assert (account.archived, account.absent, account.adds_up) == (19, 0, True)
    assert account.gaps == (gap(5, 6), gap(10, 20))
    assert status.totals.lost == 0
    assert troubles(found.status(), Limits()) == []
    report = found.verify(deep=True, source=True)
    assert report.problems == []
    assert [(note.kind, note.what) for note in report.notes] == [
        ("files", "11 offsets are in no file that was read")
    ]
    chain = home.archives.create("chain", source="archive:found")
    chain.run()
    (status,) = chain.status().partitions
    assert (status.totals.lost, status.account and status.account.gaps) == (0, account.gaps)


def test_erased_events_excuse_no_others_that_a_generation_lacks(home: Home, tmp_path: Path) -> None:
    copy = folder_without_a_file(home, tmp_path)
    full = tmp_path / "full"
    shutil.copytree(tmp_path / "o/archives/raw/g1", full)
    found = home.archives.create("found", source=f"file:{copy}")
    found.run()
    found.erase(ids=[f"id-{n}" for n in range(20, 30)], prove=False)
    found.backfill(codec="gzip")  # it counts ten events as erased, and ten others as not there
    found.promote()
    found.backfill(source=f"file:{full}", codec="zstd")
    found.promote()
    lacks = "generation 2 lacks what generation 3 has: `t/0` from 10 to 20"
    with pytest.raises(InvalidError, match=lacks):
        found.rollback(2)
    assert found.rollback(2, force=True).generation == 2
    shutil.rmtree(full)
    with pytest.raises(InvalidError, match="generation 3 holds what neither"):
        found.drop(3)


def test_restore_goes_on_past_offsets_that_never_had_an_event(home: Home, tmp_path: Path) -> None:
    copy = folder_without_a_file(home, tmp_path)
    home.create_topic("again", 1)
    found = home.archives.create("found", source=f"file:{copy}")
    found.run()
    assert found.restore(to="topic:again").events == 19
    home.delete("t", [f"id-{n}" for n in range(10, 20)], why="asked")
    home.purge("t")
    found.backfill(source="archive:raw", codec="gzip")  # which says that these were erased
    found.promote()
    assert found.restore(to="topic:again").events == 0


def test_archive_reads_its_folder_on_after_a_generation_of_another_folder(
    home: Home, tmp_path: Path
) -> None:
    copy = folder_without_a_file(home, tmp_path)
    found = home.archives.create("found", source=f"file:{copy}")
    found.run()
    raw = home.archives.get("raw")
    raw.backfill(codec="gzip")
    raw.promote()
    found.backfill(source=f"file:{tmp_path / 'o/archives/raw/g2'}", codec="zstd")
    found.promote()
    assert found.run().events == 0, "no file came late"
    home.append("t", [Event(b"30", id="id-30")], partition=0)
    raw.run()
    (new,) = (tmp_path / "o/archives/raw/g2").glob("**/*30.parquet")
    shutil.copy(new, copy / "t" / new.name.replace("2_", "1_", 1))
    assert found.run().events == 1
