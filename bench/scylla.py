"""Reading a change log beside a bare loop of the driver's queries over the same windows.

A played log on Cassandra: 200,000 changes of about 150 bytes in 64 streams, over an hour. Each
contender reads all of it, window by window and by the same statements: the bare loop only counts
rows, ours makes events of them. Windows are of ten minutes, as when a reader catches up, where it
also runs on Spark with two cores; and of 15 seconds, as when it follows. Then a day of silence in a
table of 1,536 streams and few changes, from a cold start to committed heads.
"""

from __future__ import annotations

import random
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from cassandra.cluster import Cluster
from cassandra.concurrent import execute_concurrent
from cassandra.query import BatchStatement, BatchType

from bench.rates import Rate, against, contest
from tests.servers import cassandra
from tests.servers.scylla_play import Play, Row
from tests.support.named_pipelines import create_pipeline, open_named
from tidelog.connectors.by_url import open_source
from tidelog.connectors.scylla.session import close_sessions
from tidelog.connectors.scylla.streams import ChangePosition, group_of, queries_of
from tidelog.connectors.sink import RangeWriter, WriterResult
from tidelog.connectors.source import SourceRange
from tidelog.home import World, create_home
from tidelog.model.pipeline import Manifest
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.tasks import LocalWorkers, Task
from tidelog.settings import Settings
from tidelog.spark.session import open_spark
from tidelog.spark.workers import SparkWorkers

CHANGES = 200_000
STREAMS = 64
SPAN_MS = 3_600_000
WINDOWS = {"windows of 10 min": 600_000, "windows of 15 s": 15_000}
BATCH = 100
GROUPS = 4


@dataclass(frozen=True)
class Counting:
    """A sink that keeps nothing."""

    def writer(self, partition: str, staging: str) -> RangeWriter:
        return _Counter()

    def publish(self, manifest: Manifest) -> int:
        return 0

    def discard(self, manifest: Manifest) -> None: ...


class _Counter:
    def __init__(self) -> None:
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.num_rows

    def close(self) -> WriterResult:
        return WriterResult((), self._rows)


def run() -> list[Rate]:
    """All rates."""
    with cassandra.running() as server:
        with _filled(server) as (play, start_ms):
            rates = _reading(play, start_ms)
        rates.append(_silence(server))
    close_sessions()
    return rates


