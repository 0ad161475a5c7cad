"""Executors in other processes: the driver alone has the catalog, which is a SQLite file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.spark import ROOT, SparkCluster
from tests.support.waiting import until
from tidelog import Event, Home
from tidelog.api.spark_workers import FOLDER, pack_environment

SECONDS_MAX = 400

# Executors with a Python that has nothing installed, and the archive of `tidelog spark-env`.
BARE = """
import json, os, sys
from pyspark import SparkConf
from pyspark.sql import SparkSession
from tidelog.spark import register

settings, home = json.loads(sys.argv[1]), sys.argv[2]
spark = SparkSession.builder.config(conf=SparkConf().setAll(list(settings.items()))).getOrCreate()
register(spark)

def places(_):
    import pyarrow, tidelog
    return [(sys.executable, pyarrow.__file__, tidelog.__file__)]

table = spark.read.format("tidelog").options(home=home, topic="orders", bytesPerTask=1).load()
rows = len(table.collect())
found = spark.sparkContext.parallelize(range(2), 2).mapPartitions(places).collect()
print(json.dumps({"rows": rows, "places": found}))
spark.stop()
"""

# A process of its own: there can be one Spark context in a process, and it may be another's.
SCRIPT = """
import json, os, sys
from pyspark import SparkConf
from pyspark.sql import SparkSession
from tests.spark.test_python_worker import folder_of
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
notes = spark.range(0, 2, 1, 2).mapInArrow(folder_of, "folder string").collect()
print(json.dumps([row.folder for row in notes]))
spark.stop()
"""


@pytest.mark.long
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
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counted, notes = map(json.loads, done.stdout.splitlines()[-2:])
    assert counted == {"processes": 2, "rows": 200}
    assert len(set(notes)) == 2
    until(lambda: not any(map(os.path.exists, notes)), 60)  # workers remove them with the session
    events = [event for partition in range(3) for event in home.read("copy", partition)]
    expected = [f"{run} {n}".encode() for run in range(4) for n in range(50)]
    assert sorted(event.value or b"" for event in events) == sorted(expected)


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(900)
def test_executors_with_a_bare_python_use_the_packed_environment(
    spark_cluster: SparkCluster, home: Home, tmp_path: Path
) -> None:
    home.create_topic("orders", 2)
    for run in range(4):
        home.append("orders", [Event(f"{run} {n}".encode(), b"%d" % n) for n in range(50)])
    bare = str(Path(sys.base_prefix) / "bin" / "python3")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [bare, "-c", "import pyarrow"]
    missing = subprocess.run(command, capture_output=True, env=clean, check=False)
    assert missing.returncode != 0, "the executors' Python has nothing"
    packed = pack_environment(tmp_path / "env.tar.gz")
    settings = {**spark_cluster.settings(), **packed.settings, "spark.pyspark.python": bare}
    settings["spark.pyspark.driver.python"] = sys.executable
    done = subprocess.run(
        [sys.executable, "-c", BARE, json.dumps(settings), str(tmp_path / "home")],
        cwd=tmp_path,
        env={**clean, "PYTHONPATH": packed.driver_path},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"] == 200
    for python, *modules in found["places"]:
        assert python == bare
        assert all(FOLDER in module for module in modules), modules
