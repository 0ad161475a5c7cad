"""``GET /topics/{topic}/events``: the events of ``[start, end)`` by time, page by page.

The first page fixes the ends of the partitions, as a playback does: what is appended later is not
part of the range. A page's cursor holds these, and the place of its last event, so the server keeps
nothing between pages, and any server of the home can give the next one. When something is trimmed
meanwhile, it is unknown whether it was part of the range, so the next page is refused.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa
from starlette.requests import Request
from starlette.responses import Response

from tidelog.codec.event_json import batch_lines
from tidelog.codec.sizes import fitting_rows
from tidelog.context import Context
from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.log.topics import read_head
from tidelog.model.decoding import decode_msgpack
from tidelog.model.event import check_timestamp, to_iso
from tidelog.model.partition_rows import Head
from tidelog.model.playback import Cursor, Floors, Pin, TimeRange, time_range
from tidelog.model.topic import Topic
from tidelog.playback.merge import BufferBounds, play
from tidelog.server.api.by_offset import LINES_TYPE, as_array, limit_of
from tidelog.server.http import limits
from tidelog.server.http.errors import encode
from tidelog.server.http.limits import ServerThreads
from tidelog.server.http.metrics import Metrics
from tidelog.server.http.request import check_parameters

__all__ = [
    "RANGE_BOUNDS",
    "ByTimeHandlers",
    "RangeCursor",
    "RangePage",
    "begin_range",
    "check_heads",
    "place_of_last",
    "read_range",
]

RANGE_BOUNDS = BufferBounds(
    window_bytes=4 << 20, ahead_bytes=0, held_bytes=32 << 20, batch_events=1_000
)
_CURSOR_MAX = 16_384  # characters


class RangeCursor(msgspec.Struct, frozen=True, array_like=True):
    """What a page must know: the range, and how far it was read."""

    incarnation: str
    start_ms: int
    end_ms: int
    starts: tuple[int, ...]  # of the partitions, when the first page was read
    ends: tuple[int, ...]
    after: Cursor | None = None  # the last event that was given

    def text(self) -> str:
        """As it stands in a URL."""
        packed = msgspec.msgpack.encode(self)
        return base64.urlsafe_b64encode(packed).rstrip(b"=").decode()

    @classmethod
    def of_text(cls, text: str) -> RangeCursor:
        """``InvalidError`` for what no page has given."""
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


class ByTimeHandlers:
    """Events by time."""

    def __init__(self, home: Home, threads: ServerThreads, metrics: Metrics) -> None:
        self._home = home
        self._threads = threads
        self._metrics = metrics

    async def events(self, request: Request) -> Response:
        """``GET /topics/{topic}/events``"""
        check_parameters(request, ("start", "end", "limit", "cursor"))
        params = request.query_params
        limit = limit_of(params)
        cursor, start, end = (params.get(name) for name in ("cursor", "start", "end"))
        if cursor is not None and (start is not None or end is not None):
            raise InvalidError("query: a cursor knows its range: leave out start and end")
        if cursor is not None and len(cursor) > _CURSOR_MAX:
            raise _forged()
        page = await self._threads.run(
            self._read, request.path_params["topic"], cursor, (start, end), limit
        )
        self._metrics.events_out += page.count
        return _response(request, page, limit)

    def _read(
        self, name: str, cursor: str | None, given: tuple[str | None, str | None], limit: int
    ) -> RangePage:
        context = self._home.context
        topic = self._home.topic(name)
        if cursor is not None:
            return read_range(context, topic, RangeCursor.of_text(cursor), limit)
        times = time_range(*given, context.clock.now_ms())
        return read_range(context, topic, begin_range(context, topic, times), limit)


def read_range(context: Context, topic: Topic, cursor: RangeCursor, limit: int) -> RangePage:
    """The next events of a range. ``NotFoundError`` when something was trimmed since it began."""
    if cursor.incarnation != topic.incarnation or len(cursor.ends) != topic.partitions:
        raise NotFoundError(f"topic `{topic.name}`: was created again since: start again")
    check_heads(context, topic, cursor)
    times = TimeRange(cursor.start_ms, cursor.end_ms)
    none_needed = (Floors(),) * topic.partitions  # whether one was trimmed, heads tell
    pin = Pin(topic.incarnation, times, cursor.starts, cursor.ends, none_needed)
    playing = play(context, topic, pin, after=cursor.after, bounds=RANGE_BOUNDS)
    lines: list[bytes] = []
    count, room, after, more = 0, limits.PAGE_BYTES_MAX, cursor.after, False
    try:
        for batch in playing:
            part = _fitting(batch, limit - count, room)
            if part is not None:
                lines.append(batch_lines(part))
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
    check_heads(context, topic, cursor)
    following = msgspec.structs.replace(cursor, after=after) if more else None
    return RangePage(b"".join(lines), count, times, following)


def _forged() -> InvalidError:
    return InvalidError("cursor: is not a valid cursor: start again without it")


def begin_range(context: Context, topic: Topic, times: TimeRange) -> RangeCursor:
    """Where a range begins: its times, and the ends of the partitions as they are now."""
    if topic.partitions > limits.PARTITIONS_TAILED_MAX:
        raise InvalidError(
            f"topic `{topic.name}`: has {topic.partitions} partitions, over HTTP "
            f"{limits.PARTITIONS_TAILED_MAX} at most are read by time: use `tidelog playback`"
        )
    heads = _heads(context, topic)
    starts, ends = tuple(h.start for h in heads), tuple(h.next for h in heads)
    return RangeCursor(topic.incarnation, times.start_ms, times.end_ms, starts, ends)


def _heads(context: Context, topic: Topic) -> Sequence[Head]:
    return [read_head(context, topic, partition)[0] for partition in range(topic.partitions)]


def check_heads(context: Context, topic: Topic, cursor: RangeCursor) -> None:
    """Refuse when a start has moved, or when the cursor's ends are not those of this topic."""
    if len(cursor.starts) != topic.partitions:
        raise _forged()
    for partition, head in enumerate(_heads(context, topic)):
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
    """The place of a batch's last event."""
    last = batch.num_rows - 1
    time = batch.column("timestamp").cast(pa.int64())[last].as_py()
    return Cursor(
        time, batch.column("partition")[last].as_py(), batch.column("offset")[last].as_py()
    )


def _response(request: Request, page: RangePage, limit: int) -> Response:
    headers = {"cache-control": "no-store"}
    following = None if page.following is None else page.following.text()
    if following is not None:
        path = f"/topics/{request.path_params['topic']}/events"
        headers["link"] = f'<{path}?cursor={following}&limit={limit}>; rel="next"'
    if LINES_TYPE in request.headers.get("accept", ""):
        return Response(page.lines, headers=headers, media_type=LINES_TYPE)
    front = encode(
        {
            "topic": request.path_params["topic"],
            "start": to_iso(page.times.start_ms),
            "end": to_iso(page.times.end_ms),
            "next": following,
        }
    )
    body = front[:-1] + b',"events":' + as_array(page.lines) + b"}"
    return Response(body, headers=headers, media_type="application/json")
