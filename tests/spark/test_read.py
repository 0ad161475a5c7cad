"""Batch reads with real Spark, and that tasks need the store alone."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.spark.conftest import Read
from tests.support.compiled_logs import Bench
from tidelog import Event, Home
from tidelog.errors import CorruptError, TidelogError
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.spark import TidelogReader
from tidelog.spark.columns import arrow_schema, spark_schema
from tidelog.spark.options import BATCH_READ, read_columns, read_options
from tidelog.store.local import LocalStore

START_MS = 1_763_200_000_000  # 2025-11-15T09:46:40Z


def minute(number: int) -> str:
    return f"2025-11-15T09:{46 + number}:40Z"


@pytest.fixture
def orders(home: Home) -> list[Event]:
    """Two partitions, five runs in each, a minute apart; everything an event can have or lack."""
    home.create_topic("orders", 2)
    for partition in range(2):
        for run in range(5):
            at = START_MS + 60_000 * run
            events = [
                Event(f"{partition}-{run}".encode(), timestamp=at),
                Event(None, b"key \xff", "id-1", at + 1, "type", (("a", b"\x00"), ("a", b""))),
                Event(b"", b"", None, at + 2),
            ]
            home.append("orders", events, partition=partition)
    return [event for partition in range(2) for event in home.read("orders", partition)]


@pytest.mark.spark
def test_everything_comes_back(read: Read, orders: list[Event]) -> None:
    table = read("orders", bytesPerTask=1000)
    assert table.rdd.getNumPartitions() > 2
    rows = table.orderBy("partition", "offset").collect()
    found = [
        Event(
            None if row.value is None else bytes(row.value),
            None if row.key is None else bytes(row.key),
            row.id,
            int(row.timestamp.timestamp() * 1000),
            row.type,
            tuple((name, bytes(value)) for name, value in row.headers or ()),
            row.topic,
            row.partition,
            row.offset,
        )
        for row in rows
    ]
    assert found == orders


@pytest.mark.spark
@pytest.mark.usefixtures("orders")
def test_options_choose_columns_offsets_and_times(read: Read) -> None:
    table = read(
        "orders", columns="offset,partition", startOffsets='{"0": 13}', endOffsets='{"1": 2}'
    )
    assert table.columns == ["offset", "partition"]
    assert sorted(map(tuple, table.collect())) == [(0, 1), (1, 1), (13, 0), (14, 0)]
    assert read("orders", startOffsets="latest").count() == 0
    # The run of minute 1 ends 2 ms after it began, so the end cuts through it.
    within = read("orders", columns="offset", startTime=minute(1), endTime=f"{minute(2)[:-1]}.001Z")
    assert sorted(row.offset for row in within.collect()) == [3, 3, 4, 4, 5, 5, 6, 6]


@pytest.mark.spark
def test_an_empty_topic_has_no_rows(read: Read, home: Home) -> None:
    home.create_topic("empty", 3)
    assert read("empty").collect() == []


@pytest.mark.spark
@pytest.mark.usefixtures("orders")
def test_a_session_finds_the_format_by_itself(local_spark: SparkSession, home: Home) -> None:
    reader = local_spark.newSession().read.format("tidelog")
    assert reader.options(home=home.config, topic="orders").load().count() == 30


@pytest.mark.spark
@pytest.mark.usefixtures("orders")
def test_errors_reach_the_user(read: Read, home: Home) -> None:
    home.trim("orders", ToOffsets({0: 4}))
    with pytest.raises(PySparkException, match="offset 3 was trimmed, the first is 4"):
        read("orders", startOffsets='{"0": 3}').count()
    with pytest.raises(PySparkException, match="did you mean `columns`") as refused:
        read("orders", colums="value")
    assert len(str(refused.value).strip().splitlines()) <= 2, "one line, and Spark's SQLSTATE"
    assert read("orders").count() == 26, "earliest is the first that is left"


def plan(place: Home, **options: str) -> tuple[TidelogReader, list[object]]:
    """A reader and its tasks, as they reach an executor."""
    given = {"home": place.config, "topic": "orders", **options}
    wanted = arrow_schema(spark_schema(read_columns(given)))
    reader = TidelogReader(read_options(given, BATCH_READ), wanted)
    return pickle.loads(pickle.dumps((reader, reader.partitions())))


@pytest.mark.usefixtures("orders")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endOffsets": '{"1": 16}'}, "ends at offset 15, 16 was asked for"),
        ({"startOffsets": '{"1": 16}'}, "ends at offset 15, 16 was asked for"),
        ({"startOffsets": '{"1": 5}', "endOffsets": '{"1": 4}'}, "runs backwards"),
        ({"startOffsets": '{"2": 0}'}, "has no partition 2"),
        ({"topic": "none"}, "topic `none`: not found"),
        ({"home": "memory:"}, "lives in one process"),
        ({"startTime": minute(2), "endTime": minute(1)}, "exchange them"),
        ({"startTime": "soon"}, "is not ISO 8601"),
    ],
)
def test_plans_refuse(home: Home, options: dict[str, str], message: str) -> None:
    with pytest.raises(TidelogError, match=message):
        plan(home, **options)


def test_a_task_needs_no_catalog(home: Home, orders: list[Event], tmp_path: Path) -> None:
    reader, tasks = plan(home, columns="offset,value")
    (tmp_path / "home" / "catalog.sqlite").rename(tmp_path / "away")
    batches = [batch for task in tasks for batch in reader.read(task)]
    assert [batch.schema.names for batch in batches] == [["offset", "value"]]
    assert batches[0].column("value").to_pylist() == [event.value for event in orders]


def amended(home: Home, orders: list[Event]) -> list[tuple[int, int, bytes | None]]:
    """Amendments in both partitions, one of which is compiled; and what is to be read."""
    rows = {(event.partition or 0, event.offset or 0): event.value for event in orders}
    for partition in (0, 1):
        bench = Bench(home.context, home.topic("orders"), partition)
        bench.delete(0, 4, 7, 8)
        bench.update(3, b"three")
        if partition == 0:
            bench.compile(0, 9)
            bench.compile(9, 15)
        bench.delete(10)
        bench.update(5, b"five" * 5_000, is_large=True)
        for offset in (0, 4, 7, 8, 10):
            del rows[partition, offset]
        rows |= {(partition, 3): b"three", (partition, 5): b"five" * 5_000}
    return [(partition, offset, value) for (partition, offset), value in sorted(rows.items())]


def found_in(reader: TidelogReader, tasks: list[object]) -> list[tuple[int, int, bytes | None]]:
    rows = [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]
    return [(row["partition"], row["offset"], row["value"]) for row in rows]


@pytest.mark.spark
def test_journals_and_amendments_are_read(home: Home, read: Read, orders: list[Event]) -> None:
    wanted = amended(home, orders)
    table = read("orders", columns="partition,offset,value", bytesPerTask=2_000)
    rows = table.orderBy("partition", "offset").collect()
    found = [(p, offset, None if value is None else bytes(value)) for p, offset, value in rows]
    assert found == wanted
    assert read("orders", columns="type").count() == len(wanted)


def test_tasks_carry_their_amendments_and_need_no_catalog(
    home: Home, orders: list[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.codec.journal_file._GROUP_ROWS", 2)
    monkeypatch.setattr("tidelog.spark.plan._SLICE_BYTES", 1_500)
    wanted = amended(home, orders)
    reader, tasks = plan(home, columns="partition,offset,value", bytesPerTask="3000")
    slices = [piece for task in tasks for piece in task.slices]  # type: ignore[attr-defined]
    cut = [piece for piece in slices if piece.run.journal and not piece.is_whole]
    assert len(cut) > 3, "large journals are shared out"
    for piece in slices:
        offsets = piece.amendments.offsets.tolist()
        assert all(piece.start <= offset < piece.end for offset in offsets), "its own alone"
    (tmp_path / "home" / "catalog.sqlite").rename(tmp_path / "away")
    assert found_in(reader, tasks) == wanted


def test_times_choose_within_journals(home: Home, orders: list[Event]) -> None:
    amended(home, orders)
    reader, tasks = plan(
        home, columns="partition,offset,value", startTime=minute(2), endTime=minute(4)
    )
    offsets = [(partition, offset) for partition, offset, _ in found_in(reader, tasks)]
    assert offsets == [(p, offset) for p in (0, 1) for offset in (6, 9, 11)]


def test_columns_that_nobody_wants_are_not_fetched(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.create_topic("orders")
    noise = random.Random(1)
    home.append("orders", [Event(noise.randbytes(2_000), timestamp=n) for n in range(500)])
    bench = Bench(home.context, home.topic("orders"))
    bench.delete(3)
    run = bench.compile(0, 500)
    bench.update(5, b"", is_large=True)
    fetched: list[int] = []
    get = LocalStore.get

    def watched(self: LocalStore, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = get(self, key, start, end)
        fetched.append(len(data))
        return data

    monkeypatch.setattr(LocalStore, "get", watched)
    monkeypatch.setattr("tidelog.log.run_reader._WHOLE_BYTES", 1 << 10)
    reader, tasks = plan(home, columns="offset")
    rows = [
        row["offset"] for task in tasks for batch in reader.read(task) for row in batch.to_pylist()
    ]
    assert rows == [n for n in range(500) if n != 3]
    assert sum(fetched) < run.byte_end // 20


@pytest.mark.usefixtures("orders")
def test_runs_of_other_times_are_not_fetched(home: Home) -> None:
    reader, tasks = plan(home, startTime=minute(3), columns="offset")
    wanted = {piece.run.object for task in tasks for piece in task.slices}  # type: ignore[attr-defined]
    others = [info.key for info in home.store.list("topics/") if info.key not in wanted]
    assert len(wanted) == 4
    assert len(others) == 6
    home.store.delete(others)
    rows = [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]
    assert [row["offset"] for row in rows] == [9, 10, 11, 12, 13, 14] * 2


def values(reader: TidelogReader, tasks: list[object]) -> set[bytes | None]:
    return {value for _, _, value in found_in(reader, tasks)}


def deleted(home: Home) -> None:
    """Delete, compile and sweep, so that the objects of an older plan are deleted."""
    home.delete("orders", ["id-1"])
    for partition in (0, 1):
        Bench(home.context, home.topic("orders"), partition).compile(0, 15)
    home.sweep(grace="0s")


@pytest.mark.usefixtures("orders")
def test_plan_from_before_a_delete_does_not_return_the_event(home: Home) -> None:
    reader, tasks = plan(home, columns="partition,offset,value,id", bytesPerTask="2000")
    home.append("orders", [Event(b"later")], partition=0)
    before = values(reader, tasks)
    assert None in before  # the value of the event with that id
    home.delete("orders", ["id-1"])
    assert values(reader, tasks) == before - {None}
    deleted(home)
    assert values(reader, tasks) == before - {None}, "its ends stay, its objects are others"
    assert len(found_in(reader, tasks)) == 20


@pytest.mark.usefixtures("orders")
def test_plan_of_trimmed_events_or_of_a_deleted_topic_says_to_load_again(home: Home) -> None:
    reader, tasks = plan(home)
    home.trim("orders", ToOffsets({0: 3, 1: 3}))
    with pytest.raises(TidelogError, match=r"trimmed.*load the table again"):
        list(reader.read(tasks[0]))
    home.delete_topic("orders")
    with pytest.raises(TidelogError, match=r"not found.*load the table again"):
        list(reader.read(tasks[0]))
    home.create_topic("orders", 2)
    with pytest.raises(TidelogError, match="made again: load the table again"):
        list(reader.read(tasks[0]))


@pytest.mark.spark
@pytest.mark.usefixtures("orders")
def test_table_and_view_loaded_before_a_delete_follow_it(
    local_spark: SparkSession, home: Home, read: Read
) -> None:
    table = read("orders")
    table.createOrReplaceTempView("orders_loaded_before")
    ids = "SELECT count(*) AS n FROM orders_loaded_before WHERE id = 'id-1'"
    assert table.count() == 30
    assert local_spark.sql(ids).collect()[0].n == 10
    rows = table.select("offset")
    assert len(rows.collect()) == 30
    deleted(home)
    assert len(rows.collect()) == 20, "the same DataFrame, whose plan Spark keeps"
    assert table.count() == 20
    assert local_spark.sql(ids).collect()[0].n == 0


@pytest.mark.usefixtures("orders")
def test_an_object_that_is_gone_is_told(home: Home) -> None:
    reader, tasks = plan(home)
    home.store.delete([info.key for info in home.store.list("topics/")])
    with pytest.raises(CorruptError, match="offsets 0 to 3: is gone: if the topic was trimmed"):
        list(reader.read(tasks[0]))


@pytest.mark.usefixtures("orders")
def test_damaged_bytes_are_told(home: Home, tmp_path: Path) -> None:
    reader, tasks = plan(home)
    run = tasks[0].slices[0].run  # type: ignore[attr-defined]
    file = tmp_path / "home" / "objects" / run.object
    data = bytearray(file.read_bytes())
    data[run.byte_start + 100] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="expected crc32c"):
        list(reader.read(tasks[0]))


@pytest.mark.spark
@pytest.mark.usefixtures("orders")
def test_sql_works_or_says_what_to_type(local_spark: SparkSession, home: Home) -> None:
    options = f"OPTIONS (home '{home.config}', topic 'or*')"
    local_spark.sql(f"CREATE TEMPORARY VIEW orders_in_sql USING tidelog {options}")
    assert local_spark.sql("SELECT count(*) AS n FROM orders_in_sql").collect()[0].n == 30
    with pytest.raises(PySparkException, match="use CREATE TEMPORARY VIEW") as refused:
        local_spark.sql(f"CREATE TABLE orders_table USING tidelog {options}")
    assert "Traceback" not in str(refused.value)
    local_spark.sql(f"CREATE TABLE orders_table (value binary) USING tidelog {options}")
    with pytest.raises(PySparkException, match="keeps no options with a table"):
        local_spark.sql("SELECT * FROM orders_table").count()
    local_spark.sql("DROP TABLE orders_table")
    rows = local_spark.sql("SELECT X'61' AS value").write.format("tidelog")
    rows.options(home=home.config, topic="orders").mode("append").saveAsTable("orders_saved")
    with pytest.raises(PySparkException, match="no options with a table of CREATE TABLE or save"):
        local_spark.table("orders_saved").count()  # Spark tells a writer nothing about a table
    local_spark.sql("DROP TABLE orders_saved")
    writer = local_spark.table("orders_in_sql").write.format("tidelog")
    with pytest.raises(PySparkException, match="Append"):
        writer.options(home=home.config, topic="orders").save()
    with pytest.raises(PySparkException, match="use mode append"):
        writer.options(home=home.config, topic="orders").mode("overwrite").save()
