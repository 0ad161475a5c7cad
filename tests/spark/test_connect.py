"""Spark Connect: the same pipelines, maintenance and playback, in a process without Java."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

import tidelog
from tests.servers.base import free_port
from tests.support.child_processes import ROOT
from tidelog import Event

pytestmark = pytest.mark.spark

EVENTS = 600
SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
CLIENT = """
import sys
import tidelog
import tidelog.spark
from pyspark.sql import SparkSession

def twice(events):
    from pyspark.sql import functions
    value = functions.concat("value", "value").cast("binary")
    return events.withColumn("value", value)

def work(home, master):
    archive = home.archives.create("plain", source="topic:t")
    assert archive.run(spark=master).events == 600
    assert archive.verify(deep=True, spark=master).problem_count == 0
    changed = home.archives.create("changed", source="topic:t", transform="connect_client:twice")
    assert changed.run(spark=master).events == 600
    played = home.playback("t", "earliest", "latest", to="file:" + sys.argv[3], spark=master)
    assert played.events == 600, played
    session = SparkSession.builder.remote(master).getOrCreate()
    tidelog.spark.register(session)
    events = session.read.format("tidelog").options(home=sys.argv[1], topic="t").load()
    assert events.where("offset >= 0").count() == 600

if __name__ == "__main__":
    with tidelog.open(sys.argv[1]) as opened:
        work(opened, sys.argv[2])
"""

RESTARTS = """
import sys
from pathlib import Path
from tests.spark.test_connect import connect_server
from tidelog.spark.session import LiveSession, open_spark

folder, port = Path(sys.argv[1]), int(sys.argv[2])

def count():
    return live.get().range(7).count()

with connect_server(folder, port) as url:
    live = LiveSession(None, lambda: open_spark(url, "x"))
    assert count() == 7
    first = live.get()
    assert live.get() is first
with connect_server(folder, port):
    try:
        count()
    except Exception as exc:  # as a job of the old session, which a driver does again
        print(repr(exc)[:200])
    assert count() == 7
    assert live.get() is not first
"""


@contextlib.contextmanager
def connect_server(folder: Path, port: int) -> Iterator[str]:
    """A server of Spark Connect on ``local[2]``."""
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    given = [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]
    command = [str(submit), "--master", "local[2]", *given, "--class", SERVER, "spark-internal"]
    environ = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    environ["PYTHONPATH"] = f"{folder}:{ROOT}"
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, env=environ, start_new_session=True
        )
    try:
        until_s = time.monotonic() + 180
        while True:
            assert server.poll() is None, (folder / "server.log").read_text()[-2000:]
            assert time.monotonic() < until_s, "it did not start"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.2)
        yield f"sc://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(60)


def run_client(folder: Path, script: str, *arguments: str) -> None:
    """Runs a process that finds no Java."""
    path = folder / "connect_client.py"
    path.write_text(script)
    environ = {key: each for key, each in os.environ.items() if key != "JAVA_HOME"}
    environ |= {"PYTHONPATH": f"{folder}:{ROOT}", "PATH": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environ,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_everything_runs_on_spark_connect(tmp_path: Path) -> None:
    with tidelog.create_home(tmp_path / "home")[0] as home:
        home.create_topic("t", 2)
        home.append("t", [Event(b"%d" % n, id=f"id-{n}") for n in range(EVENTS)])
    with connect_server(tmp_path, free_port()) as url:
        arguments = [str(tmp_path / "home"), url, str(tmp_path / "played")]
        run_client(tmp_path, CLIENT, *arguments)
    with tidelog.open(tmp_path / "home") as home:
        for name, times in (("plain", 1), ("changed", 2)):
            values = [
                value
                for batch in home.archives.get(name).read()
                for value in batch.column("value").to_pylist()
            ]
            assert sorted(values) == sorted(b"%d" % n * times for n in range(EVENTS)), name


@pytest.mark.long
def test_server_that_was_started_again_gets_a_new_session(tmp_path: Path) -> None:
    path, java = os.environ["PATH"], os.environ.get("JAVA_HOME", "")
    script = f"import os\nos.environ.update(PATH={path!r}, JAVA_HOME={java!r})\n{RESTARTS}"
    run_client(tmp_path, script, str(tmp_path), str(free_port()))
