"""SQL over topics and archives: the same rows as a plain read, and few reads of the store."""

from __future__ import annotations

import gc
import random
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import tidelog
from tidelog import Event, Home, create_home
from tidelog.api.sql_tables import Scans, TopicTable, as_dataset
from tidelog.errors import InvalidError, NotFoundError
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.store.local import LocalStore

TIME_MS = 1_700_000_000_000  # 2023-11-14T22:13:20Z
HOUR_MS = 3_600_000
RUNS, EACH = 8, 9


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A topic of 3 partitions, one run of each for each hour, and archives of it."""
    folder = tmp_path_factory.mktemp("sql") / "home"
    with create_home(folder)[0] as home:
        home.create_topic("orders", partitions=3)
        for run in range(RUNS):
            home.append("orders", [an_event(run, number) for number in range(EACH)])
        home.update("orders", "o-3-1", b'{"amount": 1000}', why="wrong amount")
        home.delete("orders", ["o-4-2", "o-4-3"], why="request 7")
        home.archives.create("daily", source="topic:orders").run()
        home.archives.create(
            "typed", source="topic:orders", schema="amount int, name string", keep_value=False
        ).run()
        for name in ("web-log", "Case", "case"):
            home.create_topic(name)
            home.append(name, [Event(name.encode())])
        home.archives.create("web-log", source="topic:web-log").run()
    return folder


def an_event(run: int, number: int) -> Event:
    return Event(
        b'{"amount": %d, "name": "n"}' % (run * 10 + number),
        key=b"%d" % number,
        id=f"o-{run}-{number}",
        type="odd" if number % 2 else "even",
        timestamp=TIME_MS + run * HOUR_MS + number * 1_000,
        headers=[("a", b"1")],
    )


@pytest.fixture
def home(place: Path) -> Iterator[Home]:
    with tidelog.open(place) as home:
        yield home


def rows(home: Home, query: str, values: Any = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = home.sql(query, values).read_all().to_pylist()
    return found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of objects that are read from local stores, below every cache."""
    seen: list[str] = []
    get = LocalStore.get

    def noted(self: LocalStore, key: str, start: int = 0, end: int | None = None) -> bytes:
        seen.append(key)
        return get(self, key, start, end)

    monkeypatch.setattr(LocalStore, "get", noted)
    return seen


def cold(place: Path, query: str) -> list[dict[str, Any]]:
    """The rows of a query in a home that has nothing in its cache."""
    with tidelog.open(place) as home:
        return rows(home, query)


def of_events(reads: list[str]) -> int:
    """How many reads of segments and of archived files there were since the last call."""
    found = [key for key in reads if key.startswith(("topics/", "archives/"))]
    reads.clear()
    return len(found)


def test_a_topic_and_its_archive_have_the_same_rows_with_amendments_applied(home: Home) -> None:
    query = "select count(*) as n, sum((as_json(value)->>'amount')::int)::int as total from {}"
    wanted = sum(run * 10 + number for run in range(RUNS) for number in range(EACH))
    wanted += 1000 - 31 - 42 - 43
    for name in ("orders", "topic.orders", "daily", "archive.daily"):
        assert rows(home, query.format(name)) == [{"n": RUNS * EACH - 2, "total": wanted}], name
    assert rows(home, "select count(*) as n, sum(amount)::int as total from typed") == [
        {"n": RUNS * EACH - 2, "total": wanted}
    ]
    assert rows(home, "select as_text(value) as v from orders where id = 'o-3-1'") == [
        {"v": '{"amount": 1000}'}
    ]
    assert rows(home, "select id from orders where id in ('o-4-2', 'o-4-3', 'o-4-4')") == [
        {"id": "o-4-4"}
    ]


