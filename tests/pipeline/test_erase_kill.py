"""An erasure SIGKILLed at every step, with producers, an archive that goes on, and readers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pipeline.killing import Killer
from tests.pipeline.looking import a_home, an_archive
from tidelog import Event, Home
from tidelog.home import open_home
from tidelog.model.archive import Archive
from tidelog.pipeline import erase
from tidelog.pipeline.archive import find_archive, open_pipeline
from tidelog.pipeline.driver import Driver, Driving
from tidelog.pipeline.policy import Policy
from tidelog.pipeline.sweep import sweep_archives
from tidelog.pipeline.tables import change_tables, register
from tidelog.pipeline.verify import Verifying, verify_archive
from tidelog.pipeline.workers import LocalWorkers
from tidelog.testing.faults import FaultyCatalog, FaultyStore

EVENTS = 120
GONE = frozenset(range(0, EVENTS, 9))
STEP = 3  # every so many calls one dies; all of them in the long run


def erase_and_die(config: str, last: int) -> None:
    """In a process of its own: erase, and die after call number ``last``."""
    killer = Killer()
    killer.last = last
    with open_home(config) as home:
        store = FaultyStore(home.log.store, killer)
        catalog = FaultyCatalog(home.log.catalog, killer, home.log.clock)
        home.log = replace(home.log, store=store, catalog=catalog)
        erase.store_at = lambda *_: store
        erase.erase_from_archives(home, home.topic("t"), {0: GONE})


def killed(config: str, last: int) -> bool:
    """Whether an eraser died there; if not, it was done before."""
    code = f"from tests.pipeline.test_erase_kill import *; erase_and_die({config!r}, {last})"
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, env=os.environ)
    assert done.returncode in (0, -9)
    return done.returncode == -9


def listed(home: Home, archive: Archive) -> Counter[int]:
    """What somebody finds who only lists the folder, and opens each file once."""
    folder = Path(home.store.url.removeprefix("file://")) / archive.folder()
    found: Counter[int] = Counter()
    for path in sorted(folder.rglob("[0-9]*.parquet")):
        found.update(pq.read_table(pa.BufferReader(path.read_bytes()))["offset"].to_pylist())
    return found


@contextmanager
def lookers(home: Home, archive: Archive, wrong: list[str]) -> Iterator[None]:
    """A producer, a driver that archives, and one who lists, until the end."""
    over = threading.Event()

    def produce() -> None:
        at = EVENTS
        while not over.wait(0.05):
            home.append("t", [Event(b'{"n":%d}' % at, timestamp=at)], partition=0)
            at += 1

    def drive() -> None:
        while not over.is_set():
            pipeline = open_pipeline(home, archive, LocalWorkers())
            Driver(home.log, pipeline, Driving(policy=Policy(max_bytes=1))).run()
            over.wait(0.2)

    def look() -> None:
        while not over.wait(0.05):
            found = listed(home, archive)
            if any(count > 1 for count in found.values()):
                wrong.append("an event stands twice")
            if set(range(EVENTS)) - GONE - set(found):
                wrong.append(f"missing: {sorted(set(range(EVENTS)) - GONE - set(found))[:5]}")

    threads = [threading.Thread(target=each) for each in (produce, drive, look)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    "step", [pytest.param(STEP, id="some"), pytest.param(1, marks=pytest.mark.long, id="every")]
)
def test_an_erasure_killed_at_every_step_is_finished(tmp_path: Path, step: int) -> None:
    with a_home(tmp_path) as home:
        home.create_topic("t", 1)
        for first in range(0, EVENTS, 40):
            events = [Event(b'{"n":%d}' % n, timestamp=n) for n in range(first, first + 40)]
            home.append("t", events, partition=0)
        archive = an_archive(home, "kept", "topic:t")
        pipeline = open_pipeline(home, archive, LocalWorkers())
        Driver(home.log, pipeline, Driving(policy=Policy(max_bytes=1))).run()
        archive = change_tables(home, archive, "delta", keep=True)
        register(home, archive)
        wrong: list[str] = []
        kills = 0
        with lookers(home, archive, wrong):
            last = 1
            while killed(home.config, last):
                kills += 1
                sweep_archives(home, grace_ms=3_600_000)
                last += step
        assert wrong == []
        assert kills >= 10 // step
        erase.erase_from_archives(home, home.topic("t"), {0: GONE})
        archive = find_archive(home, "kept")
        found = listed(home, archive)
        assert not GONE & set(found)
        assert set(range(EVENTS)) - GONE <= set(found)
        assert max(found.values()) == 1
        assert list(verify_archive(home, archive, Verifying()).problems) == []
