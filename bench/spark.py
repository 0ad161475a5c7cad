"""Spark reading a topic, beside Spark reading Parquet files of the same events; local[2].

And one day out of 30, with the filter pushed down and without.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from bench.log import VALUES
from bench.measure import scratch
from bench.rates import Rate, against, contest
from tidelog.home import create_home
from tidelog.settings import Settings
from tidelog.spark import FILTER_PUSHDOWN, register
from tidelog.spark.session import open_spark

EVENTS = 2_000_000
PARTITIONS = 4
DAYS = 30
DAY_EVENTS = 400_000
DAY_MS = 86_400_000
START_MS = 1_763_164_800_000  # 2025-11-15


def run() -> list[Rate]:
    """Both comparisons."""
    spark = open_spark("local[2]", "bench")
    register(spark)
    rates = [*whole(spark), *one_day(spark)]
    spark.stop()
    return rates


def one_day(spark: SparkSession) -> list[Rate]:
    """A day out of 30 by `where timestamp …`, all columns to nowhere."""
    with scratch() as folder:
        with create_home(Settings(f"{folder}/objects", f"{folder}/catalog.sqlite"))[0] as home:
            home.create_topic("t", PARTITIONS)
            rows = pa.array([VALUES[n % len(VALUES)] for n in range(100_000)], pa.binary())
            for number in range(DAYS * DAY_EVENTS // len(rows)):
                at = START_MS + DAY_MS * (number * len(rows) // DAY_EVENTS)
                times = pa.array([at] * len(rows), pa.timestamp("ms", "UTC"))
                home.append("t", pa.table({"value": rows, "timestamp": times}))
            config = home.config
        table = spark.read.format("tidelog").options(home=config, topic="t", pushFilters=True)

        def timed(pushed: bool) -> float:
            spark.conf.set(FILTER_PUSHDOWN, str(pushed).lower())
            began = time.perf_counter()
            day = "timestamp >= '2025-12-01T00:00:00Z' AND timestamp < '2025-12-02T00:00:00Z'"
            table.load().where(day).write.format("noop").mode("overwrite").save()
            return DAY_EVENTS / (time.perf_counter() - began)

        rates = contest(
            {
                "a day of 30, without pushdown": lambda: timed(False),
                "a day of 30, where timestamp is pushed down": lambda: timed(True),
            }
        )
        without, pushed = rates.values()
        against(pushed, without, 10.0)
    return [without, pushed]


def whole(spark: SparkSession) -> list[Rate]:
    """All columns to nowhere, from the topic and from the files."""
    with scratch() as folder:
        with create_home(Settings(f"{folder}/objects", f"{folder}/catalog.sqlite"))[0] as home:
            home.create_topic("t", PARTITIONS)
            for first in range(0, EVENTS, 100_000):
                rows = [VALUES[n % len(VALUES)] for n in range(first, first + 100_000)]
                home.append("t", pa.table({"value": pa.array(rows, pa.binary())}))
            config = home.config
        topic = spark.read.format("tidelog").options(home=config, topic="t")
        topic.load().write.parquet(f"{folder}/parquet")

        def timed(read: Callable[[], DataFrame]) -> float:
            began = time.perf_counter()
            read().write.format("noop").mode("overwrite").save()
            return EVENTS / (time.perf_counter() - began)

        rates = contest(
            {
                "spark.read.parquet of 2 M events": lambda: timed(
                    lambda: spark.read.parquet(f"{folder}/parquet")
                ),
                "spark.read of the topic": lambda: timed(topic.load),
            }
        )
        files, context = rates.values()
        against(context, files, 1.0)
    return [files, context]
