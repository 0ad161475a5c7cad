"""The protocols of sources: partitions that can be read from a position.

A position is text that only its source understands: an offset for Kafka and for topics, another
format elsewhere. It says where to resume, so the position after the last event of a range is the
start of the next range.

Every source implements :class:`Source`. The others say what only some sources can do; what uses
them asks with ``isinstance``. Whatever wraps a source passes on those in ``OPTIONAL``.

    BranchingSource    partitions end and others follow them (Kinesis): their order
    CompletingSource   it adds what other pipelines missed (a sweep of Scylla)
    DividingSource     several tasks may read one range (Kafka, topics, archives)
    ExplainingSource   it knows why an offset has no event: for the account
    GroupSource        positions are published as a consumer group's offsets (Kafka)
    KnowsEnds          it says where a deleted partition ended: for the gap
    ProbingSource      ends are times, so only a look shows whether an event waits
    ResumingSource     it deletes late (Kinesis): where to continue after a loss
    RowSource          it reads the row that a change belongs to (Scylla)
    SkippingSource     it does not read everything that is there: for the status
    SparseSource       large gaps between offsets: where the next event is
    TimedSource        positions are times (Scylla): where a range ends before an event
    TrackingSource     partitions are recognized by what was read of them (files)
    VanishingSource    partitions may be gone without an error (patterns, files)
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from tidelog.errors import (
    InternalError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    unexpected,
)
from tidelog.model.pipeline import BeginReason, Gap, offsets_between

__all__ = [
    "OPTIONAL",
    "Bounds",
    "BranchingSource",
    "ChangingReader",
    "Chunk",
    "CompletingSource",
    "CountedRange",
    "DirectReader",
    "DividingReader",
    "DividingSource",
    "ExplainingSource",
    "GroupSource",
    "KnownPartition",
    "KnowsEnds",
    "MissingOffsets",
    "Parent",
    "PlannedReader",
    "ProbingSource",
    "RangeReader",
    "ResumingSource",
    "RowSource",
    "SkippingSource",
    "Source",
    "SourcePartition",
    "SourceRange",
    "SparseSource",
    "TimedSource",
    "TrackingSource",
    "VanishedError",
    "VanishingSource",
    "bounds_apart",
    "check_incarnation",
    "check_wrapping",
    "checked_at_end",
    "even_cuts",
    "missing_in",
    "offset_at",
    "range_offsets",
    "waits",
]


@dataclass(frozen=True, slots=True, order=True)
class SourcePartition:
    """One ordered sequence of a source.

    A name contains no `/`, so the last one ends the topic and the text has exactly one meaning.
    """

    topic: str
    name: str  # a number for Kafka and for topics

    def __post_init__(self) -> None:
        if "/" in self.name:
            raise InvalidError(
                f"source partition `{self.topic}/{self.name}`: its name `{self.name}` has a `/`: "
                "escape it, or rename what it stands for"
            )

    @property
    def text(self) -> str:
        """Returns its name in rows and messages; unique among source partitions."""
        return f"{self.topic}/{self.name}"

    def number_in(self, topic: str) -> int | None:
        """Returns its number; None if its name is not a number, or it has another topic."""
        known = self.topic == topic and self.name.isascii() and self.name.isdecimal()
        return int(self.name) if known else None

    @classmethod
    def named(cls, text: str) -> SourcePartition:
        """Parses the text that rows and messages use."""
        topic, _, name = text.rpartition("/")
        return cls(topic, name)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a source partition holds now: positions ``[first, end)``; ``first`` is never past it."""

    first: str
    end: str
    incarnation: str = ""  # changes when the partition is created again, if the source can tell
    is_dense: bool = False  # every position held an event each time it was read
    begins: BeginReason = "earliest"  # why nothing before ``first`` is there
    note: bytes = b""  # of what is before ``end``, if the source tracks and has no note yet
    gaps: tuple[Gap, ...] = ()  # what an archive lacks between them
    identity: bytes = b""  # a note that finds the partition again before anything of it was read
    may_be_behind: bool = False  # an archive: its end may be before what a reader has read
    until_ms: int | None = None  # later events are behind the end, if it is not the present


