"""A Kinesis stream as a source.

Shards are source partitions, named by their numbers; ``reader`` defines the positions. Kinesis
does not say where an open shard ends, so its end is the current time: a range is read until it has
caught up, and the position it reached counts. A split or merged shard is followed by its children,
which begin when their parents are done.

The data of a record is the value of the event, its partition key the key, and its arrival the time.
The id is the SHA-256 of the stream's ARN and the record's own id, in hex, so a record that is
pumped twice has the same id. The header ``kinesis.sequence`` has the sequence number; the reader
counts offsets. Records packed by the producer library are unpacked, and get
``kinesis.sub-sequence`` and, if they have one, ``kinesis.hash-key``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tidelog.clock import Clock, SystemClock
from tidelog.connectors.kinesis.client import (
    Kinesis,
    KinesisAddress,
    KinesisShard,
    StreamInfo,
    parse_kinesis_address,
)
from tidelog.connectors.kinesis.reader import (
    END,
    RangeLimit,
    ShardPosition,
    ShardRead,
    ShardReadPlan,
    is_before,
)
from tidelog.connectors.source import (
    Bounds,
    BranchingSource,
    Chunk,
    Parent,
    PlannedReader,
    ProbingSource,
    ResumingSource,
    Source,
    SourcePartition,
    SourceRange,
    check_incarnation,
    checked_at_end,
)
from tidelog.errors import InvalidError, NotFoundError
from tidelog.model.address import Address, format_address, parse_address
from tidelog.model.event import to_iso
from tidelog.model.pipeline import BeginReason
from tidelog.model.times import moment_ms

__all__ = ["KinesisOptions", "KinesisSource", "open_kinesis"]

_INFO_S = 10.0  # how long plans use the same description; each range is checked at its end


@dataclass(frozen=True, slots=True)
class KinesisOptions:
    """How to read a stream; plain values."""

    start_ms: int | None = None  # where new shards begin; None: at the oldest record
    keep_outside: bool = True  # packed records whose hash key belongs to another shard


def open_kinesis(
    address: Address, *, environ: Mapping[str, str], clock: Clock | None = None
) -> KinesisSource:
    """Opens the source at ``kinesis://STREAM?region=…&endpoint_url=…&start=oldest|newest|TIME``.

    ``newest`` is the time of this call, and a time such as ``-15m`` is relative to it; the source's
    own URL has the absolute time. ``outside=drop`` skips records that the producer library packed
    into the wrong shard during a split, because it sends them again.
    """
    clock = clock or SystemClock()
    place = parse_kinesis_address(address, environ, "source", ("outside", "start"))
    outside = address.options.get("outside", "keep")
    if outside not in ("keep", "drop"):
        raise InvalidError(f"source `{address.text}`: outside `{outside}`: give keep or drop")
    start = address.options.get("start", "oldest")
    start_ms = None
    if start != "oldest":
        start_ms = moment_ms("now" if start == "newest" else start, clock.now_ms())
    return KinesisSource(place, KinesisOptions(start_ms, outside == "keep"), clock=clock)


class KinesisSource:
    """A Kinesis stream. Pickles without secrets: the process that unpickles it has its own."""

    def __init__(
        self,
        place: KinesisAddress,
        way: KinesisOptions | None = None,
        *,
        clock: Clock | None = None,
        kinesis: Kinesis | None = None,
    ) -> None:
        self._place = place
        self._way = way or KinesisOptions()
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._kinesis = kinesis
        self._info: tuple[StreamInfo, float] | None = None  # and the time it was read
        self._shards: dict[int, KinesisShard] = {}  # as last seen

    @property
    def url(self) -> str:
        options = dict(parse_address(self._place.url).options)
        if self._way.start_ms is not None:
            options["start"] = to_iso(self._way.start_ms)
        return format_address("kinesis", self._place.stream, "", options)

    def partitions(self) -> list[SourcePartition]:
        """Lists all shards that Kinesis still has, also closed ones, parents before children."""
        shards, _ = self._list_shards()
        return [self._partition(number) for number in shards]

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        """Returns the bounds.

        An open shard ends now; its first place has the age of its records.
        """
        if not partitions:
            return {}
        shards, time_ms = self._list_shards()
        info = self._describe()
        begins = self._begins(time_ms, info)
        now = RangeLimit(time_ms + 1000).text  # Kinesis rounds its time down to seconds
        found: dict[SourcePartition, Bounds] = {}
        for each in partitions:
            number = self._number(each)
            if number not in shards:
                raise NotFoundError(
                    f"kinesis shard `{each.text}`: is not there: ask the source for its partitions",
                    partition=each.text,
                )
            end = END.text if shards[number].is_closed else now
            parents = shards[number].parents
            is_whole = bool(parents) and shards.keys() >= set(parents)
            held_ms = 0 if is_whole else max(0, time_ms - info.retention_ms)
            first = self._first(held_ms, info).text
            found[each] = Bounds(first, end, info.incarnation, begins=begins)
        return found

    def _first(self, held_ms: int, info: StreamInfo) -> ShardPosition:
        """Returns the first place of a shard from which records before a time are deleted.

        Nothing is deleted from a shard whose parents are listed, because these are older. If the
        whole stream is young, everything that is deleted before it was read will be a loss.
        """
        if self._way.start_ms is not None:
            return ShardPosition("at", self._way.start_ms, held_ms=held_ms)
        if 0 < held_ms <= info.created_ms:
            return ShardPosition("oldest", seen_ms=info.created_ms)
        return ShardPosition("oldest", held_ms=held_ms)

    def _begins(self, time_ms: int, info: StreamInfo) -> BeginReason:
        """Returns why nothing before the first place is read. A young stream has every record."""
        if self._way.start_ms is not None:
            return "explicit"
        return "retention" if time_ms - info.retention_ms > info.created_ms else "earliest"

    def parents(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, list[Parent]]:
        """Returns the shards that were split or merged into each one."""
        shards = self._shards
        if any(self._number(each) not in shards for each in partitions):
            shards, _ = self._list_shards()
        return {
            each: [
                Parent(self._partition(number), END.text, number in shards)
                for number in shards[self._number(each)].parents
            ]
            for each in partitions
            if self._number(each) in shards
        }

    def waits(self, range: SourceRange) -> bool:
        """Returns whether there is an event in a range, by reading."""
        one = SourceRange(range.partition, range.start, self.cut(range.start, range.limit, 1))
        return any(chunk.batch.num_rows for chunk in self.read(one))

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        """Implements ``Source.read``. The range ends when it has caught up with the shard.

        Raises ``NotFoundError`` if records after the start may be deleted because it is too old.
        Kinesis itself does not report that.
        """
        return self.reader(range).read()

    def reader(self, range: SourceRange) -> PlannedReader:
        number = self._number(range.partition)
        ShardPosition.parse(range.start), RangeLimit.parse(range.limit)
        if number not in self._shards:
            self._list_shards()
        if number not in self._shards:
            raise NotFoundError(
                f"kinesis shard `{range.partition.text}`: is not there any more",
                partition=range.partition.text,
            )
        check_incarnation(range, self._describe().incarnation)
        plan = ShardReadPlan(range, self._describe(), self._shards[number], self._way.keep_outside)
        return PlannedReader(range, plan, self.planned)

    def planned(self, plan: ShardReadPlan) -> Iterator[Chunk]:
        """Yields the chunks of a plan. Raises if the stream was created again since."""
        reading = ShardRead(self._open(), plan, self._clock)
        return checked_at_end(reading.chunks(), partial(self._check, plan.range, reading))

    def cut(self, start: str, end: str, events: int) -> str:
        """Returns a limit that contains the count; for zero, the start as a place to begin at."""
        return RangeLimit.parse(end).cut(events).text if events else ShardPosition.parse(start).text

    def before(self, one: str, other: str) -> bool:
        return is_before(one, other)

    def resume_at(self, position: str, first: str) -> str:
        """Returns the same place: what it has deleted is skipped, and the rest may stay a while."""
        here, there = ShardPosition.parse(position), ShardPosition.parse(first)
        return first if here.kind == "oldest" else here.held(there.held_ms).text

    def count(self, start: str, end: str) -> int | None:
        """Returns None, since Kinesis does not count; 0 after the end of a closed shard."""
        return 0 if ShardPosition.parse(start).kind == "end" else None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (self.url,))

    def __repr__(self) -> str:
        return f"KinesisSource({self.url!r})"

    def _open(self) -> Kinesis:
        with self._lock:
            if self._kinesis is None:
                self._kinesis = Kinesis(self._place, clock=self._clock)
            return self._kinesis

    def _check(self, range: SourceRange, reading: ShardRead) -> None:
        """Raises ``NotFoundError`` if the stream is not the one that the range was planned for.

        A range that has not moved commits nothing, so it needs no check. Kinesis limits such
        requests.
        """
        if range.incarnation and reading.has_moved:
            check_incarnation(range, self._describe(max_age_s=0).incarnation)

    def _list_shards(self) -> tuple[dict[int, KinesisShard], int]:
        shards, time_ms = self._open().shards()
        self._shards = shards
        return shards, time_ms

    def _describe(self, max_age_s: float = _INFO_S) -> StreamInfo:
        now_s = self._clock.monotonic_s()
        known = self._info
        if known is None or not max_age_s or now_s - known[1] > max_age_s:
            known = self._info = self._open().describe()[0], now_s
        return known[0]

    def _partition(self, number: int) -> SourcePartition:
        return SourcePartition(self._place.stream, str(number))

    def _number(self, partition: SourcePartition) -> int:
        number = partition.number_in(self._place.stream)
        if number is None:
            raise NotFoundError(
                f"kinesis shard `{partition.text}`: is none of stream `{self._place.stream}`: "
                "ask the source for its partitions",
                partition=partition.text,
            )
        return number


def _reopen(url: str) -> KinesisSource:
    """Opens the source in another process, with the credentials of that process."""
    environ = os.environ  # noqa: TID251 - a worker reads its own environment
    return open_kinesis(parse_address(url), environ=environ)


_source: type[Source] = KinesisSource
_branching: type[BranchingSource] = KinesisSource
_probing: type[ProbingSource] = KinesisSource
_resuming: type[ResumingSource] = KinesisSource
