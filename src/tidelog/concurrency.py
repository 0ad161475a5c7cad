"""Threads, tasks and processes: work beside the caller, and which process owns an object.

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

**Processes.** A lease of a process that is known to be dead can be taken over without a wait. Only
certain knowledge counts: we judge processes that share our machine, its current boot, and our pid
and time namespaces, and no others. ``/proc`` may hide a living process of another user
(``hidepid``, ``ProtectProc``). So a process that is not listed there is dead only if the kernel
says that no process has its id.

A forked child inherits buffers, leases and locks, but none of the threads behind them. The parent
writes what is buffered and releases the leases. A lock that another thread held at the fork never
becomes free in the child. So an object with any of these has a :class:`ProcessGuard`: in a child,
every use of the object raises one clear error, and nothing of it is written.

Guards are marked when the process forks, so a check costs no system call. A :class:`RefusingLock`
replaces the object's lock, so hot paths need no check at all.

Locks of native libraries are out of reach: a child may wait forever for a lock of Arrow's that
another thread held. So fork only while no other thread works, or use ``spawn``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, NoReturn, ParamSpec, Protocol, TypeVar

from tidelog.errors import InvalidError

__all__ = [
    "Flag",
    "LocalProcesses",
    "NoProcesses",
    "Pool",
    "ProcessGuard",
    "Processes",
    "RefusingLock",
    "TaskRunner",
    "check_process",
    "describe_process",
]

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


def check_process(opened_in: int, what: str) -> None:
    """Raises ``InvalidError`` in a forked child, which lacks the object's threads."""
    if os.getpid() != opened_in:
        raise InvalidError(
            f"{what}: was opened in another process: open the home again in this one"
        )


class Processes(Protocol):
    """Identifies processes."""

    def mark(self) -> str:
        """Returns a string by which others can identify this process."""
        ...

    def is_dead(self, mark: str) -> bool:
        """Returns True only if that process has certainly ended."""
        ...


def describe_process(mark: str) -> str:
    """Returns the host and process of a mark: ``vm/…|31864|…`` is ``vm, process 31864``."""
    where, _, rest = mark.partition("|")
    number = rest.partition("|")[0]
    return f"{where.partition('/')[0]}, process {number}" if number else where


class NoProcesses:
    """Knows nothing about any process."""

    def mark(self) -> str:
        return ""

    def is_dead(self, mark: str) -> bool:
        return False


class LocalProcesses:
    """Reads ``/proc``; knows nothing on systems without it."""

    def __init__(
        self, proc: Path = Path("/proc"), kill: Callable[[int, int], None] = os.kill
    ) -> None:
        self._proc = proc
        self._kill = kill

    def mark(self) -> str:
        view, started = self._view(), self._started(os.getpid())
        return f"{view}|{os.getpid()}|{started}" if view and started else ""

    def is_dead(self, mark: str) -> bool:
        view, _, rest = mark.partition("|")
        pid, _, started = rest.partition("|")
        if not view or not started or view != self._view() or not pid.isdecimal():
            return False
        found = self._started(int(pid))
        return self._is_unused(int(pid)) if found is None else found != started

    def _view(self) -> str:
        """Returns the machine, its boot, and the namespaces of process ids and times.

        Empty if ``/proc`` shows another namespace than ours: its ids would not be our ids.
        """
        try:
            if os.readlink(self._proc / "self") != str(os.getpid()):
                return ""
            boot = (self._proc / "sys/kernel/random/boot_id").read_text().strip()
            space = os.readlink(self._proc / "self/ns/pid")
        except OSError:
            return ""
        times = ""  # a time namespace shifts a process's start time
        with contextlib.suppress(OSError):
            times = os.readlink(self._proc / "self/ns/time")
        return f"{socket.gethostname()}/{boot}/{space}/{times}"

    def _started(self, pid: int) -> str | None:
        """Returns when a process started, which detects a reused process id.

        Empty for a process that has ended but was not waited for; None if ``/proc`` does not show
        it.
        """
        try:
            stat = (self._proc / str(pid) / "stat").read_text()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()
        ended = fields[0] in ("Z", "X") and int(fields[17]) <= 1  # otherwise its threads live on
        return "" if ended else fields[19]

    def _is_unused(self, pid: int) -> bool:
        """Returns whether the kernel says that no process has this id.

        A process that we are not allowed to signal exists.
        """
        try:
            self._kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False


_: tuple[type[Processes], type[Processes]] = (NoProcesses, LocalProcesses)


class ProcessGuard:
    """Knows whether this process created an object or inherited it through a fork."""

    __slots__ = ("__weakref__", "_on_fork", "is_foreign", "what")

    def __init__(self, what: str, on_fork: Callable[[], None] | None = None) -> None:
        self.what = what
        self.is_foreign = False
        self._on_fork = on_fork  # runs in a child; must not lock or raise
        _guards.add(self)

    def check(self) -> None:
        """Raises ``InvalidError`` in a process that inherited the object."""
        if self.is_foreign:
            self.refuse()

    def refuse(self) -> NoReturn:
        """Raises the ``InvalidError`` for an object that another process created."""
        raise InvalidError(
            f"{self.what}: was opened in another process: open the home again in this one"
        )

    def _enter_child(self) -> None:
        self.is_foreign = True
        if self._on_fork is not None:
            self._on_fork()


class RefusingLock:
    """Replaces an inherited lock or condition: entering it raises ``InvalidError``."""

    def __init__(self, guard: ProcessGuard) -> None:
        self._guard = guard

    def __enter__(self) -> NoReturn:
        self._guard.refuse()

    def __exit__(self, *_: Any) -> None:
        return None


_guards: weakref.WeakSet[ProcessGuard] = weakref.WeakSet()


def _mark_inherited() -> None:
    for guard in list(_guards):
        guard._enter_child()


os.register_at_fork(after_in_child=_mark_inherited)
