"""Compile: offsets and events stay as they were, whoever trims, amends or sweeps meanwhile."""

from __future__ import annotations

import pytest

from tests.support.compiled_journals import ALL, Between, Press
from tidelog.catalog.base import Change
from tidelog.catalog.memory import MemoryCatalog
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_staged
from tidelog.context import Context
from tidelog.errors import CorruptError, FencedError, NotFoundError
from tidelog.journal.compile import (
    CompileReport,
    PartitionCompile,
    compile_partition,
    compile_topic,
)
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.listing import list_journals
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.partition_reader import Reader
from tidelog.log.topics import delete_topic
from tidelog.model import layout
from tidelog.model.event import Event
from tidelog.model.topic import Topic
from tidelog.store.memory import MemoryStore
from tidelog.testing.scheduler import seeded_ids


@pytest.fixture
def press() -> Press:
    return Press()


def filled(press: Press, runs: int = 5, each: int = 4, name: str = "orders") -> Topic:
    topic = press.topic(name)
    for run in range(runs):
        press.append(topic, [f"{run}.{n}" for n in range(each)])
    return topic


def values(runs: int = 5, each: int = 4) -> dict[int, str]:
    return {run * each + n: f"{run}.{n}" for run in range(runs) for n in range(each)}


def check(press: Press, topic: Topic, expected: dict[int, str]) -> None:
    """All that is expected is read, from each offset on, and nothing is damaged."""
    assert press.events(topic) == expected
    head = press.head(topic)
    for start in range(head.start, head.next + 1):
        found = press.events(topic, start=start)
        assert found == {at: value for at, value in expected.items() if at >= start}
    assert verify_topic(press.context, topic).errors == 0


def test_runs_become_one_journal_and_nothing_else_changes(press: Press) -> None:
    topic = filled(press)
    size = sum(run.byte_end - run.byte_start for run in press.runs(topic))
    report = press.compile(topic)
    (journal,) = press.journals(topic)
    assert report == CompileReport(
        partitions=1,
        journals=1,
        runs=5,
        events=20,
        bytes_before=size,
        bytes_after=journal.byte_end,
    )
    assert (journal.base, journal.end, journal.events) == (0, 20, 20)
    assert press.runs(topic) == []
    head = press.head(topic)
    assert (head.journaled, head.compiled, head.next) == (20, 1, 20)
    assert all(row.value == b"20j" for row in press.rows(topic, "slot/"))
    check(press, topic, values())
    assert press.compile(topic) == CompileReport(), "a second one finds nothing to do"
    sweep_home(press.context, 0)
    assert len(press.objects()) == 1
    check(press, topic, values())


def test_every_field_of_an_event_stays(press: Press) -> None:
    topic = press.topic()
    events = [
        Event(b"v", b"k", "id-1", 5, "made", (("h", b"1"), ("h", b""))),
        Event(None, b"", None, 6),
        Event(b"", None, "ü" * 400, 2**40),
        Event(b"\xff" * 70_000, b"k", "id-2", 0),
    ]
    appender = press.appender(topic)
    for event in events:
        segment = encode_staged([(0, table_of([event], 0))])
        appender.commit(appender.upload(segment), segment.pieces[0])
    before = [e for s in Reader(press.context, topic, 0).read(0) for e in s.events()]
    press.compile(topic)
    (journal,) = press.journals(topic)
    assert (journal.first_ms, journal.last_ms) == (0, 2**40)
    assert journal.ids_end > journal.ids_start > 0
    after = [e for s in Reader(press.context, topic, 0).read(0) for e in s.events()]
    assert after == before


def test_what_is_appended_later_follows(press: Press) -> None:
    topic = filled(press, 2)
    press.compile(topic)
    press.append(topic, ["2.0", "2.1", "2.2", "2.3"])
    check(press, topic, values(3))
    press.compile(topic)
    assert [(run.base, run.end) for run in press.journals(topic)] == [(0, 8), (8, 12)]
    check(press, topic, values(3))


