"""Runs the product's threads as actors of the scheduler.

:func:`simulated` replaces the names ``threading``, ``ThreadPoolExecutor``, ``Pool``, ``Future``,
``wait``, ``as_completed`` and ``os`` (for ``getpid``) in all loaded modules of the product with
equivalents that yield to a scheduler instead of blocking. The product's code does not change. A
thread belongs to the process of the thread that started it, and dies with it.

Threads switch where they block, at calls to the world, and now and then (``preempt``) where they
acquire a lock or set an event. Between two such places a thread is not interrupted. Outside an
actor nothing blocks: a pool runs its work at once, and waiting raises ``InternalError``.
"""

from __future__ import annotations

import concurrent.futures
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import Any

from tidelog.concurrency import Pool
from tidelog.errors import InternalError
from tidelog.testing.faults import Process
from tidelog.testing.scheduler import Actor, Crash, Scheduler

__all__ = ["SimulatedThreads", "simulated"]

# These belong to the world itself, or work with real processes and sockets.
_KEPT = ("tidelog.testing", "tidelog.store.memory", "tidelog.catalog.memory", "tidelog.clock")


@contextmanager
def simulated(scheduler: Scheduler, preempt: float = 0.1) -> Iterator[SimulatedThreads]:
    """Makes the product's threads actors of this scheduler while the body runs."""
    threads = SimulatedThreads(scheduler, preempt)
    replaced: list[tuple[ModuleType, str, object]] = []
    for module, name, original in _names():
        replaced.append((module, name, original))
        setattr(module, name, threads.replacement(original))
    try:
        yield threads
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


_found: tuple[int, list[tuple[ModuleType, str, object]]] = (0, [])


def _names() -> list[tuple[ModuleType, str, object]]:
    """Returns where loaded modules name something that :class:`SimulatedThreads` replaces."""
    global _found  # noqa: PLW0603 - a cache: there are hundreds of modules, and thousands of worlds
    if _found[0] != len(sys.modules):
        originals = {id(each) for each in _ORIGINALS}
        modules = [
            module
            for name, module in sorted(sys.modules.items())
            if name.startswith("tidelog.") and not name.startswith(_KEPT)
        ]
        places = [
            (module, name, value)
            for module in modules
            for name, value in vars(module).items()
            if id(value) in originals
        ]
        _found = (len(sys.modules), places)
    return _found[1]


