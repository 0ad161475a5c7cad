"""Pages of a topic's events: as JSON lines by partition and offset or by time, or of a search.

A page has a bounded number of events and bytes, and says where the next one begins, so nothing is
kept between two pages. The first page of a range of times fixes the ends of the partitions, as a
playback does: what is appended later is not part of the range. Its cursor holds these ends and the
place of its last event. When something is trimmed meanwhile, it is unknown whether it was part of
the range, so the next page is refused.

A search looks for a key, an id, a text or fields. It ends after a number of events or seconds and
returns where the next one begins. Beside events it shows their amendments, and offsets whose events
were deleted.
"""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.event_json import batch_lines
from tidelog.codec.fields import parse_field_filter
from tidelog.codec.formats.batches import fitting_rows
from tidelog.codec.numbers import bytes_array
from tidelog.context import Context
from tidelog.errors import InvalidError, NotFoundError
from tidelog.log.partition_reader import OffsetEvents, Reader
from tidelog.log.run_reader import pending
from tidelog.log.status import read_heads
from tidelog.log.topics import read_head
from tidelog.model import limits
from tidelog.model.decoding import decode_msgpack
from tidelog.model.event import Event, check_timestamp, check_utf8
from tidelog.model.playback import Cursor, Floors, Pin, TimeRange
from tidelog.model.topic import Run, Topic
from tidelog.playback.merge import BufferBounds, play

__all__ = [
    "RANGE_BOUNDS",
    "DeletedOffsets",
    "From",
    "KnownAmendment",
    "Page",
    "RangeCursor",
    "RangePage",
    "SearchQuery",
    "SearchResult",
    "begin_range",
    "check_cursor",
    "pending_amendments",
    "place_of_last",
    "play_range",
    "read_known_amendments",
    "read_page",
    "read_range",
    "search_partition",
    "search_range",
    "with_gaps",
]

RANGE_BOUNDS = BufferBounds(
    window_bytes=4 << 20, ahead_bytes=0, held_bytes=32 << 20, batch_events=1_000
)
_CURSOR_MAX = 16_384  # characters
_rendering = threading.Lock()

From = int | Literal["earliest", "latest"]


@dataclass(frozen=True, slots=True)
class Page:
    """The events of consecutive offsets of a partition, and where the next page begins."""

    lines: bytes  # one JSON object each
    offsets: Sequence[int]  # of each event
    first: int  # where the page begins
    next: int  # the offset to go on from
    start: int  # of the partition, as it was then
    end: int

    @property
    def count(self) -> int:
        """Returns how many events it has."""
        return len(self.offsets)


def read_page(context: Context, topic: Topic, partition: int, offset: From, limit: int) -> Page:
    """Up to ``limit`` events, fewer where they are large; erased events are skipped.

    ``NotFoundError`` for an offset that was trimmed or that lies beyond the end.
    """
    topic.check_partition(partition)
    head, _ = read_head(context, topic, partition)
    if not isinstance(offset, int):
        offset = head.start if offset == "earliest" else head.next
    if offset > head.next:
        raise NotFoundError(
            f"partition `{topic.name}/{partition}`: offset {offset} is beyond its end, "
            f"{head.next}: continue from there",
            offset=offset,
            end=head.next,
        )
    reader = Reader(context, topic, partition)
    if offset < head.start:
        reader.check_start(offset)
    lines: list[bytes] = []
    offsets: list[int] = []
    at, room = offset, limits.PAGE_BYTES_MAX
    for stretch in reader.read(offset, head.next):
        part = _fitting_stretch(stretch, limit - len(offsets), room)
        lines.append(_rendered(part.arrow()))
        offsets += part.offsets.tolist()
        at = part.end
        room -= len(lines[-1])
        if room <= 0 or len(offsets) == limit or part.end < stretch.end:
            break
    return Page(b"".join(lines), offsets, offset, at, head.start, head.next)


def _rendered(batch: pa.RecordBatch) -> bytes:
    """Returns events as JSON lines. Threads take turns.

    Python runs one of them at a time anyway; many that all wait to run would keep an event loop
    beside them from running.
    """
    with _rendering:
        return batch_lines(batch)


def _fitting_stretch(stretch: OffsetEvents, count: int, room: int) -> OffsetEvents:
    """Returns as many of its events as fit by their sizes, one at least, up to a count."""
    return stretch.take(min(count, fitting_rows(stretch.batch, room)))


