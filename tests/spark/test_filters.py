"""Filters that Spark pushes down: what they mean, what is read for them, and what Spark shows."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import datasource as ds

from tests.spark.conftest import Read
from tests.support.compiled_logs import Bench
from tidelog import Event, Home
from tidelog.clock import RandomIds
from tidelog.spark import FILTER_PUSHDOWN, TidelogFilterReader
from tidelog.spark.columns import arrow_schema, spark_schema
from tidelog.spark.filters import EVERYTHING, EventTimes, PushedFilter, push
from tidelog.spark.options import BATCH_READ, read_columns, read_options

START = datetime(2025, 11, 15, tzinfo=UTC)
DAYS, EACH = 6, 4
DAY = timedelta(days=1)


def ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


@pytest.fixture
def orders(home: Home) -> Home:
    """Two partitions with a run for each day; ids and keys repeat over partitions."""
    home.create_topic("orders", 2)
    for partition in range(2):
        for day in range(DAYS):
            at = ms(START + day * DAY)
            events = [
                Event(f"{partition}-{day}-{n}".encode(), b"k%d" % n, f"id-{day}-{n}", at + n)
                for n in range(EACH)
            ]
            home.append("orders", events, partition=partition)
    return home


def reader_of(home: Home, *filters: ds.Filter) -> tuple[TidelogFilterReader, list[ds.Filter]]:
    given = {"home": home.config, "topic": "orders", "columns": "partition,offset"}
    wanted = arrow_schema(spark_schema(read_columns(given)))
    reader = TidelogFilterReader(read_options(given, BATCH_READ), wanted, RandomIds().new())
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_LOCAL_DIRS", folder)  # as Spark does for its Python workers
        return reader, reader.pushFilters(list(filters))


def read_with(home: Home, *filters: ds.Filter) -> tuple[list[tuple[int, int]], int]:
    """The rows that tasks return for filters, and from how many runs."""
    reader, _ = reader_of(home, *filters)
    tasks = reader.partitions()
    rows = [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]
    runs = {(s.partition, s.run.base) for task in tasks for s in task.slices}  # type: ignore[attr-defined]
    return [(row["partition"], row["offset"]) for row in rows], len(runs)


TIME, OFFSET = ("timestamp",), ("offset",)
HALF = START + timedelta(microseconds=500)  # between two milliseconds


@pytest.mark.parametrize(
    ("given", "pushed"),
    [
        (ds.GreaterThan(TIME, START), EventTimes(ms(START) + 1, None)),
        (ds.GreaterThan(TIME, HALF), EventTimes(ms(START) + 1, None)),
        (ds.GreaterThanOrEqual(TIME, START), EventTimes(ms(START), None)),
        (ds.GreaterThanOrEqual(TIME, HALF), EventTimes(ms(START) + 1, None)),
        (ds.LessThan(TIME, START), EventTimes(None, ms(START))),
        (ds.LessThan(TIME, HALF), EventTimes(None, ms(START) + 1)),
        (ds.LessThanOrEqual(TIME, START), EventTimes(None, ms(START) + 1)),
        (ds.LessThanOrEqual(TIME, HALF), EventTimes(None, ms(START) + 1)),
        (ds.EqualTo(TIME, START), EventTimes(ms(START), ms(START) + 1)),
        (ds.EqualTo(TIME, HALF), EventTimes(ms(START) + 1, ms(START) + 1)),
    ],
)
def test_times_are_compared_to_the_microsecond(given: ds.Filter, pushed: EventTimes) -> None:
    assert push([given]) == (PushedFilter(times=pushed), [])


@pytest.mark.parametrize(
    ("given", "pushed"),
    [
        (ds.LessThanOrEqual(OFFSET, 7), PushedFilter(end=8)),
        (ds.EqualTo(OFFSET, 7), PushedFilter(start=7, end=8)),
        (ds.EqualNullSafe(("topic",), "a"), PushedFilter(topics=frozenset(["a"]))),
        (ds.In(("partition",), (1, None)), PushedFilter(partitions=frozenset([1]))),
        (ds.EqualTo(("key",), b"k"), PushedFilter(keys=frozenset([b"k"]))),
        (ds.In(("id",), ("a", "b")), PushedFilter(ids=frozenset("ab"))),
        (ds.IsNotNull(TIME), EVERYTHING),
        (ds.In(OFFSET, (5,)), PushedFilter(start=5, end=6)),
    ],
)
def test_filters_that_spark_need_not_check_again(given: ds.Filter, pushed: PushedFilter) -> None:
    assert push([given]) == (pushed, [])


@pytest.mark.parametrize(
    ("given", "pushed"),
    [
        (ds.In(OFFSET, (5, 9)), PushedFilter(start=5, end=10)),
        (ds.Not(ds.EqualTo(OFFSET, 5)), EVERYTHING),
        (ds.IsNotNull(("key",)), EVERYTHING),
        (ds.IsNull(("id",)), EVERYTHING),
        (ds.EqualTo(("key",), None), EVERYTHING),
        (ds.EqualNullSafe(("id",), None), EVERYTHING),
        (ds.GreaterThan(("partition",), 0), EVERYTHING),
        (ds.StringStartsWith(("id",), "a"), EVERYTHING),
        (ds.EqualTo(("type",), "a"), EVERYTHING),
        (ds.EqualTo(("headers", "name"), "a"), EVERYTHING),
        (ds.In(("id",), tuple(map(str, range(20_000)))), EVERYTHING),
    ],
)
def test_filters_that_spark_checks(given: ds.Filter, pushed: PushedFilter) -> None:
    assert push([given]) == (pushed, [given])


def test_filters_narrow_each_other() -> None:
    found, _ = push(
        [
            *(ds.GreaterThan(OFFSET, 3), ds.GreaterThan(OFFSET, 5), ds.LessThan(OFFSET, 9)),
            *(ds.In(("key",), (b"a", b"b")), ds.EqualTo(("key",), b"b")),
        ]
    )
    assert found == PushedFilter(start=6, end=9, keys=frozenset([b"b"]))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_time_reads_only_its_runs(orders: Home, compiled: bool) -> None:
    if compiled:
        for partition in range(2):
            Bench(orders.context, orders.topic("orders"), partition).compile(0, 2 * EACH)
    day = [
        ds.GreaterThanOrEqual(TIME, START + 3 * DAY),
        ds.LessThan(TIME, START + 3 * DAY + timedelta(milliseconds=2)),
    ]
    assert read_with(orders, *day) == ([(0, 12), (0, 13), (1, 12), (1, 13)], 2)
    assert read_with(orders, ds.EqualTo(TIME, HALF)) == ([], 0)
    assert read_with(orders, ds.LessThan(TIME, START + timedelta(milliseconds=1))) == (
        [(0, 0), (1, 0)],
        2,
    )


def test_partitions_offsets_topics_ids_and_keys_choose_what_is_read(orders: Home) -> None:
    assert read_with(orders, ds.EqualTo(("partition",), 1), ds.LessThan(OFFSET, 2)) == (
        [(1, 0), (1, 1)],
        1,
    )
    assert read_with(orders, ds.EqualTo(("topic",), "others")) == ([], 0)
    assert read_with(orders, ds.EqualTo(("id",), "id-4-1")) == ([(0, 17), (1, 17)], 2)
    assert read_with(orders, ds.In(("id",), ("id-4-1", "id-4-3", "none"))) == (
        [(0, 17), (0, 19), (1, 17), (1, 19)],
        2,
    )
    assert read_with(orders, ds.EqualTo(("id",), "")) == ([], 0)
    assert read_with(orders, ds.EqualTo(("id",), "id-4-1"), ds.EqualTo(("key",), b"k2")) == ([], 2)
    rows, runs = read_with(orders, ds.EqualTo(("key",), b"k3"), ds.LessThan(OFFSET, 8))
    assert (rows, runs) == ([(0, 3), (0, 7), (1, 3), (1, 7)], 4)


def test_ids_and_keys_follow_updates_and_deletes(orders: Home) -> None:
    reader, _ = reader_of(orders, ds.EqualTo(("id",), "id-4-1"))
    tasks = reader.partitions()
    orders.update("orders", "id-4-1", b"new")
    orders.delete("orders", ["id-4-3"])
    found = [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]
    assert len(found) == 2, "a plan from before follows"
    assert read_with(orders, ds.EqualTo(("id",), "id-4-1"))[0] == [(0, 17), (1, 17)]
    assert read_with(orders, ds.EqualTo(("id",), "id-4-3"))[0] == []
    orders.delete("orders", ["id-4-1"])
    assert not [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]


def plan_of(table: DataFrame, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    table.explain("formatted")
    return capsys.readouterr().out


@pytest.mark.spark
def test_explain_shows_the_filters_and_rows_are_the_same_without(
    orders: Home, read: Read, local_spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    day = "timestamp >= '2025-11-18T00:00:00Z' AND timestamp < '2025-11-19T00:00:00Z'"
    where = f"{day} AND partition = 1 AND key IN (X'6b31', X'6b32') AND value IS NOT NULL"
    chosen = read("orders", bytesPerTask=1, pushFilters=True).where(where).select("offset")
    shown = plan_of(chosen, capsys)
    assert "Condition : isnotnull(value" in shown, "the only one that Spark checks"
    assert "PushedFilters" in shown, shown
    assert chosen.rdd.getNumPartitions() == 1, "one run, of 12"
    found = sorted(row.offset for row in chosen.collect())
    assert found == [13, 14]
    ids = read("orders", pushFilters=True).where("id IN ('id-3-1', 'id-3-2') AND topic = 'orders'")
    assert sorted(row.offset for row in ids.collect()) == [13, 13, 14, 14]
    local_spark.conf.set(FILTER_PUSHDOWN, "false")
    try:
        without = read("orders", bytesPerTask=1, pushFilters=True).where(where).select("offset")
        assert sorted(row.offset for row in without.collect()) == found
        assert without.rdd.getNumPartitions() > 6
    finally:
        local_spark.conf.set(FILTER_PUSHDOWN, "true")


@pytest.mark.spark
@pytest.mark.usefixtures("orders")
def test_queries_of_one_table_do_not_share_filters(read: Read) -> None:
    table = read("orders")
    assert table.where("offset = 3").count() == 2
    assert table.count() == 2 * DAYS * EACH, "Spark 4.2 keeps one plan with a table"
    both = table.where("offset = 1").union(table.where("offset = 2"))
    assert sorted(row.offset for row in both.collect()) == [1, 1, 2, 2]
    pushed = read("orders", pushFilters=True)
    assert pushed.where("offset = 1").count() == 2
    assert pushed.where("offset = 1").count() == 2, "the same filters again"
    with pytest.raises(PySparkException, match="already used with other filters"):
        pushed.where("offset = 2").count()
