"""Topics that are open for writing, each with one producer that all requests share.

Requests do not hold a thread while their events become durable: each waits for a future of the
event loop, and a flush that ends wakes all of its requests by one call into the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from tidelog.errors import TidelogError, UnknownOutcomeError
from tidelog.home import Home
from tidelog.log.producer.flush import Flush, SendFuture
from tidelog.log.producer.producer import Producer, close_quietly
from tidelog.model.event import Event
from tidelog.model.topic import Topic, check_topic_name
from tidelog.server.http import limits
from tidelog.server.http.errors import BusyError
from tidelog.server.http.limits import ServerThreads

__all__ = ["OpenTopic", "OpenTopics", "RoomPromise"]


class RoomPromise:
    """Room in a producer's buffer for events of one request that were not sent yet."""

    __slots__ = ("left",)

    def __init__(self, size: int) -> None:
        self.left = size  # bytes; only the thread that sends them changes it


class OpenTopic:
    """One topic, its producer, and the requests that wait for each flush."""

    def __init__(self, topic: Topic, producer: Producer, loop: asyncio.AbstractEventLoop) -> None:
        self.topic = topic
        self.producer = producer
        self.users = 0  # requests that may still send
        self.dropped = False  # closed when it has no users
        # Held from a look at the room until its use, so that no thread waits for the store.
        self.entering = threading.Lock()
        self._promises: set[RoomPromise] = set()
        self._loop = loop
        self._waiting: dict[Flush, tuple[float, list[asyncio.Future[None]]]] = {}

    def check_room(self, size: int) -> None:
        """Raises ``BusyError`` unless the buffer has room for this, beside what was promised."""
        if self.producer.room - sum(each.left for each in self._promises) < size:
            raise BusyError(
                f"topic `{self.topic.name}`: more events are on their way than the server "
                "holds: try again",
                retry_after_s=1,
            )

    @contextlib.contextmanager
    def promised_room(self, size: int) -> Iterator[RoomPromise]:
        """Keeps room for events that are sent one by one. Raises ``BusyError``."""
        promise = RoomPromise(size)
        with self.entering:
            self.check_room(size)
            self._promises.add(promise)
        try:
            yield promise
        finally:
            with self.entering:
                self._promises.discard(promise)

    def send(self, event: Event) -> SendFuture:
        """Puts an event that was checked into the buffer, for which there is room."""
        return self.producer.send(
            event.value,
            event.key,
            id=event.id,
            timestamp=event.timestamp,
            type=event.type,
            headers=event.headers,
        )

    async def wait_durable(self, flush: Flush) -> None:
        """Waits until a flush has ended, stored or failed.

        Raises ``UnknownOutcomeError`` if that takes too long (:meth:`time_out`).
        """
        waiting = self._waiting.get(flush)
        if waiting is None:
            waiting = self._waiting[flush] = (self._loop.time(), [])
            flush.on_done(lambda: self._ended(flush))
        future: asyncio.Future[None] = self._loop.create_future()
        waiting[1].append(future)
        await future

    def time_out(self, seconds: float) -> None:
        """Raises ``UnknownOutcomeError`` in requests that have waited longer than this."""
        for flush, (since_s, futures) in list(self._waiting.items()):
            if self._loop.time() - since_s > seconds:
                del self._waiting[flush]
                for future in futures:
                    if not future.done():
                        future.set_exception(
                            UnknownOutcomeError(
                                f"append to `{self.topic.name}`: not durable after {seconds:g} s"
                            )
                        )

    def _ended(self, flush: Flush) -> None:
        """Wakes requests, from the thread that ended the flush. In a closed loop none waits."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake, flush)

    def _wake(self, flush: Flush) -> None:
        for future in self._waiting.pop(flush, (0.0, ()))[1]:
            if not future.done():
                future.set_result(None)


class OpenTopics:
    """Opens topics as requests name them, and closes those that were not named for long."""

    def __init__(self, home: Home, threads: ServerThreads) -> None:
        self._home = home
        self._threads = threads
        self._open: dict[str, OpenTopic] = {}
        self._opening: dict[str, asyncio.Task[OpenTopic]] = {}

    def get(self, name: str) -> OpenTopic | None:
        """Returns a topic that is open already."""
        return self._open.get(name)

    def all(self) -> list[OpenTopic]:
        """Returns all open topics."""
        return list(self._open.values())

    async def open(self, name: str) -> OpenTopic:
        """Opens a topic. Raises ``InvalidError``, ``NotFoundError`` or ``UnavailableError``."""
        check_topic_name(name)
        while (found := self._open.get(name)) is None:
            task = self._opening.get(name)
            if task is None:
                task = self._opening[name] = asyncio.create_task(self._open_now(name))
                task.add_done_callback(lambda _: self._opening.pop(name, None))
            await asyncio.shield(task)
        return found

    def drop(self, topic: OpenTopic) -> None:
        """Forgets a topic that was deleted, or created again, since it was opened."""
        if self._open.get(topic.topic.name) is topic:
            del self._open[topic.topic.name]
            topic.dropped = True
            self._close_unused(topic)

    @contextlib.contextmanager
    def using(self, topic: OpenTopic) -> Iterator[None]:
        """Keeps the producer of a topic open for a request that may still send."""
        topic.users += 1
        try:
            yield
        finally:
            topic.users -= 1
            if topic.dropped:
                self._close_unused(topic)

    def close(self) -> list[TidelogError]:
        """Flushes and closes all producers. Returns the errors that no request has reported."""
        opened, self._open = list(self._open.values()), {}
        closed = [close_quietly(topic.producer) for topic in opened]
        return [error for error in closed if error is not None]

    def _close_unused(self, topic: OpenTopic) -> None:
        if topic.users == 0:
            self._threads.pool.submit(close_quietly, topic.producer)

    async def _open_now(self, name: str) -> OpenTopic:
        loop = asyncio.get_running_loop()
        topic, producer = await self._threads.run(self._open_producer, name)
        while len(self._open) >= limits.PRODUCERS_MAX:  # the one that was opened first
            self.drop(next(iter(self._open.values())))
        opened = self._open[name] = OpenTopic(topic, producer, loop)
        return opened

    def _open_producer(self, name: str) -> tuple[Topic, Producer]:
        """Returns a producer and its topic, of one incarnation."""
        while True:
            producer = self._home.producer(name)
            topic = self._home.topic(name)
            if topic.incarnation == producer.incarnation:
                return topic, producer
            producer.close()
