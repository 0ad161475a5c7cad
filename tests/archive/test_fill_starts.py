"""A backfill begins where its archive begins: promote and rollback give back the same offsets."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from tests.archive.test_archive import fill
from tests.archive.test_fill import drive, home, trim
from tests.support.archive_look import an_archive
from tidelog import Home
from tidelog.archive.archive import find_archive
from tidelog.archive.generations import begin_backfill, promote, rollback
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.coordination.pipeline_rows import read_partitions, read_progress
from tidelog.errors import InvalidError
from tidelog.model.archive import Archive, ArchiveFormat, Start

__all__ = ["home"]


def offsets(home: Home, generation: int) -> list[int]:
    """The offsets in the files of a generation, of its one source partition."""
    archive = home.archives.get("daily").info
    folder = f"{home.store.url.removeprefix('file://')}/{archive.folder(generation)}"
    if not list(Path(folder).rglob("*.parquet")):
        return []
    query = f"SELECT \"offset\" FROM read_parquet('{folder}/**/*.parquet') ORDER BY 1"
    return [number for (number,) in duckdb.sql(query).fetchall()]


def begin_of(home: Home, generation: int) -> tuple[str, str]:
    pipeline = home.archives.get("daily").info.pipeline(generation)
    (partition,) = read_partitions(home.context, pipeline)
    head = read_progress(home.context, pipeline, partition)
    assert head is not None
    assert head.begin is not None
    return head.begin.position, head.begin.reason


class Topic:
    """A source of offsets that grows."""

    def __init__(self, home: Home, folder: Path) -> None:
        self.home, self.folder, self.count = home, folder, 0

    def grow(self, count: int) -> None:
        fill(self.home, count, first=self.count)
        self.count += count

    @property
    def url(self) -> str:
        return "topic:t"


class Rows(Topic):
    def grow(self, count: int) -> None:
        self.folder.mkdir(exist_ok=True)
        with (self.folder / "a.log").open("a") as file:
            file.writelines(f"line {n}\n" for n in range(self.count, self.count + count))
        self.count += count

    @property
    def url(self) -> str:
        return f"file:{self.folder}"


class Upstream(Topic):
    def grow(self, count: int) -> None:
        if not self.count:
            an_archive(self.home, "first")
        super().grow(count)
        drive(self.home, find_archive(self.home.context, "first"))

    @property
    def url(self) -> str:
        return "archive:first"


SOURCES: list[type[Topic]] = [Topic, Rows, Upstream]


def built(home: Home, written_as: ArchiveFormat | None = None) -> Archive:
    archive, generation = begin_backfill(home.context, "daily", written_as or ArchiveFormat())
    drive(home, archive, generation)
    return archive


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("start", ["earliest", "latest"])
@pytest.mark.parametrize("reads", [True, False])
def test_promote_and_rollback_give_back_the_same_offsets(
    home: Home, tmp_path: Path, source: type[Topic], start: Start, reads: bool
) -> None:
    made = source(home, tmp_path / "src")
    made.grow(10)
    archive = an_archive(home, source=made.url, start=start)
    if reads:  # else the live generation has begun, and holds nothing after latest
        made.grow(5)
    drive(home, archive)
    begin, held = begin_of(home, 1), offsets(home, 1)
    assert begin == (("10", "latest") if start == "latest" else ("0", "earliest"))
    built(home)
    promote(home.context, "daily")
    assert (begin_of(home, 2), offsets(home, 2)) == (begin, held)
    made.grow(3)
    drive(home, home.archives.get("daily").info)
    held = list(range(int(begin[0]), made.count))
    assert offsets(home, 2) == held
    rollback(home.context, "daily")
    assert (begin_of(home, 1), offsets(home, 1)) == (begin, held)
    report = verify_archive(
        home.context,
        home.archives.get("daily").info,
        ArchiveVerifyOptions(deep=True, source=True),
    )
    assert report.problems == []


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_backfill_before_the_first_run_begins_where_the_archive_would(
    home: Home, tmp_path: Path, source: type[Topic], start: Start
) -> None:
    made = source(home, tmp_path / "src")
    made.grow(10)
    an_archive(home, source=made.url, start=start)
    made.grow(5)
    built(home)
    promote(home.context, "daily")
    drive(home, home.archives.get("daily").info)
    first = 10 if start == "latest" else 0
    assert offsets(home, 2) == list(range(first, 15))
    assert begin_of(home, 2) == (str(first), start)
    rollback(home.context, "daily")
    drive(home, home.archives.get("daily").info)
    assert offsets(home, 1) == list(range(first, 15))


def backup(home: Home) -> None:
    """An archive `raw` of all events, and one that began after a trim."""
    fill(home, 10)
    drive(home, an_archive(home, "raw"))
    trim(home, 6)
    drive(home, an_archive(home))


@pytest.mark.parametrize("start", ["", "earliest"])
def test_backup_with_earlier_events_extends_an_archive_only_on_request(
    home: Home, start: str
) -> None:
    backup(home)
    built(home, ArchiveFormat(source="archive:raw", start=start))  # type: ignore[arg-type]
    promote(home.context, "daily")
    if start:
        assert offsets(home, 2) == list(range(10))
        assert begin_of(home, 2) == ("0", "earliest")
        assert home.archives.get("daily").info.format_of().start == "earliest"
        with pytest.raises(InvalidError, match="`t/0` from 0 to 6"):
            rollback(home.context, "daily")
    else:
        assert offsets(home, 2) == offsets(home, 1) == list(range(6, 10))
        assert begin_of(home, 2) == ("6", "retention")
        rollback(home.context, "daily")