def test_bytes_that_are_no_text_are_null_wherever_they_are_decoded() -> None:
    with tidelog.open("memory:") as home:
        home.create_topic("t")
        home.append("t", [Event(b"\xff"), Event(b"{"), Event(b'{"a":1}'), Event(None)])
        query = "select as_text(value) as t, as_json(value) as j, as_json(value)->>'a' as a from t"
        found = [tuple(row.values()) for row in rows(home, query)]
    nothing = (None, None, None)
    assert found == [nothing, ("{", None, None), ('{"a":1}', '{"a":1}', "1"), nothing]


def test_topic_named_like_a_view_of_duckdb_hides_no_other_table() -> None:
    names = {"duckdb_tables", "duckdb_views", "duckdb_columns", "pg_class", "orders"}
    with tidelog.open("memory:") as home:
        for name in names:
            home.create_topic(name)
            home.append(name, [Event(b"1")])
            assert rows(home, f"select count(*) as n from {name}") == [{"n": 1}]
        assert {"name": "orders"} in rows(home, "show tables")
        listed = rows(home, "select name from (show all tables) where schema = 'topic'")
        assert {each["name"] for each in listed} == names


def test_columns_are_those_of_events(home: Home) -> None:
    names = ["topic", "partition", "offset", "timestamp", "id", "key", "value", "type", "headers"]
    for name in ("orders", "daily"):
        found = home.sql(f"select * from {name} where id = 'o-0-1'")
        assert found.schema.names == names
        row = found.read_all().to_pylist()[0]
        assert (row["topic"], row["key"], row["type"]) == ("orders", b"1", "odd")
        assert row["timestamp"].timestamp() * 1000 == TIME_MS + 1_000
        assert row["headers"] == [{"name": "a", "value": b"1"}]
    typed = home.sql("select * from typed").read_all().column_names
    assert typed == [name for name in names if name != "value"] + ["amount", "name"]


@pytest.mark.parametrize(
    ("where", "runs"),
    [
        ("true", 3 * RUNS),
        ("timestamp >= '2023-11-15 05:00Z'", 3),
        ("timestamp >= now() - interval 1 hour", 0),
        ("timestamp between '2023-11-15 00:00Z' and '2023-11-15 01:30Z'", 6),
        ("partition = 1", RUNS),
        ("partition = 1 and timestamp < '2023-11-14 23:00Z'", 1),
        ("partition in (0, 2) and timestamp < '2023-11-14 23:00Z'", 2),
        ('partition = 0 and "offset" < 1', 1),
        ("topic = 'other'", 0),
        ("timestamp < '2023-11-14 23:00Z' or timestamp >= '2023-11-15 05:00Z'", 6),
    ],
)
def test_filters_limit_which_runs_are_read(
    place: Path, home: Home, reads: list[str], where: str, runs: int
) -> None:
    query = f"select count(*) as n from {{}} where {where}"
    everything = home.sql("select * from orders").read_all()
    of_events(reads)
    found = cold(place, query.format("orders"))
    assert of_events(reads) == runs
    with duckdb.connect() as peer:
        peer.execute("SET TimeZone = 'UTC'")
        peer.register("everything", everything)
        assert found == peer.sql(query.format("everything")).to_arrow_table().to_pylist()


def test_filters_reach_scans_inside_a_query(place: Path, reads: list[str]) -> None:
    """Also where the condition is outside of the subquery that reads the topic."""
    late = "timestamp >= '2023-11-15 05:00Z'"
    query = f"with all_of as (select * from orders) select count(*) n from all_of where {late}"
    assert cold(place, query) == [{"n": EACH}]
    assert of_events(reads) == 3
    query = f"select count(*) n from orders a join orders b using (id) where a.{late} and b.{late}"
    assert cold(place, query) == [{"n": EACH}]
    assert of_events(reads) == 3, "the cache serves the second scan"


