"""The faults do what they say: each kind once, by script."""

from __future__ import annotations

import random

import pytest

from tidelog.catalog.base import ABSENT, Delete, Put, Row
from tidelog.catalog.memory import MemoryCatalog
from tidelog.errors import UnavailableError, UnknownOutcomeError
from tidelog.store.memory import MemoryStore
from tidelog.testing.clock import FakeClock
from tidelog.testing.faults import Fault, Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def store(faults: Faults) -> FaultyStore:
    return FaultyStore(MemoryStore(FakeClock()), faults)


@pytest.fixture
def catalog(faults: Faults) -> FaultyCatalog:
    return FaultyCatalog(MemoryCatalog(), faults)


def test_a_lost_request_changes_nothing(store: FaultyStore, faults: Faults) -> None:
    faults.on_next("put", Fault.LOSE_REQUEST)
    with pytest.raises(UnknownOutcomeError):
        store.put("a", b"x")
    assert list(store.inner.list()) == []
    faults.on_next("get", Fault.LOSE_REQUEST)
    with pytest.raises(UnavailableError):
        store.get("a")


def test_a_lost_reply_has_taken_effect(store: FaultyStore, faults: Faults) -> None:
    faults.on_next("put", Fault.LOSE_REPLY)
    with pytest.raises(UnknownOutcomeError):
        store.put("a", b"x")
    assert store.inner.get("a") == b"x"
    faults.on_next("delete", Fault.LOSE_REPLY)
    with pytest.raises(UnavailableError):
        store.delete(["a"])
    assert list(store.inner.list()) == []


def test_a_duplicate_comes_again_later(catalog: FaultyCatalog, faults: Faults) -> None:
    faults.random = random.Random(3)
    faults.on_next("write", Fault.DUPLICATE)
    catalog.write("p", Put("a", b"1", ABSENT), write_id="w1")
    catalog.write("p", Delete("a", "w1"), write_id="w2")
    for _ in range(20):
        catalog.get("p", "b")
    # The repeated packet found no row again: the one expectation that can come true twice.
    assert catalog.inner.get("p", "a") == Row("a", b"1", "w1")


def test_a_duplicate_that_expects_a_version_is_refused(
    catalog: FaultyCatalog, faults: Faults
) -> None:
    catalog.write("p", Put("head", b"0"), write_id="w0")
    faults.on_next("write", Fault.DUPLICATE)
    catalog.write("p", Put("head", b"1", "w0"), Put("a", b"1", ABSENT), write_id="w1")
    catalog.write("p", Put("head", b"2", "w1"), Delete("a"), write_id="w2")
    for _ in range(20):
        catalog.get("p", "b")
    assert list(catalog.inner.scan("p")) == [Row("head", b"2", "w2")]


def test_a_stale_listing_shows_the_past(store: FaultyStore, faults: Faults) -> None:
    store.put("a", b"x")
    store.put("b", b"x")
    faults.on_next("list", Fault.STALE_LIST)
    assert len(list(store.list())) < 2
    assert len(list(store.list())) == 2


def test_crashes_come_before_or_after_the_effect(store: FaultyStore, faults: Faults) -> None:
    faults.on_next("put", Fault.CRASH_BEFORE, Fault.CRASH_AFTER)
    with pytest.raises(Crash):
        store.put("a", b"x")
    assert list(store.inner.list()) == []
    with pytest.raises(Crash):
        store.put("a", b"x")
    assert store.inner.get("a") == b"x"


def test_the_world_stops_after_the_nth_call(store: FaultyStore, faults: Faults) -> None:
    faults.crash_after_call = 3
    store.put("a", b"x")
    store.put("b", b"x")
    for key in ("c", "d"):
        with pytest.raises(Crash):
            store.put(key, b"x")
    assert [info.key for info in store.inner.list()] == ["a", "b", "c", "d"]


def test_rates_are_kept_and_counted() -> None:
    faults = Faults(random.Random(5), rates={Fault.LOSE_REPLY: 0.3, Fault.DELAY: 0.2})
    for _ in range(2_000):
        try:
            faults.call("put", lambda: None, RuntimeError)
        except RuntimeError:
            continue
    assert 500 < faults.counts[Fault.LOSE_REPLY] < 700
    assert 300 < faults.counts[Fault.DELAY] < 500
    assert sum(faults.counts.values()) == faults.calls == 2_000
