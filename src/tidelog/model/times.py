"""Times and durations as people write them, and the time slots by which runs are found.

Slots are dyadic: level L has slots of resolution times 2^L. A run is listed in the lowest level
where its time range touches at most two slots. So it costs at most two rows, however wide it is,
and a lookup scans the overlapping slots of each level.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tidelog.errors import InternalError, InvalidError
from tidelog.model import layout, limits
from tidelog.model.event import check_timestamp, from_iso
from tidelog.model.limits import TIMESTAMP_MS_END
from tidelog.model.partition_rows import Run

__all__ = ["duration_ms", "duration_text", "journal_slots", "level_count", "moment_ms", "slots_of"]

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


def slots_of(first_ms: int, last_ms: int, resolution_ms: int) -> tuple[int, list[int]]:
    """Returns the level of a range of times (inclusive), and the starts of its one or two slots."""
    if not 0 <= first_ms <= last_ms:
        raise InternalError(f"slots of a range that runs backwards: {first_ms} to {last_ms}")
    level, width = 0, resolution_ms
    while last_ms // width - first_ms // width > 1:
        level, width = level + 1, width * 2
    starts = range(first_ms // width, last_ms // width + 1)
    return level, [index * width for index in starts]


def journal_slots(run: Run, resolution_ms: int) -> dict[str, bytes]:
    """Returns the slot rows of a journal, and their value; none for one without events.

    Their names contain the id of its object, so that they are known without a read.
    """
    if not run.events:
        return {}
    journal_id = run.object.rpartition("_")[2].removesuffix(".parquet")
    level, starts = slots_of(run.first_ms, run.last_ms, resolution_ms)
    rows = (layout.slot_row(level, start, run.base, journal_id) for start in starts)
    return dict.fromkeys(rows, f"{run.end}j".encode())


def overlapping(start_ms: int, end_ms: int, resolution_ms: int) -> Iterator[tuple[int, int, int]]:
    """Yields for each level the first and the last slot start that ``[start, end)`` overlaps."""
    for level in range(level_count(resolution_ms)):
        width = resolution_ms << level
        yield level, start_ms // width * width, max(start_ms, end_ms - 1) // width * width


def level_count(resolution_ms: int) -> int:
    """Returns how many levels there are: the last one holds all time in one slot."""
    level = 0
    while resolution_ms << level < TIMESTAMP_MS_END:
        level += 1
    return level + 1
