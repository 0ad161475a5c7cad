"""Objects that belong to the process that made them.

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

import os
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from tidelog.errors import InvalidError

__all__ = ["ProcessGuard", "RefusingLock"]


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
