"""A folder of an archive that changes while it is read as files: merged, or an error."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from tests.connectors.files.test_source import CLICKS, at, bounds, events, lay, read
from tests.support.homes import a_store
from tidelog.catalog.memory import MemoryCatalog
from tidelog.clock import RandomIds, SystemClock
from tidelog.codec.formats import FormatSettings
from tidelog.codec.parsers import FolderSettings
from tidelog.connectors.archive.sink import ArchiveSink, ArchiveSinkSettings
from tidelog.context import Context
from tidelog.errors import InvalidError
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.tasks import LocalWorkers


def a_run(folder: Path) -> Callable[[], int]:
    """Archives the folder's files once more, by a process of its own each time."""
    catalog = MemoryCatalog()

    def run() -> int:
        store = a_store(str(folder / "o"))
        context = Context(store, catalog, SystemClock(), RandomIds(), random.Random(1))
        sink = ArchiveSink(ArchiveSinkSettings(str(folder / "o"), "archives/in", "dead/in"))
        pipeline = Pipeline("in", "inc", at(folder / "raw"), sink, LocalWorkers())
        return Driver(context, pipeline, DriverOptions()).run()

    return run


@pytest.mark.parametrize(
    ("form", "settings"),
    [("parquet", {}), ("jsonlines", {}), ("jsonlines", {"mode": "events"}), ("avro", {})],
)
def test_replayed_dead_letters_are_merged_with_what_they_lie_in(
    tmp_path: Path, form: str, settings: dict[str, str]
) -> None:
    how = {"format": form, "format_settings": FormatSettings(**settings)}
    lay(tmp_path, [events([n for n in range(10) if n not in (5, 6)])], **how)
    lay(tmp_path, [events(range(10, 20))], **how)
    lay(tmp_path, [events([5, 6])], **how)
    source = at(tmp_path / "raw")
    assert bounds(source) == (0, 20)
    assert read(source, 0, 20).equals(pa.Table.from_batches([events(range(20))]))
    for start, limit in ((5, 7), (7, 10), (6, 12), (8, 9)):
        found = read(at(tmp_path / "raw"), start, limit)["offset"].to_pylist()
        assert found == list(range(start, limit))


def test_end_is_that_of_any_file(tmp_path: Path) -> None:
    lay(tmp_path, [events([n for n in range(10) if n not in (5, 6)])])
    lay(tmp_path, [events([5, 6])])
    assert bounds(at(tmp_path / "raw")) == (0, 10)


def test_dead_letters_that_are_replayed_after_they_were_passed_are_an_error(
    tmp_path: Path,
) -> None:
    run = a_run(tmp_path)
    lay(tmp_path, [events([n for n in range(10) if n not in (5, 6)])])
    assert run() == 8
    assert run() == 0
    lay(tmp_path, [events(range(10, 20))])
    assert run() == 10
    lay(tmp_path, [events([5, 6])])
    with pytest.raises(InvalidError, match="came after these were read"):
        run()
    next((tmp_path / "raw").rglob("*_00000000000000000005.parquet")).unlink()
    lay(tmp_path, [events(range(20, 25))])
    assert run() == 5


def test_replayed_dead_letters_are_an_error_also_where_other_files_were_deleted(
    tmp_path: Path,
) -> None:
    run = a_run(tmp_path)

    def delete(*offsets: int) -> None:
        for first in offsets:
            next((tmp_path / "raw").rglob(f"*_{first:020}.parquet")).unlink()

    for first in (0, 4, 8):
        lay(tmp_path, [events(range(first, first + 4))])
    lay(tmp_path, [events([n for n in range(12, 20) if n not in (15, 16)])])
    assert run() == 18
    delete(0)
    lay(tmp_path, [events(range(20, 25))])
    assert run() == 5  # files may go once they were read
    delete(4, 8)
    lay(tmp_path, [events([15, 16])])
    with pytest.raises(InvalidError, match="came after these were read"):
        run()


def test_file_that_is_published_behind_the_reader_is_an_error(tmp_path: Path) -> None:
    """The files of one range, of which a reader sees the second one first."""
    run = a_run(tmp_path)
    how = {"parser": "timestamp", "layout": FolderSettings()}
    lay(tmp_path, [events(range(30))], **how)
    late = next((tmp_path / "raw").rglob("dt=2026-11-16/*.parquet"))
    aside = late.rename(tmp_path / "late")
    assert run() == 20
    aside.rename(late)
    with pytest.raises(InvalidError, match="came after these were read"):
        run()


def test_files_named_after_a_restore_belong_to_their_source_partition(tmp_path: Path) -> None:
    lay(tmp_path, [events(range(10))])
    lay(tmp_path, [events(range(10, 20))], suffix="0193f5c2a1b37e11")
    source = at(tmp_path / "raw")
    assert source.partitions() == [CLICKS]
    assert read(source, 0, 20).equals(pa.Table.from_batches([events(range(20))]))
