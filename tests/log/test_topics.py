"""Topics: made once, deleted for good, and never mixed up with an earlier one of their name."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tidelog
from tidelog import Event, Home
from tidelog.catalog.base import ABSENT, Catalog, Change, Delete, Put, Row
from tidelog.catalog.memory import MemoryCatalog
from tidelog.context import Context
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidError,
    NotFoundError,
    UnknownOutcomeError,
)
from tidelog.log.topics import create_topic, delete_topic, find_topic, list_topics, read_head
from tidelog.model import layout
from tidelog.model.topic import Head, Topic, encode_row
from tidelog.store.memory import MemoryStore
from tidelog.testing.faults import Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash, FakeClock, seeded_ids


@pytest.fixture
def home() -> Home:
    with tidelog.open("memory:") as opened:
        yield opened


def test_a_topic_is_made_found_and_listed(home: Home) -> None:
    made = home.create_topic("orders", 3, slot="500ms", notify=["http://127.0.0.1:1/x"])
    assert home.topic("orders") == made
    assert (made.partitions, made.slot_ms, made.state) == (3, 500, "ready")
    home.create_topic("a-topic", 1)
    assert [topic.name for topic in home.topics()] == ["a-topic", "orders"]
    with pytest.raises(AlreadyExistsError):
        home.create_topic("orders", 3)
    with pytest.raises(NotFoundError, match=r"did you mean `orders`\?"):
        home.topic("order")
    with pytest.raises(NotFoundError, match="tidelog topic list"):
        home.topic("clicks")


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", ".x", "a b", "ü", "x" * 201, "a\nb"])
def test_bad_names_are_refused(home: Home, name: str) -> None:
    with pytest.raises(InvalidError):
        home.create_topic(name)
    with pytest.raises(InvalidError):
        home.topic(name)


@pytest.mark.parametrize(
    "settings",
    [
        {"partitions": 0},
        {"partitions": 10_001},
        {"slot": "0s"},
        {"slot": "2 s"},
        {"slot": "25h"},
        {"max_latency_ms": 0},
    ],
    ids=str,
)
def test_bad_settings_are_refused(home: Home, settings: dict[str, object]) -> None:
    with pytest.raises(InvalidError):
        home.create_topic("t", **settings)  # type: ignore[arg-type]
    assert home.topics() == []


def test_a_key_belongs_to_a_partition_for_ever(home: Home) -> None:
    home.create_topic("t", 10)
    expected = {b"a": 9, b"customer-7": 5, b"": 9}  # int(sha256 hex, 16) % 10
    assert {key: home.partition_for("t", key) for key in expected} == expected


def test_a_topic_made_again_shows_nothing_of_the_old_one(home: Home) -> None:
    home.create_topic("t", 2)
    home.append("t", [Event(b"old", key=b"k")])
    with home.consumer("t", "c") as consumer:
        assert len(consumer.poll(timeout_s=2)) == 1
        consumer.commit()
    old = home.producer("t")
    home.delete_topic("t")
    assert list(home.store.list("topics/")) == []
    with pytest.raises(NotFoundError):
        home.append("t", [Event(b"x")])
    home.create_topic("t", 2)
    with pytest.raises(NotFoundError, match="was deleted"):
        old.append([Event(b"late")])
    old.close()
    assert list(home.read("t", 0)) == list(home.read("t", 1)) == []
    assert home.lag("t") == []
    home.append("t", [Event(b"new", key=b"k")])
    with home.consumer("t", "c") as consumer:
        assert [event.value for event in consumer.poll(timeout_s=2)] == [b"new"]
    rows = {row.row for row in home.catalog.scan(layout.REGISTRY)}
    assert len([row for row in rows if row.startswith("topic/")]) == 1


def test_many_who_create_one_topic_agree(home: Home) -> None:
    made: list[Topic] = []
    refused: list[AlreadyExistsError] = []

    def create() -> None:
        try:
            made.append(home.create_topic("t", 20))
        except AlreadyExistsError as exc:
            refused.append(exc)

    threads = [threading.Thread(target=create) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) + len(refused) == 6
    assert made
    assert {topic.incarnation for topic in made} == {home.topic("t").incarnation}


class TestDiesAfterEveryCall:
    """Creating and deleting die after the n-th call; the next one finishes."""

    def context(
        self, crash_after: int | None, store: MemoryStore, catalog: MemoryCatalog
    ) -> Context:
        faults = Faults(crash_after_call=crash_after)
        return Context(
            FaultyStore(store, faults),
            FaultyCatalog(catalog, faults),
            FakeClock(),
            seeded_ids(crash_after or 0),
            faults.random,
        )

    @pytest.mark.parametrize("call", range(1, 16))
    def test_creating(self, call: int) -> None:
        store, catalog = MemoryStore(FakeClock()), MemoryCatalog()
        died = False
        try:
            create_topic(self.context(call, store, catalog), Topic("t", "first", 2, 0))
        except Crash:
            died = True
        context = self.context(None, store, catalog)
        try:
            create_topic(context, Topic("t", "second", 2, 0))
        except AlreadyExistsError:
            assert find_topic(context, "t").state == "ready"
        assert find_topic(context, "t").partitions == 2
        assert died or call > 8

    @pytest.mark.parametrize("call", range(1, 25))
    def test_deleting(self, call: int) -> None:
        store, catalog = MemoryStore(FakeClock()), MemoryCatalog()
        good = self.context(None, store, catalog)
        topic = create_topic(good, Topic("t", "first", 2, 0))
        store.put(layout.segment(topic.incarnation, 0, "abc"), b"x")
        try:
            delete_topic(self.context(call, store, catalog), "t")
        except Crash:
            if call > 1:  # the first call only reads
                with pytest.raises(NotFoundError):
                    find_topic(good, "t")
        with contextlib.suppress(NotFoundError):
            delete_topic(good, "t")
        assert list(list_topics(good)) == []
        assert list(store.list()) == []
        left = {row.row for row in catalog.scan(layout.topic_partition("first", 0))}
        assert left == {"head"}
        with pytest.raises(NotFoundError):
            read_head(good, topic, 0)


def test_a_creation_that_a_deletion_overtakes_is_not_called_done() -> None:
    """Else a producer could append to an incarnation that is gone, and a sweep would delete it."""
    store, rows = MemoryStore(FakeClock()), MemoryCatalog()
    good = Context(store, rows, FakeClock(), seeded_ids(1), Faults().random)

    class DeletesFirst(MemoryCatalog):
        def get(self, partition: str, row: str) -> Row | None:
            return rows.get(partition, row)

        def scan(self, partition: str, *bounds: Any, **options: Any) -> Iterator[Row]:
            is_looked_for = partition != layout.REGISTRY and rows.get(partition, "head") is None
            if is_looked_for and not self.deleted:
                self.deleted = True
                delete_topic(good, "t")
            return rows.scan(partition, *bounds, **options)

        deleted = False

        def write(self, partition: str, *changes: Change, write_id: str) -> None:
            rows.write(partition, *changes, write_id=write_id)

    context = Context(store, DeletesFirst(), FakeClock(), seeded_ids(2), Faults().random)
    with pytest.raises((ConflictError, NotFoundError)):
        create_topic(context, Topic("t", "first", 2, 0))
    assert list(list_topics(good)) == []


def test_repeated_packet_of_a_creation_opens_no_head_of_a_deleted_topic() -> None:
    """Else a producer that slept could append to it, and get an acknowledgement."""
    store, sent = MemoryStore(FakeClock()), MemoryCatalog()
    repeats: list[Callable[[], None]] = []

    class Repeats(FaultyCatalog):
        def write(self, partition: str, *changes: Change, write_id: str) -> None:
            repeats.append(lambda: sent.write(partition, *changes, write_id=write_id))
            super().write(partition, *changes, write_id=write_id)

    context = Context(store, Repeats(sent, Faults()), FakeClock(), seeded_ids(1), Faults().random)
    topic = create_topic(context, Topic("t", "first", 2, 0))
    packets = list(repeats)
    delete_topic(context, "t")
    for repeat in packets:
        with contextlib.suppress(ConflictError):
            repeat()
    for partition in (0, 1):
        with pytest.raises(NotFoundError):
            read_head(context, topic, partition)
    assert list(list_topics(context)) == []


def test_delete_closes_heads_that_a_creation_has_not_made_yet() -> None:
    store, catalog = MemoryStore(FakeClock()), MemoryCatalog()
    faults = Faults(crash_after_call=4)  # the registry, and nothing else
    died = Context(store, FaultyCatalog(catalog, faults), FakeClock(), seeded_ids(1), faults.random)
    with pytest.raises(Crash):
        create_topic(died, Topic("t", "first", 2, 0))
    late = Put("head", encode_row(Head()), expect=ABSENT)
    context = Context(store, catalog, FakeClock(), seeded_ids(2), faults.random)
    assert catalog.get(layout.topic_partition("first", 1), "head") is None
    delete_topic(context, "t")
    with pytest.raises(ConflictError):
        catalog.write(layout.topic_partition("first", 1), late, write_id="late")


@pytest.mark.parametrize("call", [*range(1, 30, 3), 100, 200, *range(255, 290, 3), 10_000])
def test_audit_records_and_the_ledger_go_with_a_topic_also_when_it_dies(call: int) -> None:
    store, catalog = MemoryStore(FakeClock()), MemoryCatalog()
    good = Context(store, catalog, FakeClock(), seeded_ids(1), Faults().random)
    create_topic(good, Topic("t", "first", 2, 0))
    create_topic(good, Topic("u", "other", 1, 0))
    digests = [f"{number:02x}{'0' * 62}" for number in range(0, 256, 5)]
    for topic in ("first", "other"):
        catalog.write(
            layout.audit_partition(topic), Put(layout.audit_row(7, "a"), b"x"), write_id="a"
        )
        for digest in digests:
            where = layout.erased_partition(topic, digest)
            catalog.write(where, Put(digest, b""), write_id="b")
    faults = Faults(crash_after_call=call)
    with contextlib.suppress(Crash):
        faulty = FaultyCatalog(catalog, faults, FakeClock())
        context = Context(
            FaultyStore(store, faults), faulty, FakeClock(), seeded_ids(2), faults.random
        )
        delete_topic(context, "t")
    with contextlib.suppress(NotFoundError):
        delete_topic(good, "t")

    def rows(topic: str) -> int:
        ledger = [layout.erased_partition(topic, digest) for digest in digests]
        parts = [*ledger, layout.audit_partition(topic), layout.topic_partition(topic, 0)]
        found = [row for part in parts for row in catalog.scan(part)]
        return sum(row.row != "head" for row in found)

    assert (rows("first"), rows("other")) == (0, len(digests) + 1)


class _Before:
    """A catalog that lets another process act before the registry row of a topic is removed."""

    def __init__(self, inner: Catalog, act: Callable[[], None]) -> None:
        self._inner = inner
        self._act: Callable[[], None] | None = act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        act = self._act
        if act is not None and any(
            isinstance(each, Delete) and each.row == layout.topic_row("t") for each in changes
        ):
            self._act = None
            act()
        self._inner.write(partition, *changes, write_id=write_id)


def test_delete_that_another_process_finished_leaves_a_newer_topic_of_that_name(home: Home) -> None:
    home.create_topic("t", 1)

    def recreate() -> None:
        home.delete_topic("t")
        home.create_topic("t", 1)
        home.append("t", [Event(b"new")])

    catalog: Any = _Before(home.catalog, recreate)
    delete_topic(dataclasses.replace(home.context, catalog=catalog), "t")
    assert [event.value for event in home.read("t")] == [b"new"]


def test_delete_whose_reply_was_lost_leaves_a_newer_topic_of_that_name(home: Home) -> None:
    home.create_topic("t", 1)
    catalog: Any = _Before(home.catalog, lambda: None)
    removed = catalog.write

    def lose(partition: str, *changes: Change, write_id: str) -> None:
        removed(partition, *changes, write_id=write_id)
        if any(isinstance(each, Delete) and each.row == layout.topic_row("t") for each in changes):
            home.create_topic("t", 1)
            raise UnknownOutcomeError("lost (injected)")

    catalog.write = lose
    delete_topic(dataclasses.replace(home.context, catalog=catalog), "t")
    assert home.topic("t").state == "ready"
