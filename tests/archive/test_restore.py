"""Restores: the events of an archive, back in a topic or in Kafka, byte for byte and once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from tests.archive.test_archive import an_archive, drive, fill
from tests.servers.kafka import Kafka
from tests.servers.s3 import S3
from tests.support.ranges import EVERYTHING, NAMED
from tidelog import Event, Home
from tidelog.archive.generations import begin_backfill, promote
from tidelog.archive.restore import RestoreOptions, open_restore, restore
from tidelog.archive.status import read_status
from tidelog.codec.event_batch import STORED_SCHEMA
from tidelog.connectors.by_url import source_at
from tidelog.connectors.source import SourcePartition, SourceRange
from tidelog.coordination.pipeline_rows import list_pipelines, read_partitions, read_progress
from tidelog.errors import InvalidError, NotFoundError, UnavailableError
from tidelog.home import World, create_home
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.model.archive import ArchiveFormat
from tidelog.model.pipeline import NamedPipeline
from tidelog.model.topic import partition_for
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.ranges import FilePolicy
from tidelog.pipeline.tasks import LocalWorkers, Task, TaskOutcome
from tidelog.settings import Settings

KILLS = 10
ROWS = STORED_SCHEMA.names
RUN = """
import sys
from tidelog.cli.main import main
sys.argv = ["tidelog", "--home", sys.argv[1], "archive", "restore", sys.argv[2], "--to",
            sys.argv[3], "--no-spark", "--json"]
main()
"""
IN_SMALL_RANGES = """
import os, sys
from tidelog.home import open_home
from tidelog.pipeline.driver import DriverOptions
from tidelog.pipeline.ranges import FilePolicy
from tidelog.archive.restore import RestoreOptions, restore
from tidelog.pipeline.tasks import LocalWorkers
def go_on_if_told(report):
    if report.events:  # not one that waits for what the killed one held
        print("cycle", flush=True)
        os.read(0, 1)
with open_home(sys.argv[1]) as home:
    how = DriverOptions(policy=FilePolicy(max_bytes=1), on_cycle=go_on_if_told)
    restore(home.context, RestoreOptions(sys.argv[2], sys.argv[3]), LocalWorkers(2), how)
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    with create_home(settings, world=World(environ={}))[0] as made:
        made.create_topic("t", 3)
        made.create_topic("back", 3)
        yield made


def bring(home: Home, archive: str, to: str, **more: object) -> int:
    return restore(home.context, RestoreOptions(archive, to, **more), LocalWorkers(2))  # type: ignore[arg-type]


def table(home: Home, topic: str, partition: int) -> pa.Table:
    """What a partition holds, but for the topic's name."""
    batches = list(home.read_arrow(topic, partition))
    names = ["partition", "offset", *ROWS]
    if not batches:
        return pa.table({})
    return pa.Table.from_batches(batches).select(names).combine_chunks()


def assert_same(home: Home, one: str = "t", other: str = "back") -> None:
    for partition in range(3):
        assert table(home, one, partition).equals(table(home, other, partition))
    assert home.verify(other).errors == 0


@pytest.mark.parametrize("form", ["parquet", "avro", "jsonlines"])
def test_a_backup_comes_back_byte_for_byte(home: Home, form: str) -> None:
    for partition in range(3):
        home.append("t", [*EVERYTHING, *NAMED][partition:], partition=partition)
    fill(home, 1_000)
    drive(home, an_archive(home, "raw", format=form))
    assert bring(home, "raw", "topic:back") == 1_021
    assert_same(home)
    assert bring(home, "raw", "topic:back") == 0
    assert list(home.store.list("staging/")) == []


def test_a_partition_archive_comes_back_in_order_with_its_dead_letters(home: Home) -> None:
    for start in range(0, 3_000, 1_000):
        fill(home, 1_000, first=start)
        home.append("t", [Event(b"rubbish"), Event(None, b"k")], partition=1)
    archive = an_archive(home, "daily", parser="json:at", max_bytes=20_000)
    drive(home, archive, policy=FilePolicy(max_bytes=40_000))
    assert bring(home, "daily", "topic:back") == 3_006
    assert_same(home)


def test_a_restore_goes_on_with_what_the_archive_got_since(home: Home) -> None:
    archive = an_archive(home, "raw")
    for first in (0, 700, 1_400):
        fill(home, 700, first=first)
        drive(home, archive)
        assert bring(home, "raw", "topic:back") == 700
        assert_same(home)
    (named,) = list_pipelines(home.context)
    assert named.name.startswith("restore.raw.")
    assert (named.source, named.sink) == ("archive:raw", "topic:back?partition=same")


