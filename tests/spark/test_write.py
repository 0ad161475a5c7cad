"""Batch writes with real Spark: what arrives where, once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.spark.conftest import Read, Save
from tidelog import Event, Home
from tidelog.errors import InvalidError
from tidelog.model import layout
from tidelog.model.topic import Topic
from tidelog.spark.columns import to_stored
from tidelog.spark.write import WriteStaging, stage

MOMENT_MS = 1_763_200_000_000
MOMENT = datetime.fromtimestamp(MOMENT_MS / 1000, UTC)


def events_of(home: Home, topic: str) -> list[Event]:
    partitions = range(home.topic(topic).partitions)
    return [event for partition in partitions for event in home.read(topic, partition)]


def staged(home: Home) -> list[str]:
    return [info.key for info in home.store.list("topics/") if "/sinks/" in info.key]


@pytest.mark.spark
def test_rows_arrive_as_they_were(
    local_spark: SparkSession, home: Home, save: Save, read: Read
) -> None:
    home.create_topic("orders", 4)
    schema = (
        "value binary, key binary, id string, type string, timestamp timestamp, "
        "headers array<struct<name:string,value:binary>>"
    )
    rows = [
        (b"1", b"customer-7", "id-1", "paid", MOMENT.replace(microsecond=1_999), [("a", b"b")]),
        (None, b"customer-7", None, None, MOMENT, []),
        (b"3", b"customer-8", "id-3", None, MOMENT, None),
        (b"4", None, None, None, None, None),
    ]
    save(local_spark.createDataFrame(rows, schema).coalesce(1), "orders")
    by_id = {event.value: event for event in events_of(home, "orders")}
    assert len(by_id) == 4
    first, second, third, last = (by_id[value] for value in (b"1", None, b"3", b"4"))
    assert first.timestamp == MOMENT_MS + 1, "microseconds are cut off"
    assert (first.id, first.type, first.headers) == ("id-1", "paid", (("a", b"b"),))
    assert (second.id, second.type, second.headers) == (None, None, ())
    for event in (first, second, third):
        assert event.key is not None
        assert event.partition == home.partition_for("orders", event.key)
    assert (first.offset, second.offset) == (0, 1), "rows of a key keep their order"
    assert isinstance(last.timestamp, int)
    assert last.timestamp > MOMENT_MS, "an event without a time has that of the write"
    assert staged(home) == []
    assert home.verify("orders").errors == 0

    home.create_topic("copy", 3)
    save(read("orders"), "copy", usePartition="false")
    assert sorted(e.value or b"" for e in events_of(home, "copy")) == [b"", b"1", b"3", b"4"]


@pytest.mark.spark
def test_a_task_that_fails_at_first_stores_its_rows_once(
    local_spark: SparkSession, home: Home, save: Save
) -> None:
    home.create_topic("orders", 2)

    def fails_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        task = TaskContext.get()
        yield from batches
        if task is not None and task.attemptNumber() == 0:
            raise RuntimeError("the first attempt fails")

    table = local_spark.range(0, 2_000, 1, 3).selectExpr("cast(id as string) as value")
    save(table.mapInArrow(fails_once, "value string"), "orders")
    values = sorted(int(event.value or b"-1") for event in events_of(home, "orders"))
    assert values == list(range(2_000))
    assert staged(home) == []


@pytest.mark.spark
def test_a_failed_write_stores_nothing(local_spark: SparkSession, home: Home, save: Save) -> None:
    home.create_topic("orders", 2)
    table = local_spark.range(0, 100, 1, 2).selectExpr(
        "cast(id as string) as value", "if(id = 99, '', 'x') as id"
    )
    with pytest.raises(PySparkException, match="an id is empty"):
        save(table, "orders")
    assert events_of(home, "orders") == []
    assert staged(home) == []


@pytest.mark.spark
def test_a_named_batch_is_stored_once(local_spark: SparkSession, home: Home, save: Save) -> None:
    home.create_topic("orders", 2)
    table = local_spark.range(0, 10, 1, 2).selectExpr("cast(id as string) as value")
    for batch in (1, 1, 2):
        save(table, "orders", sink="daily", batch=batch)
    assert len(events_of(home, "orders")) == 20
    save(table, "orders")
    save(table, "orders")
    assert len(events_of(home, "orders")) == 40, "without a name every write counts"
    assert staged(home) == []


@pytest.mark.spark
def test_writes_are_refused_before_any_task(
    local_spark: SparkSession, home: Home, save: Save
) -> None:
    home.create_topic("orders")
    table = local_spark.range(1).selectExpr("cast(id as string) as value", "id as count")
    with pytest.raises(PySparkException, match="unknown column `count`"):
        save(table, "orders")
    writer = table.select("value").write.format("tidelog")
    with pytest.raises(PySparkException, match="a log is not overwritten"):
        writer.options(home=home.config, topic="orders").mode("overwrite").save()


# The executors' part, without Spark.


def stage_rows(home: Home, rows: pa.RecordBatch, **options: Any) -> list[tuple[int, int]]:
    """Stage rows as task 1; the partitions of the pieces and their counts."""
    topic = home.topic("orders")
    use_partition = bool(options.pop("use_partition", False))
    staging = WriteStaging(home.settings, topic, "s", use_partition)
    segments, _ = stage(staging, 7, 1, [rows])
    assert all(layout.sink_batch(segment.key)[1] == 7 for segment in segments)
    return [(piece.partition, piece.count) for segment in segments for piece in segment.pieces]


@pytest.fixture
def orders(home: Home) -> Topic:
    home.create_topic("orders", 3)
    return home.topic("orders")


@pytest.mark.usefixtures("orders")
def test_rows_without_a_key_take_turns(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pa.record_batch({"value": pa.array([b"x"] * 10)})
    assert stage_rows(home, rows) == [(0, 10)]
    monkeypatch.setattr("tidelog.log.producer.staged.SEGMENT_EVENTS_MAX", 4)
    assert stage_rows(home, rows) == [(0, 4), (1, 4), (2, 2)]


@pytest.mark.usefixtures("orders")
def test_partitions_may_be_given(home: Home) -> None:
    def rows(*partitions: int | None) -> pa.RecordBatch:
        values = pa.array([b"x"] * len(partitions))
        return pa.record_batch({"value": values, "partition": pa.array(partitions, pa.int32())})

    assert stage_rows(home, rows(2, 0, 2), use_partition=True) == [(0, 1), (2, 2)]
    with pytest.raises(InvalidError, match="has 0 to 3, topic `orders` has 0 to 2"):
        stage_rows(home, rows(0, 3), use_partition=True)
    with pytest.raises(InvalidError, match="has null"):
        stage_rows(home, rows(0, None), use_partition=True)


@pytest.mark.usefixtures("orders")
def test_an_event_that_is_too_large_is_refused(home: Home) -> None:
    with pytest.raises(InvalidError, match="at most 1048576 are allowed"):
        stage_rows(home, pa.record_batch({"value": pa.array([b"x" * (1 << 21)])}))


def test_headers_are_whole() -> None:
    kind = pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))
    headers = pa.array([[{"name": None, "value": b"x"}]], kind)
    with pytest.raises(InvalidError, match="a header has no name"):
        to_stored(pa.record_batch({"value": pa.array([b"x"]), "headers": headers}), 0)
    null = pa.array([[{"name": "h", "value": None}, {"name": "h", "value": b""}]], kind)
    kept = to_stored(pa.record_batch({"value": pa.array([b"x"]), "headers": null}), 0)
    assert kept.column("headers").to_pylist() == null.to_pylist()


def test_half_a_millisecond_before_1970_is_refused_not_rounded_up() -> None:
    times = pa.array([-500], pa.timestamp("us", "UTC"))
    with pytest.raises(InvalidError, match="outside of the years 1970 to 9999"):
        to_stored(pa.record_batch({"value": pa.array([b"x"]), "timestamp": times}), 0)


def test_both_hours_at_the_end_of_summer_time_are_stored() -> None:
    first = 1_730_611_800_000_500  # 2024-11-03 01:30 in New York, and an hour later again
    times = pa.array([first, first + 3_600_000_000], pa.timestamp("us", "America/New_York"))
    found = to_stored(pa.record_batch({"value": pa.array([b"x", b"y"]), "timestamp": times}), 0)
    moments = found.column("timestamp").cast(pa.int64()).to_pylist()
    assert moments == [first // 1_000, first // 1_000 + 3_600_000]


def test_microseconds_are_rounded_towards_the_past() -> None:
    times = pa.array([1_999, None], pa.timestamp("us", "UTC"))
    found = to_stored(pa.record_batch({"value": pa.array([b"x", b"y"]), "timestamp": times}), 7)
    assert found.column("timestamp").cast(pa.int64()).to_pylist() == [1, 7]