class RangeCursor(msgspec.Struct, frozen=True, array_like=True):
    """What a page must know: the range, and how far it was read."""

    incarnation: str
    start_ms: int
    end_ms: int
    starts: tuple[int, ...]  # of the partitions, when the first page was read
    ends: tuple[int, ...]
    after: Cursor | None = None  # the last event that was given

    @property
    def times(self) -> TimeRange:
        """Returns the range."""
        return TimeRange(self.start_ms, self.end_ms)

    def text(self) -> str:
        """Returns the cursor as text for a URL."""
        packed = msgspec.msgpack.encode(self)
        return base64.urlsafe_b64encode(packed).rstrip(b"=").decode()

    @classmethod
    def of_text(cls, text: str) -> RangeCursor:
        """Returns the cursor of a text. Raises ``InvalidError`` for one that no page has."""
        if len(text) > _CURSOR_MAX:
            raise _forged()
        try:
            packed = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
            found = decode_msgpack(packed, cls)
        except (binascii.Error, ValueError, msgspec.MsgspecError) as exc:
            raise _forged() from exc
        check_timestamp(found.start_ms)
        check_timestamp(found.end_ms)
        at_ms = found.start_ms if found.after is None else found.after.time_ms
        if not found.start_ms <= at_ms <= found.end_ms:
            raise _forged()
        return found


@dataclass(frozen=True, slots=True)
class RangePage:
    """Some events of a range, and how to get the next ones; None after the last."""

    lines: bytes
    count: int
    times: TimeRange
    following: RangeCursor | None


def read_range(context: Context, topic: Topic, cursor: RangeCursor, limit: int) -> RangePage:
    """Returns the next events of a range. Raises ``NotFoundError`` if some were trimmed since."""
    playing = play_range(context, topic, cursor)
    lines: list[bytes] = []
    count, room, after, more = 0, limits.PAGE_BYTES_MAX, cursor.after, False
    try:
        for batch in playing:
            part = _fitting(batch, limit - count, room)
            if part is not None:
                lines.append(_rendered(part))
                count, room, after = (
                    count + part.num_rows,
                    room - len(lines[-1]),
                    place_of_last(part),
                )
            if part is None or part.num_rows < batch.num_rows:
                more = True
                break
    finally:
        playing.close()
    check_cursor(context, topic, cursor)
    following = msgspec.structs.replace(cursor, after=after) if more else None
    return RangePage(b"".join(lines), count, cursor.times, following)


def play_range(
    context: Context, topic: Topic, cursor: RangeCursor
) -> Generator[pa.RecordBatch, None, None]:
    """Returns the events of a range after a cursor. ``NotFoundError`` if something was trimmed."""
    if cursor.incarnation != topic.incarnation or len(cursor.ends) != topic.partitions:
        raise NotFoundError(f"topic `{topic.name}`: was created again since: start again")
    check_cursor(context, topic, cursor)
    none_needed = (Floors(),) * topic.partitions  # heads show whether one was trimmed
    pin = Pin(topic.incarnation, cursor.times, cursor.starts, cursor.ends, none_needed)
    return play(context, topic, pin, after=cursor.after, bounds=RANGE_BOUNDS)


def _forged() -> InvalidError:
    return InvalidError("cursor: is not a valid cursor: start again without it")


def begin_range(context: Context, topic: Topic, times: TimeRange) -> RangeCursor:
    """Returns the cursor of a new range: its times, and the current ends of the partitions."""
    if topic.partitions > limits.RANGE_PARTITIONS_MAX:
        raise InvalidError(
            f"topic `{topic.name}`: has {topic.partitions} partitions, pages by time are for "
            f"{limits.RANGE_PARTITIONS_MAX} at most: use `tidelog playback`"
        )
    heads = read_heads(context, topic)
    starts, ends = tuple(h.start for h in heads), tuple(h.next for h in heads)
    return RangeCursor(topic.incarnation, times.start_ms, times.end_ms, starts, ends)


def check_cursor(context: Context, topic: Topic, cursor: RangeCursor) -> None:
    """Refuses when a start has moved, or when the cursor's ends are not those of this topic."""
    if len(cursor.starts) != topic.partitions:
        raise _forged()
    for partition, head in enumerate(read_heads(context, topic)):
        start, end = cursor.starts[partition], cursor.ends[partition]
        if not 0 <= start <= end <= head.next:
            raise _forged()
        if head.start > start:
            raise NotFoundError(
                f"partition `{topic.name}/{partition}`: offsets {start} to {head.start} were "
                "trimmed since the first page, and may be part of the range: start again",
                partition=partition,
                start=head.start,
            )


def _fitting(batch: pa.RecordBatch, rows: int, room: int) -> pa.RecordBatch | None:
    """Returns as many of its events as a page may still have, by their sizes."""
    if rows <= 0 or room <= 0:
        return None
    return batch.slice(0, min(rows, fitting_rows(batch, room)))


