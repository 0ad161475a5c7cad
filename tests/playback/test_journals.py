"""Playback beside compiles, amendments, sweeps and trims: each event once, in order, as amended."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

import tidelog.codec.journal_file as journal_module
from tests.playback.test_named_playback import Theatre
from tests.support.compiled_journals import amend_by_hand
from tests.support.playback_stage import T0, CountingCatalog, Place, Stage, places
from tidelog import Event
from tidelog.catalog.base import Delete
from tidelog.context import Context
from tidelog.errors import CorruptError, NotFoundError
from tidelog.home import create_home
from tidelog.journal.compile import compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.maintenance.verify import verify_topic
from tidelog.model import layout
from tidelog.model.playback import Cursor, Pin, TimeRange
from tidelog.model.topic import Head
from tidelog.playback import run_queue
from tidelog.playback.merge import BufferBounds, play
from tidelog.playback.request import pin_topic
from tidelog.settings import load_settings
from tidelog.spark.playback import WindowTask, planned_runs, run_window
from tidelog.testing.faults import Faults
from tidelog.testing.scheduler import Crash, Scheduler

TINY = BufferBounds(window_bytes=400, ahead_bytes=800, held_bytes=600, batch_events=7)
DAY = 24 * 3600 * 1000
ALL = CompilePolicy.everything()
SOME = CompilePolicy(min_events=1, min_amendments=1, max_events=12)


@pytest.fixture(params=["whole", "by groups"])
def groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals played as runs are, and by their row groups."""
    monkeypatch.setattr(journal_module, "_GROUP_ROWS", 4)
    if request.param == "by groups":
        monkeypatch.setattr(run_queue, "_WHOLE_BYTES", 0)


def compiled(stage: Stage, policy: CompilePolicy = ALL) -> None:
    assert compile_topic(stage.context, stage.main, policy).journals
    stage.clock.advance(1)


def three_partitions() -> Stage:
    """Late events, wide runs and equal times in each."""
    stage = Stage(partitions=3)
    chance = random.Random(5)
    for number in range(60):
        begin = T0 + number * 700
        times = [begin + chance.randrange(chance.choice([3, 900, 60_000])) for _ in range(4)]
        stage.run(times, number % 3)
    return stage


def test_a_swap_that_one_thread_has_met_is_met_by_all() -> None:
    stage = three_partitions()
    guard = run_queue.SwapGuard(stage.context, stage.main)
    assert guard.note(0) == guard.recent(0)
    compiled(stage)
    for look in (guard.check, guard.recent):
        with pytest.raises(run_queue.SwappedError):
            look(0)


def played(
    stage: Stage, pin: Pin, after: Cursor | None = None, context: Context | None = None
) -> list[Place]:
    return list(places(play(context or stage.context, stage.main, pin, bounds=TINY, after=after)))


@pytest.mark.usefixtures("groups")
def test_journals_are_played_as_their_runs_were() -> None:
    stage = three_partitions()
    ranges = [(T0, T0 + DAY), (T0 + 5_000, T0 + 20_000), (T0 + 19_999, T0 + 20_000), (0, T0)]
    expected = [stage.there(*times) for times in ranges]
    compiled(stage, SOME)
    for number in range(6):
        stage.run([T0 + number * 5_000, T0 + 3], number % 3)
    expected = [stage.there(*times) for times in ranges]
    for _ in range(2):
        for times, wanted in zip(ranges, expected, strict=True):
            assert stage.play(*times) == stage.play(*times, bounds=TINY) == wanted
            if wanted:
                middle = len(wanted) // 2
                after = Cursor(*wanted[middle])
                assert stage.play(*times, bounds=TINY, after=after) == wanted[middle + 1 :]
        compile_topic(stage.context, stage.main, ALL)
        sweep_home(stage.context, 0)


