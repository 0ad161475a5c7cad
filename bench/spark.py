"""Spark reading a topic, beside Spark reading Parquet files of the same events; local[2]."""

from __future__ import annotations

import time
from collections.abc import Callable

import pyarrow as pa
from pyspark.sql import DataFrame

from bench.log import VALUES
from bench.measure import scratch
from bench.rates import Rate, against, contest
from tidelog.home import create_home
from tidelog.settings import Settings
from tidelog.spark import register
from tidelog.spark.workers import open_spark

EVENTS = 2_000_000
PARTITIONS = 4


def run() -> list[Rate]:
    """All columns to nowhere, from the topic and from the files."""
    spark = open_spark("local[2]", "bench")
    register(spark)
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
    spark.stop()
    return [files, context]
