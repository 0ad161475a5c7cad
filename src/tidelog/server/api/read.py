"""Reading over HTTP: topics, events by partition and offset with long polling, and events by time.

The cursor of a page by time holds the range and the place of the page's last event
(``playback/pages.py``). So the server keeps nothing between pages, and any server of the home can
return the next one.

**Waiting** for new events needs no thread: commits of this process wake at once, others by polling.
One poll of a topic serves all requests that wait for it, in threads of its own: however many tails
are idle, a topic costs one look a second, and appends do not wait behind them. A wake-up is a hint
only: a request that is woken looks into the catalog itself. A poll that fails wakes all, so that
each finds what is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from tidelog.context import Context
from tidelog.errors import InvalidError, NotFoundError, contained
from tidelog.home import Home
from tidelog.log.status import Lag, partition_ends
from tidelog.model import limits as model_limits
from tidelog.model.event import to_iso
from tidelog.model.playback import time_range
from tidelog.model.topic import Topic
from tidelog.playback.pages import (
    From,
    Page,
    RangeCursor,
    RangePage,
    begin_range,
    read_page,
    read_range,
)
from tidelog.server.http import limits
from tidelog.server.http.auth import ADMISSION, Admission
from tidelog.server.http.errors import BusyError, encode
from tidelog.server.http.limits import CLIENT_SHARE, TAILS_MAX, ServerThreads
from tidelog.server.http.metrics import Metrics
from tidelog.server.http.request import check_parameters

__all__ = [
    "ByTimeHandlers",
    "EventHandlers",
    "PartitionWatch",
    "Reads",
    "Waiter",
    "limit_of",
    "offset_of",
    "partition_of",
]


_FIRST_S = 0.1  # until the catalog is looked at again; longer each time
_GROWTH = 1.5
_LONGEST_S = 1.0
_THREADS = 4  # for polls: a topic has one at a time

_Ends = tuple[int, int]  # start and next of a partition


class PartitionWatch:
    """The requests that wait for events, by topic and partition."""

    def __init__(self, context: Context, metrics: Metrics) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = context
        self._metrics = metrics
        self._pool = ThreadPoolExecutor(_THREADS, "tidelog-poll")
        self._topics: dict[str, _TopicPoll] = {}  # by incarnation
        self._clients: Counter[str] = Counter()  # requests that wait, by client
        self.stopping = False
        context.wakeups.listen(self._committed)

    @contextlib.contextmanager
    def waiting(self, topic: Topic, partitions: Iterable[int], client: str) -> Iterator[Waiter]:
        """Registers a request that waits for partitions. Raises ``BusyError`` if too many wait."""
        self.check_room(client)
        poll = self._topics.get(topic.incarnation)
        if poll is None:
            poll = self._topics[topic.incarnation] = _TopicPoll(self._context, topic, self._pool)
        waiter = Waiter(self, frozenset(partitions))
        poll.waiters.add(waiter)
        poll.start()
        self._metrics.waiting += 1
        self._clients[client] += 1
        try:
            yield waiter
        finally:
            self._metrics.waiting -= 1
            self._clients[client] -= 1
            if not self._clients[client]:
                del self._clients[client]
            poll.waiters.discard(waiter)
            if not poll.waiters:
                poll.stop()
                self._topics.pop(topic.incarnation, None)

    def check_room(self, client: str) -> None:
        """Raises ``BusyError`` if too many requests wait, of all clients or of this one."""
        if self._metrics.waiting >= TAILS_MAX:
            raise BusyError(
                f"server: {TAILS_MAX} requests wait for events already: poll later",
                retry_after_s=5,
            )
        most = max(1, TAILS_MAX // CLIENT_SHARE)
        if self._clients[client] >= most:
            raise BusyError(
                f"client: {most} of its requests wait for events already: poll later",
                retry_after_s=5,
            )

    def stop(self) -> None:
        """Wakes all requests, since none may wait any more."""
        self.stopping = True
        for poll in self._topics.values():
            poll.wake(None)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _committed(self, incarnation: str, partition: int, next_offset: int) -> None:
        """Wakes requests, from the thread of a commit."""
        if incarnation in self._topics:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no request waits
                self._loop.call_soon_threadsafe(self._wake, incarnation, partition)

    def _wake(self, incarnation: str, partition: int) -> None:
        poll = self._topics.get(incarnation)
        if poll is not None:
            poll.wake(partition)


class Waiter:
    """A request that waits. A commit between two calls of :meth:`wait` wakes the second."""

    def __init__(self, watch: PartitionWatch, partitions: frozenset[int]) -> None:
        self.partitions = partitions
        self.event = asyncio.Event()
        self.was_woken = False  # by the last wait: else the catalog has nothing new
        self._watch = watch

    async def wait(self, most_s: float) -> bool:
        """Waits until there may be events, at most this long. Returns whether to go on waiting."""
        self.was_woken = False
        if self._watch.stopping or most_s <= 0:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self.event.wait()
            self.was_woken = True
        self.event.clear()
        return not self._watch.stopping


class _TopicPoll:
    """Polls the partitions of one topic that requests wait for, as long as any waits."""

    def __init__(self, context: Context, topic: Topic, pool: ThreadPoolExecutor) -> None:
        self.waiters: set[Waiter] = set()
        self._context = context
        self._topic = topic
        self._pool = pool
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts polling."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Stops polling."""
        if self._task is not None:
            self._task.cancel()

    def wake(self, partition: int | None) -> None:
        """Wakes the requests that wait for a partition; with None, all."""
        for waiter in self.waiters:
            if partition is None or partition in waiter.partitions:
                waiter.event.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        known: dict[int, _Ends] = {}
        pause_s = _FIRST_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * _GROWTH, _LONGEST_S)
            wanted = sorted(set().union(*(waiter.partitions for waiter in self.waiters)))
            found: dict[int, _Ends] | None = None
            with contained("poll", lambda error: None):  # each request finds out by itself
                found = await loop.run_in_executor(self._pool, self._look, wanted)
            if found is None:
                known = {}
                self.wake(None)
                continue
            for partition, ends in found.items():
                if known.get(partition) != ends:
                    pause_s = _FIRST_S
                    self.wake(partition)
            known = found

    def _look(self, partitions: list[int]) -> dict[int, _Ends]:
        return partition_ends(self._context, self._topic, partitions)