def test_journals_end_where_they_are_full_and_small_ones_are_merged(press: Press) -> None:
    topic = filled(press, 9)
    press.compile(topic, CompilePolicy(min_events=1, max_events=10))
    assert [run.count for run in press.journals(topic)] == [8, 8, 8, 8, 4]
    check(press, topic, values(9))
    assert press.compile(topic, CompilePolicy(max_events=1_000)).journals == 1
    assert [run.count for run in press.journals(topic)] == [36]
    check(press, topic, values(9))
    sweep_home(press.context, 0)
    assert len(press.objects()) == 1
    assert len(press.rows(topic, "slot/")) <= 2


def test_a_policy_leaves_alone_what_can_wait(press: Press) -> None:
    topic = filled(press)
    assert press.compile(topic, CompilePolicy(min_events=21)) == CompileReport()
    press.clock.advance(3601)
    assert press.compile(topic, CompilePolicy(min_events=21)).events == 20


def test_amendments_are_applied_and_later_ones_stay_pending(press: Press) -> None:
    topic = filled(press)
    press.amend(topic, 3, b"three")
    press.amend(topic, 7, delete=True)
    press.amend(topic, 9, None)
    expected = {**values(), 3: "three", 9: ""}
    del expected[7]
    check(press, topic, expected)
    assert press.compile(topic).amendments == 3
    (journal,) = press.journals(topic)
    assert (journal.events, journal.count) == (19, 20)
    assert journal.journal is not None
    assert journal.journal.applied == 3
    check(press, topic, expected)
    press.amend(topic, 3, b"drei")
    press.amend(topic, 0, delete=True)
    expected |= {3: "drei"}
    del expected[0]
    check(press, topic, expected)
    assert press.compile(topic, CompilePolicy(min_amendments=3)) == CompileReport(), (
        "too few of them"
    )
    assert press.compile(topic).amendments == 2
    check(press, topic, expected)
    sweep_home(press.context, 0)
    assert press.rows(topic, "amend/") == []
    assert press.head(topic).amended is None
    check(press, topic, expected)
    assert press.compile(topic) == CompileReport()


def test_an_emptied_journal_keeps_its_place(press: Press) -> None:
    topic = filled(press, 3)
    press.compile(topic, CompilePolicy(min_events=1, max_events=4))
    for offset in range(4, 8):
        press.amend(topic, offset, delete=True)
    press.compile(topic)
    empty = press.journals(topic)[1]
    assert (empty.base, empty.end, empty.events) == (4, 8, 0)
    expected = {at: value for at, value in values(3).items() if not 4 <= at < 8}
    check(press, topic, expected)
    sweep_home(press.context, 0)
    check(press, topic, expected)
    for offset in (0, 1, 2, 3, 8, 9, 10, 11):
        press.amend(topic, offset, delete=True)
    press.compile(topic)
    sweep_home(press.context, 0)
    check(press, topic, {})
    assert press.rows(topic, "slot/") == []
    assert press.append(topic, ["again"]) == 12


def test_updates_that_make_a_journal_much_larger_cut_it(press: Press) -> None:
    topic = filled(press, 5)
    press.compile(topic)
    expected = values()
    for offset in range(20):
        expected[offset] = chr(97 + offset) * 5_000
        press.amend(topic, offset, expected[offset].encode())
    small = CompilePolicy(min_amendments=1, max_raw_bytes=30_000)
    assert press.compile(topic, small).amendments == 20
    assert 1 < len(press.journals(topic)) <= 6
    check(press, topic, expected)
    assert press.head(topic).compiled == 2, "one write has put all of them"


def test_trimmed_events_are_left_out(press: Press) -> None:
    topic = filled(press)
    trim_topic(press.context, topic, ToOffsets({0: 6}))
    assert press.compile(topic).events == 14
    (journal,) = press.journals(topic)
    assert (journal.base, journal.end) == (4, 20)
    expected = {at: value for at, value in values().items() if at >= 6}
    check(press, topic, expected)
    with pytest.raises(NotFoundError):
        press.events(topic, start=5)
    trim_topic(press.context, topic, ToOffsets({0: 20}))
    assert press.rows(topic, "journal/") == []
    assert press.compile(topic) == CompileReport()
    assert press.append(topic, ["on"]) == 20


def test_an_append_before_the_swap_is_no_matter(press: Press) -> None:
    topic = filled(press)
    between = Between(press, topic)
    press.append(topic, ["5.0", "5.1", "5.2", "5.3"])
    assert between.swap() is not None
    assert press.journals(topic)[0].object == between.made.journals[0].object
    check(press, topic, values(6))


