"""Registered tables follow every file that is rewritten or replaced, kept up to date or not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table as IcebergRead

from tests.support.archive_look import FIRST_S, a_home, an_archive, drive
from tests.support.forgotten_ranges import forget
from tests.support.iceberg_rest import serving
from tests.support.sql_catalog import open_sql_catalog
from tidelog import Event, Home
from tidelog.archive import generations
from tidelog.archive.archive import open_pipeline
from tidelog.archive.delta import DeltaLog
from tidelog.archive.generations import begin_backfill, drop_generation, promote
from tidelog.archive.iceberg import IcebergTable
from tidelog.archive.tables import (
    change_tables,
    forget_table,
    register_table,
    repair_tables,
    stale_entries,
)
from tidelog.erasure import rewrite as erase
from tidelog.erasure.rewrite import erase_from_archives
from tidelog.errors import InvalidError, UnavailableError
from tidelog.maintenance.erase import purge
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.maintenance.turn import ArchiveEraser
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.testing.scheduler import Crash

EVENTS = 60
GONE = [3, 10, 11]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        add(made, range(EVENTS))
        yield made


@pytest.fixture(params=["delta", "iceberg"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "delta":
        return "delta"
    return f"iceberg:sqlite:///{tmp_path}/ice.db?warehouse=file://{tmp_path}/w#ns.t"


def add(home: Home, numbers: range) -> None:
    events = [
        Event(
            json.dumps({"at": FIRST_S + number % 3 * 86_400, "n": number}).encode(),
            id=f"id-{number}",
        )
        for number in numbers
    ]
    home.append("t", events, partition=0)


def iceberg_of(table: str) -> IcebergRead:
    """By the name that the documents give for an SQL catalog."""
    uri, _, name = table.removeprefix("iceberg:").rpartition("#")
    return open_sql_catalog(uri.partition("?")[0]).load_table(name)


def delta_of(archive: Archive) -> DeltaTable:
    return DeltaTable(f"{archive.store.removeprefix('file://')}/{archive.folder()}")


def numbers(archive: Archive, table: str) -> Counter[int]:
    """What a table's own library reads; and what its metadata and DuckDB count is the same."""
    if table == "delta":
        delta = delta_of(archive)
        rows = delta.to_pyarrow_table()
        told = sum(pa.table(delta.get_add_actions()).column("num_records").to_pylist())
        dataset = delta.to_pyarrow_dataset()  # noqa: F841 - DuckDB finds it by its name
        ((counted,),) = duckdb.sql("SELECT count(*) FROM dataset").fetchall()
    else:
        iceberg = iceberg_of(table)
        rows, told = iceberg.scan().to_arrow(), iceberg.scan().count()
        found = iceberg.scan().to_duckdb(table_name="t").sql("SELECT count(*) FROM t").fetchall()
        ((counted,),) = found
    assert told == counted == rows.num_rows
    return Counter(json.loads(each)["n"] for each in rows.column("value").to_pylist())


def left(gone: list[int] = GONE, count: int = EVENTS) -> Counter[int]:
    return Counter(number for number in range(count) if number not in gone)


def erase_gone(home: Home, gone: list[int] = GONE) -> None:
    erase_from_archives(home.context, home.topic("t"), {0: gone})


def build(home: Home, written_as: ArchiveFormat) -> None:
    built, generation = begin_backfill(home.context, "daily", written_as)
    pipeline = open_pipeline(home.context, built, LocalWorkers(2), generation)
    Driver(home.context, pipeline, DriverOptions()).run()


def is_kept(home: Home, archive: Archive, table: str, keep: bool) -> Archive:
    register_table(home.context, archive, table)
    return change_tables(home.context, archive, table, keep=keep)


def test_table_registered_once_follows_every_erasure(home: Home, table: str) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    register_table(home.context, archive, table)
    add(home, range(EVENTS, EVENTS + 10))
    drive(home, archive)
    register_table(home.context, archive, table)
    assert home.archives.get("daily").info.tables == (table,)
    erase_gone(home)  # from files of the first addition, not the last
    assert numbers(archive, table) == left(count=EVENTS + 10)
    erase_gone(home, [*GONE, 65])
    assert numbers(archive, table) == left([*GONE, 65], EVENTS + 10)


def test_delete_with_proof_reaches_a_table_registered_once(home: Home, table: str) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    register_table(home.context, archive, table)
    ids = [f"id-{number}" for number in GONE]
    home.delete("t", ids)
    purge(home.context, home.topic("t"), grace_ms=0)
    assert numbers(archive, table) == left()
    assert home.prove_erased("t", ids=ids).traces == []


