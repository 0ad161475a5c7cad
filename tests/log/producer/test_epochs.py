"""What a consumer reads belongs to one lease: nothing of a lost one is applied to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest

import tidelog
from tests.support.lost_replies import ReplyLosingCatalog
from tests.support.waiting import until
from tidelog import Event, Home
from tidelog.api.consumers import accept_loss
from tidelog.catalog.base import Catalog, Change, Row
from tidelog.context import Context
from tidelog.errors import (
    FencedError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.consumer.leases import Leases, read_lease
from tidelog.log.topics import create_topic
from tidelog.model.topic import Topic
from tidelog.settings import LogSettings

FOR_EVER_MS = 600_000  # longer than any test lasts


@pytest.fixture
def home() -> Iterator[Home]:
    with tidelog.open("memory:") as opened:
        object.__setattr__(opened.context, "log_settings", LogSettings(lease_ttl_ms=FOR_EVER_MS))
        opened.create_topic("t", 1)
        opened.append("t", [Event(b"%d" % n) for n in range(20)])
        yield opened


def move_lease(home: Home, consumer: Consumer, to: int) -> None:
    """The consumer loses its lease; another member moves the cursor; the consumer has it again."""
    other = Leases(home.context, home.topic("t"), "c", "earliest")
    with consumer._lock:
        member = consumer._leases
        member.release(0)
        assert other.take(0, [])
        other.commit(0, to)
        other.release(0)
        assert member.take(0, [member.id])


def cursor(home: Home) -> int:
    found = read_lease(home.context, home.topic("t"), "c", 0)
    assert found is not None
    return found[0].cursor


def offsets(events: list[Event]) -> list[int | None]:
    return [event.offset for event in events]


def during_the_next_poll(consumer: Consumer, step: Callable[[], None]) -> None:
    real = consumer._ensure_joined

    def ensure() -> None:
        consumer._ensure_joined = real  # type: ignore[method-assign]
        real()
        step()

    consumer._ensure_joined = ensure  # type: ignore[method-assign]


def fail_the_next_read(home: Home) -> None:
    """One look at a head fails, as when the catalog is out of reach for a moment."""
    real, reader = home.catalog.get, threading.get_ident()

    def get(partition: str, row: str) -> Row | None:
        if row == "head" and threading.get_ident() == reader:
            home.catalog.get = real  # type: ignore[method-assign]
            raise UnavailableError("catalog: no answer: try again")
        return real(partition, row)

    home.catalog.get = get  # type: ignore[method-assign]


@pytest.mark.parametrize("handled", [0, 15], ids=["nothing", "more"])
def test_failed_poll_leaves_a_regained_lease_at_its_cursor(home: Home, handled: int) -> None:
    """Neither back to the old lease's place, nor on to it over events that no member handled."""
    with home.consumer("t", "c") as consumer:
        assert offsets(consumer.poll(10)) == list(range(10))

        def move() -> None:
            move_lease(home, consumer, handled)
            fail_the_next_read(home)

        during_the_next_poll(consumer, move)
        with pytest.raises(UnavailableError):
            consumer.poll(1)
        assert offsets(consumer.poll(1)) == [handled]
        consumer.commit()
        assert cursor(home) == handled + 1


def test_commit_after_a_regained_lease_is_fenced_and_the_cursor_stays(home: Home) -> None:
    with home.consumer("t", "c") as consumer:
        assert len(consumer.poll(5)) == 5
        move_lease(home, consumer, 12)
        with pytest.raises(FencedError):
            consumer.commit()
        assert cursor(home) == 12
        consumer.commit()
        assert offsets(consumer.poll(2)) == [12, 13]
        consumer.commit()
        assert cursor(home) == 14


def test_commit_from_another_thread_after_a_regained_lease_is_fenced(home: Home) -> None:
    """A caller that commits in the background learns of it, and the next poll is not affected."""
    errors: list[BaseException] = []

    def commit() -> None:
        try:
            consumer.commit()
        except FencedError as exc:
            errors.append(exc)

    with home.consumer("t", "c") as consumer:
        assert len(consumer.poll(5)) == 5
        move_lease(home, consumer, 12)
        thread = threading.Thread(target=commit)
        thread.start()
        thread.join()
        assert len(errors) == 1
        assert cursor(home) == 12
        assert offsets(consumer.poll(1)) == [12]