def place_of_last(batch: pa.RecordBatch) -> Cursor:
    """Returns the place of a batch's last event."""
    last = batch.num_rows - 1
    time = batch.column("timestamp").cast(pa.int64())[last].as_py()
    return Cursor(
        time, batch.column("partition")[last].as_py(), batch.column("offset")[last].as_py()
    )


_BYTES_MAX = 4 << 20  # of the events that one answer has
_SEARCHED = {"value": pa.binary(), "key": pa.binary(), "id": pa.string(), "type": pa.string()}


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """What an event must have."""

    key: bytes | None = None
    id: str | None = None
    text: str = ""  # in its value, key, id or type; large or small letters are the same
    where: str = ""  # fields of its JSON: `amount > 10 and user.id = u-7`

    @property
    def is_all(self) -> bool:
        """Returns whether every event matches."""
        return self.key is None and self.id is None and not self.text and not self.where

    def fitting(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the events of a batch that match."""
        if self.key is not None:
            batch = batch.filter(pc.equal(batch.column("key"), bytes_array([self.key])[0]))
        if self.id is not None:
            batch = batch.filter(pc.equal(batch.column("id"), self.id))
        if self.text and batch.num_rows:
            batch = batch.filter(self._contains(batch))
        if self.where and batch.num_rows:
            batch = batch.filter(parse_field_filter(self.where).fits(batch.column("value")))
        return batch

    def keep(self, events: Sequence[Event]) -> list[Event]:
        """Returns those of some events that fit."""
        if self.is_all:
            return list(events)
        columns = {
            name: pa.array([getattr(each, name) for each in events], kind)
            for name, kind in _SEARCHED.items()
        }
        rows = pa.array(range(len(events)), pa.int64())
        fitting = self.fitting(pa.record_batch({**columns, "row": rows}))
        return [events[row] for row in fitting.column("row").to_pylist()]

    def check(self) -> None:
        """Raises ``InvalidError`` for text that is not valid, or that holds no conditions."""
        for what in ("id", "text", "where"):
            check_utf8(f"search: {what}", getattr(self, what) or "")
        if self.where:
            parse_field_filter(self.where)

    def _contains(self, batch: pa.RecordBatch) -> pa.Array:
        found = None
        for name in ("value", "key", "id", "type"):
            column = batch.column(name)
            hit = pc.fill_null(pc.match_substring(column, self.text, ignore_case=True), False)
            found = hit if found is None else pc.or_(found, hit)
        return found


@dataclass(slots=True)
class SearchResult:
    """Events that fit, how many were looked at, and where to go on."""

    events: list[Event] = field(default_factory=list)
    looked: int = 0
    next: int | None = None  # an offset; None: to the end
    cursor: RangeCursor | None = None  # the same of a range of times


@dataclass(frozen=True, slots=True)
class SearchTime:
    """How long a search may take."""

    now_s: Callable[[], float]
    until_s: float

    def is_over(self) -> bool:
        return self.now_s() >= self.until_s


def search_partition(
    context: Context,
    topic: Topic,
    partition: int,
    start: int | None,
    query: SearchQuery,
    most: tuple[int, float],
) -> SearchResult:
    """Returns the first events that fit, from an offset on or from the start.

    ``most`` is how many events it returns and how many seconds it looks at most. Raises
    ``NotFoundError`` for an offset that was trimmed.
    """
    limit, seconds = most
    patience = SearchTime(context.clock.monotonic_s, context.clock.monotonic_s() + seconds)
    head, _ = read_head(context, topic, partition)
    reader = Reader(context, topic, partition)
    start = head.start if start is None else start
    if start < head.start:
        reader.check_start(start)
    found, room = SearchResult(), _BYTES_MAX
    for stretch in reader.read(start, head.next):
        batch = stretch.arrow()
        fitting = _some(query.fitting(batch), limit - len(found.events), room)
        room -= fitting.part.nbytes
        found.events += _events(fitting.part)
        if fitting.is_cut:
            at = found.events[-1].position.offset + 1
            found.looked, found.next = at - start, at if at < head.next else None
            return found
        found.looked = stretch.end - start
        if patience.is_over() and stretch.end < head.next:
            found.next = stretch.end
            return found
    return found


def search_range(
    context: Context,
    topic: Topic,
    cursor: RangeCursor,
    query: SearchQuery,
    most: tuple[int, float],
) -> SearchResult:
    """Searches by time, after a cursor. Raises ``NotFoundError`` if some were trimmed since."""
    limit, seconds = most
    patience = SearchTime(context.clock.monotonic_s, context.clock.monotonic_s() + seconds)
    playing = play_range(context, topic, cursor)
    found, room, after = SearchResult(), _BYTES_MAX, cursor.after
    try:
        for batch in playing:
            fitting = _some(query.fitting(batch), limit - len(found.events), room)
            room -= fitting.part.nbytes
            found.events += _events(fitting.part)
            found.looked += batch.num_rows
            after = place_of_last(fitting.part if fitting.is_cut else batch)
            if fitting.is_cut or patience.is_over():
                found.cursor = msgspec.structs.replace(cursor, after=after)
                break
    finally:
        playing.close()
    check_cursor(context, topic, cursor)
    return found


@dataclass(frozen=True, slots=True)
class _BatchSlice:
    part: pa.RecordBatch
    is_cut: bool  # there is no room for more


def _some(batch: pa.RecordBatch, rows: int, room: int) -> _BatchSlice:
    """As many as there is room for, and one at least; never fewer than none."""
    if not batch.num_rows:
        return _BatchSlice(batch, False)
    part = batch.slice(0, min(rows, fitting_rows(batch, room)))
    is_full = part.num_rows == rows or part.nbytes >= room
    return _BatchSlice(part, is_full or part.num_rows < batch.num_rows)


def _events(batch: pa.RecordBatch) -> Iterator[Event]:
    """Returns rows of event columns as events with their positions."""
    times = batch.column("timestamp").cast(pa.int64()).to_pylist()
    for row, time_ms in zip(batch.to_pylist(), times, strict=True):
        yield Event(
            value=row["value"],
            key=row["key"],
            id=row["id"],
            timestamp=time_ms,
            type=row["type"],
            headers=tuple((each["name"], each["value"]) for each in row["headers"] or ()),
            topic=row["topic"],
            partition=row["partition"],
            offset=row["offset"],
        )


_SHOWN_EACH = 3  # a longer row of deleted offsets is one line


@dataclass(frozen=True, slots=True)
class KnownAmendment:
    """An amendment of an event, which is known until it is compiled and swept."""

    kind: Literal["update", "delete"]
    at_ms: int
    sequence: int
    is_compiled: bool


@dataclass(frozen=True, slots=True)
class DeletedOffsets:
    """Offsets whose events were deleted."""

    partition: int
    first: int
    last: int
    mark: KnownAmendment | None = None  # None: only the audit still records it

    @property
    def count(self) -> int:
        return self.last - self.first + 1


KnownAmendments = Mapping[tuple[int, int], KnownAmendment]


def read_known_amendments(
    context: Context, topic: Topic, partition: int, start: int, end: int
) -> dict[tuple[int, int], KnownAmendment]:
    """Returns amendments of ``[start, end)``, only the first of many, by partition and offset."""
    head, _ = read_head(context, topic, partition)
    found = pending(context, topic, partition, head, start, end)
    reader = Reader(context, topic, partition)
    marks: dict[tuple[int, int], KnownAmendment] = {}
    runs: list[Run] = []
    for offset, row in zip(found.offsets.tolist(), found.rows, strict=True):
        if not runs or offset >= runs[-1].end:
            runs = reader.runs(offset) if head.start <= offset < head.next else []
        holder = next((run for run in runs if run.base <= offset < run.end), None)
        journal = None if holder is None else holder.journal
        is_compiled = journal is not None and journal.applied >= row.sequence
        marks[partition, offset] = KnownAmendment(row.kind, row.at_ms, row.sequence, is_compiled)
    return marks


def pending_amendments(
    context: Context, topic: Topic, most: int
) -> list[tuple[int, int, KnownAmendment]]:
    """Returns amendments that are not compiled in, by partition and offset: ``most`` at most."""
    waiting: list[tuple[int, int, KnownAmendment]] = []
    for partition, head in enumerate(read_heads(context, topic)):
        if head.amended is None or len(waiting) >= most:
            continue
        first, last = head.amended
        marks = read_known_amendments(context, topic, partition, first, last + 1)
        waiting += [(*place, mark) for place, mark in marks.items() if not mark.is_compiled]
    return waiting[:most]


def with_gaps(
    partition: int, events: Sequence[Event], marks: KnownAmendments, bounds: tuple[int, int]
) -> list[Event | DeletedOffsets]:
    """Returns the events of consecutive offsets ``[start, end)``, and the gaps between them."""
    rows: list[Event | DeletedOffsets] = []
    at, end = bounds
    for event in events:
        offset = event.position.offset
        rows += _gaps(partition, at, offset, marks)
        rows.append(event)
        at = offset + 1
    return [*rows, *_gaps(partition, at, end, marks)]


def _gaps(partition: int, start: int, end: int, marks: KnownAmendments) -> list[DeletedOffsets]:
    if end <= start:
        return []
    if end - start > _SHOWN_EACH:
        return [DeletedOffsets(partition, start, end - 1, marks.get((partition, start)))]
    return [
        DeletedOffsets(partition, at, at, marks.get((partition, at))) for at in range(start, end)
    ]
