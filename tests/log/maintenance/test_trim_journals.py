"""Trimming a topic that is compiled and amended: journals, amendments and leftovers go too."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from tests.playback.test_journals import Hands
from tests.support.compiled_journals import Press, amend_by_hand
from tidelog.errors import UnavailableError, UnknownOutcomeError
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.log.maintenance.trim import (
    BeforeTime,
    KeepBytes,
    ToOffsets,
    TrimResult,
    TrimTo,
    trim_topic,
)
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.status import partition_states
from tidelog.model.topic import Topic
from tidelog.testing.faults import Fault, Faults
from tidelog.testing.scheduler import Crash, Scheduler

T0 = 1_700_000_000_000
FOUR = CompilePolicy(min_events=1, min_amendments=1, max_events=4)
TEN = CompilePolicy(min_events=1, min_amendments=1, max_events=10)


def filled(press: Press) -> Topic:
    """Journals of offsets 0 to 4 and 4 to 8, runs 8 to 10 and 10 to 12; ten seconds a run."""
    topic = press.topic()
    for number in range(6):
        press.append(topic, [f"{number}a", f"{number}b"], at_ms=T0 + 10_000 * number)
        press.clock.advance(1)
        if number == 3:
            press.compile(topic, FOUR)
    assert [(run.base, run.end) for run in press.journals(topic)] == [(0, 4), (4, 8)]
    return topic


def all_values(first: int = 0) -> dict[int, str]:
    return {offset: f"{offset // 2}{'ab'[offset % 2]}" for offset in range(first, 12)}


def check_clean(press: Press, topic: Topic) -> None:
    report = verify_topic(press.context, topic)
    assert report.errors == 0, report.findings
    assert not [finding for finding in report.findings if "ends that" in finding.what]


def test_journals_below_the_start_go_with_their_slots_and_those_that_hold_it_stay() -> None:
    press = Press()
    topic = filled(press)
    first = press.journals(topic)[0]
    assert trim_topic(press.context, topic, ToOffsets({0: 3}))[0].runs == 0
    assert press.events(topic) == all_values(3)
    trimmed = trim_topic(press.context, topic, ToOffsets({0: 5}))
    assert trimmed == [TrimResult(0, 3, 5, 1, first.byte_end)]
    assert [run.base for run in press.journals(topic)] == [4]
    slots = [row.value for row in press.rows(topic, "slot/")]
    assert sorted(set(slots)) == [b"10", b"12", b"8j"]
    assert press.events(topic) == all_values(5)
    check_clean(press, topic)
    assert trim_topic(press.context, topic, ToOffsets({0: 12}))[0].runs == 3
    assert {row.row.partition("/")[0] for row in press.rows(topic)} <= {"head", "compile", "unused"}
    assert press.append(topic, ["next"]) == 12
    check_clean(press, topic)


def test_amendments_below_the_start_go_and_the_head_says_what_is_left() -> None:
    press = Press()
    topic = filled(press)
    for offset in (1, 6, 11):
        press.amend(topic, offset, b"new")
    assert press.head(topic).amended == (1, 11)
    trim_topic(press.context, topic, ToOffsets({0: 5}))
    assert press.head(topic).amended == (6, 11)
    assert len(press.rows(topic, "amend/")) == 2
    assert press.events(topic) == all_values(5) | {6: "new", 11: "new"}
    check_clean(press, topic)
    trim_topic(press.context, topic, ToOffsets({0: 12}))
    assert press.head(topic).amended is None
    assert press.head(topic).amendments == 3
    assert press.rows(topic, "amend/") == []


def test_by_time_over_journals_and_runs() -> None:
    press = Press()
    topic = filled(press)
    for time_ms, start in [(9_999, 0), (20_000, 4), (30_001, 8), (40_001, 10), (99_000, 12)]:
        assert trim_topic(press.context, topic, BeforeTime(T0 + time_ms))[0].new_start == start
        assert press.events(topic) == all_values(start)
    check_clean(press, topic)


def test_by_bytes_over_journals_and_runs_of_all_partitions() -> None:
    press = Press()
    topic = press.topic(partitions=2)
    for number in range(8):
        press.append(topic, [f"{number}a", f"{number}b"], number % 2)
        press.clock.advance(1)
    press.compile(topic, FOUR)
    press.append(topic, ["8a", "8b"])
    sizes = [press.journals(topic, p)[n].byte_end for n in (0, 1) for p in (0, 1)]
    [run] = [run for run in press.runs(topic) if run.base >= 8]
    last = run.byte_end - run.byte_start
    kept = trim_topic(press.context, topic, KeepBytes(sum(sizes) + last))
    assert [each.new_start for each in kept] == [0, 0]
    trimmed = trim_topic(press.context, topic, KeepBytes(sum(sizes[1:]) + last))
    assert [each.new_start for each in trimmed] == [4, 0]
    assert trimmed[0].bytes == sizes[0]
    trimmed = trim_topic(press.context, topic, KeepBytes(last))
    assert [each.new_start for each in trimmed] == [8, 8]
    assert press.events(topic) == {8: "8a", 9: "8b"}
    check_clean(press, topic)


def test_what_a_compile_left_behind_goes_and_is_not_counted() -> None:
    press = Press()
    topic = press.topic()
    for number in range(4):
        press.append(topic, [f"{number}a", f"{number}b"], at_ms=T0 + 10_000 * number)
    rows = [*press.rows(topic, "run/"), *press.rows(topic, "slot/")]
    press.compile(topic, FOUR)
    for row in rows:
        press.put(topic, row.row, row.value)
    assert press.events(topic) == {n: v for n, v in all_values().items() if n < 8}
    assert verify_topic(press.context, topic).errors == 0
    size = press.journals(topic)[0].byte_end
    assert trim_topic(press.context, topic, ToOffsets({0: 4})) == [TrimResult(0, 0, 4, 1, size)]
    assert press.rows(topic, "run/") == []
    assert len(press.rows(topic, "slot/")) == 2
    check_clean(press, topic)


@pytest.mark.parametrize(
    "to",
    [ToOffsets({0: 9}), BeforeTime(T0 + 40_001), KeepBytes(0)],
    ids=["offset", "time", "bytes"],
)
def test_it_dies_after_every_call_and_the_next_one_finishes(to: TrimTo) -> None:
    deaths = 0
    for call in range(1, 100):
        press = Press()
        topic = filled(press)
        for offset in (1, 5, 11):
            press.amend(topic, offset, b"new")
        expected = all_values() | dict.fromkeys((1, 5, 11), "new")
        try:
            trim_topic(press.faulty(Faults(crash_after_call=call)), topic, to)
        except Crash:
            deaths += 1
        else:
            break
        start = press.head(topic).start
        assert press.events(topic) == {n: v for n, v in expected.items() if n >= start}
        assert verify_topic(press.context, topic).errors == 0
        trim_topic(press.context, topic, to)
        check_clean(press, topic)
        start = press.head(topic).start
        assert start == {ToOffsets: 9, BeforeTime: 10, KeepBytes: 12}[type(to)]
        assert press.events(topic) == {n: v for n, v in expected.items() if n >= start}
    assert deaths > 8


@pytest.mark.parametrize("to", [ToOffsets({0: 4}), BeforeTime(T0 + 20_000), KeepBytes(9_000)])
@pytest.mark.parametrize("policy", [FOUR, TEN, CompilePolicy.everything()])
def test_a_compile_may_come_between_any_two_of_its_calls(to: TrimTo, policy: CompilePolicy) -> None:
    for call in range(1, 60):
        press = Press()
        topic = filled(press)
        press.amend(topic, 0, b"new")
        press.amend(topic, 5, b"five")
        hands = Hands(lambda: press.compile(topic, policy) if hands.calls == call else None)  # noqa: B023
        context = press.faulty(Faults(scheduler=cast(Scheduler, hands)))
        [trimmed] = trim_topic(context, topic, to)
        expected = all_values(trimmed.new_start)
        expected |= {n: v for n, v in {0: "new", 5: "five"}.items() if n in expected}
        assert press.events(topic) == expected
        assert trimmed.new_start < 12
        report = verify_topic(press.context, topic)
        assert report.errors == 0, report.findings
        if hands.calls < call:
            return
    pytest.fail("it made more calls than were tried")


@pytest.mark.parametrize("seed", range(20))
def test_lost_replies_and_doubled_requests_do_not_matter(seed: int) -> None:
    press = Press(seed)
    topic = filled(press)
    amend_by_hand(press.context, topic, 0, {1: (b"x",), 9: (b"nine",)})
    rates = {Fault.LOSE_REPLY: 0.25, Fault.DUPLICATE: 0.1}
    faults = Faults(press.context.random, rates)
    context = press.faulty(faults)
    for _ in range(20):
        with contextlib.suppress(UnavailableError, UnknownOutcomeError):
            assert trim_topic(context, topic, ToOffsets({0: 8}))[0].new_start == 8
            break
    for late in faults.late:
        late()
    trim_topic(press.context, topic, ToOffsets({0: 8}))
    assert press.events(topic) == all_values(8) | {9: "nine"}
    check_clean(press, topic)


@pytest.mark.parametrize("compiled_first", [True, False])
def test_what_was_trimmed_is_not_counted_as_erased(compiled_first: bool) -> None:
    press = Press()
    topic = press.topic()
    press.append(topic, [f"{number}" for number in range(10)])
    amend_by_hand(press.context, topic, 0, {1: None, 7: None})
    steps = [
        lambda: press.compile(topic, TEN),
        lambda: trim_topic(press.context, topic, ToOffsets({0: 4})),
    ]
    for step in steps if compiled_first else reversed(steps):
        step()
    with ThreadPoolExecutor(1) as pool:
        [state] = partition_states(press.context, topic, pool, runs=True)
    assert (state.erased, state.events) == (1, 5)
    assert len(press.events(topic)) == 5
