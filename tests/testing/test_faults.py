"""The faults do what they say: each kind once, by script."""

from __future__ import annotations

import random

import pytest

from tidelog.catalog.base import ABSENT, Delete, Put, Row
from tidelog.catalog.memory import MemoryCatalog
from tidelog.errors import UnavailableError, UnknownOutcomeError
from tidelog.store.memory import MemoryStore
from tidelog.testing.faults import Fault, Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash, FakeClock, Scheduler


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


def test_refused_call_changes_nothing(store: FaultyStore, faults: Faults) -> None:
    faults.on_next("put", Fault.TRY_AGAIN)
    with pytest.raises(UnavailableError):
        store.put("a", b"x")
    assert list(store.inner.list()) == []


def test_scans_come_in_pages_with_writes_between_them(
    catalog: FaultyCatalog, faults: Faults
) -> None:
    faults.page_rows = 2
    for number in range(9):
        catalog.write("p", Put(f"r{number}", b""), write_id=f"w{number}")
    for limit in (None, 1, 2, 5, 20):
        for reverse in (False, True):
            for _ in range(20):
                found = [row.row for row in catalog.scan("p", "r1", "r8", limit, reverse)]
                plain = catalog.inner.scan("p", "r1", "r8", limit, reverse)
                assert found == [row.row for row in plain]
    seen_new = seen_old = False
    for number in range(100):
        scan = catalog.scan("p")
        next(scan)
        catalog.write("p", Put("s", str(number).encode()), write_id=f"s{number}")
        last = list(scan)[-1]
        seen_new |= last.version == f"s{number}"
        seen_old |= last.version != f"s{number}"
    assert seen_new
    assert seen_old


def test_listings_come_in_pages(store: FaultyStore, faults: Faults) -> None:
    faults.page_rows = 2
    for number in range(9):
        store.put(f"a/{number}", b"x")
    for _ in range(20):
        assert [info.key for info in store.list("a/", "a/3")] == [f"a/{n}" for n in range(4, 9)]


def test_stall_takes_longer_than_a_lease_and_freeze_stops_all_threads() -> None:
    scheduler = Scheduler(1)
    faults = Faults(scheduler.random, {}, scheduler, stall_s=1_000)
    store = FaultyStore(MemoryStore(scheduler.clock), faults)
    faults.on_next("put", Fault.STALL)

    def put() -> None:
        store.put("a", b"x")

    scheduler.spawn("a", put)
    scheduler.run()
    assert scheduler.time.monotonic_s() > 1_010


def test_process_that_is_cut_off_reaches_nothing_until_it_is_back() -> None:
    scheduler = Scheduler(1)
    faults = Faults(scheduler.random, {}, scheduler, stall_s=100)
    store = FaultyStore(MemoryStore(scheduler.clock), faults)
    failed: list[float] = []

    def put() -> None:
        for number in range(300):
            try:
                store.put(f"a{number}", b"x")
            except UnknownOutcomeError:
                failed.append(scheduler.time.monotonic_s())
            scheduler.sleep(1)

    faults.on_next("put", Fault.CUT_OFF)
    scheduler.spawn("a", put)
    scheduler.run()
    assert 2 <= len(failed) <= 101
    assert failed == [failed[0] + number for number in range(len(failed))]