def test_filters_limit_which_files_of_an_archive_are_read(tmp_path: Path, reads: list[str]) -> None:
    place = tmp_path / "home"
    with create_home(place)[0] as home:
        home.create_topic("orders", partitions=2)
        archive = home.archives.create("daily", source="topic:orders")
        for run in range(3):
            home.append("orders", [an_event(run, number) for number in range(EACH)])
            archive.run()
    for where, files in (
        ("timestamp < '2023-11-14 23:00Z'", 2),
        ("partition = 1", 3),
        ('partition = 0 and "offset" = 0', 1),
        ("true", 6),
    ):
        of_events(reads)
        found = cold(place, f"select count(*) n from daily where {where}")
        assert of_events(reads) == files, where
        assert found == cold(place, f"select count(*) n from orders where {where}")


def test_random_filters_give_the_rows_of_a_plain_read(home: Home) -> None:
    chosen = random.Random(7)
    everything = home.sql("select * from orders").read_all()
    assert everything.num_rows == RUNS * EACH - 2
    with duckdb.connect() as peer:
        peer.execute("SET TimeZone = 'UTC'")
        peer.register("everything", everything)
        for _ in range(40):
            where = a_filter(chosen, 3)
            query = f'select partition, "offset" from {{}} where {where} order by all'
            wanted = peer.sql(query.format("everything")).to_arrow_table().to_pylist()
            for name in ("orders", "daily"):
                assert rows(home, query.format(name)) == wanted, (name, where)


def a_filter(chosen: random.Random, depth: int) -> str:
    if depth and chosen.random() < 0.6:
        kind = chosen.choice(["and", "and", "or", "not"])
        if kind == "not":
            return f"not ({a_filter(chosen, depth - 1)})"
        return f"({a_filter(chosen, depth - 1)} {kind} {a_filter(chosen, depth - 1)})"
    compare = chosen.choice(["=", "<>", "<", "<=", ">", ">="])
    run, number = chosen.randrange(RUNS), chosen.randrange(EACH)
    moment = f"to_timestamp({(TIME_MS + run * HOUR_MS) // 1000 + number})"
    return chosen.choice(
        [
            f"partition {compare} {number % 4}",
            f'"offset" {compare} {run * 3 + chosen.randrange(3)}',
            f"timestamp {compare} {moment}",
            f"timestamp {compare} {moment} - interval 30 minutes",
            f"id {compare} 'o-{run}-{number}'",
            f"key {compare} '{number}'::blob",
            f"type {compare} 'odd'",
            f'"offset" in ({run}, {number}, 1000)',
            f"partition in ({number % 3}, 7)",
            "type is null",
            f'"offset" + partition {compare} {number}',
            f"decode(value)->>'amount' {compare} '{run}{number}'",
            f"(timestamp {compare} {moment}) is not true",
        ]
    )


def test_compiled_journals_are_read_by_row_group(tmp_path: Path) -> None:
    """What is compiled meanwhile changes nothing; and of a journal only the groups in question."""
    with create_home(tmp_path / "home")[0] as home:
        topic = home.create_topic("orders")
        for run in range(4):
            home.append("orders", [an_event(run, number) for number in range(EACH)])
        table = TopicTable(home.context, topic)
        first = next(table.batches(table.schema, None))
        home.update("orders", "o-2-1", b"new", why="later")
        home.compile("orders")
        for each in list(home.store.list("topics/")):
            if "/segments/" in each.key:
                home.store.delete([each.key])
        found = pa.Table.from_batches(list(table.batches(table.schema, None)))
        assert found.num_rows == 4 * EACH, "the runs it listed are gone: it reads the journal"
        assert found.slice(0, first.num_rows).to_pylist() == first.to_pylist()
        late = "select id from orders where timestamp >= '2023-11-15 01:00Z'"
        assert [row["id"] for row in rows(home, late)] == [f"o-3-{n}" for n in range(EACH)]
        home.trim("orders", ToOffsets({0: 10}))
        again = pa.Table.from_batches(list(table.batches(table.schema, None)))
        assert again.column("offset").to_pylist() == list(range(10, 4 * EACH))