def test_amendments_before_the_swap_stay_pending(press: Press) -> None:
    topic = filled(press)
    between = Between(press, topic)
    press.amend(topic, 1, b"one")
    press.amend(topic, 2, delete=True)
    assert between.swap() is not None
    expected = {**values(), 1: "one"}
    del expected[2]
    check(press, topic, expected)
    sweep_home(press.context, 0)
    assert len(press.rows(topic, "amend/")) == 2
    check(press, topic, expected)


def test_a_trim_before_the_swap(press: Press) -> None:
    topic = filled(press)
    between = Between(press, topic)
    trim_topic(press.context, topic, ToOffsets({0: 2}))
    assert between.swap() is not None, "it has cut the first run only"
    check(press, topic, {at: value for at, value in values().items() if at >= 2})
    other = filled(press, name="other")
    between = Between(press, other)
    trim_topic(press.context, other, ToOffsets({0: 5}))
    assert between.swap() is None, "a run is gone: plan anew"
    check(press, other, {at: value for at, value in values().items() if at >= 5})
    between.compiling.holding.release()
    between = Between(press, other)
    trim_topic(press.context, other, ToOffsets({0: 20}))
    assert between.swap() is None
    check(press, other, {})


def test_a_sweep_before_the_swap_makes_it_take_the_row_anew(press: Press) -> None:
    topic = filled(press)
    between = Between(press, topic)
    epoch = between.compiling.holding.epoch
    sweep_home(press.context, 3_600_000)
    assert between.swap() is not None, "the journal is still there, and copied"
    (journal,) = press.journals(topic)
    assert layout.journal_place(journal.object) == (0, epoch + 2)
    check(press, topic, values())
    between.compiling.holding.release()
    sweep_home(press.context, 0)
    check(press, topic, values())
    other = filled(press, name="other")
    between = Between(press, other)
    sweep_home(press.context, 0)
    assert between.swap() is None, "the journal was swept: make it again"
    check(press, other, values())
    assert press.compile(other).journals == 1, "once the first one was silent for long enough"
    check(press, other, values())


def test_a_beat_takes_a_row_that_a_sweep_emptied(press: Press) -> None:
    topic = filled(press)
    between = Between(press, topic)
    sweep_home(press.context, 3_600_000)
    between.compiling.holding.beat()
    other = PartitionCompile(press.context, topic, 0, ALL)
    assert not other.holding.try_take()
    assert between.swap() is not None
    check(press, topic, values())
    between.compiling.holding.release()
    assert other.holding.try_take()
    with pytest.raises(FencedError):
        between.compiling.holding.beat()


def test_another_swap_before_ours(press: Press) -> None:
    topic = filled(press)
    between = Between(press, topic)
    press.clock.advance(3600)  # nobody has heard of the first one
    assert press.compile(topic).journals == 1
    assert between.swap() is None
    check(press, topic, values())
    assert press.head(topic).compiled == 1


def test_the_row_of_a_living_compiler_is_left_to_it(press: Press) -> None:
    topic = filled(press)
    first = Between(press, topic)
    looks = 0

    class Alive(type(press.clock)):  # type: ignore[misc]
        def sleep(self, seconds: float) -> None:
            nonlocal looks
            looks += 1
            super().sleep(seconds)
            if looks % 5 == 0:
                first.compiling.holding.beat()

    press.clock.__class__ = Alive
    assert press.compile(topic) == CompileReport(partitions=1, busy=1)
    assert first.swap() is not None
    check(press, topic, values())


def test_a_topic_that_is_deleted_meanwhile_leaves_nothing(press: Press) -> None:
    topic = filled(press)
    between = Between(press, topic)
    delete_topic(press.context, "orders")
    with pytest.raises(NotFoundError):
        between.swap()
    with pytest.raises(NotFoundError):
        press.compile(topic)
    between.compiling.holding.release()
    assert [row.row for row in press.rows(topic)] == ["head"], "no row came back"
    sweep_home(press.context, 0)
    assert press.objects() == set()


def test_it_ends_beside_a_producer_that_never_does(press: Press) -> None:
    topic = filled(press)
    done = []
    for report in compile_partition(press.context, topic, 0, ALL):
        press.append(topic, ["more"])
        press.amend(topic, 0, b"more")
        done.append(report)
    assert len(done) < 4
    assert len(press.runs(topic)) == len(done)


