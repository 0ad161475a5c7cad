"""Recovering in a bad world: deaths after every call, two at once, and others at work."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.journal.test_recover import values as home_values
from tests.log.maintenance.test_losses import Embedded
from tests.support.compiled_journals import ALL, Death, Press
from tests.support.rounds import rounds
from tidelog import Event, Home
from tidelog.catalog.memory import MemoryCatalog
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_segment, encode_staged
from tidelog.context import Context
from tidelog.coordination.audit import Why
from tidelog.errors import (
    AlreadyExistsError,
    CorruptError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.journal import recover, stray_events
from tidelog.journal.amend import Amender
from tidelog.journal.compile import compile_topic
from tidelog.journal.lookup import Lookup
from tidelog.journal.recover import RecoverReport, recover_topic
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.producer.append import Appender
from tidelog.log.producer.append_plan import StoredSegment
from tidelog.log.producer.copier import Copier, append_staged
from tidelog.log.producer.idempotent_append import append_once
from tidelog.log.producer.staged import StagedSegment
from tidelog.log.topics import find_topic
from tidelog.model.topic import Topic
from tidelog.store.base import ObjectInfo
from tidelog.testing.faults import Fault, Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash, Scheduler


class Restored(Press):
    """A house whose catalog is put back to a copy."""

    memory: MemoryCatalog

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed)
        assert isinstance(self.catalog, MemoryCatalog)
        self.memory = self.catalog

    def keep_copy(self) -> None:
        self.copied = {name: dict(rows) for name, rows in self.memory._partitions.items()}

    def go_back(self) -> None:
        self.memory._partitions = {name: dict(rows) for name, rows in self.copied.items()}

    def send(self, topic: Topic, *parts: tuple[int, Sequence[Event]]) -> None:
        """One flush."""
        appender = self.appender(topic)
        tables = [(place, table_of(list(some), self.clock.now_ms())) for place, some in parts]
        segment = encode_segment(tables, appender.known([place for place, _ in parts]))
        stored = appender.upload(segment)
        for piece in segment.pieces:
            _, stored = appender.commit(stored, piece)
        appender.close()

    def recover(self, topic: Topic, context: Context | None = None) -> RecoverReport:
        used = context or self.context
        return recover_topic(used, Lookup(used, find_topic(self.context, topic.name)))

    def delete(self, topic: Topic, event_id: str, context: Context | None = None) -> None:
        used = context or self.context
        Amender(used, Lookup(used, topic), Why("ada", "a test")).delete([event_id])

    def all_values(self, topic: Topic) -> list[str]:
        return sorted(
            value for place in range(topic.partitions) for value in self.values(topic, place)
        )


def events(*values: str) -> list[Event]:
    return [Event(value.encode()) for value in values]


def forgetful(press: Restored) -> tuple[Topic, list[str]]:
    """A topic of which the catalog has forgotten segments, and journals that hold them too."""
    topic = press.topic("t", 2)
    press.send(topic, (0, events("kept")), (1, events("kept 1")))
    press.keep_copy()
    press.send(topic, (0, events("a", "same")), (1, events("b")))
    press.send(topic, (0, [Event(b"secret", id="s"), Event(b"x", id="x")]))
    press.compile(topic)
    press.send(topic, (0, events("same")))
    press.amend(topic, 2, b"changed")
    compile_topic(press.context, topic, ALL)
    press.send(topic, (1, events("c")), (0, events("d")))
    press.go_back()
    press.clock.advance(1)
    press.send(topic, (0, [Event(b"secret", id="s")]))
    press.delete(topic, "s")
    press.send(topic, (1, events("new")))
    return topic, sorted(["kept", "kept 1", "a", "changed", "b", "x", "same", "c", "d", "new"])


def check(press: Restored, topic: Topic, expected: list[str]) -> None:
    assert press.all_values(topic) == expected
    again = press.recover(topic)
    assert (again.appended, again.events) == (0, 0)
    for _ in range(2):
        assert sweep_home(press.context, 0).refused == ()
    assert press.all_values(topic) == expected
    assert verify_topic(press.context, topic).errors == 0
    assert press.recover(topic).appended == 0


def test_segment_and_journals_of_it_are_recovered_once() -> None:
    press = Restored()
    topic, expected = forgetful(press)
    report = press.recover(topic)
    assert (report.appended, report.erased) == (7, 1)
    check(press, topic, expected)


@pytest.mark.parametrize(
    ("grace_ms", "step"),
    [
        (0, 14),  # calls between two deaths
        pytest.param(0, 1, marks=pytest.mark.long),
        pytest.param(3_600_000, 1, marks=pytest.mark.long),
    ],
)
def test_it_may_die_after_every_call_with_a_sweep_between(grace_ms: int, step: int) -> None:
    deaths = 0
    for call in range(1, 10_000, step):
        press = Restored()
        topic, expected = forgetful(press)
        try:
            press.recover(topic, press.faulty(Death(call)))
            died = False
        except Crash:
            died = True
            deaths += 1
        sweep_home(press.context, grace_ms)
        press.recover(topic)
        check(press, topic, expected)
        if not died:
            break
    assert deaths > 60 // step


@pytest.mark.parametrize("fault", [Fault.LOSE_REPLY, Fault.LOSE_REQUEST, Fault.DUPLICATE])
def test_each_write_may_lose_its_reply(fault: Fault) -> None:
    for skipped in range(14):
        press = Restored()
        topic, expected = forgetful(press)
        faults = Faults()
        faults.script.extend([("write", Fault.NONE)] * skipped + [("write", fault)])
        try:
            press.recover(topic, press.faulty(faults))
        except (UnavailableError, UnknownOutcomeError):
            press.recover(topic)
        for arrive in faults.late:
            arrive()
        check(press, topic, expected)


def test_two_recoveries_in_threads_share_the_work(tmp_path: Path) -> None:
    embedded = Embedded(tmp_path)
    embedded.append("kept")
    embedded.keep_copy()
    embedded.append(*(f"lost {number}" for number in range(20)))
    with embedded.open() as home:
        home.compile("orders")
    embedded.append("lost too")
    embedded.go_back()
    failed: list[BaseException] = []
    barrier = threading.Barrier(3)

    def run(home: Home) -> None:
        try:
            barrier.wait()
            home.recover_topic("orders")
        except BaseException as exc:  # noqa: BLE001 - asserted below
            failed.append(exc)

    with embedded.open() as first, embedded.open() as second, embedded.open() as third:
        homes = [first, second, third]
        threads = [threading.Thread(target=run, args=(home,)) for home in homes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        wanted = ["kept", "lost too", *(f"lost {number}" for number in range(20))]
        assert sorted(home_values(first)) == sorted(wanted)
        assert first.recover_topic("orders").events == 0


@pytest.mark.parametrize("seed", rounds(30, every=3))
def test_recoveries_producers_compilers_sweepers_and_deletes_at_once(seed: int) -> None:
    press = Restored(seed)
    topic, expected = forgetful(press)
    press.send(topic, (0, [Event(b"person", id="p")]))
    scheduler = Scheduler(seed)
    source = random.Random(seed)
    rates = {Fault.LOSE_REPLY: 0.02, Fault.DUPLICATE: 0.02, Fault.DELAY: 0.1, Fault.STALL: 0.01}
    sent: list[str] = []
    maybe: list[str] = []

    def context_of() -> Context:
        faults = Faults(random.Random(source.random()), rates, scheduler, page_rows=3)
        return Context(
            FaultyStore(press.store, faults),
            FaultyCatalog(press.catalog, faults, scheduler.clock),
            scheduler.clock,
            press.ids,
            random.Random(source.random()),
        )

    def recovering() -> None:
        context = context_of()
        for _ in range(2):
            try:
                press.recover(topic, context)
            except (UnavailableError, UnknownOutcomeError):
                continue

    def producing() -> None:
        context = context_of()
        appender = Appender(context, find_topic(press.context, "t"), f"~{press.ids.new()}")
        for _ in range(4):
            value = f"living {press.ids.new()}"
            places = source.sample(range(2), source.choice([1, 2]))
            tables = [(each, table_of(events(f"{value} {each}"), 0)) for each in places]
            try:
                segment = encode_segment(tables, appender.known(places))
                stored = appender.upload(segment)
            except UnavailableError:
                maybe.extend(f"{value} {each}" for each in places)  # it may be stored
                continue
            for piece in segment.pieces:
                name = f"{value} {piece.partition}"
                try:
                    _, stored = appender.commit(stored, piece)
                except (UnavailableError, UnknownOutcomeError):
                    maybe.append(name)  # a recovery may find it
                else:
                    sent.append(name)

    def compiling() -> None:
        context = context_of()
        for _ in range(3):
            context.clock.sleep(source.random())
            try:
                compile_topic(context, topic, ALL)
            except (UnavailableError, UnknownOutcomeError):
                continue

    def sweeping() -> None:
        context = context_of()
        for _ in range(3):
            context.clock.sleep(source.random())
            try:
                sweep_home(context, 0)
            except (UnavailableError, UnknownOutcomeError, CorruptError):
                continue

    def deleting() -> None:
        context = context_of()
        while True:
            try:
                press.delete(topic, "p", context)
            except (UnavailableError, UnknownOutcomeError):
                continue
            return

    for number, actor in enumerate(
        (recovering, recovering, producing, producing, compiling, sweeping, deleting)
    ):
        scheduler.spawn(f"{number}", actor)
    scheduler.run(200_000)
    press.recover(topic)
    found = press.all_values(topic)
    assert len(found) == len(set(found))
    assert set(found) >= {*expected, *sent}
    assert set(found) <= {*expected, *sent, *maybe}


def held_back(press: Restored, topic: Topic, *values: str) -> tuple[Appender, StoredSegment]:
    """A flush of a living producer between its upload and its commit."""
    appender = press.appender(topic)
    segment = encode_segment([(0, table_of(events(*values), 0))], appender.known([0]))
    return appender, appender.upload(segment)


def test_flush_under_way_is_not_doubled_by_a_recovery() -> None:
    press = Restored()
    topic = press.topic()
    appender, stored = held_back(press, topic, "a", "b")
    assert press.recover(topic).appended == 2
    assert appender.commit(stored, stored.segment.pieces[0])[0] == 0
    assert press.values(topic) == ["a", "b"]
    press.append(topic, ["between"])
    segment = encode_segment([(0, table_of(events("next"), 0))], appender.known([0]))
    assert appender.commit(appender.upload(segment), segment.pieces[0])[0] == 3
    assert press.values(topic) == ["a", "b", "between", "next"]


def test_flush_that_is_uploaded_again_is_not_doubled_by_a_recovery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    press = Restored()
    topic = press.topic()
    appender, stored = held_back(press, topic, "a", "b")
    real = recover._Recovery.run

    def committed_before(self: object, *given: object) -> None:
        appender.commit(stored, stored.segment.pieces[0])
        real(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(recover._Recovery, "run", committed_before)
    assert press.recover(topic).appended == 0
    assert press.values(topic) == ["a", "b"]
    monkeypatch.undo()
    assert press.recover(topic) == RecoverReport("orders", False)


def test_flush_that_begins_after_the_fence_is_left_to_its_producer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    press = Restored()
    topic = press.topic()
    under_way: list[tuple[Appender, StoredSegment]] = []
    real = recover._fence

    def begun_after(context: Context, fenced: Topic) -> Topic:
        raised = real(context, fenced)
        under_way.append(held_back(press, topic, "a"))
        return raised

    monkeypatch.setattr(recover, "_fence", begun_after)
    assert press.recover(topic).appended == 0
    [(appender, stored)] = under_way
    appender.commit(stored, stored.segment.pieces[0])
    assert press.values(topic) == ["a"]


def test_repeated_request_finds_what_a_recovery_has_appended() -> None:
    press = Restored()
    topic = press.topic()
    real = Appender.commit

    def late(self: Appender, *given: object) -> object:
        Appender.commit = real  # type: ignore[method-assign]
        press.recover(topic)
        return real(self, *given)  # type: ignore[arg-type]

    Appender.commit = late  # type: ignore[assignment, method-assign]
    try:
        first = append_once(press.context, topic, "key", events("a", "b"))
    finally:
        Appender.commit = real  # type: ignore[method-assign]
    again = append_once(
        press.context, find_topic(press.context, topic.name), "key", events("a", "b")
    )
    assert list(first) == list(again)
    assert press.values(topic) == ["a", "b"]


def test_row_that_notes_a_recovered_flush_stays_when_its_producer_closes() -> None:
    """Deleted, it could be put again by a repeated packet, as no head moved with it."""
    press = Restored()
    topic = press.topic()
    appender, stored = held_back(press, topic, "a")
    press.recover(topic)
    assert appender.commit(stored, stored.segment.pieces[0])[0] == 0
    noted = producer_rows(press, topic)
    appender.close()
    assert producer_rows(press, topic) == noted
    assert any(name.startswith("producer/~") for name in noted)


def producer_rows(press: Restored, topic: Topic) -> set[str]:
    rows = press.memory._partitions[f"topic/{topic.incarnation}/0"]
    return {name for name in rows if name.startswith("producer/")}


def test_flush_whose_events_were_recovered_in_part_has_an_unknown_outcome() -> None:
    press = Restored()
    topic = press.topic()
    press.send(topic, (0, [Event(b"there", id="x")]))
    appender = press.appender(topic)
    table = table_of([Event(b"there", id="x"), Event(b"a")], 0)
    segment = encode_segment([(0, table)], appender.known([0]))
    stored = appender.upload(segment)
    assert press.recover(topic).appended == 1
    with pytest.raises(UnknownOutcomeError, match="recovery has appended"):
        appender.commit(stored, segment.pieces[0])
    assert press.values(topic) == ["there", "a"]


def test_staged_segment_that_a_recovery_has_appended_is_not_appended_again() -> None:
    press = Restored()
    topic = press.topic()
    segment = encode_staged([(0, table_of(events("a", "b"), 0))])
    press.store.put("staging/p/1", segment.data)
    staged = StagedSegment("staging/p/1", segment.pieces)
    dead = Copier(press.context, topic, ":pipeline:p:0")
    dead.copy_staged(staged.key, staged.pieces)  # and dies before its commit
    assert press.recover(topic).appended == 2
    for _ in range(2):
        driver = Copier(press.context, find_topic(press.context, topic.name), ":pipeline:p:0")
        append_staged(driver, [staged])
        assert driver.last_sequence(0) == 1
    assert press.values(topic) == ["a", "b"]


def test_copy_is_committed_once() -> None:
    press = Restored()
    topic = press.topic()
    segment = encode_staged([(0, table_of(events("a"), 0))])
    press.store.put("staging/p/1", segment.data)
    first, second = (Copier(press.context, topic, f":pipeline:{each}:0") for each in "pq")
    for each in (first, second):
        each.look()
    first.commit(first.copy_staged("staging/p/1", segment.pieces), segment.pieces[0])
    with pytest.raises(AlreadyExistsError, match="another copy of it is committed"):
        second.commit(second.copy_staged("staging/p/1", segment.pieces), segment.pieces[0])
    assert press.values(topic) == ["a"]


def test_event_deleted_while_it_is_recovered_stays_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    press = Restored()
    topic = press.topic()
    press.keep_copy()
    press.send(topic, (0, [Event(b"secret", id="s"), Event(b"lost", id="l")]))
    press.go_back()
    press.clock.advance(1)
    press.send(topic, (0, [Event(b"other", id="o")]))
    real = recover._UnitRecovery.upload_as

    def deleted_before(self: object, *given: object) -> object:
        monkeypatch.undo()
        done = real(self, *given)  # type: ignore[arg-type]
        press.send(topic, (0, [Event(b"secret", id="s")]))
        press.delete(topic, "s")
        return done

    monkeypatch.setattr(recover._UnitRecovery, "upload_as", deleted_before)
    report = press.recover(topic)
    assert (report.appended, report.erased) == (1, 1)
    assert press.values(topic) == ["other", "lost"]
    press.compile(topic)
    for _ in range(2):
        sweep_home(press.context, 0)
    assert b"secret" not in b"".join(press.store.get(key) for key in press.objects())


def test_journal_swapped_while_rows_are_read_is_not_recovered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    press = Restored()
    topic = press.topic()
    press.append(topic, ["a"])
    press.append(topic, ["b"])
    real = stray_events.StrayEvents._compilers
    calls = []

    def compiled_between(self: stray_events.StrayEvents) -> object:
        found = real(self)
        calls.append(1)
        if len(calls) == 1:
            press.compile(topic)
        return found

    monkeypatch.setattr(stray_events.StrayEvents, "_compilers", compiled_between)
    assert press.recover(topic).appended == 0
    assert press.values(topic) == ["a", "b"]


def test_object_that_only_a_cache_still_has_is_not_recovered() -> None:
    press = Restored()
    topic = press.topic()
    _, stored = held_back(press, topic, "a")
    data = press.store.get(stored.key)
    lists: list[str] = []

    class Caching(FaultyStore):
        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            return data[start:end] if key == stored.key else super().get(key, start, end)

        def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
            yield from super().list(prefix, after)
            lists.append(prefix)
            if len(lists) == 3:  # after the two of the fence
                press.store.delete([stored.key])

    store = Caching(press.store, Faults())
    context = Context(store, press.catalog, press.clock, press.ids, random.Random(1))
    assert press.recover(topic, context).appended == 0
    assert press.values(topic) == []


def test_journal_is_kept_while_rows_name_missing_segments() -> None:
    press = Restored()
    topic = press.topic()
    press.append(topic, ["a"])
    press.append(topic, ["b"])
    press.keep_copy()
    press.compile(topic)
    [journal] = press.journals(topic)
    press.store.delete([key for key in press.objects() if key.endswith(".arrow")])
    press.go_back()
    assert press.recover(topic).appended == 0
    for _ in range(2):
        assert sweep_home(press.context, 0).refused
    assert press.store.head(journal.object)
    trim_topic(press.context, topic, ToOffsets({0: 2}))
    assert press.recover(topic).appended == 2
    assert press.values(topic) == ["a", "b"]


def test_journal_of_journals_and_segments_is_recovered_once() -> None:
    """The middle journal is gone; one segment is left for the sake of another partition."""
    press = Restored()
    topic = press.topic("t", 2)
    press.keep_copy()
    press.send(topic, (0, events("a")), (1, events("b")))
    press.send(topic, (0, events("c")))
    compile_topic(press.context, topic, ALL)
    press.send(topic, (0, events("d")))
    press.amend(topic, 1, b"new")
    compile_topic(press.context, topic, ALL)
    press.clock.advance(1)
    for _ in range(2):
        sweep_home(press.context, 0)
    press.send(topic, (1, events("e")))
    press.go_back()
    assert press.recover(topic).appended == 5
    assert press.all_values(topic) == ["a", "b", "d", "e", "new"]
    check(press, topic, ["a", "b", "d", "e", "new"])


def test_topic_that_is_deleted_meanwhile_is_reported() -> None:
    press = Restored()
    topic, _ = forgetful(press)
    lookup = Lookup(press.context, topic)
    other = Topic("t", press.ids.new(), 2, 0)
    with pytest.raises(NotFoundError):
        recover_topic(press.context, Lookup(press.context, other))
    assert recover_topic(press.context, lookup).appended
