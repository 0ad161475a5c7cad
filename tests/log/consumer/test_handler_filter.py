"""Consumers as reflex has them: to the head and stop, by type, by share, and after a lag."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

import tidelog
from tidelog import Event, Home
from tidelog.clock import SystemClock
from tidelog.errors import InvalidError
from tidelog.log.consumer.handler import Fate, FateError, Share, fnv1


@pytest.fixture
def home() -> Iterator[Home]:
    with tidelog.open("memory:") as opened:
        opened.create_topic("t", 3)
        yield opened


def fill(home: Home, count: int) -> None:
    kinds = ("made", "paid", "sent")
    home.append("t", [Event(b"%d" % n, b"k%d" % n, type=kinds[n % 3]) for n in range(count)])


def test_only_wanted_types_are_handed_over_and_the_rest_is_passed(home: Home) -> None:
    fill(home, 300)
    found: list[Event] = []
    with home.consumer("t", "c") as consumer:
        done = consumer.run(found.append, types=("paid", "sent"), until_caught_up=True)
        assert consumer.caught_up()
        assert all(lag.cursor == lag.end for lag in consumer.lag())
    assert done == len(found) == 200
    assert Counter(event.type for event in found) == {"paid": 100, "sent": 100}


def test_lists_hold_only_wanted_types_and_none_is_empty(home: Home) -> None:
    fill(home, 300)
    home.append("t", [Event(b"x", b"k", type="other") for _ in range(50)])
    lists: list[list[Event]] = []
    with home.consumer("t", "c") as consumer:
        done = consumer.run(
            lists.append, types={"made"}, batch=True, max_events=20, until_caught_up=True
        )
    assert done == 100
    assert all(lists)
    assert {event.type for each in lists for event in each} == {"made"}


def test_a_handler_that_fails_is_given_its_event_again_whatever_was_passed(home: Home) -> None:
    fill(home, 90)
    found: list[bytes | None] = []

    def fail_once(event: Event) -> None:
        found.append(event.value)
        if found.count(event.value) == 1 and event.value == b"31":
            raise RuntimeError

    with home.consumer("t", "c") as consumer:
        with pytest.raises(RuntimeError):
            consumer.run(fail_once, types=["paid"], retries=0, until_caught_up=True)
        consumer.run(fail_once, types=["paid"], until_caught_up=True)
    assert Counter(found)[b"31"] == 2
    assert set(found) == {b"%d" % n for n in range(1, 90, 3)}


@pytest.mark.parametrize("by", ["key", "id", "type"])
def test_shares_take_every_event_once_between_them(home: Home, by: str) -> None:
    events = [Event(b"%d" % n, b"k%d" % n, f"i{n}", type=f"t{n % 9}") for n in range(300)]
    home.append("t", [*events, *(Event(b"none %d" % n) for n in range(5))])
    found: Counter[bytes | None] = Counter()
    sizes = []
    for number in range(3):
        share = Share(number, 3, by)  # type: ignore[arg-type]
        with home.consumer("t", share.name("c")) as consumer:
            sizes.append(
                consumer.run(
                    lambda event: found.update([event.value]), share=share, until_caught_up=True
                )
            )
    assert set(found.values()) == {1}
    assert sum(sizes) == len(found) == 305
    assert min(sizes) > 30
    assert Share(0, 3).name("c") == "c_1_of_3"


def test_the_hash_is_reflexs() -> None:
    assert fnv1(b"") == 0x811C9DC5
    assert fnv1(b"a") == 0x050C5D7E
    assert fnv1(b"foobar") == 0x31F0B262


class Wall(SystemClock):
    """A wall clock that stands, until it goes on by a little whenever it is read."""

    def __init__(self) -> None:
        self.at_ms = 1_700_000_000_000
        self.step_ms = 0

    def now_ms(self) -> int:
        self.at_ms += self.step_ms
        return self.at_ms


def test_an_event_is_not_handed_over_before_it_is_old_enough(home: Home) -> None:
    wall = Wall()
    object.__setattr__(home.context, "clock", wall)
    old = [Event(b"old", b"%d" % n, timestamp=wall.at_ms - 120_000) for n in range(20)]
    young = [Event(b"young", b"%d" % n, timestamp=wall.at_ms) for n in range(20)]
    home.append("t", [*old, *young])
    ages: list[tuple[bytes | None, int]] = []

    def note(event: Event) -> None:
        ages.append((event.value, wall.at_ms - int(event.timestamp or 0)))  # type: ignore[arg-type]
        if len(ages) == 20:
            wall.at_ms += 59_980
            wall.step_ms = 1

    with home.consumer("t", "c") as consumer:
        assert consumer.run(note, lag_ms=60_000, until_caught_up=True) == 40
    assert min(age for _, age in ages) >= 60_000
    values = [value for value, _ in ages]
    assert values == [b"old"] * 20 + [b"young"] * 20


def test_an_event_that_is_dated_ahead_waits_for_the_lag_and_no_longer(home: Home) -> None:
    year_9999_ms = 253_370_764_800_000
    home.append("t", [Event(b"%d" % n, b"k", timestamp=year_9999_ms) for n in range(3)])
    stop = threading.Event()
    timer = threading.Timer(60, stop.set)
    timer.start()
    with home.consumer("t", "c") as consumer:
        done = consumer.run(lambda _: None, lag_ms=50, until_caught_up=True, stop=stop)
    timer.cancel()
    assert done == 3


def test_a_consumer_that_waits_for_age_can_be_stopped(home: Home) -> None:
    home.append("t", [Event(b"x", timestamp=int(time.time() * 1000))])
    stop, handled = threading.Event(), []
    with home.consumer("t", "c") as consumer:
        threading.Timer(0.3, stop.set).start()
        began = time.monotonic()
        assert consumer.run(handled.append, lag_ms=3_600_000, stop=stop) == 0
        assert time.monotonic() - began < 60
    assert handled == []
    with home.consumer("t", "c") as again:
        assert len(again.poll(timeout_s=60)) == 1


@pytest.mark.parametrize("how", [{"types": "paid"}, {"lag_ms": -1}])
def test_wrong_choices_are_refused(home: Home, how: dict[str, object]) -> None:
    with home.consumer("t", "c") as consumer, pytest.raises(InvalidError):
        consumer.run(print, **how)
    for wrong in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(InvalidError):
            Share(*wrong)
    with pytest.raises(InvalidError):
        Share(0, 1, "value")  # type: ignore[arg-type]


def test_fate_proves_that_a_handler_can_be_repeated(home: Home) -> None:
    fill(home, 200)
    fate = Fate(seed=3, rate=0.2)
    careful: dict[bytes, int] = {}
    careless: Counter[bytes] = Counter()

    def handle(event: Event) -> None:
        careless[event.key or b""] += 1
        fate.maybe_fail()
        careful[event.key or b""] = 1

    with home.consumer("t", "c") as consumer:
        failing = fate.with_failures(handle)
        consumer.run(failing, retries=50, retry_base_ms=1, until_caught_up=True)
    assert set(fate.failed) == {"before", "middle", "after"}
    assert sum(careful.values()) == 200
    assert sum(careless.values()) > 200  # which a test of a careless handler would see


def test_fate_is_the_same_for_the_same_seed_and_refuses_certain_failure() -> None:
    def failures(seed: int) -> list[bool]:
        fate, found = Fate(seed, 0.5), []
        for _ in range(50):
            try:
                fate.maybe_fail()
                found.append(False)
            except FateError:
                found.append(True)
        return found

    assert failures(1) == failures(1) != failures(2)
    with pytest.raises(InvalidError):
        Fate(rate=1)
