"""Compile in a bad world: lost replies, death after every call with a sweep between, crowds."""

from __future__ import annotations

import contextlib
import random

import pytest

from tests.journal.test_compile import check, filled, values
from tests.support.compiled_journals import ALL, Death, Press, amend_by_hand
from tests.support.topic_upkeep import WEEK_S
from tidelog.context import Context
from tidelog.errors import NotFoundError, TidelogError, UnavailableError, UnknownOutcomeError
from tidelog.journal.compile import compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.producer.append import Appender
from tidelog.log.topics import delete_topic, find_topic
from tidelog.model.topic import Topic
from tidelog.settings import LogSettings
from tidelog.testing.faults import Fault, Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash, Scheduler

SMALL = CompilePolicy(min_events=1, min_amendments=1, max_events=8)


def amended(press: Press) -> tuple[Topic, dict[int, str]]:
    """A topic with journals, runs and amendments, and what is in it."""
    topic = filled(press, 4)
    compile_topic(press.context, topic, SMALL)
    for run in range(4, 9):
        press.append(topic, [f"{run}.{n}" for n in range(4)])
    expected = values(9)
    press.amend(topic, 2, b"two")
    press.amend(topic, 21, b"late")
    expected |= {2: "two", 21: "late"}
    for offset in (8, 9, 22):
        press.amend(topic, offset, delete=True)
        del expected[offset]
    return topic, expected


@pytest.mark.parametrize("grace_ms", [0, 3_600_000])
def test_it_may_die_after_every_call_with_a_sweep_between(grace_ms: int) -> None:
    deaths = 0
    for call in range(1, 10_000):
        press = Press()
        topic, expected = amended(press)
        try:
            press.compile(topic, SMALL, press.faulty(Death(call)))
            died = False
        except Crash:
            died = True
            deaths += 1
        assert press.events(topic) == expected
        sweep_home(press.context, grace_ms)
        assert press.events(topic) == expected
        press.compile(topic, SMALL)
        assert press.runs(topic) == []
        sweep_home(press.context, 0)
        assert press.events(topic) == expected
        assert verify_topic(press.context, topic).errors == 0
        assert press.objects() == {run.object for run in press.journals(topic)}
        if not died:
            break
    assert deaths > 30


@pytest.mark.parametrize("fault", [Fault.LOSE_REPLY, Fault.LOSE_REQUEST, Fault.DUPLICATE])
def test_each_write_may_lose_its_reply(fault: Fault) -> None:
    for skipped in range(12):
        press = Press()
        topic, expected = amended(press)
        faults = Faults()
        faults.on_next("write", *([Fault.NONE] * skipped), *([fault] * 4))
        with contextlib.suppress(UnavailableError, UnknownOutcomeError):
            press.compile(topic, SMALL, press.faulty(faults))
        assert press.events(topic) == expected
        press.compile(topic, SMALL)
        sweep_home(press.context, 0)
        check(press, topic, expected)


def test_uploads_and_fetches_that_fail_leave_all_as_it_was() -> None:
    for verb in ("put", "get"):
        for skipped in range(4):
            press = Press()
            topic, expected = amended(press)
            faults = Faults()
            faults.on_next(verb, *([Fault.NONE] * skipped), *([Fault.LOSE_REPLY] * 6))
            with contextlib.suppress(TidelogError):
                press.compile(topic, SMALL, press.faulty(faults))
            check(press, topic, expected)
            press.compile(topic, SMALL)
            sweep_home(press.context, 0)
            check(press, topic, expected)


