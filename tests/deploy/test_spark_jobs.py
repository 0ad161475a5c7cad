"""What docs/spark-cluster.md tells: an archive and a job of one's own, on a standalone cluster."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.servers.spark import SparkCluster
from tests.support.cli_run import TIDELOG
from tidelog import Event, Home
from tidelog.home import create_home
from tidelog.settings import load_settings

EXAMPLE = Path(__file__).parents[2] / "deploy" / "spark" / "counts.py"
EVENTS = 500


def filled(folder: Path) -> Home:
    home = create_home(load_settings(str(folder), {}, folder.parent))[0]
    home.create_topic("orders", 2)
    home.append(
        "orders",
        [
            Event(b"%d" % n, b"%d" % n, type="paid" if n % 5 else "open", timestamp=n * 60_000)
            for n in range(EVENTS)
        ],
    )
    return home


@pytest.mark.spark
@pytest.mark.long
def test_the_example_is_submitted_and_counts(spark_cluster: SparkCluster, tmp_path: Path) -> None:
    with filled(tmp_path / "home"):
        pass
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    submit = Path(spec.origin).parent / "bin" / "spark-submit"
    settings = [f"--conf={key}={value}" for key, value in spark_cluster.settings().items()]
    done = subprocess.run(
        [
            *(str(submit), "--master", spark_cluster.master_url, *settings),
            *(str(EXAMPLE), str(tmp_path / "home"), "orders", str(tmp_path / "counts")),
        ],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{EVENTS} events counted" in done.stdout
    rows = pq.read_table(tmp_path / "counts").to_pylist()
    assert sum(row["events"] for row in rows if row["type"] == "open") == EVENTS // 5


@pytest.mark.spark
def test_an_archive_runs_on_the_cluster(spark_cluster: SparkCluster, tmp_path: Path) -> None:
    place = str(tmp_path / "home")
    with filled(tmp_path / "home"):
        pass
    settings = spark_cluster.settings()
    confs = [
        text
        for key, value in settings.items()
        if key != "spark.master"
        for text in ("--conf", f"{key}={value}")
    ]
    for args in (
        ("archive", "create", "raw", "--source", "topic:orders"),
        ("archive", "run", "raw", "--master", spark_cluster.master_url, *confs),
        ("archive", "verify", "raw"),
    ):
        done = subprocess.run(
            [*TIDELOG, "--home", place, *args],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
