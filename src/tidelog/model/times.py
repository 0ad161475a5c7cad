"""Times and durations as people write them."""

from __future__ import annotations

import re

from tidelog.errors import InvalidError
from tidelog.model.event import check_timestamp, from_iso

__all__ = ["duration_ms", "moment_ms"]

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def duration_ms(text: str | int) -> int:
    """Milliseconds, from a number of them or from text such as ``500ms``, ``1s``, ``15m``."""
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"(\d+)(ms|s|m|h|d)", text.strip())
    if not found:
        raise InvalidError(f"duration `{text}`: give a number and a unit: 500ms, 1s, 15m, 2h, 7d")
    return int(found[1]) * _UNITS_MS[found[2]]


def moment_ms(text: str, now_ms: int) -> int:
    """Milliseconds UTC, from ISO 8601 or from text relative to now such as ``-15m``."""
    if text.startswith("-"):
        return check_timestamp(max(0, now_ms - duration_ms(text[1:])))
    if text == "now":
        return now_ms
    return from_iso(text)
