"""Pipelines that read Kinesis: shards that split and merge, losses, and drivers that are killed."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.connectors.kinesis.test_source import Stream
from tests.servers.moto import KEYS, Moto
from tests.support.kinesis_server import FakeKinesis, running_kinesis
from tests.support.named_pipelines import create_pipeline, open_named
from tests.support.waiting import until
from tidelog import Home
from tidelog.archive.archive import committed_files, create_archive, open_pipeline
from tidelog.archive.status import read_status
from tidelog.connectors.by_url import source_at
from tidelog.connectors.source import waits
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.errors import InvalidError
from tidelog.home import World, create_home
from tidelog.model import layout
from tidelog.model.archive import Archive, ArchiveFormat, Start
from tidelog.model.event import to_iso
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.gaps import LostError
from tidelog.pipeline.pipeline import CycleReport
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.ranges import FilePolicy
from tidelog.pipeline.share import request_flush, wait_until_done
from tidelog.pipeline.tasks import LocalWorkers, TaskOutcome
from tidelog.settings import Settings
from tidelog.testing.scheduler import Crash

HOUR_MS = 3_600_000
ROOT = Path(__file__).parents[3]
RUN = """
import sys
from tidelog.cli.main import main
sys.argv = ["tidelog", "--home", sys.argv[1], "archive", "run", sys.argv[2], "--no-spark"]
main()
"""


@pytest.fixture
def fake() -> Iterator[FakeKinesis]:
    with running_kinesis() as service:
        yield service


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    with create_home(settings, world=World(environ=KEYS))[0] as made:
        yield made


def an_archive(home: Home, source: str, name: str = "a", **written_as: Any) -> Archive:
    wanted = Archive(
        name=name,
        incarnation=home.context.ids.new(),
        source=source,
        kind="partition" if "parser" in written_as else "backup",
        store=home.store.url,
        root=f"archives/{name}",
        created_ms=0,
        formats={1: ArchiveFormat(**written_as)},
    )
    return create_archive(home.context, wanted)


def drive(home: Home, archive: Archive, **how: Any) -> int:
    pipeline = open_pipeline(home.context, archive, LocalWorkers(2))
    return Driver(home.context, pipeline, DriverOptions(**how)).run()


def archived(home: Home, archive: Archive) -> list[tuple[int, int, str, int]]:
    """Shard, offset, key and number of every event that a recursive listing finds, in order."""
    folder = f"{home.store.url.removeprefix('file://')}/{archive.root}/g1"
    if not list(home.store.list(f"{archive.root}/g1/")):
        return []
    rows = duckdb.sql(
        f"SELECT partition, \"offset\", key, value FROM read_parquet('{folder}/**/*.parquet') "
        'ORDER BY partition, "offset"'
    ).fetchall()
    return [(shard, offset, key.decode(), int(value)) for shard, offset, key, value in rows]


def counted(home: Home, archive: Archive) -> Counter[int]:
    return Counter(number for *_, number in archived(home, archive))


def put(stream: Stream, numbers: range) -> None:
    stream.put([(f"key-{n % 17}", b"%d" % n) for n in numbers])


def split(stream: Stream, number: int, border: int) -> None:
    stream.client.split_shard(
        StreamName=stream.name,
        ShardToSplit=f"shardId-{number:012}",
        NewStartingHashKey=str(border),
    )


def merge(stream: Stream, one: int, other: int) -> None:
    stream.client.merge_shards(
        StreamName=stream.name,
        ShardToMerge=f"shardId-{one:012}",
        AdjacentShardToMerge=f"shardId-{other:012}",
    )


@pytest.mark.server
def test_moto_is_archived_once_and_a_drained_stream_ends_the_run(
    home: Home, moto_server: Moto
) -> None:
    stream = Stream(moto_server.endpoint, shards=3)
    archive = an_archive(home, stream.url())
    assert drive(home, archive) == 0
    put(stream, range(1_200))
    assert drive(home, archive) == 1_200
    assert drive(home, archive) == 0
    put(stream, range(1_200, 1_500))
    assert drive(home, archive) == 300
    assert counted(home, archive) == Counter(range(1_500))
    by_shard = defaultdict(list)
    for shard, offset, *_ in archived(home, archive):
        by_shard[shard].append(offset)
    assert all(offsets == list(range(len(offsets))) for offsets in by_shard.values())
    assert list(home.store.list("staging/")) == []


def test_shards_that_split_and_merge_are_followed_in_order(home: Home, fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint, shards=2)
    archive = an_archive(home, stream.url())
    put(stream, range(500))
    assert drive(home, archive) == 500
    put(stream, range(500, 1_000))
    split(stream, 0, 2**126)
    put(stream, range(1_000, 1_500))
    merge(stream, 3, 1)
    put(stream, range(1_500, 2_000))
    split(stream, 4, 2**127)
    put(stream, range(2_000, 2_500))
    committed: list[tuple[str, str]] = []

    def note(report: CycleReport) -> None:
        committed.extend((p.name, m.end) for p, m in report.committed.items())

    assert drive(home, archive, on_cycle=note) == 2_000
    done: set[str] = set()
    parents = {"2": {"0"}, "3": {"0"}, "4": {"3", "1"}, "5": {"4"}, "6": {"4"}}
    for name, end in committed:
        assert parents.get(name, set()) <= done, f"shard {name} was begun too early"
        if end == "end":
            done.add(name)
    assert done == {"0", "1", "3", "4"}
    assert counted(home, archive) == Counter(range(2_500))
    before = counted(home, archive)
    assert drive(home, archive) == 0
    assert counted(home, archive) == before


def test_driver_waits_for_parents_that_another_driver_reads(home: Home, fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint)
    archive = an_archive(home, stream.url())
    put(stream, range(200))
    for number, border in ((0, 2**127), (1, 2**126), (2, 2**127 + 2**126)):
        split(stream, number, border)
        put(stream, range(200 * (number + 1), 200 * (number + 2)))
    stop = threading.Event()
    drivers = [
        threading.Thread(
            target=drive,
            args=(home, archive),
            kwargs={"follow": True, "policy": FilePolicy(max_age_ms=1), "stop": stop},
        )
        for _ in range(2)
    ]
    for each in drivers:
        each.start()
    try:
        until(lambda: counted(home, archive) == Counter(range(800)))
    finally:
        stop.set()
        for each in drivers:
            each.join()
    assert counted(home, archive) == Counter(range(800))


def test_a_follower_picks_up_new_shards_and_reads_on_without_a_pause(
    home: Home, fake: FakeKinesis
) -> None:
    stream = Stream(fake.endpoint)
    archive = an_archive(home, stream.url())
    put(stream, range(5_000))
    with following(home, archive, age_s=3_600) as reports:
        request_flush(
            home.context, archive.pipeline()
        )  # begins; by age, each range would take an hour
        until(lambda: sum(1 for report in reports if report.events) >= 5)
        assert len(archived(home, archive)) == 5_000
    with following(home, archive, age_s=1):
        split(stream, 0, 2**127)
        put(stream, range(5_000, 5_100))
        until(lambda: len(archived(home, archive)) == 5_100)
    assert counted(home, archive) == Counter(range(5_100))


@contextlib.contextmanager
def following(home: Home, archive: Archive, age_s: int) -> Iterator[list[CycleReport]]:
    """A driver that follows, in ranges of a thousand events; its cycles, of which one is over."""
    stop, reports = threading.Event(), list[CycleReport]()
    policy = FilePolicy(max_bytes=1, max_age_ms=age_s * 1000)
    how = {"follow": True, "stop": stop, "policy": policy, "on_cycle": reports.append}
    thread = threading.Thread(target=drive, args=(home, archive), kwargs=how)
    thread.start()
    try:
        until(lambda: reports)
        yield reports
    finally:
        stop.set()
        thread.join()


def test_a_flush_is_done_when_nothing_waits_that_came_before_it(
    home: Home, fake: FakeKinesis
) -> None:
    stream = Stream(fake.endpoint, shards=2)
    archive = an_archive(home, stream.url())
    stop, first = threading.Event(), threading.Event()
    how = {"follow": True, "stop": stop, "on_cycle": lambda _: first.set()}
    thread = threading.Thread(target=drive, args=(home, archive), kwargs=how)
    thread.start()
    try:
        first.wait(60)
        put(stream, range(100))
        source = source_at(home.context, archive.source)
        ends = {p.text: held.end for p, held in source.bounds(source.partitions()).items()}
        left = functools.partial(waits, source)
        assert wait_until_done(home.context, archive.pipeline(), ends, left, 0.1) != []
        request_flush(home.context, archive.pipeline())
        assert wait_until_done(home.context, archive.pipeline(), ends, left, 60) == []
    finally:
        stop.set()
        thread.join()
    assert counted(home, archive) == Counter(range(100))


def test_a_loss_stops_the_archive_until_a_person_accepts_it(home: Home, fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint)
    archive = an_archive(home, stream.url())
    put(stream, range(10))
    drive(home, archive)
    put(stream, range(10, 20))
    fake.ahead_ms += 25 * HOUR_MS
    put(stream, range(20, 30))
    with pytest.raises(LostError, match="--accept-loss"):
        drive(home, archive)
    assert read_status(home.context, archive).partitions[0].lost_to
    assert drive(home, archive, accept_loss=True) == 10
    assert counted(home, archive) == Counter([*range(10), *range(20, 30)])
    (gap,) = [
        gap for manifest, _ in committed_files(home.context, archive) for gap in manifest.lost
    ]
    assert gap.start.startswith("after:")
    assert drive(home, archive) == 0


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_accepted_loss_reads_nothing_again_that_kinesis_deletes_late(
    home: Home, fake: FakeKinesis, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    monkeypatch.setattr(fake, "_stream", fake._found)  # it deletes nothing yet
    stream = Stream(fake.endpoint)
    if start == "latest":
        put(stream, range(-5, 0))
    fake.ahead_ms += 1_000
    archive = home.archives.create("a", source=stream.url(), start=start)
    fake.ahead_ms += 2_000
    if start == "earliest":
        put(stream, range(10))
    archive.run()
    fake.ahead_ms += 25 * HOUR_MS
    put(stream, range(10, 20))
    with pytest.raises(LostError, match="--accept-loss"):
        archive.run()
    assert archive.run(accept_loss=True).events == 10
    assert archive.run().events == 0
    assert counted(home, archive.info) == Counter(range(10 if start == "latest" else 0, 20))
    fake.ahead_ms += 20 * HOUR_MS
    put(stream, range(20, 25))
    assert archive.run().events == 5


def test_an_intent_whose_range_is_gone_does_not_stand_in_the_way(
    home: Home, fake: FakeKinesis
) -> None:
    stream = Stream(fake.endpoint)
    archive = an_archive(home, stream.url())
    put(stream, range(10))
    drive(home, archive)
    put(stream, range(10, 20))

    class Dying:
        def run(self, tasks: Any) -> Iterator[TaskOutcome]:
            raise KeyboardInterrupt

    pipeline = open_pipeline(home.context, archive, Dying())
    with pytest.raises(KeyboardInterrupt):
        Driver(home.context, pipeline, DriverOptions()).run()
    where = layout.pipeline_partition(archive.pipeline(), f"{stream.name}/0")
    assert home.catalog.get(where, "intent") is not None
    fake.ahead_ms += 25 * HOUR_MS
    put(stream, range(20, 30))
    for _ in range(2):
        with pytest.raises((LostError, KeyError), match="holds nothing"):
            drive(home, archive)
    assert drive(home, archive, accept_loss=True) == 10
    assert counted(home, archive) == Counter([*range(10), *range(20, 30)])


def test_a_parent_that_is_gone_is_an_obstacle_only_if_it_took_events_along(
    home: Home, fake: FakeKinesis
) -> None:
    stream = Stream(fake.endpoint)
    early = an_archive(home, stream.url(), "early")
    put(stream, range(10))
    drive(home, early)
    put(stream, range(10, 20))
    split(stream, 0, 2**127)
    fake.ahead_ms += 25 * HOUR_MS
    put(stream, range(20, 30))
    fresh = an_archive(home, stream.url(), "fresh")
    assert drive(home, fresh) == 10  # shard 0 is gone, and nobody misses it
    for _ in range(2):
        with pytest.raises(LostError, match="gone from the source, and was read up to"):
            drive(home, early)
    assert drive(home, early, accept_loss=True) == 10
    put(stream, range(30, 40))
    assert drive(home, early) == 10  # accepted once for all
    assert counted(home, early) == Counter([*range(10), *range(20, 40)])


def test_a_stream_that_was_made_anew_is_not_read_on(home: Home, fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint)
    archive = an_archive(home, stream.url())
    put(stream, range(10))
    drive(home, archive)
    stream.client.delete_stream(StreamName=stream.name)
    time.sleep(0.01)
    stream.client.create_stream(StreamName=stream.name, ShardCount=1)
    put(stream, range(10))
    with pytest.raises(LostError, match="was deleted and made again"):
        drive(home, archive)


def test_newest_is_the_time_at_which_an_archive_was_made(home: Home, fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint)
    put(stream, range(10))
    time.sleep(1.1)
    archive = an_archive(home, stream.url("&start=newest"))
    assert "newest" not in home.archives.get("a").info.source
    put(stream, range(10, 20))
    split(stream, 0, 2**127)
    put(stream, range(20, 30))
    assert drive(home, archive) == 20
    assert counted(home, archive) == Counter(range(10, 30))


def test_a_run_from_the_latest_does_not_skip_what_children_hold(
    home: Home, fake: FakeKinesis
) -> None:
    stream = Stream(fake.endpoint)
    split(stream, 0, 2**127)
    put(stream, range(10))
    fake.ahead_ms += 5_000
    archive = an_archive(home, stream.url())
    assert drive(home, archive, start="latest") == 0
    fake.ahead_ms += 5_000
    put(stream, range(10, 20))
    split(stream, 1, 2**126)
    put(stream, range(20, 30))
    fake.ahead_ms += 5_000
    assert drive(home, archive, start="latest") == 20
    assert counted(home, archive) == Counter(range(10, 30))


def test_records_that_expire_before_the_first_run_from_the_latest_are_a_loss(
    home: Home, fake: FakeKinesis
) -> None:
    stream = Stream(fake.endpoint)
    fake.ahead_ms += 5_000
    archive = home.archives.create("late", source=stream.url(), start="latest")
    fake.ahead_ms += 5_000
    put(stream, range(5))
    fake.ahead_ms += 25 * HOUR_MS
    put(stream, range(5, 10))
    with pytest.raises(LostError, match="--accept-loss"):
        archive.run()
    assert archive.run(accept_loss=True).events == 5
    account = archive.status().partitions[0].account
    assert account is not None
    assert [gap.reason for gap in account.gaps] == ["retention"]


def die_before_a_commit(home: Home, archive: Archive) -> None:
    """Runs a driver that dies when it has claimed a shard and read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cycle, "_record", crash)
        with pytest.raises(Crash):
            drive(home, archive)


