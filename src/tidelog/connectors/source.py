"""What a source is: partitions that can be read from a position on.

A position is text that only its source understands: an offset for Kafka and for topics, something
else for others. It says where reading goes on, so the position after the last event of a range is
the start of the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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
    "ExplainingSource",
    "KnownPartition",
    "KnowsEnds",
    "LeavingOut",
    "MissingOffsets",
    "Parent",
    "PlannedReader",
    "ProbingSource",
    "RangeReader",
    "Source",
    "SourcePartition",
    "SourceRange",
    "Sparse",
    "TimedSource",
    "TrackingSource",
    "VanishedError",
    "Vanishing",
    "bounds_apart",
    "check_incarnation",
    "check_wrapping",
    "checked_at_end",
    "missing_in",
    "offset_at",
    "parents_of",
    "range_offsets",
    "waits",
]


@dataclass(frozen=True, slots=True, order=True)
class SourcePartition:
    """One ordered sequence of a source.

    Its text has exactly one meaning, since a name has no `/` and so the last one ends the topic.
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
        """How rows and messages name it; no other source partition has the same text."""
        return f"{self.topic}/{self.name}"

    def number_in(self, topic: str) -> int | None:
        """The number that its name is; None when it is none, or of another topic."""
        known = self.topic == topic and self.name.isascii() and self.name.isdecimal()
        return int(self.name) if known else None

    @classmethod
    def named(cls, text: str) -> SourcePartition:
        """The one that rows and messages name so."""
        topic, _, name = text.rpartition("/")
        return cls(topic, name)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a source partition holds now: ``[first, end)`` in positions."""

    first: str
    end: str
    incarnation: str = ""  # changes when the partition is made anew, where the source can tell
    is_dense: bool = False  # each position of it had an event whenever it was read
    begins: BeginReason = "earliest"  # why nothing is held before ``first``
    note: bytes = b""  # of what is before ``end``, where a source tracks and knows none yet


@dataclass(frozen=True, slots=True)
class SourceRange:
    """A stretch of a source partition: from ``start`` to at most ``limit``."""

    partition: SourcePartition
    start: str
    limit: str
    ordinal: int = 0  # how many events came before it; numbers those of sources without offsets
    incarnation: str = ""  # that it was planned for, where the source knows one: read no other


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some events of a range, in event columns, and where reading goes on after them.

    A chunk may be empty: then only the position has moved, as over offsets that hold no event.
    """

    batch: pa.RecordBatch
    position: str
    note: bytes = b""  # what the source wants to find again in the range's manifest


class RangeReader(Protocol):
    """All that is needed to read one range, on any machine; picklable."""

    @property
    def range(self) -> SourceRange:
        """What it reads."""
        ...

    def read(self) -> Iterator[Chunk]:
        """As ``Source.read``; ``UnavailableError`` also when another reader must be asked for."""
        ...


@runtime_checkable
class ChangingReader(Protocol):
    """A reader whose plan others may change, as its files are rewritten."""

    @property
    def is_changing(self) -> bool:
        """Whether files of the plan were being replaced when it was made."""
        ...


class Source(Protocol):
    """Settings of a source; picklable. Connections are opened by each call, where it runs."""

    @property
    def url(self) -> str:
        """The address that opens this source again; never with a secret in it."""
        ...

    def partitions(self) -> list[SourcePartition]:
        """The partitions that are there now, in order; new ones may come. ``UnavailableError``."""
        ...

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        """What each of them holds now; ``NotFoundError`` for one that is gone."""
        ...

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        """The events of a range, in order; the last chunk's position is the end that was reached.

        ``NotFoundError`` when ``start`` is no longer held: lost events are never passed over.
        ``UnavailableError`` when the source cannot be reached or stops answering.
        """
        ...

    def reader(self, range: SourceRange) -> RangeReader:
        """What a task needs to read a range; errors as for ``read``, now or then."""
        ...

    def cut(self, start: str, end: str, events: int) -> str:
        """A position up to which there are about so many events from ``start``; at most ``end``.

        For none it is the start itself, be it an end that was told: a place to begin at.
        """
        ...

    def before(self, one: str, other: str) -> bool:
        """Whether a position is strictly before another of the same partition."""
        ...

    def count(self, start: str, end: str) -> int | None:
        """About how many events lie between two positions, where the source can tell."""
        ...


@dataclass(frozen=True, slots=True)
class Parent:
    """A partition whose events all come before those of another."""

    partition: SourcePartition
    end: str  # the position at which it is done
    held: bool  # whether the source still has it


