"""A journal against a dictionary: whatever two actors do to it, and wherever one of them dies."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.support.compiled_journals import Death
from tests.support.rounds import rounds
from tests.support.topic_upkeep import House
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_staged
from tidelog.context import Context
from tidelog.coordination.audit import Why
from tidelog.errors import (
    AlreadyExistsError,
    NotFoundError,
    PartialAppendError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.journal.amend import Amender
from tidelog.journal.compile import compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.insert_if_absent import append_absent
from tidelog.journal.listing import list_journals
from tidelog.journal.lookup import Lookup
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.partition_reader import Reader
from tidelog.log.producer.append import Appender
from tidelog.log.producer.append_plan import StoredSegment
from tidelog.log.topics import find_topic
from tidelog.model.event import Event, Positions
from tidelog.model.topic import partition_for
from tidelog.playback.merge import play_events
from tidelog.testing.faults import Fault, Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash

PARTITIONS = 2
T0 = 1_700_000_000_000
IDS = st.sampled_from(["a", "ab", "abc", "b", "é", "c" * 300, "d--e", "\U0001f30a", "f/g", "h"])
KEYS = st.sampled_from([None, b"k", b"l"])
VALUES = st.one_of(
    st.none(), st.binary(max_size=8), st.integers(0, 9).map(lambda n: b"%d" % n * 9_000)
)
TIMES = st.integers(0, 30).map(lambda n: T0 + n * 400)
EVENTS = st.builds(
    Event, VALUES, key=KEYS, id=st.one_of(IDS, st.none()), timestamp=TIMES, type=st.just("t")
)
ACTORS = st.integers(0, 1)
DEATHS = st.one_of(st.none(), st.none(), st.integers(1, 40))
RATES = {Fault.LOSE_REPLY: 0.02, Fault.LOSE_REQUEST: 0.01, Fault.DUPLICATE: 0.02}


@dataclass
class Actor:
    """Somebody with a memory of its own, behind a network that loses replies."""

    context: Context
    lookup: Lookup


class JournalMachine(RuleBasedStateMachine):
    """Events by partition and offset, as they should be."""

    steps = 0  # after which all was compared, over all runs

    @initialize(seed=st.integers(0, 1_000))
    def start(self, seed: int) -> None:
        self.house = House(seed)
        self.topic = self.house.topic("t", PARTITIONS)
        self.model: dict[tuple[int, int], Event] = {}
        self.ends = [0] * PARTITIONS
        self.actors = [self._actor(random.Random(seed + number)) for number in range(2)]

    # What actors do.

    @rule(who=ACTORS, events=st.lists(EVENTS, min_size=1, max_size=5), death=DEATHS)
    def put(self, who: int, events: list[Event], death: int | None) -> None:
        for partition in range(PARTITIONS):
            here = [e for e in events if partition_for(e.key or b"", PARTITIONS) == partition]
            if here:
                self._attempt(
                    who, death, lambda context, p=partition, h=here: _append(context, self, p, h)
                )
                self._take_in(partition, here)

    @rule(who=ACTORS, ids=st.lists(IDS, min_size=1, max_size=3, unique=True), value=VALUES)
    def put_if_absent(self, who: int, ids: list[str], value: bytes | None) -> None:
        events = [Event(value, id=each, timestamp=T0) for each in ids]
        there = {event.id for event in self.model.values()} & set(ids)
        actor = self.actors[who]
        refused: set[str] | None = None

        def append(given: Any, *, partition: int, find_end: Callable[[], int]) -> Positions:
            appender, stored = _uploaded(actor.context, self, partition, given)
            base, _ = appender.commit_at(stored, stored.segment.pieces[0], find_end)
            return Positions("t", *_places(partition, base, len(given)))

        try:
            positions = append_absent(actor.lookup, events, append)
        except AlreadyExistsError as exc:
            refused = set(exc.context["ids"])
        except (PartialAppendError, UnavailableError, UnknownOutcomeError):
            for partition in range(PARTITIONS):
                here = [e for e in events if partition_for((e.id or "").encode(), 2) == partition]
                self._take_in(partition, here)
        else:
            refused = set()
            for event, place in zip(events, positions, strict=True):
                self.model[place.partition, place.offset] = event
                self.ends[place.partition] = max(self.ends[place.partition], place.offset + 1)
        assert refused in (None, there)

    @rule(who=ACTORS, values=st.dictionaries(IDS, VALUES, min_size=1, max_size=3), death=DEATHS)
    def update(self, who: int, values: dict[str, bytes | None], death: int | None) -> None:
        missing = set(values) - {event.id for event in self.model.values()}
        done = self._attempt(who, death, lambda context: self._amender(context, who).update(values))
        assert set(done.missing) == missing
        for place, event in self.model.items():
            if event.id in values:
                self.model[place] = _with_value(event, values[event.id])

    @rule(who=ACTORS, ids=st.lists(IDS, min_size=1, max_size=3, unique=True), death=DEATHS)
    def delete(self, who: int, ids: list[str], death: int | None) -> None:
        self._attempt(who, death, lambda context: self._amender(context, who).delete(ids))
        self._forget(lambda event: event.id in ids)

    @rule(who=ACTORS, key=st.sampled_from([b"k", b"l", b"none"]), death=DEATHS)
    def delete_key(self, who: int, key: bytes, death: int | None) -> None:
        self._attempt(
            who,
            death,
            lambda context: self._amender(context, who).delete_key(key, lambda done: None),
        )
        self._forget(lambda event: event.key == key)

    @rule(who=ACTORS, death=DEATHS, few=st.booleans())
    def compile(self, who: int, death: int | None, few: bool) -> None:
        policy = (
            CompilePolicy(min_events=1, min_amendments=1, max_events=3)
            if few
            else CompilePolicy.everything()
        )
        self._attempt(who, death, lambda context: compile_topic(context, self.topic, policy))

    @rule(who=ACTORS, death=DEATHS)
    def sweep(self, who: int, death: int | None) -> None:
        self.house.clock.advance(20)
        self._attempt(who, death, lambda context: sweep_home(context, 0))

    @rule(partition=st.integers(0, PARTITIONS - 1), share=st.integers(0, 4))
    def trim(self, partition: int, share: int) -> None:
        start = self.house.head(self.topic, partition).start
        to = start + (self.ends[partition] - start) * share // 10
        trim_topic(self.house.context, self.topic, ToOffsets({partition: to}))
        self.model = {
            p: event for p, event in self.model.items() if p[0] != partition or p[1] >= to
        }

    # What they see.

    @rule(who=ACTORS, event_id=IDS)
    def get(self, who: int, event_id: str) -> None:
        last: dict[int, tuple[int, Event]] = {}
        for (partition, offset), event in self.model.items():
            if event.id == event_id and offset >= last.get(partition, (-1, event))[0]:
                last[partition] = offset, event
        try:
            found = self._seen(who, lambda actor: actor.lookup.get(event_id))
        except NotFoundError:
            assert not last
            return
        assert found is not None
        newest = max(last, key=lambda p: (last[p][1].timestamp, p))
        offset, event = last[newest]
        assert (found.partition, found.offset) == (newest, offset)
        assert (found.value, found.timestamp, found.key) == (
            event.value,
            event.timestamp,
            event.key,
        )

    @rule(who=ACTORS, start=TIMES, end=TIMES)
    def replay(self, who: int, start: int, end: int) -> None:
        if start > end:
            start, end = end, start
        found = self._seen(who, lambda actor: list(play_events(actor.context, "t", start, end)))
        expected = sorted(
            (event.timestamp, *place)
            for place, event in self.model.items()
            if start <= int(event.timestamp or 0) < end  # type: ignore[arg-type]
        )
        assert [(e.timestamp, e.partition, e.offset) for e in found] == expected
        for event in found:
            assert event.value == self.model[event.partition, event.offset].value

    @rule(who=ACTORS)
    def list(self, who: int) -> None:
        entries = self._seen(who, lambda actor: [*list_journals(actor.context, self.topic)])
        for partition, offset in self.model:
            holders = [e for e in entries if e.partition == partition and e.base <= offset < e.end]
            assert len(holders) == 1
            assert offset not in holders[0].deleted

    @invariant()
    def all_is_as_it_should_be(self) -> None:
        if not hasattr(self, "model"):
            return
        JournalMachine.steps += 1
        for partition in range(PARTITIONS):
            start = self.house.head(self.topic, partition).start
            stretches = Reader(self.house.context, self.topic, partition).read(start)
            found = {e.offset: (e.id, e.value) for s in stretches for e in s.events()}
            expected = {o: (e.id, e.value) for (p, o), e in self.model.items() if p == partition}
            assert found == expected

    def teardown(self) -> None:
        if hasattr(self, "model"):
            report = verify_topic(self.house.context, self.topic)
            assert report.errors == 0, report.findings

    # Inside.

    def _actor(self, source: random.Random) -> Actor:
        context = self._behind(Faults(source, RATES))
        return Actor(
            context,
            Lookup(context, self.topic, bytes_max=PARTITIONS * source.choice([0, 60, 9999])),
        )

    def _behind(self, faults: Faults) -> Context:
        house = self.house
        return Context(
            FaultyStore(house.store, faults),
            FaultyCatalog(house.catalog, faults, house.clock),
            house.clock,
            house.ids,
            random.Random(7),
        )

    def _attempt(self, who: int, death: int | None, run: Callable[[Context], Any]) -> Any:
        """Do it, dying on the way; after that, and when a reply is lost for good, once more."""
        context = self.actors[who].context if death is None else self._behind(Death(death))
        try:
            return run(context)
        except (UnavailableError, UnknownOutcomeError):
            pass
        except Crash:
            self.house.clock.advance(60)
        return run(self.house.context)

    def _seen(self, who: int, look: Callable[[Actor], Any]) -> Any:
        try:
            return look(self.actors[who])
        except UnavailableError:
            return look(Actor(self.house.context, Lookup(self.house.context, self.topic)))

    def _amender(self, context: Context, who: int) -> Amender:
        lookup = (
            self.actors[who].lookup
            if context is self.actors[who].context
            else Lookup(context, self.topic)
        )
        return Amender(context, lookup, Why("somebody"))

    def _take_in(self, partition: int, events: list[Event]) -> None:
        """What came to be there, once or, after a death, twice."""
        end = self.house.head(self.topic, partition).next
        added = end - self.ends[partition]
        assert added % len(events) == 0 if events else added == 0
        for number in range(added):
            place = partition, self.ends[partition] + number
            self.model[place] = events[number % len(events)]
        self.ends[partition] = end

    def _forget(self, is_gone: Callable[[Event], bool]) -> None:
        self.model = {place: e for place, e in self.model.items() if not is_gone(e)}


def _append(
    context: Context,
    machine: JournalMachine,
    partition: int,
    events: list[Event],
) -> int:
    """One run, by a producer of its own; its first offset."""
    appender, stored = _uploaded(context, machine, partition, events)
    base, _ = appender.commit(stored, stored.segment.pieces[0])
    return base


def _uploaded(
    context: Context, machine: JournalMachine, partition: int, events: list[Event]
) -> tuple[Appender, StoredSegment]:
    appender = Appender(context, find_topic(context, "t"), f"~{machine.house.ids.new()}")
    return appender, appender.upload(encode_staged([(partition, table_of(events, T0))]))


def _places(partition: int, base: int, count: int) -> tuple[Any, Any]:
    return np.full(count, partition, np.int32), np.arange(base, base + count, dtype=np.int64)


def _with_value(event: Event, value: bytes | None) -> Event:
    return Event(value, event.key, event.id, event.timestamp, event.type)


@pytest.mark.parametrize("block", rounds(16, every=16))  # 5,000 steps in all
def test_journal_is_equal_to_a_dictionary_after_each_step(block: int) -> None:
    JournalMachine.steps = 0
    run_state_machine_as_test(
        JournalMachine,
        settings=settings(
            max_examples=10,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
    assert JournalMachine.steps >= 312, block
