"""Times and durations as people write them."""

from __future__ import annotations

import re

from tidelog.errors import InvalidError
from tidelog.model import limits
from tidelog.model.event import check_timestamp, from_iso

__all__ = ["duration_ms", "duration_text", "moment_ms"]

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def duration_ms(text: str | int) -> int:
    """Returns milliseconds, from an integer or from text such as ``500ms``, ``1s``, ``15m``."""
    if isinstance(text, int):
        return text
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


def moment_ms(text: str, now_ms: int) -> int:
    """Returns milliseconds UTC, from ISO 8601 or from text relative to now such as ``-15m``."""
    if text.startswith("-"):
        return check_timestamp(max(0, now_ms - duration_ms(text[1:])))
    if text == "now":
        return now_ms
    return from_iso(text)
