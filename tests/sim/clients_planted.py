"""Wrong parts of producers and consumers, for the bugs that ``planted`` lists."""

from __future__ import annotations

from tidelog.errors import UnknownOutcomeError
from tidelog.log.failures import Failure, Failures
from tidelog.log.flush import SendFuture
from tidelog.model.event import Position

__all__ = ["due_to_one_thread", "keep_one_failure", "result_tells_the_flush"]


def keep_one_failure(self: Failures, failure: Failure) -> None:
    """Keeps the first failure only, until a call for the whole producer comes."""
    if not self._kept:
        self._kept.append(failure)


def result_tells_the_flush(self: SendFuture, timeout_s: float | None = None) -> Position:
    """Takes one look at a failed flush for a report of all its events."""
    flush = self.flush
    if not flush.settled(timeout_s):
        raise UnknownOutcomeError("not durable yet")
    if flush.error is not None:
        if flush.failure is not None:
            flush.failure._events = 0
        if not flush.is_stored(self.index):
            raise flush.error_of(self.index)
    return flush.positions()[self.index]


def due_to_one_thread(self: Failures) -> BaseException | None:
    """Raises a failure in the first call that comes, and in no other."""
    due, self._kept = self._kept, []
    return due[0].error if due and not due[0]._is_told() else None