@runtime_checkable
class BranchingSource(Protocol):
    """What a source also is whose partitions end and are followed by others."""

    def parents(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, list[Parent]]:
        """Which partitions each of them follows, also those that are no longer held."""
        ...


@runtime_checkable
class KnowsEnds(Protocol):
    """What a source also is that can tell where a deleted partition had ended."""

    def ended_at(self, partition: SourcePartition, incarnation: str) -> str:
        """The end of a partition of an earlier incarnation; empty if that is not known."""
        ...


@runtime_checkable
class ProbingSource(Protocol):
    """What a source also is whose ends are times: by looking it tells whether anything is there."""

    def waits(self, range: SourceRange) -> bool:
        """Whether the range holds an event now. Errors as for ``Source.read``."""
        ...


@runtime_checkable
class TimedSource(Protocol):
    """What a source also is whose positions are times of events."""

    def limit_before(self, limit: str, time_ms: int) -> str:
        """A limit before all events of a time; at most ``limit``."""
        ...


@runtime_checkable
class CompletingSource(Protocol):
    """What a source also is that adds to other pipelines of its home what they have missed."""

    @property
    def behind(self) -> tuple[str, ...]:
        """Their names; none, unless it was told to."""
        ...


@dataclass(frozen=True, slots=True)
class MissingOffsets:
    """Offsets of a range at which no event was read, by reason."""

    absent: int = 0  # that never held an event for readers
    deleted: int = 0  # whose events were deleted from the source
    gaps: tuple[Gap, ...] = ()  # that the source itself had skipped

    @property
    def offsets(self) -> int:
        """How many they are in all."""
        return self.absent + self.deleted + sum(gap.offsets for gap in self.gaps)


@dataclass(frozen=True, slots=True)
class CountedRange:
    """What commits counted in a range, where the pipeline numbers events itself."""

    read: int  # numbers that they took
    dropped: int
    note: bytes
    missing: MissingOffsets


@runtime_checkable
class ExplainingSource(Protocol):
    """A source that knows why an offset has no event."""

    def missing(self, range: SourceRange, read: int) -> MissingOffsets:
        """Returns what a range lacks, up to the end that was reached, after ``read`` events.

        What it returns and what was read add up to the range.
        """
        ...


def missing_in(source: Source, range: SourceRange, read: int) -> MissingOffsets:
    """Returns what a range lacks: offsets that hold no event for readers, unless the source knows.

    Nothing is missing where positions are not offsets, since the pipeline numbers what it reads.
    """
    if isinstance(source, ExplainingSource):
        return source.missing(range, read)
    offsets = offsets_between(range.start, range.limit)
    return MissingOffsets() if offsets is None else MissingOffsets(absent=offsets - read)


def range_offsets(range: SourceRange) -> tuple[int, int]:
    """Returns the start and the limit of a range whose positions are offsets. ``InvalidError``."""
    start, limit = offset_at(range.start), offset_at(range.limit)
    if start > limit:
        raise InvalidError(
            f"source partition `{range.partition.text}`: range [{start}, {limit}) runs backwards: "
            "give start <= limit"
        )
    return start, limit


def offset_at(position: str) -> int:
    """Returns a position that is an offset, or the number of a row. ``InvalidError``."""
    if not (position.isascii() and position.isdecimal()):
        raise InvalidError(f"position `{position}`: is not an offset: give a whole number")
    return int(position)


def check_incarnation(range: SourceRange, found: str) -> None:
    """Raise ``NotFoundError`` where a range was planned for another incarnation than there is.

    The next look at the source shows what its partition is now.
    """
    if range.incarnation and found and range.incarnation != found:
        raise NotFoundError(
            f"source partition `{range.partition.text}`: was deleted and made again since "
            f"[{range.start}, {range.limit}) was planned: it is {found} now, and was "
            f"{range.incarnation}: nothing of it was archived; run again, which says what to do",
            partition=range.partition.text,
            incarnation=found,
        )


def checked_at_end(chunks: Iterator[Chunk], check: Callable[[], None]) -> Iterator[Chunk]:
    """The same chunks; the check comes after all were read, and before the last is returned.

    An incarnation never recurs. So one that is the same in the end was so all the time, and
    every chunk is of it.
    """
    last: Chunk | None = None
    try:
        for chunk in chunks:
            if last is not None:
                yield last
            last = chunk
    except TidelogError:
        if last is not None:
            yield last  # what was read before the error
        raise
    check()
    if last is not None:
        yield last


