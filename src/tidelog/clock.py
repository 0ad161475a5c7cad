"""Time, ids and randomness: the only module that touches the system's own.

Everything else receives a :class:`Clock` and an :class:`Ids` through its constructor, so that a
simulation can run the same code in fake time and repeat a run from its seed. The linter bans
``time.time``, ``time.sleep``, ``datetime.now``, ``uuid4`` and the global ``random`` elsewhere.
"""

from __future__ import annotations

import random
import time
from typing import Protocol

__all__ = ["Clock", "Ids", "RandomIds", "SystemClock", "system_random"]


class Clock(Protocol):
    """What time it is, and waiting."""

    def now_ms(self) -> int:
        """Milliseconds since 1970 UTC. May jump; no safety rests on it."""
        ...

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back; only differences mean anything."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return after at least this long; at once when it is zero or less."""
        ...


class Ids(Protocol):
    """A source of names that nobody else will ever give out."""

    def new(self) -> str:
        """A fresh id: 32 lower-case hexadecimal digits, 128 random bits."""
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
    """Ids from a random source; the system's own where none is given."""

    def __init__(self, source: random.Random | None = None) -> None:
        self._source = source or system_random()

    def new(self) -> str:
        return f"{self._source.getrandbits(128):032x}"


def system_random() -> random.Random:
    """Randomness from the operating system: safe over forks, and for ids."""
    return random.SystemRandom()


_clock: type[Clock] = SystemClock
_ids: type[Ids] = RandomIds
