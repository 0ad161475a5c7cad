"""The job that people write first: Spark's own Kafka connector into Parquet, in ten lines.

It is a batch job, which Spark runs faster than the stream of the same lines; it remembers nothing,
so it could not go on where it ended. ``python -m bench.ten_lines JARS SERVERS TOPIC FOLDER SHAPE``
runs it once, in a process of its own.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, get_json_object, timestamp_millis, to_date

QUIET = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.log.level": "ERROR",
}


def open_session(jars: str) -> SparkSession:
    """Spark as it comes, on two cores."""
    builder = SparkSession.builder.master("local[2]").config("spark.jars", jars)
    for key, value in QUIET.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def archive(spark: SparkSession, servers: str, topic: str, folder: str, shape: str) -> None:
    """The ten lines."""
    events = (
        spark.read.format("kafka")
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", topic)
        .load()
    )
    if shape == "dated":
        time_ms = get_json_object(col("value").cast("string"), "$.timestamp").cast("long")
        dated = events.withColumn("dt", to_date(timestamp_millis(time_ms)))
        dated.write.partitionBy("dt").parquet(folder)
    else:
        events.write.parquet(folder)


if __name__ == "__main__":
    archive(open_session(sys.argv[1]), *sys.argv[2:])
