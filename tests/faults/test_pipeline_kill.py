"""P4 by killing: drivers and Spark workers die by SIGKILL, and each event is archived once."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import duckdb
import pytest

from tests.archive.test_archive import an_archive, drive, folder
from tests.servers.kafka import Kafka
from tests.servers.s3 import S3
from tests.servers.spark import SparkCluster
from tests.support.pipeline_kill import TOKENS
from tests.support.waiting import until
from tidelog import Event, Home
from tidelog.archive.archive import committed_files
from tidelog.codec.formats import open_format
from tidelog.home import World, create_home
from tidelog.model.archive import Archive
from tidelog.settings import Settings

DAY_S, FIRST_S = 86_400, 1_794_700_800
Place = tuple[int, int]  # partition and offset
DRIVER_S = 600  # one that takes longer hangs, even on a machine that is busy with other things
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=500)
    with create_home(settings, world=World(environ={}))[0] as made:
        yield made


def payload(number: int) -> bytes:
    return json.dumps({"at": FIRST_S + (number % 3) * DAY_S, "n": number}).encode()


class TopicSource:
    """A topic of the home."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._next = 0
        home.create_topic("t", 3)
        self.url = "topic:t"

    def add(self, count: int) -> None:
        numbers = range(self._next, self._next + count)
        self._home.append("t", [Event(payload(n), key=b"%d" % n) for n in numbers])
        self._next += count

    def check(self, found: Counter[Place]) -> None:
        heads = [self._home.partitions("t")[p].next for p in range(3)]
        assert found == Counter((p, n) for p, end in enumerate(heads) for n in range(end))


