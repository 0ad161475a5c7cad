"""A forwarder: acknowledged by the target, or an error that says what may be there."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.waiting import until
from tidelog import Event, Forwarder, InvalidError, open_forwarder
from tidelog.connectors.sink import Lot
from tidelog.errors import NotFoundError, UnavailableError, UnknownOutcomeError
from tidelog.testing.scheduler import FakeClock

URL = "kinesis://clicks"


class Target:
    """A target that can be away, slow, or picky; and every sink that was opened to it."""

    lot_events = 100
    lot_bytes = None

    def __init__(self) -> None:
        self.lots: list[list[bytes]] = []
        self.numbers: list[int] = []
        self.fails: Exception | None = None  # the next put, after it has stored everything
        self.away: Exception | None = None
        self.opened = self.tries = 0
        self.ready = threading.Event()
        self.ready.set()
        self.answers = threading.Event()  # to open
        self.answers.set()
        self.closed = 0

    def open(self) -> Target:
        self.tries += 1
        self.answers.wait()
        if self.away is not None:
            raise self.away
        self.opened += 1
        return self

    def check(self, event: Event, now_ms: int) -> None:
        if event.value == b"known to be too large":
            raise InvalidError("an event is too large", refused="size")

    def put(self, lot: Lot) -> None:
        self.ready.wait()
        values = lot.batch.column("value").to_pylist()
        if b"too large" in values:
            raise InvalidError("an event is too large", refused="size")
        self.lots.append(values)
        self.numbers.append(lot.number)
        fails, self.fails = self.fails, None
        if fails is not None:
            raise fails

    def reached(self) -> int:
        return 0

    def close(self, failed: bool = False) -> None:
        self.closed += 1


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.ready.set()
    made.answers.set()


def test_calls_at_the_same_time_share_a_lot_and_keep_their_order(target: Target) -> None:
    with Forwarder(URL, target.open) as forwarder, ThreadPoolExecutor(1) as pool:
        assert forwarder.send([]) == 0
        assert forwarder.send([Event(b"0")]) == 1
        target.ready.clear()
        first = pool.submit(forwarder.send, [Event(b"1")])
        until(lambda: forwarder.waiting_bytes > 0 and not forwarder._waiting)
        rest = [forwarder.send_soon([Event(b"%d" % n), Event(b"x")]) for n in range(2, 60)]
        target.ready.set()
        assert first.result() == 1
        assert [each.result(60) for each in rest] == [2] * 58
    assert [len(lot) for lot in target.lots] == [1, 1, 100, 16]
    assert [v for lot in target.lots for v in lot if v != b"x"] == [b"%d" % n for n in range(60)]
    assert forwarder.waiting_bytes == 0


def test_refused_event_fails_its_own_call_alone(target: Target) -> None:
    with Forwarder(URL, target.open) as forwarder:
        forwarder.send([Event(b"first")])
        target.ready.clear()
        calls = [forwarder.send_soon([Event(v)]) for v in (b"a", b"b", b"too large", b"c")]
        target.ready.set()
        assert [calls[n].result(60) for n in (0, 1, 3)] == [1, 1, 1]
        with pytest.raises(InvalidError, match="too large"):
            calls[2].result(60)
    assert target.opened > 1, "it is opened again"
    assert sorted(v for lot in target.lots for v in lot) == [b"a", b"b", b"c", b"first"]


def test_event_that_is_known_to_be_refused_joins_no_lot(target: Target) -> None:
    clock = FakeClock()
    with Forwarder(URL, target.open, clock=clock) as forwarder:
        forwarder.connect()
        target.fails = InvalidError("broken")
        with pytest.raises(UnknownOutcomeError):
            forwarder.send([Event(b"0")])
        with pytest.raises(InvalidError, match="too large"):
            forwarder.send_soon([Event(b"known to be too large")])
        assert (forwarder.waiting_bytes, target.opened) == (0, 1)
        clock.advance(61)
        assert forwarder.send([Event(b"known to be too large")]) == 1, "the target decides again"


def test_target_that_leaves_after_a_refusal_is_tried_once(target: Target) -> None:
    with Forwarder(URL, target.open) as forwarder:
        assert forwarder.send([Event(b"0")]) == 1
        target.ready.clear()
        first = forwarder.send_soon([Event(b"1")])
        until(first.running)
        calls = [forwarder.send_soon([Event(v)]) for v in (b"too large", b"a", b"b", b"c")]
        target.away = UnavailableError("no broker")
        target.ready.set()
        for call in calls:
            assert isinstance(call.exception(30), UnavailableError)
    assert target.tries == 2, "the first one, and one after the refusal"


def test_events_before_a_refused_one_are_neither_repeated_nor_denied(target: Target) -> None:
    target.lot_events = 2
    with Forwarder(URL, target.open) as forwarder:
        events = [Event(b"a"), Event(b"b"), Event(b"c"), Event(b"too large")]
        with pytest.raises(InvalidError, match="the first 2 events of this call are there") as told:
            forwarder.send(events)
    assert told.value.context["sent"] == 2
    assert target.lots == [[b"a", b"b"]]


def test_waiting_calls_are_counted_with_what_they_take_in_memory(target: Target) -> None:
    target.ready.clear()
    forwarder = Forwarder(URL, target.open)
    tracemalloc.start()
    try:
        for _ in range(500):
            forwarder.send_soon([Event(b"x")])
        used = tracemalloc.get_traced_memory()[0]
        counted = forwarder.waiting_bytes
    finally:
        tracemalloc.stop()
        target.ready.set()
        forwarder.close()
    assert used <= counted


def test_failed_put_has_an_unknown_outcome_and_later_numbers_are_new(target: Target) -> None:
    with Forwarder(URL, target.open) as forwarder:
        target.fails = UnavailableError("no reply")
        with pytest.raises(UnknownOutcomeError, match="some events may be there") as caught:
            forwarder.send([Event(b"a"), Event(b"b")])
        assert caught.value.context == {"forward": URL}
        assert forwarder.send([Event(b"c")]) == 1
    assert target.opened == 2
    assert target.numbers == [0, 2], "a sink that counts takes no event for one that it has"


def test_target_that_is_away_fails_calls_at_once_until_it_is_tried_again(target: Target) -> None:
    clock = FakeClock()
    forwarder = Forwarder(URL, target.open, clock=clock)
    target.away = NotFoundError("no such stream")
    for wait_s in (1, 2, 4):
        with pytest.raises(UnavailableError, match="no such stream: nothing was sent") as caught:
            forwarder.send([Event(b"a")])
        assert caught.value.context["retry_after_s"] == wait_s
        target.away = NotFoundError("no such stream")
        with pytest.raises(UnavailableError):
            forwarder.send([Event(b"at once")])
        clock.advance(wait_s)
    target.away = None
    assert forwarder.send([Event(b"b")]) == 1
    assert forwarder.waiting_bytes == 0
    forwarder.close()
    with pytest.raises(InvalidError, match="is closed"):
        forwarder.send([Event(b"c")])
    assert target.lots == [[b"b"]]


def test_hanging_target_delays_neither_a_start_nor_a_stop(target: Target) -> None:
    target.answers.clear()
    forwarder = Forwarder(URL, target.open)
    forwarder.connect(timeout_s=0.01)
    with pytest.raises(UnavailableError, match="nothing was sent"):
        forwarder.send([Event(b"a")], timeout_s=0.01)
    forwarder.close(timeout_s=60)
    assert (target.tries, target.opened) == (1, 0), "it still hangs"
    target.answers.set()
    until(lambda: target.closed == 1)
    assert target.lots == [], "what was cancelled is never sent"


def test_close_waits_for_events_and_says_if_they_may_be_there(target: Target) -> None:
    target.ready.clear()
    forwarder = Forwarder(URL, target.open)
    call = forwarder.send_soon([Event(b"a")])
    with pytest.raises(UnknownOutcomeError, match="is not closed after"):
        forwarder.close(timeout_s=0.01)
    target.ready.set()
    forwarder.close()
    assert (call.result(60), target.lots, target.closed) == (1, [[b"a"]], 1)


def test_missing_target_is_an_error_of_connect(target: Target) -> None:
    with Forwarder(URL, target.open) as forwarder:
        target.away = NotFoundError("no such stream")
        with pytest.raises(NotFoundError):
            forwarder.connect()
        target.away = UnavailableError("no broker")
        forwarder.connect()


def test_memory_and_time_are_bounded(target: Target) -> None:
    forwarder = Forwarder(URL, target.open, buffer_bytes=16_000)
    target.ready.clear()
    begun = forwarder.send_soon([Event(b"begun")])
    until(begun.running)
    assert isinstance(forwarder.late_error(begun, 1.0), UnknownOutcomeError)
    with pytest.raises(UnavailableError, match="nothing was sent"):
        forwarder.send([Event(b"waits")], timeout_s=0.01)
    for _ in range(5):
        forwarder.send_soon([Event(b"x")])
    with pytest.raises(UnavailableError, match="more events are on their way than it holds"):
        forwarder.send([Event(b"x" * 3_000)])
    target.ready.set()
    forwarder.close()
    assert target.lots == [[b"begun"], [b"x"] * 5], "what was cancelled is never sent"


def test_other_addresses_are_refused() -> None:
    for url in ("topic:t", "http://127.0.0.1/x", "clicks"):
        with pytest.raises(InvalidError):
            open_forwarder(url, environ={})
