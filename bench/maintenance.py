"""Maintenance of a topic and its archive: in one process, and in tasks of Spark on local[2].

`verify --deep` reads all files of the archive. A proof reads them too, and all objects of the
topic. The sizes are scaled to a small machine; both read from the page cache, so what is measured
is the work of the cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pyarrow as pa

from bench.log import VALUES
from bench.measure import scratch
from bench.rates import Rate, against, contest
from tidelog.api.archives import ArchiveHandle
from tidelog.api.spark_workers import open_session
from tidelog.home import Home, create_home
from tidelog.settings import Settings

EVENTS = 4_800_000
RANGES = 12  # for each of the partitions
PARTITIONS = 4
MASTER = "local[2]"
ROUNDS = 3


def run() -> list[Rate]:
    """Both comparisons, on one session that has run before."""
    with scratch() as folder:
        settings = Settings(f"{folder}/objects", f"{folder}/catalog.sqlite")
        with create_home(settings)[0] as home:
            archive = _fill(home)
            session = open_session(MASTER, "bench")
            rates = [*_verify(archive), *_prove(home, archive)]
            session.stop()
    load = os.getloadavg()[0]
    for rate in rates:
        rate.unit, rate.note = "MB/s", f"load average {load:.1f}"
    return rates


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


def _verify(archive: ArchiveHandle) -> list[Rate]:
    size = archive.stored_bytes()

    def timed(spark: str | None) -> float:
        began = time.perf_counter()
        report = archive.verify(deep=True, spark=spark)
        if not report.is_clean or report.events != EVENTS:
            raise RuntimeError(f"{report.events} events, {report.problems}")
        return size / 1e6 / (time.perf_counter() - began)

    return _both("verify --deep", timed)


def _prove(home: Home, archive: ArchiveHandle) -> list[Rate]:
    def timed(spark: str | None) -> float:
        began = time.perf_counter()
        proof = home.prove_erased("t", ids=["event-000000000007"], spark=spark)
        if not proof.is_clean:
            raise RuntimeError(f"{proof.traces}")
        return proof.bytes / 1e6 / (time.perf_counter() - began)

    return _both("proof of an erasure", timed)


def _both(what: str, timed: Callable[[str | None], float]) -> list[Rate]:
    contenders = {
        f"{what}, one process": lambda: timed(None),
        f"{what}, {MASTER}": lambda: timed(MASTER),
    }
    alone, on_spark = contest(contenders, ROUNDS).values()
    against(on_spark, alone, 1.6)
    return [alone, on_spark]