class TransactionalSource:
    """A Kafka topic that is written by transactions, a third of which is aborted."""

    def __init__(self, server: Kafka) -> None:
        self._topic = f"kill-{uuid.uuid4().hex}"
        server.create_topic(self._topic, 3)
        self._server = server
        self._producer = server.producer(transactional_id=self._topic)
        self._producer.init_transactions(30)
        self._next = 0
        self._kept: set[Place] = set()
        self.url = f"kafka://{server.bootstrap}/{self._topic}"

    def add(self, count: int) -> None:
        for part in range(3):
            sent: list[Place] = []
            self._producer.begin_transaction()
            for _ in range(count // 3):
                self._producer.produce(
                    self._topic,
                    payload(self._next),
                    partition=self._next % 3,
                    on_delivery=lambda _, m, s=sent: s.append((m.partition(), m.offset())),
                )
                self._next += 1
            self._producer.flush(30)
            if part == 1:
                self._producer.abort_transaction(30)
            else:
                self._producer.commit_transaction(30)
                self._kept.update(sent)
        self._server.settle(self._topic, 3)

    def check(self, found: Counter[Place]) -> None:
        assert found == Counter(self._kept)


class CompactedSource:
    """A Kafka topic that is compacted all the time: what is left must be there, nothing twice."""

    def __init__(self, server: Kafka) -> None:
        self._topic = f"kill-{uuid.uuid4().hex}"
        config = {
            "cleanup.policy": "compact",
            "segment.ms": "100",
            "min.cleanable.dirty.ratio": "0.01",
            "max.compaction.lag.ms": "100",
        }
        server.create_topic(self._topic, 3, config)
        self._producer = server.producer()
        self._newest: dict[bytes, Place] = {}
        self._sent: set[Place] = set()
        self._next = 0
        self.url = f"kafka://{server.bootstrap}/{self._topic}"

    def add(self, count: int) -> None:
        def delivered(_: object, message: object) -> None:
            place = (message.partition(), message.offset())  # type: ignore[attr-defined]
            self._newest[message.key()] = place  # type: ignore[attr-defined]
            self._sent.add(place)

        for _ in range(count):
            self._producer.produce(
                self._topic,
                payload(self._next),
                key=b"%d" % (self._next % 40),
                on_delivery=delivered,
            )
            self._next += 1
        self._producer.flush(30)

    def check(self, found: Counter[Place]) -> None:
        assert max(found.values()) == 1
        assert set(self._newest.values()) <= set(found) <= self._sent


Source = TopicSource | TransactionalSource | CompactedSource


def listed(home: Home, archive: Archive) -> Counter[Place]:
    """By DuckDB, over a plain listing of the folder."""
    if not list(home.store.list(f"{archive.folder()}/")):
        return Counter()
    rows = duckdb.sql(
        'SELECT "partition", "offset" '
        f"FROM read_parquet('{folder(home, archive)}/**/*.parquet', hive_partitioning = false)"
    ).fetchall()
    return Counter((partition, offset) for partition, offset in rows)


def in_manifest(home: Home, archive: Archive) -> Counter[Place]:
    """By the files that the manifest names, read from the archive's store."""
    form = open_format("parquet")
    found: Counter[Place] = Counter()
    for _, file in committed_files(home.context, archive):
        for batch in form.read(home.store.get(file.target)):
            places = zip(batch["partition"].to_pylist(), batch["offset"].to_pylist(), strict=True)
            found.update(places)
    return found


def run_dying(home: Home, archive: Archive, last: int) -> bool:
    """A driver that dies after its call number ``last``; whether it came so far."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.pipeline_kill", home.config, archive.name, str(last)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def kill_drivers(
    home: Home, source: Source, archives: list[Archive], kills: int, step: int = 1
) -> None:
    """Drivers die so often, each at a later call than the one before, from the first to the last.

    Drivers of one source make a few dozen calls; one that reached its end begins another pass.
    """
    first, killed, turn = 1, 0, 0
    call = first
    while killed < kills:
        source.add(30)
        if run_dying(home, archives[turn % len(archives)], call):
            killed, call = killed + 1, call + step
        else:
            first = first % step + 1
            call = first
        turn += 1
        for archive in archives:
            assert max(listed(home, archive).values(), default=1) == 1
    for archive in archives:
        drive(home, archive)
        source.check(listed(home, archive))
        source.check(in_manifest(home, archive))


def kill_both(home: Home, source: Source, kills: int, step: int = 1) -> None:
    """Drivers of a backup and of a partition archive die in turn, and both agree at last."""
    source.add(90)
    raw = an_archive(home, "raw", source.url)
    daily = an_archive(home, "daily", source.url, parser="json:at")
    kill_drivers(home, source, [raw, daily], kills, step)
    assert listed(home, raw) == listed(home, daily)


def test_a_topic_is_archived_once_though_drivers_die_at_any_call(home: Home) -> None:
    kill_both(home, TopicSource(home), 8, step=8)


@pytest.mark.long
def test_a_topic_is_archived_once_though_drivers_die_at_every_call(home: Home) -> None:
    kill_both(home, TopicSource(home), 80)


@pytest.mark.long
@pytest.mark.server
def test_transactions_are_archived_once_though_drivers_die(home: Home, kafka_server: Kafka) -> None:
    kill_both(home, TransactionalSource(kafka_server), 4, step=10)


@pytest.mark.server
@pytest.mark.long
def test_transactions_are_archived_once_though_drivers_die_at_every_call(
    home: Home, kafka_server: Kafka
) -> None:
    kill_both(home, TransactionalSource(kafka_server), 80)


@pytest.mark.server
@pytest.mark.long
def test_a_compacted_topic_is_archived_once_though_drivers_die(
    home: Home, kafka_server: Kafka
) -> None:
    source = CompactedSource(kafka_server)
    archive = an_archive(home, "daily", source.url, parser="json:at")
    kill_drivers(home, source, [archive], 40)


def command(home: Home, name: str, *more: str) -> list[str]:
    main = "from tidelog.cli.main import run; run()"
    return [sys.executable, "-c", main, "--home", home.config, "archive", "run", name, *more]


def wait_for_a_death(tokens: Path, drivers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Return once a worker has taken a token, or no driver is left whose workers could."""
    held = len(list(tokens.iterdir()))

    def is_over() -> bool:
        return len(list(tokens.iterdir())) < held or all(d.poll() is not None for d in drivers)

    until(is_over, DRIVER_S)


def kill_workers(
    home: Home, tmp_path: Path, kills: int, more: list[str], environ: dict[str, str]
) -> None:
    """Spark workers take tokens and die, their drivers are killed too, and two run at once."""
    source = TopicSource(home)
    archive = an_archive(
        home, "daily", source.url, parser="tests.support.pipeline_kill:KillingParser"
    )
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    chance = random.Random(7)
    environment = {**os.environ, **environ, TOKENS: str(tokens), "PYTHONPATH": str(ROOT)}
    for turn in range(0, kills, 4):
        source.add(3_000)
        for number in range(3):
            (tokens / f"{turn}-{number}").touch()
        drivers = [
            subprocess.Popen(
                command(home, "daily", *more), env=environment, stderr=subprocess.DEVNULL
            )
            for _ in range(2)
        ]
        try:
            wait_for_a_death(tokens, drivers)
            time.sleep(2 * chance.random())
            drivers[0].kill()
            for driver in drivers:
                driver.wait(DRIVER_S)
        finally:
            for driver in drivers:
                driver.kill()
                driver.wait()
    left = list(tokens.iterdir())
    turns = len(range(0, kills, 4))
    print(f"{3 * turns - len(left)} workers were killed, and {turns} drivers")
    assert len(left) < 3 * turns, "no worker has died"
    for token in left:
        token.unlink()
    drive(home, archive)
    source.check(in_manifest(home, archive))
    if home.store.url.startswith("file:"):
        source.check(listed(home, archive))


@pytest.mark.spark
def test_spark_workers_and_drivers_that_die(home: Home, tmp_path: Path) -> None:
    kill_workers(home, tmp_path, 4, ["--master", "local[2,4]"], {})


@pytest.mark.spark
@pytest.mark.long
def test_many_spark_workers_and_drivers_that_die(home: Home, tmp_path: Path) -> None:
    kill_workers(home, tmp_path, 32, ["--master", "local[2,4]"], {})


@pytest.mark.spark
@pytest.mark.server
@pytest.mark.long
def test_workers_of_a_cluster_that_die_with_an_archive_on_s3(
    spark_cluster: SparkCluster, s3_server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {
        "AWS_ACCESS_KEY_ID": s3_server.access_key,
        "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    place = f"endpoint={s3_server.endpoint}&region={s3_server.region}"
    store = f"s3://{s3_server.fresh_bucket()}?{place}"
    settings = Settings(store, str(tmp_path / "c.sqlite"), lease_ttl_ms=500)
    there = {**environ, TOKENS: str(tmp_path / "tokens"), "PYTHONPATH": str(ROOT)}
    executors = {f"spark.executorEnv.{name}": value for name, value in there.items()}
    with create_home(settings)[0] as home:
        wanted = {**spark_cluster.settings(), **executors}
        conf = [f"--conf={key}={value}" for key, value in wanted.items()]
        more = ["--master", spark_cluster.master_url, *conf]
        kill_workers(home, tmp_path, 8, more, environ)


def test_a_working_folder_that_is_deleted(home: Home, tmp_path: Path) -> None:
    source = TopicSource(home)
    archive = an_archive(home, "daily", source.url, parser="json:at")
    for _ in range(4):
        source.add(20_000)
        folder = tmp_path / uuid.uuid4().hex
        folder.mkdir()
        environment = {**os.environ, "TMPDIR": str(folder)}
        driver = subprocess.Popen(
            command(home, "daily", "--no-spark"), env=environment, stderr=subprocess.PIPE, text=True
        )
        remove_while(folder, lambda driver=driver: driver.poll() is None)  # type: ignore[misc]
        _, said = driver.communicate(timeout=60)
        assert "Traceback" not in said
    drive(home, archive)
    source.check(listed(home, archive))


def remove_while(folder: Path, holds: Callable[[], bool]) -> None:
    ended = threading.Event()
    while holds() and not ended.wait(0.01):
        shutil.rmtree(folder, ignore_errors=True)
