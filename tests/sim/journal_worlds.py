"""Smaller worlds of journals, each with a few processes that get into each other's way."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from itertools import islice

from tests.sim.base import RATES
from tests.sim.journal_home import PARTITIONS, Desk
from tests.sim.journal_world import JournalWorld
from tidelog.catalog.base import Row
from tidelog.context import Context
from tidelog.coordination.outcome import SentWrites, _TrackedCatalog
from tidelog.errors import ConflictError, NotFoundError
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.listing import list_journals, read_journal
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.partition_reader import Reader
from tidelog.log.topics import read_head
from tidelog.testing.faults import Fault

__all__ = ["AbsentWorld", "AmendWorld", "CopyWorld", "LotsWorld", "SweptWorld"]


class AmendWorld(JournalWorld):
    """Amenders whose lots overlap, while journals are made and swept."""

    prefill = 9
    copied = 0
    pause_s = 0.5
    updates = 0.8

    def spawn_all(self) -> None:
        for number in range(3):
            self._spawn(f"amender-{number}", self.amend)
        self._spawn("reader", self.read)
        self._spawn("getter", self.get)
        self._spawn("compiler-1", self.compile)
        self._spawn("compiler-2", self.compile)
        self._spawn("sweeper", self.sweep)


class SweptWorld(AmendWorld):
    """Compilers that stall beside many sweeps, which delete what those have not finished."""

    rates = RATES | {Fault.STALL: 0.05}

    def spawn_all(self) -> None:
        self._spawn("amender", self.amend)
        for number in range(2):
            self._spawn(f"compiler-{number}", self.compile)
        for number in range(3):
            self._spawn(f"sweeper-{number}", self.sweep)


class LotsWorld(JournalWorld):
    """Updates of many lots in one call, beside deletes and updates of few events of the same lots.

    Journals are made all the time, so updates of many lots meet a compile between two lots.
    """

    prefill = 15
    copied = 0
    pause_s = 0.15

    def spawn_all(self) -> None:
        for number in range(2):
            self._spawn(f"updater-{number}", self.update_all)
        for number in range(3):
            self._spawn(f"deleter-{number}", self.delete_one)
        self._spawn("reader", self.read)
        self._spawn("compiler-1", self.compile)
        for number in range(2):
            self._spawn(f"changer-{number}", self.update_few)
        self._spawn("compiler-2", self.compile_often)

    def update_all(self) -> None:
        desk = Desk(self._context())
        for _ in range(3):
            desk.context.clock.sleep(self.random.uniform(0, self.pause_s))
            with contextlib.suppress(*self.may_fail):
                self.update(desk, self.some_ids(24))

    def delete_one(self) -> None:
        desk = Desk(self._context())
        for _ in range(4):
            desk.context.clock.sleep(self.random.uniform(0, self.pause_s))
            with contextlib.suppress(*self.may_fail):
                self.delete(desk, self.some_ids(1))

    def update_few(self) -> None:
        desk = Desk(self._context())
        for _ in range(6):
            desk.context.clock.sleep(self.random.uniform(0, self.pause_s))
            with contextlib.suppress(*self.may_fail):
                self.update(desk, self.some_ids(6))

    def compile_often(self) -> None:
        desk = Desk(self._context())
        policy = CompilePolicy(min_events=1, min_amendments=1, max_events=1_000)
        for _ in range(10):
            desk.context.clock.sleep(self.random.uniform(0, self.pause_s / 2))
            with contextlib.suppress(*self.may_fail):
                self.tally.compiled += desk.compile("t", policy).journals


class CopyWorld(JournalWorld):
    """Copiers bring back old events, which others delete."""

    prefill = 6
    updates = 0.0
    deleted_max = 14

    def spawn_all(self) -> None:
        for number in range(2):
            self._spawn(f"amender-{number}", self.amend)
            self._spawn(f"copier-{number}", self.copy)
        self._spawn("compiler", self.compile)
        self._spawn("sweeper", self.sweep)


class _SlowAmendments(_TrackedCatalog):
    """The catalog of a process that often stalls before it reads amendments."""

    def __init__(self, context: Context, world: JournalWorld) -> None:
        super().__init__(context.catalog, SentWrites())
        self._clock = context.clock
        self._world = world

    def scan(
        self,
        partition: str,
        start: str = "",
        end: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[Row]:
        if start.startswith("amend/") and self._world.chance(0.5):
            self._clock.sleep(self._world.random.uniform(0, 2))
        return super().scan(partition, start, end, limit, reverse)


class AbsentWorld(JournalWorld):
    """Events are appended if their ids are absent, and deleted.

    In every eighth world they are also deleted by their place, and trimmed soon after, while others
    list journals and read them by their URLs.
    """

    prefill = 3
    updates = 0.3
    copied = 0

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.lists = seed % 8 == 4

    def spawn_all(self) -> None:
        for number in range(3):
            self._spawn(f"absent-{number}", self.append_absent)
        self._spawn("amender", self.amend)
        self._spawn("getter", self.get)
        self._spawn("compiler", self.compile)
        self._spawn("sweeper", self.sweep)
        self._spawn("trimmer", self.trim)
        if self.lists:
            self._spawn("producer", self.produce)
            self._spawn("eraser", self.delete_and_trim)
            for number in range(3):
                self._spawn(f"lister-{number}", self.list_and_read)

    def delete_and_trim(self) -> None:
        """Deletes the first event of a partition, and trims it."""
        desk = Desk(self._context())
        for _ in range(12):
            partition = self.random.randrange(PARTITIONS)
            with contextlib.suppress(*self.may_fail, ConflictError, NotFoundError):
                start = read_head(desk.context, self.topic, partition)[0].start
                reader = Reader(desk.context, self.topic, partition)
                for stretch in islice(reader.read(start), 1):
                    for event in islice(stretch.events(), 1):
                        desk.delete("t", [event.id or ""])
                    trim_topic(desk.context, self.topic, ToOffsets({partition: stretch.end}))
            desk.context.clock.sleep(self.random.uniform(0, 1))

    def list_and_read(self) -> None:
        """Lists journals with URLs, and reads them without the catalog."""
        context = self._context()
        context = dataclasses.replace(context, catalog=_SlowAmendments(context, self))
        for _ in range(24):
            context.clock.sleep(self.random.uniform(0, 0.5))
            begin = self.truth.tick
            with contextlib.suppress(*self.may_fail, NotFoundError):
                for entry in list_journals(context, self.topic, expires_s=60):
                    found = {event.offset: event.value for event in read_journal(entry)}
                    for offset in range(entry.start, entry.end):
                        place = (self.topic.incarnation, entry.partition, offset)
                        self._check_seen(place, found.get(offset), begin)

    def some_ids(self, count: int) -> list[str]:
        return super().some_ids(min(count, 3))
