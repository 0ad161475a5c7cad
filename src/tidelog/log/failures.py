"""Failed flushes that ``flush`` and ``close`` of a producer have yet to raise.

A call that promises durability looks at everything that was sent before it. Whose events a flush
carries is not noted, as that would cost time for each of them: so each thread that lived when a
flush failed gets the failure from its own next ``flush`` or ``close``, and a failure that no call
has raised yet goes to the next call of any thread. What the futures of all failed events have
raised is not raised again.
"""

from __future__ import annotations

import threading
from threading import Thread

from tidelog.model import limits

__all__ = ["Failure", "Failures"]


class Failure:
    """Why events of one flush are not stored, and who knows that."""

    def __init__(self, error: BaseException, events: int) -> None:
        self.error = error
        self._events: int | None = events  # how many failed; None: of several flushes
        self._told: set[int] = set()  # those whose futures have raised it
        self._is_raised = False  # by a call for the producer as a whole
        self._threads: set[Thread] = set()  # that may have sent some, and do not know yet

    def tell(self, index: int) -> None:
        """Note that the future of a failed event has raised its error."""
        self._told.add(index)

    def met_by(self, threads: set[Thread]) -> None:
        """Note which threads live at the time of the failure."""
        self._threads = threads

    def is_over(self, living: set[Thread]) -> bool:
        """Whether no call is left that has to raise it."""
        self._threads &= living
        return self._is_told() or (self._is_raised and not self._threads)

    def is_due(self, thread: Thread) -> bool:
        """Whether a call in this thread has to raise it."""
        return not self._is_told() and (not self._is_raised or thread in self._threads)

    def raised_in(self, thread: Thread) -> None:
        """Note that a call in this thread raises it, or an earlier one."""
        self._is_raised = True
        self._threads.discard(thread)

    def absorb(self, later: Failure) -> None:
        """Count for another one too, so that fewer have to be kept."""
        self._events = None
        self._is_raised = self._is_raised and later._is_raised
        self._threads |= later._threads

    def _is_told(self) -> bool:
        return self._events is not None and len(self._told) >= self._events


class Failures:
    """Those of one producer, oldest first. Its lock is the caller's."""

    def __init__(self) -> None:
        self._kept: list[Failure] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, failure: Failure) -> None:
        """Keep one more, for all threads that live now."""
        living = set(threading.enumerate())
        failure.met_by(set(living))
        self._kept = [each for each in self._kept if not each.is_over(living)]
        self._kept.append(failure)
        if len(self._kept) > limits.FAILURES_MAX:
            self._kept[0].absorb(self._kept.pop(1))

    def due(self) -> BaseException | None:
        """The first error that the calling thread must raise, which then knows of all of them."""
        thread = threading.current_thread()
        due = [failure for failure in self._kept if failure.is_due(thread)]
        for failure in due:
            failure.raised_in(thread)
        return due[0].error if due else None
