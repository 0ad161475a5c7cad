"""Decides when a source partition is due: by size or age, whichever comes first.

Clocks only decide how much goes into a range, never what is in it. So every policy archives each
event once. The functions are pure, except for the time that callers pass in.

This module also decides what to do about a range that failed: end it earlier, or plan it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidelog.connectors.sink import RecordRefusedError
from tidelog.connectors.source import (
    ChangingReader,
    RangeReader,
    Source,
    SourcePartition,
    SourceRange,
    TimedSource,
)
from tidelog.errors import InvalidError, TidelogError, UnavailableError
from tidelog.model.limits import RANGE_CUTS_MAX
from tidelog.model.pipeline import offsets_between

__all__ = [
    "Due",
    "FilePolicy",
    "check_plan",
    "end_before",
    "parts_of",
]

_FIRST_GUESS_BYTES = 500  # of an event, before any was seen
_CUT_BYTES_MIN = 32_000_000  # of a task; less is not worth its start, and makes small files


@dataclass(frozen=True, slots=True)
class FilePolicy:
    """How large and old a file may get before it is closed."""

    max_bytes: int = 200_000_000  # of events as received, per source partition
    max_age_ms: int = 3_600_000  # since the first waiting event was seen

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.max_age_ms < 1:
            raise InvalidError(
                f"policy: max_bytes is {self.max_bytes} and max_age {self.max_age_ms} ms: "
                "give more than 0"
            )


@dataclass
class Due:
    """Tracks since when events wait, and how large they are."""

    policy: FilePolicy
    _since_s: dict[SourcePartition, float] = field(default_factory=dict)
    _event_bytes: float = _FIRST_GUESS_BYTES

    def is_due(self, partition: SourcePartition, waiting: int, now_s: float) -> bool:
        """Returns whether a partition with this many waiting events is due."""
        if waiting <= 0:
            self._since_s.pop(partition, None)
            return False
        since_s = self._since_s.setdefault(partition, now_s)
        if waiting * self._event_bytes >= self.policy.max_bytes:
            return True
        return (now_s - since_s) * 1000 >= self.policy.max_age_ms

    def done(self, partition: SourcePartition, events: int, size: int) -> None:
        """Learns from a committed range."""
        self._since_s.pop(partition, None)
        if events and size:
            self._event_bytes = 0.7 * self._event_bytes + 0.3 * size / events

    def events_max(self) -> int:
        """Returns how many events make a range of the target size."""
        return max(1_000, int(self.policy.max_bytes / self._event_bytes))

    def cut_events_min(self, follow: bool) -> int:
        """Returns how many events a cut has at least.

        A run that follows cuts only a backlog, so that its files keep their size.
        """
        if follow:
            return self.events_max()
        return max(1_000, int(min(_CUT_BYTES_MIN, self.policy.max_bytes) / self._event_bytes))


def parts_of(
    waiting: Mapping[SourcePartition, int], tasks: int, events_min: int
) -> dict[SourcePartition, int]:
    """Returns in how many parts to read each source partition, by how many events wait there.

    All parts together are about as many as ``tasks`` that run at once; each has ``events_min``
    events or more.
    """
    total = max(1, sum(waiting.values()))
    parts = {}
    for partition, events in waiting.items():
        share = -(-tasks * events // total)
        parts[partition] = max(1, min(share, events // events_min, RANGE_CUTS_MAX))
    return parts


def end_before(source: Source, range: SourceRange, error: TidelogError) -> str | None:
    """Returns where to end a range before the record that a sink refused.

    Returns None for other errors, or if nothing is before the record. If positions are times, the
    range ends before the record's time. If they are neither times nor offsets, it ends after as
    many events as precede the record, or after the batches before it if the source cannot stop
    inside a record.
    """
    if not isinstance(error, RecordRefusedError):
        return None
    offset = int(error.context["offset"])
    if offsets_between(range.start, range.limit) is not None:
        position = str(offset)
        is_between = source.before(range.start, position) and source.before(position, range.limit)
        return position if is_between else None
    if isinstance(source, TimedSource):
        limit = source.limit_before(range.limit, int(error.context["time_ms"]))
        is_between = source.before(range.start, limit) and source.before(limit, range.limit)
        return limit if is_between else None
    for events in (offset - range.ordinal, int(error.context.get("read", 0))):
        limit = source.cut(range.start, range.limit, events) if events > 0 else range.limit
        if limit != range.limit:  # a cut never exceeds the one before, so this ends
            return limit
    return None


def check_plan(source: Source, reader: RangeReader) -> None:
    """Raises ``UnavailableError`` if files of a range changed since it was planned.

    An erasure replaces files of a source archive, and a replay of its dead letters deletes some.
    That is not damage: the range is planned and read again.
    """
    now, partition = source.reader(reader.range), reader.range.partition.text
    if now != reader or (isinstance(now, ChangingReader) and now.is_changing):
        raise UnavailableError(
            f"source partition `{partition}`: its files are being changed by "
            "an erasure or a replay of dead letters: read it again",
            partition=partition,
        )
