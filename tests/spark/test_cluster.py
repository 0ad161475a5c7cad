"""Executors in other processes: the driver alone has the catalog, which is a SQLite file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.spark import SparkCluster
from tidelog import Event, Home

SECONDS_MAX = 400

# A process of its own: there can be one Spark context in a process, and it may be another's.
SCRIPT = """
import json, os, sys
from pyspark import SparkConf
from pyspark.sql import SparkSession
from tidelog.spark import register

settings, home, folder = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ["PYSPARK_PYTHON"] = sys.executable
conf = SparkConf().setAll(list(settings.items()))
spark = SparkSession.builder.config(conf=conf).getOrCreate()
register(spark)
place = {"home": home, "topic": "orders"}
table = spark.read.format("tidelog").options(**place, bytesPerTask=1).load()
hosts = table.rdd.mapPartitions(lambda rows: [(os.getppid(), sum(1 for _ in rows))]).collect()
stream = spark.readStream.format("tidelog").options(**place, bytesPerTask=1).load()
query = (
    stream.writeStream.format("tidelog")
    .options(home=home, topic="copy", sink="cluster", checkpointLocation=folder)
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
print(json.dumps({"processes": len({pid for pid, _ in hosts}), "rows": sum(n for _, n in hosts)}))
spark.stop()
"""


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_executors_read_and_write_a_home_on_sqlite(
    spark_cluster: SparkCluster, home: Home, tmp_path: Path
) -> None:
    home.create_topic("orders", 2)
    home.create_topic("copy", 3)
    for run in range(4):
        home.append("orders", [Event(f"{run} {n}".encode(), b"%d" % n) for n in range(50)])
    done = subprocess.run(
        [
            *(sys.executable, "-c", SCRIPT, json.dumps(spark_cluster.settings())),
            *(str(tmp_path / "home"), str(tmp_path / "checkpoint")),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"processes": 2, "rows": 200}
    events = [event for partition in range(3) for event in home.read("copy", partition)]
    expected = [f"{run} {n}".encode() for run in range(4) for n in range(50)]
    assert sorted(event.value or b"" for event in events) == sorted(expected)
