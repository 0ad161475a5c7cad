"""Transforms of archives: rows may go and change, but must stay where they are."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.archive.test_archive import fill
from tidelog import Event, Home
from tidelog.archive.archive import committed_files, create_archive, open_pipeline
from tidelog.codec.formats import open_format
from tidelog.errors import InvalidError
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pipeline import CycleReport
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.spark.workers import SparkWorkers

GOOD = {
    "keep": lambda n: True,
    "even": lambda n: n % 2 == 0,
    "none": lambda n: False,
    "other_order_of_columns": lambda n: True,
}
BAD = {
    "emptied": "fewer Spark partitions",
    "shuffled": "leave them where they are",
    "joined_into_one": "leave them where they are",
    "sorted_down": "leave them where they are",
    "sorted_within": "do not rise",
    "doubled": "more Spark partitions",
    "exploded": "do not rise after 0:",
    "cut_short": "leave them where they are",
    "cached": "not read to its end",
    "renumbered": "not one that was read",
    "without_key": "`key` is missing",
    "with_more": "and no more",
    "other_type": "`value` is string",
    "nulls": "has nulls",
    "before_1970": "outside of the years 1970 to 9999",
    "exits": "raised SystemExit: 4",
    "nothing": "return the DataFrame",
    "NOT_A_FUNCTION": "is not a function",
    "absent": "absent",
}


def an_archive(home: Home, transform: str) -> Archive:
    wanted = Archive(
        name="a",
        incarnation=home.context.ids.new(),
        source="topic:t",
        kind="backup",
        store=home.store.url,
        root="archives/a",
        created_ms=0,
        formats={1: ArchiveFormat(transform=transform)},
    )
    return create_archive(home.context, wanted)


@pytest.fixture
def filled(home: Home) -> Home:
    home.create_topic("t", 3)
    fill(home, 3_000)
    return home


def events_of(home: Home, archive: Archive) -> list[dict[str, object]]:
    form = open_format("parquet")
    return [
        row
        for _, file in committed_files(home.context, archive)
        for batch in form.read(home.store.get(file.target))
        for row in batch.to_pylist()
    ]


def drive(home: Home, archive: Archive, spark: SparkSession) -> int:
    return Driver(
        home.context, open_pipeline(home.context, archive, SparkWorkers(spark)), DriverOptions()
    ).run()


@pytest.mark.parametrize("name", GOOD)
def test_rows_may_go(filled: Home, local_spark: SparkSession, name: str) -> None:
    archive = an_archive(filled, f"tests.support.spark_hooks:{name}")
    assert drive(filled, archive, local_spark) == 3_000
    kept = sorted(json.loads(row["value"])["n"] for row in events_of(filled, archive))  # type: ignore[arg-type]
    assert kept == [n for n in range(3_000) if GOOD[name](n)]
    manifests = {m.partition: m for m, _ in committed_files(filled.context, archive)}
    assert all(m.read == m.written + m.dropped for m in manifests.values())


def test_rows_may_change_and_nothing_else_of_them_does(
    filled: Home, local_spark: SparkSession
) -> None:
    odd = [
        Event(None, None, "id", 5, "created", (("h", b"1"), ("h", b""))),
        Event(b"", b"", None, 6),
        Event(b"\xff\x00", b"k", "id-2", 253_402_300_799_999),
    ]
    filled.append("t", odd, partition=1)
    archive = an_archive(filled, "tests.support.spark_hooks:masked")
    drive(filled, archive, local_spark)
    found = [row for row in events_of(filled, archive) if row["partition"] == 1]
    expected = [batch.to_pylist() for batch in filled.read_arrow("t", 1)]
    for row, original in zip(found, (row for rows in expected for row in rows), strict=True):
        assert row == original | {"key": b"***", "type": "masked"}


@pytest.mark.parametrize("name", BAD)
def test_a_transform_that_breaks_the_rules_is_refused_and_nothing_is_archived(
    filled: Home, local_spark: SparkSession, name: str
) -> None:
    with pytest.raises(InvalidError, match=BAD[name]):
        drive(filled, an_archive(filled, f"tests.support.spark_hooks:{name}"), local_spark)
    local_spark.catalog.clearCache()
    assert list(filled.store.list("archives/a/g1/")) == []


def test_it_needs_spark(filled: Home) -> None:
    archive = an_archive(filled, "tests.support.spark_hooks:keep")
    with pytest.raises(InvalidError, match="needs Spark"):
        Driver(
            filled.context, open_pipeline(filled.context, archive, LocalWorkers()), DriverOptions()
        ).run()


def test_transform_that_fails_on_one_source_partition_stops_that_one_alone(
    filled: Home, local_spark: SparkSession
) -> None:
    archive = an_archive(filled, "tests.support.spark_hooks:fails_in_partition_1")
    stop, errors = threading.Event(), {}

    def after_one(report: CycleReport) -> None:
        errors.update(report.errors)
        stop.set()

    pipeline = open_pipeline(filled.context, archive, SparkWorkers(local_spark))
    Driver(filled.context, pipeline, DriverOptions(stop=stop, on_cycle=after_one)).run()
    assert [each.text for each in errors] == ["t/1"]
    (error,) = errors.values()
    assert isinstance(error, InvalidError), "a mistake in the transform is not retried"
    assert str(error).count("\n") == 0
    assert "a record that is not expected" in str(error)
    found = Counter(row["partition"] for row in events_of(filled, archive))
    assert found == {number: len(list(filled.read("t", number))) for number in (0, 2)}


@pytest.fixture
def unmeasured(local_spark: SparkSession) -> Iterator[SparkSession]:
    """The session with the settings for batches that Tidelog's own sessions have."""
    names = [f"spark.sql.execution.arrow.max{each}PerBatch" for each in ("Records", "Bytes")]
    before = {name: local_spark.conf.get(name) for name in names}
    for name, value in zip(names, ("20000", str(2**31 - 1)), strict=True):
        local_spark.conf.set(name, value)
    yield local_spark
    for name, value in before.items():
        local_spark.conf.set(name, value)


def test_batches_of_large_values_are_bounded_by_bytes(home: Home, unmeasured: SparkSession) -> None:
    home.create_topic("t", 2)
    home.append("t", [Event(b"small")] * 100, partition=0)
    for _ in range(7):
        home.append("t", [Event(bytes(100_000))] * 100, partition=1)
    archive = an_archive(home, "tests.support.spark_hooks:in_small_batches")
    assert drive(home, archive, unmeasured) == 800
    found = Counter(row["partition"] for row in events_of(home, archive))
    assert found == {0: 100, 1: 700}
    measured = unmeasured.conf.get("spark.sql.execution.arrow.maxBytesPerBatch")
    assert measured == "32000000", "later jobs measure from the start"
