"""Sweeping a topic that is compiled and amended: what nobody needs goes, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from tests.playback.test_journals import Hands
from tests.support.compiled_journals import Between, Press
from tests.support.rounds import rounds
from tests.support.topic_upkeep import DAY_S, HOUR_MS, WEEK_S
from tidelog.context import Context
from tidelog.errors import CorruptError, NotFoundError
from tidelog.journal import compile_steps as swap_module
from tidelog.journal.amendment_writer import AmendmentChange, AmendmentWriter
from tidelog.journal.compile import PartitionCompile, compile_partition
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.log.maintenance import sweep as sweep_module
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.topics import delete_topic, find_topic, raise_epoch, read_head
from tidelog.model import layout
from tidelog.model.topic import HeldRow, Topic, decode_row
from tidelog.testing.faults import Faults
from tidelog.testing.scheduler import Crash, Scheduler

EIGHT = CompilePolicy(min_events=1, min_amendments=1, max_events=8)
LARGE = b"large " * 3_000


def filled(press: Press, runs: int = 6) -> tuple[Topic, dict[int, str]]:
    """Runs of two events each, and what is in them."""
    topic = press.topic()
    for number in range(runs):
        press.append(topic, [f"{number}a", f"{number}b"])
        press.clock.advance(1)
    return topic, press.events(topic)


def amend_large(press: Press, topic: Topic, offset: int, value: bytes = LARGE) -> str:
    """An update whose value stands in the store; its key."""
    topic = find_topic(press.context, topic.name)
    seen = read_head(press.context, topic, 0)
    writer = AmendmentWriter(press.context, topic, 0, seen, "audit", press.clock.now_ms())
    assert len(list(writer.put([AmendmentChange("id", 0, offset, "update", value)]))) == 1
    [key] = [key for key in press.objects() if "/amendments/" in key]
    return key


def check(press: Press, topic: Topic, expected: dict[int, str], orphans: int = 0) -> None:
    assert press.events(topic) == expected
    report = verify_topic(press.context, topic)
    assert report.errors == 0, report.findings
    assert report.orphans == orphans


def test_segments_go_when_all_that_shared_them_is_compiled() -> None:
    press = Press()
    topic = press.topic(partitions=2)
    appender = press.appender(topic)
    segment = press.shared_segment({0: ["p0"], 1: ["p1"]})
    stored = appender.upload(segment)
    for piece in segment.pieces:
        appender.commit(stored, piece)
    list(compile_partition(press.context, topic, 0, EIGHT))
    assert sweep_home(press.context, 0).objects_deleted == 0
    press.compile(topic)
    young = sweep_home(press.context, HOUR_MS)
    assert (young.objects_deleted, young.objects_young) == (0, 1)
    assert sweep_home(press.context, 0).objects_deleted == 1
    assert (press.events(topic), press.events(topic, 1)) == ({0: "p0"}, {0: "p1"})
    assert {key.split("/")[2] for key in press.objects()} == {"journals"}


def test_sweep_asks_for_no_object_that_it_has_deleted_itself() -> None:
    press = Press()
    topic, _ = filled(press)
    press.compile(topic)
    asked: list[str] = []
    head = press.store.head
    press.store.head = lambda key: (asked.append(key), head(key))[1]  # type: ignore[method-assign]
    assert sweep_home(press.context, 0).objects_deleted == 6
    assert press.rows(topic, "unused/") == []
    assert [key for key in asked if not key.startswith("probe/")] == []


def test_journals_that_were_compiled_again_go() -> None:
    press = Press()
    topic, expected = filled(press)
    press.compile(topic, EIGHT)
    sweep_home(press.context, 0)
    before = press.objects()
    assert len(before) == 2
    press.amend(topic, 3, b"three")
    press.compile(topic)
    assert len(press.objects()) == 3
    assert sweep_home(press.context, 0).objects_deleted == 1
    check(press, topic, expected | {3: "three"})


def test_journals_that_never_took_their_place_go_and_the_compiler_goes_on() -> None:
    press = Press()
    topic, expected = filled(press)
    between = Between(press, topic, EIGHT)
    old = between.made.journals[0].object
    young = sweep_home(press.context, HOUR_MS)
    assert (young.objects_young, young.objects_deleted) == (1, 0)
    [row] = press.rows(topic, "compile")
    lease = decode_row(row.value, HeldRow, "")
    assert (lease.owner, lease.epoch) == ("", 2)
    assert between.swap() is not None, "under an epoch of its own"
    assert press.journals(topic)[0].object != old
    assert sweep_home(press.context, 0).objects_deleted == 5, "the first one, and four segments"
    check(press, topic, expected)


def test_one_that_was_swept_under_its_hands_is_made_again() -> None:
    press = Press()
    topic, expected = filled(press)
    between = Between(press, topic, EIGHT)
    assert sweep_home(press.context, 0).objects_deleted == 1
    assert between.swap() is None
    check(press, topic, expected)
    between.compiling.holding.release()
    press.compile(topic)
    check(press, topic, expected, orphans=6)


def test_a_beat_of_its_own_does_not_hide_that_a_sweep_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    press = Press()
    topic, expected = filled(press)
    between = Between(press, topic, EIGHT)
    raised: list[int] = []

    def changes(*given: Any) -> Any:
        if not raised:  # a sweep raises the epoch, and a beat takes the row anew
            raised.append(raise_epoch(press.context, topic, 0))
            between.compiling.holding.beat()
        return swap_changes(*given)

    swap_changes = swap_module._changes
    monkeypatch.setattr(swap_module, "_changes", changes)
    assert between.swap() is not None
    assert layout.journal_place(press.journals(topic)[0].object)[1] >= raised[0], "not garbage"
    check(press, topic, expected, orphans=1)


def test_where_nobody_compiles_no_row_is_written() -> None:
    press = Press()
    topic, _ = filled(press)
    press.compile(topic)
    before = press.rows(topic, "compile")
    sweep_home(press.context, 0)
    assert press.rows(topic, "compile") == before


def test_amendments_that_a_journal_has_go_after_the_grace() -> None:
    press = Press()
    topic, expected = filled(press)
    press.amend(topic, 1, b"one")
    press.amend(topic, 2, delete=True)
    del expected[2]
    expected[1] = "one"
    assert sweep_home(press.context, 0).amendments_removed == 0
    press.compile(topic)
    press.amend(topic, 9, b"nine")
    expected[9] = "nine"
    check(press, topic, expected, orphans=6)
    assert sweep_home(press.context, HOUR_MS).amendments_removed == 0
    press.clock.advance(3_600)
    assert sweep_home(press.context, HOUR_MS).amendments_removed == 2
    assert press.head(topic).amended == (9, 9)
    check(press, topic, expected)
    press.compile(topic)
    assert sweep_home(press.context, 0).amendments_removed == 1
    head = press.head(topic)
    assert (head.amended, head.amendments) == (None, 3)
    check(press, topic, expected)


def test_one_that_was_amended_again_since_it_was_compiled_stays() -> None:
    press = Press()
    topic, expected = filled(press)
    press.amend(topic, 1, b"one")
    press.compile(topic)
    press.amend(topic, 1, b"uno")
    assert sweep_home(press.context, 0).amendments_removed == 0
    check(press, topic, expected | {1: "uno"})


def test_large_values_stay_as_long_as_somebody_needs_them() -> None:
    press = Press()
    topic, expected = filled(press, 2)
    first = amend_large(press, topic, 1)
    expected[1] = LARGE.decode()
    sweep_home(press.context, 0)
    check(press, topic, expected)
    press.amend(topic, 1, b"small again")
    assert sweep_home(press.context, 0).objects_deleted == 1
    assert first not in press.objects()
    check(press, topic, expected | {1: "small again"})
    second = amend_large(press, topic, 2, LARGE + b"!")
    press.compile(topic)
    swept = sweep_home(press.context, 0)
    assert (swept.amendments_removed, swept.objects_deleted) == (2, 3)
    assert second not in press.objects()
    check(press, topic, expected | {1: "small again", 2: (LARGE + b"!").decode()})


def test_what_is_not_ours_is_left_alone() -> None:
    press = Press()
    topic, _ = filled(press)
    press.compile(topic)
    sweep_home(press.context, 0)
    folder = layout.journals(topic.incarnation)
    strange = {f"{folder}note", f"{folder}000009/0000000000/x", f"{folder}x/y/z"}
    strange |= {f"{layout.amendments(topic.incarnation)}note"}
    for key in strange:
        press.store.put(key, b"?")
    press.clock.advance(DAY_S)
    sweep_home(press.context, 0)
    assert strange <= press.objects()


def test_a_row_that_does_not_decode_makes_it_leave_that_topic_alone() -> None:
    for row in (layout.journal_row(0), layout.amend_row(1), "compile"):
        press = Press()
        topic, _ = filled(press)
        press.compile(topic)
        press.put(topic, row, b"\xc1")
        before = press.objects()
        report = sweep_home(press.context, 0)
        assert isinstance(report.refused[0].error, CorruptError)
        assert press.objects() == before


def test_a_deleted_topic_leaves_nothing() -> None:
    press = Press()
    topic, _ = filled(press)
    press.compile(topic, EIGHT)
    amend_large(press, topic, 1)
    compiling = PartitionCompile(press.context, topic, 0, EIGHT)
    delete_topic(press.context, "orders")
    assert press.objects() == set()
    assert [row.row for row in press.rows(topic)] == ["head"]
    late = layout.journal(topic.incarnation, 0, 3, 0, "late")
    press.store.put(late, b"late")
    press.store.put(layout.amendment(topic.incarnation, 3, 0, 0, "late"), b"late")
    with pytest.raises(NotFoundError):
        compiling.plan()
    assert sweep_home(press.context, 0).objects_deleted == 2
    assert press.objects() == set()


def messy(press: Press) -> tuple[Topic, dict[int, str]]:
    """Leftovers of every kind: trimmed and compiled rows, orphans, applied amendments."""
    topic, expected = filled(press)
    press.amend(topic, 7, b"seven")
    amend_large(press, topic, 5)
    left = [*press.rows(topic, "run/"), *press.rows(topic, "slot/")]
    press.compile(topic, CompilePolicy(min_events=1, min_amendments=1, max_events=4))
    for row in left:
        press.put(topic, row.row, row.value)
    press.amend(topic, 0, b"trimmed")
    press.amend(topic, 9, delete=True)
    press.orphan(topic)
    press.clock.advance(3600)
    press.append(topic, ["6a", "6b"])
    press.store.put(layout.journal(topic.incarnation, 0, 0, 0, "lost"), b"lost")
    press.put(topic, "head", msgspec.structs.replace(press.head(topic), start=4))
    expected |= {7: "seven", 5: LARGE.decode(), 12: "6a", 13: "6b"}
    press.clock.advance(WEEK_S)
    return topic, {n: value for n, value in expected.items() if n >= 4 and n != 9}


def test_it_dies_after_every_call_and_the_next_one_cleans_all() -> None:
    deaths = 0
    for call in range(1, 200):
        press = Press()
        topic, expected = messy(press)
        try:
            sweep_home(press.faulty(Faults(crash_after_call=call)), HOUR_MS)
        except Crash:
            deaths += 1
        else:
            break
        assert press.events(topic) == expected
        assert verify_topic(press.context, topic).errors == 0
        sweep_home(press.context, HOUR_MS)
        press.clock.advance(WEEK_S)
        sweep_home(press.context, HOUR_MS)
        check(press, topic, expected)
        assert press.head(topic).amended == (9, 9)
        assert len(press.rows(topic, "amend/")) == 1
        press.compile(topic)
        sweep_home(press.context, 0)
        check(press, topic, expected)
        assert press.head(topic).amended is None
        sweep_home(press.context, 0)  # rows that the sweep before it has listed itself
        assert press.rows(topic, "unused/") == []
        assert verify_topic(press.context, topic).findings == ()
    assert deaths > 30


def act_between(call: int, act: Callable[[Press, Topic], object], expected: dict[int, str]) -> bool:
    """Something is done between two calls of a sweep; whether the sweep made that call."""
    press = Press()
    topic, before = messy(press)
    hands = Hands(lambda: act(press, topic) if hands.calls == call else None)
    sweep_home(press.faulty(Faults(scheduler=cast(Scheduler, hands))), 0)
    is_done = hands.calls >= call
    now = before | expected if is_done else before
    assert press.events(topic) == now
    assert verify_topic(press.context, topic).errors == 0
    press.clock.advance(WEEK_S)
    sweep_home(press.context, 0)
    check(press, topic, now)
    return is_done


def compile_it(press: Press, topic: Topic) -> None:
    press.compile(topic)


def compile_half(press: Press, topic: Topic) -> None:
    press.compile(topic, EIGHT)


def amend_it(press: Press, topic: Topic) -> None:
    amend_by(press, topic, {7: b"siete", 5: LARGE + b"?", 12: LARGE})


def amend_by(press: Press, topic: Topic, values: dict[int, bytes]) -> None:
    seen = read_head(press.context, topic, 0)
    writer = AmendmentWriter(press.context, topic, 0, seen, "audit", press.clock.now_ms())
    list(
        writer.put(
            [AmendmentChange("id", 0, each, "update", value) for each, value in values.items()]
        )
    )


@pytest.mark.parametrize("first", rounds(3, every=3))
@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (compile_it, {}),
        (compile_half, {}),
        (amend_it, {7: "siete", 5: LARGE.decode() + "?", 12: LARGE.decode()}),
    ],
    ids=["compile", "compile half", "amend"],
)
def test_anything_may_come_between_any_two_of_its_calls(
    act: Callable[[Press, Topic], object], expected: dict[int, str], first: int
) -> None:
    for call in range(first + 1, 100, 3):
        if not act_between(call, act, expected):
            assert call > 20
            return
    pytest.fail("it made more calls than were tried")


SWEEP_CALLS = 30


def stalled_swap(call: int) -> None:
    """A compiler that has made its journal long ago swaps between two calls of a sweep."""
    press = Press()
    topic, expected = filled(press)
    between = Between(press, topic, EIGHT)
    press.clock.advance(DAY_S)
    hands = Hands(lambda: between.swap() if hands.calls == call else None)
    sweep_home(press.faulty(Faults(scheduler=cast(Scheduler, hands))), HOUR_MS)
    check(press, topic, expected, orphans=verify_topic(press.context, topic).orphans)


@pytest.mark.parametrize("call", range(1, SWEEP_CALLS))
def test_a_swap_that_stalled_for_days_loses_nothing(call: int) -> None:
    stalled_swap(call)


def test_a_sweep_that_does_not_raise_the_epoch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_only(context: Context, topic: Topic, partition: int) -> int:
        where = layout.topic_partition(topic.incarnation, partition)
        row = context.catalog.get(where, layout.COMPILE_ROW)
        return 0 if row is None else decode_row(row.value, HeldRow, "").epoch + 1

    monkeypatch.setattr(sweep_module, "raise_epoch", look_only)
    caught = 0
    for call in range(1, SWEEP_CALLS):
        try:
            stalled_swap(call)
        except (AssertionError, CorruptError):
            caught += 1
    assert caught
