"""Pages of a topic's events as JSON lines: by partition and offset, or by time.

A page has a bounded number of events and bytes, and says where the next one begins, so nothing is
kept between two pages. The first page of a range of times fixes the ends of the partitions, as a
playback does: what is appended later is not part of the range. Its cursor holds these ends and the
place of its last event. When something is trimmed meanwhile, it is unknown whether it was part of
the range, so the next page is refused.
"""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import pyarrow as pa

from tidelog.codec.event_json import batch_lines
from tidelog.codec.sizes import fitting_rows
from tidelog.context import Context
from tidelog.errors import InvalidError, NotFoundError
from tidelog.log.partition_reader import OffsetEvents, Reader
from tidelog.log.status import read_heads
from tidelog.log.topics import read_head
from tidelog.model import limits
from tidelog.model.decoding import decode_msgpack
from tidelog.model.event import check_timestamp
from tidelog.model.playback import Cursor, Floors, Pin, TimeRange
from tidelog.model.topic import Topic
from tidelog.playback.merge import BufferBounds, play

__all__ = [
    "RANGE_BOUNDS",
    "From",
    "Page",
    "RangeCursor",
    "RangePage",
    "begin_range",
    "check_cursor",
    "place_of_last",
    "play_range",
    "read_page",
    "read_range",
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
