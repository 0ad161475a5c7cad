"""Transforms for tests: good ones, and those that break the rules."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def keep(events: DataFrame) -> DataFrame:
    return events


def even(events: DataFrame) -> DataFrame:
    return events.where(F.get_json_object(F.col("value").cast("string"), "$.n") % 2 == 0)


def none(events: DataFrame) -> DataFrame:
    return events.where("offset < 0")


def emptied(events: DataFrame) -> DataFrame:
    return events.where("false")


def masked(events: DataFrame) -> DataFrame:
    return events.withColumn("key", F.lit(b"***")).withColumn("type", F.lit("masked"))


def other_order_of_columns(events: DataFrame) -> DataFrame:
    return events.select(*reversed(events.columns))


def shuffled(events: DataFrame) -> DataFrame:
    return events.repartition(5)


def joined_into_one(events: DataFrame) -> DataFrame:
    return events.coalesce(1)


def sorted_down(events: DataFrame) -> DataFrame:
    return events.orderBy(F.desc("offset"))


def sorted_within(events: DataFrame) -> DataFrame:
    return events.sortWithinPartitions(F.desc("offset"))


def doubled(events: DataFrame) -> DataFrame:
    return events.union(events)


def exploded(events: DataFrame) -> DataFrame:
    twice = F.explode(F.array(F.lit(1), F.lit(2)))
    return events.withColumn("n", twice).drop("n")


def cut_short(events: DataFrame) -> DataFrame:
    return events.limit(10)


def cached(events: DataFrame) -> DataFrame:
    kept = events.cache()
    kept.count()
    return kept


def renumbered(events: DataFrame) -> DataFrame:
    return events.withColumn("offset", F.col("offset") + 1_000_000)


def without_key(events: DataFrame) -> DataFrame:
    return events.drop("key")


def with_more(events: DataFrame) -> DataFrame:
    return events.withColumn("more", F.lit(1))


def other_type(events: DataFrame) -> DataFrame:
    return events.withColumn("value", F.lit("text"))


def nulls(events: DataFrame) -> DataFrame:
    return events.withColumn("offset", F.lit(None).cast("long"))


def nothing(events: DataFrame) -> None:
    return None


NOT_A_FUNCTION = 5