class Crowd:
    """Compilers, producers, amenders, trims and sweeps at once, some of which die."""

    def __init__(self, seed: int) -> None:
        self.press = Press(seed)
        self.scheduler = Scheduler(seed)
        self.random = random.Random(seed)
        self.topic = filled(self.press, 6)
        self.sent: dict[int, str] = values(6)
        self.settings = LogSettings(lease_ttl_ms=30_000)  # beats go by real time: none comes
        self.states: dict[int, list[str | None]] = {}  # what an offset was amended to, in order

    def context(self) -> Context:
        rates = {Fault.LOSE_REPLY: 0.02, Fault.LOSE_REQUEST: 0.02, Fault.DUPLICATE: 0.02}
        chance = random.Random(self.random.random())
        faults = Faults(chance, rates, self.scheduler)
        return Context(
            FaultyStore(self.press.store, faults),
            FaultyCatalog(self.press.catalog, faults, self.scheduler.clock),
            self.scheduler.clock,
            self.press.ids,
            chance,
            self.settings,
        )

    def compile(self) -> None:
        context = self.context()
        for _ in range(4):
            with contextlib.suppress(TidelogError):
                compile_topic(context, self.topic, self.random.choice([ALL, SMALL]))
            context.clock.sleep(0.5)

    def sweep(self) -> None:
        context = self.context()
        for _ in range(4):
            with contextlib.suppress(TidelogError):
                sweep_home(context, 0)
            context.clock.sleep(0.4)

    def produce(self) -> None:
        context = self.context()
        for number in range(5):
            appender = Appender(context, find_topic(context, "orders"), f"p{number}")
            segment = self.press.segment([f"new {number}"])
            for _ in range(20):
                with contextlib.suppress(TidelogError):
                    base, _ = appender.commit(appender.upload(segment), segment.pieces[0])
                    self.sent[base] = f"new {number}"
                    break
                context.clock.sleep(0.1)

    def amend(self) -> None:
        context = self.context()
        for _ in range(8):
            offset = self.random.randrange(10, 24)
            states = self.states.setdefault(offset, [])
            if states and states[-1] is None:
                continue
            value = None if self.random.random() < 0.3 else f"amended {len(states)}"
            states.append(value)
            wanted = None if value is None else (value.encode(),)
            for _ in range(20):
                with contextlib.suppress(UnavailableError, UnknownOutcomeError):
                    amend_by_hand(context, self.topic, 0, {offset: wanted})
                    break
            context.clock.sleep(0.2)

    def trim(self) -> None:
        context = self.context()
        for start in (2, 5, 9):
            context.clock.sleep(0.6)
            with contextlib.suppress(UnavailableError, UnknownOutcomeError):
                trim_topic(context, self.topic, ToOffsets({0: start}))

    def run(self) -> None:
        actors = [self.compile, self.compile, self.sweep, self.produce, self.amend, self.trim]
        spawned = [
            self.scheduler.spawn(f"{n} {each.__name__}", each) for n, each in enumerate(actors)
        ]
        victims = [actor for actor in spawned if actor.name.endswith(("compile", "sweep"))]

        def after_step() -> None:
            if self.random.random() < 0.001:
                victim = self.random.choice(victims)
                if not victim.done:
                    self.scheduler.kill(victim)

        self.scheduler.run(200_000, after_step)

    def expected(self) -> dict[int, str]:
        start = self.press.head(self.topic).start
        found = {at: value for at, value in self.sent.items() if at >= start}
        for offset, states in self.states.items():
            if states[-1] is None:
                del found[offset]
            else:
                found[offset] = states[-1]
        return found


@pytest.mark.parametrize("seed", range(25))
def test_crowds_lose_nothing(seed: int) -> None:
    crowd = Crowd(seed)
    crowd.run()
    press = crowd.press
    read = press.events(crowd.topic)
    assert read == crowd.expected()
    # What producers left that died before their commits stays for a week after a sweep noted it,
    # as do journals of a compile that died before a trim passed them; probes stay for an hour.
    press.clock.advance(crowd.scheduler.time.monotonic_s())
    sweep_home(press.context, 0)
    press.clock.advance(crowd.scheduler.time.monotonic_s() + WEEK_S)
    press.compile(crowd.topic)
    sweep_home(press.context, 0)
    check(press, crowd.topic, crowd.expected())
    left = {key for key in press.objects() if not key.startswith("probe/")}  # of a dead sweep
    assert left == {run.object for run in press.journals(crowd.topic)}


def test_a_topic_is_deleted_at_any_time() -> None:
    for seed in range(10):
        crowd = Crowd(seed)

        def delete(crowd: Crowd = crowd) -> None:
            context = crowd.context()
            context.clock.sleep(crowd.random.random())
            while True:
                try:
                    delete_topic(context, "orders")
                except NotFoundError:
                    return
                except TidelogError:
                    continue

        crowd.scheduler.spawn("compile", crowd.compile)
        crowd.scheduler.spawn("delete", delete)
        crowd.scheduler.run(100_000)
        assert [row.row for row in crowd.press.rows(crowd.topic)] == ["head"]
        sweep_home(crowd.press.context, 0)
        assert crowd.press.objects() == set()
