"""A clock that moves only on request, and ids that repeat from a seed."""

from __future__ import annotations

import random

from tidelog.clock import Clock, Ids, RandomIds

__all__ = ["FakeClock", "seeded_ids"]


class FakeClock:
    """Time for tests: ``sleep`` returns at once and moves the clock by that time."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = float(now_ms)
        self._monotonic_s = 1_000.0

    def now_ms(self) -> int:
        return int(self._now_ms)

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def sleep(self, seconds: float) -> None:
        self.advance(max(0.0, seconds))

    def advance(self, seconds: float) -> None:
        """Lets time pass on both clocks."""
        self._now_ms += seconds * 1000
        self._monotonic_s += seconds

    def jump(self, seconds: float) -> None:
        """Sets the wall clock forward or back, like an operator or a bad time server."""
        self._now_ms += seconds * 1000


def seeded_ids(seed: int) -> Ids:
    """Returns ids that repeat in the same order for the same seed."""
    return RandomIds(random.Random(seed))


_: type[Clock] = FakeClock
