"""An example of a job for a Spark cluster: how many events each type has, by hour, as Parquet.

    spark-submit --master spark://host:7077 deploy/spark/counts.py HOME TOPIC FOLDER

HOME is what `tidelog home` prints. The driver reads the catalog; executors read the store alone, so
they need the package and, for a remote store, credentials of its consumers.
"""

import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from tidelog.spark import register


def main(home: str, topic: str, folder: str) -> None:
    """Count, write, and print the total."""
    spark = SparkSession.builder.appName(f"counts of {topic}").getOrCreate()
    register(spark)
    events = (
        spark.read.format("tidelog")
        .options(home=home, topic=topic, columns="timestamp,type")
        .load()
    )
    hours = f.date_trunc("hour", f.col("timestamp")).alias("hour")
    counts = events.groupBy(hours, "type").agg(f.count("*").alias("events"))
    counts.coalesce(1).write.mode("overwrite").parquet(folder)
    total = spark.read.parquet(folder).agg(f.sum("events")).first()
    print(f"{total[0] if total else 0} events counted")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