def test_told_to_stop_it_stops_between_swaps_and_goes_on_later(press: Press) -> None:
    topic = filled(press, 6)
    policy = CompilePolicy(min_events=1, max_events=4)
    seen: list[CompileReport] = []

    def go_on() -> bool:
        return sum(report.journals for report in seen) < 2

    report = compile_topic(press.context, topic, policy, go_on=go_on, on_swap=seen.append)
    assert report.journals == 2
    check(press, topic, values(6))
    assert compile_topic(press.context, topic, policy).journals == 4
    check(press, topic, values(6))


def test_requests_do_not_grow_with_the_runs() -> None:
    """Besides a fetch for each run: the same number of calls, however many runs there are."""

    def calls(runs: int) -> dict[str, int]:
        press = Press()
        topic = filled(press, runs)
        counts = {"put": 0, "write": 0}

        class Counting(MemoryStore):
            def put(self, key: str, data: bytes) -> str:
                counts["put"] += 1
                return super().put(key, data)

        class Writing(MemoryCatalog):
            def write(self, partition: str, *changes: Change, write_id: str) -> None:
                counts["write"] += 1
                super().write(partition, *changes, write_id=write_id)

        press.store.__class__ = Counting
        press.catalog.__class__ = Writing
        press.compile(topic)
        return counts

    few, many = calls(8), calls(80)
    assert many["put"] == few["put"] == 1
    assert many["write"] - few["write"] <= 12, "rows of runs go in large writes"


def test_ids_of_two_compilers_never_meet(press: Press) -> None:
    topic = filled(press)
    press.compile(topic)
    press.append(topic, ["5.0"])
    again = Context(press.store, press.catalog, press.clock, seeded_ids(99), press.context.random)
    press.compile(topic, context=again)
    check(press, topic, {**values(), 20: "5.0"})


def test_an_object_that_is_gone_is_named(press: Press) -> None:
    topic = filled(press)
    key = next(iter(sorted(press.objects())))
    press.store.delete([key])
    with pytest.raises(CorruptError, match=f"object `{key}`: is gone.*restore it"):
        press.compile(topic)


def test_a_listing_beside_a_compile_names_no_offset_twice(
    press: Press, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = filled(press)
    monkeypatch.setattr("tidelog.log.partition_reader._RUNS_AT_ONCE", 2)
    listing = list_journals(press.context, topic)
    listed = [next(listing), next(listing)]
    press.compile(topic)
    listed += listing
    at = 0
    for entry in listed:
        assert entry.base <= entry.start == at
        at = entry.end
    assert at == 20
    trim_topic(press.context, topic, ToOffsets({0: 6}))
    assert [(each.base, each.start) for each in list_journals(press.context, topic)] == [(0, 6)]


def test_reader_that_knows_an_older_start_does_not_pass_over_trimmed_events(press: Press) -> None:
    topic = filled(press)
    press.compile(topic, ALL)
    before = press.head(topic)
    trim_topic(press.context, topic, ToOffsets({0: 7}))
    press.compile(topic, CompilePolicy.trimmed())
    with pytest.raises(NotFoundError, match="offset 2 was trimmed, the first is 7"):
        Reader(press.context, topic, 0)._look(2, before)


def test_journal_that_holds_the_start_is_made_without_what_was_trimmed(press: Press) -> None:
    topic = filled(press)
    press.compile(topic, ALL)
    (before,) = press.journals(topic)
    trim_topic(press.context, topic, ToOffsets({0: 7}))
    assert press.compile(topic, CompilePolicy()) == CompileReport(), "not by itself"
    assert press.compile(topic, CompilePolicy.trimmed()).events == 13
    (journal,) = press.journals(topic)
    assert (journal.base, journal.end, journal.events) == (before.base, before.end, 13)
    assert b"1.2" not in press.store.get(journal.object)
    check(press, topic, {at: value for at, value in values().items() if at >= 7})
    for policy in (CompilePolicy.trimmed(), ALL):
        assert press.compile(topic, policy) == CompileReport(), "once is enough"
    trim_topic(press.context, topic, ToOffsets({0: 8}))
    assert press.compile(topic, ALL).events == 12
