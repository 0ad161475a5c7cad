"""The archive beside the ten-line PySpark job, from one Kafka topic on the same machine.

2 M JSON messages of about 200 bytes that hardly repeat, in 4 partitions, over 30 dates. Each side
runs on ``local[2]`` in a process of its own: warm, in alternating rounds, and cold, from the start
of a process to a committed archive. Ours is fsynced, and goes the way that users go. Memory is that
of a side's whole process tree. The same messages in one partition show what cuts of ranges gain.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from bench import ten_lines
from bench.apart import Apart, Usage, cores_note, measured, timed, watched
from bench.connector import jars
from bench.cycles import Cycles
from bench.measure import scratch
from bench.messages import EVENTS, ONE_PARTITION, TOPIC, fill
from bench.rates import Rate, against, contest
from tests.servers import kafka
from tidelog.archive.archive import create_archive, open_pipeline
from tidelog.home import Home, create_home, open_home
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.tasks import Task, TaskOutcome
from tidelog.settings import Settings
from tidelog.spark.session import open_spark
from tidelog.spark.workers import SparkWorkers

MAKINGS = {
    "verbatim": ArchiveFormat(),
    "dated": ArchiveFormat(parser="json:timestamp"),
    "transformed": ArchiveFormat(transform="bench.transforms:kept"),
}
COLD_ROUNDS = 2
PARTITIONS = (1, 100, 1_000)
CYCLE_S_MAX = 2.0


def run() -> list[Rate]:
    """All cases."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    with scratch() as folder, kafka.running() as broker:
        settings = Settings(f"{folder}/objects", f"{folder}/catalog.sqlite")
        with create_home(settings)[0] as home:
            fill(broker.bootstrap, home)
            config = home.config
        servers = broker.bootstrap
        with (
            Apart(Peer, jars(), servers, folder) as peer,
            Apart(Ours, config) as ours,
            Apart(Ours, config) as transforming,  # Spark keeps its workers, and their memory
        ):
            rates = warm(peer, ours, transforming, f"kafka://{servers}/{TOPIC}")
            rates += one_partition(ours, broker)
            rates += cycles(ours, servers)
        return rates + cold(config, servers, folder)


class Ours:
    """A home with a Spark session, in the process that makes it."""

    def __init__(self, config: str) -> None:
        self._home = open_home(config)
        self._workers = SparkWorkers(open_spark("local[2]", "bench"))

    def run(self, source: str, shape: str, whole: bool = False) -> float:
        """Events a second of one archive, from the driver's start to its last commit.

        ``whole`` reads each range by one task.
        """
        archive = new_archive(self._home, source, MAKINGS[shape])
        workers = WholeRanges(self._workers) if whole else self._workers
        pipeline = open_pipeline(self._home.context, archive, workers)
        began = time.perf_counter()
        events = Driver(self._home.context, pipeline, DriverOptions()).run()
        seconds = time.perf_counter() - began
        if events != EVENTS:
            raise RuntimeError(f"{events} events were archived, not {EVENTS}")
        shutil.rmtree(folder_of(self._home, archive))
        return events / seconds

    def cycles(self, kind: str, servers: str, partitions: int) -> list[float]:
        """Seconds of single cycles over a topic with so many partitions."""
        topic = Cycles(self._home, kind, servers, partitions)
        archive = new_archive(self._home, topic.source, MAKINGS["verbatim"])
        return topic.run(open_pipeline(self._home.context, archive, self._workers))

    def close(self) -> None:
        self._home.close()


class WholeRanges:
    """Workers that do not say how many tasks run at once, so no range is cut."""

    def __init__(self, workers: SparkWorkers) -> None:
        self._workers = workers

    def run(self, tasks: Sequence[Task]) -> Iterator[TaskOutcome]:
        return self._workers.run(tasks)


class Peer:
    """The ten-line job with its session."""

    def __init__(self, jars: str, servers: str, folder: str) -> None:
        self._spark = ten_lines.open_session(jars)
        self._servers = servers
        self._folder = folder

    def run(self, shape: str) -> float:
        """Events a second of one run, into a folder of its own."""
        folder = f"{self._folder}/{uuid.uuid4().hex}"
        run = partial(ten_lines.archive, self._spark, self._servers, TOPIC, folder, shape)
        rate = EVENTS / timed(run)
        shutil.rmtree(folder)
        return rate

    def close(self) -> None:
        self._spark.stop()


def new_archive(home: Home, source: str, written_as: ArchiveFormat) -> Archive:
    name = uuid.uuid4().hex
    return create_archive(
        home.context,
        Archive(
            name=name,
            incarnation=home.context.ids.new(),
            source=source,
            kind="partition" if written_as.parser else "backup",
            store=home.store.url,
            root=f"archives/{name}",
            created_ms=0,
            formats={1: written_as},
        ),
    )


def folder_of(home: Home, archive: Archive) -> str:
    return f"{home.store.url.removeprefix('file://')}/{archive.root}"


