"""Times as people write them, and waits between attempts.

:class:`Backoff` computes exponential waits with jitter in the upper half, and limits them. It never
sleeps, so callers wait on their own clock.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tidelog.clock import Clock
from tidelog.errors import InvalidError
from tidelog.model import limits
from tidelog.model.event import check_timestamp, check_whole, from_iso

__all__ = [
    "Backoff",
    "duration_ms",
    "duration_text",
    "moment_ms",
    "rough_text",
]


_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def duration_ms(text: str | int) -> int:
    """Returns milliseconds, from an integer or from text such as ``500ms``, ``1s``, ``15m``."""
    if not isinstance(text, str):
        return check_whole("duration", text)
    found = re.fullmatch(r"([0-9]{1,15})(ms|s|m|h|d)", text.strip())
    if not found:
        raise InvalidError(
            f"duration `{text[:80]}`: give a number and a unit: 500ms, 1s, 15m, 2h, 7d"
        )
    value_ms = int(found[1]) * _UNITS_MS[found[2]]
    if value_ms > limits.TIMESTAMP_MS_END:
        raise InvalidError(f"duration `{text}`: is longer than there are times: give less")
    return value_ms


def duration_text(value_ms: int) -> str:
    """Returns a duration in the largest exact unit: ``10m`` for 600,000."""
    units = reversed(_UNITS_MS.items())
    name, unit_ms = next((each for each in units if value_ms % each[1] == 0), ("ms", 1))
    return f"{value_ms // unit_ms}{name}"


def rough_text(seconds: float) -> str:
    """Returns a duration as people say it, rounded: 3 s, 5 min, 2 h, 4 d."""
    for unit, length, until in (("s", 1, 90), ("min", 60, 5_400), ("h", 3_600, 172_800)):
        if seconds < until:
            return f"{max(0.0, seconds) / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def moment_ms(text: str, now_ms: int) -> int:
    """Returns milliseconds UTC, from ISO 8601 or from text relative to now such as ``-15m``."""
    if text.startswith("-"):
        return check_timestamp(max(0, now_ms - duration_ms(text[1:])))
    if text == "now":
        return now_ms
    try:
        return from_iso(text)
    except InvalidError as exc:
        raise InvalidError(f"{exc}, or -15m for 15 minutes ago") from exc


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
        for number in range(self.attempts - 1):
            yield self.delay_s(number, source)

    def delay_s(self, number: int, source: random.Random) -> float:
        """Returns the wait after an attempt, in seconds; the first attempt has number 0."""
        ceiling_ms = min(self.max_ms, self.base_ms * 2**number)
        return source.uniform(ceiling_ms / 2, ceiling_ms) / 1000
