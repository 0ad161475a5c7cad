"""Wrong parts of producers and consumers, for the bugs that ``planted`` lists."""

from __future__ import annotations

from tidelog.errors import UnknownOutcomeError
from tidelog.log.consumer import Consumer
from tidelog.log.failures import Failure, Failures
from tidelog.log.flush import SendFuture
from tidelog.log.intake import Intake
from tidelog.model.event import Position

__all__ = [
    "commit_polled_ahead",
    "commit_position",
    "commit_unless_remembered",
    "due_to_one_thread",
    "keep_one_failure",
    "result_tells_the_flush",
]


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


def commit_unless_remembered(self: Consumer, partition: int, intake: Intake) -> bool:
    """Writes nothing where the cursor that the member remembers is the same."""
    held = self._membership.held.get(partition)
    is_same = held is not None and held.lease.epoch == intake.epoch
    if is_same and held is not None and held.lease.cursor == intake.position:
        intake.committed()
        return False
    return _commit(self, partition, intake)


_commit = Consumer._commit


def commit_polled_ahead(self: Consumer, partition: int, intake: Intake) -> bool:
    """Commits under the present lease what was read under an earlier one."""
    self._membership.commit(partition, intake.position, None, back=True)
    intake.committed()
    return True


def commit_position(self: Consumer, partition: int, intake: Intake) -> bool:
    """Moves the cursor to wherever reading is, forward or back."""
    held = self._membership.held.get(partition)
    is_same = held is not None and held.lease.epoch == intake.epoch
    if not is_same or held is None or held.lease.cursor != intake.position:
        self._membership.commit(partition, intake.position, intake.epoch, back=True)
    intake.committed()
    return True
