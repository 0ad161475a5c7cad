"""Queries that are not trusted: what they reach, and what ends them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidelog
from tidelog import Event, Grant, Home, create_home
from tidelog.api.sql_process import EVERYTHING, SqlAccess, SqlLimits, locked_query, run_apart
from tidelog.errors import InvalidError
from tidelog.model.token import Scope, Token

LIMITS = SqlLimits(seconds=60.0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sql") / "home"
    with create_home(folder)[0] as home:
        for name in ("orders", "secrets"):
            home.create_topic(name)
            home.append(name, [Event(b"%s %d" % (name.encode(), n), id=f"{n}") for n in range(50)])
        home.archives.create("daily", source="topic:secrets").run()
    return folder


@pytest.fixture
def home(place: Path) -> Iterator[Home]:
    with tidelog.open(place) as home:
        yield home


def rows(home: Home, query: str, access: SqlAccess = EVERYTHING) -> list[dict[str, Any]]:
    """The rows of a query as the child runs it, in this process."""
    found: list[dict[str, Any]]
    found = locked_query(home.context, query, None, access, LIMITS).read_all().to_pylist()
    return found


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("select * from read_csv('/etc/passwd')", "function `read_csv` is not allowed"),
        ("select * from '/etc/passwd'", "topic or archive `/etc/passwd` not found"),
        ("select (select content from read_text('/etc/passwd'))", "`read_text` is not allowed"),
        ("with a as (from read_blob('/etc/passwd')) from a", "`read_blob` is not allowed"),
        ("describe select * from read_json('/etc/passwd')", "`read_json` is not allowed"),
        ("select * from orders, glob('/etc/*')", "`glob` is not allowed"),
        ("select * from query('from read_csv(''/etc/passwd'')')", "`query` is not allowed"),
        ("select * from query_table('secrets')", "`query_table` is not allowed"),
        ("select * from duckdb_settings()", "`duckdb_settings` is not allowed"),
        ("select * from arrow_scan(1, 2, 3)", "`arrow_scan` is not allowed"),
        ("copy (select 1) to '{folder}/out.csv'", "only a SELECT is allowed"),
        ("copy orders from '/etc/passwd'", "only a SELECT is allowed"),
        ("attach '{folder}/out.db'", "only a SELECT is allowed"),
        ("export database '{folder}/out'", "only a SELECT is allowed"),
        ("install httpfs", "only a SELECT is allowed"),
        ("load httpfs", "only a SELECT is allowed"),
        ("pragma database_list", "only a SELECT is allowed"),
        ("set enable_external_access = true", "only a SELECT is allowed"),
        ("create table t as select 1", "only a SELECT is allowed"),
        ("create secret s (type s3)", "only a SELECT is allowed"),
        ("call pragma_version()", "only a SELECT is allowed"),
        ("explain analyze select 1", "only a SELECT is allowed"),
        ("select 1; select 2", "found 2 statements"),
        ("select 1; copy (select 1) to '{folder}/out.csv'", "only a SELECT is allowed"),
        ("with t as (insert into orders values (1) returning 1) from t", "sql: "),
        ("select getenv('HOME')", "getenv does not exist"),
        ("select " + "(" * 2_000 + "1" + ")" * 2_000, "sql: "),
        ("selec", "syntax error"),
        ("", "found 0 statements"),
    ],
)
def test_hostile_queries_are_refused(home: Home, tmp_path: Path, query: str, says: str) -> None:
    with pytest.raises(InvalidError, match=says) as caught:
        rows(home, query.replace("{folder}", str(tmp_path)))
    assert "\n" not in caught.value.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "query",
    [
        "set enable_external_access = true",
        "set threads = 8",
        "reset lock_configuration",
        "load httpfs",
        "copy (select 1) to '{folder}/out.csv'",
        "select * from read_text('/etc/passwd')",
        "attach '{folder}/out.db'",
    ],
)
def test_duckdb_itself_refuses_what_the_check_might_miss(
    home: Home, tmp_path: Path, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second lock, with the first one open."""
    from tidelog.api import sql_process

    monkeypatch.setattr(sql_process, "check_query", lambda connection, query: None)
    with pytest.raises(InvalidError, match=r"locked|disabled|Cannot"):
        rows(home, query.replace("{folder}", str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_only_allowed_names_exist(home: Home) -> None:
    access = SqlAccess(("ord*",), archives=False)
    assert rows(home, "select count(*) as n from orders", access) == [{"n": 50}]
    for name in ("secrets", "topic.secrets", "daily", "archive.daily"):
        with pytest.raises(InvalidError) as caught:
            rows(home, f"select * from {name}", access)
        assert "not found" in caught.value.message
        assert "did you mean `secrets`" not in caught.value.message
    listed = rows(home, "select table_name from information_schema.tables", access)
    assert {row["table_name"] for row in listed} == {"orders"}
    with pytest.raises(InvalidError, match="topic or archive `secret` not found: check"):
        rows(home, "select * from secret", access)


@pytest.mark.parametrize(
    ("grants", "topics", "archives"),
    [
        ([("read", "*")], ("*",), True),
        ([("read", "o*"), ("append", "*")], ("o*",), False),
        ([("admin", "o*"), ("read", "secrets")], ("o*", "secrets"), False),
        ([("admin", "*")], ("*",), True),
        ([("append", "*"), ("erase", "*")], (), False),
    ],
)
def test_access_follows_the_grants_of_a_token(
    grants: list[tuple[Scope, str]], topics: tuple[str, ...], archives: bool
) -> None:
    token = Token("", "", tuple(Grant(scope, pattern) for scope, pattern in grants), 0)
    assert SqlAccess.of_token(token) == SqlAccess(topics, archives)


def test_a_child_returns_rows_up_to_its_limits(home: Home) -> None:
    query = 'select id, as_text(value) as v from orders where id <> ? order by "offset"'
    found = run_apart(home.config, query, ["0"], EVERYTHING, SqlLimits(seconds=60.0, rows=2))
    assert [each["name"] for each in found.columns] == ["id", "v"]
    assert [json.loads(line) for line in found.lines] == [
        {"id": "1", "v": "orders 1"},
        {"id": "2", "v": "orders 2"},
    ]
    assert not found.is_whole
    limits = SqlLimits(seconds=60.0, result_bytes=10_000)
    found = run_apart(home.config, "select repeat('x', 4000) from orders", None, EVERYTHING, limits)
    assert (len(found.lines), found.is_whole) == (2, False)


@pytest.mark.parametrize(
    "query",
    [
        "select count(*) from range(10000000000) a, range(1000000) b",
        "with recursive t as (select 1 n union all select n + 1 from t) select max(n) from t",
    ],
)
def test_a_child_that_takes_too_long_is_ended(home: Home, query: str) -> None:
    with pytest.raises(InvalidError, match=r"took 0\.5 s by the clock"):
        run_apart(home.config, query, None, EVERYTHING, SqlLimits(seconds=0.5))


def test_a_child_is_ended_by_its_processor_time_and_not_by_the_clock(home: Home) -> None:
    """So that a busy machine does not end a query that needs little."""
    query = "select count(*) from range(10000000000) a, range(1000000) b"
    with pytest.raises(InvalidError, match=r"used 0\.5 s of processor time"):
        run_apart(home.config, query, None, EVERYTHING, SqlLimits(seconds=300.0, cpu_seconds=0.5))


@pytest.mark.parametrize(
    "query", ["select list(range) from range(9000000000)", "select repeat('x', 3000000000)"]
)
def test_a_child_that_needs_too_much_memory_is_refused(home: Home, query: str) -> None:
    """The kernel refuses it: DuckDB does not count the memory of strings."""
    limits = SqlLimits(seconds=60.0, memory_bytes=64 << 20)
    with pytest.raises(InvalidError, match="needs more"):
        run_apart(home.config, query, None, EVERYTHING, limits)


def test_a_child_leaves_no_folder_and_bounds_its_columns(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    few = SqlLimits(seconds=60.0, rows=1)
    assert not run_apart(home.config, "from range(10)", None, EVERYTHING, few).is_whole
    wide = ", ".join(f"1 as {'c' * 50}{number}" for number in range(200))
    small = SqlLimits(seconds=60.0, result_bytes=5_000)
    with pytest.raises(InvalidError, match="names and types of its columns"):
        run_apart(home.config, f"select {wide}", None, EVERYTHING, small)
    assert list(tmp_path.iterdir()) == []


def test_a_home_in_memory_and_long_queries_are_refused() -> None:
    with pytest.raises(InvalidError, match="in the server's memory"):
        run_apart("tidelog:?store=memory:&catalog=memory:", "select 1", None, EVERYTHING, LIMITS)
    with pytest.raises(InvalidError, match="more than 20000 characters"):
        run_apart("", "select " + "1" * 20_000, None, EVERYTHING, LIMITS)
