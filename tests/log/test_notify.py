"""Notifications: debounced, and the last event is always told, whoever dies on the way."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from tests.support.recorder import Recorder
from tidelog.catalog.base import Catalog, Put
from tidelog.catalog.memory import MemoryCatalog
from tidelog.clock import Clock, RandomIds
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_staged
from tidelog.context import Context, Wakeups
from tidelog.errors import CorruptError, NotFoundError, UnavailableError, UnknownOutcomeError
from tidelog.log.notifier import (
    CheckResult,
    Debounce,
    Notification,
    NotifyTarget,
    read_state,
    repair,
)
from tidelog.log.producer.append import Appender
from tidelog.log.topics import create_topic, delete_topic, read_head
from tidelog.model import layout
from tidelog.model.event import Event
from tidelog.model.times import Backoff
from tidelog.model.topic import Topic
from tidelog.store.memory import MemoryStore
from tidelog.testing.faults import Fault, Faults, FaultyCatalog
from tidelog.testing.scheduler import Crash, FakeClock, Scheduler, seeded_ids

PROMISE_S = 31.0  # longer than any promise to look again, with the allowance


def a_log(clock: Clock, catalog: Catalog | None = None) -> Context:
    return Context(
        store=MemoryStore(clock),
        catalog=catalog or MemoryCatalog(),
        clock=clock,
        ids=seeded_ids(7),
        random=random.Random(7),
        backoff=Backoff(attempts=4, base_ms=20),
    )


def a_topic(
    context: Context, partitions: int = 1, latency_ms: int = 1_000, targets: int = 1
) -> Topic:
    urls = tuple(f"test:{number}" for number in range(targets))
    wanted = Topic(
        "orders", context.ids.new(), partitions, 0, notify=urls, max_latency_ms=latency_ms
    )
    return create_topic(context, wanted)


def commit(context: Context, appender: Appender, partition: int = 0) -> int:
    """One event through the real append; the next offset."""
    segment = encode_staged([(partition, table_of([Event(b"x")], context.clock.now_ms()))])
    base, _ = appender.commit(appender.upload(segment), segment.pieces[0])
    return base + 1


class Process:
    """What a notifier does, by hand: commits, and the checks that follow from them."""

    def __init__(self, context: Context, topic: Topic, target: NotifyTarget, name: str) -> None:
        self.context = context
        self.appender = Appender(context, topic, name)
        self.debounce = Debounce(context, topic, [target], name)
        self.committed = 0
        self.due_s: float | None = None

    def commit(self) -> None:
        self.committed = commit(self.context, self.appender)
        if self.due_s is None:
            self.due_s = self.context.clock.monotonic_s()

    def check_if_due(self) -> None:
        if self.due_s is not None and self.due_s <= self.context.clock.monotonic_s():
            self.due_s = self.debounce.check(0, self.committed).again_s


# The protocol, in fake time.


def test_one_write_makes_exactly_one_notification() -> None:
    context = a_log(clock := FakeClock())
    topic, target = a_topic(context), Recorder()
    process = Process(context, topic, target, "a")
    process.commit()
    process.check_if_due()
    assert target.told == [Notification("orders", 0, 0)]
    assert process.due_s == clock.monotonic_s() + 1.0  # its promise to look again
    clock.advance(1.0)
    process.check_if_due()
    assert process.due_s is None
    assert len(target.told) == 1
    assert repair(context, topic, [target]) == ([], [], [])


def test_a_quiet_partition_notifies_at_once_with_the_newest_offset() -> None:
    context = a_log(clock := FakeClock())
    target = Recorder()
    process = Process(context, a_topic(context), target, "a")
    for round_ in range(3):
        process.commit()
        process.commit()
        process.check_if_due()
        assert target.offsets[-1] == 2 * round_ + 1
        clock.advance(1.5)
        process.check_if_due()
    assert len(target.told) == 3


@pytest.mark.parametrize("processes", [1, 3, 10])
def test_a_busy_stretch_makes_one_notification_per_latency(processes: int) -> None:
    context = a_log(clock := FakeClock())
    topic, target = a_topic(context), Recorder()
    crowd = [Process(context, topic, target, f"p{number}") for number in range(processes)]
    busy_s = 10.0
    late_s = 0.0
    started_s = clock.monotonic_s()
    for tick in range(1_400):  # of 10 ms
        elapsed_s = clock.monotonic_s() - started_s
        if tick % 3 == 0 and elapsed_s < busy_s:
            crowd[tick % processes].commit()
            newest_s = clock.monotonic_s()
        for process in crowd:
            process.check_if_due()
        if target.offsets[-1] < read_head(context, topic, 0)[0].next - 1:
            late_s = max(late_s, clock.monotonic_s() - newest_s)
        clock.advance(0.01)
    assert target.offsets[-1] == read_head(context, topic, 0)[0].next - 1
    assert busy_s - 1 <= len(target.told) <= 1 + math.ceil(busy_s)
    assert late_s <= 1.02
    assert all(process.due_s is None for process in crowd)


def test_ten_writers_at_once_make_fewer_than_ten() -> None:
    context = a_log(clock := FakeClock())
    topic, target = a_topic(context), Recorder()
    crowd = [Process(context, topic, target, f"p{number}") for number in range(10)]
    for process in crowd:
        process.commit()
    for _ in range(300):
        for process in crowd:
            process.check_if_due()
        clock.advance(0.01)
    assert target.offsets == [9]


def dying_waiter(context: Context, topic: Topic) -> None:
    """A process that commits and claims, and is never seen again."""

    def die(_: int) -> None:
        raise Crash

    process = Process(context, topic, Recorder(die), "dead")
    process.commit()
    with pytest.raises(Crash):
        process.check_if_due()


def test_who_deferred_to_a_dead_waiter_takes_over() -> None:
    context = a_log(clock := FakeClock())
    topic, target = a_topic(context), Recorder()
    dying_waiter(context, topic)
    process = Process(context, topic, target, "next")
    process.commit()
    process.check_if_due()
    assert target.told == []
    assert process.due_s == clock.monotonic_s() + 5.5
    clock.advance(5.5)
    process.check_if_due()
    assert target.offsets == [1]


def test_repair_and_the_next_writer_notify_after_a_dead_waiter() -> None:
    for by_repair in (True, False):
        context = a_log(clock := FakeClock())
        topic, target = a_topic(context, partitions=2), Recorder()
        dying_waiter(context, topic)
        assert repair(context, topic, [target]).waiting == [0]
        clock.advance(5.6)
        if by_repair:
            assert repair(context, topic, [target]).sent == [Notification("orders", 0, 0)]
        else:
            process = Process(context, topic, target, "next")
            process.commit()
            process.check_if_due()
            assert target.offsets == [1]
        assert repair(context, topic, [target]) == ([], [], [])


VERBS = ["get", "get", "write", "write"]  # the row, the head, the claim, the record


@pytest.mark.parametrize("fault", [Fault.CRASH_BEFORE, Fault.CRASH_AFTER])
@pytest.mark.parametrize("step", range(4))
def test_killed_around_every_step_repair_covers_it(step: int, fault: Fault) -> None:
    context = a_log(clock := FakeClock())
    topic, target = a_topic(context), Recorder()
    victim = Process(context, topic, target, "victim")
    victim.commit()
    faults = Faults()
    for verb in VERBS[:step]:
        faults.on_next(verb, Fault.NONE)
    faults.on_next(VERBS[step], fault)
    faulty = replace(context, catalog=FaultyCatalog(context.catalog, faults))
    with pytest.raises(Crash):
        replace(victim.debounce, context=faulty).check(0, 1)
    clock.advance(PROMISE_S)
    repair(context, topic, [target])
    told_before_the_record = (step, fault) == (3, Fault.CRASH_BEFORE)
    assert target.offsets == ([0, 0] if told_before_the_record else [0])
    assert read_state(context, topic, 0)[0].notified == 1


@pytest.mark.parametrize("verb", ["get", "write"])
def test_lost_replies_are_settled_by_reading_back(verb: str) -> None:
    context = a_log(FakeClock())
    topic, target = a_topic(context), Recorder()
    process = Process(context, topic, target, "a")
    process.commit()
    faults = Faults()
    faults.on_next(verb, Fault.LOSE_REPLY, Fault.LOSE_REPLY)
    faulty = FaultyCatalog(context.catalog, faults)
    checked = replace(process.debounce, context=replace(context, catalog=faulty)).check(0, 1)
    assert (checked.sent, checked.notified) == (Notification("orders", 0, 0), 1)
    assert target.offsets == [0]


def test_a_claim_of_unknown_outcome_is_used_when_it_landed() -> None:
    class Unsure(MemoryCatalog):
        def write(self, partition: str, *changes: object, write_id: str) -> None:
            super().write(partition, *changes, write_id=write_id)  # type: ignore[arg-type]
            if partition.startswith("notify/"):
                raise UnknownOutcomeError("injected")

    context = a_log(FakeClock(), Unsure())
    topic, target = a_topic(context), Recorder()
    process = Process(context, topic, target, "a")
    process.commit()
    process.check_if_due()
    assert target.offsets == [0]
    assert read_state(context, topic, 0)[0].notified == 1


def test_a_promise_that_no_right_clock_made_is_ignored() -> None:
    context = a_log(clock := FakeClock())
    topic, target = a_topic(context), Recorder()
    clock.jump(3600)
    dying_waiter(context, topic)
    clock.jump(-3600)
    process = Process(context, topic, target, "next")
    process.commit()
    process.check_if_due()
    assert target.offsets == [1]
    clock.jump(-3600)  # our own promise is an hour ahead now
    process.commit()
    process.check_if_due()
    clock.advance(1.0)
    process.check_if_due()
    assert target.offsets == [1, 2]


def test_failures_are_paced_for_all_processes_together() -> None:
    context = a_log(clock := FakeClock())
    topic = a_topic(context)

    def fail(_: int) -> None:
        raise UnavailableError("down")

    target = Recorder(fail)
    crowd = [Process(context, topic, target, f"p{number}") for number in range(3)]
    for tick in range(10_000):  # of 10 ms
        if tick % 10 == 0:
            crowd[tick % 3].commit()
        for process in crowd:
            process.check_if_due()
        clock.advance(0.01)
    assert 4 + 2 <= target.tries <= 4 + 4  # a backoff, then one try in 30 s
    assert read_state(context, topic, 0)[0].notified == 0


def test_a_row_that_is_not_ours_is_corrupt() -> None:
    context = a_log(FakeClock())
    topic = a_topic(context)
    process = Process(context, topic, Recorder(), "a")
    process.commit()
    where = layout.notify_partition(topic.incarnation, 0)
    context.catalog.write(where, Put("state", b"\xff"), write_id="w")
    with pytest.raises(CorruptError, match="notifications of `orders/0`"):
        process.check_if_due()
    assert len(repair(context, topic, [Recorder()]).errors) == 1


def test_a_deleted_topic_is_not_notified() -> None:
    context = a_log(FakeClock())
    topic, target = a_topic(context), Recorder()
    process = Process(context, topic, target, "a")
    process.commit()
    delete_topic(context, "orders")
    with pytest.raises(NotFoundError):
        process.check_if_due()
    with pytest.raises(NotFoundError):
        repair(context, topic, [target])
    assert target.told == []


# Simulation.

RATES = {
    Fault.LOSE_REQUEST: 0.03,
    Fault.LOSE_REPLY: 0.06,
    Fault.DUPLICATE: 0.05,
    Fault.DELAY: 0.2,
    Fault.CRASH_AFTER: 0.002,
    Fault.CRASH_BEFORE: 0.002,
}


class Simulation:
    """Writers on a bad network that notify for themselves, unreliable targets, a jumping clock."""

    PARTITIONS = 2

    def __init__(self, seed: int, kind: type[Debounce] = Debounce) -> None:
        self.scheduler = Scheduler(seed)
        self.random = self.scheduler.random
        self.rows = MemoryCatalog()
        faults = Faults(self.random, RATES, self.scheduler)
        self.context = Context(
            store=MemoryStore(self.scheduler.clock),
            catalog=FaultyCatalog(self.rows, faults, self.scheduler.clock),
            clock=self.scheduler.clock,
            ids=RandomIds(self.random),
            random=self.random,
        )
        self.sound = replace(self.context, catalog=self.rows)
        self.topic = a_topic(self.sound, self.PARTITIONS)
        self.told = dict.fromkeys(range(self.PARTITIONS), -1)
        self.survivors: list[dict[int, int]] = []
        self._kind = kind

    def send(self, notification: Notification) -> None:
        self.scheduler.pause("send")
        if self.random.random() < 0.1:
            raise UnavailableError("no answer")
        place = notification.partition
        self.told[place] = max(self.told[place], notification.offset)
        self.scheduler.pause("sent")
        if self.random.random() < 0.05:
            raise UnavailableError("the reply was lost")

    def write(self, name: str) -> None:
        acknowledged: dict[int, int] = {}
        due: dict[int, float] = {}
        context = replace(self.context, wakeups=Wakeups())
        clock = context.clock

        def committed(_: str, partition: int, end: int) -> None:
            acknowledged[partition] = end
            due.setdefault(partition, clock.monotonic_s())

        context.wakeups.listen(committed)
        appender = Appender(context, self.topic, name)
        debounce = self._kind(context, self.topic, [self], name)
        for _ in range(8):
            try:
                commit(context, appender, self.random.randrange(self.PARTITIONS))
            except (UnavailableError, UnknownOutcomeError):
                continue
            self.check_due(debounce, due, acknowledged)
            clock.sleep(self.random.choice((0, 0.1, 0.4, 1.5)))
        while due:
            clock.sleep(max(0.0, min(due.values()) - clock.monotonic_s()))
            self.check_due(debounce, due, acknowledged)
        self.survivors.append(acknowledged)

    def check_due(self, debounce: Debounce, due: dict[int, float], ends: dict[int, int]) -> None:
        now_s = self.scheduler.clock.monotonic_s()
        for partition in [place for place, due_s in due.items() if due_s <= now_s]:
            del due[partition]
            try:
                again_s = debounce.check(partition, ends[partition]).again_s
            except (UnavailableError, UnknownOutcomeError):
                again_s = now_s + 1.0
            if again_s is not None:
                due[partition] = again_s

    def jump(self) -> None:
        for _ in range(4):
            self.scheduler.clock.sleep(self.random.uniform(0, 3))
            self.scheduler.time.jump(self.random.choice((-3600, -2, 2, 3600)))

    def check_row(self) -> None:
        for partition, offset in self.told.items():
            state, _ = read_state(self.sound, self.topic, partition)
            assert state.notified <= offset + 1, "the row says more than targets were told"

    def run(self) -> list[str]:
        for number in range(4):
            self.scheduler.spawn(f"w{number}", lambda name=f"w{number}": self.write(name))
        if self.scheduler.seed % 2:
            self.scheduler.spawn("operator", self.jump)
        self.scheduler.run(after_step=self.check_row)
        for ends in self.survivors:
            for partition, end in ends.items():
                assert self.told[partition] >= end - 1, "who lives has covered its own commits"
        self.scheduler.time.advance(PROMISE_S)
        healthy = Recorder()
        repaired = repair(self.sound, self.topic, [healthy])
        assert (repaired.waiting, repaired.errors) == ([], [])
        for sent in healthy.told:
            self.told[sent.partition] = max(self.told[sent.partition], sent.offset)
        for partition, offset in self.told.items():
            head, _ = read_head(self.sound, self.topic, partition)
            assert offset == head.next - 1, "the newest event was told"
        return self.scheduler.trace


@pytest.mark.parametrize("seed", range(80))
def test_the_last_event_is_always_told(seed: int) -> None:
    Simulation(seed).run()


def test_one_seed_runs_the_same_twice() -> None:
    first, second = Simulation(11).run(), Simulation(11).run()
    assert first == second
    assert first != Simulation(13).run()


class Trusting(Debounce):
    """The planted bug: who deferred to a waiter does not check again, as in Safya."""

    def check(self, partition: int, committed: int, *, hurry: bool = False) -> CheckResult:
        checked = super().check(partition, committed, hurry=hurry)
        deferred = checked.sent is None and checked.error is None
        return replace(checked, again_s=None) if deferred else checked


class Hasty(Debounce):
    """Another one: it records what targets know before they do."""

    def _tell(self, notification: Notification) -> Exception | None:
        error = super()._tell(notification)
        return None if isinstance(error, UnavailableError) else error


@pytest.mark.parametrize("bug", [Trusting, Hasty])
def test_the_simulation_catches_a_planted_bug(bug: type[Debounce]) -> None:
    caught = 0
    for seed in range(40):
        try:
            Simulation(seed, bug).run()
        except AssertionError:
            caught += 1
    assert caught > 5
