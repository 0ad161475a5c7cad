"""Maintenance of a topic and its archive: in one process, and by Spark on one core and on two.

`verify --deep` reads all files of the archive. A proof reads them too, and all objects of the
topic. The sizes are scaled to a small machine; all read from the page cache, so what is measured
is the work of the cores. Beside one process, local[2] shows what a master gains; beside local[1],
what a second core gains.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable

import pyarrow as pa

from bench.apart import Usage, cores_note, measured
from bench.log import VALUES
from bench.measure import scratch
from bench.rates import Rate, against, contest
from tidelog.api.archives import ArchiveHandle
from tidelog.api.spark_workers import open_session
from tidelog.home import Home, create_home
from tidelog.settings import Settings

EVENTS = 9_600_000  # seconds of work for a core: a job of Spark takes tenths of one to start
RANGES = 12  # for each of the partitions
PARTITIONS = 4
ONE_CORE, TWO_CORES = "local[1]", "local[2]"
ROUNDS = 3

Timed = Callable[[str | None], float]


def run() -> list[Rate]:
    """All comparisons, on sessions that have run before."""
    with scratch() as folder:
        settings = Settings(f"{folder}/objects", f"{folder}/catalog.sqlite")
        with create_home(settings)[0] as home:
            archive = _fill(home)
            works = {"verify --deep": _verify(archive), "proof of an erasure": _prove(home)}
            alone = _contest(works, None)
            cores = {each: _contest(works, each) for each in (ONE_CORE, TWO_CORES)}
    rates = []
    for number, rate in enumerate(alone):
        one, two = cores[ONE_CORE][number], cores[TWO_CORES][number]
        again = Rate(f"{two.what}, again", list(two.rounds), note=two.note)
        rates += [rate, one, against(two, rate, 1.6), against(again, one, 1.6)]
    for rate in rates:
        rate.unit = "MB/s"
    return rates


def _contest(works: dict[str, Timed], master: str | None) -> list[Rate]:
    """Runs the works in one process or on a session of its own: a process has one at a time."""
    session = None if master is None else open_session(master, "bench")
    used: dict[str, list[Usage]] = {}

    def noted(name: str, timed: Timed) -> float:
        with measured(os.getpid()) as usage:
            rate = timed(master)
        used.setdefault(name, []).append(usage)
        return rate

    rates = contest(
        {
            name: functools.partial(noted, name, timed)
            for what, timed in works.items()
            if (name := f"{what}, {master or 'one process'}")
        },
        ROUNDS,
    )
    if session is not None:
        session.stop()
    for name, rate in rates.items():
        rate.note = cores_note(used[name][1:])
    return list(rates.values())


def _fill(home: Home) -> ArchiveHandle:
    home.create_topic("t", PARTITIONS)
    archive = home.archives.create("raw", source="topic:t")
    size = EVENTS // RANGES
    values = pa.array([VALUES[n % len(VALUES)] for n in range(size)], pa.binary())
    for number in range(RANGES):
        ids = pa.array([f"event-{number * size + n:012}" for n in range(size)], pa.string())
        home.append("t", pa.table({"value": values, "id": ids}))
        archive.run()
    home.delete("t", "event-000000000007", why="bench")
    home.purge("t")
    return archive


def _verify(archive: ArchiveHandle) -> Timed:
    size = archive.stored_bytes()

    def timed(spark: str | None) -> float:
        began = time.perf_counter()
        report = archive.verify(deep=True, spark=spark)
        if not report.is_clean or report.events != EVENTS:
            raise RuntimeError(f"{report.events} events, {report.problems}")
        return size / 1e6 / (time.perf_counter() - began)

    return timed


def _prove(home: Home) -> Timed:
    def timed(spark: str | None) -> float:
        began = time.perf_counter()
        proof = home.prove_erased("t", ids=["event-000000000007"], spark=spark)
        if not proof.is_clean:
            raise RuntimeError(f"{proof.traces}")
        return proof.bytes / 1e6 / (time.perf_counter() - began)

    return timed
