"""Which events of a page were amended: updated, or deleted; and where offsets have no event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tidelog.log.amended import pending
from tidelog.log.base import Log
from tidelog.log.read import Reader
from tidelog.log.topics import read_head
from tidelog.model.event import Event
from tidelog.model.run import Run
from tidelog.model.topic import Topic

__all__ = ["Gap", "Mark", "Marks", "read_marks", "with_gaps"]

_SHOWN_EACH = 3  # a longer row of deleted offsets is one line


@dataclass(frozen=True, slots=True)
class Mark:
    """What became of an event, as long as a row tells of it: until it is compiled in and swept."""

    kind: Literal["update", "delete"]
    at_ms: int
    sequence: int
    is_compiled: bool


@dataclass(frozen=True, slots=True)
class Gap:
    """Offsets whose events were deleted."""

    partition: int
    first: int
    last: int
    mark: Mark | None = None  # None: nothing but the audit tells of it any more

    @property
    def count(self) -> int:
        return self.last - self.first + 1


Marks = Mapping[tuple[int, int], Mark]


def read_marks(
    log: Log, topic: Topic, partition: int, start: int, end: int
) -> dict[tuple[int, int], Mark]:
    """The amendments of ``[start, end)``, or the first of very many, by partition and offset."""
    head, _ = read_head(log, topic, partition)
    found = pending(log, topic, partition, head, start, end)
    reader = Reader(log, topic, partition)
    marks: dict[tuple[int, int], Mark] = {}
    runs: list[Run] = []
    for offset, row in zip(found.offsets.tolist(), found.rows, strict=True):
        if not runs or offset >= runs[-1].end:
            runs = reader.runs(offset) if head.start <= offset < head.next else []
        holder = next((run for run in runs if run.base <= offset < run.end), None)
        journal = None if holder is None else holder.journal
        is_compiled = journal is not None and journal.applied >= row.sequence
        marks[partition, offset] = Mark(row.kind, row.at_ms, row.sequence, is_compiled)
    return marks


def with_gaps(
    partition: int, events: Sequence[Event], marks: Marks, bounds: tuple[int, int]
) -> list[Event | Gap]:
    """The events of consecutive offsets ``[start, end)``, and the gaps between them."""
    rows: list[Event | Gap] = []
    at, end = bounds
    for event in events:
        offset = event.position.offset
        rows += _gaps(partition, at, offset, marks)
        rows.append(event)
        at = offset + 1
    return [*rows, *_gaps(partition, at, end, marks)]


def _gaps(partition: int, start: int, end: int, marks: Marks) -> list[Gap]:
    if end <= start:
        return []
    if end - start > _SHOWN_EACH:
        return [Gap(partition, start, end - 1, marks.get((partition, start)))]
    return [Gap(partition, at, at, marks.get((partition, at))) for at in range(start, end)]
