"""The same world with compilers and somebody who amends: journals replace runs under all of it.

What is checked beside: journals and runs tile, each below or above the head's ``journaled``; the
objects of live rows exist and fit their checksums; amendments are where the head says; and no read
goes back behind an amendment that was acknowledged before it began.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, cast

import crc32c
import msgspec

from tests.sim.world import PARTITIONS, World
from tidelog.context import Context
from tidelog.errors import FencedError, NotFoundError, UnavailableError, UnknownOutcomeError
from tidelog.journal.amendment_writer import AmendmentChange, AmendmentWriter
from tidelog.journal.compile import PartitionCompile, _swaps
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.listing import MovedError
from tidelog.log.consumer.leases import Leases
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.partition_reader import Reader
from tidelog.log.topics import find_topic, read_head
from tidelog.model import layout
from tidelog.model.topic import Head, Run
from tidelog.store.base import Store
from tidelog.testing.scheduler import Scheduler

__all__ = ["CompiledWorld", "State"]

Place = tuple[int, int]


@dataclass(frozen=True)
class State:
    """What an event may be, from some moment on; None: deleted."""

    value: bytes | None


class Stalling:
    """A store that takes long to answer, now and then, when something has been put."""

    def __init__(self, store: Store, scheduler: Scheduler) -> None:
        self._store = store
        self._scheduler = scheduler

    def put(self, key: str, data: bytes) -> str:
        etag = self._store.put(key, data)
        if self._scheduler.random.random() < 0.3:
            self._scheduler.sleep(self._scheduler.random.uniform(0, 20))
        return etag

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class CompiledWorld(World):
    """One seed's world, with journals."""

    compiled = 0  # swaps that were told

    def spawn_all(self) -> None:
        self.states: dict[Place, list[State]] = {}
        self.sure: dict[Place, int] = {}  # the newest state that was acknowledged
        super().spawn_all()
        self._spawn("compiler-1", self.compile)
        self._spawn("compiler-2", self.compile)
        self._spawn("amender", self.amend)

    # The actors.

    def compile(self) -> None:
        context = self._context()
        context = replace(context, store=cast("Store", Stalling(context.store, self.scheduler)))
        topic = find_topic(context, "t")
        for _ in range(6):
            context.clock.sleep(self.scheduler.random.uniform(0.1, 3))
            for partition in range(PARTITIONS):
                most = self.scheduler.random.choice([3, 6, 1_000])
                policy = CompilePolicy(min_events=1, min_amendments=1, max_events=most)
                compiling = PartitionCompile(context, topic, partition, policy)
                with contextlib.suppress(UnavailableError, UnknownOutcomeError, FencedError):
                    if compiling.holding.take():
                        # Without a heartbeat, so that one that is slow is taken for dead.
                        for _done in _swaps(
                            context, compiling, compiling.plan(), None, lambda: True
                        ):
                            self.compiled += 1
                        compiling.holding.release()

    def amend(self) -> None:
        """Updates and deletes what was acknowledged; alone, so that it knows their order."""
        context = self._context()
        chance = self.scheduler.random
        for number in range(12):
            context.clock.sleep(chance.uniform(0, 2))
            places = sorted(self.book.acknowledged.values())
            if not places:
                continue
            place = chance.choice(places)
            states = self.states.setdefault(place, [])
            if any(state.value is None for state in states):
                continue
            value = None if chance.random() < 0.3 else f"new-{number}-{context.ids.new()}".encode()
            states.append(State(value))
            with contextlib.suppress(UnavailableError, UnknownOutcomeError, MovedError):
                if self._amend_one(context, place, value):
                    self.sure[place] = len(states)

    def _amend_one(self, context: Context, place: Place, value: bytes | None) -> bool:
        partition, offset = place
        seen = read_head(context, self.topic, partition)
        writer = AmendmentWriter(
            context, self.topic, partition, seen, context.ids.new(), context.clock.now_ms()
        )
        mark = AmendmentChange(
            None, partition, offset, "delete" if value is None else "update", value
        )
        return bool(list(writer.put([mark])))

    def _consume_some(self, context: Context, member: Leases, partition: int) -> None:
        reader = Reader(context, self.topic, partition)
        at = member.held[partition].lease.cursor
        sure = dict(self.sure)
        try:
            for stretch in reader.read(at, at + 3):
                assert stretch.base == at, "a reader skipped or went back"
                found = dict(zip(stretch.offsets.tolist(), stretch.events(), strict=True))
                for offset in range(stretch.base, stretch.end):
                    value = found[offset].value or b"" if offset in found else None
                    self._see((partition, offset), value, sure)
                at = stretch.end
        except NotFoundError as exc:
            at = exc.context["start"]  # trimmed: reported, and accepted here
        member.commit(partition, at)

    # Checks.

    def _see(self, place: Place, value: bytes | None, sure: dict[Place, int]) -> None:
        """An event was read, or found to be gone; ``sure`` is what counted when it began."""
        states = self.states.get(place, [])
        at = sure.get(place, 0)
        allowed = {state.value for state in states[max(0, at - 1) :]}
        if at:
            assert value in allowed, f"{place} was {value!r}, after it had become {states[at - 1]}"
        elif value not in allowed:
            assert value is not None, f"{place} is gone, and nobody deleted it"
            known = self.book.values.setdefault(place, value)
            assert known == value, f"{place} held {known!r} and then {value!r}"
        self.book.delivered.setdefault(place[0], set()).add(place[1])

    def _check_partition(self, partition: int) -> None:
        where = layout.topic_partition(self.topic.incarnation, partition)
        head = self._heads()[partition]
        before = self.book.heads.get(partition, Head())
        for name in ("next", "start", "floor", "journaled", "compiled", "amendments"):
            assert getattr(before, name) <= getattr(head, name), f"{name} went back"
        assert head.start <= head.next >= head.journaled
        self.book.heads[partition] = head
        journals = [self._run(row.value) for row in self.rows.scan(where, "journal/", "journal0")]
        runs = [self._run(row.value) for row in self.rows.scan(where, "run/", "run0")]
        counted = [*journals, *(run for run in runs if run.base >= head.journaled)]
        living = [run for run in counted if run.end > head.start]
        at = living[0].base if living else head.next
        assert at <= head.start or head.start == head.next, "rows are missing"
        for run in living:
            assert run.base == at, f"rows do not tile: {run.base} after {at}"
            assert (run.journal is not None) == (run.base < head.journaled), "R1"
            at = run.end
            self._check_run(run)
        assert at == head.next, "the last run does not end at the head's next"
        for row in self.rows.scan(where, "amend/", "amend0"):
            first, last = head.amended or (0, -1)
            assert first <= layout.amend_offset(row.row) <= last, "an amendment nobody sees"

    def _check_run(self, run: Run) -> None:
        if run.journal is None:
            super()._check_run(run)
            return
        data = self.objects.get(run.object)
        if run.object not in self.book.checked:
            assert crc32c.crc32c(data) == run.crc
            self.book.checked.add(run.object)

    def _run(self, value: bytes) -> Run:
        return msgspec.msgpack.decode(value, type=Run)

    def check_end(self) -> None:
        """P1 to P3 and P5, with a reader in a good world that drains the rest."""
        stored: Counter[bytes] = Counter()
        for partition in range(PARTITIONS):
            head = self._heads()[partition]
            at = head.start
            for stretch in Reader(self._quiet, self.topic, partition).read(head.start):
                assert stretch.base == at
                found = {event.offset: event.value or b"" for event in stretch.events()}
                stored.update(found.values())
                for offset in range(stretch.base, stretch.end):
                    self._see((partition, offset), found.get(offset), self.sure)
                at = stretch.end
            assert at == head.next
            missing = set(range(head.next)) - self.book.delivered.get(partition, set())
            assert not missing, f"offsets {sorted(missing)} of {partition} were never delivered"
        for value, place in self.book.acknowledged.items():
            known = self.book.values.get(place)
            assert known in (None, value.encode()), f"{value} is not at {place}"
            assert known is not None or self.states.get(place), f"{value} was never there"
        assert all(count == 1 for count in stored.values()), "an event is stored twice"
        report = verify_topic(self._quiet, self.topic)
        assert report.errors == 0, report.findings