def test_what_a_query_reads_is_fixed_when_it_begins(tmp_path: Path) -> None:
    with create_home(tmp_path / "home")[0] as home:
        home.create_topic("orders")
        home.append("orders", [an_event(0, number) for number in range(EACH)])
        table = TopicTable(home.context, home.topic("orders"))
        assert sum(each.num_rows for each in table.batches(table.schema, None)) == EACH
        home.append("orders", [an_event(1, number) for number in range(EACH)])
        assert sum(each.num_rows for each in table.batches(table.schema, None)) == EACH
        assert rows(home, "select count(*) as n from orders") == [{"n": 2 * EACH}]


def test_a_reader_that_stops_early_ends_the_query(home: Home) -> None:
    found = home.sql("select * from range(100000000000) t(n), orders")
    assert found.read_next_batch().num_rows
    found.close()
    assert rows(home, "select 1 as one") == [{"one": 1}]


def test_a_reader_that_is_dropped_unread_leaves_nothing(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    home.sql("select * from orders")
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert rows(home, "select count(*) as n from orders") == [{"n": RUNS * EACH - 2}]
    assert list(tmp_path.iterdir()) == []


def test_a_scan_of_no_columns_has_all_rows(home: Home) -> None:
    """Versions of DuckDB differ in what they ask for to count rows."""
    table = as_dataset(TopicTable(home.context, home.topic("orders")), Scans())
    found = table.scanner(columns=[]).to_reader()
    assert sum(batch.num_rows for batch in found) == RUNS * EACH - 2


def test_values_are_parameters(home: Home) -> None:
    assert rows(home, "select id from orders where id = ?", ["o-0-1"]) == [{"id": "o-0-1"}]
    assert rows(home, "select id from orders where id = $id", {"id": "o-0-1"}) == [{"id": "o-0-1"}]
    assert rows(home, "select id, id from orders where id = 'o-0-1'") == [
        {"id": "o-0-1", "id_1": "o-0-1"}
    ]


def test_a_name_of_a_topic_and_an_archive_needs_its_kind(home: Home) -> None:
    with pytest.raises(InvalidError, match=r'is a topic and an archive: write topic\."web-log"'):
        rows(home, 'select * from "web-log"')
    for kind in ("topic", "archive"):
        assert rows(home, f'select value from {kind}."web-log"') == [{"value": b"web-log"}]


def test_names_that_differ_in_case_are_read_as_they_are_spelled(home: Home) -> None:
    assert rows(home, 'select value from "Case"') == [{"value": b"Case"}]
    assert rows(home, 'select value from "case"') == [{"value": b"case"}]
    assert rows(home, 'select value from "ORDERS" where id is null') == []
    with pytest.raises(InvalidError, match="`Case` and `case` differ only in case"):
        rows(home, 'select * from "Case" a, "case" b')


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("", "found 0 statements: give one"),
        ("select 1; select 2", "found 2 statements: give one"),
        ("selec 1", 'syntax error at or near "selec"'),
        ("select * from ordrs", r"topic or archive `ordrs` not found \(did you mean `orders`\?\)"),
        ("select * from orders where offset < 3", 'write the column as "offset", in double'),
        ("select offset, id from orders", 'write the column as "offset", in double quotes'),
        ("select * from web-log", 'write "web-log", in double quotes'),
        ("select value.amount from orders", r"write as_json\(value\)->>'amount'"),
        ("select nosuch from orders", 'column "nosuch" not found'),
        ("select 'x'::int", "Could not convert string 'x' to INT32"),
        ("select value->>'amount' from orders", r"`value` is bytes, not JSON: write as_json"),
        ("select json_extract(o.value, '$.a') from orders o", "`value` is bytes"),
        ("select error('boom') from orders", "boom"),
        ("insert into orders values (1)", "INSERT would change nothing, as topics and archives"),
        ("update orders set value = null", "read-only here: append with `tidelog produce`"),
        ("delete from orders", "change events with `tidelog update` and `tidelog delete`"),
        ("drop view orders", "DROP would change nothing"),
        ("create table kept as select 1", "CREATE would change nothing"),
        ("create macro f(x) as x", "CREATE would change nothing"),
        ("select md5_number('x') as m", "column `m` is UHUGEINT"),  # as -1 without it
    ],
)
def test_refused_queries_say_why_in_one_line(home: Home, query: str, says: str) -> None:
    with pytest.raises(InvalidError, match=says) as caught:
        rows(home, query)
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith("sql: ")


