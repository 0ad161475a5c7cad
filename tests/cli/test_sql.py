"""``tidelog sql``: what it prints in each format, and how it refuses."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.cli_run import Run
from tidelog import Event, Home

TIME_MS = 1_700_000_000_000


@pytest.fixture
def at(home: Home, place: Path) -> tuple[str, str]:
    home.create_topic("orders")
    home.append(
        "orders",
        [
            Event(b'{"amount": 5}', key=b"k", id="o-1", type="new", timestamp=TIME_MS),
            Event(b"\xff", id="o-2", timestamp=TIME_MS + 1),
            Event(None, id="o-3", timestamp=TIME_MS + 2, headers=[("a", b"1")]),
        ],
    )
    return "--home", str(place)


def test_a_table_is_for_people(tidelog: Run, at: tuple[str, str]) -> None:
    query = (
        'select type, count(*) as events, sum("offset") as total from orders group by 1 order by 2'
    )
    done = tidelog(*at, "sql", query)
    lines = [line.split() for line in done.out.decode().splitlines()]
    assert lines == [["type", "events", "total"], ["new", "1", "0"], ["-", "2", "3"], ["2", "rows"]]
    assert (done.code, done.err) == (0, "")


def test_many_rows_are_cut_for_people_only(tidelog: Run, at: tuple[str, str]) -> None:
    query = "select 'x' as t from range(1500)"
    done = tidelog(*at, "sql", query)
    assert done.out.count(b"x \n") + done.out.count(b"x\n") == 1_000
    assert b"these are the first 1,000 rows" in done.out
    assert tidelog(*at, "sql", query, "--format", "csv").out.count(b"\n") == 1_501
    assert len(tidelog(*at, "sql", query, "--json").rows()) == 1_500


def test_json_has_bytes_and_times_as_other_commands(tidelog: Run, at: tuple[str, str]) -> None:
    for option in (["--json"], ["--format", "json"]):
        found = tidelog(*at, "sql", "select * from orders", *option).rows()
        assert found[0]["value"] == '{"amount": 5}'
        assert found[0]["timestamp"] == "2023-11-14T22:13:20.000Z"
        assert found[1]["value"] == {"base64": "/w=="}
        assert found[2]["value"] is None
        assert found[2]["headers"] == [{"name": "a", "value": "1"}]
    done = tidelog(*at, "sql", 'select sum("offset") as total from orders', "--json")
    assert done.rows() == [{"total": 3}]


def test_csv_and_arrow_are_for_programs(tidelog: Run, at: tuple[str, str]) -> None:
    done = tidelog(
        *at, "sql", "select id, type, as_text(value) as v from orders", "--format", "csv"
    )
    rows = list(csv.reader(io.StringIO(done.out.decode())))
    assert rows == [
        ["id", "type", "v"],
        ["o-1", "new", '{"amount": 5}'],
        ["o-2", "", ""],
        ["o-3", "", ""],
    ]
    done = tidelog(*at, "sql", "select id from orders", "--format", "arrow")
    table = pa.ipc.open_stream(done.out).read_all()
    assert table.column("id").to_pylist() == ["o-1", "o-2", "o-3"]


def test_the_query_may_come_from_standard_input(tidelog: Run, at: tuple[str, str]) -> None:
    done = tidelog(*at, "sql", "-", "--json", stdin=b"select count(*) as n from orders")
    assert done.rows() == [{"n": 3}]


def test_errors_are_one_line(tidelog: Run, at: tuple[str, str]) -> None:
    done = tidelog(*at, "sql", "select * from ordrs")
    assert (done.code, done.err.count("\n"), done.out) == (2, 1, b"")
    assert done.err.startswith("error: sql: topic or archive `ordrs` not found")
    done = tidelog(*at, "sql", "select 1", "--json", "--format", "csv")
    assert done.code == 2
    assert "contradict" in done.err
