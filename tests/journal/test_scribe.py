"""The scribe: one at a time, no more often than it may, whoever dies."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from tests.journal.test_compile import filled, values
from tests.support.compiled_journals import Death, Press
from tests.support.rounds import rounds
from tidelog import Event
from tidelog.concurrency import NoProcesses
from tidelog.context import Context
from tidelog.errors import InvalidError, TidelogError, UnavailableError
from tidelog.home import create_home
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.scribe import Rate, Scribe, ScribeOptions, Tickets, Turn, TurnPosition
from tidelog.model import layout
from tidelog.model.topic import Topic
from tidelog.settings import Settings
from tidelog.testing.faults import Fault, Faults
from tidelog.testing.scheduler import Crash, seeded_ids

MINUTE_S = 60
RATE = Rate(10 * MINUTE_S * 1000, 60 * MINUTE_S * 1000)
EAGER = ScribeOptions(RATE, CompilePolicy.everything(), grace_ms=0, sweep_every_ms=0)


@pytest.fixture
def press() -> Press:
    return Press()


def scribe(press: Press, how: ScribeOptions = EAGER, seed: int = 5) -> Scribe:
    context = Context(
        press.store, press.catalog, press.clock, seeded_ids(seed), random.Random(seed)
    )
    return Scribe(context, how)


def some_topics(press: Press, *names: str) -> list[Topic]:
    return [filled(press, name=name) for name in names]


def test_a_turn_compiles_all_topics_and_sweeps(press: Press) -> None:
    topics = some_topics(press, "a", "b", "c")
    press.amend(topics[1], 3, delete=True)
    turn = scribe(press).tick()
    assert turn is not None
    assert (turn.finished, turn.topics, turn.turns, turn.waiting) == (True, 3, 1, 0)
    assert (turn.compiled.journals, turn.compiled.amendments, turn.troubles) == (3, 1, ())
    assert turn.swept is not None
    assert turn.swept.objects_deleted == 15
    assert [len(press.journals(topic)) for topic in topics] == [1, 1, 1]
    assert len(press.objects()) == 3
    assert press.events(topics[0]) == values()


def test_there_is_one_turn_for_each_stretch_of_time(press: Press) -> None:
    scribes = [scribe(press, seed=seed) for seed in range(3)]
    turns = 0
    for _ in range(6 * 60):
        for each in scribes:
            turns += each.tick() is not None
        press.clock.advance(10)
    assert turns == 6 + 1  # an hour begins within a stretch


def test_tickets_that_nobody_had_time_for_are_dropped(press: Press) -> None:
    tickets = Tickets(press.context, RATE)
    seen: set[int] = set()
    for _ in range(200):
        waiting = tickets.issue().tickets
        assert len(waiting) <= 6, "M/N wait at most"
        seen.update(waiting)
        press.clock.advance(2 * MINUTE_S)
    queue, _ = tickets.read()
    assert len(seen) == queue.dropped + len(queue.tickets) == 41
    worker = scribe(press)
    turns = 0
    while worker.tick() is not None:
        turns += 1
    assert turns == 6, "those that wait are worked off, one after another"
    assert worker.tick() is None


def test_after_a_long_pause_there_is_one_ticket_not_many(press: Press) -> None:
    worker = scribe(press)
    assert worker.tick() is not None
    press.clock.advance(30 * 24 * 3600)
    assert worker.tick() is not None
    assert worker.tick() is None


def test_a_clock_that_was_wrong_for_a_while_does_not_stop_the_scribe(press: Press) -> None:
    worker = scribe(press)
    press.clock.jump(10 * 365 * 24 * 3600)
    assert worker.tick() is not None
    press.clock.jump(-10 * 365 * 24 * 3600)
    assert worker.tick() is not None
    assert worker.tick() is None


def test_while_one_is_at_work_another_stands_by(press: Press) -> None:
    some_topics(press, "a", "b")
    other = scribe(press, seed=6)
    seen: list[Turn | None] = []

    class Looking(type(press.store)):  # type: ignore[misc]
        def put(self, key: str, data: bytes) -> str:
            if not key.startswith("probe/"):
                seen.append(other.tick())
            return str(super().put(key, data))

    press.store.__class__ = Looking
    first = scribe(press).tick()
    assert first is not None
    assert first.compiled.journals == 2
    assert seen == [None, None]
    assert other.tick() is None, "and the turn is had"


def test_the_turn_of_a_dead_scribe_is_had_by_another(press: Press) -> None:
    topics = some_topics(press, "a", "b")
    dead = Scribe(press.faulty(Death(40)), EAGER)
    with pytest.raises(Crash):
        dead.tick()
    other = scribe(press)
    assert other.tick() is None, "nobody can know yet that it is dead"
    press.clock.advance(11)
    turn = other.tick()
    assert turn is not None
    assert turn.finished
    assert [len(press.journals(topic)) for topic in topics] == [1, 1]
    assert [press.events(topic) for topic in topics] == [values(), values()]


def test_the_turn_of_a_process_that_is_known_to_be_dead_is_had_at_once(press: Press) -> None:
    class Dead(NoProcesses):
        def is_dead(self, mark: str) -> bool:
            return True

    some_topics(press, "a")
    with pytest.raises(Crash):
        Scribe(press.faulty(Death(12)), EAGER).tick()
    context = Context(
        press.store, press.catalog, press.clock, seeded_ids(3), random.Random(3), processes=Dead()
    )
    assert Scribe(context, EAGER).tick() is not None


@pytest.mark.parametrize("first", rounds(2, every=2))
def test_a_scribe_may_die_after_every_call(first: int) -> None:
    for call in range(first + 1, 1_000, 2):
        press = Press()
        topics = some_topics(press, "a", "b")
        try:
            Scribe(press.faulty(Death(call)), EAGER).tick()
            died = False
        except Crash:
            died = True
        press.clock.advance(600)
        other = scribe(press)
        while other.tick() is None:
            press.clock.advance(11)
        assert [press.events(topic) for topic in topics] == [values(), values()]
        assert [len(press.journals(topic)) for topic in topics] == [1, 1]
        if not died:
            return
    pytest.fail("it never ended")


class Slow:
    """Each upload takes a while, so that a turn has time for some only."""

    def __init__(self, press: Press, seconds: float) -> None:
        clock = press.clock

        class Store(type(press.store)):  # type: ignore[misc]
            def put(self, key: str, data: bytes) -> str:
                clock.advance(seconds)
                return str(super().put(key, data))

        press.store.__class__ = Store


def test_a_turn_that_runs_out_of_time_goes_on_where_it_was(press: Press) -> None:
    topics = some_topics(press, "a", "b", "c", "d", "e")
    Slow(press, 60)
    how = ScribeOptions(
        RATE, CompilePolicy.everything(), budget_ms=100_000, grace_ms=0, sweep_every_ms=0
    )
    worker = scribe(press, how)
    turns: list[Turn] = []
    for _ in range(3):
        turn = worker.tick()
        assert turn is not None
        turns.append(turn)
        press.clock.advance(600)
    assert [turn.finished for turn in turns] == [False, False, True]
    assert [turn.compiled.journals for turn in turns] == [2, 2, 1]
    assert [turn.swept is not None for turn in turns] == [False, False, True]
    assert all(len(press.journals(topic)) == 1 for topic in topics)


def test_scribe_whose_turns_never_have_time_sweeps(press: Press) -> None:
    topic = filled(press, 400, name="a")
    Slow(press, 60)
    policy = CompilePolicy(min_events=1, max_events=4)
    worker = scribe(press, ScribeOptions(RATE, policy, budget_ms=100_000, grace_ms=0))
    turns: list[Turn] = []
    for _ in range(24):
        turns += filter(None, [worker.tick()])
        press.clock.advance(600)
    assert press.runs(topic) != []
    assert not any(turn.finished for turn in turns)
    assert sum(turn.swept is not None for turn in turns) in (1, 2)


def test_turn_that_has_applied_its_amendments_sweeps(press: Press) -> None:
    topic = filled(press, name="a")
    how = ScribeOptions(
        RATE, CompilePolicy.everything(), grace_ms=0, sweep_every_ms=0, max_amendments=1
    )
    worker = scribe(press, how)
    for offset in range(3):
        press.amend(topic, offset, delete=True)
        press.clock.advance(600)
        turn = worker.tick()
        assert turn is not None
        assert turn.compiled.amendments == 1
        assert turn.swept is not None
    assert len(press.objects()) == 1


def test_a_partition_that_is_never_done_does_not_starve_the_others(press: Press) -> None:
    endless = filled(press, 40, name="a")
    other = filled(press, name="b")
    Slow(press, 60)
    policy = CompilePolicy(min_events=1, max_events=4)
    worker = scribe(press, ScribeOptions(RATE, policy, budget_ms=150_000))
    for _ in range(2):
        assert worker.tick() is not None
        press.clock.advance(600)
    assert press.journals(other) != []
    assert press.runs(endless) != []
    assert press.events(endless) == values(40)


def test_told_to_stop_it_leaves_between_two_swaps(press: Press) -> None:
    topics = some_topics(press, "a", "b", "c")
    stop = threading.Event()

    class Stopping(type(press.store)):  # type: ignore[misc]
        def put(self, key: str, data: bytes) -> str:
            stop.set()
            return str(super().put(key, data))

    press.store.__class__ = Stopping
    turns: list[Turn] = []
    worker = Scribe(press.context, EAGER, stopped=stop.is_set)
    worker.run(press.clock.sleep, turns.append, lambda _: None)
    assert [turn.compiled.journals for turn in turns] == [1]
    assert [len(press.journals(topic)) for topic in topics] == [1, 0, 0]
    press.store.__class__ = Stopping.__base__
    stop.clear()
    press.clock.advance(600)
    assert worker.tick() is not None
    assert [len(press.journals(topic)) for topic in topics] == [1, 1, 1]


def test_a_topic_in_trouble_does_not_hold_up_the_others(press: Press) -> None:
    topics = some_topics(press, "a", "b")
    press.put(topics[0], layout.run_row(0), b"rubbish")
    turn = scribe(press).tick()
    assert turn is not None
    assert {trouble.topic for trouble in turn.troubles} == {"a"}
    assert len(press.journals(topics[1])) == 1


def test_it_goes_on_when_the_catalog_was_away(press: Press) -> None:
    (topic,) = some_topics(press, "a")
    faults = Faults()
    faults.on_next("get", *([Fault.LOSE_REQUEST] * 6))
    errors: list[TidelogError] = []
    turns: list[Turn] = []
    worker = Scribe(press.faulty(faults), EAGER, stopped=lambda: bool(turns))
    worker.run(press.clock.sleep, turns.append, errors.append)
    assert len(errors) >= 1
    assert all(isinstance(error, UnavailableError) for error in errors)
    assert len(press.journals(topic)) == 1


def test_once_is_a_turn_without_a_ticket_and_takes_one_that_waits(press: Press) -> None:
    some_topics(press, "a")
    worker = scribe(press)
    first, second = worker.once(), worker.once()
    assert first is not None
    assert second is not None
    assert (first.compiled.journals, second.compiled.journals) == (1, 0)
    assert worker.tick() is None, "the ticket of this stretch was taken along"


def test_a_function_can_call_it(tmp_path: Path) -> None:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    with create_home(settings)[0] as home:
        home.create_topic("t")
        for number in range(3):
            home.append("t", [Event(b"%d" % number)])
        turn = home.scribe_once(ScribeOptions(policy=CompilePolicy.everything()))
        assert turn is not None
        assert (turn.compiled.events, turn.finished) == (3, True)
        assert [event.value for event in home.read("t")] == [b"0", b"1", b"2"]


def test_it_does_not_sweep_where_that_is_not_wanted_or_was_just_done(press: Press) -> None:
    some_topics(press, "a")
    turn = scribe(press, ScribeOptions(RATE, grace_ms=None)).tick()
    assert turn is not None
    assert turn.swept is None
    worker = scribe(press, ScribeOptions(RATE, sweep_every_ms=3_600_000))
    sweeps = 0
    for _ in range(12):
        press.clock.advance(600)
        turn = worker.tick()
        assert turn is not None
        sweeps += turn.swept is not None
    assert sweeps == 2


def test_a_home_without_topics_has_nothing_to_do(press: Press) -> None:
    turn = scribe(press).tick()
    assert turn is not None
    assert (turn.finished, turn.topics) == (True, 0)
    assert Tickets(press.context, RATE).read()[0].place == TurnPosition()


@pytest.mark.parametrize(
    ("every_ms", "discard_ms"), [(0, 10), (-1, 10), (10, 10), (10, 5), (10, 10_001)]
)
def test_rates_that_make_no_sense_are_refused(every_ms: int, discard_ms: int) -> None:
    with pytest.raises(InvalidError, match="scribe"):
        Rate(every_ms, discard_ms)
