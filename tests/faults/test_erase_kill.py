"""An erasure SIGKILLed at every step, beside producers, an amender, a driver and readers."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from tests.support.archive_look import a_home, an_archive
from tests.support.pipeline_kill import Killer
from tidelog import Event, Home
from tidelog.archive.archive import open_pipeline
from tidelog.archive.erased_events import deleted_offsets
from tidelog.archive.tables import change_tables, register
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.erasure import rewrite as erase
from tidelog.home import open_home
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.model.archive import Archive
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.ranges import FilePolicy
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.testing.faults import FaultyCatalog, FaultyStore

EVENTS = 120
GONE = frozenset(range(0, EVENTS, 9))  # deleted before the first erasure
BESIDE = frozenset(range(5, EVENTS, 18))  # deleted by the amender
EACH = tuple(range(1, EVENTS, 3))  # deleted one by one, so that each erasure has something to do
LATER = frozenset([*BESIDE, *EACH])
UPDATED = frozenset(range(2, EVENTS, 9))
STAYING = frozenset(range(EVENTS)) - GONE - LATER


def erase_and_die(config: str, last: int) -> None:
    """In a process of its own: erase, and die after call number ``last``."""
    killer = Killer()
    killer.last = last
    with open_home(config) as home:
        deleted = deleted_offsets(home.context, home.topic("t"))
        store = FaultyStore(home.store, killer)
        catalog = FaultyCatalog(home.catalog, killer, home.context.clock)
        home.context = replace(home.context, store=store, catalog=catalog)
        erase.files_at = lambda *_: store
        erase.erase_from_archives(home.context, home.topic("t"), deleted)


def serve(config: str) -> None:
    """Let an eraser die for each line of input: a fork of this process, which has no threads."""
    importlib.import_module("pandas")  # here once: pyarrow would import it in each fork
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                erase_and_die(config, int(line))
                code = 0
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


@contextmanager
def killing(config: str) -> Iterator[Callable[[int], bool]]:
    """Erases, and dies after a call of some number; whether it did, else it was done before."""
    code = f"from tests.faults.test_erase_kill import serve; serve({config!r})"
    pipe, command = subprocess.PIPE, [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def killed(last: int) -> bool:
            print(last, file=server.stdin, flush=True)
            code = int(server.stdout.readline())  # type: ignore[union-attr]
            assert code in (0, -9)
            return code == -9

        yield killed
        server.stdin.close()


def listed(home: Home, archive: Archive) -> Counter[int]:
    """What somebody finds who only lists the folder, and opens each file once."""
    folder = Path(home.store.url.removeprefix("file://")) / archive.folder()
    found: Counter[int] = Counter()
    for path in sorted(folder.rglob("[0-9]*.parquet")):
        found.update(pq.read_table(pa.BufferReader(path.read_bytes()))["offset"].to_pylist())
    return found


@contextmanager
def lookers(home: Home, archive: Archive, wrong: list[str]) -> Iterator[None]:
    """A producer, an amender, a driver that archives, and one who lists, until the end."""
    over = threading.Event()

    def produce() -> None:
        for at in range(EVENTS, EVENTS + 60):  # each makes a file that is read again
            home.append("t", [Event(b'{"n":%d}' % at, timestamp=at)], partition=0)
            if over.wait(0.1):
                return

    def amend() -> None:
        """Events one by one, of which some are in files that an erasure writes anew."""
        to_delete = sorted(BESIDE)
        for turn, each in enumerate(cycle(sorted(UPDATED))):
            home.update("t", f"n{each}", b'{"turn":%d}' % turn)
            if to_delete:
                home.delete("t", [f"n{to_delete.pop()}"])
            elif over.is_set():
                return
            over.wait(0.1)

    def drive() -> None:
        while not over.is_set():
            pipeline = open_pipeline(home.context, archive, LocalWorkers())
            Driver(home.context, pipeline, DriverOptions(policy=FilePolicy(max_bytes=1))).run()
            over.wait(0.2)

    def look() -> None:
        while not over.wait(0.05):
            found = listed(home, archive)
            if any(count > 1 for count in found.values()):
                wrong.append("an event stands twice")
            if STAYING - set(found):
                wrong.append(f"missing: {sorted(STAYING - set(found))[:5]}")

    threads = [threading.Thread(target=each) for each in (produce, amend, drive, look)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_an_erasure_killed_at_every_step_is_finished(tmp_path: Path) -> None:
    with a_home(tmp_path) as home:
        home.create_topic("t", 1)
        for first in range(0, EVENTS, 40):
            numbers = range(first, first + 40)
            events = [Event(b'{"n":%d}' % n, id=f"n{n}", timestamp=n) for n in numbers]
            home.append("t", events, partition=0)
        archive = an_archive(home, "kept", "topic:t")
        pipeline = open_pipeline(home.context, archive, LocalWorkers())
        Driver(home.context, pipeline, DriverOptions(policy=FilePolicy(max_bytes=1))).run()
        archive = change_tables(home.context, archive, "delta", keep=True)
        register(home.context, archive)
        home.delete("t", [f"n{n}" for n in GONE])
        wrong: list[str] = []
        kills = 0
        with lookers(home, archive, wrong), killing(home.config) as killed:
            home.delete("t", [f"n{EACH[0]}"])
            while killed(kills + 1):
                kills += 1
                sweep_archives(home.context, grace_ms=3_600_000 if kills % 2 else 0)
                home.delete("t", [f"n{EACH[kills]}"])
            home.delete("t", [f"n{n}" for n in EACH[kills:]])
        assert wrong == []
        assert kills >= 25
        topic = home.topic("t")
        deleted = deleted_offsets(home.context, topic)
        assert deleted == {0: GONE | LATER}
        erase.erase_from_archives(home.context, topic, deleted)
        archive = home.archives.get("kept").info
        found = listed(home, archive)
        assert not (GONE | LATER) & set(found)
        assert set(found) >= STAYING
        assert max(found.values()) == 1
        assert list(verify_archive(home.context, archive, ArchiveVerifyOptions()).problems) == []
        register(home.context, archive)
        table = DeltaTable(str(tmp_path / "o" / archive.folder())).to_pyarrow_table()
        assert not (GONE | LATER) & set(table["offset"].to_pylist())
