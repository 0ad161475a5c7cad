"""Wrong parts of producers and consumers, for the bugs that ``planted`` lists."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from tidelog.catalog.base import Put
from tidelog.context import Context
from tidelog.coordination.ownership import Member
from tidelog.errors import ConflictError, UnavailableError, UnknownOutcomeError
from tidelog.log.consumer import delete as consumer_delete
from tidelog.log.consumer import handler
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.consumer.delivery import LeaseReader, all_or_nothing
from tidelog.log.consumer.leases import Lease, Leases
from tidelog.log.producer.append import Appender
from tidelog.log.producer.flush import Flush, FlushFailure, FlushFailures, SendFuture
from tidelog.log.producer.producer import Producer
from tidelog.model import layout
from tidelog.model.event import Event, Position
from tidelog.model.topic import Topic, encode_row

__all__ = [
    "back_to_positions",
    "beat_whatever",
    "close_late",
    "commit_polled_ahead",
    "commit_position",
    "commit_unless_remembered",
    "due_to_one_thread",
    "keep_one_failure",
    "mark_whichever",
    "never_overtaken",
    "no_check_of_a_consumer",
    "release_without_version",
    "result_tells_the_flush",
    "run_without_putting_back",
    "undo_after_errors",
    "upload_again",
    "yield_all",
]


def keep_one_failure(self: FlushFailures, failure: FlushFailure) -> None:
    """Keeps the first failure only, until a call for the whole producer comes."""
    if not self._kept:
        self._kept.append(failure)


def result_tells_the_flush(self: SendFuture, timeout_s: float | None = None) -> Position:
    """Takes one look at a failed flush for a report of all its events."""
    flush = self.flush
    if not flush.wait(timeout_s):
        raise UnknownOutcomeError("not durable yet")
    if flush.error is not None:
        if flush.failure is not None:
            flush.failure._events = 0
        if not flush.is_stored(self.index):
            raise flush.error_of(self.index)
    return flush.positions()[self.index]


def due_to_one_thread(self: FlushFailures) -> BaseException | None:
    """Raises a failure in the first call that comes, and in no other."""
    due, self._kept = self._kept, []
    return due[0].error if due and not due[0]._have_all_raised() else None


def commit_unless_remembered(self: Consumer, partition: int, reader: LeaseReader) -> bool:
    """Writes nothing where the cursor that the member remembers is the same."""
    held = self._leases.held.get(partition)
    is_same = held is not None and held.lease.epoch == reader.epoch
    if is_same and held is not None and held.lease.cursor == reader.position:
        reader.committed()
        return False
    return _commit(self, partition, reader)


_commit = Consumer._commit


def commit_polled_ahead(self: Consumer, partition: int, reader: LeaseReader) -> bool:
    """Commits under the present lease what was read under an earlier one."""
    self._leases.commit(partition, reader.position, None, back=True)
    reader.committed()
    return True


def commit_position(self: Consumer, partition: int, reader: LeaseReader) -> bool:
    """Moves the cursor to wherever reading is, forward or back."""
    held = self._leases.held.get(partition)
    is_same = held is not None and held.lease.epoch == reader.epoch
    if not is_same or held is None or held.lease.cursor != reader.position:
        self._leases.commit(partition, reader.position, reader.epoch, back=True)
    reader.committed()
    return True


@contextlib.contextmanager
def back_to_positions(readers: dict[int, LeaseReader]) -> Iterator[None]:
    """After a failed poll, goes back to where it was, under whatever lease."""
    before = {partition: each.position for partition, each in readers.items()}
    try:
        yield
    except BaseException:
        for partition, reader in list(readers.items()):
            if partition in before:
                reader.rewind(before[partition])
            else:
                del readers[partition]
        raise


def yield_all(events: Sequence[Event], readers: Mapping[int, LeaseReader]) -> Iterator[Event]:
    """Yields the events of a poll, all of which count as delivered."""
    yield from events


def release_without_version(self: Leases, partition: int) -> None:
    """Releases a lease without expecting it, so that a doubled packet brings an old cursor back."""
    held = self.held.pop(partition, None)
    if held is not None:
        free = Lease("", held.lease.epoch, held.lease.cursor)
        where = layout.lease_partition(self._topic.incarnation, self._name, partition)
        with contextlib.suppress(UnknownOutcomeError):
            change = Put("lease", encode_row(free))
            self._context.catalog.write(where, change, write_id=self._context.ids.new())


_begin_delete = consumer_delete._Deletion._begin


def mark_whichever(self: consumer_delete._Deletion, wanted: str) -> Any:
    """Marks the consumer that has the name now, whichever was asked about."""
    with mock.patch.object(self, "_which", return_value=wanted):
        return _begin_delete(self, wanted)


def never_overtaken(self: Any, version: str) -> None:
    """Goes on with a delete of a consumer, whatever another call has made of it meanwhile."""


def no_check_of_a_consumer(context: Context, topic: Topic, name: str) -> None:
    """Takes it for granted that the consumer is there, since the caller has looked before."""


def beat_whatever(self: Leases) -> bool:
    """Writes a heartbeat without regard to a delete of the consumer."""
    self._beats += 1
    member = Member(self._beats, self._context.processes.mark(), self._context.clock.now_ms())
    change = Put(layout.member_row(self.id), encode_row(member))
    with contextlib.suppress(UnknownOutcomeError):
        self._context.catalog.write(self._members, change, write_id=self._context.ids.new())
    return True


_run = handler.run


def run_without_putting_back(
    consumer: Consumer,
    handle: handler.Handler,
    how: handler.HandlerOptions,
    all_or_nothing: Callable[[], contextlib.AbstractContextManager[None]],
) -> int:
    """Handles polled events; an interrupted run passes over those that it has not handled."""
    return _run(consumer, handle, how, contextlib.nullcontext)


@contextlib.contextmanager
def undo_after_errors(readers: dict[int, LeaseReader]) -> Iterator[None]:
    """Delivers again what a poll has read if it failed, but not if it was interrupted."""
    undo = all_or_nothing(readers)
    undo.__enter__()
    try:
        yield
    except Exception as exc:
        undo.__exit__(type(exc), exc, None)
        raise
    except BaseException:
        undo.__exit__(None, None, None)
        raise
    else:
        undo.__exit__(None, None, None)


def close_late(self: Producer) -> None:
    """Takes a new flush after the start of the old one, unless that was interrupted."""
    if self._open.pending:
        self._queue.start(self._open)
        self._open = Flush(self._topic.name)


def upload_again(self: Appender, stored: Any, piece: Any, find_end: Any) -> Any:
    """Stores events in another segment for each offset that it tries."""
    for number in range(20):
        if number:
            stored = self.upload(stored.segment)
        end = find_end()
        with contextlib.suppress(ConflictError):
            return self.commit(stored, piece, expected_offset=end)
        self.abandon(piece.partition, stored)
    raise UnavailableError("too many writers at once")