def test_name_that_is_a_word_of_sql_is_quoted_by_the_error() -> None:
    with tidelog.open("memory:") as home:
        home.create_topic("order")
        home.append("order", [Event(b"1")])
        for query in ("select * from order", "select * from order limit 3"):
            with pytest.raises(InvalidError, match=r'is a word of SQL: .* write "order"'):
                rows(home, query)
        assert len(rows(home, 'select * from "order"')) == 1
        with pytest.raises(InvalidError) as caught:
            rows(home, "select * from group")
        assert "word of SQL" not in caught.value.message, "no topic has this name"


def test_a_failure_of_a_read_is_raised_as_it_is(tmp_path: Path) -> None:
    with create_home(tmp_path / "home")[0] as home:
        home.create_topic("orders")
        home.append("orders", [an_event(0, 1)])
        for each in list(home.store.list("topics/")):
            home.store.delete([each.key])
    with tidelog.open(tmp_path / "home") as home, pytest.raises(tidelog.CorruptError, match="gone"):
        rows(home, "select * from orders")


def test_tables_can_be_listed_and_described(home: Home) -> None:
    names = {row["name"] for row in rows(home, "show tables")}
    assert {"orders", "daily", "typed"} <= names
    described = {row["column_name"]: row["column_type"] for row in rows(home, "describe typed")}
    assert described["timestamp"] == "TIMESTAMP WITH TIME ZONE"
    assert described["amount"] == "INTEGER"


def test_python_variables_are_not_tables(home: Home) -> None:
    secret = pa.table({"a": [1]})
    assert secret.num_rows == 1
    with pytest.raises(InvalidError, match="topic or archive `secret` not found"):
        rows(home, "select * from secret")


def test_a_closed_home_refuses_queries(place: Path) -> None:
    home = tidelog.open(place)
    home.close()
    with pytest.raises(InvalidError, match="is closed"):
        home.sql("select 1")


def test_a_deleted_topic_is_not_there(tmp_path: Path) -> None:
    with create_home(tmp_path / "home")[0] as home:
        home.create_topic("orders")
        home.delete_topic("orders")
        with pytest.raises(InvalidError, match="topic or archive `orders` not found"):
            rows(home, "select * from orders")
        with pytest.raises(NotFoundError):
            home.topic("orders")


@pytest.mark.parametrize("when", ["setup", "query"])
def test_an_interrupt_in_duckdb_is_raised_as_it_is(
    home: Home, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DuckDB itself notices Ctrl-C late, and raises a RuntimeError instead."""
    endless = "select max(range) from range(1000000000000)"
    if when == "setup":
        monkeypatch.setattr("tidelog.api.sql._SETUP", endless)
    query = "select 1" if when == "setup" else endless
    timer = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            home.sql(query).read_all()
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_in_a_scan_is_raised_as_it_is(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TopicTable, "batches", interrupted)
    with pytest.raises(KeyboardInterrupt):
        home.sql("select count(*) from orders").read_all()


def test_message_that_duckdb_cuts_inside_a_character_is_an_error_of_ours() -> None:
    with tidelog.open("memory:") as home:
        home.create_topic("t")
        for signs in range(2):  # moves where the message cuts the value
            text = '{"a": "' + "x" * signs + "é" * 200 + '"} ' + " " * 70_000 + "v"
            home.append("t", [Event(text.encode(), id=f"{signs}")])
        for signs in range(2):
            with pytest.raises(InvalidError, match=r"sql: .*(JSON|UTF-8)"):
                rows(home, f"select decode(value)::json as j from t where id = '{signs}'")