_LINES_TYPE = "application/x-ndjson"
_LIMIT = 100  # events in a page, where none is given
_WORDS: tuple[Literal["earliest"], Literal["latest"]] = ("earliest", "latest")


class EventHandlers:
    """The base of handlers that return events, now or as they come."""

    def __init__(
        self,
        home: Home,
        threads: ServerThreads,
        watch: PartitionWatch,
        metrics: Metrics,
        check: Callable[[Admission], None],
    ) -> None:
        self._check = check  # whether what let a request in still does
        self._home = home
        self._threads = threads
        self._watch = watch
        self._metrics = metrics


class Reads(EventHandlers):
    """What ``GET`` answers about topics and their events."""

    async def topics(self, request: Request) -> Response:
        """``GET /topics``"""
        check_parameters(request, ())
        found = await self._threads.run(self._home.topics)
        may: Admission = request.scope[ADMISSION]
        shown = [
            _settings(topic)
            for topic in found
            if topic.state == "ready" and may.allows("read", topic.name)
        ]
        return _json({"topics": shown})

    async def topic(self, request: Request) -> Response:
        """``GET /topics/{topic}``"""
        check_parameters(request, ())
        return _json(await self._threads.run(self._show, request.path_params["topic"]))

    async def consumers(self, request: Request) -> Response:
        """``GET /topics/{topic}/consumers``"""
        check_parameters(request, ())
        return _json(await self._threads.run(self._consumers, request.path_params["topic"]))

    async def events(self, request: Request) -> Response:
        """``GET /topics/{topic}/partitions/{partition}/events``"""
        check_parameters(request, ("offset", "limit", "wait"))
        params = request.query_params
        offset = offset_of(params.get("offset", "earliest"))
        limit = limit_of(params)
        wait_s = _seconds(params.get("wait", "0"))
        topic = await self._threads.run(self._home.topic, request.path_params["topic"])
        partition = partition_of(topic, request.path_params["partition"])
        admission: Admission = request.scope[ADMISSION]

        def read(begin: From) -> tuple[Page, Response]:  # all that is large, away from the loop
            page = read_page(self._home.context, topic, partition, begin, limit)
            return page, _page_response(request, topic, partition, page, limit)

        page, response = await self._threads.run(read, offset)
        if wait_s and not page.count:
            with self._watch.waiting(topic, (partition,), admission.client) as waiter:
                page, response = await self._wait(read, page.next, waiter, wait_s)
        self._check(admission)  # it may have waited for long
        self._metrics.events_out += page.count
        return response

    async def _wait(
        self,
        read: Callable[[From], tuple[Page, Response]],
        offset: int,
        waiter: Waiter,
        wait_s: float,
    ) -> tuple[Page, Response]:
        """Returns a page with at least one event, or after some time one without."""
        clock = self._home.context.clock
        until_s = clock.monotonic_s() + wait_s
        while True:
            # Read again first: events may have come before this request could be woken.
            page, response = await self._threads.run(read, offset)
            offset = page.next
            if page.count or not await waiter.wait(until_s - clock.monotonic_s()):
                return page, response
            if not waiter.was_woken:
                return page, response

    def _show(self, name: str) -> dict[str, Any]:
        topic = self._home.topic(name)
        rows = [
            {"partition": each.partition, "start": each.start, "next": each.next}
            for each in self._home.partitions(name, runs=False)
        ]
        return {**_settings(topic), "per_partition": rows}

    def _consumers(self, name: str) -> dict[str, Any]:
        shown: dict[str, list[Lag]] = {}
        for each in self._home.lag(name):
            shown.setdefault(each.consumer, []).append(each)
        consumers = [
            {
                "name": consumer,
                "lag": sum(each.events for each in lags),
                "partitions": [
                    {
                        "partition": each.partition,
                        "cursor": each.cursor,
                        "end": each.end,
                        "lag": each.events,
                        "owner": each.owner or None,
                    }
                    for each in lags
                ],
            }
            for consumer, lags in shown.items()
        ]
        return {"topic": name, "consumers": consumers}


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

        def read() -> tuple[RangePage, Response]:  # all that is large, away from the loop
            page = self._read(request.path_params["topic"], cursor, (start, end), limit)
            return page, _range_response(request, page, limit)

        page, response = await self._threads.run(read)
        self._metrics.events_out += page.count
        return response

    def _read(
        self, name: str, cursor: str | None, given: tuple[str | None, str | None], limit: int
    ) -> RangePage:
        context = self._home.context
        topic = self._home.topic(name)
        if cursor is not None:
            return read_range(context, topic, RangeCursor.of_text(cursor), limit)
        times = time_range(*given, context.clock.now_ms())
        return read_range(context, topic, begin_range(context, topic, times), limit)


