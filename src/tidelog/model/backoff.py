"""How long to wait before the next attempt: exponential, with jitter in the upper half, and
limited.

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
    """A schedule of waits. ``attempts`` includes the first one, so 1 means no retry."""

    attempts: int = 8  # 3 to 6 s in all with the values below: outlasts a leader election
    base_ms: int = 50  # upper limit of the first wait
    max_ms: int = 5_000  # upper limit of any wait
    # No attempt on a store or catalog starts later than this after the first.
    total_ms: int = 30_000

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
        """Yields the same waits, until the next attempt would start after ``total_ms``."""
        end_s = clock.monotonic_s() + self.total_ms / 1000  # counted from now, not from a failure

        def waits() -> Iterator[float]:
            for delay_s in self.delays_s(source):
                if clock.monotonic_s() + delay_s > end_s:
                    return
                yield delay_s

        return waits()

    def delays_s(self, source: random.Random) -> Iterator[float]:
        """Yields the waits between attempts, in seconds: one fewer than ``attempts``."""
        for attempt in range(self.attempts - 1):
            ceiling_ms = min(self.max_ms, self.base_ms * 2**attempt)
            yield source.uniform(ceiling_ms / 2, ceiling_ms) / 1000
