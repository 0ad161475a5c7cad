"""Deleted rows leave no bytes in the files of a SQLite catalog."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.archive_look import a_home
from tests.support.homes import a_catalog
from tidelog import Event
from tidelog.catalog import sqlite as sqlite_module
from tidelog.catalog.base import Catalog, Delete, Put, clear_deleted_rows
from tidelog.maintenance.erase import purge

SECRET = b"a value that was erased"


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalog]:
    """A catalog on a build of SQLite that leaves deleted bytes in place, as most do."""
    connect = sqlite3.connect

    def careless(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection = connect(*args, **kwargs)
        connection.execute("PRAGMA secure_delete=OFF")
        return connection

    monkeypatch.setattr(sqlite_module.sqlite3, "connect", careless)
    opened = a_catalog(f"sqlite://{tmp_path}/catalog.sqlite", create=True)
    yield opened
    opened.close()


def files_with(folder: Path, text: bytes) -> list[str]:
    return sorted(
        path.name for path in folder.rglob("*") if path.is_file() and text in path.read_bytes()
    )


def test_deleted_and_replaced_rows_leave_no_bytes(catalog: Catalog, tmp_path: Path) -> None:
    for number in range(20):
        row = Put(f"r{number:02}", SECRET + b"." * 3_000)
        catalog.write("p", row, write_id=f"w{number}")
    assert clear_deleted_rows(catalog)
    assert files_with(tmp_path, SECRET) == ["catalog.sqlite"]
    for number in range(20):
        name = f"r{number:02}"
        change = Delete(name) if number % 2 else Put(name, b"other")
        catalog.write("p", change, write_id=f"x{number}")
    assert clear_deleted_rows(catalog)
    assert files_with(tmp_path, SECRET) == []


def test_reader_of_another_process_keeps_the_log(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_module, "_BUSY_MS", 50)
    catalog.write("p", Put("a", SECRET), write_id="w1")
    reader = sqlite3.connect(tmp_path / "catalog.sqlite", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM rows").fetchall()
    catalog.close()  # the time-out counts for new connections
    catalog.write("p", Delete("a"), write_id="w2")
    assert not clear_deleted_rows(catalog)
    reader.close()
    assert clear_deleted_rows(catalog)
    assert files_with(tmp_path, SECRET) == []


def test_value_of_an_update_is_in_no_file_after_a_clean_proof(tmp_path: Path) -> None:
    with a_home(tmp_path) as home:
        home.create_topic("t", 1)
        home.append("t", [Event(b"first", id="gone"), Event(b"other", id="stays")])
        home.update("t", "gone", SECRET)
        home.delete("t", ["gone"])
        purge(home.context, home.topic("t"), 0)
        assert files_with(tmp_path, SECRET) == []
        assert home.prove_erased("t", ids=["gone"]).is_erased
        assert files_with(tmp_path, SECRET) == []


def test_proof_is_not_clean_while_the_log_has_deleted_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_module, "_BUSY_MS", 50)
    with a_home(tmp_path) as home:
        home.create_topic("t", 1)
        home.append("t", [Event(b"first", id="gone")])
        home.update("t", "gone", SECRET)
        reader = sqlite3.connect(tmp_path / "c.sqlite", isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM rows").fetchall()
        home.delete("t", ["gone"])
        purge(home.context, home.topic("t"), 0)
        (trace,) = home.prove_erased("t", ids=["gone"]).traces
        assert (trace.object, trace.what) == (
            home.catalog.url,
            "its log holds rows that were deleted",
        )
        reader.close()
        assert home.prove_erased("t", ids=["gone"]).is_erased
