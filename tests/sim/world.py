"""The log in a bad world: producers, consumers, a sweeper and a trimmer over faulty substrates.

The protocols are the real ones. Actors are killed and started again; requests and replies are lost,
delayed and doubled; the wall clock jumps. The invariants are checked on the bare substrates after
every step, and P1 to P3 at the end, when the survivors have finished and one reader has drained
all.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from tests.sim.audit import AuditedCatalog
from tidelog.codec.events import table_of
from tidelog.codec.segment import encode_segment, read_piece
from tidelog.errors import (
    ConflictError,
    FencedError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.append import Appender
from tidelog.log.base import Log, LogSettings
from tidelog.log.lease import Lease, Membership
from tidelog.log.read import Reader
from tidelog.log.sweep import sweep_home
from tidelog.log.topics import create_topic, find_topic
from tidelog.log.trim import ToOffsets, trim_topic
from tidelog.model import layout
from tidelog.model.backoff import Backoff
from tidelog.model.event import Event
from tidelog.model.run import Head, Run
from tidelog.model.topic import Topic
from tidelog.store.memory import MemoryStore
from tidelog.store.retry import RetryingStore
from tidelog.testing.clock import seeded_ids
from tidelog.testing.faults import Fault, Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Actor, Scheduler

RATES = {
    Fault.LOSE_REQUEST: 0.02,
    Fault.LOSE_REPLY: 0.04,
    Fault.DUPLICATE: 0.03,
    Fault.DELAY: 0.10,
    Fault.STALL: 0.01,
    Fault.FREEZE: 0.004,
    Fault.TRY_AGAIN: 0.02,
    Fault.CRASH_BEFORE: 0.004,
    Fault.CRASH_AFTER: 0.004,
    Fault.STALE_LIST: 0.2,
}
PARTITIONS = 2
RESTARTS = 12  # of all actors together


@dataclass
class Parts:
    """What a planted bug replaces."""

    catalog: type[AuditedCatalog] = AuditedCatalog
    faulty: type[FaultyCatalog] = FaultyCatalog
    appender: type[Appender] = Appender
    membership: type[Membership] = Membership
    sweep: Callable[[Log, int], object] = sweep_home
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
    trimmed: dict[int, int] = field(default_factory=dict)


class CountingStore(MemoryStore):
    """Counts deletions, so that the invariants are checked only when something has changed."""

    deletes = 0

    def delete(self, keys: Iterable[str]) -> None:
        self.deletes += 1
        super().delete(keys)


class World:
    """One seed's world."""

    def __init__(self, seed: int, parts: Parts | None = None) -> None:
        self.parts = parts or Parts()
        self.scheduler = Scheduler(seed)
        self.faults = Faults(self.scheduler.random, RATES, self.scheduler, page_rows=3)
        self.rows = self.parts.catalog()
        self.objects = CountingStore(self.scheduler.clock)
        self.book = Book()
        self.restarts = 0
        self._checked_at = (-1, -1)
        self._ids = seeded_ids(seed)
        self._quiet = self._log(faulty=False)
        wanted = Topic("t", self._ids.new(), PARTITIONS, 0)
        self.topic = create_topic(self._quiet, wanted)
        self._actors: list[tuple[str, Callable[[], None], Actor]] = []

    def run(self) -> Counter[Fault]:
        """Until all have finished; then P1 to P3."""
        self.spawn_all()
        self.scheduler.run(steps_max=60_000, after_step=self._after_step)
        self.check_end()
        return self.faults.counts

    def spawn_all(self) -> None:
        """The actors of this world."""
        self._spawn("producer-a", lambda: self.produce("a"))
        self._spawn("producer-b", lambda: self.produce("b"))
        self._spawn("named", self.produce_named)
        self._spawn("consumer-1", self.consume)
        self._spawn("consumer-2", self.consume)
        self._spawn("sweeper", self.sweep)
        self._spawn("trimmer", self.trim)

    # The actors.

    def produce(self, name: str) -> None:
        log = self._log()
        appender = self.parts.appender(log, find_topic(log, "t"), f"~{log.ids.new()}")
        for number in range(6):
            partition = self.scheduler.random.randrange(PARTITIONS)
            values = [f"{name}-{log.ids.new()}-{number}-{n}" for n in range(2)]
            self._append(log, appender, partition, values, None)
        appender.close()

    def produce_named(self) -> None:
        """Sends sequences 0 to 9, again from the start after each death: each must land once."""
        log = self._log()
        appender = self.parts.appender(log, find_topic(log, "t"), "named")
        before = appender.open_named()
        for sequence in range(10):
            partition = sequence % PARTITIONS
            if sequence > before[partition].last:
                self._append(log, appender, partition, [f"named-{sequence}"], [sequence])

    def _append(
        self,
        log: Log,
        appender: Appender,
        partition: int,
        values: list[str],
        sequences: list[int] | None,
    ) -> None:
        table = table_of([Event(value.encode()) for value in values], log.clock.now_ms())
        segment = encode_segment([(partition, table)])
        for _ in range(5):
            try:
                if self.parts.acknowledge_early:
                    head = self._heads()[partition]
                    self._acknowledge(values, partition, head.next)
                stored = appender.upload(segment)
                base, _ = appender.commit(stored, segment.pieces[0], sequences)
            except (UnavailableError, ConflictError):
                log.clock.sleep(0.1)
                continue
            except (UnknownOutcomeError, FencedError):
                return  # not acknowledged: it may be there or not, but never twice
            self._acknowledge(values, partition, base)
            return

    def _acknowledge(self, values: list[str], partition: int, base: int) -> None:
        for number, value in enumerate(values):
            self.book.acknowledged[value] = (partition, base + number)

    def consume(self) -> None:
        log = self._log()
        member = self.parts.membership(log, find_topic(log, "t"), "c", "earliest")
        member.join()
        for _ in range(25):
            try:
                member.beat()
                living = member.alive()
                member.take_some(living)
                excess = len(member.held) - member.fair_share(living)
                for partition in sorted(member.held, reverse=True)[: max(0, excess)]:
                    member.release(partition)
                for partition in sorted(member.held):
                    self._consume_some(log, member, partition)
            except UnavailableError:
                pass
            except FencedError:
                continue
            log.clock.sleep(self.scheduler.random.uniform(0.1, 1.5))
        member.leave()

    def _consume_some(self, log: Log, member: Membership, partition: int) -> None:
        reader = Reader(log, self.topic, partition)
        at = member.held[partition].lease.cursor
        try:
            for stretch in reader.stretches(at, at + 3):
                assert stretch.base == at, "a reader skipped or went back"
                for event in stretch.events():
                    assert event.offset is not None
                    self._deliver(partition, event.offset, event.value or b"")
                at = stretch.end
        except NotFoundError as exc:
            at = exc.context["start"]  # trimmed: reported, and accepted here
        if self.scheduler.random.random() < 0.15:
            log.clock.sleep(6)  # so slow that it is taken for dead, and comes back
        member.commit(partition, at)

    def _deliver(self, partition: int, offset: int, value: bytes) -> None:
        known = self.book.values.setdefault((partition, offset), value)
        assert known == value, f"offset {offset} held {known!r} and then {value!r}"
        self.book.delivered.setdefault(partition, set()).add(offset)

    def sweep(self) -> None:
        log = self._log()
        for _ in range(4):
            with contextlib.suppress(UnavailableError, ConflictError, UnknownOutcomeError):
                self.parts.sweep(log, 1)
            log.clock.sleep(2)

    def trim(self) -> None:
        """Trims only what the consumer has committed, so that P1 can be checked to the end."""
        log = self._log()
        for _ in range(3):
            log.clock.sleep(6)
            offsets = {p: max(0, cursor - 2) for p, cursor in self.book.cursors.items()}
            if not offsets:
                continue
            with contextlib.suppress(UnavailableError, ConflictError, UnknownOutcomeError):
                trim_topic(log, self.topic, ToOffsets(offsets))

    # Checks.

    def _after_step(self) -> None:
        self._restart_the_dead()
        if self.scheduler.random.random() < 0.002:
            self.scheduler.time.jump(self.scheduler.random.uniform(-3_600, 3_600))
        seen = (self.rows.writes, self.objects.deletes)
        if seen == self._checked_at:
            return
        self._checked_at = seen
        for partition in range(PARTITIONS):
            self._check_partition(partition)
            self._check_lease(partition)

    def _check_partition(self, partition: int) -> None:
        where = layout.topic_partition(self.topic.incarnation, partition)
        head = self._heads()[partition]
        before = self.book.heads.get(partition, Head())
        assert before.next <= head.next, "next went back"
        assert before.start <= head.start <= head.next, "start went back or beyond the end"
        assert before.floor <= head.floor, "the floor went back"
        self.book.heads[partition] = head
        at: int | None = None
        for row in self.rows.scan(where, "run/", "run0"):
            run = msgspec.msgpack.decode(row.value, type=Run)
            assert at is None or run.base == at, f"rows do not tile: {run.base} after {at}"
            at = run.end
            if run.end > head.start:
                self._check_run(run)
        assert at is None or at == head.next, "the last run does not end at the head's next"
        assert at is not None or head.start == head.next, "rows are missing"

    def _check_run(self, run: Run) -> None:
        data = self.objects.get(run.object, run.byte_start, run.byte_end)
        key = f"{run.base}/{run.object}"
        if key not in self.book.checked:
            list(read_piece(data, run.crc, run.count, key))
            self.book.checked.add(key)

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
        """P1 to P3, with a reader in a good world that drains the rest."""
        stored: Counter[bytes] = Counter()
        for partition in range(PARTITIONS):
            head = self._heads()[partition]
            at = max(head.start, self.book.cursors.get(partition, 0))
            for stretch in Reader(self._quiet, self.topic, partition).stretches(head.start):
                for event in stretch.events():
                    assert event.offset is not None
                    stored[event.value or b""] += 1
                    if event.offset >= at:
                        self._deliver(partition, event.offset, event.value or b"")
            missing = set(range(head.next)) - self.book.delivered.get(partition, set())
            assert not missing, f"offsets {sorted(missing)} of {partition} were never delivered"
        for value, place in self.book.acknowledged.items():
            assert self.book.values.get(place) == value.encode(), f"{value} is not at {place}"
        for value, count in Counter(self.book.values.values()).items():
            assert count == 1, f"{value!r} is stored {count} times"
        for value, count in stored.items():
            assert count == 1, f"{value!r} is stored {count} times"

    # Inside.

    def _log(self, faulty: bool = True) -> Log:
        scheduler = self.scheduler
        chance = random.Random(scheduler.random.getrandbits(64))
        settings = LogSettings(lease_ttl_ms=3_000)
        if not faulty:
            return Log(self.objects, self.rows, scheduler.clock, self._ids, chance, settings)
        store = RetryingStore(
            FaultyStore(self.objects, self.faults),
            clock=scheduler.clock,
            random=chance,
            backoff=Backoff(attempts=3),
        )
        catalog = self.parts.faulty(self.rows, self.faults, scheduler.clock)
        return Log(store, catalog, scheduler.clock, self._ids, chance, settings)

    def _heads(self) -> list[Head]:
        rows = [
            self.rows.get(layout.topic_partition(self.topic.incarnation, p), "head")
            for p in range(PARTITIONS)
        ]
        return [msgspec.msgpack.decode(row.value, type=Head) for row in rows if row is not None]

    def _spawn(self, name: str, run: Callable[[], None]) -> None:
        def live() -> None:
            try:
                run()
            except TidelogError as exc:
                if not isinstance(exc, UnavailableError | UnknownOutcomeError | FencedError):
                    raise

        self._actors.append((name, run, self.scheduler.spawn(name, live)))

    def _restart_the_dead(self) -> None:
        for index, (name, run, actor) in enumerate(self._actors):
            killed = actor.done and self.scheduler.was_killed(actor)
            if killed and self.restarts < RESTARTS:
                self.restarts += 1
                del self._actors[index]
                self._spawn(name, run)
                return
