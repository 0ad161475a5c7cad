"""Who this process is, and whether another one of the same machine is dead.

A lease of a process that is known to be dead needs no waiting. Only certain knowledge counts. We
judge a process that shares our machine, its present boot and our namespaces of process ids and
times, and of all others we know nothing. ``/proc`` may hide a living process of another user
(``hidepid``, ``ProtectProc``), so one that is not shown there is dead only if the kernel says that
no process has its id.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tidelog.errors import InvalidError

__all__ = ["LocalProcesses", "NoProcesses", "Processes", "check_process"]


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
