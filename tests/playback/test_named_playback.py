"""P6 for playbacks with a name: over crashes at every step, two processes at once, lost replies."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from tests.support.heartbeats import await_beat
from tests.support.lost_replies import ReplyLosingCatalog
from tests.support.playback_stage import T0, Stage, places
from tests.support.rounds import rounds
from tidelog.catalog.base import Put
from tidelog.clock import SystemClock
from tidelog.connectors.sink import Lot, PlaybackSink, SinkContext, open_playback_sink
from tidelog.context import Context
from tidelog.errors import (
    FencedError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnknownOutcomeError,
)
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.topics import delete_topic, find_topic
from tidelog.model import layout
from tidelog.model.event import Event
from tidelog.model.playback import Cursor, PlaybackState
from tidelog.model.times import Backoff
from tidelog.model.topic import Topic, encode_row
from tidelog.playback.play import Playback, PlaybackOptions, PlaybackResult, run_named
from tidelog.playback.request import PlaybackRequest, pinned_playback
from tidelog.playback.session import NamedPlayback, find_playback
from tidelog.settings import LogSettings
from tidelog.store.wrappers import RetryingStore
from tidelog.testing.faults import Fault, Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash, Scheduler, seeded_ids

RATES = {
    Fault.LOSE_REQUEST: 0.02,
    Fault.LOSE_REPLY: 0.05,
    Fault.DUPLICATE: 0.03,
    Fault.DELAY: 0.15,
    Fault.CRASH_BEFORE: 0.008,
    Fault.CRASH_AFTER: 0.008,
}
START, END = "2023-11-14T22:13:20Z", "2023-11-15T22:13:20Z"  # T0, and a day later


class Listing:
    """A sink that remembers what it was given."""

    lot_events = 4
    lot_bytes = None

    def __init__(self, kept: list[Cursor]) -> None:
        self._kept = kept

    def put(self, lot: Lot) -> None:
        self._kept += [Cursor(*place) for place in places([lot.batch])]

    def reached(self) -> int:
        return 0

    def close(self, failed: bool = False) -> None:
        pass


class Theatre(Stage):
    """A topic to play, one to play into, and players that come and go."""

    def __init__(self, runs: int = 6, seed: int = 1, targets: int = 3) -> None:
        super().__init__(partitions=2, seed=seed)
        self.target = self.made("target", targets)
        self.players = 0
        for number in range(runs):
            events = [
                Event(
                    b"%d-%d" % (number, n),
                    None if n == 1 else b"k%d" % n,
                    id=f"{number}-{n}",
                    timestamp=T0 + 400 * number + 150 * n,
                    type="t",
                    headers=(("h", b"1"),),
                )
                for n in range(4)
            ]
            self.stored(events, number % 2)

    def player(self, faults: Faults | None = None, scheduler: Scheduler | None = None) -> Context:
        """Another process: its own ids and chances, the same home."""
        self.players += 1
        chance, ids = random.Random(self.players), seeded_ids(1_000 + self.players)
        clock = scheduler.clock if scheduler else self.clock
        settings = LogSettings(lease_ttl_ms=60_000)  # beats come after 20 s of real time
        if faults is None:
            return Context(self.store, self.catalog, clock, ids, chance, settings)
        store = RetryingStore(
            FaultyStore(self.store, faults),
            clock=clock,
            random=chance,
            backoff=Backoff(attempts=3),
        )
        catalog = FaultyCatalog(self.catalog, faults, clock)
        return Context(store, catalog, clock, ids, chance, settings)

    def resume(
        self,
        context: Context,
        asked: PlaybackRequest | None = None,
        how: PlaybackOptions | None = None,
        sink: PlaybackSink | None = None,
    ) -> PlaybackResult | None:
        """One run of ``tidelog playback --resume p``; None when there was nothing left to do."""
        asked = asked or PlaybackRequest("main", "topic:target", START, END)
        topic, pinned = pinned_playback(context, "p", asked)
        named = NamedPlayback(context, "p")
        named.take()
        if named.state.finished_ms:
            return None
        setting = SinkContext.of_named(context, {}, named, pinned)

        def opened() -> PlaybackSink:
            small = sink or open_playback_sink(asked.sink, setting)
            small.lot_events = 5  # type: ignore[misc]
            return small

        playback = Playback(context, topic, pinned.pin, None, how or PlaybackOptions())
        return run_named(playback, named, opened)

    def check(self) -> None:
        """The target has each event once, whole, and in each partition by time."""
        played = list(self.events(self.target))
        wanted = Counter(_whole(event) for event in self.events())
        assert Counter(map(_whole, played)) == wanted
        for partition in range(self.target.partitions):
            times = [event.timestamp for event in played if event.partition == partition]
            assert times == sorted(times)


def _whole(event: Event) -> tuple[object, ...]:
    return event.value, event.key, event.id, event.timestamp, event.type, event.headers


def test_all_is_played_once_and_who_comes_again_is_told_so() -> None:
    theatre = Theatre()
    played = theatre.resume(theatre.player())
    assert played is not None
    assert (played.events, played.finished) == (24, True)
    theatre.check()
    assert theatre.resume(theatre.player()) is None
    theatre.check()
    named = NamedPlayback(theatre.player(), "p")
    named.take()
    assert (named.state.number, named.state.owner, named.state.until) == (24, "", None)


@pytest.mark.parametrize("call", range(1, 101))
def test_one_that_dies_after_any_call_is_finished_by_the_next(call: int) -> None:
    theatre = Theatre()
    faults = Faults(crash_after_call=call)
    died = False
    try:
        theatre.resume(theatre.player(faults))
    except Crash:
        died = True
    assert died or faults.calls < call
    theatre.resume(theatre.player())
    theatre.check()


def test_the_last_call_is_among_those_that_were_died_after() -> None:
    theatre = Theatre()
    faults = Faults()
    theatre.resume(theatre.player(faults))
    assert 80 < faults.calls < 100


@pytest.mark.parametrize("call", range(3, 60, 4))
def test_other_sinks_may_get_the_lot_in_flight_again_and_miss_nothing(call: int) -> None:
    theatre = Theatre()
    asked = PlaybackRequest("main", "null:", START, END)
    first: list[Cursor] = []
    second: list[Cursor] = []
    with contextlib.suppress(Crash):
        player = theatre.player(Faults(crash_after_call=call))
        theatre.resume(player, asked, sink=Listing(first))
    theatre.resume(theatre.player(), asked, sink=Listing(second))
    wanted = [Cursor(*place) for place in theatre.there(T0, T0 + 86_400_000)]
    doubled = sum((Counter(first) & Counter(second)).values())
    assert sorted(set(first) | set(second)) == wanted
    assert doubled <= 5, "more than the lot in flight"
    assert first == sorted(first)
    assert second == sorted(second)


@pytest.mark.parametrize("block", rounds(4, every=2))
def test_two_at_once_in_a_bad_world(block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        theatre = Theatre(seed=seed)
        scheduler = Scheduler(seed)
        faults = Faults(scheduler.random, RATES, scheduler)

        def play(t: Theatre = theatre, f: Faults = faults, s: Scheduler = scheduler) -> None:
            for _ in range(4):
                with contextlib.suppress(TidelogError):
                    t.resume(t.player(f, s))
                s.clock.sleep(s.random.random() * 100)

        scheduler.spawn("one", play)
        scheduler.spawn("two", play)
        scheduler.run(after_step=lambda t=theatre: _nothing_twice(t))  # type: ignore[misc]
        while faults.late:
            faults.late.pop()()
        theatre.resume(theatre.player())
        theatre.check()


def _nothing_twice(theatre: Theatre) -> None:
    if theatre.players % 5 == 0:  # reading all after each step would take minutes
        found = Counter(event.id for event in theatre.events(theatre.target))
        assert not [each for each, count in found.items() if count > 1]


def test_one_that_was_taken_for_dead_is_fenced() -> None:
    theatre = Theatre()
    slow, quick = theatre.player(), theatre.player()
    asked = PlaybackRequest("main", "topic:target", START, END)
    topic, pinned = pinned_playback(slow, "p", asked)
    old = NamedPlayback(slow, "p")
    assert old.try_take()
    sink = open_playback_sink("topic:target", SinkContext.of_named(slow, {}, old, pinned))
    playback = Playback(slow, topic, pinned.pin)
    sink.lot_events = 5  # type: ignore[misc]
    lots = playback.lots(playback.batches(), 0, sink)
    lot = next(lots)
    old.intend(lot.last, lot.end)
    theatre.resume(quick)  # waits until the old one is seen to be silent
    with pytest.raises(FencedError, match="opened elsewhere"):
        sink.put(lot)
    with pytest.raises(FencedError, match="another process has claimed it"):
        old.intend(lot.last, lot.end)
    old.release(lot_is_out=True)
    theatre.check()
    assert theatre.resume(theatre.player()) is None


@pytest.mark.parametrize("call", ["beat", "finish"])
def test_playback_whose_beat_had_an_unknown_outcome_continues(call: str) -> None:
    catalog = ReplyLosingCatalog()
    context = replace(Theatre().player(), catalog=catalog)
    state = Put(layout.PLAYBACK_STATE, encode_row(PlaybackState()))
    catalog.write(layout.playback_partition("p"), state, write_id="w")
    named = NamedPlayback(context, "p")
    assert named.try_take()
    catalog.marked = True
    with pytest.raises(UnknownOutcomeError):
        named.beat()
    catalog.is_down = False
    getattr(named, call)()
    assert named.state.epoch == 1


def test_what_was_in_flight_and_is_erased_since_shifts_no_number() -> None:
    """A lot is told by its first and last event: a topic that has it is not asked for its count."""
    theatre = Theatre(targets=1)
    faults = Faults()
    context = theatre.player(faults)
    asked = PlaybackRequest("main", "topic:target", START, END)
    topic, pinned = pinned_playback(context, "p", asked)
    named = NamedPlayback(context, "p")
    named.take()
    sink = open_playback_sink("topic:target", SinkContext.of_named(context, {}, named, pinned))
    playback = Playback(context, topic, pinned.pin)
    sink.lot_events = 5  # type: ignore[misc]
    lot = next(playback.lots(playback.batches(), 0, sink))
    named.intend(lot.last, lot.end)
    sink.put(lot)  # and dies

    shrunk = _Shrunk(theatre.player(), topic, pinned.pin)
    named = NamedPlayback(shrunk.context, "p")
    named.take()
    setting = SinkContext.of_named(shrunk.context, {}, named, pinned)
    run_named(shrunk, named, lambda: open_playback_sink("topic:target", setting))
    theatre.check()


class _Shrunk(Playback):
    """A playback that finds the first event gone."""

    def batches(self, after: Cursor | None = None):  # type: ignore[no-untyped-def]
        first, *rest = super().batches(after)
        yield first.slice(1)
        yield from rest


def test_stopped_it_goes_on_where_it_was() -> None:
    theatre = Theatre()
    asked = PlaybackRequest("main", "null:", START, END)
    kept: list[Cursor] = []
    for _ in range(4):
        before = len(kept)
        how = PlaybackOptions(stopped=lambda before=before: len(kept) > before)  # type: ignore[misc]
        played = theatre.resume(theatre.player(), asked, how, Listing(kept))
        assert played is not None
        assert not played.finished
        assert len(kept) == before + 5
    played = theatre.resume(theatre.player(), asked, sink=Listing(kept))
    assert played is not None
    assert played.finished
    assert kept == [Cursor(*place) for place in theatre.there(T0, T0 + 86_400_000)]


def test_a_sink_that_fails_lets_the_next_one_try_at_once() -> None:
    theatre = Theatre()
    asked = PlaybackRequest("main", "null:", START, END)
    kept: list[Cursor] = []

    class Failing(Listing):
        def put(self, lot: Lot) -> None:
            if lot.number >= 10:
                raise InvalidError("sink: full: fix it")
            super().put(lot)

    before = theatre.clock.now_ms()
    with pytest.raises(InvalidError, match="full"):
        theatre.resume(theatre.player(), asked, sink=Failing(kept))
    with pytest.raises(OSError, match="no such thing"):
        theatre.resume(theatre.player(), asked, sink=_broken(kept))
    theatre.resume(theatre.player(), asked, sink=Listing(kept))
    assert theatre.clock.now_ms() == before, "nobody had to wait"
    assert kept == [Cursor(*place) for place in theatre.there(T0, T0 + 86_400_000)]


def _broken(kept: list[Cursor]) -> PlaybackSink:
    class Broken(Listing):
        def put(self, lot: Lot) -> None:
            raise OSError("no such thing")

    return Broken(kept)


def test_a_trim_between_two_processes_is_told_from_one_behind_them() -> None:
    theatre = Theatre(runs=40)
    asked = PlaybackRequest("main", "null:", START, END)
    kept: list[Cursor] = []
    how = PlaybackOptions(stopped=lambda: len(kept) >= 80)
    theatre.resume(theatre.player(), asked, how, Listing(kept))
    trim_topic(theatre.context, theatre.main, ToOffsets({0: 16, 1: 16}))  # all of it is out
    how = PlaybackOptions(stopped=lambda: len(kept) >= 100)
    theatre.resume(theatre.player(), asked, how, Listing(kept))
    trim_topic(theatre.context, theatre.main, ToOffsets({0: 72}))
    with pytest.raises(NotFoundError, match="were trimmed while it ran"):
        theatre.resume(theatre.player(), asked, sink=Listing(kept))
    assert len(kept) == len(set(kept)) == 100


def test_it_is_kept_alive_in_a_pause_and_ends_soon_when_it_is_taken() -> None:
    theatre = Theatre(runs=1)
    theatre.run([T0 + 3_600_000])
    quick = LogSettings(lease_ttl_ms=300)
    context = replace(theatre.player(), clock=SystemClock(), log_settings=quick)
    other = NamedPlayback(replace(theatre.player(), clock=SystemClock(), log_settings=quick), "p")
    kept: list[Cursor] = []
    raised: list[BaseException] = []

    def play() -> None:
        try:
            theatre.resume(
                context,
                PlaybackRequest("main", "null:", START, END),
                PlaybackOptions(speed=1),
                Listing(kept),
            )
        except FencedError as exc:
            raised.append(exc)

    playing = threading.Thread(target=play)
    playing.start()
    until_s = time.monotonic() + 60
    while len(kept) < 4:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    state = layout.playback_partition("p"), layout.PLAYBACK_STATE
    for _ in range(11):  # over three times the time to live, as a beat comes after a third of it
        await_beat(context, *state, other._silence._seen[0])
        assert not other.try_take(), "it beats, though it has nothing to do for an hour"
    other._can_take = lambda *_: True  # type: ignore[method-assign]
    while not other.try_take():  # a beat may come between
        pass
    playing.join(60)
    assert not playing.is_alive()
    assert "another process has claimed it" in str(raised[0])


# What a name stands for.


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"start": "2023-11-14T22:13:21Z"}, "began with start"),
        ({"start": "-3h"}, "began with start"),
        ({"end": "2023-11-14"}, "began with end"),
        ({"sink": "topic:other"}, "began with sink"),
        ({"topic": "target"}, "began with topic"),
        ({"as_of": "0:3"}, "began with as-of"),
    ],
)
def test_a_name_stands_for_one_playback(changed: dict[str, str], told: str) -> None:
    theatre = Theatre()
    theatre.made("other")
    context = theatre.player()
    asked = PlaybackRequest("main", "topic:target", START, END)
    pinned_playback(context, "p", asked)
    with pytest.raises(InvalidError, match=told):
        pinned_playback(context, "p", replace(asked, **changed))


def test_resumed_it_needs_no_times_and_takes_the_same_ones() -> None:
    theatre = Theatre()
    context = theatre.player()
    _, first = pinned_playback(
        context, "p", PlaybackRequest("main", "topic:target", "-3h", None, "0:4")
    )
    theatre.clock.advance(3600)
    for same in [
        PlaybackRequest("main", "topic:target"),
        PlaybackRequest("main", "topic:target", "-3h", None, "0:4"),
        PlaybackRequest("main", "topic:target", "2023-11-14T19:13:20.000Z", START),
    ]:
        assert pinned_playback(context, "p", same)[1] == first
    assert find_playback(context, "p") == first
    assert find_playback(context, "q") is None


def test_a_topic_that_was_made_again_is_another_one() -> None:
    theatre = Theatre()
    context = theatre.player()
    asked = PlaybackRequest("main", "topic:target", START, END)
    pinned_playback(context, "p", asked)
    delete_topic(context, "target")
    with pytest.raises(NotFoundError):
        pinned_playback(context, "p", asked)
    theatre.made("target", 3)
    with pytest.raises(InvalidError, match="its target was deleted and made again"):
        pinned_playback(context, "p", asked)
    delete_topic(context, "main")
    theatre.made("main", 2)
    pinned_playback(context, "q", asked)
    with pytest.raises(InvalidError, match="its topic was deleted and made again"):
        pinned_playback(context, "p", asked)


def test_playback_that_waited_for_its_turn_goes_on_in_no_other_topic() -> None:
    """Its target is made again while the one who plays it fails, and another waits for that."""
    theatre = Theatre()
    context, other = theatre.player(), theatre.player()
    asked = PlaybackRequest("main", "topic:target", START, END)
    stops: list[int] = []
    how = PlaybackOptions(
        on_slot=lambda slot: stops.append(slot.events), stopped=lambda: len(stops) > 1
    )
    played = theatre.resume(context, asked, how)
    assert played is not None
    assert not played.finished
    topic, pinned = pinned_playback(other, "p", asked)
    named = NamedPlayback(other, "p")
    delete_topic(context, "target")
    theatre.target = theatre.made("target", 3)
    assert named.take()
    setting = SinkContext.of_named(other, {}, named, pinned)
    playback = Playback(other, topic, pinned.pin)
    with pytest.raises(InvalidError, match="playback `p`: its target was deleted and made again"):
        run_named(playback, named, lambda: open_playback_sink("topic:target", setting))
    assert list(theatre.events(theatre.target)) == []
    assert not named.state.finished_ms


@pytest.mark.parametrize("name", ["", "a b", "-x", "x" * 151, "../x", "ü"])
def test_bad_names_are_refused(name: str) -> None:
    theatre = Theatre()
    with pytest.raises(InvalidError, match="playback name"):
        pinned_playback(theatre.player(), name, PlaybackRequest("main", "topic:target"))


def test_nobody_starts_in_the_middle_of_another_ones_beginning() -> None:
    theatre = Theatre()
    one, other = theatre.player(), theatre.player()
    asked = PlaybackRequest("main", "topic:target", START, END)
    pinned_playback(one, "p", asked)
    theatre.run([T0 + 7])  # not part of it any more
    _, found = pinned_playback(other, "p", asked)
    assert sum(found.pin.ends) == 24
    with pytest.raises(InvalidError, match="never started"):
        NamedPlayback(other, "q").try_take()


def test_a_topic_played_into_itself_comes_to_an_end() -> None:
    theatre = Theatre()
    asked = PlaybackRequest("main", "topic:main", START, END)
    played = theatre.resume(theatre.player(), asked)
    assert played is not None
    assert played.events == 24
    found: Topic = find_topic(theatre.context, "main")
    assert sum(1 for _ in theatre.events(found)) == 48
