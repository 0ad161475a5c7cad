"""Damaged bytes do not stay in the cache, and are fetched once more before they are reported."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tidelog.catalog.memory import MemoryCatalog
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_staged
from tidelog.context import Context
from tidelog.errors import AlreadyExistsError, CorruptError, UnavailableError, UnknownOutcomeError
from tidelog.log.partition_reader import Reader
from tidelog.log.producer.append import Appender
from tidelog.log.topics import create_topic
from tidelog.model.event import Event
from tidelog.model.topic import Topic
from tidelog.store.base import Store, put_same
from tidelog.store.memory import MemoryStore
from tidelog.store.wrappers import CachedStore, reread
from tidelog.testing.scheduler import FakeClock, seeded_ids


class DamagingStore:
    """Damages the next ``to_damage`` reads."""

    def __init__(self, inner: Store) -> None:
        self.inner, self.to_damage, self.gets = inner, 0, 0

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.gets += 1
        data = self.inner.get(key, start, end)
        if self.to_damage:
            self.to_damage -= 1
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.fixture
def damaging() -> DamagingStore:
    return DamagingStore(MemoryStore(FakeClock()))


def test_range_that_fails_its_checksum_is_dropped_and_fetched_again(
    damaging: DamagingStore,
) -> None:
    store = CachedStore(damaging, 1 << 20)
    store.put("a", b"good")

    def read(_: bool) -> bytes:
        data = store.get("a")
        if data != b"good":
            raise CorruptError("bad")
        return data

    damaging.to_damage = 1
    assert reread(store, "a", read) == b"good"
    assert reread(store, "a", read) == b"good"
    assert damaging.gets == 2
    store.drop({"a"})
    damaging.to_damage = 2
    with pytest.raises(CorruptError):
        reread(store, "a", read)
    assert reread(store, "a", read) == b"good"


def test_reader_survives_one_damaged_reply(damaging: DamagingStore) -> None:
    clock = FakeClock()
    store = CachedStore(damaging, 1 << 20)
    context = Context(store, MemoryCatalog(), clock, seeded_ids(1), random.Random(1))
    topic = create_topic(context, Topic("t", context.ids.new(), 1, 0))
    segment = encode_staged([(0, table_of([Event(b"x"), Event(b"y")], 0))])
    appender = Appender(context, topic, "~me")
    appender.commit(appender.upload(segment), segment.pieces[0])
    for damaged in (1, 0):
        damaging.to_damage = damaged
        found = [event.value for s in Reader(context, topic, 0).read(0) for event in s.events()]
        assert found == [b"x", b"y"]
    store.drop({info.key for info in damaging.list()})
    damaging.to_damage = 2
    with pytest.raises(CorruptError, match="crc32c"):
        [event for s in Reader(context, topic, 0).read(0) for event in s.events()]


class RefusingStore:
    """Says "exists already" whatever is there, or loses the reply."""

    def __init__(self, inner: Store, error: Exception) -> None:
        self.inner, self.error = inner, error

    def put(self, key: str, data: bytes) -> str:
        raise self.error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_put_same_looks_at_what_is_there() -> None:
    inner = MemoryStore(FakeClock())
    put_same(inner, "a", b"mine")
    put_same(inner, "a", b"mine")
    with pytest.raises(CorruptError, match="4 other bytes"):
        put_same(inner, "a", b"other")
    with pytest.raises(UnavailableError):
        put_same(RefusingStore(inner, UnknownOutcomeError("?")), "b", b"x")
    with pytest.raises(KeyError):  # refused, and nothing is there: never taken for done
        put_same(RefusingStore(inner, AlreadyExistsError("?")), "b", b"x")
