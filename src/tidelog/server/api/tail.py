"""``GET /topics/{topic}/tail``: events as they come, as server-sent events.

Each event's id names the offsets to go on from, partition by partition (``0:41,1:7``), and so does
the id that the stream begins with. So a client that connects again with ``Last-Event-ID``, as
browsers do by themselves, misses nothing and gets nothing twice. Order holds within a partition. A
stream ends when the topic is deleted or trimmed beneath it, or when its token is revoked, or
expires, with an event named ``error``; and when the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from tidelog.context import Context
from tidelog.errors import InvalidError, TidelogError
from tidelog.log.status import partition_ends
from tidelog.model.topic import Topic
from tidelog.playback.pages import From, Page, read_page
from tidelog.server.api.read import EventHandlers, Waiter, offset_of, partition_of
from tidelog.server.http.auth import ADMISSION, Admission
from tidelog.server.http.errors import encode, shape
from tidelog.server.http.limits import PARTITIONS_TAILED_MAX, ServerThreads
from tidelog.server.http.request import PIECE_BYTES, check_parameters

__all__ = ["Tails", "parse_cursors"]

_KEEP_ALIVE_S = 15.0  # after which a quiet stream says that it lives
_CHECK_S = 1.0  # in which a quiet stream sees that its token was revoked
_AT_ONCE = 500  # events of a partition before the next one has its turn
Ends = dict[int, tuple[int, int]]  # by partition, its start and next offset
Frames = tuple[bytes, int, int]  # of a page: its events as text, how many, and the next offset
_CURSORS = re.compile(r"\d{1,5}:\d{1,18}(,\d{1,5}:\d{1,18})*")


class Tails(EventHandlers):
    """Streams of events."""

    @functools.cached_property
    def _shared(self) -> _SharedReads:
        return _SharedReads(self._home.context, self._threads)

    async def tail(self, request: Request) -> Response:
        """``GET /topics/{topic}/tail``: checks the request, then returns the stream."""
        check_parameters(request, ("partition", "from", "token"))
        params = request.query_params
        start = params.get("from", "latest")
        topic = await self._threads.run(self._home.topic, request.path_params["topic"])
        partitions = _partitions(topic, params.get("partition"))
        resumed = parse_cursors(request.headers.get("last-event-id", ""), partitions)
        self._watch.check_room(request.scope[ADMISSION].client)
        cursors = await self._threads.run(
            _begin, self._home.context, topic, partitions, offset_of(start), resumed
        )
        return _StreamResponse(
            self._frames(topic, cursors, request.scope[ADMISSION]),
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
            media_type="text/event-stream",
        )

    async def _frames(
        self, topic: Topic, cursors: dict[int, int], admission: Admission
    ) -> AsyncIterator[bytes]:
        """Yields the stream. An error is its last event."""
        try:
            with self._watch.waiting(topic, cursors, admission.client) as waiter:
                yield b"retry: 1000\nid: %s\n\n" % _spell(cursors).encode()
                async for frame in self._news(topic, cursors, waiter, admission):
                    yield frame
        except TidelogError as exc:
            yield b"event: error\ndata: " + encode(shape(exc)) + b"\n\n"

    async def _news(
        self, topic: Topic, cursors: dict[int, int], waiter: Waiter, admission: Admission
    ) -> AsyncIterator[bytes]:
        """Yields new events page by page, and a comment now and then while there are none."""
        context = self._home.context
        spoke_s = context.clock.monotonic_s()
        since = self._shared.mark()
        going = look = True
        while going:
            changed = []
            if look:
                ends = await self._shared.ends(topic, frozenset(cursors))
                changed = _changed(ends, cursors)
            for partition in changed:
                frames, count, following = await self._shared.frames(
                    topic, partition, cursors, since
                )
                self._check(admission)
                if count:
                    yield frames
                    spoke_s = context.clock.monotonic_s()
                cursors[partition] = following
                self._metrics.events_out += count
            self._check(admission)
            if context.clock.monotonic_s() - spoke_s > _KEEP_ALIVE_S:
                yield b": still here\n\n"
                spoke_s = context.clock.monotonic_s()
            going = not self._watch.stopping
            look = bool(changed)
            if not changed:
                going = await waiter.wait(_CHECK_S)
                look = waiter.was_woken


class _StreamResponse(StreamingResponse):
    """A stream that frees its place among the tails at once, however it ends.

    Otherwise, Python closes an abandoned generator only when it collects garbage.
    """

    async def stream_response(self, send: Send) -> None:
        async with contextlib.aclosing(cast("AsyncGenerator[bytes]", self.body_iterator)):
            await super().stream_response(send)


class _SharedReads:
    """Reads for all tails that want the same: one commit wakes every tail of its topic."""

    def __init__(self, context: Context, threads: ServerThreads) -> None:
        self._context = context
        self._threads = threads
        self._ends: dict[object, asyncio.Task[Ends]] = {}  # that have not begun
        self._begun = 0  # reads of pages
        self._pages: dict[object, tuple[int, asyncio.Task[Page]]] = {}  # under way, by number
        self._frames: dict[object, asyncio.Task[Frames]] = {}  # the same

    async def ends(self, topic: Topic, partitions: frozenset[int]) -> Ends:
        """Reads the ends after this call: a read that has begun may miss what woke a tail."""
        key = (topic.incarnation, partitions)

        async def read() -> Ends:
            await asyncio.sleep(0)  # tails that are woken together join
            self._ends.pop(key, None)
            return await self._threads.run(partition_ends, self._context, topic, sorted(partitions))

        task = self._ends.get(key)
        if task is None:
            task = self._ends[key] = asyncio.create_task(read())
            task.add_done_callback(_note_failure)
        return await asyncio.shield(task)

    def mark(self) -> int:
        """Returns the number of reads so far. A tail that starts now joins none of them."""
        return self._begun

    async def page(self, topic: Topic, partition: int, offset: int, since: int) -> Page:
        """Returns a page from an offset on, which may be a read that another tail has begun.

        Joins only reads that began after ``since``, the mark of when the tail started: an older one
        may hold an event that was deleted before.
        """
        key = (topic.incarnation, partition, offset)
        self._begun += 1
        number = self._begun

        async def read() -> Page:
            wanted = (self._context, topic, partition, offset, _AT_ONCE)
            try:
                return await self._threads.run(read_page, *wanted)
            finally:
                if self._pages.get(key, (0,))[0] == number:
                    del self._pages[key]

        begun, task = self._pages.get(key, (0, None))
        if task is None or begun <= since:
            task = asyncio.create_task(read())
            self._pages[key] = (number, task)
            task.add_done_callback(_note_failure)
        return await asyncio.shield(task)

    async def frames(
        self, topic: Topic, partition: int, cursors: dict[int, int], since: int
    ) -> Frames:
        """Returns the frames of the next page.

        Tails that share a large page and are at the same place share its frames, which a thread
        makes: a hundred of them would take memory and hold the loop.
        """
        page = await self.page(topic, partition, cursors[partition], since)
        if len(page.lines) <= PIECE_BYTES:
            return _frames_of(cursors, partition, page)
        key = (id(page), _spell(cursors))

        async def make() -> Frames:
            try:
                return await self._threads.run(_frames_of, dict(cursors), partition, page)
            finally:
                self._frames.pop(key, None)

        task = self._frames.get(key)
        if task is None:
            task = self._frames[key] = asyncio.create_task(make())
            task.add_done_callback(_note_failure)
        return await asyncio.shield(task)


def _note_failure(task: asyncio.Task[Any]) -> None:
    """Retrieves the error of a read, which asyncio would log if no tail waits for it any more."""
    if not task.cancelled():
        task.exception()


def parse_cursors(text: str, partitions: list[int]) -> dict[int, int]:
    """Returns the offsets in an event's id; ignores those of other partitions."""
    if not text:
        return {}
    if not _CURSORS.fullmatch(text):
        raise InvalidError(
            f"header Last-Event-ID `{text[:80]}`: send the `id:` of the last message, such as 0:17"
        )
    pairs = (pair.split(":") for pair in text.split(","))
    given = {int(partition): int(offset) for partition, offset in pairs}
    return {partition: given[partition] for partition in partitions if partition in given}


