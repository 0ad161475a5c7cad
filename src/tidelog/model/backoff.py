"""How long to wait before the next try: exponential, jittered over its upper half, and with an end.

Pure: it computes delays and never sleeps, so that callers wait on their own clock.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tidelog.errors import InvalidError

__all__ = ["Backoff"]


@dataclass(frozen=True, slots=True)
class Backoff:
    """A schedule of waits. ``attempts`` counts the first try, so 1 means: never repeat."""

    attempts: int = 8  # 3 to 6 s in all with the values below: outlasts a change of leaders
    base_ms: int = 50  # the first wait is up to this
    max_ms: int = 5_000  # no single wait is longer

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise InvalidError(f"backoff: attempts is {self.attempts}: give 1 or more")
        if not 0 <= self.base_ms <= self.max_ms:
            raise InvalidError(
                f"backoff: base_ms {self.base_ms} and max_ms {self.max_ms} contradict each other: "
                "0 <= base_ms <= max_ms must hold"
            )

    def delays_s(self, source: random.Random) -> Iterator[float]:
        """The waits between tries, in seconds: one fewer than ``attempts``."""
        for attempt in range(self.attempts - 1):
            ceiling_ms = min(self.max_ms, self.base_ms * 2**attempt)
            yield source.uniform(ceiling_ms / 2, ceiling_ms) / 1000
