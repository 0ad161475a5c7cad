"""A trim and a sweep between any two calls of a reader: what was updated or deleted stays so.

A sweep removes the amendments below a partition's start. The run of their offsets may still be
there, with the old values in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import cast

import pytest

from tests.faults.test_topic_delete_beside_readers import Between
from tests.support.compiled_journals import Press
from tidelog.codec.event_batch import table_of
from tidelog.codec.journal_file import JournalFile
from tidelog.codec.segment import encode_staged
from tidelog.context import Context
from tidelog.errors import NotFoundError
from tidelog.journal.compile import compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.listing import list_journals, read_journal
from tidelog.journal.lookup import Lookup, Lookups
from tidelog.log.maintenance.object_references import read_references
from tidelog.log.maintenance.obsolete_rows import remove_amendments, remove_shadowed
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.partition_reader import Reader
from tidelog.log.topics import delete_topic, find_head
from tidelog.model import layout
from tidelog.model.event import Event
from tidelog.model.topic import Topic
from tidelog.playback.merge import play_events
from tidelog.testing.faults import Faults
from tidelog.testing.scheduler import Scheduler

CALLS_MAX = 200


def filled() -> tuple[Press, Topic]:
    """Offset 0 is updated, offset 1 deleted, in a run of six."""
    press = Press()
    topic = press.topic()
    events = [Event(f"old {n}".encode(), id=f"id{n}", timestamp=1_000 * n) for n in range(6)]
    segment = encode_staged([(0, table_of(events, 0))])
    appender = press.appender(topic)
    appender.commit(appender.upload(segment), segment.pieces[0])
    press.amend(topic, 0, b"new 0")
    press.amend(topic, 1, delete=True)
    return press, topic


def read(context: Context, topic: Topic) -> list[bytes | None]:
    return [e.value for s in Reader(context, topic, 0).read(0) for e in s.events()]


def play(context: Context, topic: Topic) -> list[bytes | None]:
    return [event.value for event in play_events(context, topic.name, 0, 10**12)]


def get_updated(context: Context, topic: Topic) -> list[bytes | None]:
    return [Lookups(context, None).of(topic).get("id0").value]


def get_deleted(context: Context, topic: Topic) -> list[bytes | None]:
    return [Lookups(context, None).of(topic).get("id1").value]


def list_and_fetch(context: Context, topic: Topic) -> list[bytes | None]:
    entries = list(list_journals(context, topic, expires_s=60))
    return [event.value for entry in entries for event in read_journal(entry)]


@pytest.mark.parametrize("start", [3, 6])  # with and without the run
@pytest.mark.parametrize("grace_ms", [0, 3_600_000])  # without and with its object
@pytest.mark.parametrize("reader", [read, play, get_updated, get_deleted, list_and_fetch])
def test_reader_never_gets_what_was_amended_before_a_trim(
    reader: Callable[[Context, Topic], list[bytes | None]], start: int, grace_ms: int
) -> None:
    for call in range(1, CALLS_MAX):
        press, topic = filled()

        def act(press: Press = press, topic: Topic = topic) -> None:
            trim_topic(press.context, topic, ToOffsets({0: start}))
            sweep_home(press.context, grace_ms)

        between = Between(call, act)
        found: list[bytes | None] = []
        with contextlib.suppress(NotFoundError):
            found = reader(press.faulty(Faults(scheduler=cast(Scheduler, between))), topic)
        assert b"old 0" not in found
        assert b"old 1" not in found
        if between.calls_left > 0:
            return
    pytest.fail("the reader never ended")


@pytest.mark.parametrize("room", [1 << 20, 0], ids=["cached", "not cached"])
def test_event_after_a_trim_in_the_middle_of_its_run_is_found_beside_a_compile(room: int) -> None:
    for call in range(1, CALLS_MAX):
        press, topic = filled()
        trim_topic(press.context, topic, ToOffsets({0: 3}))
        act = partial(compile_topic, press.context, topic, CompilePolicy(min_events=1))
        between = Between(call, act)
        context = press.faulty(Faults(scheduler=cast(Scheduler, between)))
        assert Lookup(context, topic, bytes_max=room).get("id4").value == b"old 4"
        if between.calls_left > 0:
            return
    pytest.fail("the lookup never ended")


def test_trim_beside_a_listing_only_moves_its_start() -> None:
    for call in range(1, CALLS_MAX):
        press, topic = filled()
        trim = partial(trim_topic, press.context, topic, ToOffsets({0: 3}))
        between = Between(call, trim)
        context = press.faulty(Faults(scheduler=cast(Scheduler, between)))
        (entry,) = list_journals(context, topic)
        assert (entry.base, entry.end) == (0, 6)
        assert entry.start in (0, 3)
        if between.calls_left > 0:
            return
    pytest.fail("the listing never ended")


def test_compile_writes_nothing_that_was_deleted_before_a_trim() -> None:
    for call in range(1, CALLS_MAX):
        press, topic = filled()

        def act(press: Press = press, topic: Topic = topic) -> None:
            trim_topic(press.context, topic, ToOffsets({0: 3}))
            sweep_home(press.context, 0)

        between = Between(call, act)
        context = press.faulty(Faults(scheduler=cast(Scheduler, between)))
        compile_topic(context, topic, CompilePolicy.everything())
        for run in press.journals(topic):
            data = press.store.get(run.object)
            file = JournalFile(lambda start, end, data=data: data[start:end], run, "a journal")  # type: ignore[misc]
            values = [
                value
                for group in file.groups
                for value in file.read(group, ["offset", "value"]).column("value").to_pylist()
            ]
            assert b"old 1" not in values
            assert b"old 0" not in values
        if between.calls_left > 0:
            return
    pytest.fail("the compile never ended")


def test_deleted_event_that_is_trimmed_leaves_its_journal_with_the_next_compile() -> None:
    press, topic = filled()
    compile_topic(press.context, topic, CompilePolicy.everything())
    press.amend(topic, 2, delete=True)
    trim_topic(press.context, topic, ToOffsets({0: 3}))
    sweep_home(press.context, 0)
    compile_topic(press.context, topic, CompilePolicy.everything())
    press.clock.advance(86_400)
    sweep_home(press.context, 0)
    (run,) = press.journals(topic)
    assert press.objects() == {run.object}
    data = press.store.get(run.object)
    file = JournalFile(lambda start, end: data[start:end], run, "a journal")
    found = [file.read(group, ["offset"]).column("offset").to_pylist() for group in file.groups]
    assert found == [[3, 4, 5]]
    assert press.rows(topic, "amend/") == []


def clean_compile(context: Context, topic: Topic) -> None:
    remove_shadowed(context, topic, 0, 6)


def clean_amendments(context: Context, topic: Topic) -> None:
    head = find_head(context, topic, 0)
    found = read_references(context, topic, 0, head).applied
    remove_amendments(context, topic, 0, [(each.row, each.version, "values/x") for each in found])


@pytest.mark.parametrize("clean", [clean_compile, clean_amendments])
def test_work_between_any_two_calls_of_a_delete_leaves_nothing_but_the_closed_head(
    clean: Callable[[Context, Topic], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.journal.compile.remove_shadowed", lambda *_: None)
    for call in range(1, CALLS_MAX):
        press, topic = filled()
        compile_topic(press.context, topic, CompilePolicy.everything())
        between = Between(call, partial(clean, press.context, topic))
        delete_topic(press.faulty(Faults(scheduler=cast(Scheduler, between))), topic.name)
        where = layout.topic_partition(topic.incarnation, 0)
        assert [row.row for row in press.catalog.scan(where)] == ["head"]
        if between.calls_left > 0:
            return
    pytest.fail("the delete never ended")