@pytest.mark.usefixtures("groups")
def test_amendments_are_seen_in_runs_and_in_journals() -> None:
    stage = three_partitions()
    gone = {(0, 3), (1, 7), (2, 30)}
    for partition, offset in gone:
        amend_by_hand(stage.context, stage.main, partition, {offset: None})
    amend_by_hand(stage.context, stage.main, 1, {8: (b"new",), 9: (None,)})
    expected = [place for place in stage.there(T0, T0 + DAY) if place[1:] not in gone]
    for number in range(2):
        batches = list(play(stage.context, stage.main, stage.pin(T0, T0 + DAY), bounds=TINY))
        assert list(places(batches)) == expected
        assert len(expected) == 240 - 3 - number
        rows = [row for batch in batches for row in batch.to_pylist()]
        values = {(row["partition"], row["offset"]): row["value"] for row in rows}
        assert (values[1, 8], values[1, 9], values[1, 10]) == (b"new", None, b"v2")
        compiled(stage)
        amend_by_hand(stage.context, stage.main, 0, {5: None})
        expected = [place for place in expected if place[1:] != (0, 5)]
        gone |= {(0, 5)}


def test_a_journal_whose_events_were_all_erased() -> None:
    stage = Stage()
    stage.run([T0, T0 + 1])
    amend_by_hand(stage.context, stage.main, 0, {0: None, 1: None})
    assert stage.play(T0, T0 + DAY) == []
    compiled(stage)
    assert stage.rows(stage.main, "slot/") == []
    assert stage.play(T0, T0 + DAY) == []
    stage.run([T0 + 5])
    assert stage.play(T0, T0 + DAY) == [(T0 + 5, 0, 2)]


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("batches", [0, 1, 5, 20])
def test_what_is_compiled_and_swept_under_its_hands(batches: int) -> None:
    stage = three_partitions()
    expected = stage.there(T0, T0 + DAY)
    playing = play(stage.context, stage.main, stage.pin(T0, T0 + DAY), bounds=TINY)
    found = [place for _ in range(batches) for place in places([next(playing)])]
    for policy in (SOME, ALL):
        compiled(stage, policy)
        sweep_home(stage.context, 0)
        found += places([next(playing)])
    found += places(playing)
    assert found == expected