def test_a_restore_says_what_it_has_passed_and_the_archive_got_since(home: Home) -> None:
    """A promoted generation has what was skipped before, and the restore is past that."""
    home.create_topic("other", 3)
    home.append("t", [Event(b"%d" % n) for n in range(5)], partition=0)
    archive = home.archives.create("raw", source="topic:t")
    archive.run()
    home.append("t", [Event(b"%d" % n) for n in range(5, 9)], partition=0)
    archive.seek("latest")
    home.append("t", [Event(b"9")], partition=0)
    archive.run()
    assert archive.restore(to="topic:back").events == 6
    archive.backfill(codec="gzip")
    archive.promote()
    with pytest.raises(InvalidError, match="is past `t/0` from 5 to 9, which the archive got"):
        archive.restore(to="topic:back")
    assert archive.restore(to="topic:other").events == 10
    assert_same(home, "t", "other")


def test_by_key_the_topic_may_have_any_number_of_partitions(home: Home) -> None:
    fill(home, 500)
    drive(home, an_archive(home, "raw"))
    home.create_topic("wide", 7)
    assert bring(home, "raw", "topic:wide", partition="key") == 500
    for partition in range(7):
        for event in home.read("wide", partition):
            assert partition_for(event.key or b"", 7) == partition


def test_other_targets_and_targets_made_anew_get_everything(home: Home) -> None:
    fill(home, 300)
    drive(home, an_archive(home, "raw"))
    home.create_topic("other", 3)
    assert bring(home, "raw", "topic:back") == 300
    assert bring(home, "raw", "topic:other") == 300
    home.delete_topic("back")
    home.create_topic("back", 3)
    assert bring(home, "raw", "topic:back") == 300
    assert_same(home)
    assert len({named.incarnation for named in list_pipelines(home.context)}) == 3


def test_any_generation_may_be_read_and_a_promotion_changes_nothing(home: Home) -> None:
    fill(home, 400)
    archive = an_archive(home, "raw")
    drive(home, archive)
    half = DriverOptions(policy=FilePolicy(max_bytes=60_000))
    half.on_cycle = lambda _: half.stop.set()
    first = restore(home.context, RestoreOptions("raw", "topic:back"), LocalWorkers(), half)
    rebuilt, _ = begin_backfill(home.context, "raw", ArchiveFormat(format="avro"))
    from tidelog.archive.archive import open_pipeline

    Driver(
        home.context, open_pipeline(home.context, rebuilt, LocalWorkers(), 2), DriverOptions()
    ).run()
    with pytest.raises(NotFoundError, match="has no generation 3"):
        bring(home, "raw", "topic:back", generation=3)
    second = bring(home, "raw", "topic:back", generation=2)
    promote(home.context, "raw")
    assert first + second + bring(home, "raw", "topic:back") == 400
    assert_same(home)


def test_an_archive_of_the_target_itself_does_not_feed_itself(home: Home) -> None:
    fill(home, 200)
    archive = an_archive(home, "raw")
    drive(home, archive)

    def run_the_archive(_: object) -> None:
        drive(home, archive)

    how = DriverOptions(on_cycle=run_the_archive)
    assert restore(home.context, RestoreOptions("raw", "topic:t"), LocalWorkers(), how) == 200
    assert sum(len(list(home.read("t", p))) for p in range(3)) == 400


def test_an_empty_archive_and_empty_partitions(home: Home) -> None:
    archive = an_archive(home, "raw")
    assert bring(home, "raw", "topic:back") == 0
    drive(home, archive)
    assert bring(home, "raw", "topic:back") == 0
    home.append("t", [Event(b"x")], partition=2)
    drive(home, archive)
    assert bring(home, "raw", "topic:back") == 1
    assert_same(home)