def crash(*_: object) -> None:
    raise Crash


def test_records_that_expire_before_the_first_commit_are_a_loss(
    home: Home, fake: FakeKinesis
) -> None:
    stream = Stream(fake.endpoint)
    archive = an_archive(home, stream.url())
    put(stream, range(5))
    die_before_a_commit(home, archive)
    fake.ahead_ms += 25 * HOUR_MS
    put(stream, range(5, 9))
    with pytest.raises(LostError, match="what is between is lost"):
        drive(home, archive)
    assert drive(home, archive, accept_loss=True) == 4
    (status,) = read_status(home.context, archive).partitions
    assert status.account is not None
    assert [gap.reason for gap in status.account.gaps] == ["retention"]


def test_new_shards_lose_nothing_while_their_parents_are_there(
    home: Home, fake: FakeKinesis
) -> None:
    stream = Stream(fake.endpoint)
    archive = an_archive(home, stream.url())
    fake.ahead_ms += 30 * HOUR_MS
    put(stream, range(5))
    assert drive(home, archive) == 5
    split(stream, 0, 2**127)
    put(stream, range(5, 40))
    die_before_a_commit(home, archive)
    fake.ahead_ms += 2 * HOUR_MS
    drive(home, archive)
    assert counted(home, archive) == Counter(range(40))


