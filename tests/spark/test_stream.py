"""Streaming reads: admission control, "available now", restarts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from tests.spark.conftest import STREAM_SECONDS_MAX
from tidelog import Event, Home
from tidelog.catalog.sqlite import SqliteCatalog
from tidelog.clock import SystemClock
from tidelog.errors import InvalidError, NotFoundError
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.spark.columns import arrow_schema, spark_schema
from tidelog.spark.options import STREAM_READ, read_columns, read_options
from tidelog.spark.stream import TidelogStreamReader

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
    return [offset["orders"]["0"], offset["orders"]["1"]]


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
    incarnation = orders.topic("orders").incarnation
    assert last == {"orders": {"0": 20, "1": 7, "incarnation": incarnation}}


@pytest.mark.spark
def test_a_stream_over_trimmed_events_stops_unless_it_may_lose_them(
    orders: Home, local_spark: SparkSession, tmp_path: Path
) -> None:
    def run(**options: Any) -> StreamingQuery:
        query = (
            local_spark.readStream.format("tidelog")
            .options(home=orders.config, topic="orders", maxEventsPerTrigger=20, **options)
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(STREAM_SECONDS_MAX)
        return query

    first = run().recentProgress[0]["sources"][0]["latestOffset"]
    assert '"orders"' in str(first).replace("'", '"'), "the progress names the topic"
    assert "lagEvents" in str(first)
    fill(orders, 0, 20, 21)
    orders.trim("orders", ToOffsets({0: 21}))
    with pytest.raises(StreamingQueryException, match="offset 20 was trimmed, the first is 21"):
        run()
    query = run(failOnDataLoss=False)
    assert sum(progress["numInputRows"] for progress in query.recentProgress) == 1
    files = (tmp_path / "checkpoint" / "offsets").glob("[0-9]*")
    newest = max(files, key=lambda file: int(file.name))
    assert json.loads(newest.read_text().splitlines()[-1])["orders"]["gaps"] == [[0, 20, 21]]


def rows_of(reader: TidelogStreamReader, start: Any, end: Any) -> list[tuple[str, int, int]]:
    batches = [batch for task in reader.partitions(start, end) for batch in reader.read(task)]
    rows = [row for batch in batches for row in batch.to_pylist()]
    return [(row["topic"], row["partition"], row["offset"]) for row in rows]


def test_gaps_are_recorded_once_wherever_they_are_found(orders: Home) -> None:
    reader = reader_of(orders, failOnDataLoss="false")
    start = reader.initialOffset()
    orders.trim("orders", ToOffsets({0: 3}))
    end = reader.latestOffset(start, ReadAllAvailable())
    assert end["orders"]["gaps"] == [[0, 0, 3]]
    assert len(rows_of(reader, start, end)) == 22
    orders.trim("orders", ToOffsets({0: 5}))
    assert len(rows_of(reader, start, end)) == 20, "planned again, after a restart of the query"
    fill(orders, 1, 106)
    orders.trim("orders", ToOffsets({0: 20}))
    after = reader.latestOffset(end, ReadAllAvailable())
    assert after["orders"]["gaps"] == [[0, 0, 3], [0, 0, 5]], "what the plan had found"
    assert rows_of(reader, end, after) == [("orders", 1, 5)]
    assert reader.latestOffset(after, ReadAllAvailable()) == after
    reader.stop()


def test_an_idle_stream_looks_once_a_second(orders: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of(orders)
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    now = [100.0]
    monkeypatch.setattr(SystemClock, "monotonic_s", lambda _: now[0])
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    reads: list[str] = []
    get = SqliteCatalog.get

    def counted(self: SqliteCatalog, partition: str, row: str) -> Any:
        reads.append(row)
        return get(self, partition, row)

    monkeypatch.setattr(SqliteCatalog, "get", counted)
    for _ in range(1000):
        assert reader.latestOffset(end, ReadAllAvailable()) == end
        reader.reportLatestOffset()
        now[0] += 0.01
    looks = len([row for row in reads if row.startswith("topic/")])
    assert 9 <= looks <= 11, "ten seconds"
    assert len(reads) == looks * (1 + 2), "the topic, and the heads of two partitions"
    fill(orders, 0, 20)
    now[0] += 1.1
    assert at(reader.latestOffset(end, ReadAllAvailable())) == [21, 5]
    reader.stop()


def test_streams_of_several_topics_and_of_a_pattern(
    orders: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.spark.stream._LOOK_S", 0.0)
    orders.create_topic("clicks", 1)
    orders.append("clicks", [Event(b"c", timestamp=START_MS)])
    both = reader_of(orders, topic="orders,clicks", startOffsets='{"orders": {"0": 18}}')
    start = both.initialOffset()
    assert list(start) == ["clicks", "orders"]
    assert (start["clicks"]["0"], *at(start)) == (0, 18, 0)
    limited = both.latestOffset(start, ReadMaxRows(4))
    assert len(rows_of(both, start, limited)) == 4
    assert both.reportLatestOffset()["orders"]["lagEvents"] == 3
    assert both.reportLatestOffset()["orders"]["lagSeconds"] > 0
    end = both.latestOffset(limited, ReadMaxBytes(1 << 20))
    assert sorted(rows_of(both, start, end))[:2] == [("clicks", 0, 0), ("orders", 0, 18)]
    assert both.reportLatestOffset()["orders"]["lagEvents"] == 0
    both.stop()
    pattern = reader_of(orders, topic="or*")
    start = pattern.initialOffset()
    assert list(start) == ["orders"]
    orders.create_topic("ore", 1)
    orders.append("ore", [Event(b"o", timestamp=START_MS)])
    end = pattern.latestOffset(start, ReadAllAvailable())
    assert ("ore", 0, 0) in rows_of(pattern, start, end), "a topic that appears later"
    orders.delete_topic("ore")
    with pytest.raises(NotFoundError, match="topic `ore`: was deleted, and the stream may not"):
        pattern.latestOffset(end, ReadAllAvailable())
    pattern.stop()
    with pytest.raises(NotFoundError, match=r"no topic matches `x\*`"):
        reader_of(orders, topic="x*").initialOffset()
    with pytest.raises(InvalidError, match="topic `clicks`: offsets are given for it"):
        reader_of(orders, startOffsets='{"clicks": {"0": 1}}').initialOffset()


def test_end_time_leaves_out_later_events(orders: Home) -> None:
    reader = reader_of(orders, endTime="2025-11-15T09:46:40.003Z")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    assert at(end) == [20, 5], "they are passed over"
    assert rows_of(reader, start, end) == [("orders", 0, n) for n in range(3)]
    reader.stop()


def test_offsets_without_names_of_topics_are_read(orders: Home) -> None:
    reader = reader_of(orders)
    old = {"0": 18, "1": 5, "incarnation": orders.topic("orders").incarnation}
    end = reader.latestOffset(old, ReadAllAvailable())
    assert rows_of(reader, old, end) == [("orders", 0, 18), ("orders", 0, 19)]
    reader.stop()


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
        reader.latestOffset({"orders": {**start["orders"], "0": 21}}, ReadAllAvailable())
    end = reader.latestOffset(start, ReadMaxRows(1))
    orders.trim("orders", ToOffsets({0: 3}))
    with pytest.raises(NotFoundError, match="offset 0 was trimmed, the first is 3: set option"):
        reader.latestOffset(start, ReadMaxRows(1))
    with pytest.raises(NotFoundError, match="offset 0 was trimmed, the first is 3"):
        reader.partitions(start, end)
    orders.delete_topic("orders")
    orders.create_topic("orders", 2)
    with pytest.raises(InvalidError, match="was deleted and made again"):
        reader.latestOffset(start, ReadAllAvailable())
    reader.stop()
