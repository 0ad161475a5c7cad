"""A home with archives in a bad world: real drivers over substrates that fail.

Sinks and sources open stores by their URLs, wherever they run. Here all URLs name the one store of
the world, and each process reaches it through faults of its own. Limits are small, so that a few
events make several ranges, and a few ranges are merged.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from tests.sim import base
from tests.sim.archive_accounts import Accountant
from tests.sim.archive_heads import Heads
from tests.sim.archive_many import HoledBackup, HoledFolder, ManyTopics
from tests.sim.archive_marks import Erasures, Markers
from tests.sim.archive_store import Folders
from tests.sim.journal_home import HomeWorld
from tests.sim.journal_raw import WatchedStore
from tidelog import store as here
from tidelog.archive.archive import create_archive, find_archive, open_pipeline
from tidelog.backends import World as Outside
from tidelog.codec import parsers as foreign
from tidelog.codec.event_batch import table_of
from tidelog.codec.parsers import FolderSettings, ParsedValues
from tidelog.codec.segment import encode_staged
from tidelog.connectors import by_url as places
from tidelog.connectors.archive import staging as uploads
from tidelog.connectors.by_url import open_source
from tidelog.connectors.source import Source
from tidelog.connectors.topic import segments
from tidelog.context import Context
from tidelog.errors import TidelogError
from tidelog.home import Home
from tidelog.identity import HomeIdentity
from tidelog.log.producer.append import Appender
from tidelog.log.topics import find_topic
from tidelog.maintenance import pipeline_sweep as compact
from tidelog.model import limits
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.model.event import Event
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.ranges import FilePolicy, WaitingEvents
from tidelog.pipeline.tasks import LocalWorkers, Workers
from tidelog.settings import Settings
from tidelog.store.base import Store
from tidelog.testing.faults import Fault, Process

__all__ = ["ANY_KIND", "FIRST_KIND", "ArchivesHome"]

FIRST_KIND = "tests.sim.archive_home:ByKind|a"
ANY_KIND = "tests.sim.archive_home:ByKind|a,b"  # a replay with it places more

RATES = base.RATES | {
    Fault.LOSE_REQUEST: 0.006,
    Fault.LOSE_REPLY: 0.012,
    Fault.DUPLICATE: 0.03,
    Fault.DELAY: 0.06,
    Fault.TRY_AGAIN: 0.006,
    Fault.CUT_OFF: 0.001,
    Fault.STALL: 0.004,
    Fault.FREEZE: 0.002,
    Fault.CRASH_BEFORE: 0.001,
    Fault.CRASH_AFTER: 0.002,
    Fault.STALE_LIST: 0.05,
}


class ByKind:
    """A parser that takes events of some kinds; the others are dead letters."""

    fixed: ClassVar[str] = ""  # kinds that its code takes too since it was fixed

    def __init__(self, argument: str, settings: FolderSettings) -> None:
        self._kinds = [*argument.split(","), *self.fixed]

    def times(self, batch: pa.RecordBatch) -> ParsedValues:
        parts = [value.decode().split("=") for value in batch.column("value").to_pylist()]
        times = [int(time_ms) if kind in self._kinds else None for _, time_ms, kind in parts]
        errors = [None if kind in self._kinds else f"kind {kind}" for _, _, kind in parts]
        return ParsedValues(pa.array(times, pa.int64()), pa.array(errors, pa.string()))


class ArchiveStore(WatchedStore):
    """Shows every object that is put."""

    url = "sim:"  # workers refuse a store in memory, which no other process could open
    on_put: Callable[[str, bytes], None] = staticmethod(lambda *_: None)

    def _store(self, key: str, data: bytes) -> str:
        self.on_put(key, data)
        return super()._store(key, data)

    def keys_below(self, prefix: str) -> list[str]:
        """Keys that begin so, in order."""
        return list(self._below(prefix))


class ArchivesHome(HomeWorld):
    """One seed's home, with archives and an accountant."""

    rates = RATES
    restarts_max = 10
    attempts = (1, 3, 3, 3)  # most calls here make many requests
    delay_ms = 10_000  # how late events may be, for finalize
    accountants: type[Accountant] = Accountant

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.bare_objects = self.objects = ArchiveStore(self.scheduler.clock)
        self.truth.objects = self.bare_objects
        self.bare_objects.truth = self.truth
        self.quiet = self._context(faulty=False)
        self.folders = Folders(self.bare_rows, self.bare_objects)
        self.accountant = self.accountants(self.folders, self.truth)
        self.erasures = Erasures(self.bare_rows, self.bare_objects)
        self.markers = Markers(
            self.folders, self.accountant, self.truth, self.scheduler, self.delay_ms
        )
        self.bare_objects.on_put = self._see_put
        ttl_s = self.quiet.log_settings.lease_ttl_ms / 1000
        self.heads = Heads(self.scheduler.clock.monotonic_s, ttl_s, self.is_dead)
        self.bare_rows.on_rows = self.heads.written
        self.refused: Counter[str] = Counter()  # errors of calls, for debugging a seed
        self._stores: dict[Process, Store] = {}
        self._looked = (-1, -1)

    def run(self) -> Counter[Fault]:
        with pytest.MonkeyPatch.context() as patch:
            self._patch(patch)
            return super().run()

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        ids = self._ids
        patch.setattr(here, "open_store", lambda url, **_: self.store_here())
        patch.setattr(places, "open_store", lambda url, **_: self.store_here())
        patch.setattr(places, "open_source", self.open_source)
        patch.setattr(here, "SystemClock", self.clock_here)
        patch.setattr(here, "system_random", lambda: random.Random(self.random.getrandbits(64)))
        for module in (here, uploads, segments):
            patch.setattr(module, "RandomIds", lambda: ids)
        patch.setattr(WaitingEvents, "events_max", lambda _: self.random.choice([2, 4, 7]))
        patch.setattr(foreign, "find_plugins", lambda *_: ())  # they read many files
        patch.setattr(limits, "COMMITS_UNMERGED", 2)
        patch.setattr(compact, "_MIN", 2)

    def check(self) -> None:
        """After each step that changed something of an archive."""
        self.markers.look()
        touched = any(each.startswith(("pipeline/", "registry")) for each in self.rows.touched)
        self.rows.touched.clear()
        seen = (self.bare_objects.changes, 0)
        if touched or seen != self._looked:
            self._looked = seen
            self.accountant.check_live()

    def _see_put(self, key: str, data: bytes) -> None:
        self.erasures.put(key, data)
        if key.endswith("/_SUCCESS"):
            self.markers.put(key)

    def is_dead(self, mark: str) -> bool:
        """Whether the process with a mark has ended."""
        processes = (each for host in self.hosts for each in host.processes.values())
        return any(each.processes.mark() == mark and each.dead for each in processes)

    # For actors.

    def open_source(self, url: str, **how: Any) -> Source:
        """As the product's, which knows no patterns of its own topics, nor backups with holes."""
        kind, _, name = url.partition(":")
        if kind in ("holed", "folder"):
            return (HoledBackup if kind == "holed" else HoledFolder)(how["open_context"], name)
        return ManyTopics(how["open_context"], name) if kind == "many" else open_source(url, **how)

    def store_here(self) -> Store:
        """The store as the process that runs now reaches it."""
        current = self.scheduler.current
        if current is None or not isinstance(current.group, Process):
            return self.objects
        process = current.group
        if process not in self._stores:
            self._stores[process] = self._faulty_store(self.objects, self.faults)
        return self._stores[process]

    def clock_here(self) -> Any:
        current = self.scheduler.current
        if current is None or not isinstance(current.group, Process):
            return self.scheduler.clock
        return current.group.clock

    def home(self, context: Context | None = None) -> Home:
        """A home of the current process."""
        context = context or self._context()
        outside = Outside(
            {},
            Path("/"),
            clock=context.clock,
            ids=context.ids,
            random=context.random,
            machine="sim",
        )
        settings = Settings("memory:", "memory:", retry_attempts=3)
        identity = HomeIdentity("sim")
        opened = replace(context, settings=settings, identity=identity)
        return Home(opened, outside)

    def event(self) -> Event:
        """A new event of one of three kinds; no archive takes the third."""
        event_id = f"id{next(self._numbers):04}x"
        time_ms = self.scheduler.time.now_ms() - self.random.randrange(3_000)
        kind = self.random.choice("aaaabbc")
        key = f"k{self.random.randrange(5)}".encode()
        return Event(f"{event_id}={time_ms}={kind}".encode(), key=key, id=event_id)

    def append_to(
        self, context: Context, name: str, partition: int, events: Sequence[Event]
    ) -> None:
        """Append events to a topic."""
        appender = Appender(context, find_topic(context, name), f"~{context.ids.new()}")
        segment = encode_staged([(partition, table_of(list(events), context.clock.now_ms()))])
        appender.commit(appender.upload(segment), segment.pieces[0])

    def create_archive(
        self, home: Home, name: str, source: str, written_as: ArchiveFormat
    ) -> Archive:
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
                dead_share_max=1.0,
            ),
        )

    def drive(self, home: Home, name: str, generation: int | None = None, **how: Any) -> int:
        """One driver, until the source is drained."""
        archive = find_archive(home.context, name)
        pipeline = open_pipeline(home.context, archive, self.workers, generation)
        self.wait_opened(home, generation)
        return Driver(home.context, pipeline, DriverOptions(**({"stop": self.stop()} | how))).run()

    def wait_opened(self, home: Home, generation: int | None) -> None:
        """What passes between the opening of a driver and its first call."""

    def some_driver(self, take_over: float) -> dict[str, Any]:
        """How one of several drivers runs: it drains, waits for others, follows, or takes over."""
        chance = self.random.random()
        if chance < take_over:
            return {"take_over": True}
        if chance < 0.8:
            return {"wait": chance < 0.45}
        return self.follower(self.random.randint(1, 12), self.random.choice([1, 3_000]))

    def follower(self, looks: int, max_age_ms: int) -> dict[str, Any]:
        """The options of a driver that follows its source. It stops after this number of looks."""
        stop = self.stop()

        def look(*_: Any) -> None:
            nonlocal looks
            looks -= 1
            if looks <= 0:
                stop.set()

        policy = FilePolicy(max_age_ms=max_age_ms)
        return {"follow": True, "policy": policy, "stop": stop, "on_share": look}

    @property
    def workers(self) -> Workers:
        """What runs the tasks of drivers."""
        return LocalWorkers(1)

    def stop(self) -> Any:
        """What stops a driver; an event whose waits take simulated time."""
        return self.threads.Event()

    @contextlib.contextmanager
    def tolerating(self, *more: type[TidelogError]) -> Iterator[None]:
        """What a bad world explains ends one call, not the actor."""
        try:
            yield
        except (*self.accepted, *more) as exc:
            self.refused[f"{self.process.name}: {exc}"] += 1