def test_seek_skips_what_waits_and_reads_again_only_from_the_oldest(
    home: Home, fake: FakeKinesis
) -> None:
    stream = Stream(fake.endpoint)
    archive = home.archives.create("late", source=stream.url())
    home.create_topic("to")
    pump = home.pumps.create("copy", source=stream.url(), topic="to")
    put(stream, range(10))
    assert archive.run().events == pump.run().events == 10
    put(stream, range(10, 20))
    for each in (archive, pump):
        each.seek("latest")
        with pytest.raises(InvalidError, match=r"positions of .* have no known order"):
            each.seek("at:5")
    fake.ahead_ms += 5_000
    put(stream, range(20, 30))
    assert archive.run().events == pump.run().events == 10
    assert counted(home, archive.reload()) == Counter([*range(10), *range(20, 30)])
    account = archive.status().partitions[0].account
    assert account is not None
    assert [gap.reason for gap in account.gaps] == ["seek"]
    with pytest.raises(InvalidError, match="holds each event once"):
        archive.seek("earliest")
    pump.seek("earliest", again=True)
    assert pump.run().events == 30


def test_seek_before_the_first_run_can_be_undone(home: Home, fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint)
    archive = home.archives.create("late", source=stream.url())
    put(stream, range(10))
    fake.ahead_ms += 5_000
    archive.seek("latest")
    assert [move.again for move in archive.plan_seek("earliest")] == [0]
    archive.seek("earliest")
    assert archive.run().events == 10
    assert archive.verify(deep=True).problem_count == 0
    with pytest.raises(InvalidError, match="holds each event once"):
        archive.seek("earliest")


