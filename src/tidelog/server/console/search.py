"""Finding events, with an end: so many are looked at in one request, and the next goes on there.

What is looked for is a key, an id, or a text that the event contains; or nothing, and all fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.sizes import fitting_rows
from tidelog.errors import NotFoundError
from tidelog.log.base import Log
from tidelog.log.read import Reader
from tidelog.log.topics import read_head
from tidelog.model.event import Event
from tidelog.model.playback import Floors, Pin, TimeRange
from tidelog.model.topic import Topic
from tidelog.playback.play import play
from tidelog.server.lookup import RANGE_BOUNDS, RangeCursor, check_heads, place_of_last

__all__ = ["Found", "Sought", "in_partition", "in_range"]

_BYTES_MAX = 4 << 20  # of the events that one answer has


@dataclass(frozen=True, slots=True)
class Sought:
    """What an event must have."""

    key: bytes | None = None
    id: str | None = None
    text: str = ""  # in its value, key, id or type; large or small letters are the same

    @property
    def is_all(self) -> bool:
        return self.key is None and self.id is None and not self.text

    def fitting(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The events of a batch in event columns that fit."""
        if self.key is not None:
            batch = batch.filter(pc.equal(batch.column("key"), pa.scalar(self.key, pa.binary())))
        if self.id is not None:
            batch = batch.filter(pc.equal(batch.column("id"), self.id))
        if self.text and batch.num_rows:
            batch = batch.filter(self._contains(batch))
        return batch

    def _contains(self, batch: pa.RecordBatch) -> pa.Array:
        found = None
        for name in ("value", "key", "id", "type"):
            column = batch.column(name)
            hit = pc.fill_null(pc.match_substring(column, self.text, ignore_case=True), False)
            found = hit if found is None else pc.or_(found, hit)
        return found


@dataclass(slots=True)
class Found:
    """Events that fit, how many were looked at, and where to go on."""

    events: list[Event] = field(default_factory=list)
    looked: int = 0
    next: int | None = None  # an offset; None: to the end
    cursor: RangeCursor | None = None  # the same of a range of times


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a search may take."""

    now_s: Callable[[], float]
    until_s: float

    def is_over(self) -> bool:
        return self.now_s() >= self.until_s


def in_partition(
    log: Log, topic: Topic, partition: int, start: int, sought: Sought, most: tuple[int, float]
) -> Found:
    """The first events from an offset on that fit: so many at most, in so many seconds.

    ``NotFoundError`` for an offset that was trimmed.
    """
    limit, seconds = most
    patience = Patience(log.clock.monotonic_s, log.clock.monotonic_s() + seconds)
    head, _ = read_head(log, topic, partition)
    reader = Reader(log, topic, partition)
    if start < head.start:
        reader.check_start(start)
    found, room = Found(), _BYTES_MAX
    for stretch in reader.stretches(start, head.next):
        batch = stretch.arrow()
        fitting = _some(sought.fitting(batch), limit - len(found.events), room)
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


def in_range(
    log: Log, topic: Topic, cursor: RangeCursor, sought: Sought, most: tuple[int, float]
) -> Found:
    """The same by time, after a cursor. ``NotFoundError`` when something was trimmed since."""
    limit, seconds = most
    patience = Patience(log.clock.monotonic_s, log.clock.monotonic_s() + seconds)
    if cursor.incarnation != topic.incarnation or len(cursor.ends) != topic.partitions:
        raise NotFoundError(f"topic `{topic.name}`: was made again since: begin anew")
    check_heads(log, topic, cursor)
    times = TimeRange(cursor.start_ms, cursor.end_ms)
    floors = (Floors(),) * topic.partitions
    pin = Pin(topic.incarnation, times, cursor.starts, cursor.ends, floors)
    playing = play(log, topic, pin, after=cursor.after, bounds=RANGE_BOUNDS)
    found, room, after = Found(), _BYTES_MAX, cursor.after
    try:
        for batch in playing:
            fitting = _some(sought.fitting(batch), limit - len(found.events), room)
            room -= fitting.part.nbytes
            found.events += _events(fitting.part)
            found.looked += batch.num_rows
            after = place_of_last(fitting.part if fitting.is_cut else batch)
            if fitting.is_cut or patience.is_over():
                found.cursor = msgspec.structs.replace(cursor, after=after)
                break
    finally:
        playing.close()
    check_heads(log, topic, cursor)
    return found


@dataclass(frozen=True, slots=True)
class _Some:
    part: pa.RecordBatch
    is_cut: bool  # there is no room for more


def _some(batch: pa.RecordBatch, rows: int, room: int) -> _Some:
    """As many as there is room for, and one at least; never fewer than none."""
    if not batch.num_rows:
        return _Some(batch, False)
    part = batch.slice(0, min(rows, fitting_rows(batch, room)))
    is_full = part.num_rows == rows or part.nbytes >= room
    return _Some(part, is_full or part.num_rows < batch.num_rows)


def _events(batch: pa.RecordBatch) -> Iterator[Event]:
    """In event columns, as events with their positions."""
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
