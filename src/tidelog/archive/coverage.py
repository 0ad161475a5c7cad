"""What a generation covers of its source, and what another generation lacks of that.

A generation covers, of each source partition, everything from its beginning to its position except
its gaps. If positions are offsets, coverage is a set of intervals. If the pipeline numbers events
itself (Kinesis, Scylla), readers of the archive have positions that are borders of commits. Then
another generation covers a commit only if it has both of its borders.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tidelog.connectors.archive.source import ArchiveSource
from tidelog.connectors.source import Bounds, Source, SourcePartition
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import read_commits_to, read_partitions, read_progress
from tidelog.model.archive import Archive
from tidelog.model.pipeline import BeginReason, Gap, Progress

__all__ = [
    "Coverage",
    "MissingRange",
    "are_offsets",
    "held_spans",
    "is_behind",
    "is_same_sequence",
    "missing_ranges",
    "read_covered",
    "without",
]

Interval = tuple[int, int]
"""Offsets from the first up to, not including, the second."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a generation covers of one source partition."""

    begin: str
    end: str
    incarnation: str = ""
    gaps: tuple[Gap, ...] = ()
    borders: tuple[str, ...] = ()  # of its commits, in order, if positions are not offsets
    begins: BeginReason = "earliest"
    note: bytes = b""  # identifies it for a source that tracks

    @property
    def by_offset(self) -> bool:
        """Returns whether its positions are offsets, which can be cut anywhere."""
        return are_offsets(self.begin, self.end, *self.borders)

    def intervals(self) -> list[Interval]:
        """Returns the covered offsets, including gaps that are only some of their offsets."""
        gaps = [(int(gap.start), int(gap.end)) for gap in self.gaps if not gap.is_partial]
        return without([(int(self.begin), int(self.end))], gaps)


@dataclass(frozen=True, slots=True)
class MissingRange:
    """A part of a source partition that one generation covers and another does not."""

    partition: str
    start: str
    end: str

    @property
    def text(self) -> str:
        """Returns its name for messages."""
        return f"`{self.partition}` from {self.start} to {self.end}"


def are_offsets(*positions: str) -> bool:
    """Returns whether positions are offsets."""
    return all(each.isascii() and each.isdecimal() for each in positions)


def without(intervals: Iterable[Interval], taken: Iterable[Interval]) -> list[Interval]:
    """Returns intervals minus the ``taken`` ones."""
    left = sorted(each for each in intervals if each[0] < each[1])
    for start, end in taken:
        pieces = [((a, min(b, start)), (max(a, end), b)) for a, b in left]
        left = [each for pair in pieces for each in pair if each[0] < each[1]]
    return left


def is_same_sequence(
    one: Coverage | Bounds | Progress, other: Coverage | Bounds | Progress
) -> bool:
    """Returns whether positions of two source partitions with one name may be compared.

    An unknown incarnation may be any: a backup has none.
    """
    return not one.incarnation or not other.incarnation or one.incarnation == other.incarnation


def held_spans(
    source: Source, partition: SourcePartition, held: Bounds, covered: Coverage
) -> list[Interval]:
    """Returns which covered offsets of a source partition its source still holds.

    Excludes another incarnation, and the source's own gaps.
    """
    if not is_same_sequence(held, covered) or not are_offsets(held.first, held.end):
        return []
    spans = [(int(held.first), int(held.end))]
    if isinstance(source, ArchiveSource):
        begin, end = int(covered.begin), int(covered.end)
        gaps = [(int(gap.start), int(gap.end)) for gap in source.gaps(partition)]
        spans = without(spans, [(max(begin, a), min(end, b)) for a, b in gaps if a < end])
    return spans


def read_covered(context: Context, pipeline: str, partition: str) -> Coverage | None:
    """Returns what a pipeline covers of a source partition; None if it has not begun."""
    head = read_progress(context, pipeline, partition)
    if head is None:
        return None
    begin = head.position if head.begin is None else head.begin.position
    borders: tuple[str, ...] = ()
    if not are_offsets(begin, head.position):
        commits = read_commits_to(context, pipeline, partition, head.position)
        borders = (*(commit.start for commit in commits), head.position)
    begins: BeginReason = "earliest" if head.begin is None else head.begin.reason
    return Coverage(begin, head.position, head.incarnation, head.gaps, borders, begins, head.note)


def is_behind(context: Context, archive: Archive, old: int, new: int) -> bool:
    """Returns whether a generation is behind another one's position anywhere."""
    for partition in read_partitions(context, archive.pipeline(old)):
        before = read_progress(context, archive.pipeline(old), partition)
        now = read_progress(context, archive.pipeline(new), partition)
        if before is None or (now is not None and now.position == before.position):
            continue
        if now is None or not are_offsets(now.position, before.position):
            return True
        if int(now.position) < int(before.position):
            return True
    return False


def missing_ranges(context: Context, archive: Archive, old: int, new: int) -> list[MissingRange]:
    """Returns what one generation covers and another does not, by source partition.

    ``lacking`` compares what their files hold within that.
    """
    missing: list[MissingRange] = []
    for partition in read_partitions(context, archive.pipeline(old)):
        before = read_covered(context, archive.pipeline(old), partition)
        if before is not None:
            now = read_covered(context, archive.pipeline(new), partition)
            missing += _lacks(partition, before, now)
    return missing


def _lacks(partition: str, old: Coverage, new: Coverage | None) -> list[MissingRange]:
    """Returns the ranges of one source partition that the new generation lacks."""
    if new is not None and not is_same_sequence(old, new):
        new = None  # another topic or file with this name
    if not old.by_offset:
        return _lacks_borders(partition, old.borders, () if new is None else new.borders)
    have = new.intervals() if new is not None and new.by_offset else []
    left = without(old.intervals(), have)
    return [MissingRange(partition, str(start), str(end)) for start, end in left]


def _lacks_borders(partition: str, old: Sequence[str], new: Sequence[str]) -> list[MissingRange]:
    known = set(new)
    left: list[MissingRange] = []
    if len(old) == 1 and old[0] not in known:  # nothing is committed, but a reader may begin there
        left.append(MissingRange(partition, old[0], old[0]))
    for start, end in pairwise(old):
        if start in known and end in known:
            continue
        if left and left[-1].end == start:
            left[-1] = MissingRange(partition, left[-1].start, end)
        else:
            left.append(MissingRange(partition, start, end))
    return left
