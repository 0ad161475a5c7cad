"""Amending in a bad world: deaths after every call, lost replies, and others at the same rows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.support.compiled_journals import Death, Press
from tests.support.topic_upkeep import WEEK_S
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_staged
from tidelog.context import Context
from tidelog.coordination.audit import Why, read_audit
from tidelog.errors import NotFoundError, UnavailableError, UnknownOutcomeError
from tidelog.journal.amend import Amender
from tidelog.journal.compile import compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.lookup import Lookup
from tidelog.log.ledger import read_erased
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.partition_reader import Reader
from tidelog.model.event import Event
from tidelog.model.topic import Topic
from tidelog.testing.faults import Fault, Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash, Scheduler

T0 = 1_700_000_000_000
LARGE = b"x" * 20_000
SEEDS = range(40)


def filled(press: Press, count: int = 12, partitions: int = 2) -> Topic:
    topic = press.topic("t", partitions)
    for partition in range(partitions):
        for first in range(0, count, 4):
            append(press, topic, partition, [f"{partition}-{n}" for n in range(first, first + 4)])
    return topic


def append(press: Press, topic: Topic, partition: int, ids: list[str]) -> None:
    events = [Event(b"old", id=each, timestamp=T0) for each in ids]
    segment = encode_staged([(partition, table_of(events, T0))])
    appender = press.appender(topic)
    appender.commit(appender.upload(segment), segment.pieces[0])
    appender.close()


def amender(context: Context, topic: Topic) -> Amender:
    return Amender(context, Lookup(context, topic), Why("ada", "a test"))


def values(context: Context, topic: Topic) -> dict[str | None, bytes | None]:
    found = {}
    for partition in range(topic.partitions):
        for stretch in Reader(context, topic, partition).read(0):
            for event in stretch.events():
                assert event.id not in found
                found[event.id] = event.value
    return found


@pytest.mark.parametrize("calls", range(1, 45))
@pytest.mark.parametrize("compiled", [False, True])
def test_who_dies_after_any_call_leaves_what_the_same_call_finishes(
    calls: int, compiled: bool
) -> None:
    press = Press()
    topic = filled(press)
    if compiled:
        press.compile(topic)
    before = values(press.context, topic)
    updates = {"0-1": b"new", "1-2": LARGE, "0-9": None}
    deletes = ["0-3", "1-3", "1-11"]

    def run(context: Context) -> None:
        amender(context, topic).update(updates)
        amender(context, topic).delete(deletes)

    faulty = press.faulty(Death(calls))
    try:
        run(faulty)
    except Crash:
        left = values(press.context, topic)
        assert set(before) - set(left) <= set(deletes)
        for each, value in left.items():
            assert value in (before[each], updates.get(each or "", before[each]))
        erased = read_erased(press.context, topic)
        assert all(erased.has(each or "") for each in set(before) - set(left))
        sweep_home(press.context, 0)
        run(press.context)
    expected = {**before, **updates}
    for each in deletes:
        del expected[each]
    assert values(press.context, topic) == expected
    assert verify_topic(press.context, topic).errors == 0
    press.compile(topic)
    press.clock.advance(WEEK_S)  # for the value of a call that died before its row
    sweep_home(press.context, 0)
    assert values(press.context, topic) == expected
    assert not press.rows(topic, "amend/")
    assert not [key for key in press.objects() if "/amendments/" in key]


@pytest.mark.parametrize("seed", SEEDS)
def test_lost_replies_and_doubled_requests_do_not_matter(seed: int) -> None:
    press = Press(seed)
    topic = filled(press)
    rates = {Fault.LOSE_REPLY: 0.2, Fault.LOSE_REQUEST: 0.05, Fault.DUPLICATE: 0.1}
    faults = Faults(random.Random(seed), rates)
    faulty = replace(press.context, catalog=FaultyCatalog(press.catalog, faults, press.clock))
    expected = values(press.context, topic)
    for number in range(10):
        new: dict[str, bytes | None] = {f"{p}-{number}": b"%d" % number for p in range(2)}
        for attempt in range(20):
            try:
                amender(faulty, topic).update(new)
                break
            except (UnavailableError, UnknownOutcomeError):
                assert attempt < 19
        expected |= new
    deleted = ["0-1", "1-5", "0-11"]
    for attempt in range(20):
        try:
            amender(faulty, topic).delete(deleted)
            break
        except (UnavailableError, UnknownOutcomeError):
            assert attempt < 19
    assert values(press.context, topic) == {k: v for k, v in expected.items() if k not in deleted}
    assert verify_topic(press.context, topic).errors == 0
    assert {record.state for record in read_audit(press.context, topic)} <= {"begun", "done"}


def test_a_large_value_is_stored_anew_when_a_sweep_has_passed_its_generation() -> None:
    press = Press()
    topic = filled(press)
    writer = amender(press.context, topic)  # knows the topic as it is now
    sweep_home(press.context, 0)
    sweep_home(press.context, 0)
    writer.update({"0-1": LARGE})
    press.clock.advance(10)
    sweep_home(press.context, 0)
    assert values(press.context, topic)["0-1"] == LARGE
    assert Lookup(press.context, topic).get("0-1").value == LARGE


def test_a_batch_takes_few_writes() -> None:
    press = Press()
    topic = filled(press, 2_000, partitions=1)
    faults = Faults()
    amender(press.faulty(faults), topic).update({f"0-{n}": b"%d" % n for n in range(2_000)})
    assert press.head(topic).amendments == 2_000
    writes = 2_000 / 24 + 2_000 / 1_000 * 2
    runs = 2_000 / 4
    assert faults.calls < 3 * runs + writes + 50
    assert press.head(topic).amended == (0, 1_999)


@pytest.mark.parametrize("seed", SEEDS)
def test_amenders_compilers_sweepers_and_producers_at_once(seed: int) -> None:
    """Each id is deleted by one actor, and updated by others; the highest sequence counts."""
    press = Press(seed)
    topic = filled(press, 8, partitions=1)
    scheduler = Scheduler(seed)
    source = random.Random(seed)
    rates = {Fault.LOSE_REPLY: 0.02, Fault.DUPLICATE: 0.02, Fault.DELAY: 0.1}

    def context_of() -> Context:
        faults = Faults(random.Random(source.random()), rates, scheduler)
        return Context(
            FaultyStore(press.store, faults),
            FaultyCatalog(press.catalog, faults, scheduler.clock),
            scheduler.clock,
            press.ids,
            random.Random(source.random()),
        )

    last: dict[str, list[bytes]] = {}
    deleted: set[str] = set()

    def update(name: bytes) -> None:
        context = context_of()
        lookup = Lookup(context, topic)
        for number in range(4):
            each = f"0-{source.randrange(8)}"
            value = name + b"%d" % number
            last.setdefault(each, []).append(value)
            was_deleted = each in deleted
            try:
                done = Amender(context, lookup, Why("a")).update({each: value})
            except (UnavailableError, UnknownOutcomeError):
                continue
            assert not (was_deleted and not done.missing), "a delete is final"
            if not done.missing:
                try:
                    assert lookup.get(each).value in last[each]
                except NotFoundError:
                    assert each in begun
                except UnavailableError:
                    continue

    begun: set[str] = set()

    def delete() -> None:
        context = context_of()
        lookup = Lookup(context, topic)
        for each in ("0-1", "0-6"):
            begun.add(each)
            try:
                Amender(context, lookup, Why("b")).delete([each])
            except (UnavailableError, UnknownOutcomeError):
                continue
            deleted.add(each)
            with pytest.raises((NotFoundError, UnavailableError)):
                lookup.get(each)

    def compact() -> None:
        context = context_of()
        for _ in range(3):
            try:
                compile_topic(context, topic, CompilePolicy.everything())
                sweep_home(context, 0)
            except (UnavailableError, UnknownOutcomeError):
                continue

    actors = [
        scheduler.spawn("u1", lambda: update(b"u")),
        scheduler.spawn("u2", lambda: update(b"v")),
        scheduler.spawn("d", delete),
        scheduler.spawn("c", compact),
    ]
    scheduler.run()
    assert [actor.error for actor in actors] == [None] * 4
    found = values(press.context, topic)
    for number in range(8):
        each = f"0-{number}"
        if each in deleted:
            assert each not in found
        elif each not in begun:
            assert found[each] in [b"old", *last.get(each, [])]
    assert verify_topic(press.context, topic).errors == 0
