"""Who this process is, and whether another one of the same machine is dead.

A lease of a process that is known to be dead needs no waiting. Only certain knowledge counts. We
judge a process that shares our machine, its present boot and our namespaces of process ids and
times, and of all others we know nothing. ``/proc`` may hide a living process of another user
(``hidepid``, ``ProtectProc``), so one that is not shown there is dead only if the kernel says that
no process has its id.

Objects that belong to the process that made them.

A forked child inherits buffers, leases and locks, but none of the threads behind them. What is
buffered is the parent's to write, a lease the parent's to release, and a lock that another thread
held at the fork is never free again. So an object with any of these makes a :class:`ProcessGuard`.
In a child every use of the object is refused by one line, and nothing of it is written there.

Guards are marked when the process forks, so checking one costs no system call, and a
:class:`RefusingLock` in the place of the object's lock makes a check on hot paths unnecessary.

Locks of native libraries are out of reach: a child may wait for ever for one of Arrow's that
another thread held. So a process forks while no other of its threads works, or uses ``spawn``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

from tidelog.errors import InvalidError

__all__ = [
    "LocalProcesses",
    "NoProcesses",
    "ProcessGuard",
    "Processes",
    "RefusingLock",
    "check_process",
]


def check_process(opened_in: int, what: str) -> None:
    """Refuse use in a forked child, where the threads behind it are gone."""
    if os.getpid() != opened_in:
        raise InvalidError(
            f"{what}: was opened in another process: open the home again in this one"
        )


class Processes(Protocol):
    """Marks of processes."""

    def mark(self) -> str:
        """What others can tell this process by."""
        ...

    def is_dead(self, mark: str) -> bool:
        """True only when that process has certainly ended."""
        ...


class NoProcesses:
    """Knows nothing of any process."""

    def mark(self) -> str:
        return ""

    def is_dead(self, mark: str) -> bool:
        return False


class LocalProcesses:
    """Reads ``/proc``; where there is none, it knows nothing."""

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
        """The machine, its boot, and which process ids and times are seen from here.

        Empty where ``/proc`` shows another namespace than ours: its ids would not be our ids.
        """
        try:
            if os.readlink(self._proc / "self") != str(os.getpid()):
                return ""
            boot = (self._proc / "sys/kernel/random/boot_id").read_text().strip()
            space = os.readlink(self._proc / "self/ns/pid")
        except OSError:
            return ""
        times = ""  # namespaces of time shift when a process seems to have begun
        with contextlib.suppress(OSError):
            times = os.readlink(self._proc / "self/ns/time")
        return f"{socket.gethostname()}/{boot}/{space}/{times}"

    def _started(self, pid: int) -> str | None:
        """When a process began, which shows that a process id is used again.

        Empty for one that has ended and was not waited for, None where nothing is shown.
        """
        try:
            stat = (self._proc / str(pid) / "stat").read_text()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()
        ended = fields[0] in ("Z", "X") and int(fields[17]) <= 1  # else its threads live on
        return "" if ended else fields[19]

    def _is_unused(self, pid: int) -> bool:
        """Whether the kernel says that no process has this id; one that we may not signal has."""
        try:
            self._kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False


_: tuple[type[Processes], type[Processes]] = (NoProcesses, LocalProcesses)


class ProcessGuard:
    """Knows whether this process made an object, or inherited it by a fork."""

    __slots__ = ("__weakref__", "_on_fork", "is_foreign", "what")

    def __init__(self, what: str, on_fork: Callable[[], None] | None = None) -> None:
        self.what = what
        self.is_foreign = False
        self._on_fork = on_fork  # called in a child; must take no lock and raise nothing
        _guards.add(self)

    def check(self) -> None:
        """Raise ``InvalidError`` in a process that inherited the object."""
        if self.is_foreign:
            self.refuse()

    def refuse(self) -> NoReturn:
        """Raise the ``InvalidError`` of an object that another process made."""
        raise InvalidError(
            f"{self.what}: was opened in another process: open the home again in this one"
        )

    def _enter_child(self) -> None:
        self.is_foreign = True
        if self._on_fork is not None:
            self._on_fork()


class RefusingLock:
    """Takes the place of an inherited lock or condition: entering it raises ``InvalidError``."""

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
