"""Filters of Spark's ``where``: which partitions, offsets, times and rows a query wants.

Spark passes the parts of a ``where`` that are joined by AND. The data source applies a filter by
itself if it understands all of it, and Spark does not check it again. A list of offsets or times
narrows the read, and Spark checks the rows. Everything else stays with Spark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from tidelog.codec.journal_file import RowGroup
from tidelog.model.topic import Run

__all__ = ["ALL_TIMES", "EVERYTHING", "EventTimes", "PushedFilter", "push"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ALWAYS = ("topic", "partition", "offset", "timestamp")  # columns that are never null
_SETS = {"topic": "topics", "partition": "partitions", "id": "ids", "key": "keys"}
_MEMBERS_MAX = 10_000  # of a list that tasks check; Spark itself checks a longer one


@dataclass(frozen=True, slots=True)
class EventTimes:
    """Event times ``[start, end)``; None is open."""

    start_ms: int | None = None
    end_ms: int | None = None

    def miss(self, run: Run | RowGroup) -> bool:
        """Returns whether no event of a run or row group is within."""
        start_ms, end_ms = self.start_ms, self.end_ms
        if start_ms is not None and end_ms is not None and start_ms >= end_ms:
            return True
        before = start_ms is not None and run.last_ms < start_ms
        return before or (end_ms is not None and run.first_ms >= end_ms)

    def hold(self, run: Run) -> bool:
        """Returns whether every event of a run is within."""
        after = self.start_ms is None or run.first_ms >= self.start_ms
        return after and (self.end_ms is None or run.last_ms < self.end_ms)

    def within(self, other: EventTimes) -> EventTimes:
        """Returns the times that are in both."""
        return EventTimes(*_tighter(self.start_ms, self.end_ms, other.start_ms, other.end_ms))

    def mask(self, batch: pa.RecordBatch) -> pa.Array:
        """Returns which events of a batch are within."""
        moments = batch.column("timestamp").cast(pa.int64())
        mask = pa.repeat(pa.scalar(True), batch.num_rows)
        if self.start_ms is not None:
            mask = pc.and_(mask, pc.greater_equal(moments, self.start_ms))
        if self.end_ms is not None:
            mask = pc.and_(mask, pc.less(moments, self.end_ms))
        return mask


ALL_TIMES = EventTimes()


@dataclass(frozen=True, slots=True)
class PushedFilter:
    """What a query wants of a topic; None is everything."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    start: int | None = None  # offsets, half open
    end: int | None = None
    times: EventTimes = ALL_TIMES
    ids: frozenset[str] | None = None
    keys: frozenset[bytes] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Returns the columns that tasks need in order to check rows."""
        wanted = (("id", self.ids), ("key", self.keys))
        return tuple(name for name, members in wanted if members is not None)

    def mask(self, batch: pa.RecordBatch) -> pa.Array | None:
        """Returns which events of a batch have a wanted id and key; None for all."""
        mask = None
        for name in self.columns:
            column = batch.column(name)
            members: frozenset[Any] = (self.ids if name == "id" else self.keys) or frozenset()
            found = pc.is_in(column, value_set=pa.array(sorted(members), column.type))
            mask = found if mask is None else pc.and_(mask, found)
        return mask


EVERYTHING = PushedFilter()


def push(filters: Sequence[Filter]) -> tuple[PushedFilter, list[Filter]]:
    """Returns what the filters say together, and those that Spark still has to check."""
    pushed, rest = EVERYTHING, []
    for each in filters:
        found, is_exact = _narrowed(pushed, each)
        pushed = found
        if not is_exact:
            rest.append(each)
    return pushed, rest


def _narrowed(pushed: PushedFilter, given: Filter) -> tuple[PushedFilter, bool]:
    """Returns the narrower filter, and whether it says all that ``given`` says."""
    path = getattr(given, "attribute", None)
    if not isinstance(path, tuple) or len(path) != 1:
        return pushed, False
    name, value = path[0], getattr(given, "value", None)
    if isinstance(given, IsNotNull):
        return pushed, name in _ALWAYS
    if isinstance(given, In):
        members = [each for each in value or () if each is not None]  # null is equal to nothing
        return _one_of(pushed, name, members)
    if name in _SETS and value is not None and isinstance(given, EqualTo | EqualNullSafe):
        return _one_of(pushed, name, [value])
    return _compared(pushed, given, name, value)


def _compared(
    pushed: PushedFilter, given: Filter, name: str, value: Any
) -> tuple[PushedFilter, bool]:
    """Narrows offsets and times by a comparison."""
    if name == "timestamp" and isinstance(value, datetime) and value.tzinfo is not None:
        bounds = _bounds(given, (value - _EPOCH) // timedelta(microseconds=1), 1_000)
        times = EventTimes(*(bounds or (None, None)))
        return replace(pushed, times=pushed.times.within(times)), bounds is not None
    if name == "offset" and isinstance(value, int):
        bounds = _bounds(given, value, 1)
        start, end = _tighter(pushed.start, pushed.end, *(bounds or (None, None)))
        return replace(pushed, start=start, end=end), bounds is not None
    return pushed, False


def _one_of(pushed: PushedFilter, name: str, members: list[Any]) -> tuple[PushedFilter, bool]:
    if name in _SETS:
        if len(members) > _MEMBERS_MAX:
            return pushed, False
        before = getattr(pushed, _SETS[name])
        wanted: Any = frozenset(members) if before is None else before & frozenset(members)
        change: dict[str, Any] = {_SETS[name]: wanted}
        return replace(pushed, **change), True
    if not members or name not in ("offset", "timestamp"):
        return pushed, False
    low, _ = _narrowed(pushed, GreaterThanOrEqual((name,), min(members)))
    both, _ = _narrowed(low, LessThanOrEqual((name,), max(members)))
    return both, len(members) == 1


def _bounds(given: Filter, value: int, unit: int) -> tuple[int | None, int | None] | None:
    """Returns the ``[start, end)`` of a comparison, in units of the column."""
    up, down = -(-value // unit), value // unit
    if isinstance(given, EqualTo | EqualNullSafe):
        return up, down + 1  # empty if the column has no such value
    if isinstance(given, GreaterThan):
        return down + 1, None
    if isinstance(given, GreaterThanOrEqual):
        return up, None
    if isinstance(given, LessThan):
        return None, up
    if isinstance(given, LessThanOrEqual):
        return None, down + 1
    return None


def _tighter(
    start: int | None, end: int | None, other_start: int | None, other_end: int | None
) -> tuple[int | None, int | None]:
    starts = [each for each in (start, other_start) if each is not None]
    ends = [each for each in (end, other_end) if each is not None]
    return max(starts, default=None), min(ends, default=None)
