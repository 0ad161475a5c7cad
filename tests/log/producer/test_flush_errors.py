"""``flush`` and ``close`` return only if all that was sent before is stored."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tidelog
from tests.support.waiting import until
from tidelog import Home
from tidelog.errors import TidelogError, UnavailableError
from tidelog.log.producer.flush import SendFuture
from tidelog.log.producer.producer import Producer
from tidelog.model import limits
from tidelog.model.topic import partition_for
from tidelog.settings import LogSettings

CALLS: list[Callable[[Producer], None]] = [Producer.flush, Producer.close]


class Uploads:
    """Fails the uploads of a producer, or the commits to one partition, while it says so."""

    def __init__(self, producer: Producer) -> None:
        appender: Any = producer._appender
        self._upload, self._commit = appender.upload, appender.commit
        self.fail = False
        self.partition = -1
        appender.upload, appender.commit = self.upload, self.commit

    def upload(self, segment: Any) -> Any:
        if self.fail:
            raise UnavailableError("the store is away")
        return self._upload(segment)

    def commit(self, stored: Any, piece: Any, *rest: Any, **more: Any) -> Any:
        if piece.partition == self.partition:
            raise UnavailableError("throttled")
        return self._commit(stored, piece, *rest, **more)


@pytest.fixture
def home() -> Iterator[Home]:
    with tidelog.open("memory:") as opened:
        object.__setattr__(opened.context, "log_settings", LogSettings(linger_ms=1))
        opened.create_topic("t", 2)
        yield opened


@pytest.fixture
def producer(home: Home) -> Iterator[Producer]:
    opened = home.producer("t")
    yield opened
    with contextlib.suppress(TidelogError):
        opened.close()


def ended(future: SendFuture) -> None:
    """Wait until a flush has ended, without asking what became of it."""
    until(future.done)


@pytest.mark.parametrize("call", CALLS)
def test_second_failure_is_raised_after_a_future_told_the_first(
    producer: Producer, call: Callable[[Producer], None]
) -> None:
    uploads = Uploads(producer)
    uploads.fail = True
    with pytest.raises(UnavailableError):
        producer.send(b"one").result(60)
    ended(producer.send(b"two"))
    uploads.fail = False
    producer.send(b"three")
    with pytest.raises(UnavailableError, match="away"):
        call(producer)


@pytest.mark.parametrize("call", CALLS)
def test_result_of_a_stored_event_does_not_hide_a_failed_one_of_its_flush(
    home: Home, call: Callable[[Producer], None]
) -> None:
    object.__setattr__(home.context, "log_settings", LogSettings(linger_ms=60_000))
    producer = home.producer("t")
    uploads = Uploads(producer)
    uploads.partition = 1
    keys = {partition_for(b"%d" % n, 2): b"%d" % n for n in range(10)}
    stored = producer.send(b"a", keys[0])
    producer.send(b"b", keys[1])
    with producer._queue.state:
        producer._close_flush()
    assert stored.result(60).offset == 0
    with pytest.raises(UnavailableError, match="throttled"):
        call(producer)


def test_each_thread_that_shares_a_producer_gets_the_failure(producer: Producer) -> None:
    Uploads(producer).fail = True
    sent = threading.Barrier(2)
    first_is_told = threading.Event()
    raised: list[str] = []

    def work(name: str) -> None:
        producer.send(name.encode())
        sent.wait(60)
        if name == "second":
            first_is_told.wait(60)
        try:
            producer.flush()
        except UnavailableError:
            raised.append(name)
        first_is_told.set()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("first", "second")]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert raised == ["first", "second"]


def test_failure_of_a_thread_that_ended_is_raised_by_any_other(producer: Producer) -> None:
    Uploads(producer).fail = True
    sender = threading.Thread(target=lambda: ended(producer.send(b"lost")))
    sender.start()
    sender.join()
    raised: list[BaseException] = []

    def close() -> None:
        try:
            producer.close()
        except UnavailableError as exc:
            raised.append(exc)

    closer = threading.Thread(target=close)
    closer.start()
    closer.join()
    assert len(raised) == 1


def test_failure_is_raised_once_in_a_thread(producer: Producer) -> None:
    uploads = Uploads(producer)
    uploads.fail = True
    ended(producer.send(b"one"))
    ended(producer.send(b"two"))
    with pytest.raises(UnavailableError):
        producer.flush()
    producer.flush()
    uploads.fail = False
    producer.send(b"again")
    producer.flush()


def test_thread_that_began_after_a_raised_failure_does_not_get_it(producer: Producer) -> None:
    uploads = Uploads(producer)
    uploads.fail = True
    ended(producer.send(b"one"))
    with pytest.raises(UnavailableError):
        producer.flush()
    uploads.fail = False
    raised: list[BaseException] = []

    def work() -> None:
        producer.send(b"two")
        try:
            producer.flush()
        except TidelogError as exc:
            raised.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert raised == []


def test_failures_told_by_all_futures_are_not_raised_again(producer: Producer) -> None:
    Uploads(producer).fail = True
    futures = [producer.send(b"%d" % number) for number in range(5)]
    for future in futures:
        with pytest.raises(UnavailableError):
            future.result(60)
    producer.flush()


def test_many_failures_take_little_memory_and_are_still_raised(producer: Producer) -> None:
    Uploads(producer).fail = True
    for number in range(limits.FAILURES_MAX + 20):
        ended(producer.send(b"%d" % number))
    assert len(producer._queue._failures) == limits.FAILURES_MAX
    with pytest.raises(UnavailableError):
        producer.flush()
    producer.flush()
