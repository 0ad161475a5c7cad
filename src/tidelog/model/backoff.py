"""How long to wait before the next try: exponential, jittered over its upper half, and with an end.

It computes delays and never sleeps, so that callers wait on their own clock.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tidelog.clock import Clock
from tidelog.errors import InvalidError

__all__ = ["Backoff"]


@dataclass(frozen=True, slots=True)
class Backoff:
    """A schedule of waits. ``attempts`` counts the first try, so 1 means: never repeat."""

    attempts: int = 8  # 3 to 6 s in all with the values below: outlasts a change of leaders
    base_ms: int = 50  # the first wait is up to this
    max_ms: int = 5_000  # no single wait is longer
    total_ms: int = 30_000  # no try of a store or catalog begins later than this after the first

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise InvalidError(f"backoff: attempts is {self.attempts}: give 1 or more")
        if not 0 <= self.base_ms <= self.max_ms:
            raise InvalidError(
                f"backoff: base_ms {self.base_ms} and max_ms {self.max_ms} contradict each other: "
                "0 <= base_ms <= max_ms must hold"
            )
        if self.total_ms < 0:
            raise InvalidError(f"backoff: total_ms is {self.total_ms}: give 0 or more")

    def waits_s(self, source: random.Random, clock: Clock) -> Iterator[float]:
        """The same waits, ended when the next try would begin after ``total_ms``."""
        end_s = clock.monotonic_s() + self.total_ms / 1000  # counted from now, not from a failure

        def waits() -> Iterator[float]:
            for delay_s in self.delays_s(source):
                if clock.monotonic_s() + delay_s > end_s:
                    return
                yield delay_s

        return waits()

    def delays_s(self, source: random.Random) -> Iterator[float]:
        """The waits between tries, in seconds: one fewer than ``attempts``."""
        for attempt in range(self.attempts - 1):
            ceiling_ms = min(self.max_ms, self.base_ms * 2**attempt)
            yield source.uniform(ceiling_ms / 2, ceiling_ms) / 1000
