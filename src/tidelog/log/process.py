"""Who this process is, and whether another one of the same machine is dead.

A lease of a process that is known to be dead needs no waiting. Only processes that share our
machine, its present boot and our view of process ids can be told; of all others we know nothing.
"""

from __future__ import annotations

import os
import socket
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

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def mark(self) -> str:
        started = self._started(os.getpid())
        return f"{self._view()}|{os.getpid()}|{started}" if started else ""

    def is_dead(self, mark: str) -> bool:
        view, _, rest = mark.partition("|")
        pid, _, started = rest.partition("|")
        if not view or view != self._view() or not pid.isdecimal():
            return False
        return self._started(int(pid)) != started

    def _view(self) -> str:
        """The machine, its boot, and which processes can be seen from here."""
        try:
            boot = (self._proc / "sys/kernel/random/boot_id").read_text().strip()
            space = os.readlink(self._proc / "self/ns/pid")
        except OSError:
            return ""
        return f"{socket.gethostname()}/{boot}/{space}"

    def _started(self, pid: int) -> str:
        """When a process began, so that a process id that is used again is told apart."""
        try:
            stat = (self._proc / str(pid) / "stat").read_text()
        except OSError:
            return ""
        fields = stat.rpartition(")")[2].split()
        return "" if fields[0] in ("Z", "X") else fields[19]


_: tuple[type[Processes], type[Processes]] = (NoProcesses, LocalProcesses)