def test_seek_that_went_with_its_lease_is_reported_once(home: Home) -> None:
    with home.consumer("t", "c") as consumer:
        consumer.poll(5)
        consumer.commit()
        consumer.seek(0, 2)
        move_lease(home, consumer, 12)
        with pytest.raises(FencedError, match="seek again"):
            consumer.poll(1)
        assert offsets(consumer.poll(1)) == [12]
        consumer.seek(0, 2)
        assert offsets(consumer.poll(1)) == [2]
        consumer.commit()
        assert cursor(home) == 3


def test_seek_after_a_lost_seek_counts(home: Home) -> None:
    with home.consumer("t", "c") as consumer:
        consumer.poll(5)
        consumer.seek(0, 2)
        move_lease(home, consumer, 12)
        consumer.seek(0, 7)
        assert offsets(consumer.poll(1)) == [7]


def test_rewind_for_a_lost_lease_does_not_touch_the_next_one(home: Home) -> None:
    with home.consumer("t", "c") as consumer:
        consumer.poll(5)
        move_lease(home, consumer, 12)
        consumer.rewind(0, 3)
        assert offsets(consumer.poll(1)) == [12]


def test_rewind_below_the_cursor_does_not_move_it_back(home: Home) -> None:
    with home.consumer("t", "c") as consumer:
        consumer.poll(10)
        consumer.commit()
        consumer.rewind(0, 4)
        assert offsets(consumer.poll(2)) == [4, 5]
        consumer.commit()
        assert cursor(home) == 10
        consumer.poll(7)
        consumer.commit()
        assert cursor(home) == 13


def test_membership_refuses_a_cursor_that_moves_back_unasked(home: Home) -> None:
    member = Leases(home.context, home.topic("t"), "c", "earliest")
    assert member.take(0, [member.id])
    member.commit(0, 9)
    with pytest.raises(InvalidError, match="would move back to 3"):
        member.commit(0, 3)
    assert cursor(home) == 9
    member.commit(0, 3, back=True)
    assert cursor(home) == 3


@pytest.fixture
def uncertain(home: Home) -> tuple[Leases, Context, Topic]:
    """A member whose commit at 5 landed, which it does not know."""
    catalog = ReplyLosingCatalog()
    context = replace(home.context, catalog=catalog)
    topic = create_topic(context, msgspec.structs.replace(home.topic("t"), state="creating"))
    member = Leases(context, topic, "c", "earliest")
    assert member.take(0, [member.id])
    catalog.marked = True
    with pytest.raises(UnknownOutcomeError):
        member.commit(0, 5)
    catalog.is_down = False
    return member, context, topic


def test_commit_after_one_of_unknown_outcome_works(
    uncertain: tuple[Leases, Context, Topic],
) -> None:
    member, context, topic = uncertain
    member.commit(0, 7)
    found = read_lease(context, topic, "c", 0)
    assert found is not None
    assert found[0].cursor == 7


def test_commit_after_one_of_unknown_outcome_does_not_move_the_cursor_back(
    uncertain: tuple[Leases, Context, Topic],
) -> None:
    member, context, topic = uncertain
    member.commit(0, 3)  # delivered again after a rewind
    found = read_lease(context, topic, "c", 0)
    assert found is not None
    assert found[0].cursor == 5
    member.commit(0, 6)
    with pytest.raises(InvalidError, match="would move back"):
        member.commit(0, 4)


def test_lease_that_another_member_has_taken_is_not_committed_to(
    uncertain: tuple[Leases, Context, Topic],
) -> None:
    member, context, topic = uncertain
    other = Leases(context, topic, "c", "earliest")
    assert other.take(0, [other.id])
    with pytest.raises(FencedError):
        member.commit(0, 7)
    found = read_lease(context, topic, "c", 0)
    assert found is not None
    assert (found[0].owner, found[0].cursor) == (other.id, 5)