def test_leftover_rows_of_runs_that_were_compiled_are_passed_over() -> None:
    stage = Stage()
    for second in range(5):
        stage.run([T0 + 1_000 * second] * 2)
    rows = [*stage.rows(stage.main, "run/"), *stage.rows(stage.main, "slot/")]
    compiled(stage)
    for row in rows:  # as a compile leaves them that dies
        stage.put(stage.main, row.row, row.value)
    expected = [(T0 + 1_000 * (n // 2), 0, n) for n in range(10)]
    assert stage.play(T0, T0 + DAY) == expected
    sweep_home(stage.context, 0)
    assert len(stage.objects()) == 1
    assert stage.play(T0, T0 + DAY) == expected
    assert verify_topic(stage.context, stage.main).findings == ()


def test_as_of_an_earlier_state() -> None:
    stage = Stage()
    committed = []
    for number in range(6):
        stage.run([T0 + number, T0 + number])
        committed.append(stage.clock.now_ms())
        stage.clock.advance(10)
        if number == 2:
            compiled(stage)
    times = TimeRange(T0, T0 + DAY)

    def end(as_of: int) -> int:
        return pin_topic(stage.context, stage.main, times, as_of).ends[0]

    assert [end(at_ms) for at_ms in committed] == [0, 0, 6, 8, 10, 12]
    pin = pin_topic(stage.context, stage.main, times, {0: 3})
    assert played(stage, pin) == [(T0, 0, 0), (T0, 0, 1), (T0 + 1, 0, 2)]
    compiled(stage)
    assert played(stage, pin) == [(T0, 0, 0), (T0, 0, 1), (T0 + 1, 0, 2)]


def test_a_pinned_playback_is_the_same_after_compiles_and_tells_of_trims() -> None:
    stage = three_partitions()
    pin = stage.pin(T0, T0 + DAY)
    expected = stage.there(T0, T0 + DAY)
    for partition in range(3):
        stage.run([T0 + 1], partition)  # not part of it
    compiled(stage)
    assert played(stage, pin) == expected
    half = Cursor(*expected[120])
    assert played(stage, pin, half) == expected[121:]
    trim_topic(stage.context, stage.main, ToOffsets({1: 60}))
    with pytest.raises(NotFoundError, match="trimmed while it ran"):
        played(stage, pin)


def test_journals_that_are_gone_without_a_trim_are_damage() -> None:
    stage = Stage()
    stage.run([T0])
    compiled(stage)
    [journal] = stage.rows(stage.main, "journal/")
    where = layout.topic_partition(stage.main.incarnation, 0)
    stage.catalog.write(where, Delete(journal.row), write_id="by hand")
    with pytest.raises(CorruptError, match="no run begins there"):
        stage.play(T0, T0 + DAY)
    stage.put(stage.main, journal.row, journal.value)
    stage.store.delete(list(stage.objects()))
    with pytest.raises(CorruptError, match="is gone"):
        stage.play(T0, T0 + DAY)


def test_heads_are_not_read_for_each_run() -> None:
    stage = Stage()
    for second in range(200):
        stage.run([T0 + 1_000 * second])
    counting = CountingCatalog(stage.catalog)
    stage.context = Context(stage.store, counting, stage.clock, stage.ids, stage.context.random)
    assert len(stage.play(T0, T0 + DAY)) == 200
    assert counting.calls < 25


@pytest.mark.parametrize("call", range(20, 80, 4))
def test_a_named_one_that_dies_goes_on_after_deletes_and_compiles(call: int) -> None:
    theatre = Theatre()
    with contextlib.suppress(Crash):
        theatre.resume(theatre.player(Faults(crash_after_call=call)))
    events = [(event.partition or 0, event.offset or 0) for event in theatre.events()]
    gone = events[:3] + events[9:15]
    whole = Counter(event.id for event in theatre.events())
    for partition, offset in gone:
        amend_by_hand(theatre.context, theatre.main, partition, {offset: None})
    left = Counter(event.id for event in theatre.events())
    compiled(theatre)
    sweep_home(theatre.context, 0)
    theatre.resume(theatre.player())
    found = Counter(event.id for event in theatre.events(theatre.target))
    assert left <= found <= whole, "each once, and what is deleted at most once"


# What is planned to be played elsewhere.


@pytest.mark.usefixtures("groups")
def test_a_plan_has_its_amendments_and_is_made_again_where_something_is_compiled() -> None:
    stage = three_partitions()
    amend_by_hand(stage.context, stage.main, 1, {8: (b"new",), 9: None})
    compiled(stage, SOME)
    amend_by_hand(stage.context, stage.main, 2, {5: (b"newer",), 6: None})
    pin = stage.pin(T0, T0 + DAY)
    hands = Hands(lambda: compiled(stage, ALL) if hands.calls == 12 else None)
    found = planned_runs(stage.faulty(Faults(scheduler=cast(Scheduler, hands))), stage.main, pin)
    found = pickle.loads(pickle.dumps(found))
    assert sum(each.raw_bytes for each in found) > 0
    assert {each.run.journal is not None for each in found} == {True}
    assert hands.calls > 30
    assert sum(len(each.amendments) for each in found) == 0, "the second compile has them all"
    amend_by_hand(stage.context, stage.main, 2, {7: None})
    found = planned_runs(stage.context, stage.main, pin)
    assert sum(len(each.amendments) for each in found) == 1


def test_a_task_plays_amended_journals(tmp_path: Path) -> None:
    with create_home(load_settings(str(tmp_path / "home"), {}, tmp_path))[0] as home:
        home.create_topic("t")
        home.append("t", [Event(b"%d" % n, timestamp=T0 + n) for n in range(20)])
        topic = home.topic("t")
        compile_topic(home.context, topic, ALL)
        amend_by_hand(home.context, topic, 0, {3: None, 4: (b"four",)})
        times = TimeRange(T0, T0 + 10)
        runs = tuple(planned_runs(home.context, topic, pin_topic(home.context, topic, times)))
        part = tmp_path / "part.jsonl"
        task = WindowTask(
            "t", 1_000, times, runs, {0: (0, 20)}, home.store.url, str(part), "id", is_file=True
        )
        done = run_window(pickle.loads(pickle.dumps(task)))
        assert (done.error, done.events) == (None, 9)
        lines = [json.loads(line) for line in part.read_bytes().splitlines()]
        assert [line["value"] for line in lines] == [*"012", "four", *"56789"]


# A seeded world.


class Hands:
    """Does something between any two calls that a playback makes."""

    def __init__(self, act) -> None:  # type: ignore[no-untyped-def]
        self.act = act
        self.calls = 0
        self._busy = False

    def pause(self, _label: str) -> None:
        self.calls += 1
        if not self._busy:
            self._busy = True
            try:
                self.act()
            finally:
                self._busy = False


@dataclass
class World:
    """A topic that is compiled, amended and swept while it is played; what may be seen of it."""

    seed: int
    chance: random.Random = field(init=False)
    stage: Stage = field(init=False)
    values: dict[tuple[int, int], list[bytes | None]] = field(default_factory=dict)
    times: dict[tuple[int, int], int] = field(default_factory=dict)
    deleted: set[tuple[int, int]] = field(default_factory=set)
    playing: bool = False
    acts: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.stage = Stage(partitions=2, seed=self.seed, slot_ms=self.chance.choice([100, 5_000]))
        for _ in range(25):
            self.append()
        for _ in range(self.chance.randrange(8)):
            self.act()

    def append(self) -> None:
        partition = self.chance.randrange(2)
        begin = T0 + self.chance.randrange(30_000)
        span = self.chance.choice([1, 50, 2_000, 40_000])
        times = [begin + self.chance.randrange(span) for _ in range(self.chance.randrange(1, 7))]
        base = self.stage.run(times, partition)
        for number, time_ms in enumerate(times):
            self.times[partition, base + number] = time_ms
            self.values[partition, base + number] = [b"v%d" % number]

    def act(self) -> None:
        self.acts += 1
        stage, context = self.stage, self.stage.context
        what = self.chance.choice(["append", "compile", "compile", "amend", "amend", "sweep"])
        if what == "append":
            self.append()
        elif what == "compile":
            most = self.chance.choice([5, 12, 1_000])
            compile_topic(
                context, stage.main, CompilePolicy(min_events=1, min_amendments=1, max_events=most)
            )
        elif what == "sweep":
            sweep_home(context, 0)
        else:
            self.amend()
        stage.clock.advance(self.chance.choice([0, 0.5, 2]))

    def amend(self) -> None:
        place = self.chance.choice(sorted(self.times))
        if place in self.deleted:
            return
        partition, offset = place
        if self.chance.random() < 0.4:
            amend_by_hand(self.stage.context, self.stage.main, partition, {offset: None})
            self.deleted.add(place)
        else:
            value = b"new %d" % self.acts
            amend_by_hand(self.stage.context, self.stage.main, partition, {offset: (value,)})
            self.values[place] = [*(self.values[place] if self.playing else []), value]

    def run(self) -> None:
        stage, chance = self.stage, self.chance
        for place, values in self.values.items():
            self.values[place] = values[-1:]
        pin = stage.pin(T0 + 2_000, T0 + 35_000)
        must = {p for p in self.times if p not in self.deleted and p[1] < pin.ends[p[0]]}
        must = {p for p in must if T0 + 2_000 <= self.times[p] < T0 + 35_000}
        may = set(must)
        self.playing = True
        rate = chance.choice([0.1, 0.3])
        hands = Hands(lambda: self.act() if chance.random() < rate and self.acts < 60 else None)
        context = stage.faulty(Faults(scheduler=cast(Scheduler, hands)))
        bounds = chance.choice([TINY, BufferBounds(), BufferBounds(window_bytes=1, held_bytes=0)])
        found: list[Place] = []
        for batch in play(context, stage.main, pin, bounds=bounds):
            found += places([batch])
            for row in batch.to_pylist():
                place = row["partition"], row["offset"]
                assert row["value"] in self.values[place], "an older state came back"
        assert found == sorted(found), "out of order"
        seen = [place[1:] for place in found]
        assert len(seen) == len(set(seen)), "an event came twice"
        assert set(seen) <= may
        assert must - self.deleted <= set(seen), "an event is missing"
        assert verify_topic(stage.context, stage.main).errors == 0


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_between_any_two_calls(seed: int) -> None:
    World(seed).run()


def test_a_playback_that_trusts_what_it_found_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def trusting(self: run_queue.SwapGuard, partition: int) -> Head:
        return self._read(partition)

    monkeypatch.setattr(run_queue.SwapGuard, "check", trusting)
    caught = 0
    for seed in range(40):
        try:
            World(seed).run()
        except (AssertionError, CorruptError, NotFoundError):
            caught += 1
            if caught == 2:
                return
    pytest.fail("40 seeds did not notice")


def test_with_threads_beside_it() -> None:
    stage = three_partitions()
    expected = stage.there(T0, T0 + DAY)
    with ThreadPoolExecutor(4) as pool:
        playing = play(stage.context, stage.main, stage.pin(T0, T0 + DAY), bounds=TINY, pool=pool)
        found = list(places([next(playing)]))
        compiled(stage)
        sweep_home(stage.context, 0)
        found += places(playing)
    assert found == expected