def test_proof_names_stale_tables_and_registering_again_repairs_them(
    home: Home, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    register_table(home.context, archive, table)
    add(home, range(EVENTS, EVENTS + 10))
    drive(home, archive)
    register_table(
        home.context, archive, table
    )  # so that the changed files are not those of the last addition
    home.delete("t", ["id-3"])
    with monkeypatch.context() as patch:  # as a register leaves it that dies beside an erasure
        patch.setattr(erase, "correct_entries", lambda *_: None)
        erase_gone(home, [3])
        sweep_archives(home.context, grace_ms=-1)
    found = home.prove_erased("t", ids=["id-3"]).traces
    (trace,) = [each for each in found if each.object == f"table {table}"]
    assert "as it was before the erasure" in trace.what
    assert "tidelog archive register daily" in trace.do
    assert repair_tables(home.context, home.archives.get("daily").info) == []
    assert numbers(archive, table) == left([3], EVENTS + 10)
    again = home.prove_erased("t", ids=["id-3"]).traces
    assert [each for each in again if each.object.startswith("table")] == []


@pytest.mark.parametrize("keep", [True, False])
def test_promote_to_an_empty_generation_empties_the_table(
    home: Home, table: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    is_kept(home, archive, table, keep)
    begin_backfill(
        home.context, "daily", ArchiveFormat(parser="json:at", layout={"granularity": "hour"})
    )
    with monkeypatch.context() as patch:  # as if neither source nor files could be read any more
        patch.setattr(generations._Promote, "_catch_up", lambda self, _: self._lacking())
        promoted = promote(home.context, "daily", force=True)
    drop_generation(home.context, "daily", 1)
    assert list(home.store.list("archives/daily/g1/")) == []
    if table == "delta":
        assert list(home.store.list("archives/daily/g2/")) == []  # no file, and no table of none
    else:
        assert numbers(promoted, table) == Counter()
    drive(home, promoted)
    register_table(home.context, promoted, table)
    assert numbers(promoted, table) == left([])


def test_promote_brings_over_a_table_registered_once(home: Home, table: str) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    register_table(home.context, archive, table)
    build(home, ArchiveFormat(parser="json:at"))
    promoted = promote(home.context, "daily")
    drop_generation(home.context, "daily", 1)
    assert list(home.store.list("archives/daily/g1/")) == []
    assert numbers(promoted, table) == left([])


def test_drop_brings_tables_over_before_it_deletes_old_files(
    home: Home, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    register_table(home.context, archive, table)
    build(home, ArchiveFormat(parser="json:at"))

    def dying(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(generations, "replace_files", dying)
        with pytest.raises(Crash):
            promote(home.context, "daily")
    sweep_archives(home.context, grace_ms=-1)
    assert numbers(archive, table) == left([])
    promoted = drop_generation(home.context, "daily", 1)
    assert (promoted.generation, list(promoted.formats)) == (2, [2])
    assert numbers(promoted, table) == left([])


def test_tables_of_an_older_generation_that_is_kept_follow_erasures(home: Home) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    register_table(home.context, archive, "delta")
    build(home, ArchiveFormat(parser="json:at"))
    promoted = promote(home.context, "daily")
    erase_gone(home)
    assert numbers(archive, "delta") == numbers(promoted, "delta") == left()


def test_generation_that_no_table_can_list_is_not_promoted(home: Home, table: str) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    register_table(home.context, archive, table)
    build(home, ArchiveFormat(parser="json:at", format="avro"))
    with pytest.raises(InvalidError, match=r"tables are made of parquet.*register daily --forget"):
        promote(home.context, "daily")
    assert home.archives.get("daily").info.generation == 1
    assert numbers(archive, table) == left([])
    forget_table(home.context, archive, table)
    assert promote(home.context, "daily").generation == 2


def test_register_that_slept_through_a_promote_does_not_bring_old_files_back(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = f"iceberg:sqlite:///{tmp_path}/ice.db?warehouse=file://{tmp_path}/w#ns.t"
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    register_table(home.context, archive, table)
    build(home, ArchiveFormat(parser="json:at"))
    real: Callable[..., Any] = IcebergTable.through
    slept = []

    def after_a_promote(self: IcebergTable, lanes: list[str]) -> object:
        if not slept:
            slept.append(True)
            promote(home.context, "daily")
        return real(self, lanes)

    monkeypatch.setattr(IcebergTable, "through", after_a_promote)
    register_table(home.context, archive, table)
    assert numbers(home.archives.get("daily").info, table) == left([])


def test_unreachable_table_does_not_stop_the_erasure_and_is_corrected_later(home: Home) -> None:
    with serving() as server:
        table = f"iceberg:{server.url}#lake.t"
        archive = an_archive(home, parser="json:at")
        drive(home, archive)
        register_table(home.context, archive, table)
        register_table(home.context, archive, "delta")
        home.delete("t", ["id-3"])
        server.refusing = True
        eraser = ArchiveEraser(home.context)
        with pytest.raises(UnavailableError, match=r"lake\.t"):
            erase_gone(home, [3])
        assert numbers(archive, "delta") == left([3])
        found = home.prove_erased("t", ids=["id-3"]).traces
        assert f"table {table}" in {each.object for each in found}
        home.delete("t", ["id-10"])  # of a file that the same range has
        eraser.turn()
        assert any("lake.t" in str(each) for each in eraser.troubles)
        assert numbers(archive, "delta") == left([3, 10])
        server.refusing = False
        eraser.turn()
        assert eraser.troubles == []
        reader = load_catalog("reader", uri=server.url).load_table("lake.t")
        assert reader.scan().count() == reader.scan().to_arrow().num_rows == EVENTS - 2
        assert list(home.store.list("staging/")) == []


def test_unreachable_table_is_tried_once_for_all_ranges(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try may take as long as a time-out."""
    archive = an_archive(home, parser="json:at")
    for first in range(EVENTS, EVENTS + 50, 10):
        drive(home, archive)
        add(home, range(first, first + 10))
    register_table(home.context, archive, "delta")
    tries = []

    def failing(*_: object) -> bool:
        tries.append(True)
        raise UnavailableError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(DeltaLog, "change", failing)
        with pytest.raises(UnavailableError, match="no answer"):
            erase_gone(home, [3, 65, 75, 85])
    assert len(tries) == 1
    erase_gone(home, [3, 65, 75, 85])
    assert numbers(archive, "delta") == left([3, 65, 75, 85], EVENTS + 40)


@pytest.mark.parametrize("when", ["before", "after"])
def test_erasure_that_dies_at_a_table_is_finished_by_the_next(
    home: Home, table: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    register_table(home.context, archive, table)
    kind: Any = DeltaLog if table == "delta" else IcebergTable
    real = kind.change

    def dying(self: Any, files: list[Any]) -> bool:
        if when == "after":
            real(self, files)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(kind, "change", dying)
        with pytest.raises(Crash):
            erase_gone(home)
    sweep_archives(home.context, grace_ms=-1)
    erase_gone(home)
    assert numbers(archive, table) == left()


@pytest.mark.parametrize("first", [True, False], ids=["registered before", "registered after"])
def test_register_finishes_an_erasure_that_died_after_it_replaced_files(
    home: Home, table: str, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    if first:
        register_table(home.context, archive, table)

    def dying(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(erase.PartitionRewriter, "_count_row", dying)
        with pytest.raises(Crash):
            erase_gone(home)
    home.archives.get("daily").tables.register(table)
    found = numbers(archive, table)
    assert found < Counter(range(EVENTS)), "the files of one range are rewritten"
    assert found >= left()


def test_table_is_recorded_before_it_lists_a_file(
    home: Home, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a register that dies in between leaves a table that no erasure knows."""
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    kind: Any = DeltaLog if table == "delta" else IcebergTable
    real = kind.add

    def dying(self: Any, addition: Any) -> None:
        real(self, addition)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(kind, "add", dying)
        with pytest.raises(Crash):
            register_table(home.context, archive, table)
    assert home.archives.get("daily").info.tables == (table,)
    erase_gone(home)
    assert numbers(archive, table) == left()


def test_sweep_corrects_what_a_register_left_that_died_beside_an_erasure(
    home: Home, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files were collected before the erasure, and added after it."""
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    register_table(home.context, archive, table)
    add(home, range(EVENTS, EVENTS + 10))
    drive(home, archive)
    kind: Any = DeltaLog if table == "delta" else IcebergTable
    real = kind.add

    def dying(self: Any, addition: Any) -> None:
        if table != "delta":
            before = self._data_files(self._table, addition.files, self._table.metadata)
            self._data_files = lambda *_: before
        erase_gone(home, [65])
        real(self, addition)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(kind, "add", dying)
        with pytest.raises(Crash):
            register_table(home.context, archive, table)
    sweep_archives(home.context, grace_ms=0)
    assert list(stale_entries(home.context, archive, 1)) == []
    assert numbers(archive, table) == left([65], EVENTS + 10)


def test_sweep_asks_no_table_of_an_archive_without_erasures(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    register_table(home.context, archive, "delta")
    monkeypatch.setattr(DeltaLog, "through", lambda *_: pytest.fail("the table was asked"))
    sweep_archives(home.context, grace_ms=0)


def test_table_that_lists_files_which_were_set_aside_is_refused(home: Home, table: str) -> None:
    """Also when the archive has done their range again, and has come further than the table."""
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    register_table(home.context, archive, table)
    forget(home, archive)
    add(home, range(EVENTS, EVENTS + 30))
    drive(home, archive)
    with pytest.raises(InvalidError, match=r"lists 3 files that were set aside.*drop the"):
        register_table(home.context, archive, table)


def test_table_that_cannot_be_reached_or_is_not_ours_is_not_recorded(home: Home) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    with pytest.raises(UnavailableError):
        register_table(home.context, archive, "iceberg:http://127.0.0.1:9#a.b")
    with pytest.raises(UnavailableError):
        change_tables(home.context, archive, "iceberg:http://127.0.0.1:9#a.b", keep=True)
    assert home.archives.get("daily").info.tables == ()
    with pytest.raises(InvalidError, match="has no table `delta`: its tables are none"):
        forget_table(home.context, archive, "delta")


def test_column_named_like_a_folder_in_capital_letters_is_the_one_that_tables_have(
    home: Home, table: str
) -> None:
    archive = an_archive(
        home, parser="json:at", format_settings={"schema": "n BIGINT, `DT` STRING"}
    )
    drive(home, archive)
    home.archives.get("daily").tables.register(table)
    assert numbers(archive, table) == Counter(range(EVENTS))
    read = delta_of(archive) if table == "delta" else iceberg_of(table)
    names = [field.name for field in read.schema().fields]
    assert [name for name in names if name.lower() == "dt"] == ["DT"]


def test_promote_to_folders_that_are_not_dates_is_refused_before_it_begins(
    home: Home, tmp_path: Path
) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    table = f"iceberg:sqlite:///{tmp_path}/ice.db#ns.t"
    register_table(home.context, archive, table)
    build(home, ArchiveFormat(parser="json:at", layout={"date_format": "dt=%Y-%m"}))
    with pytest.raises(InvalidError, match=r"a folder is named `2026-11`.*--forget"):
        promote(home.context, "daily")
    assert home.archives.get("daily").info.generation == 1
    erase_gone(home)
    assert numbers(archive, table) == left()


@pytest.mark.parametrize(
    ("columns", "trouble"),
    [
        ("n BIGINT, at BIGINT, more STRING", ""),
        ("n BIGINT", ""),
        ("n INT, dt STRING", "date -> string"),
    ],
    ids=["more and wider", "less", "another type"],
)
def test_iceberg_table_gets_the_columns_of_a_promoted_generation(
    home: Home, tmp_path: Path, columns: str, trouble: str
) -> None:
    archive = an_archive(home, parser="json:at", format_settings={"schema": "n INT, at BIGINT"})
    drive(home, archive)
    table = f"iceberg:sqlite:///{tmp_path}/ice.db#ns.t"
    register_table(home.context, archive, table)
    build(home, ArchiveFormat(parser="json:at", format_settings={"schema": columns}))
    if trouble:
        with pytest.raises(InvalidError, match=rf"cannot have the columns .*{trouble}.*--forget"):
            promote(home.context, "daily")
    else:
        promote(home.context, "daily")
        assert ("more" in iceberg_of(table).schema().column_names) == ("more" in columns)
    assert numbers(archive, table) == Counter(range(EVENTS))
    assert iceberg_of(table).scan(row_filter="n >= 30").to_arrow().num_rows == EVENTS - 30


def test_table_with_an_error_does_not_keep_a_promote_from_the_others(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = an_archive(home, parser="json:at")
    drive(home, archive)
    for name in (f"iceberg:sqlite:///{tmp_path}/ice.db#ns.t", "delta"):
        register_table(home.context, home.archives.get("daily").info, name)
    build(home, ArchiveFormat(parser="json:at"))

    def failing(*_: object) -> None:
        raise InvalidError("no rights")

    with monkeypatch.context() as patch:
        patch.setattr(IcebergTable, "add", failing)
        with pytest.raises(InvalidError, match="no rights"):
            promote(home.context, "daily")
    present = home.archives.get("daily").info
    assert (present.generation, numbers(present, "delta")) == (2, Counter(range(EVENTS)))


def test_path_of_a_catalog_is_recorded_whole_for_drivers_in_other_folders(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(home, an_archive(home, parser="json:at"))
    tables = home.archives.get("daily").tables
    monkeypatch.chdir(tmp_path)
    tables.register("iceberg:sqlite:///lake.db#ns.t", keep=True)
    whole = f"iceberg:sqlite:///{tmp_path}/lake.db#ns.t"
    assert (tables.list(), home.archives.get("daily").info.kept) == ([whole], (whole,))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    tables.register()
    assert list(Path.cwd().iterdir()) == [], "a second catalog"
    monkeypatch.chdir(tmp_path)
    tables.forget("iceberg:sqlite:///lake.db#ns.t")
    assert tables.list() == []
