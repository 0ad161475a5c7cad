"""Time, ids and randomness: the only module that uses the system's own.

Everything else receives a :class:`Clock` and an :class:`Ids` through its constructor, so that a
simulation can run the same code in fake time and repeat a run from its seed. The linter bans
``time.time``, ``time.sleep``, ``datetime.now``, ``uuid4`` and the global ``random`` elsewhere.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Protocol

__all__ = ["Clock", "Ids", "RandomIds", "SystemClock", "looks", "system_random"]


class Clock(Protocol):
    """Returns the time, and waits."""

    def now_ms(self) -> int:
        """Returns milliseconds since 1970 UTC. May jump, so safety never depends on it."""
        ...

    def monotonic_s(self) -> float:
        """Returns seconds on a clock that never goes back; only differences are meaningful."""
        ...

    def sleep(self, seconds: float) -> None:
        """Returns after at least this long; at once if it is zero or negative."""
        ...


class Ids(Protocol):
    """Generates unique names."""

    def new(self) -> str:
        """Returns a new id: 32 lowercase hexadecimal digits, 128 random bits."""
        ...


class SystemClock:
    """The machine's own time."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)


class RandomIds:
    """Ids from a random source; from the operating system's by default."""

    def __init__(self, source: random.Random | None = None) -> None:
        self._source = source or system_random()

    def new(self) -> str:
        return f"{self._source.getrandbits(128):032x}"


def system_random() -> random.Random:
    """Returns the operating system's randomness: safe across forks, and good enough for ids."""
    return random.SystemRandom()


def looks(clock: Clock, wait_s: float, every_s: float) -> Iterator[bool]:
    """Yields before each look at what others do, and waits in between.

    True means that this look is the last one, since ``wait_s`` are over: that is decided before the
    look, so that a process that was stopped for longer looks once more.
    """
    until_s = clock.monotonic_s() + wait_s
    while True:
        is_last = clock.monotonic_s() >= until_s
        yield is_last
        if is_last:
            return
        clock.sleep(every_s)


_clock: type[Clock] = SystemClock
_ids: type[Ids] = RandomIds
