"""Sources that go away and come back, on real servers: drivers that follow wait, and resume."""

from __future__ import annotations

import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.pipeline.test_failures import an_archive_of
from tests.servers import kafka, s3
from tests.support.archive_look import a_home
from tests.support.cli_run import start
from tests.support.homes import a_store
from tests.support.waiting import until
from tidelog import Home
from tidelog.archive.archive import open_pipeline
from tidelog.archive.status import read_status
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.errors import NotFoundError
from tidelog.home import create_home
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.failures import read_failures
from tidelog.pipeline.ranges import FilePolicy
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import load_settings

pytestmark = pytest.mark.server


@contextmanager
def followed(folder: Path, *args: str) -> Iterator[list[str]]:
    """A command that follows, in a process of its own; the lines that it says."""
    process = start(*args, cwd=folder, stdout=subprocess.DEVNULL)
    said: list[str] = []

    def hear() -> None:
        said.extend(line.decode() for line in process.stderr or ())

    hearing = threading.Thread(target=hear)
    hearing.start()
    try:
        yield said
        assert process.poll() is None, said
    finally:
        process.terminate()
        process.wait(120)
        hearing.join()
        assert process.stderr is not None
        process.stderr.close()


def archived(home: Home, name: str) -> int:
    """Counts events without asking the source."""
    found = home.archives.get(name).info
    head = read_progress(home.context, found.pipeline(), f"{found.source.rpartition('/')[2]}/0")
    return head.ordinal if head else 0


def produce(server: kafka.Kafka, topic: str, count: int) -> None:
    producer = server.producer()
    for number in range(count):
        producer.produce(topic, b"%d" % number)
    assert producer.flush(60) == 0


@pytest.mark.long
def test_archive_and_pump_outlast_a_kafka_that_is_stopped_and_started(tmp_path: Path) -> None:
    settings = load_settings(str(tmp_path / "home"), {}, tmp_path)
    with kafka.running(session_ms=6_000) as server, create_home(settings)[0] as home:
        topic = f"away-{uuid.uuid4().hex[:8]}"
        server.create_topic(topic)
        source = f"kafka://{server.bootstrap}/{topic}"
        an_archive_of(home, source)
        home.create_topic("copy")
        place = str(tmp_path / "home")
        run = ("--home", place, "archive", "run", "raw", "--follow", "--no-spark")
        pump = ("--home", place, "pump", source, "--topic", "copy", "--follow", "--no-spark")
        with followed(tmp_path, *run) as archive_said, followed(tmp_path, *pump) as pump_said:
            produce(server, topic, 10)
            until(lambda: archived(home, "raw") == 10, 120, lambda: "".join(archive_said))
            until(lambda: len(list(home.read("copy"))) == 10, 120, lambda: "".join(pump_said))
            server.process.stop()
            for said in (archive_said, pump_said):
                until(lambda said=said: any("retrying in" in line for line in said), 240)  # type: ignore[misc]
            pipeline = home.archives.get("raw").info.pipeline()
            until(lambda: "" in read_failures(home.context, pipeline))
            server.process.start()
            produce(server, topic, 10)
            until(lambda: archived(home, "raw") == 20, 240, lambda: "".join(archive_said))
            until(lambda: len(list(home.read("copy"))) == 20, 240, lambda: "".join(pump_said))
            for said in (archive_said, pump_said):
                assert any("answers again" in line for line in said)
            until(lambda: "" not in read_failures(home.context, pipeline))


def test_topic_that_does_not_exist_at_the_start_is_refused_at_once(
    tmp_path: Path, kafka_server: kafka.Kafka
) -> None:
    with a_home(tmp_path) as home:
        topic = f"gone-{uuid.uuid4().hex[:8]}"
        kafka_server.create_topic(topic)
        archive = an_archive_of(home, f"kafka://{kafka_server.bootstrap}/{topic}")
        admin = kafka_server.admin()  # lives until the answer is there
        admin.delete_topics([topic])[topic].result()
        until(lambda: kafka_server.partitions(topic) == 0)
        pipeline = open_pipeline(home.context, archive, LocalWorkers())
        with pytest.raises(NotFoundError, match="create it, or fix the name"):
            Driver(home.context, pipeline, DriverOptions(follow=True)).run()


def test_archive_outlasts_an_s3_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3.running() as server, a_home(tmp_path) as home:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
        bucket = server.fresh_bucket()
        access = f"endpoint={server.endpoint}&region={server.region}"
        store = a_store(f"s3://{bucket}?{access}")
        store.put("in/a.log", b"1\n2\n3\n")
        archive = an_archive_of(home, f"file:s3://{bucket}/in?{access}")
        stop, seen = threading.Event(), threading.Event()
        how = DriverOptions(
            follow=True,
            policy=FilePolicy(max_age_ms=20),
            stop=stop,
            on_outage=lambda *_: seen.set(),
        )
        driver = Driver(home.context, open_pipeline(home.context, archive, LocalWorkers()), how)
        thread = threading.Thread(target=driver.run)
        thread.start()
        try:
            until(lambda: sum(p.events for p in read_status(home.context, archive).partitions) == 3)
            server.process.stop()
            assert seen.wait(120)
            assert "" in read_failures(home.context, archive.pipeline())
            server.process.start()
            store.put("in/b.log", b"4\n")
            until(
                lambda: sum(p.events for p in read_status(home.context, archive).partitions) == 4,
                120,
            )
            assert thread.is_alive()
        finally:
            stop.set()
            thread.join(120)
