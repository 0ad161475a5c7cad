"""A thread pool that completes its work even when no more threads can be started.

Python starts no threads for a pool after its main thread has ended, even if other threads go on,
and a system may run out of threads. A plain pool then raises, perhaps after it has queued the work,
and a caller that waits for that work waits forever. Here the caller does the work in its own
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, ParamSpec, TypeVar

__all__ = ["Pool"]

P = ParamSpec("P")
T = TypeVar("T")


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
