"""Work beside the caller: threads that complete it in any case, and tasks of other processes.

**Tasks** let maintenance use a cluster. Verification, proofs, searches and rewrites read far more
than they change. With a :class:`TaskRunner` they work in two passes:

1. tasks do ahead whatever needs only the store: read and check the files of a range, search an
   object, stage a file without erased events
2. the caller does its work as it does without a runner, and uses what a task has done. What no task
   could do, and what has changed since, the caller does itself

So results are the same with and without a runner, tasks may run twice or die, and only the caller
writes to the catalog.

**Threads.** Python starts no threads for a pool after its main thread has ended, even if other
threads go on, and a system may run out of threads. A plain pool then raises, perhaps after it has
queued the work, and a caller that waits for that work waits forever. Here the caller does the work
in its own thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, ParamSpec, Protocol, TypeVar

__all__ = ["Pool", "TaskRunner"]


T = TypeVar("T")
R = TypeVar("R")


class TaskRunner(Protocol):
    """Runs a function on many items, in other processes."""

    @property
    def parallelism(self) -> int:
        """Returns how many calls run at once."""
        ...

    def run(
        self, title: str, function: Callable[[T], R], items: Iterable[T], size: Callable[[T], int]
    ) -> Iterator[tuple[T, R]]:
        """Yields items with what the function returned for them, in order.

        Omits an item if the function raised for it, so that the caller does it and gets the error
        itself. Raises ``UnavailableError`` if the store cannot be reached or jobs keep failing, and
        ``InvalidError`` if the other processes cannot work, such as without Tidelog.

        ``function`` and items pickle. A call may be repeated and its first result lost, so it
        changes nothing, adds objects under new names, or is idempotent. ``title`` says what it is
        for, and ``size`` how many bytes an item reads.
        """
        ...


P = ParamSpec("P")


class Pool(ThreadPoolExecutor):
    """A ``ThreadPoolExecutor`` that does all the work it is given before it shuts down.

    If no thread can be started, ``submit`` returns when the work is done. So a caller may hold only
    reentrant locks.
    """

    def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
        super().__init__(max_workers, thread_name_prefix)
        self._is_shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Same as the base class, but raises ``RuntimeError`` only after a shutdown."""
        work = _Work(lambda: fn(*args, **kwargs))
        try:
            super().submit(work.do)
        except RuntimeError:
            if self._is_shut:
                raise
            work.do()  # a running thread may have taken it; then that thread comes first
        return work.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Same as the base class, but completes waiting work whatever ``cancel_futures`` says."""
        self._is_shut = True
        super().shutdown(wait)


class _Work(Generic[T]):
    """One call, made once, by the first thread that reaches it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._call = call
        self._first = threading.Lock()

    def do(self) -> None:
        """Makes the call unless another thread does or it was cancelled."""
        if not self._first.acquire(blocking=False):
            return
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._call()
        except BaseException as exc:  # noqa: BLE001 - raised by the future's result
            self.future.set_exception(exc)
        else:
            self.future.set_result(result)
