"""Threads for work that must be done, also where no more of them can be started.

Python starts no work in a pool once its main thread has ended, though other threads of the program
go on, and a system may have no thread left. A plain pool then raises, perhaps after it has taken
the work: who waits for that waits for ever. Here the caller does the work in its own thread.
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
    """A ``ThreadPoolExecutor`` that does all work which it is given before it is shut down.

    Where no thread can be had, ``submit`` returns when the work is done. So a caller may hold only
    locks that its own thread can take again.
    """

    def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
        super().__init__(max_workers, thread_name_prefix)
        self._is_shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The same. ``RuntimeError`` once it is shut down, and for no other reason."""
        work = _Work(lambda: fn(*args, **kwargs))
        try:
            super().submit(work.do)
        except RuntimeError:
            if self._is_shut:
                raise
            work.do()  # a thread that runs may have taken it all the same, and is first then
        return work.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """The same; but what waits is done, whatever ``cancel_futures`` says."""
        self._is_shut = True
        super().shutdown(wait)


class _Work(Generic[T]):
    """One call, made once, by the thread that comes first."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._call = call
        self._first = threading.Lock()

    def do(self) -> None:
        """Make the call, unless another thread does, or it was cancelled."""
        if not self._first.acquire(blocking=False):
            return
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._call()
        except BaseException as exc:  # noqa: BLE001 - raised where the result is asked for
            self.future.set_exception(exc)
        else:
            self.future.set_result(result)