@dataclass(frozen=True, slots=True)
class SourceRange:
    """A range of a source partition: from ``start`` to at most ``limit``."""

    partition: SourcePartition
    start: str
    limit: str
    ordinal: int = 0  # number of events before it; numbers the events of sources without offsets
    incarnation: str = ""  # the one it was planned for, if the source knows it; read no other


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some events of a range, in event columns, and the position to resume at after them.

    A chunk may be empty: then only the position moves, for example over offsets without events.
    """

    batch: pa.RecordBatch
    position: str
    note: bytes = b""  # for the manifest of the range, where the source reads it later


class RangeReader(Protocol):
    """Everything needed to read one range on any machine; picklable."""

    @property
    def range(self) -> SourceRange:
        """Returns the range it reads."""
        ...

    def read(self) -> Iterator[Chunk]:
        """Like ``Source.read``. ``UnavailableError`` can also mean that a new reader is needed."""
        ...


@runtime_checkable
class ChangingReader(Protocol):
    """A reader whose plan can become stale, because its files are rewritten."""

    @property
    def is_changing(self) -> bool:
        """Returns whether files of the plan were being replaced when it was made."""
        ...


@runtime_checkable
class DividingReader(Protocol):
    """A reader whose range can be read in parts, by several tasks at once."""

    def part(self, start: str, limit: str) -> RangeReader | None:
        """Returns a reader of a part of its range; None if no part begins or ends there."""
        ...


class Source(Protocol):
    """Settings of a source; picklable. Each call opens connections in the process where it runs."""

    @property
    def url(self) -> str:
        """Returns the address that opens this source again; never contains a secret."""
        ...

    def partitions(self) -> list[SourcePartition]:
        """Lists the current partitions in order; more can appear. Raises ``UnavailableError``."""
        ...

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        """Returns what each partition holds now. Raises ``NotFoundError`` for a deleted one."""
        ...

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        """Yields the events of a range in order. The last chunk has the position that was reached.

        Raises ``NotFoundError`` if ``start`` is no longer there: a source never skips lost events.
        Raises ``UnavailableError`` if it cannot reach the system, or the system stops responding.
        """
        ...

    def reader(self, range: SourceRange) -> RangeReader:
        """Returns what a task needs to read a range. Raises the errors of ``read``, now or then."""
        ...

    def cut(self, start: str, end: str, events: int) -> str:
        """Returns a position about this many events after ``start``; at most ``end``.

        For zero events it returns ``start`` itself, which may be any end the source reported: a
        valid place to begin.
        """
        ...

    def before(self, one: str, other: str) -> bool:
        """Returns whether a position is strictly before another one of the same partition."""
        ...

    def count(self, start: str, end: str) -> int | None:
        """Returns about how many events are between two positions; None if unknown."""
        ...


@dataclass(frozen=True, slots=True)
class Parent:
    """A partition whose events all come before those of another."""

    partition: SourcePartition
    end: str  # the position where it ends
    held: bool  # whether the source still has it


@runtime_checkable
class BranchingSource(Protocol):
    """A source whose partitions end and are followed by others."""

    def parents(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, list[Parent]]:
        """Returns the partitions that each one follows, including deleted ones."""
        ...


@runtime_checkable
class KnowsEnds(Protocol):
    """A source that knows where a deleted partition ended."""

    def ended_at(self, partition: SourcePartition, incarnation: str) -> str:
        """Returns the end of a partition of an earlier incarnation; empty if unknown."""
        ...


@runtime_checkable
class ResumingSource(Protocol):
    """A source that may still have events before its first place, because it deletes late."""

    def resume_at(self, position: str, first: str) -> str:
        """Returns where a reader continues after a loss; nothing that it has read is after it."""
        ...


@runtime_checkable
class GroupSource(Protocol):
    """A source whose own consumers have offsets, which others watch."""

    def publish_offsets(self, group: str, positions: Mapping[SourcePartition, str]) -> None:
        """Sets the offsets of a consumer group, in which no consumer may be."""
        ...


@runtime_checkable
class RowSource(Protocol):
    """A source of changes of rows, which can be read themselves."""

    def fetch_row(self, key: bytes) -> dict[str, object] | None:
        """Returns the row of a change by its event's key, as it is now; None if it is gone."""
        ...


@runtime_checkable
class ProbingSource(Protocol):
    """A source whose ends are times, so that only a look shows whether an event is there."""

    def waits(self, range: SourceRange) -> bool:
        """Returns whether the range holds an event now. Raises the errors of ``Source.read``."""
        ...


@runtime_checkable
class TimedSource(Protocol):
    """A source whose positions are times of events."""

    def limit_before(self, limit: str, time_ms: int) -> str:
        """Returns a limit before all events of a time; at most ``limit``."""
        ...


@runtime_checkable
class CompletingSource(Protocol):
    """A source that adds to other pipelines of its home what they missed."""

    @property
    def behind(self) -> tuple[str, ...]:
        """Returns their names; empty unless the address asks for it."""
        ...