@dataclass(frozen=True, slots=True)
class KnownPartition:
    """What a pipeline knows of a source partition that it has begun."""

    position: str
    incarnation: str
    note: bytes  # of the last range that was committed
    seen: str = ""  # the end that some driver saw; empty: none was recorded
    lost: str = ""  # what is before this is lost, as a person accepted; empty: nothing is
    further: bytes = b""  # note of another pipeline that has read more of the same partition


@runtime_checkable
class TrackingSource(Protocol):
    """A source that recognises partitions by what was read of them.

    A position after the first event is worth something together with the note of what is before it
    alone: each is recorded with the other, and a source never trusts a position without a note.
    """

    def track(self, known: Mapping[SourcePartition, KnownPartition]) -> None:
        """Use this in all later calls."""
        ...

    def seen(self) -> Mapping[SourcePartition, str]:
        """Return ends that must be remembered: a partition that vanishes before its end is a loss.

        ``VanishedError`` is raised for such a one by ``bounds``, also if another process saw it.
        """
        ...

    def renewed(self) -> Mapping[SourcePartition, bytes]:
        """Return notes to keep instead of the known ones, as ``bounds`` found partitions by them.

        A file that got another name is found again by that name.
        """
        ...


class VanishedError(NotFoundError):
    """A source partition vanished before its end was read; ``end`` is what was seen of it."""

    kind = "vanished"


@runtime_checkable
class Sparse(Protocol):
    """A source whose offsets may have large gaps, and that knows where its next event is."""

    def reach(self, range: SourceRange, end: str) -> str:
        """Return the limit of a range, or a later one, up to ``end``, if no event is before it.

        So a gap is passed in one step, however many offsets it has.
        """
        ...


@runtime_checkable
class LeavingOut(Protocol):
    """A source that does not read everything that is there."""

    def left_out(self) -> dict[str, str]:
        """What is not read, and why, as it was when the partitions were last asked for."""
        ...


@runtime_checkable
class Vanishing(Protocol):
    """A source whose partitions may go without an error, as topics that a pattern matched."""

    def may_vanish(self) -> bool:
        """Whether a partition that is no longer there is simply not listed."""
        ...


OPTIONAL = (
    BranchingSource,
    ProbingSource,
    CompletingSource,
    ExplainingSource,
    TrackingSource,
    LeavingOut,
    TimedSource,
    Sparse,
    KnowsEnds,
    Vanishing,
)
"""What a source may also be."""


def check_wrapping(wrapper: Source, source: Source, answered: tuple[type, ...] = ()) -> None:
    """Raise ``InternalError`` where a source that wraps another one does not pass all of it on.

    ``answered`` is what the wrapper does without.
    """
    for protocol in OPTIONAL:
        passes = isinstance(wrapper, protocol) or protocol in answered
        if isinstance(source, protocol) and not passes:
            raise InternalError(
                f"source `{source.url}`: is {protocol.__name__}, and "
                f"{type(wrapper).__name__} does not pass that on"
            )


def parents_of(
    source: Source, partitions: Sequence[SourcePartition]
) -> dict[SourcePartition, list[Parent]]:
    """Which partitions each of them follows: none, in most sources."""
    return source.parents(partitions) if partitions and isinstance(source, BranchingSource) else {}


def waits(source: Source, range: SourceRange) -> bool:
    """Whether anything lies between the start and the limit of a range."""
    if not source.before(range.start, range.limit):
        return False
    return source.waits(range) if isinstance(source, ProbingSource) else True


def bounds_apart(
    source: Source,
    partitions: Sequence[SourcePartition],
    errors: dict[SourcePartition, TidelogError],
) -> dict[SourcePartition, Bounds]:
    """Return what source partitions hold, and put those that cannot be reached into ``errors``.

    All are asked at once. Where that fails they are asked in halves, so that one that is missing or
    damaged costs few more requests. ``UnavailableError`` when the source cannot be reached.
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
    """Reads a range by what its source has found out about it, which pickles with the call."""

    range: SourceRange
    planned: Callable[[], Iterator[Chunk]]

    def read(self) -> Iterator[Chunk]:
        return self.planned()


@dataclass(frozen=True, slots=True)
class DirectReader:
    """Reads a range by its source, for sources that can be reached from anywhere."""

    source: Source
    range: SourceRange

    def read(self) -> Iterator[Chunk]:
        return self.source.read(self.range)


_: tuple[type[RangeReader], type[RangeReader]] = (DirectReader, PlannedReader)