def offset_of(text: str) -> From:
    """Returns where to read from: an offset, ``earliest`` or ``latest``."""
    for word in _WORDS:
        if text == word:
            return word
    return _whole("offset", text, 0, 2**63 - 1, "`earliest`, `latest`, or ")


def limit_of(params: QueryParams) -> int:
    """Returns how many events a page may have."""
    return _whole("limit", params.get("limit", str(_LIMIT)), 1, limits.PAGE_EVENTS_MAX)


def partition_of(topic: Topic, text: str) -> int:
    """Returns an existing partition. Raises ``InvalidError`` or ``NotFoundError``."""
    partition = _whole("partition", text, 0, model_limits.PARTITIONS_MAX - 1)
    if partition >= topic.partitions:
        raise NotFoundError(
            f"topic `{topic.name}`: has no partition {partition}: {topic.partitions_hint()}"
        )
    return partition


def _whole(name: str, text: str, least: int, most: int, other: str = "") -> int:
    """Returns a whole number in its range. Raises ``InvalidError``."""
    if text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most:
        return int(text)
    raise InvalidError(f"{name} `{text[:80]}`: give {other}a whole number from {least} to {most}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= limits.WAIT_S_MAX:
        raise InvalidError(f"wait `{text[:80]}`: give 0 to {limits.WAIT_S_MAX:g} seconds")
    return seconds


def _settings(topic: Topic) -> dict[str, Any]:
    """Returns what a reader may know about a topic; its notification targets are left out."""
    return {
        "name": topic.name,
        "partitions": topic.partitions,
        "slot_ms": topic.slot_ms,
        "created": to_iso(topic.created_ms),
    }


def _page_response(
    request: Request, topic: Topic, partition: int, page: Page, limit: int
) -> Response:
    path = f"/topics/{topic.name}/partitions/{partition}/events"
    headers = {
        "cache-control": "no-store",
        "link": f'<{path}?offset={page.next}&limit={limit}>; rel="next"',
        "tidelog-next-offset": str(page.next),
    }
    if _LINES_TYPE in request.headers.get("accept", ""):
        return Response(page.lines, headers=headers, media_type=_LINES_TYPE)
    front = encode(
        {
            "topic": topic.name,
            "partition": partition,
            "start": page.start,
            "end": page.end,
            "next": page.next,
        }
    )
    return Response(_with_events(front, page.lines), headers=headers, media_type="application/json")


def _range_response(request: Request, page: RangePage, limit: int) -> Response:
    headers = {"cache-control": "no-store"}
    following = None if page.following is None else page.following.text()
    if following is not None:
        path = f"/topics/{request.path_params['topic']}/events"
        headers["link"] = f'<{path}?cursor={following}&limit={limit}>; rel="next"'
    if _LINES_TYPE in request.headers.get("accept", ""):
        return Response(page.lines, headers=headers, media_type=_LINES_TYPE)
    front = encode(
        {
            "topic": request.path_params["topic"],
            "start": to_iso(page.times.start_ms),
            "end": to_iso(page.times.end_ms),
            "next": following,
        }
    )
    return Response(_with_events(front, page.lines), headers=headers, media_type="application/json")


def _json(value: dict[str, Any]) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(encode(value), headers=headers, media_type="application/json")


def _with_events(front: bytes, lines: bytes) -> bytes:
    """Returns a JSON object with JSON lines as one more array; within a line JSON has no newline.

    Copies the lines, which may be megabytes, no more often than it must.
    """
    events = memoryview(lines.replace(b"\n", b","))[:-1]
    return b"".join((front[:-1], b',"events":[', events, b"]}"))
