"""Playback in a bad world: two drivers of one name play into a topic, beside an amender.

P6, counted from the bare rows and objects of both topics: each event of the range is in the target
once, in the order of times in each partition, with a value that it had between the begin of the
playback and the commit; what was deleted before the begin is not there. Drivers die anywhere and
start again; a plain playback is compared in the same way. In every second world another playback
goes into a topic of Kafka, by transactions that hold fewer events than a lot. In every eighth the
target is deleted and made again: the new one gets nothing of a playback that has begun before.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import msgspec

from tests.sim.base import ACCEPTED
from tests.sim.journal_home import PARTITIONS, Desk
from tests.sim.journal_raw import Gone, Place
from tests.sim.journal_world import JournalWorld
from tests.support.fake_transactions import FakeBroker, FakeTransactions
from tidelog.connectors.kafka.client import TopicRules
from tidelog.connectors.kafka.sink import KafkaPlaybackSink
from tidelog.connectors.sink import SinkContext, open_playback_sink
from tidelog.context import Context
from tidelog.errors import AlreadyExistsError, ConflictError, InvalidError, NotFoundError
from tidelog.log.topics import create_topic, delete_topic, find_topic
from tidelog.model.event import Event, to_iso
from tidelog.model.topic import Topic
from tidelog.playback.merge import play_events
from tidelog.playback.play import Playback, PlaybackOptions, run_named
from tidelog.playback.request import PlaybackRequest, pinned_playback
from tidelog.playback.session import NamedPlayback

__all__ = ["PlaybackWorld"]

NAME = "drill"
FIRST_MS = 1_700_000_000_000
START_MS, END_MS = FIRST_MS + 2_000, FIRST_MS + 17_000
SINK = "topic:out?partition=same"
STREAM, STREAM_SINK = "stream", "kafka://sim:9092/out"


class PlaybackWorld(JournalWorld):
    """One seed's world."""

    prefill = 24
    copied = 0

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.out = self.create("out")
        self.truth.targets.add(self.out.incarnation)
        self.began: int | None = None  # the tick when a driver first asked for the playback
        self.played = 0  # events that a plain playback gave
        self.streams = seed % 2 == 1
        self.broker = FakeBroker()
        self.stream_began: int | None = None
        self.remakes = seed % 8 == 7

    def spawn_all(self) -> None:
        self._spawn("driver-1", self.drive)
        self._spawn("driver-2", self.drive)
        self._spawn("amender", self.amend)
        self._spawn("producer", self.produce)
        self._spawn("player", self.play)
        self._spawn("compiler", self.compile)
        self._spawn("scribe", self.scribe)
        self._spawn("sweeper", self.sweep)
        if self.remakes:
            self._spawn("remaker", self.remake)
        if self.streams:
            self._spawn("streamer-1", self.stream)
            self._spawn("streamer-2", self.stream)

    def event(self) -> Event:
        """With a time that others have too."""
        event = super().event()
        time_ms = FIRST_MS + 250 * self.random.randrange(80)
        return msgspec.structs.replace(event, timestamp=time_ms)

    # The actors.

    def drive(self) -> None:
        context = self._context()
        for _ in range(3):
            context.clock.sleep(self.random.uniform(0, 2))
            remade = (InvalidError, NotFoundError) if self.remakes else ()
            with contextlib.suppress(*ACCEPTED, ConflictError, *remade):
                self._drive(context)

    def remake(self) -> None:
        """Deletes the target, and makes another one of its name, again and again."""
        context = self._context()
        for _ in range(3):
            context.clock.sleep(self.random.uniform(0, 3))
            with contextlib.suppress(*ACCEPTED, ConflictError, NotFoundError):
                delete_topic(context, "out")
            with contextlib.suppress(*ACCEPTED, ConflictError, AlreadyExistsError, NotFoundError):
                self._make_target(context)

    def _make_target(self, context: Context) -> None:
        wanted = Topic("out", context.ids.new(), PARTITIONS, context.clock.now_ms())
        self.truth.targets.add(wanted.incarnation)
        create_topic(context, wanted)

    def _drive(self, context: Context, patient: bool = False) -> None:
        """What the command does."""
        if self.began is None:
            self.began = self.truth.tick
        asked = PlaybackRequest("t", SINK, to_iso(START_MS), to_iso(END_MS))
        topic, pinned = pinned_playback(context, NAME, asked)
        named = NamedPlayback(context, NAME, pinned.generation)
        if self.remakes and not patient:
            context.clock.sleep(self.random.uniform(0, 3))  # as one that waits for another does
        until_s = context.clock.monotonic_s() + (1_000 if patient else 5)
        if not named.take(lambda: context.clock.monotonic_s() > until_s) or named.state.finished_ms:
            return
        setting = SinkContext.of_named(context, {}, named, pinned)
        playback = Playback(context, topic, pinned.pin, None, PlaybackOptions())
        run_named(playback, named, lambda: open_playback_sink(SINK, setting))

    def stream(self) -> None:
        context = self._context()
        for _ in range(3):
            with contextlib.suppress(*ACCEPTED, ConflictError):
                self._stream(context)
            context.clock.sleep(self.random.uniform(0, 2))

    def _stream(self, context: Context, patient: bool = False) -> None:
        """The same into Kafka."""
        if self.stream_began is None:
            self.stream_began = self.truth.tick
        asked = PlaybackRequest("t", STREAM_SINK, to_iso(START_MS), to_iso(END_MS))
        topic, pinned = pinned_playback(context, STREAM, asked)
        named = NamedPlayback(context, STREAM, pinned.generation)
        until_s = context.clock.monotonic_s() + (1_000 if patient else 5)
        if not named.take(lambda: context.clock.monotonic_s() > until_s) or named.state.finished_ms:
            return
        playback = Playback(context, topic, pinned.pin, None, PlaybackOptions())
        run_named(playback, named, self._open_stream)

    def _open_stream(self) -> KafkaPlaybackSink:
        steps: Any = FakeTransactions(self.broker, 3, self._around_commit)
        sink = KafkaPlaybackSink(steps, keep_partition=False, rules=TopicRules())
        sink.lot_events = 7  # type: ignore[misc]
        return sink

    def _around_commit(self, when: str) -> None:
        """Others go on meanwhile; the process may die before its commit, and after it."""
        if self.scheduler.current is None:
            return
        self.scheduler.pause(f"kafka {when}")
        if self.faults.rates and self.chance(0.1):
            raise self.scheduler.crash()

    def play(self) -> None:
        context = self._context()
        for _ in range(2):
            context.clock.sleep(self.random.uniform(0, 3))
            with contextlib.suppress(*ACCEPTED):
                begin = self.truth.tick
                starts = [self.truth.end(self.topic.incarnation, p) for p in range(PARTITIONS)]
                events = list(play_events(context, "t", START_MS, END_MS))
                self._check_played(events, begin, starts)

    # Checks.

    def _check_played(self, events: list[Event], begin: int, ends: list[int]) -> None:
        """``ends`` are those at the begin: what comes later may be part of it or not."""
        self.played += len(events)
        order = [(event.timestamp, event.partition, event.offset) for event in events]
        assert order == sorted(order), "a playback went back in time"
        assert len(set(order)) == len(order), "a playback gave an event twice"
        found = {(event.partition, event.offset): event for event in events}
        for place in self._in_range():
            states = self.truth.states(place, begin)
            event = found.pop(place[1:], None)
            if event is not None:
                assert event.value in states, f"{place} was played as {event.value!r}: {states}"
            elif place[2] < ends[place[1]]:
                assert any(isinstance(each, Gone) for each in states), f"{place} was not played"
        assert not found, f"a playback gave events of other times: {found}"

    def _in_range(self) -> list[Place]:
        return [
            place
            for place, raw in self.truth.events.items()
            if place[0] == self.topic.incarnation and START_MS <= raw.time_ms < END_MS
        ]

    def check_rest(self) -> None:
        """P6, after a driver that meets no faults has finished what is left."""
        if self.remakes:
            self._check_remade()
        else:
            self._drive(self.quiet, patient=True)
            self._check_finished()
        if self.streams:
            self._stream(self.quiet, patient=True)
            rows = self.bare_rows.values(f"playback/{STREAM}")
            assert msgspec.msgpack.decode(rows["state"])["finished_ms"], "it did not finish"
            self._check_stream(msgspec.msgpack.decode(rows["pin"])["pin"])
        Desk(self.quiet).compile("out")
        for partition in range(PARTITIONS):
            self.read_to_end(self.out, partition)

    def _check_finished(self) -> None:
        assert self.began is not None
        rows = self.bare_rows.values(f"playback/{NAME}")
        state = msgspec.msgpack.decode(rows["state"])
        assert state["finished_ms"], "the playback did not finish"
        self._check_out(msgspec.msgpack.decode(rows["pin"])["pin"], self.began)

    def _check_remade(self) -> None:
        """A target that is not the one of the pin has nothing; the other one is as always."""
        try:
            self.out = find_topic(self.quiet, "out")
        except NotFoundError:  # half made or half deleted
            with contextlib.suppress(NotFoundError):
                delete_topic(self.quiet, "out")
            self._make_target(self.quiet)
            self.out = find_topic(self.quiet, "out")
        with contextlib.suppress(InvalidError):  # begun into the one before
            self._drive(self.quiet, patient=True)
        pinned = msgspec.msgpack.decode(self.bare_rows.values(f"playback/{NAME}")["pin"])
        wrong = [
            place
            for place in self.truth.events
            if place[0] not in (self.topic.incarnation, pinned["target"])
        ]
        assert not wrong, f"another topic of the target's name got {wrong}"
        if pinned["target"] == self.out.incarnation:
            self._check_finished()

    def _check_stream(self, pin: dict[str, Any]) -> None:
        """P6 for Kafka: each event once, in the order of times, none left out."""
        assert self.stream_began is not None
        records = self.broker.records
        times = [record["timestamp"] for record in records]
        assert times == sorted(times), "times in Kafka go back"
        there = Counter(record["id"] for record in records)
        twice = [each for each, count in there.items() if count > 1]
        assert not twice, f"{twice} are in Kafka twice"
        values = {record["id"]: record["value"] for record in records}
        for source in self._in_range():
            if source[2] >= pin["ends"][source[1]]:
                continue
            states = self.truth.states(source, self.stream_began)
            event_id = self.truth.events[source].id or ""
            if event_id not in values:
                gone = any(isinstance(each, Gone) for each in states)
                assert gone, f"{source} was not played into Kafka"
            else:
                value = values[event_id]
                assert value in states, f"{source} was played as {value!r}: {states}"

    def _check_out(self, pin: dict[str, Any], began: int) -> None:
        assert pin["incarnation"] == self.topic.incarnation
        target = self.out.incarnation
        out = {place: raw for place, raw in self.truth.events.items() if place[0] == target}
        for partition in range(PARTITIONS):
            times = [out[place].time_ms for place in sorted(out) if place[1] == partition]
            assert times == sorted(times), f"times of out/{partition} go back"
        there: dict[str, Place] = {}
        for place, raw in out.items():
            assert raw.id is not None
            assert raw.id not in there, f"{raw.id} is in the target twice"
            there[raw.id] = place
        for source in self._in_range():
            if source[2] < pin["ends"][source[1]]:
                self._check_source(source, there, began)
        assert not there, f"events in the target that are not of the range: {there}"

    def _check_source(self, source: Place, there: dict[str, Place], began: int) -> None:
        place = there.pop(self.truth.events[source].id or "", None)
        if place is None:
            states = self.truth.states(source, began)
            assert any(isinstance(each, Gone) for each in states), f"{source} was not played"
            return
        assert place[1] == source[1]
        committed, value = self.truth.history[place][0]
        states = self.truth.states(source, began, committed)
        assert value in states, f"{source} was played as {value!r}, but it was {states}"