@contextmanager
def _filled(server: cassandra.Cassandra) -> Iterator[tuple[Play, int]]:
    play = Play(server, vnodes=32)
    start_ms = int(time.time() * 1000) - 2 * SPAN_MS
    play.begin_generation(start_ms, STREAMS)
    insert = play.session.prepare(
        'INSERT INTO orders_scylla_cdc_log ("cdc$stream_id", "cdc$time", "cdc$batch_seq_no", '
        '"cdc$operation", "cdc$end_of_batch", region, id, state, note, seen) '
        "VALUES (?, ?, 0, 2, true, ?, ?, ?, ?, ?)"
    )
    chance = random.Random(7)
    batches = []
    for first in range(0, CHANGES, BATCH):
        stream = play.generations[start_ms][first // BATCH % STREAMS]
        batch = BatchStatement(BatchType.UNLOGGED)
        for number in range(first, first + BATCH):
            time_ms = start_ms + chance.randrange(SPAN_MS)
            text = f"{chance.getrandbits(160):040x}"
            values = (stream, play.timeuuid(time_ms), f"r{number % 997}", number, text[:12], text)
            batch.add(insert, (*values, time_ms))
        batches.append((batch, ()))
    execute_concurrent(play.session, batches, concurrency=16)
    try:
        yield play, start_ms
    finally:
        play.close()


def _reading(play: Play, start_ms: int) -> list[Rate]:
    source = open_source(play.url(groups=GROUPS), environ={})
    partitions = source.partitions()
    workers = SparkWorkers(open_spark("local[2]", "bench"))
    bare = _Bare(play)

    def loop(width_ms: int) -> float:
        starts = range(start_ms, start_ms + SPAN_MS, width_ms)
        return _timed(lambda: sum(bare.count(at, at + width_ms) for at in starts))

    def ours(width_ms: int) -> float:
        starts = range(start_ms, start_ms + SPAN_MS, width_ms)
        windows = [(_text(start_ms, at), _limit(start_ms, at + width_ms)) for at in starts]
        return _timed(
            lambda: sum(
                chunk.batch.num_rows
                for start, limit in windows
                for each in partitions
                for chunk in source.read(SourceRange(each, start, limit))
            )
        )

    def spark() -> float:
        whole = (_text(start_ms, start_ms), _limit(start_ms, start_ms + SPAN_MS))
        tasks = [
            Task(source.reader(SourceRange(each, *whole)), Counting(), "")  # type: ignore[arg-type]
            for each in partitions
        ]
        return _timed(
            lambda: sum(done.produced.read if done.produced else 0 for done in workers.run(tasks))
        )

    runs: dict[str, Callable[[], float]] = {}
    for text, width_ms in WINDOWS.items():
        runs[f"a bare loop, {text}"] = partial(loop, width_ms)
        runs[f"one process, {text}"] = partial(ours, width_ms)
    rates = contest({**runs, "Spark, 2 cores": spark})
    bare.close()
    for rate in rates.values():
        rate.unit = "changes/s"
    peers = {text: rates[f"a bare loop, {text}"] for text in WINDOWS}
    found = [against(rates[f"one process, {text}"], peers[text], 0.7) for text in WINDOWS]
    found.append(against(rates["Spark, 2 cores"], next(iter(peers.values())), 0.7))
    return [*found, *peers.values()]


class _Bare:
    """What ten lines with the driver do."""

    def __init__(self, play: Play) -> None:
        self._cluster = Cluster([play.server.host], port=play.server.port)
        self._session = self._cluster.connect(play.keyspace)
        ((_, streams),) = play.generations.items()
        groups = [[s for s in streams if group_of(s, GROUPS) == n] for n in range(GROUPS)]
        self._streams = [some for each in groups for some in queries_of(each)]
        self._select = self._session.prepare(
            'SELECT * FROM orders_scylla_cdc_log WHERE "cdc$stream_id" IN ? '
            'AND "cdc$time" >= minTimeuuid(?) AND "cdc$time" < minTimeuuid(?)'
        )

    def count(self, start_ms: int, end_ms: int) -> int:
        rows = 0
        for streams in self._streams:
            for _ in self._session.execute(self._select, (list(streams), start_ms, end_ms)):
                rows += 1
        return rows

    def close(self) -> None:
        self._cluster.shutdown()


def _silence(server: cassandra.Cassandra) -> Rate:
    """Seconds to bring a day in which hardly anything happened."""
    rate = Rate("a day of silence in 1,536 streams", unit="s", note="below 5")
    now_ms = int(time.time() * 1000)
    play = Play(server, vnodes=768, ttl_s=2 * 86_400)
    play.begin_generation(now_ms - 86_400_000, 1_536)
    for hours in (1, 12, 23):
        play.write(now_ms - hours * 3_600_000, Row("insert", f"r{hours}", hours, {"state": "x"}))
    for _ in range(3):
        close_sessions()
        with tempfile.TemporaryDirectory() as folder:
            rate.rounds.append(_pumped(play, Path(folder)))
    play.close()
    return rate


def _pumped(play: Play, folder: Path) -> float:
    settings = Settings(str(folder / "objects"), str(folder / "catalog.sqlite"))
    with create_home(settings, world=World(environ={}))[0] as home:
        home.create_topic("changes", 4)
        began = time.perf_counter()
        url = play.url(groups=16)
        named = create_pipeline(home.context, uuid.uuid4().hex, url, "topic:changes")
        events = Driver(
            home.context, open_named(home.context, named, LocalWorkers()), DriverOptions()
        ).run()
        seconds = time.perf_counter() - began
    if events != 3:
        raise RuntimeError(f"{events} changes came of 3")
    return seconds


def _text(generation_ms: int, time_ms: int) -> str:
    return ChangePosition(generation_ms, time_ms).text


def _limit(generation_ms: int, time_ms: int) -> str:
    return ChangePosition(generation_ms, time_ms).limit().text


def _timed(read: Any) -> float:
    began = time.perf_counter()
    changes = read()
    if changes != CHANGES:
        raise RuntimeError(f"{changes} changes were read, not {CHANGES}")
    return CHANGES / (time.perf_counter() - began)