BAD = {
    "no such archive": (
        RestoreOptions("nope", "topic:back"),
        NotFoundError,
        "archive `nope`: not f",
    ),
    "no such topic": (
        RestoreOptions("raw", "topic:nope"),
        NotFoundError,
        "topic `nope`: not found",
    ),
    "no such scheme": (RestoreOptions("raw", "topik:back"), InvalidError, "did you mean `topic`"),
    "too few partitions": (
        RestoreOptions("raw", "topic:thin"),
        InvalidError,
        "thin`: has 2 partitions",
    ),
    "two ways": (
        RestoreOptions("raw", "topic:back?partition=key", partition="same"),
        InvalidError,
        "contradict",
    ),
    "no such way": (
        RestoreOptions("raw", "topic:back", partition="any"),
        InvalidError,
        "key or same",
    ),
    "no such generation": (
        RestoreOptions("raw", "topic:back", 7),
        NotFoundError,
        "no generation 7",
    ),
    "a name that is none": (RestoreOptions("../x", "topic:back"), InvalidError, "archive name"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_restored_is_told_and_nothing_is_made(home: Home, case: str) -> None:
    wanted, kind, message = BAD[case]
    fill(home, 10)
    drive(home, an_archive(home, "raw"))
    home.create_topic("thin", 2)
    with pytest.raises(kind, match=message):
        restore(home.context, wanted, LocalWorkers())
    assert list(list_pipelines(home.context)) == []


def test_another_way_to_place_events_is_refused_once_it_has_begun(home: Home) -> None:
    fill(home, 10)
    drive(home, an_archive(home, "raw"))
    bring(home, "raw", "topic:back")
    with pytest.raises(InvalidError, match="was begun with partition same: continue so"):
        bring(home, "raw", "topic:back", partition="key")
    assert bring(home, "raw", "topic:back?partition=same") == 0


def test_a_topic_that_goes_away_during_a_restore_is_told(home: Home) -> None:
    fill(home, 1_000)
    drive(home, an_archive(home, "raw"))
    workers = Interfering(lambda: home.delete_topic("back"))
    with pytest.raises(NotFoundError, match="topic `back`: not found"):
        restore(home.context, RestoreOptions("raw", "topic:back"), workers)


class Interfering(LocalWorkers):
    """Something happens after the first range was staged, and before it is published."""

    def __init__(self, what: object) -> None:
        super().__init__()
        self._what = what

    def run(self, tasks: list[Task]) -> Iterator[TaskOutcome]:  # type: ignore[override]
        outcomes = list(super().run(tasks))
        self._what()  # type: ignore[operator]
        self._what = lambda: None
        return iter(outcomes)


def test_sweeps_leave_a_restore_alone_and_take_what_a_dead_one_left(home: Home) -> None:
    fill(home, 600)
    drive(home, an_archive(home, "raw"))

    def sweep() -> None:
        home.sweep(0)
        sweep_archives(home.context, 0)

    wanted = RestoreOptions("raw", "topic:back")
    driver = Driver(
        home.context, open_restore(home.context, wanted, Interfering(_fall)), DriverOptions()
    )
    with pytest.raises(UnavailableError, match="the machine is gone"):
        driver.run()
    assert list(home.store.list("staging/"))
    restore(home.context, wanted, Interfering(sweep))
    assert_same(home)
    fill(home, 1, first=600)
    sweep()
    assert list(home.store.list("staging/")) == []


def _fall() -> None:
    raise UnavailableError("the machine is gone")


def kill_restores(home: Home, archive: str, to: str, seconds: float) -> None:
    """Two at once, killed again and again while they work; then one that finishes.

    They are killed some cycles, and up to so many seconds, after one of them has begun. However
    late that is, they have not finished: they wait after some more cycles.
    """
    chance = random.Random(20261115)
    progress: list[int] = []
    for _ in range(KILLS // 2):
        command = [sys.executable, "-c", IN_SMALL_RANGES, home.config, archive, to]
        (reading, writing), (allowed, allowing) = os.pipe(), os.pipe()
        runs = [subprocess.Popen(command, stdin=allowed, stdout=writing) for _ in range(2)]
        cycles = chance.randrange(1, 3)
        os.write(allowing, b"." * cycles)
        for _ in range(cycles):
            os.read(reading, len(b"cycle\n"))  # of the one that works; the other stands by
        time.sleep(chance.random() * seconds)
        for run in runs:
            run.send_signal(signal.SIGKILL)
            run.wait()
        for end in (reading, writing, allowed, allowing):
            os.close(end)
        home.sweep(0)
        sweep_archives(home.context, 0)
        progress.append(done_by_restores(home))
    rest = bring(home, archive, to)
    assert rest == done_by_restores(home) - progress[-1]
    assert len({0, *progress, progress[-1] + rest}) > 3, "too few were killed at work"
    assert bring(home, archive, to) == 0


def done_by_restores(home: Home) -> int:
    """How many events their pipelines have committed."""
    found = [
        read_progress(home.context, named.incarnation, partition)
        for named in list_pipelines(home.context)
        for partition in read_partitions(home.context, named.incarnation)
    ]
    return sum(head.ordinal for head in found if head is not None)


@pytest.mark.long
def test_restores_that_are_killed_bring_each_event_once(home: Home) -> None:
    fill(home, 30_000)
    archive = an_archive(home, "daily", parser="json:at")
    drive(home, archive, policy=FilePolicy(max_bytes=1))
    kill_restores(home, "daily", "topic:back", 0.06)
    assert_same(home)
    sweep_archives(home.context, 0)
    assert list(home.store.list("staging/")) == []


def test_two_restores_at_once_in_one_process(home: Home) -> None:
    # Nobody dies here: who stalls for less than the time to live must not be taken for dead.
    home.context = replace(
        home.context, log_settings=replace(home.context.log_settings, lease_ttl_ms=60_000)
    )
    fill(home, 5_000)
    drive(home, an_archive(home, "raw"))
    brought: list[int] = []
    how = DriverOptions(policy=FilePolicy(max_bytes=50_000))

    def run() -> None:
        brought.append(
            restore(home.context, RestoreOptions("raw", "topic:back"), LocalWorkers(), how)
        )

    runs = [threading.Thread(target=run) for _ in range(2)]
    for each in runs:
        each.start()
    for each in runs:
        each.join()
    assert sum(brought) == 5_000
    assert_same(home)


def kafka_topic(server: Kafka, partitions: int = 3) -> str:
    name = f"restored-{uuid.uuid4().hex}"
    settings = {"retention.ms": "-1", "message.timestamp.after.max.ms": str((1 << 63) - 1)}
    server.create_topic(name, partitions, settings)
    return f"kafka://{server.bootstrap}/{name}"


def kafka_rows(home: Home, url: str) -> list[list[dict[str, object]]]:
    """What is committed in each partition, as events."""
    source = source_at(home.context, url)
    places = [SourcePartition(url.rpartition("/")[2], str(p)) for p in range(3)]
    bounds = source.bounds(places)
    return [
        [
            row
            for chunk in source.read(SourceRange(place, "0", bounds[place].end))
            for row in chunk.batch.select(ROWS).to_pylist()
        ]
        for place in places
    ]


@pytest.mark.server
@pytest.mark.long
def test_restores_into_kafka_that_are_killed_bring_each_event_once(
    home: Home, kafka_server: Kafka
) -> None:
    fill(home, 30_000)
    drive(home, an_archive(home, "raw"), policy=FilePolicy(max_bytes=1))
    url = kafka_topic(kafka_server)
    kill_restores(home, "raw", url, 0.3)
    assert_same_in_kafka(home, url, 30_000)


@pytest.mark.server
def test_into_kafka_byte_for_byte(home: Home, kafka_server: Kafka) -> None:
    home.append("t", EVERYTHING, partition=1)
    fill(home, 2_000)
    drive(home, an_archive(home, "raw"))
    url = kafka_topic(kafka_server)
    assert bring(home, "raw", url) == 2_005
    assert bring(home, "raw", url) == 0
    assert_same_in_kafka(home, url, 2_005)


def assert_same_in_kafka(home: Home, url: str, count: int) -> None:
    deadline = time.monotonic() + 90
    while sum(map(len, kafka_rows(home, url))) < count:  # the brokers' markers come a bit later
        assert time.monotonic() < deadline
        time.sleep(0.2)
    expected = [table(home, "t", p).select(ROWS).to_pylist() for p in range(3)]
    assert kafka_rows(home, url) == expected


@pytest.mark.server
def test_from_kafka_and_back_into_kafka_by_key(home: Home, kafka_server: Kafka) -> None:
    one, other = kafka_topic(kafka_server), kafka_topic(kafka_server)
    fill(home, 1_000)
    drive(home, an_archive(home, "raw"))
    bring(home, "raw", one, partition="key")
    again = an_archive(home, "again", one)
    while sum(each.events for each in read_status(home.context, again).partitions) < 1_000:
        drive(home, again)
    bring(home, "again", other, partition="key")
    deadline = time.monotonic() + 90
    while sum(map(len, kafka_rows(home, other))) < 1_000:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert kafka_rows(home, other) == kafka_rows(home, one)


def test_the_command_tells_its_progress(home: Home) -> None:
    fill(home, 100)
    drive(home, an_archive(home, "raw"))
    command = [sys.executable, "-c", RUN, home.config, "raw", "topic:back"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    told = {"events": 100, "left_out": 0, "dead": 0}
    assert lines[-1] == {"archive": "raw", "to": "topic:back", **told}
    assert sum(line["events"] for line in lines[:-1]) == 100
    assert Counter(line["pipeline"] for line in lines[:-1]) == {"restore raw": 3}
    command[-1] = "topic:nope"
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "topic `nope`: not found" in failed.stderr
    assert isinstance(next(list_pipelines(home.context)), NamedPipeline)


@pytest.mark.server
def test_a_home_on_s3(s3_server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {
        "AWS_ACCESS_KEY_ID": s3_server.access_key,
        "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    place = f"endpoint={s3_server.endpoint}&region={s3_server.region}"
    store = f"s3://{s3_server.fresh_bucket()}?{place}"
    settings = Settings(store, str(tmp_path / "c.sqlite"), lease_ttl_ms=500)
    with create_home(settings, world=World(environ=environ))[0] as home:
        home.create_topic("t", 3)
        home.create_topic("back", 3)
        fill(home, 2_000)
        drive(home, an_archive(home, "raw"))
        assert bring(home, "raw", "topic:back") == 2_000
        assert bring(home, "raw", "topic:back") == 0
        assert_same(home)
        assert list(home.store.list("staging/")) == []
