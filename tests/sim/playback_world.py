"""Playback in a bad world: two drivers of one name play into a topic, beside an amender.

P6, counted from the bare rows and objects of both topics: each event of the range is in the target
once, in the order of times in each partition, with a value that it had between the begin of the
playback and the commit; what was deleted before the begin is not there. Drivers die anywhere and
start again; a plain playback is compared in the same way.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from tests.sim.base import ACCEPTED
from tests.sim.journal_home import PARTITIONS, Desk
from tests.sim.journal_raw import Gone, Place
from tests.sim.journal_world import JournalWorld
from tidelog.errors import ConflictError
from tidelog.log.base import Log
from tidelog.model.event import Event, to_iso
from tidelog.playback.asked import Asked, pinned_playback
from tidelog.playback.named import NamedPlayback
from tidelog.playback.outlets import Setting, open_outlet
from tidelog.playback.play import play_events
from tidelog.playback.run import How, Playback, run_named

__all__ = ["PlaybackWorld"]

NAME = "drill"
FIRST_MS = 1_700_000_000_000
START_MS, END_MS = FIRST_MS + 2_000, FIRST_MS + 17_000
SINK = "topic:out?partition=same"


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

    def spawn_all(self) -> None:
        self._spawn("driver-1", self.drive)
        self._spawn("driver-2", self.drive)
        self._spawn("amender", self.amend)
        self._spawn("producer", self.produce)
        self._spawn("player", self.play)
        self._spawn("compiler", self.compile)
        self._spawn("scribe", self.scribe)
        self._spawn("sweeper", self.sweep)

    def event(self) -> Event:
        """With a time that others have too."""
        event = super().event()
        time_ms = FIRST_MS + 250 * self.random.randrange(80)
        return msgspec.structs.replace(event, timestamp=time_ms)

    # The actors.

    def drive(self) -> None:
        log = self._log()
        for _ in range(3):
            log.clock.sleep(self.random.uniform(0, 2))
            with contextlib.suppress(*ACCEPTED, ConflictError):
                self._drive(log)

    def _drive(self, log: Log, patient: bool = False) -> None:
        """What the command does."""
        if self.began is None:
            self.began = self.truth.tick
        asked = Asked("t", SINK, to_iso(START_MS), to_iso(END_MS))
        topic, pinned = pinned_playback(log, NAME, asked)
        named = NamedPlayback(log, NAME, pinned.generation)
        until_s = log.clock.monotonic_s() + (1_000 if patient else 5)
        if not named.take(lambda: log.clock.monotonic_s() > until_s) or named.state.finished_ms:
            return
        setting = Setting.of(log, {}, f"{topic.incarnation}-{named.label}", named)
        playback = Playback(log, topic, pinned.pin, None, How())
        run_named(playback, named, lambda: open_outlet(SINK, setting))

    def play(self) -> None:
        log = self._log()
        for _ in range(2):
            log.clock.sleep(self.random.uniform(0, 3))
            with contextlib.suppress(*ACCEPTED):
                begin = self.truth.tick
                starts = [self.truth.end(self.topic.incarnation, p) for p in range(PARTITIONS)]
                events = list(play_events(log, "t", START_MS, END_MS))
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
        self._drive(self.quiet, patient=True)
        assert self.began is not None
        rows = self.bare_rows.values(f"playback/{NAME}")
        state = msgspec.msgpack.decode(rows["state"])
        assert state["finished_ms"], "the playback did not finish"
        self._check_out(msgspec.msgpack.decode(rows["pin"])["pin"], self.began)
        Desk(self.quiet).compile("out")
        for partition in range(PARTITIONS):
            self.read_to_end(self.out, partition)

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