def test_poll_after_fenced_error_resumes_at_the_cursor(home: Home) -> None:
    """Two consumers: what one polled and could not commit comes again, to the one or the other."""
    settings = LogSettings(lease_ttl_ms=200, max_poll_interval_ms=300)
    object.__setattr__(home.context, "log_settings", settings)
    seen: list[int | None] = []
    with home.consumer("t", "c") as first:
        assert len(first.poll(8)) == 8  # and its handler hangs
        with home.consumer("t", "c") as second:
            until(lambda: bool(second.poll(3, timeout_s=0.05)))
            second.commit()
            assert cursor(home) == 3
        object.__setattr__(home.context, "log_settings", LogSettings(lease_ttl_ms=FOR_EVER_MS))
        with pytest.raises(FencedError):
            first.commit()
        while len(seen) < 17:
            seen += offsets(first.poll(6))
            first.commit()
    assert seen == list(range(3, 20))
    assert cursor(home) == 20


def test_events_of_a_lost_lease_are_not_taken_for_handled(home: Home) -> None:
    with home.consumer("t", "c") as consumer:
        assert len(consumer.poll(20)) == 20
        assert consumer.caught_up()
        move_lease(home, consumer, 5)
        assert not consumer.caught_up()
        assert not consumer.uncommitted(), "they cannot be committed any more"


def test_error_met_under_a_lost_lease_is_not_raised_for_the_next_one(home: Home) -> None:
    home.create_topic("wide", 2)
    for partition in range(2):
        home.append("wide", [Event(b"x")] * 5, partition=partition)
    with home.consumer("wide", "c") as consumer:
        consumer.poll(1)
        consumer.commit()
        (partition,) = consumer._readers
        lost = consumer._readers[partition]
        consumer._trouble = (RuntimeError("of the old lease"), lost)
        with consumer._lock:
            member = consumer._leases
            member.release(partition)
            assert member.take(partition, [member.id])
        assert consumer.poll(10)


def test_accepting_a_loss_does_not_move_the_cursor_of_another_member_back(home: Home) -> None:
    """The error is of a lease that was lost; another member has accepted the loss and read on."""
    lost = NotFoundError("trimmed", partition=0, cursor=2, start=6)
    with home.consumer("t", "c") as consumer:
        consumer.poll(1)
        move_lease(home, consumer, 15)
        accept_loss(consumer, lost)
        assert cursor(home) == 15


@pytest.mark.parametrize("landed", [True, False])
def test_seek_back_after_a_commit_of_unknown_outcome_is_stored(home: Home, landed: bool) -> None:
    catalog = CutCatalog(home.catalog, landed)
    object.__setattr__(home.context, "catalog", catalog)
    with home.consumer("t", "c") as consumer:
        assert len(consumer.poll(10)) == 10
        catalog.is_cut = True
        with pytest.raises(UnknownOutcomeError):
            consumer.commit()
        catalog.is_cut = False
        consumer.seek(0, 0)
        consumer.commit()
        assert cursor(home) == 0
        assert [event.offset for event in consumer.poll(10)] == list(range(10))


def test_seek_to_the_known_cursor_of_a_lost_lease_is_fenced(home: Home) -> None:
    with home.consumer("t", "c") as consumer:
        assert len(consumer.poll(10)) == 10
        consumer.commit()
        other = Leases(home.context, home.topic("t"), "c", "earliest")
        with consumer._lock:
            held = consumer._leases.held[0]
            consumer._leases.release(0)
            assert other.take(0, [])
            other.commit(0, 15)
            consumer._leases.held[0] = held  # as a member sees it that slept meanwhile
        consumer.seek(0, 10)
        with pytest.raises(FencedError):
            consumer.commit()
        assert cursor(home) == 15


class CutCatalog:
    """Behind a network that is cut at times: a write may land then, and no reply comes back."""

    def __init__(self, inner: Catalog, landed: bool) -> None:
        self._inner = inner
        self._landed = landed
        self.is_cut = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def get(self, partition: str, row: str) -> Row | None:
        if self.is_cut:
            raise UnavailableError("no answer")
        return self._inner.get(partition, row)

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        if self._landed or not self.is_cut:
            self._inner.write(partition, *changes, write_id=write_id)
        if self.is_cut:
            raise UnknownOutcomeError("the reply was lost")