@dataclass(frozen=True, slots=True)
class MissingOffsets:
    """Offsets of a range without an event, by reason."""

    absent: int = 0  # never held an event for readers
    deleted: int = 0  # the events were deleted from the source
    gaps: tuple[Gap, ...] = ()  # the source itself skipped them

    @property
    def offsets(self) -> int:
        """Returns how many there are in total."""
        return self.absent + self.deleted + sum(gap.offsets for gap in self.gaps)


@dataclass(frozen=True, slots=True)
class CountedRange:
    """What the commits of a range counted, for sources whose events the pipeline numbers."""

    read: int  # how many numbers they used
    dropped: int
    note: bytes
    missing: MissingOffsets


@runtime_checkable
class ExplainingSource(Protocol):
    """A source that knows why an offset has no event."""

    def missing(self, range: SourceRange, read: int) -> MissingOffsets:
        """Returns what a range lacks, up to the end that was reached, after ``read`` events.

        The result and ``read`` add up to the range.
        """
        ...


def missing_in(source: Source, range: SourceRange, read: int) -> MissingOffsets:
    """Returns what a range lacks. By default a missing offset never held an event.

    Nothing is missing if positions are not offsets: then the pipeline numbers what it reads.
    """
    if isinstance(source, ExplainingSource):
        return source.missing(range, read)
    offsets = offsets_between(range.start, range.limit)
    return MissingOffsets() if offsets is None else MissingOffsets(absent=offsets - read)


def range_offsets(range: SourceRange) -> tuple[int, int]:
    """Returns the start and limit of a range of offsets. Raises ``InvalidError``."""
    start, limit = offset_at(range.start), offset_at(range.limit)
    if start > limit:
        raise InvalidError(
            f"source partition `{range.partition.text}`: range [{start}, {limit}) runs backwards: "
            "give start <= limit"
        )
    return start, limit