def warm(peer: Apart, ours: Apart, transforming: Apart, source: str) -> list[Rate]:
    used: dict[str, list[Usage]] = {}

    def noted(name: str, side: Apart, *arguments: str) -> Callable[[], float]:
        def once() -> float:
            with watched(side.pid) as usage:
                rate: float = side("run", *arguments)
            used.setdefault(name, []).append(usage)
            return rate

        return once

    runs: dict[str, tuple[Apart, tuple[str, ...]]] = {
        "ten lines, verbatim, warm": (peer, ("verbatim",)),
        "archive, verbatim, warm": (ours, (source, "verbatim")),
        "archive from a topic, verbatim, warm": (ours, (f"topic:{TOPIC}", "verbatim")),
        "archive with a transform, warm": (transforming, (source, "transformed")),
        "ten lines, by JSON date, warm": (peer, ("dated",)),
        "archive, by JSON date, warm": (ours, (source, "dated")),
    }
    rates = contest(
        {name: noted(name, side, *arguments) for name, (side, arguments) in runs.items()}
    )
    lines, plain, topic, transformed, lines_dated, dated = rates.values()
    against(plain, lines, 1.5)
    against(topic, plain, 1.5)
    against(transformed, plain, 0.6)
    against(dated, lines_dated, 1.8)
    for rate in rates.values():
        rate.note = cpu_note(used[rate.what][1:])
    peaks = {name: memory_rate(name, found[1:]) for name, found in used.items()}
    below(peaks[plain.what], peaks[lines.what])
    below(peaks[dated.what], peaks[lines_dated.what])
    return [*rates.values(), *peaks.values()]


def one_partition(ours: Apart, broker: kafka.Kafka) -> list[Rate]:
    """A backfill of one partition on two cores: by one task, and with its ranges cut.

    One task uses more than one core, as Kafka's client has threads of its own, and the broker runs
    on the same cores. So the notes say how many cores are at work.
    """
    source = f"kafka://{broker.bootstrap}/{ONE_PARTITION}"
    used: dict[str, list[tuple[Usage, Usage]]] = {}

    def noted(name: str, whole: bool) -> float:
        with measured(ours.pid) as own, measured(broker.process.pid) as server:
            rate: float = ours("run", source, "verbatim", whole)
        used.setdefault(name, []).append((own, server))
        return rate

    names = ("one partition, one task, warm", "one partition, ranges cut, warm")
    rates = contest({name: partial(noted, name, name == names[0]) for name in names})
    whole, cut = rates.values()
    against(cut, whole, 1.7)
    for rate in (whole, cut):
        own, server = zip(*used[rate.what][1:], strict=True)
        rate.note = f"{cpu_note(own)}, {cores_note(own, server)}"
    return [whole, cut]


def cpu_note(used: Sequence[Usage]) -> str:
    return f"{statistics.median(each.cpu_s for each in used):.1f} CPU s"


def memory_rate(what: str, used: list[Usage]) -> Rate:
    return Rate(f"memory: {what}", [each.peak_mib for each in used], "MiB")


def below(rate: Rate, peer: Rate) -> None:
    """Note how many times less than the peer it is."""
    rate.peer, rate.goal = peer.what, 1.0
    rate.ratio = peer.median / rate.median
    rate.note = "peer / ours"


def cycles(ours: Apart, servers: str) -> list[Rate]:
    rates = []
    for kind in ("kafka", "topic"):
        for partitions in PARTITIONS:
            found = ours("cycles", kind, servers, partitions)
            rate = Rate(f"a cycle over {partitions:,} partitions, {kind}", found, "s")
            if partitions == PARTITIONS[-1]:
                rate.peer, rate.goal = f"{CYCLE_S_MAX:g} s", 1.0
                rate.ratio = CYCLE_S_MAX / statistics.median(found)
            rates.append(rate)
    return rates


def cold(config: str, servers: str, folder: str) -> list[Rate]:
    """From the start of a process to its end, each time a new one."""
    lines, ours = Rate("ten lines, verbatim, cold"), Rate("archive, verbatim, cold")
    used: dict[str, list[Usage]] = {lines.what: [], ours.what: []}
    for _ in range(COLD_ROUNDS):
        target = f"{folder}/{uuid.uuid4().hex}"
        job = [sys.executable, "-m", "bench.ten_lines", jars(), servers, TOPIC, target, "verbatim"]
        used[lines.what].append(process_rate(job, lines))
        shutil.rmtree(target)
        with open_home(config) as home:
            archive = new_archive(home, f"kafka://{servers}/{TOPIC}", MAKINGS["verbatim"])
            command = ["--home", config, "archive", "run", archive.name, "--master", "local[2]"]
            tidelog = str(Path(sys.executable).with_name("tidelog"))
            used[ours.what].append(process_rate([tidelog, *command], ours))
            shutil.rmtree(folder_of(home, archive))
    against(ours, lines, 1.2)
    memory = [memory_rate(name, found) for name, found in used.items()]
    below(memory[1], memory[0])
    for rate in (lines, ours):
        rate.note = cpu_note(used[rate.what])
    return [lines, ours, *memory]


def process_rate(command: list[str], rate: Rate) -> Usage:
    """Run a command to its end, and note how fast it was."""
    with tempfile.TemporaryFile() as said:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        with watched(process.pid) as usage:
            process.wait()
            rate.rounds.append(EVENTS / (time.perf_counter() - began))
        if process.returncode:
            said.seek(0)
            text = said.read().decode(errors="replace")
            raise RuntimeError(f"{command}: exit code {process.returncode}\n{text[-2_000:]}")
    return usage
