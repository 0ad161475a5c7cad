"""A topic of a home as a source.

Positions are offsets. ``open_context`` opens the home in the process that reads, or returns one
that is open, and must pickle if the source should. A catalog in a file exists on one machine only:
so a driver plans a range, and reading the plan needs only the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa

from tidelog.concurrency import Pool
from tidelog.connectors.merge import gathered
from tidelog.connectors.source import (
    Bounds,
    Chunk,
    DividingReader,
    DividingSource,
    ExplainingSource,
    MissingOffsets,
    Source,
    SourcePartition,
    SourceRange,
    check_incarnation,
    even_cuts,
    offset_at,
    range_offsets,
)
from tidelog.context import Context, OpenContext
from tidelog.errors import InternalError, InvalidError, NotFoundError, UnavailableError
from tidelog.log.partition_reader import OffsetEvents, Reader
from tidelog.log.run_reader import (
    NO_AMENDMENTS,
    Amendments,
    RunSelection,
    describe_run,
    fetch_run,
    read_run,
)
from tidelog.log.status import DeletedTopic
from tidelog.log.topics import find_topic, read_head
from tidelog.model.address import Address
from tidelog.model.topic import Head, Run, Topic, check_topic_name
from tidelog.store import open_store_here
from tidelog.store.base import Store
from tidelog.store.fetch import fetch_ahead

__all__ = ["OpenContext", "PlannedRange", "TopicSource", "open_topic"]

_AT_ONCE = 8  # heads to read in parallel; each is a round trip on a remote catalog
_AHEAD = 3  # objects of a plan to prefetch


def open_topic(address: Address, open_context: OpenContext) -> TopicSource:
    """Opens the source at ``topic:NAME``."""
    address.take_options(())
    if address.host:
        raise InvalidError(f"source `{address.text}`: give topic:NAME, without slashes")
    return TopicSource(open_context, address.path)


class TopicSource:
    """A topic of the home that ``open_context`` opens."""

    def __init__(self, open_context: OpenContext, topic: str) -> None:
        check_topic_name(topic)
        self._open_context = open_context
        self._topic = topic

    @property
    def topic(self) -> str:
        """Returns the name of the topic."""
        return self._topic

    @property
    def url(self) -> str:
        return f"topic:{self._topic}"

    def partitions(self) -> list[SourcePartition]:
        with self._open_context() as context:
            topic = find_topic(context, self._topic)
        return [SourcePartition(topic.name, str(number)) for number in range(topic.partitions)]

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        with self._open_context() as context, Pool(_AT_ONCE) as pool:
            topic = find_topic(context, self._topic)
            heads = list(pool.map(lambda each: _head(context, topic, each), partitions))
        return {
            each: Bounds(
                str(head.start),
                str(head.next),
                topic.incarnation,
                not head.amendments,
                "retention" if head.start else "earliest",
            )
            for each, head in zip(partitions, heads, strict=True)
        }

    def ended_at(self, partition: SourcePartition, incarnation: str) -> str:
        """Returns where a partition of a deleted topic ended; empty if unknown."""
        with self._open_context() as context:
            gone = DeletedTopic.read(context, incarnation) if incarnation else None
        number = partition.number_in(self._topic)
        if gone is None or number is None or number >= len(gone.ends):
            return ""
        return str(gone.ends[number])

    def missing(self, range: SourceRange, read: int) -> MissingOffsets:
        """Counts missing offsets as deleted, because every offset of a topic had an event."""
        start, limit = range_offsets(range)
        return MissingOffsets(deleted=limit - start - read)

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        """Implements ``Source.read``. The last position is always the limit.

        Raises ``NotFoundError`` also for a limit beyond the end. A limit is an end that was seen,
        so the topic was created again.
        """
        with self._open_context() as context:
            topic = self._find(context, range)
            with _guard_range(context, topic, range):
                reader = Reader(context, topic, int(range.partition.name))
                yield from _chunks(range, reader.read(*range_offsets(range)))

    def reader(self, range: SourceRange) -> PlannedRange:
        """Returns the range with everything needed to read it from the store.

        Raises like ``read``.
        """
        start, limit = range_offsets(range)
        with self._open_context() as context:
            topic = self._find(context, range)
            with _guard_range(context, topic, range):
                plan = Reader(context, topic, int(range.partition.name)).plan(start, limit)
            reached = plan.runs[-1].end if plan.runs else start
            if reached < limit:
                raise _short(range, reached)
            return PlannedRange(range, plan.runs, context.store.url, plan.amendments)

    def _find(self, context: Context, range: SourceRange) -> Topic:
        """Returns the topic of a range.

        Raises ``NotFoundError`` if the name has another one now.
        """
        topic = find_topic(context, self._topic)
        check_incarnation(range, topic.incarnation)
        return topic

    def cut(self, start: str, end: str, events: int) -> str:
        return str(min(offset_at(end), offset_at(start) + events))

    def divide(self, range: SourceRange, parts: int) -> tuple[str, ...]:
        return even_cuts(range, parts)

    def before(self, one: str, other: str) -> bool:
        return offset_at(one) < offset_at(other)

    def count(self, start: str, end: str) -> int | None:
        """Returns an upper bound, exact if nothing was erased (``Bounds.is_dense``)."""
        return max(0, offset_at(end) - offset_at(start))

    def __repr__(self) -> str:
        return f"TopicSource({self._open_context!r}, {self._topic!r})"


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """A range, its runs and their amendments, as of when it was planned.

    A journal may begin before the run ahead of it ends, if a compile ran between two reads of the
    rows. Each run counts from where the one before it ends.

    Pickles. A trim makes it stale, and so does a sweep after the runs were compiled.
    """

    range: SourceRange
    runs: tuple[Run, ...]
    store: str  # URL
    amendments: Amendments = NO_AMENDMENTS

    def read(self) -> Iterator[Chunk]:
        """Yields the same chunks as ``TopicSource.read``. Raises ``UnavailableError`` if stale."""
        return _chunks(self.range, self._read_runs(open_store_here(self.store)))

    def part(self, start: str, limit: str) -> PlannedRange:
        """Implements ``DividingReader.part``: a run across a border belongs to both parts."""
        first, end = offset_at(start), offset_at(limit)
        runs = tuple(run for run in self.runs if run.end > first and run.base < end)
        return replace(self, range=replace(self.range, start=start, limit=limit), runs=runs)

    def _read_runs(self, store: Store) -> Iterator[OffsetEvents]:
        start, limit = range_offsets(self.range)
        topic, partition = self.range.partition.topic, int(self.range.partition.name)
        with Pool(_AHEAD, "tidelog-fetch") as pool:
            for run, data in fetch_ahead(pool, partial(self._fetch, store), self.runs, _AHEAD):
                selection, start = RunSelection(start, limit, pool=pool), max(start, run.end)
                what = describe_run(topic, partition, run)
                try:
                    for rows in read_run(store, run, what, selection, self.amendments, data):
                        yield OffsetEvents(topic, partition, rows)
                except NotFoundError as exc:
                    raise self._stale(run) from exc

    def _fetch(self, store: Store, run: Run) -> bytes | None:
        try:
            return fetch_run(store, run)
        except NotFoundError as exc:
            raise self._stale(run) from exc

    def _stale(self, run: Run) -> UnavailableError:
        partition = self.range.partition
        return UnavailableError(
            f"{describe_run(partition.topic, partition.name, run)}: is gone: plan the range again; "
            "if it is gone then too, restore it from a copy, and run `tidelog verify`",
            lost_from=max(run.base, range_offsets(self.range)[0]),
        )


def _head(context: Context, topic: Topic, partition: SourcePartition) -> Head:
    known = partition.topic == topic.name and partition.name.isdecimal()
    if not known or int(partition.name) >= topic.partitions:
        raise NotFoundError(
            f"partition `{partition.text}`: is not there, topic `{topic.name}` has "
            f"{topic.partitions}: ask the source for its partitions",
            partition=partition.text,
        )
    return read_head(context, topic, int(partition.name))[0]


@contextmanager
def _guard_range(context: Context, topic: Topic, range: SourceRange) -> Iterator[None]:
    """Raises ``NotFoundError`` if part of a range is missing, or is trimmed while it is read."""
    start, limit = range_offsets(range)
    _check_held(range.partition, start, limit, _head(context, topic, range.partition))
    try:
        yield
    except NotFoundError as exc:
        if "offset" in exc.context:
            head = _head(context, topic, range.partition)
            _check_held(range.partition, exc.context["offset"], limit, head)
        raise


def _check_held(partition: SourcePartition, start: int, limit: int, head: Head) -> None:
    if start < head.start:
        raise NotFoundError(
            f"partition `{partition.text}`: offsets {start} to {head.start} were trimmed, the "
            f"first is {head.start}: continue from {head.start} if that loss is acceptable",
            lost_from=start,
            first=head.start,
        )
    if limit > head.next:
        raise NotFoundError(
            f"partition `{partition.text}`: ends at offset {head.next}, but was seen to reach "
            f"{limit}: its topic was created again: decide where to continue",
            lost_from=min(start, head.next),
            first=head.start,
            end=head.next,
        )


def _chunks(range: SourceRange, parts: Iterator[OffsetEvents]) -> Iterator[Chunk]:
    """Yields events in event columns, joined to chunks large enough to process."""
    at, limit = range_offsets(range)

    def pieces() -> Iterator[tuple[pa.RecordBatch, str]]:
        reached = at
        for part in parts:
            reached = part.end
            yield part.arrow(), str(reached)
        if reached != limit:
            raise _short(range, reached)

    return gathered(pieces(), str(limit))


def _short(range: SourceRange, at: int) -> InternalError:
    return InternalError(
        f"partition `{range.partition.text}`: reading ended at offset {at}, not at {range.limit}"
    )


_source: type[Source] = TopicSource
_explaining: type[ExplainingSource] = TopicSource
_dividing: tuple[type[DividingSource], type[DividingReader]] = (TopicSource, PlannedRange)