def test_a_pump_into_a_topic_stores_each_record_once(home: Home, fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint, shards=2)
    home.create_topic("t", 3)
    put(stream, range(300))
    pump = create_pipeline(home.context, "pump", stream.url("&start=-1h"), "topic:t")
    for _ in range(2):
        Driver(home.context, open_named(home.context, pump, LocalWorkers(2)), DriverOptions()).run()
        split(stream, max(fake.shards(stream.name)), 2**127 + 2**126 + fake.now_ms())
        put(stream, range(300, 310))
    Driver(home.context, open_named(home.context, pump, LocalWorkers(2)), DriverOptions()).run()
    events = [event for partition in range(3) for event in home.read("t", partition)]
    assert len({event.id for event in events}) == len(events) == 320
    assert Counter(int(event.value or b"") for event in events) == Counter(
        [*range(300), *range(300, 310), *range(300, 310)]
    )
    numbers = defaultdict(list)
    for event in events:
        numbers[event.key].append(int(event.value or b""))
    assert all(each[:-2] == sorted(each[:-2]) for each in numbers.values())


def test_a_pump_is_begun_at_a_time_that_stays(home: Home, fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint)
    home.create_topic("t", 1)
    for start in ("newest", "-15m"):
        with pytest.raises(InvalidError, match="is another time at each run"):
            open_pump(home.context, PumpOptions(stream.url(f"&start={start}"), "t"), LocalWorkers())
    url = stream.url(f"&start={to_iso(fake.now_ms() - 5_000)}")
    put(stream, range(5))
    for count in (5, 0):
        pump = open_pump(home.context, PumpOptions(url, "t"), LocalWorkers())
        assert Driver(home.context, pump, DriverOptions()).run() == count


