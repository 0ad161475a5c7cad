"""Time slots: how a run is found by time, however wide it is.

Slots are dyadic: level L has slots of resolution times 2^L. A run is listed in the lowest level
where its time range touches at most two slots. So it costs at most two rows, however wide it is,
and a lookup scans the overlapping slots of each level.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.errors import InternalError
from tidelog.model import layout
from tidelog.model.limits import TIMESTAMP_MS_END
from tidelog.model.partition_rows import Run

__all__ = ["journal_slots", "level_count", "overlapping", "slots_of"]


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
