"""The log in a bad world: producers, consumers, a sweeper and a trimmer over faulty substrates.

The protocols are the real ones. Actors are killed and started again; requests and replies are lost,
delayed and doubled; the wall clock jumps. The invariants are checked on the bare substrates after
every step, and P1 to P3 at the end, when the survivors have finished and one reader has drained
all.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.sim.audit import AuditedCatalog
from tests.sim.bare import Bare
from tests.sim.base import SimWorld, check_swept
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_staged
from tidelog.context import Context
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    FencedError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.consumer.leases import Lease, Leases
from tidelog.log.maintenance.sweep import SweepReport, sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.partition_reader import Reader
from tidelog.log.producer.append import Appender
from tidelog.log.topics import create_topic, find_topic
from tidelog.model import layout
from tidelog.model.event import Event
from tidelog.model.topic import Head, Run, Topic
from tidelog.testing.faults import FaultyCatalog

PARTITIONS = 2


@dataclass
class Parts:
    """What a planted bug replaces."""

    appender: type[Appender] = Appender
    catalog: type[AuditedCatalog] = AuditedCatalog
    faulty: type[FaultyCatalog] = FaultyCatalog
    membership: type[Leases] = Leases
    sweep: Callable[[Context, int], SweepReport] = sweep_home
    acknowledge_early: bool = False


@dataclass
class Book:
    """What the actors were told, and what they saw."""

    acknowledged: dict[str, tuple[int, int]] = field(default_factory=dict)
    delivered: dict[int, set[int]] = field(default_factory=dict)
    values: dict[tuple[int, int], bytes] = field(default_factory=dict)
    cursors: dict[int, int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    heads: dict[int, Head] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)
    named: dict[int, int] = field(default_factory=dict)  # epochs of the named producer
    deletes: int = -1


class World(SimWorld):
    """One seed's world of appenders, members of a consumer, a sweeper and a trimmer."""

    def __init__(self, seed: int, parts: Parts | None = None) -> None:
        self.parts = parts or Parts()
        super().__init__(seed, self.parts.catalog, self.parts.faulty)
        self.bare = Bare(self.rows, self.objects)
        self.book = Book()
        self.topic = create_topic(self._quiet, Topic("t", self._ids.new(), PARTITIONS, 0))

    def spawn_all(self) -> None:
        """The actors of this world."""
        self._spawn("producer-a", lambda: self.produce("a"))
        self._spawn("producer-b", lambda: self.produce("b"))
        for number in range(2):
            self._spawn(f"named-{number}", self.produce_named)
        self._spawn("consumer-1", self.consume)
        self._spawn("consumer-2", self.consume)
        self._spawn("sweeper", self.sweep)
        self._spawn("trimmer", self.trim)

    # The actors.

    def produce(self, name: str) -> None:
        context = self._context()
        appender = self.parts.appender(context, find_topic(context, "t"), f"~{context.ids.new()}")
        for number in range(6):
            partition = self.scheduler.random.randrange(PARTITIONS)
            values = [f"{name}-{context.ids.new()}-{number}-{n}" for n in range(2)]
            self._append(context, appender, partition, values, None)
        appender.close()

    def produce_named(self) -> None:
        """Sends sequences 0 to 9, again from the start after each death: each must land once.

        Another process does the same; one that is fenced tries again with what it has.
        """
        context = self._context()
        appender = self.parts.appender(context, find_topic(context, "t"), "named")
        before = appender.open_named()
        for sequence in range(10):
            partition = sequence % PARTITIONS
            if sequence > before[partition].last:
                values = [f"named-{sequence}-{context.ids.new()}"]
                with contextlib.suppress(AlreadyExistsError):  # the other process was first
                    self._append(context, appender, partition, values, [sequence])

    def _append(
        self,
        context: Context,
        appender: Appender,
        partition: int,
        values: list[str],
        sequences: list[int] | None,
    ) -> None:
        table = table_of([Event(value.encode()) for value in values], context.clock.now_ms())
        segment = encode_staged([(partition, table)])
        for _ in range(5):
            try:
                if self.parts.acknowledge_early:
                    head = self._heads()[partition]
                    self._acknowledge(values, partition, head.next)
                stored = appender.upload(segment)
                base, _ = appender.commit(stored, segment.pieces[0], sequences)
            except (UnavailableError, ConflictError):
                context.clock.sleep(0.1)
                continue
            except (UnknownOutcomeError, FencedError):
                return  # not acknowledged: it may be there or not, but never twice
            self._acknowledge(values, partition, base)
            return

    def _acknowledge(self, values: list[str], partition: int, base: int) -> None:
        for number, value in enumerate(values):
            self.book.acknowledged[value] = (partition, base + number)

    def consume(self) -> None:
        context = self._context()
        member = self.parts.membership(context, find_topic(context, "t"), "c", "earliest")
        member.join()
        for _ in range(25):
            try:
                member.beat()
                living = member.alive()
                member.acquire_share(living)
                excess = len(member.held) - member.fair_share(living)
                for partition in sorted(member.held, reverse=True)[: max(0, excess)]:
                    member.release(partition)
                for partition in sorted(member.held):
                    self._consume_some(context, member, partition)
            except (UnavailableError, UnknownOutcomeError):
                pass
            except FencedError:
                continue
            context.clock.sleep(self.scheduler.random.uniform(0.1, 1.5))
        member.leave()

    def _consume_some(self, context: Context, member: Leases, partition: int) -> None:
        reader = Reader(context, self.topic, partition)
        at = member.held[partition].lease.cursor
        try:
            for stretch in reader.read(at, at + 3):
                assert stretch.base == at, "a reader skipped or went back"
                for event in stretch.events():
                    assert event.offset is not None
                    self._deliver(partition, event.offset, event.value or b"")
                at = stretch.end
        except NotFoundError as exc:
            at = exc.context["start"]  # trimmed: reported, and accepted here
        if self.scheduler.random.random() < 0.15:
            context.clock.sleep(6)  # so slow that it is taken for dead, and comes back
        member.commit(partition, at)

    def _deliver(self, partition: int, offset: int, value: bytes) -> None:
        known = self.book.values.setdefault((partition, offset), value)
        assert known == value, f"offset {offset} held {known!r} and then {value!r}"
        self.book.delivered.setdefault(partition, set()).add(offset)

    def sweep(self) -> None:
        context = self._context()
        for _ in range(4):
            passing = (UnavailableError, ConflictError, UnknownOutcomeError)
            with contextlib.suppress(*passing):
                check_swept(self.parts.sweep(context, 1), *passing)
            context.clock.sleep(2)

    def trim(self) -> None:
        """Trims only what the consumer has committed, so that P1 can be checked to the end."""
        context = self._context()
        for _ in range(3):
            context.clock.sleep(6)
            offsets = {p: max(0, cursor - 2) for p, cursor in self.book.cursors.items()}
            if not offsets:
                continue
            with contextlib.suppress(UnavailableError, ConflictError, UnknownOutcomeError):
                trim_topic(context, self.topic, ToOffsets(offsets))

    # Checks.

    def check(self) -> None:
        touched, self.rows.touched = self.rows.touched, set()
        is_swept = self.book.deletes != self.objects.deletes
        for partition in range(PARTITIONS):
            where = layout.topic_partition(self.topic.incarnation, partition)
            if is_swept or where in touched:
                self._check_partition(partition)
            self._check_lease(partition)
        self.book.deletes = self.objects.deletes

    def _check_partition(self, partition: int) -> None:
        head = self._heads()[partition]
        before = self.book.heads.get(partition, Head())
        assert before.next <= head.next, "next went back"
        assert before.start <= head.start <= head.next, "start went back or beyond the end"
        assert before.floor <= head.floor, "the floor went back"
        self.book.heads[partition] = head
        at: int | None = None
        for run in self.bare.runs(self.topic.incarnation, partition):
            assert at is None or run["base"] == at, f"rows do not tile: {run['base']} after {at}"
            at = run["base"] + run["count"]
            if at > head.start:
                self._check_data(run)
        self._check_epochs(partition)
        assert at is None or at == head.next, "the last run does not end at the head's next"
        assert at is not None or head.start == head.next, "rows are missing"

    def _check_epochs(self, partition: int) -> None:
        """The epoch of a named producer only grows."""
        where = layout.topic_partition(self.topic.incarnation, partition)
        state = self.bare.row(where, layout.producer_row("named"))
        if state is not None:
            assert state["epoch"] >= self.book.named.get(partition, 0), "an epoch went back"
            self.book.named[partition] = state["epoch"]

    def _check_run(self, run: Run) -> None:
        self._check_data(msgspec.to_builtins(run))

    def _check_data(self, run: dict[str, Any]) -> None:
        assert self.objects.holds(run["object"]), f"object {run['object']} is missing"
        self.bare.events(run)

    def _check_lease(self, partition: int) -> None:
        row = self.rows.get(layout.lease_partition(self.topic.incarnation, "c", partition), "lease")
        if row is None:
            return
        lease = msgspec.msgpack.decode(row.value, type=Lease)
        assert lease.cursor >= self.book.cursors.get(partition, 0), "a cursor went back"
        assert lease.epoch >= self.book.epochs.get(partition, 0), "an epoch went back"
        self.book.cursors[partition] = lease.cursor
        self.book.epochs[partition] = lease.epoch

    def check_end(self) -> None:
        """P1 to P3, by the bare substrates; then the product's reader drains the rest."""
        stored: Counter[bytes] = Counter()
        for partition in range(PARTITIONS):
            head = self._heads()[partition]
            at = max(head.start, self.book.cursors.get(partition, 0))
            bare = dict(self._bare_values(partition))
            stored.update(value for offset, value in bare.items() if offset >= head.start)
            for stretch in Reader(self._quiet, self.topic, partition).read(at):
                for event in stretch.events():
                    assert event.offset is not None
                    assert bare[event.offset] == event.value
                    self._deliver(partition, event.offset, event.value or b"")
            missing = set(range(head.next)) - self.book.delivered.get(partition, set())
            assert not missing, f"offsets {sorted(missing)} of {partition} were never delivered"
        for value, place in self.book.acknowledged.items():
            assert self.book.values.get(place) == value.encode(), f"{value} is not at {place}"
        for value, count in Counter(self.book.values.values()).items():
            assert count == 1, f"{value!r} is stored {count} times"
        for value, count in stored.items():
            assert count == 1, f"{value!r} is stored {count} times"
        names = Counter(v.split(b"-")[1] for v in self.book.values.values() if v[:6] == b"named-")
        assert all(count == 1 for count in names.values()), f"stored twice: {names}"

    def _bare_values(self, partition: int) -> Iterator[tuple[int, bytes]]:
        for run in self.bare.runs(self.topic.incarnation, partition):
            if self.objects.holds(run["object"]):  # else it is below the start
                for number, event in enumerate(self.bare.events(run)):
                    yield run["base"] + number, event["value"]

    def acknowledged(self) -> int:
        return len(self.book.acknowledged)

    # Inside.

    def _heads(self) -> list[Head]:
        rows = [
            self.rows.get(layout.topic_partition(self.topic.incarnation, p), "head")
            for p in range(PARTITIONS)
        ]
        return [msgspec.msgpack.decode(row.value, type=Head) for row in rows if row is not None]