class SimulatedThreads:
    """What modules see as ``threading`` while they are simulated, and what replaces the rest."""

    local = threading.local

    def __init__(self, scheduler: Scheduler, preempt: float) -> None:
        self.scheduler = scheduler
        self._preempt = preempt
        self._count = 0
        self._pid = _Os(scheduler)

    def replacement(self, original: object) -> object:
        """Returns what a module's name refers to instead of ``original``."""
        if original is threading:
            return self
        if original is os:
            return self._pid
        if original in (concurrent.futures.ThreadPoolExecutor, Pool):
            return self.pool
        if original is concurrent.futures.Future:
            return self.future
        return _wait_all if original is concurrent.futures.wait else _as_completed

    # Named like in ``threading``.

    def Lock(self) -> _Lock:  # noqa: N802
        return _Lock(self, reentrant=False)

    def RLock(self) -> _Lock:  # noqa: N802
        return _Lock(self, reentrant=True)

    def Condition(self, lock: _Lock | None = None) -> _Condition:  # noqa: N802
        return _Condition(self, lock or self.RLock())

    def Event(self) -> _Event:  # noqa: N802
        return _Event(self)

    def Thread(  # noqa: N802
        self,
        target: Callable[..., object],
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> _Thread:
        return _Thread(self, name or "thread", lambda: target(*args, **(kwargs or {})))

    def get_ident(self) -> int:
        return id(self.scheduler.current)

    def current_thread(self) -> object:
        return self.scheduler.current or self.scheduler

    def enumerate(self) -> list[object]:
        """Returns the threads of the current process."""
        current = self.scheduler.current
        if current is None:
            return [self.scheduler]
        return [actor for actor in current.group.actors if not actor.done]

    def pool(self, max_workers: int = 4, thread_name_prefix: str = "pool") -> _Pool:
        """Returns a ``ThreadPoolExecutor``."""
        return _Pool(self, max_workers, thread_name_prefix)

    def future(self) -> _Future:
        """Returns a ``Future``."""
        return _Future(self)

    # For the rest of this module.

    def preempt(self, label: str) -> None:
        """Yields now and then, like the operating system would."""
        if self.scheduler.current is not None and self.scheduler.random.random() < self._preempt:
            self.scheduler.pause(label)

    def spawn(self, name: str, run: Callable[[], None]) -> Actor:
        """Starts a thread in the process of the current one."""
        self._count += 1
        current = self.scheduler.current
        group = None if current is None else current.group
        before = "" if current is None else f"{current.name.partition('.')[0]}."
        actor = self.scheduler.spawn(f"{before}{name}-{self._count}", run, group)
        if group is not None and group.killed:
            self.scheduler.kill(actor)
        return actor

    def sleepers(self) -> _Sleepers:
        return _Sleepers(self.scheduler)


class _Os:
    """The module ``os``, with the simulated process's id."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def getpid(self) -> int:
        current = self._scheduler.current
        if current is None or not isinstance(current.group, Process):
            return os.getpid()
        host = current.group.host.name
        return hash_pid(host, current.group.pid)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def hash_pid(host: str, pid: int) -> int:
    """Returns a process id that no process of another host has either."""
    return int.from_bytes(host.encode()[-4:], "big") * 100_000 + pid


class _Sleepers:
    """Actors that wait for one thing."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: deque[Actor] = deque()

    def wait(self, label: str, timeout_s: float | None = None) -> None:
        """Yields until woken or timed out; the caller then checks what is true."""
        actor = self._scheduler.current
        if actor is None:
            raise InternalError(f"{label}: would block outside an actor")
        self._waiting.append(actor)
        try:
            self._scheduler.park(label, timeout_s)
        finally:
            if actor in self._waiting:
                self._waiting.remove(actor)

    def wake(self, count: int | None = None) -> None:
        """Wakes the first ones; all of them by default."""
        for _ in range(len(self._waiting) if count is None else min(count, len(self._waiting))):
            self._scheduler.unpark(self._waiting.popleft())


class _Lock:
    """``Lock`` and ``RLock``."""

    def __init__(self, threads: SimulatedThreads, *, reentrant: bool) -> None:
        self._threads = threads
        self._reentrant = reentrant
        self._owner: object = None
        self._count = 0
        self._sleepers = threads.sleepers()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._threads.scheduler
        me: object = scheduler.current or scheduler
        if self._reentrant and self._owner is me:
            self._count += 1
            return True
        self._threads.preempt("lock")
        end_s = None if timeout < 0 else scheduler.time.monotonic_s() + timeout
        while self._owner is not None:
            left_s = None if end_s is None else end_s - scheduler.time.monotonic_s()
            if not blocking or (left_s is not None and left_s <= 0):
                return False
            self._sleepers.wait("lock taken", left_s)
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        scheduler = self._threads.scheduler
        if self._owner is not (scheduler.current or scheduler):
            if scheduler.current is not None and scheduler.current.killed:
                return  # killed while it waited for the lock again
            if self._reentrant or self._owner is None:
                raise RuntimeError("cannot release a lock that is not held")
        self._count -= 1
        if self._count == 0:
            self._owner = None
            self._sleepers.wake()

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def release_all(self) -> int:
        """Releases it completely. Returns how many times it was acquired."""
        count, self._count = self._count, 1
        self.release()
        return count

    def acquire_all(self, count: int) -> None:
        """Acquires it again after :meth:`release_all`. As in Python, no signal interrupts that."""
        with self._threads.scheduler.uninterrupted():
            self.acquire()
        self._count = count


class _Condition:
    """``Condition``."""

    def __init__(self, threads: SimulatedThreads, lock: _Lock) -> None:
        self._threads = threads
        self._lock = lock
        self._sleepers = threads.sleepers()
        self.acquire = lock.acquire
        self.release = lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._threads.scheduler
        began_s = scheduler.time.monotonic_s()
        count = self._lock.release_all()
        try:
            self._sleepers.wait("condition", timeout)
        finally:
            self._lock.acquire_all(count)
        return timeout is None or scheduler.time.monotonic_s() - began_s < timeout

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        scheduler = self._threads.scheduler
        end_s = None if timeout is None else scheduler.time.monotonic_s() + timeout
        while not (result := predicate()):
            left_s = None if end_s is None else end_s - scheduler.time.monotonic_s()
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify(self, n: int = 1) -> None:
        self._sleepers.wake(n)

    def notify_all(self) -> None:
        self._sleepers.wake()


class _Event:
    """``Event``."""

    def __init__(self, threads: SimulatedThreads) -> None:
        self._threads = threads
        self._set = False
        self._sleepers = threads.sleepers()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._sleepers.wake()
        self._threads.preempt("event set")

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if self._set:
            return True
        scheduler = self._threads.scheduler
        if scheduler.current is None:
            raise InternalError("an event: would block outside an actor")
        end_s = None if timeout is None else scheduler.time.monotonic_s() + timeout
        while not self._set:
            left_s = None if end_s is None else end_s - scheduler.time.monotonic_s()
            if left_s is not None and left_s <= 0:
                break
            self._sleepers.wait("event", left_s)
        return self._set


class _Thread:
    """``Thread``. An exception that leaves it fails the simulation."""

    def __init__(self, threads: SimulatedThreads, name: str, run: Callable[[], object]) -> None:
        self.name = name
        self._threads = threads
        self._run = run
        self._actor: Actor | None = None
        self._sleepers = threads.sleepers()

    def start(self) -> None:
        self._actor = self._threads.spawn(self.name, lambda: (self._run(), None)[1])
        self._actor.on_end.append(self._sleepers.wake)
        self._threads.preempt("thread started")

    def is_alive(self) -> bool:
        return self._actor is not None and not self._actor.done

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive():
            self._sleepers.wait("join", timeout)


class _Future:
    """``Future``."""

    def __init__(self, threads: SimulatedThreads) -> None:
        self._threads = threads
        self._done = threads.Event()
        self._cancelled = False
        self._running = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._calls: list[Callable[[_Future], object]] = []

    def done(self) -> bool:
        return self._done.is_set()

    def cancelled(self) -> bool:
        return self._cancelled

    def running(self) -> bool:
        return self._running and not self.done()

    def cancel(self) -> bool:
        if self._running or self.done():
            return self._cancelled
        self._cancelled = True
        self._end()
        return True

    def set_running_or_notify_cancel(self) -> bool:
        self._running = not self._cancelled
        return self._running

    def set_result(self, result: Any) -> None:
        self._result = result
        self._end()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def result(self, timeout: float | None = None) -> Any:
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self._done.wait(timeout):
            raise TimeoutError
        if self._cancelled:
            raise concurrent.futures.CancelledError
        return self._error

    def add_done_callback(self, call: Callable[[_Future], object]) -> None:
        if self.done():
            call(self)
        else:
            self._calls.append(call)

    def _end(self) -> None:
        calls, self._calls = self._calls, []
        self._done.set()
        for call in calls:
            call(self)


class _Pool:
    """``ThreadPoolExecutor``."""

    def __init__(self, threads: SimulatedThreads, workers_max: int, name: str) -> None:
        self._threads = threads
        self._workers_max = workers_max
        self._name = name
        self._work: deque[tuple[_Future, Callable[[], Any]]] = deque()
        self._idle = 0
        self._workers: list[_Thread] = []
        self._closed = False
        self._sleepers = threads.sleepers()

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> _Future:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = _Future(self._threads)
        work = (future, lambda: call(*args, **kwargs))
        if self._threads.scheduler.current is None:
            _do(work)
            return future
        self._work.append(work)
        if self._idle < len(self._work) and len(self._workers) < self._workers_max:
            worker = self._threads.Thread(self._serve, self._name)
            self._workers.append(worker)
            worker.start()
        self._sleepers.wake(1)
        return future

    def map(self, call: Callable[..., Any], *iterables: Iterable[Any]) -> Iterator[Any]:
        futures = [self.submit(call, *each) for each in zip(*iterables, strict=False)]
        return (future.result() for future in futures)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        if cancel_futures:
            while self._work:
                self._work.popleft()[0].cancel()
        self._sleepers.wake()
        current = self._threads.scheduler.current
        # A generator that is dropped with its process, or after it, waits for no thread.
        if wait and current is not None and not current.killed:
            for worker in self._workers:
                worker.join()

    def __enter__(self) -> _Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _serve(self) -> None:
        while True:
            while not self._work:
                if self._closed:
                    return
                self._idle += 1
                try:
                    self._sleepers.wait("pool")
                finally:
                    self._idle -= 1
            _do(self._work.popleft())


def _do(work: tuple[_Future, Callable[[], Any]]) -> None:
    future, call = work
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except Crash:
        raise
    except BaseException as exc:  # noqa: BLE001 - raised where the result is asked for
        future.set_exception(exc)
    else:
        future.set_result(result)


def _wait_all(futures: Iterable[_Future], timeout: float | None = None) -> None:
    """Waits like ``concurrent.futures.wait`` until all are done; the product ignores its result."""
    for future in futures:
        future._done.wait(timeout)


def _as_completed(futures: Iterable[_Future]) -> Iterator[_Future]:
    """``concurrent.futures.as_completed``."""
    pending = list(futures)
    while pending:
        done = [future for future in pending if future.done()]
        if not done:
            pending[0]._done.wait()
            continue
        for future in done:
            pending.remove(future)
            yield future


_ORIGINALS: tuple[object, ...] = (
    threading,
    os,
    concurrent.futures.ThreadPoolExecutor,
    Pool,
    concurrent.futures.Future,
    concurrent.futures.wait,
    concurrent.futures.as_completed,
)