def test_kinesis_is_archived_once_over_kills_and_resharding(home: Home, fake: FakeKinesis) -> None:
    chance = random.Random(20261115)
    stream = Stream(fake.endpoint, shards=2)
    archive = an_archive(home, stream.url())
    ended = threading.Event()
    total = 0

    def feed() -> None:
        nonlocal total
        while not ended.is_set():
            put(stream, range(total, total + 200))
            total += 200
            time.sleep(0.1)

    feeder = threading.Thread(target=feed)
    feeder.start()
    steps: list[Callable[[], None]] = [
        lambda: split(stream, 0, 2**126),
        lambda: merge(stream, 3, 1),
        lambda: split(stream, 4, 2**127 + 2**126),
        lambda: merge(stream, 2, 5),
    ]
    environ = {**os.environ, **KEYS}
    try:
        for step in steps:
            last = str(chance.randrange(10, 70))
            command = [
                sys.executable,
                "-m",
                "tests.support.pipeline_kill",
                home.config,
                archive.name,
            ]
            driver = subprocess.Popen([*command, last], cwd=ROOT, env=environ)
            time.sleep(chance.random() * 3)
            step()
            while driver.wait() == 0:  # it found nothing more before its time: another one
                driver = subprocess.Popen([*command, last], cwd=ROOT, env=environ)
            assert driver.wait() == -signal.SIGKILL
            found = counted(home, archive)
            assert not found or max(found.values()) == 1
    finally:
        ended.set()
        feeder.join()
    run = [sys.executable, "-c", RUN, home.config, archive.name]
    subprocess.run(run, env=environ, check=True, stdout=subprocess.DEVNULL, timeout=100)
    assert counted(home, archive) == Counter(range(total))
    assert len(fake.shards(stream.name)) == 8
    in_order = defaultdict(list)
    for shard, _, _, number in archived(home, archive):
        in_order[shard].append(number)
    assert all(numbers == sorted(numbers) for numbers in in_order.values())
    for shard in (0, 1, 2, 3, 4, 5):
        head = read_progress(home.context, archive.pipeline(), f"{stream.name}/{shard}")
        assert head is not None
        assert head.position == "end"