def _partitions(topic: Topic, given: str | None) -> list[int]:
    if given is not None:
        return [partition_of(topic, given)]
    if topic.partitions > PARTITIONS_TAILED_MAX:
        raise InvalidError(
            f"topic `{topic.name}`: has {topic.partitions} partitions, a tail follows "
            f"{PARTITIONS_TAILED_MAX} at most: give `partition`"
        )
    return list(range(topic.partitions))


def _begin(
    context: Context, topic: Topic, partitions: list[int], start: From, resumed: dict[int, int]
) -> dict[int, int]:
    """Returns where to begin in each partition. Raises ``NotFoundError`` for a missing offset."""
    cursors = {}
    for partition in partitions:
        offset = resumed.get(partition, start)
        cursors[partition] = read_page(context, topic, partition, offset, 1).first
    return cursors


def _changed(ends: Ends, cursors: dict[int, int]) -> list[int]:
    """Returns the partitions that have new events, or were trimmed past the cursor."""
    return [
        each for each, (start, end) in ends.items() if end > cursors[each] or start > cursors[each]
    ]


def _frames_of(cursors: dict[int, int], partition: int, page: Page) -> Frames:
    """Returns the events of a page, each with the id from which to resume after it."""
    before, _, after = _spell(cursors | {partition: -1}).encode().partition(b"-1")
    frames = [
        b"id: %s%d%s\ndata: %s\n\n" % (before, at + 1, after, line)
        for at, line in zip(page.offsets, page.lines.splitlines(), strict=True)
    ]
    return b"".join(frames), page.count, page.next


def _spell(cursors: dict[int, int]) -> str:
    return ",".join(f"{partition}:{cursors[partition]}" for partition in sorted(cursors))
