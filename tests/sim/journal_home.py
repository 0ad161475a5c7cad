"""A home in a bad world: processes on several hosts, and the truth about its events.

Limits are small here, so that a few events make several lots, records, pages and row groups.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, cast

import numpy as np

from tests.sim import base
from tests.sim.bare import fields
from tests.sim.base import SimWorld
from tests.sim.journal_raw import Truth, WatchedCatalog, WatchedStore
from tidelog.api.journal import JournalCalls
from tidelog.codec import journal_file as journal_codec
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_staged
from tidelog.connectors.topic.sink import TopicPlaybackSink
from tidelog.context import Context
from tidelog.journal import amend
from tidelog.journal import amendment_writer as marks
from tidelog.journal import insert_if_absent as absent
from tidelog.journal.amend import AmendResult
from tidelog.journal.lookup import Lookups
from tidelog.journal.scribe import ScribeOptions, Turn
from tidelog.log import partition_reader as read
from tidelog.log import run_reader as amended
from tidelog.log.producer.append import Appender
from tidelog.log.topics import create_topic, find_topic
from tidelog.model.event import Event, Positions
from tidelog.model.topic import Topic
from tidelog.testing.faults import Fault

__all__ = ["KEYS", "PARTITIONS", "Desk", "HomeWorld"]

RATES = base.RATES | {
    Fault.DUPLICATE: 0.06,
    Fault.STALL: 0.004,
    Fault.FREEZE: 0.002,
    Fault.CRASH_BEFORE: 0.001,  # some calls, as that which reads the ledger, make many requests
    Fault.CRASH_AFTER: 0.001,
}
PARTITIONS = 2
KEYS = 5

SMALL: Sequence[tuple[Any, str, int]] = (
    (marks, "_ROWS_AT_ONCE", 3),
    (marks, "INLINE_BYTES_MAX", 48),
    (amend, "_IDS_AT_ONCE", 12),
    (amended, "_ROWS_MAX", 6),
    (read, "_RUNS_AT_ONCE", 4),
    (journal_codec, "_GROUP_ROWS", 8),
    (TopicPlaybackSink, "lot_events", 7),
)


@contextlib.contextmanager
def small_limits(limits: Sequence[tuple[Any, str, int]]) -> Iterator[None]:
    """Let a few events be many."""
    before = [getattr(module, name) for module, name, _ in limits]
    for module, name, value in limits:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(limits, before, strict=True):
            setattr(module, name, value)


class Desk(JournalCalls):
    """A process's home, as far as journals go; without threads."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._pool = cast("Executor", None)
        self._lookups = Lookups(context)
        self._who = "sim"

    def topic(self, name: str) -> Topic:
        return find_topic(self.context, name)

    def _after_turns(self, context: Context, how: ScribeOptions) -> Callable[[Turn], Turn]:
        return lambda turn: turn  # there are no archives here

    def delete(self, topic: str, ids: Iterable[str], *, why: str = "") -> AmendResult:
        """What ``Home.delete`` does in a topic without archives."""
        return self._amender(topic, why, None).delete(ids)

    def delete_key(self, topic: str, key: bytes, *, why: str = "") -> AmendResult:
        """What ``Home.delete_key`` does in a topic without archives."""
        return self._amender(topic, why, None).delete_key(key, lambda done: None)

    def append_absent(self, topic: str, events: Sequence[Event]) -> Positions:
        """What ``Home.append(..., if_absent=True)`` does."""
        found = self.topic(topic)
        appender = Appender(self.context, found, f"~{self.context.ids.new()}")

        def append(events: Any, *, partition: int, find_end: Callable[[], int]) -> Positions:
            segment = encode_staged([(partition, table_of(events, self.context.clock.now_ms()))])
            stored = appender.upload(segment)
            base, _ = appender.commit_at(stored, segment.pieces[0], find_end)
            count = len(events)
            return Positions(
                topic, np.full(count, partition, np.int32), np.arange(base, base + count)
            )

        return absent.append_absent(self._lookups.of(found), events, append)


class HomeWorld(SimWorld):
    """One seed's home, with the truth about its events."""

    rates = RATES

    def __init__(self, seed: int) -> None:
        super().__init__(seed, WatchedCatalog)
        assert isinstance(self.rows, WatchedCatalog)
        self.bare_rows = self.rows
        self.bare_objects = WatchedStore(self.scheduler.clock)
        self.objects = self.bare_objects
        self.truth = Truth(self.bare_rows, self.bare_objects)
        self.bare_rows.truth = self.bare_objects.truth = self.truth
        self.faults.stall_s = 10.0
        self.quiet = self._context(faulty=False)
        self._numbers = iter(range(10_000))
        self.topic = self.create("t")

    def run(self) -> Counter[Fault]:
        many = (amend, "RECORD_BYTES_MAX", self.random.choice([400, 3_050, 3_050]))
        with small_limits((*SMALL, many)):
            self.fill()
            return super().run()

    def fill(self) -> None:
        """Put there what is there from the beginning."""

    def check(self) -> None:
        """Nothing: the truth is checked at every write."""

    def check_end(self) -> None:
        """Check what is left, in a thread of its own."""
        self.scheduler.spawn("end", self.check_rest)
        self.scheduler.run()

    def check_rest(self) -> None:
        """What must be true when all have ended."""

    def pass_notes(self) -> None:
        """Let a week pass after every note of a stray, also one by a clock that was ahead."""
        noted_ms = [
            fields(row.value)["at_ms"]
            for rows in self.bare_rows._partitions.values()
            for name, row in rows.items()
            if name.startswith("stray/")
        ]
        ahead_s = (max(noted_ms, default=0) - self.quiet.clock.now_ms()) / 1_000
        if ahead_s > 0:
            self.scheduler.time.advance(ahead_s + 8 * 86_400)

    # For actors.

    def create(self, name: str) -> Topic:
        """A new topic."""
        return create_topic(self.quiet, Topic(name, self._ids.new(), PARTITIONS, 0))

    def event(self) -> Event:
        """A new event, whose value begins with its id, as all its later values do."""
        event_id = f"id{next(self._numbers):04}x"
        key = f"k{self.random.randrange(KEYS)}".encode()
        time_ms = 1_700_000_000_000 + self.random.randrange(20_000)
        return Event(f"{event_id}=0".encode(), key=key, id=event_id, timestamp=time_ms)

    def append(self, context: Context, partition: int, events: Sequence[Event]) -> None:
        """Append events to the topic; on return they must be there."""
        appender = Appender(context, find_topic(context, "t"), f"~{context.ids.new()}")
        segment = encode_staged([(partition, table_of(list(events), context.clock.now_ms()))])
        base, _ = appender.commit(appender.upload(segment), segment.pieces[0])
        for number, event in enumerate(events):
            self.check_stored(event.id or "", (partition, base + number))

    def check_stored(self, event_id: str, place: tuple[int, int]) -> None:
        """An append was acknowledged: P1."""
        found = [each[1:] for each in self.truth.by_id.get(event_id, ())]
        assert place in found, f"{event_id} is not at {place}"

    def some_ids(self, count: int) -> list[str]:
        """Ids of events that are or were there."""
        known = sorted(self.truth.by_id)
        return self.random.sample(known, min(count, len(known)))
