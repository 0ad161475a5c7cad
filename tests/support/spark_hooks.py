"""Transforms for tests: good ones, and those that break the rules."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, functions


def keep(events: DataFrame) -> DataFrame:
    return events


release = Path()  # a test says which file ends the wait of `held`


def held(events: DataFrame) -> DataFrame:
    file = release

    def wait(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            while not file.exists():
                time.sleep(0.02)
            yield batch

    return events.mapInArrow(wait, events.schema)


def even(events: DataFrame) -> DataFrame:
    return events.where(
        functions.get_json_object(functions.col("value").cast("string"), "$.n") % 2 == 0
    )


def none(events: DataFrame) -> DataFrame:
    return events.where("offset < 0")


def emptied(events: DataFrame) -> DataFrame:
    return events.where("false")


def masked(events: DataFrame) -> DataFrame:
    return events.withColumn("key", functions.lit(b"***")).withColumn(
        "type", functions.lit("masked")
    )


def other_order_of_columns(events: DataFrame) -> DataFrame:
    return events.select(*reversed(events.columns))


def shuffled(events: DataFrame) -> DataFrame:
    return events.repartition(5)


def joined_into_one(events: DataFrame) -> DataFrame:
    return events.coalesce(1)


def sorted_down(events: DataFrame) -> DataFrame:
    return events.orderBy(functions.desc("offset"))


def sorted_within(events: DataFrame) -> DataFrame:
    return events.sortWithinPartitions(functions.desc("offset"))


def doubled(events: DataFrame) -> DataFrame:
    return events.union(events)


def exploded(events: DataFrame) -> DataFrame:
    twice = functions.explode(functions.array(functions.lit(1), functions.lit(2)))
    return events.withColumn("n", twice).drop("n")


def exits(events: DataFrame) -> DataFrame:
    sys.exit(4)


def cut_short(events: DataFrame) -> DataFrame:
    return events.limit(10)


def cached(events: DataFrame) -> DataFrame:
    kept = events.cache()
    kept.count()
    return kept


def renumbered(events: DataFrame) -> DataFrame:
    return events.withColumn("offset", functions.col("offset") + 1_000_000)


def without_key(events: DataFrame) -> DataFrame:
    return events.drop("key")


def with_more(events: DataFrame) -> DataFrame:
    return events.withColumn("more", functions.lit(1))


def other_type(events: DataFrame) -> DataFrame:
    return events.withColumn("value", functions.lit("text"))


def nulls(events: DataFrame) -> DataFrame:
    return events.withColumn("offset", functions.lit(None).cast("long"))


def before_1970(events: DataFrame) -> DataFrame:
    return events.withColumn("timestamp", functions.expr("timestamp_micros(-500)"))


def nothing(events: DataFrame) -> None:
    return None


NOT_A_FUNCTION = 5


def fails_in_partition_1(events: DataFrame) -> DataFrame:
    odd = "if(partition = 1, cast(raise_error('a record that is not expected') as binary), value)"
    return events.withColumn("value", functions.expr(odd))


def fails_in_python(events: DataFrame) -> DataFrame:
    def fail(value: bytes) -> bytes:
        raise ValueError("no number")

    return events.withColumn("value", functions.udf(fail, "binary", useArrow=False)("value"))


def unknown_column(events: DataFrame) -> DataFrame:
    return events.where("no_such_column = 1")


def in_small_batches(events: DataFrame) -> DataFrame:
    """Fails if Spark collects much more in a batch than fits into memory with large values."""

    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.nbytes > 40_000_000:
                raise ValueError(f"a batch of {batch.nbytes} bytes")
            yield batch

    return events.mapInArrow(check, events.schema)
