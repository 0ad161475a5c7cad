"""Retry, meter and cache: each around a store in memory, with faults injected."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.model.times import Backoff
from tidelog.store.base import Store
from tidelog.store.memory import MemoryStore
from tidelog.store.wrappers import CachedStore, Meter, MeteredStore, RetryingStore
from tidelog.testing.faults import Fault, Faults, FaultyStore
from tidelog.testing.scheduler import FakeClock
from tidelog.testing.store_contract import StoreContract


class Wrapped:
    """A retrying, metered store over a faulty one."""

    def __init__(self, attempts: int = 4) -> None:
        self.clock = FakeClock()
        self.faults = Faults()
        self.inner = MemoryStore(self.clock)
        self.meter = Meter()
        faulty = FaultyStore(self.inner, self.faults)
        self.store = RetryingStore(
            MeteredStore(faulty, self.meter, clock=self.clock),
            clock=self.clock,
            random=random.Random(1),
            backoff=Backoff(attempts=attempts, base_ms=10, max_ms=1_000),
        )


class TestWrappedStoreKeepsTheContract(StoreContract):
    races = 5

    @pytest.fixture
    def store(self) -> Store:  # type: ignore[override]
        return CachedStore(Wrapped().store, 1 << 20)


@pytest.fixture
def wrapped() -> Wrapped:
    return Wrapped()


def test_a_lost_request_is_repeated_with_growing_waits(wrapped: Wrapped) -> None:
    wrapped.faults.on_next("put", *[Fault.LOSE_REQUEST] * 3)
    began_s = wrapped.clock.monotonic_s()
    wrapped.store.put("a", b"x")
    assert wrapped.inner.get("a") == b"x"
    waited_s = wrapped.clock.monotonic_s() - began_s
    assert (0.005 + 0.01 + 0.02) <= waited_s <= (0.01 + 0.02 + 0.04)
    assert wrapped.meter.verbs["put"].requests == 4
    assert wrapped.meter.verbs["put"].errors == 3


def test_it_gives_up_after_its_attempts(wrapped: Wrapped) -> None:
    wrapped.faults.on_next("get", *[Fault.LOSE_REQUEST] * 4)
    wrapped.inner.put("a", b"x")
    with pytest.raises(UnavailableError):
        wrapped.store.get("a")
    wrapped.faults.on_next("put", *[Fault.LOSE_REQUEST] * 4)
    with pytest.raises(UnknownOutcomeError):
        wrapped.store.put("b", b"x")


@pytest.mark.parametrize("then", [Fault.TRY_AGAIN, Fault.DENY])
@pytest.mark.parametrize("verb", ["put", "copy", "replace"])
def test_refusal_after_a_lost_reply_does_not_say_that_nothing_was_stored(
    wrapped: Wrapped, verb: str, then: Fault
) -> None:
    etag = wrapped.inner.put("a", b"old")
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: wrapped.store.put("b", b"x"),
        "copy": lambda: wrapped.store.copy("a", "b"),
        "replace": lambda: wrapped.store.replace("a", b"x", etag),
    }
    wrapped.faults.on_next(verb, Fault.LOSE_REPLY, *[then] * 3)
    with pytest.raises(UnknownOutcomeError):
        calls[verb]()


@pytest.mark.parametrize("then", [Fault.LOSE_REQUEST, Fault.DENY])
def test_read_that_fails_after_a_lost_reply_does_not_say_that_nothing_was_stored(
    wrapped: Wrapped, then: Fault
) -> None:
    wrapped.faults.on_next("put", Fault.LOSE_REPLY, Fault.NONE)
    wrapped.faults.on_next("head", *[then] * 4)
    with pytest.raises(UnknownOutcomeError):
        wrapped.store.put("b", b"x")


def test_a_create_whose_reply_was_lost_is_ours_if_the_bytes_are(wrapped: Wrapped) -> None:
    wrapped.faults.on_next("put", Fault.LOSE_REPLY)
    etag = wrapped.store.put("a", b"mine")
    assert etag == wrapped.inner.head("a").etag


def test_a_create_that_lost_the_race_is_refused_also_after_a_lost_request(
    wrapped: Wrapped,
) -> None:
    wrapped.inner.put("a", b"theirs")
    wrapped.faults.on_next("put", Fault.LOSE_REQUEST)
    with pytest.raises(AlreadyExistsError):
        wrapped.store.put("a", b"mine!!")
    with pytest.raises(AlreadyExistsError):
        wrapped.store.put("a", b"theirs")  # no reply was lost: the same bytes are no excuse
    assert wrapped.inner.get("a") == b"theirs"


def test_a_copy_and_a_replace_whose_replies_were_lost_are_done(wrapped: Wrapped) -> None:
    etag = wrapped.inner.put("a", b"1" * 100)
    wrapped.faults.on_next("copy", Fault.LOSE_REPLY)
    wrapped.store.copy("a", "b")
    assert wrapped.inner.get("b") == b"1" * 100
    wrapped.faults.on_next("replace", Fault.LOSE_REPLY)
    new = wrapped.store.replace("a", b"2", etag)
    assert (wrapped.inner.get("a"), wrapped.inner.head("a").etag) == (b"2", new)
    wrapped.faults.on_next("replace", Fault.LOSE_REQUEST)
    with pytest.raises(ConflictError):
        wrapped.store.replace("a", b"3", etag)
    wrapped.inner.put("c", b"other")
    wrapped.faults.on_next("copy", Fault.LOSE_REQUEST)
    with pytest.raises(AlreadyExistsError):
        wrapped.store.copy("b", "c")


def test_a_listing_goes_on_where_a_page_failed() -> None:
    class Breaking(MemoryStore):
        left = 2

        def list(self, prefix: str = "", start_after: str = "") -> Iterator[object]:  # type: ignore[override]
            for number, info in enumerate(super().list(prefix, start_after)):
                if number == 3 and self.left:
                    self.left -= 1
                    raise UnavailableError("page lost")
                yield info

    clock = FakeClock()
    inner = Breaking(clock)
    for number in range(10):
        inner.put(f"k{number}", b"")
    store = RetryingStore(inner, clock=clock, random=random.Random(1), backoff=Backoff())  # type: ignore[arg-type]
    assert [info.key for info in store.list()] == [f"k{number}" for number in range(10)]


def test_the_meter_counts_bytes_both_ways(wrapped: Wrapped) -> None:
    wrapped.store.put("a", b"12345")
    wrapped.store.get("a", 1, 3)
    wrapped.store.head("a")
    wrapped.store.delete(["a"])
    verbs = wrapped.meter.verbs
    assert (verbs["put"].bytes, verbs["get"].bytes) == (5, 2)
    assert {verb: usage.requests for verb, usage in verbs.items()} == {
        "put": 1,
        "get": 1,
        "head": 1,
        "delete": 1,
    }


class CountingStore(MemoryStore):
    """Counts reads, and can hold them up."""

    def __init__(self) -> None:
        super().__init__(FakeClock())
        self.gets = 0
        self.gate = threading.Event()
        self.gate.set()

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.gets += 1
        self.gate.wait(10)
        return super().get(key, start, end)


def test_the_cache_asks_once_for_a_range_and_stays_within_its_bound() -> None:
    inner = CountingStore()
    cache = CachedStore(inner, 10)
    inner.put("a", b"0123456789")
    inner.put("b", b"abcdef")
    assert [cache.get("a", 0, 4) for _ in range(3)] == [b"0123"] * 3
    assert inner.gets == 1
    cache.get("b")
    assert cache.stats.bytes == 10
    cache.get("a", 0, 4)
    cache.get("a", 5, 6)  # makes room by dropping `b`, the least recently used
    assert cache.stats.bytes == 5
    cache.get("b")
    assert inner.gets == 4
    assert len(CachedStore(inner, 3).get("b")) == 6  # larger than the cache: read, not kept
    with pytest.raises(InvalidError):
        CachedStore(inner, -1)


def test_readers_of_one_range_share_one_request() -> None:
    inner = CountingStore()
    cache = CachedStore(inner, 100)
    inner.put("a", b"shared")
    inner.gate.clear()
    found: list[bytes] = []
    readers = [threading.Thread(target=lambda: found.append(cache.get("a"))) for _ in range(8)]
    for reader in readers:
        reader.start()
    while cache.stats.hits < 7:
        threading.Event().wait(0.001)
    inner.gate.set()
    for reader in readers:
        reader.join()
    assert found == [b"shared"] * 8
    assert inner.gets == 1


def test_a_failed_read_is_not_remembered() -> None:
    inner = CountingStore()
    cache = CachedStore(inner, 100)
    with pytest.raises(KeyError):
        cache.get("a")
    inner.put("a", b"now")
    assert cache.get("a") == b"now"


def test_replaced_and_deleted_objects_leave_the_cache() -> None:
    inner = CountingStore()
    cache = CachedStore(inner, 100)
    etag = cache.put("a", b"old")
    assert cache.get("a") == b"old"
    cache.replace("a", b"new", etag)
    assert cache.get("a") == b"new"
    cache.delete(["a"])
    with pytest.raises(KeyError):
        cache.get("a")


def test_a_read_that_a_replace_overtakes_is_not_kept() -> None:
    inner = CountingStore()
    cache = CachedStore(inner, 100)
    etag = cache.put("a", b"old")
    inner.gate.clear()
    reader = threading.Thread(target=lambda: cache.get("a"))
    reader.start()
    while inner.gets == 0:
        threading.Event().wait(0.001)
    cache.replace("a", b"new", etag)
    inner.gate.set()
    reader.join()
    assert cache.get("a") == b"new"


def test_a_create_whose_object_was_deleted_before_it_could_be_compared(wrapped: Wrapped) -> None:
    """A sweep may take an orphan between a lost reply and its settling."""
    wrapped.faults.on_next("put", Fault.LOSE_REPLY)
    real_head = wrapped.inner.head

    def head(key: str) -> object:
        wrapped.inner.head = real_head  # type: ignore[method-assign]
        wrapped.inner.delete([key])
        return real_head(key)

    wrapped.inner.head = head  # type: ignore[method-assign,assignment]
    wrapped.store.put("a", b"mine")
    assert wrapped.inner.get("a") == b"mine"
