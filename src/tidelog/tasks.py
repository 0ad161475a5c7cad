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

**Signals.** A signal handler may raise anywhere in the main thread, as Ctrl-C does. If it does so
while Python's own events, conditions and pools acquire their lock, which takes several steps, the
lock stays taken and other threads wait forever. So what the main thread shares with others is
entered by a plain lock, in one step. A :class:`Flag` is an event without a lock of its own, and a
:class:`Pool` counts its idle threads without one. Its futures enter their conditions in one step,
and wait for a flag.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, ParamSpec, Protocol, TypeVar

__all__ = ["Flag", "Pool", "TaskRunner"]


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


class Flag:
    """A ``threading.Event`` that a signal handler that raises leaves usable.

    A thread that waits first lists a lock and then looks at the flag. One that sets it does so
    before it releases the locks in the list. So none waits for a flag that is set.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[threading.Lock] = []

    def is_set(self) -> bool:
        """Returns whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Sets it, which wakes everything that waits for it."""
        self._is_set = True
        for lock in list(self._waiting):
            with contextlib.suppress(RuntimeError):  # another thread has released it
                lock.release()

    def clear(self) -> None:
        """Takes it back."""
        self._is_set = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it is set; returns whether it is, or was meanwhile."""
        if self._is_set:
            return True
        lock = threading.Lock()
        lock.acquire()
        left_s = -1.0 if timeout_s is None else max(0.0, timeout_s)
        try:
            self._waiting.append(lock)
            return self._is_set or lock.acquire(timeout=left_s)
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(lock)


P = ParamSpec("P")


class Pool(ThreadPoolExecutor):
    """A ``ThreadPoolExecutor`` that does all the work it is given before it shuts down.

    If no thread can be started, ``submit`` returns when the work is done. So a caller may hold only
    reentrant locks.
    """

    def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
        super().__init__(max_workers, thread_name_prefix)
        self._idle_semaphore = _IdleThreads()  # type: ignore[assignment]  # of the base class
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


class _IdleThreads:
    """Counts idle threads, in operations that no signal handler can break off."""

    def __init__(self) -> None:
        self._idle: deque[None] = deque()

    def acquire(self, timeout: float | None = None) -> bool:
        """Takes one; returns False if there is none, without a wait."""
        try:
            self._idle.pop()
        except IndexError:
            return False
        return True

    def release(self) -> None:
        """Adds one."""
        self._idle.append(None)


class _Work(Generic[T]):
    """One call, made once, by the first thread that reaches it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.future: Future[T] = _WorkFuture()
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


class _WorkFuture(Future[T]):
    """A future whose results the main thread may wait for, whatever its signal handlers raise."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = _OneStepCondition()
        self._ended = Flag()

    def result(self, timeout: float | None = None) -> T:
        """Same as the base class."""
        self._ended.wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Same as the base class."""
        self._ended.wait(timeout)
        return super().exception(0)

    def cancel(self) -> bool:
        """Same as the base class."""
        is_cancelled = super().cancel()
        if is_cancelled:
            self._ended.set()
        return is_cancelled

    def set_result(self, result: T) -> None:
        """Same as the base class."""
        super().set_result(result)
        self._ended.set()

    def set_exception(self, exception: BaseException | None) -> None:
        """Same as the base class."""
        super().set_exception(exception)
        self._ended.set()


class _OneStepCondition(threading.Condition):
    """A condition that is entered and left by its lock's own methods.

    Those of the base class are functions in Python: a signal handler may raise in them after they
    have taken the lock.
    """

    __enter__ = property(lambda self: self._lock.__enter__)
    __exit__ = property(lambda self: self._lock.__exit__)
