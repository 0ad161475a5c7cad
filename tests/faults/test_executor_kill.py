"""Spark executors die by SIGKILL beneath every pipeline of a home on servers: each event once.

The executors are Java processes of a standalone cluster. Those of the first command have a Python
with nothing installed, and the archive of `tidelog spark-env`. Ranges are cut into several tasks.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pyarrow.parquet as pq
import pytest

from tests.servers.cassandra import Cassandra
from tests.servers.dynamodb import DynamoDb
from tests.servers.s3 import S3
from tests.servers.spark import SparkCluster, running
from tests.support.cli_run import TIDELOG
from tests.support.cql_tables import new_name
from tidelog import Event, Home
from tidelog.api.spark_workers import pack_environment
from tidelog.coordination.commits import read_manifests
from tidelog.home import create_home
from tidelog.settings import Settings

T = TypeVar("T")

pytestmark = [
    pytest.mark.spark,
    pytest.mark.server,
    pytest.mark.long,
    pytest.mark.timeout(3_000),
]

EVENTS = 40_000  # of each partition
PARTITIONS = 1  # fewer than cores, so that ranges are cut
KILLS = 2  # beneath each command
COMMAND_S = 900
EXECUTOR = b"org.apache.spark.executor.CoarseGrainedExecutorBackend"
TRANSFORM = """
def even(events):
    return events.where("offset % 2 = 0")
"""


def parents() -> dict[int, int]:
    """The parent of each process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return found


def executors(cluster: SparkCluster) -> list[int]:
    """The processes of a cluster's executors."""
    found, above = [], parents()
    for pid in above:
        at = pid
        while at in above and at not in cluster.worker_pids:
            at = above[at]
        if at in cluster.worker_pids and pid != at:
            with contextlib.suppress(OSError):
                if EXECUTOR in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    found.append(pid)
    return found


class Killer:
    """Kills executors that run Python workers, some seconds after these have begun."""

    def __init__(self, cluster: SparkCluster) -> None:
        self.killed = 0
        self._cluster = cluster
        self._ended = threading.Event()
        self._chance = random.Random(11)
        self._thread = threading.Thread(target=self._kill)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _kill(self) -> None:
        while self.killed < KILLS and not self._ended.wait(0.2):
            above = parents()
            at_work = [pid for pid in executors(self._cluster) if pid in above.values()]
            if at_work and not self._ended.wait(self._chance.uniform(0, 3)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._chance.choice(at_work), signal.SIGKILL)
                    self.killed += 1


class Commands:
    """Runs commands on a cluster whose executors are killed."""

    def __init__(self, home: Home, cluster: SparkCluster, folder: Path) -> None:
        (folder / "changes.py").write_text(TRANSFORM)
        keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        self._settings = {
            **cluster.settings(),
            **{f"spark.executorEnv.{name}": os.environ[name] for name in keys},
        }
        self._home = home
        self._cluster = cluster
        self._folder = folder
        self.killed = 0

    def packed(self) -> dict[str, str]:
        """Settings for executors without Tidelog."""
        bare = str(Path(sys.base_prefix) / "bin" / "python3")
        found = pack_environment(self._folder / "env.tar.gz").settings
        return {
            **found,
            "spark.pyspark.python": bare,
            "spark.pyspark.driver.python": sys.executable,
        }

    def run(self, *args: str, conf: Mapping[str, str] | None = None) -> None:
        began_s = time.monotonic()
        settings = {**self._settings, **(conf or {})}
        master = ["--master", settings.pop("spark.master")]
        master += [f"--conf={name}={value}" for name, value in settings.items()]
        with Killer(self._cluster) as killer:
            done = subprocess.run(
                [*TIDELOG, "--home", self._home.config, *args, *master],
                cwd=self._folder,
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
                check=False,
            )
        print(f"{args[:2]}: {time.monotonic() - began_s:.0f} s, {killer.killed} executors killed")
        assert done.returncode == 0, done.stderr[-3000:]
        self.killed += killer.killed


@pytest.fixture
def keys(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)


@pytest.fixture(params=["dynamodb", "cql"])
def catalog(request: pytest.FixtureRequest) -> str:
    if request.param == "dynamodb":
        rows: DynamoDb = request.getfixturevalue("dynamodb_server")
        return f"dynamodb://{new_name('kill')}?endpoint={rows.endpoint}&region={rows.region}"
    node: Cassandra = request.getfixturevalue("cassandra_server")
    return f"cql://{node.address}/{new_name('kill')}"


@pytest.fixture
def home(s3_server: S3, catalog: str, keys: None) -> Iterator[Home]:
    place = f"endpoint={s3_server.endpoint}&region={s3_server.region}"
    store = f"s3://{s3_server.fresh_bucket()}?{place}"
    with create_home(Settings(store, catalog, lease_ttl_ms=5_000))[0] as made:
        made.create_topic("t", PARTITIONS)
        for first in range(0, EVENTS, 10_000):
            for partition in range(PARTITIONS):
                numbers = range(first, first + 10_000)
                events = [Event(b"%d-%d" % (partition, n), timestamp=n * 1_000) for n in numbers]
                made.append("t", events, partition=partition)
        yield made


def in_files(home: Home, folder: str) -> Counter[tuple[int, int]]:
    """Partition and offset of all events in the Parquet files of a folder."""
    found: Counter[tuple[int, int]] = Counter()
    for info in home.store.list(f"{folder}/"):
        if info.key.endswith(".parquet"):
            table = pq.read_table(io.BytesIO(home.store.get(info.key)), partitioning=None)
            columns = (table[name].to_pylist() for name in ("partition", "offset"))
            found.update(zip(*columns, strict=True))
    return found


def in_topic(home: Home, name: str) -> Counter[bytes]:
    return Counter(
        value
        for partition in range(PARTITIONS)
        for batch in home.read_arrow(name, partition)
        for value in batch["value"].to_pylist()
    )


def check(found: Counter[T], wanted: Counter[T]) -> None:
    missing, doubled = wanted - found, found - wanted
    assert (missing.total(), doubled.total()) == (0, 0), (list(missing)[:3], list(doubled)[:3])


def test_each_event_once_though_executors_die(home: Home, tmp_path: Path) -> None:
    every = Counter((p, n) for p in range(PARTITIONS) for n in range(EVENTS))
    values = Counter(b"%d-%d" % place for place in every)
    for name in ("back", "played"):
        home.create_topic(name, PARTITIONS)
    home.archives.create("plain", source="topic:t", max_bytes=1_000_000, parser="timestamp")
    changed = {"source": "topic:t", "max_bytes": 1_000_000, "transform": "changes:even"}
    home.archives.create("changed", **changed)
    with running() as cluster:
        commands = Commands(home, cluster, tmp_path)
        commands.run("archive", "run", "plain", conf=commands.packed())
        check(in_files(home, "archives/plain/g1"), every)
        pipeline = home.archives.get("plain").info.pipeline(1)
        files = [len(each.files) for each in read_manifests(home.context, pipeline, "t/0")]
        assert max(files) > 1, "ranges were cut into tasks"
        commands.run("archive", "run", "changed")
        half = Counter(place for place in every if place[1] % 2 == 0)
        check(in_files(home, "archives/changed/g1"), half)
        commands.run("archive", "backfill", "plain", "--granularity", "hour")
        check(in_files(home, "archives/plain/g2"), every)
        commands.run("archive", "restore", "plain", "--to", "topic:back")
        check(in_topic(home, "back"), values)
        commands.run("playback", "t", "--start=earliest", "--to=topic:played", "--parallel")
        check(in_topic(home, "played"), values)
    assert commands.killed >= 5