def even_cuts(range: SourceRange, parts: int) -> tuple[str, ...]:
    """Returns where to cut a range of offsets into this many equal parts; fewer if it is short."""
    start, limit = range_offsets(range)
    parts = min(parts, limit - start)
    return tuple(str(start + (limit - start) * part // parts) for part in builtins.range(1, parts))


def offset_at(position: str) -> int:
    """Parses a position that is an offset or a row number. Raises ``InvalidError``."""
    if not (position.isascii() and position.isdecimal()):
        raise InvalidError(f"position `{position}`: is not an offset: give a whole number")
    return int(position)


def check_incarnation(range: SourceRange, found: str) -> None:
    """Raises ``NotFoundError`` if a range was planned for another incarnation than ``found``."""
    if range.incarnation and found and range.incarnation != found:
        raise NotFoundError(
            f"source partition `{range.partition.text}`: was deleted and made again since "
            f"[{range.start}, {range.limit}) was planned: it is {found} now, and was "
            f"{range.incarnation}: nothing of it was archived; run again, which says what to do",
            partition=range.partition.text,
            incarnation=found,
        )


def checked_at_end(chunks: Iterator[Chunk], check: Callable[[], None]) -> Iterator[Chunk]:
    """Yields the same chunks. Calls ``check`` after reading all, before yielding the last.

    An incarnation never recurs. If it is the same at the end, it was the same for every chunk.
    """
    last: Chunk | None = None
    try:
        for chunk in chunks:
            if last is not None:
                yield last
            last = chunk
    except TidelogError:
        if last is not None:
            yield last  # keep what was read before the error
        raise
    check()
    if last is not None:
        yield last


@dataclass(frozen=True, slots=True)
class KnownPartition:
    """What a pipeline knows about a source partition that it has begun."""

    position: str
    incarnation: str
    note: bytes  # of the last committed range
    seen: str = ""  # the end that a driver saw; empty: none was recorded
    lost: str = ""  # a person accepted the loss of everything before this; empty: none
    further: bytes = b""  # note of another pipeline that has read more of the same partition


@runtime_checkable
class TrackingSource(Protocol):
    """A source that recognizes partitions by what was read from them.

    A position is only meaningful with the note of what is before it. The two are recorded together,
    and a source never trusts a position without its note.
    """

    def track(self, known: Mapping[SourcePartition, KnownPartition]) -> None:
        """Uses these in all later calls."""
        ...

    def seen(self) -> Mapping[SourcePartition, str]:
        """Returns ends to remember, because a partition that vanishes before its end is a loss.

        ``bounds`` raises ``VanishedError`` for it, also if another process saw the end.
        """
        ...

    def renewed(self) -> Mapping[SourcePartition, bytes]:
        """Returns notes that replace the known ones, because ``bounds`` found partitions by them.

        This is how a renamed file is found under its new name.
        """
        ...


class VanishedError(NotFoundError):
    """A source partition vanished before its end was read. ``end`` is the end that was seen."""

    kind = "vanished"


@runtime_checkable
class SparseSource(Protocol):
    """A source whose offsets may have large gaps, and which knows where its next event is."""

    def reach(self, range: SourceRange, end: str) -> str:
        """Returns a limit at or after that of the range, up to ``end``, with no event in between.

        So a gap takes one step, whatever its size.
        """
        ...


@runtime_checkable
class SkippingSource(Protocol):
    """A source that does not read everything that is there."""

    def left_out(self) -> dict[str, str]:
        """Returns what it skips, with the reason, as of the last call of ``partitions``."""
        ...


@runtime_checkable
class VanishingSource(Protocol):
    """A source whose partitions can vanish without an error, such as topics of a pattern."""

    def may_vanish(self) -> bool:
        """Returns whether a partition that no longer exists is just not listed."""
        ...


@runtime_checkable
class DividingSource(Protocol):
    """A source whose events have numbers of their own, so that several tasks may read a range."""

    def divide(self, range: SourceRange, parts: int) -> tuple[str, ...]:
        """Returns up to ``parts - 1`` positions inside a range, in order, to cut it there."""
        ...


OPTIONAL = (
    BranchingSource,
    ProbingSource,
    CompletingSource,
    ExplainingSource,
    TrackingSource,
    SkippingSource,
    TimedSource,
    SparseSource,
    KnowsEnds,
    ResumingSource,
    VanishingSource,
    DividingSource,
)
"""The optional protocols of a source."""


def check_wrapping(wrapper: Source, source: Source, answered: tuple[type, ...] = ()) -> None:
    """Raises ``InternalError`` if a wrapper lacks a protocol of its source, unless ``answered``."""
    for protocol in OPTIONAL:
        passes = isinstance(wrapper, protocol) or protocol in answered
        if isinstance(source, protocol) and not passes:
            raise InternalError(
                f"source `{source.url}`: is {protocol.__name__}, and "
                f"{type(wrapper).__name__} does not pass that on"
            )


def waits(source: Source, range: SourceRange) -> bool:
    """Returns whether there is anything between the start and the limit of a range."""
    is_any = source.before(range.start, range.limit)
    return is_any and (not isinstance(source, ProbingSource) or source.waits(range))


def bounds_apart(
    source: Source,
    partitions: Sequence[SourcePartition],
    errors: dict[SourcePartition, TidelogError],
) -> dict[SourcePartition, Bounds]:
    """Returns what partitions hold. Adds those that fail to ``errors``.

    Asks for all of them at once and, if that fails, for each half. So one missing or damaged
    partition costs few more requests. Raises ``UnavailableError`` if the source cannot be reached.
    """
    try:
        return source.bounds(partitions)
    except UnavailableError:
        raise
    except Exception as exc:
        if not partitions:
            raise
        if len(partitions) == 1:
            what = f"source partition `{partitions[0].text}`"
            errors[partitions[0]] = unexpected(what, exc)
            return {}
    middle = len(partitions) // 2
    first = bounds_apart(source, partitions[:middle], errors)
    return {**first, **bounds_apart(source, partitions[middle:], errors)}


@dataclass(frozen=True, slots=True)
class PlannedReader:
    """Reads a range by a plan that its source made, and is equal to one with the same plan."""

    range: SourceRange
    plan: Any
    planned: Callable[[Any], Iterator[Chunk]] = field(compare=False)

    def read(self) -> Iterator[Chunk]:
        return self.planned(self.plan)


@dataclass(frozen=True, slots=True)
class DirectReader:
    """Reads a range through its source, if that can be reached from any machine."""

    source: Source
    range: SourceRange

    def read(self) -> Iterator[Chunk]:
        return self.source.read(self.range)

    def part(self, start: str, limit: str) -> DirectReader | None:
        """Implements ``DividingReader.part``, if its source can be divided."""
        if not isinstance(self.source, DividingSource):
            return None
        return DirectReader(self.source, replace(self.range, start=start, limit=limit))


_: tuple[type[RangeReader], type[RangeReader]] = (DirectReader, PlannedReader)
_dividing: type[DividingReader] = DirectReader
