"""Streaming reads: admission control, "available now", restarts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from tests.spark.conftest import STREAM_SECONDS_MAX
from tidelog import Event, Home
from tidelog.errors import InvalidError, NotFoundError
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.spark.columns import arrow_schema, spark_schema
from tidelog.spark.options import STREAM_READ, read_columns, read_options
from tidelog.spark.source import TidelogStreamReader

START_MS = 1_763_200_000_000


def fill(home: Home, partition: int, *values: int) -> None:
    events = [Event(str(value).encode(), timestamp=START_MS + value) for value in values]
    home.append("orders", events, partition=partition)


@pytest.fixture
def orders(home: Home) -> Home:
    home.create_topic("orders", 2)
    fill(home, 0, *range(20))
    fill(home, 1, *range(100, 105))
    return home


def reader_of(home: Home, **options: str) -> TidelogStreamReader:
    given = {"home": home.config, "topic": "orders", **options}
    wanted = arrow_schema(spark_schema(read_columns(given)))
    return TidelogStreamReader(read_options(given, STREAM_READ), wanted)


def at(offset: dict[str, Any]) -> list[int]:
    return [offset["0"], offset["1"]]


@pytest.mark.spark
def test_available_now_reads_in_portions_and_goes_on_later(
    orders: Home, local_spark: SparkSession, tmp_path: Path
) -> None:
    def run() -> tuple[list[int], list[int]]:
        query = (
            local_spark.readStream.format("tidelog")
            .options(home=orders.config, topic="orders", maxEventsPerTrigger=10)
            .option("columns", "value")
            .load()
            .selectExpr("cast(value as string) as value")
            .writeStream.format("text")
            .option("path", str(tmp_path / "text"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(STREAM_SECONDS_MAX)
        counts = [progress["numInputRows"] for progress in query.recentProgress]
        files = (tmp_path / "text").glob("*.txt")
        values = sorted(int(line) for file in files for line in file.read_text().splitlines())
        return [count for count in counts if count], values

    expected = [*range(20), *range(100, 105)]
    assert run() == ([10, 10, 5], expected)
    fill(orders, 1, 105, 106)
    assert run() == ([2], [*expected, 105, 106])
    offsets = (tmp_path / "checkpoint" / "offsets").glob("[0-9]*")
    newest = max(offsets, key=lambda file: int(file.name))
    last = json.loads(newest.read_text().splitlines()[-1])
    assert last == {"0": 20, "1": 7, "incarnation": orders.topic("orders").incarnation}


@pytest.mark.spark
def test_a_stream_over_trimmed_events_stops(
    orders: Home, local_spark: SparkSession, tmp_path: Path
) -> None:
    def run() -> None:
        query = (
            local_spark.readStream.format("tidelog")
            .options(home=orders.config, topic="orders", maxEventsPerTrigger=5)
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(STREAM_SECONDS_MAX)

    run()
    fill(orders, 0, 20, 21)
    orders.trim("orders", ToOffsets({0: 21}))
    with pytest.raises(StreamingQueryException, match="offset 20 was trimmed, the first is 21"):
        run()


def test_where_a_stream_begins(orders: Home) -> None:
    assert at(reader_of(orders).initialOffset()) == [0, 0]
    assert at(reader_of(orders, startOffsets="latest").initialOffset()) == [20, 5]
    assert at(reader_of(orders, startOffsets='{"0": 7}').initialOffset()) == [7, 0]
    assert at(reader_of(orders, startTime="2025-11-15T09:46:40.015Z").initialOffset()) == [15, 0]
    reader = reader_of(orders, startOffsets="latest")
    begin = reader.initialOffset()
    fill(orders, 0, 20)
    assert reader.initialOffset() == begin, "Spark asks twice"
    with pytest.raises(InvalidError, match="22 was asked for"):
        reader_of(orders, startOffsets='{"0": 22}').initialOffset()


def test_limits(orders: Home) -> None:
    fill(orders, 1, 105)
    reader = reader_of(orders)
    start = reader.initialOffset()
    assert isinstance(reader.getDefaultReadLimit(), ReadAllAvailable)
    assert reader_of(orders, maxEventsPerTrigger="7").getDefaultReadLimit() == ReadMaxRows(7)
    assert reader_of(orders, maxBytesPerTrigger="7").getDefaultReadLimit() == ReadMaxBytes(7)
    assert at(reader.latestOffset(start, ReadAllAvailable())) == [20, 6]
    assert at(reader.latestOffset(start, ReadMaxRows(13))) == [10, 3]
    # By bytes: whole runs, one at least; partition 1 has two.
    reached = reader.latestOffset(start, ReadMaxBytes(1))
    assert at(reached) == [20, 0]
    reached = reader.latestOffset(reached, ReadMaxBytes(1))
    assert at(reached) == [20, 5]
    assert at(reader.latestOffset(start, ReadMaxBytes(1 << 20))) == [20, 6]
    reader.stop()


def test_available_now_ends_where_the_topic_ended(orders: Home) -> None:
    reader = reader_of(orders)
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    fill(orders, 0, 20, 21)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert at(end) == [20, 5]
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    assert at(reader.reportLatestOffset()) == [22, 5]
    batches = [batch for task in reader.partitions(start, end) for batch in reader.read(task)]
    assert sum(batch.num_rows for batch in batches) == 25
    assert reader.partitions(end, end) == []
    reader.stop()


def test_offsets_that_do_not_fit_the_topic_are_refused(orders: Home) -> None:
    reader = reader_of(orders)
    start = reader.initialOffset()
    with pytest.raises(InvalidError, match="has read up to offset 21, but it ends at 20"):
        reader.latestOffset({**start, "0": 21}, ReadAllAvailable())
    orders.trim("orders", ToOffsets({0: 3}))
    end = reader.latestOffset(start, ReadMaxRows(1))
    with pytest.raises(NotFoundError, match="offset 0 was trimmed, the first is 3"):
        reader.partitions(start, end)
    orders.delete_topic("orders")
    orders.create_topic("orders", 2)
    with pytest.raises(InvalidError, match="was deleted and made again"):
        reader.latestOffset(start, ReadAllAvailable())
    reader.stop()
