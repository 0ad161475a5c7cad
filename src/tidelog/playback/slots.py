"""Finds the runs of a partition that overlap a time range, by their slot rows.

A run is in the lowest level of slots where it touches at most two (``model.times``). So a lookup
reads, for each level, the rows of the slots that the range overlaps: one range scan, which returns
only existing rows, however long the gaps. Levels without rows cost nothing: reading the next row
after a level's range skips all of them at once.

The scans are lazy, so memory does not grow with the range. They show every run that existed when
they began. Journals may replace runs during the scans, and then there may be new rows before the
time that was reached. So a caller compares the head's ``compiled`` after each read, and opens the
scans again at that time if it has changed (``run_queue.SwapGuard``).

The value of a run's slot row is its end; a journal's also has a ``j``. A row without it below the
head's ``journaled`` is left from a run that a journal replaced.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from tidelog.catalog.base import Row
from tidelog.context import Context
from tidelog.errors import CorruptError
from tidelog.model import layout
from tidelog.model.partition_rows import Run, decode_row
from tidelog.model.playback import Floors, TimeRange
from tidelog.model.times import level_count
from tidelog.model.topic import Topic

__all__ = ["PartitionSlots", "SlotEntry", "floors_of"]

_CLOSE = 8  # up to this ratio of distance to length, one scan reads several runs


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """A slot row: a run has, or may have, events in a slot."""

    start_ms: int  # of the slot
    end_ms: int
    base: int  # of the run
    end: int
    is_journal: bool = False


class PartitionSlots:
    """The time index of one partition, for one range; below ``journaled`` there are journals."""

    def __init__(
        self, context: Context, topic: Topic, partition: int, range: TimeRange, journaled: int = 0
    ) -> None:
        self._context = context
        self._journaled = journaled
        self._slot_ms = topic.slot_ms
        self._range = range
        self._where = layout.topic_partition(topic.incarnation, partition)
        self._what = f"`{topic.name}/{partition}`"
        self._levels = list(self._levels_with_rows())

    def by_start(self) -> Iterator[SlotEntry]:
        """Yields all rows by the start of their slots. A run may appear twice."""
        return heapq.merge(*map(self._rows, self._levels), key=attrgetter("start_ms"))

    def by_end(self) -> Iterator[SlotEntry]:
        """Yields all rows by the end of their slots."""
        return heapq.merge(*map(self._rows, self._levels), key=attrgetter("end_ms"))

    def runs(self, listed: Sequence[SlotEntry]) -> dict[int, Run]:
        """Returns the runs of some rows, by base; omits a run whose row is deleted."""
        found: dict[int, Run] = {}
        for is_journal, name in ((False, layout.run_row), (True, layout.journal_row)):
            some = [each for each in listed if each.is_journal == is_journal]
            for group in _close_together(some):
                found |= self._named(name, group[0].base, group[-1].base)
        return {each.base: found[each.base] for each in listed if each.base in found}

    def _named(self, name: Callable[[int], str], first: int, last: int) -> dict[int, Run]:
        """Returns the rows of one kind between two bases."""
        if first == last:
            row = self._context.catalog.get(self._where, name(first))
            rows: Iterable[Row] = [] if row is None else [row]
        else:
            rows = self._context.catalog.scan(self._where, name(first), name(last + 1))
        runs = (decode_row(row.value, Run, f"a run of {self._what}") for row in rows)
        return {run.base: run for run in runs}

    def _levels_with_rows(self) -> Iterator[int]:
        """Yields levels with a row in the range: one read per level that has any row at all."""
        level = 0
        while level < level_count(self._slot_ms) and self._range.start_ms < self._range.end_ms:
            first, end = self._bounds(level)
            row = next(iter(self._context.catalog.scan(self._where, first, "slot0", 1)), None)
            if row is None:
                return
            if row.row < end:
                yield level
                level += 1
            else:
                level = max(level + 1, int(row.row[5:7]))

    def _bounds(self, level: int) -> tuple[str, str]:
        width = self._slot_ms << level
        start = self._range.start_ms // width * width
        last = (self._range.end_ms - 1) // width * width
        return layout.slot_rows(level, start, last)

    def _rows(self, level: int) -> Iterator[SlotEntry]:
        width = self._slot_ms << level
        for row in self._context.catalog.scan(self._where, *self._bounds(level)):
            is_journal = row.value.endswith(b"j")
            try:
                start_ms, base = layout.slot_place(row.row)
                end = int(row.value.removesuffix(b"j"))
            except ValueError as exc:
                raise CorruptError(
                    f"row `{row.row}` of {self._what}: is no slot row ({exc}): keep it, and run "
                    "`tidelog verify`"
                ) from exc
            if is_journal or base >= self._journaled:
                yield SlotEntry(start_ms, start_ms + width, base, end, is_journal)


def floors_of(slots: PartitionSlots, bounds: tuple[int, int], entries: int) -> Floors:
    """Returns the least offsets of ``[start, end)`` that are needed, in few entries."""
    start, end = bounds
    until: list[int] = []
    least: list[int] = []
    rows, each = 0, 1  # how many rows make one entry
    for listed in slots.by_end():
        if listed.base >= end or listed.end <= start:
            continue
        base = max(listed.base, start)
        if rows % each:
            until[-1], least[-1] = listed.end_ms, min(least[-1], base)
        else:
            until.append(listed.end_ms)
            least.append(base)
        rows += 1
        if len(until) > 2 * entries:
            until, least = until[1::2] + until[-1:], [min(p) for p in _pairs(least)]
            each *= 2
    for index in range(len(least) - 2, -1, -1):
        least[index] = min(least[index], least[index + 1])
    return Floors(tuple(until), tuple(least))


def _pairs(values: list[int]) -> Iterator[list[int]]:
    return (values[first : first + 2] for first in range(0, len(values), 2))


def _close_together(listed: Sequence[SlotEntry]) -> Iterator[list[SlotEntry]]:
    """Yields groups of runs so close that one scan is cheaper than many lookups."""
    group: list[SlotEntry] = []
    for each in sorted(listed, key=attrgetter("base")):
        if group and each.base - group[-1].end > _CLOSE * (group[-1].end - group[-1].base):
            yield group
            group = []
        group.append(each)
    if group:
        yield group
