"""Producers, consumers, tails and playbacks for asyncio.

For example:

    import tidelog
    from tidelog import aio

    async def main() -> None:
        with tidelog.open() as home:
            async with aio.producer(home, "orders") as producer:
                position = await producer.send(b"one more")
            async with aio.consumer(home, "orders", name="billing") as consumer:
                async for event in consumer:
                    print(event.json())

Each object does the work of its blocking counterpart in one thread of its own. So its calls happen
one after another, and the event loop is never blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from datetime import datetime
from typing import Any, ParamSpec, Self, TypeVar

from tidelog.api.topics import Tail
from tidelog.concurrency import Pool
from tidelog.errors import FencedError, InvalidError
from tidelog.home import Home
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.consumer.leases import Start
from tidelog.log.producer.producer import Producer
from tidelog.model.event import Event, Position
from tidelog.model.playback import Time

__all__ = ["AsyncConsumer", "AsyncProducer", "consumer", "playback", "producer", "tail"]

P = ParamSpec("P")
T = TypeVar("T")

_BATCH = 500  # events of a playback that are fetched by one call


def producer(home: Home, topic: str, name: str | None = None) -> AsyncProducer:
    """Returns a producer for asyncio; ``home.producer`` explains the arguments.

    >>> async def append() -> int:
    ...     async with aio.producer(home, "orders") as producer:
    ...         return (await producer.send(b"one more")).offset
    >>> asyncio.run(append())
    3
    """
    return AsyncProducer(home.producer(topic, name))


def consumer(home: Home, topic: str, name: str, start: Start = "earliest") -> AsyncConsumer:
    """Returns a member of a consumer for asyncio; ``home.consumer`` explains the arguments.

    >>> async def handle() -> list[str]:
    ...     async with aio.consumer(home, "orders", "billing") as consumer:
    ...         events = await consumer.poll()
    ...         await consumer.commit()
    ...         return [event.id for event in events]
    >>> asyncio.run(handle())
    ['order-1', 'order-2', 'order-3']
    """
    return AsyncConsumer(home.consumer(topic, name, start))


async def playback(
    home: Home, topic: str, start: Time = None, end: Time = None
) -> AsyncIterator[Event]:
    """Yields the events of ``[start, end)`` by time; by default those of the last 15 minutes.

    >>> async def play() -> list[str]:
    ...     return [event.id async for event in aio.playback(home, "orders", "2026-11-01")]
    >>> asyncio.run(play())
    ['order-1', 'order-2', 'order-3']
    """
    async with _Calls("playback") as calls:
        events = await calls.make(home.playback, topic, start, end)
        while batch := await calls.make(list, itertools.islice(events, _BATCH)):
            for event in batch:
                yield event


async def tail(home: Home, topic: str, *, wait_s: float = 1.0) -> AsyncIterator[Event]:
    """Yields events as they are appended, for ever; ``home.tail`` explains the arguments.

    It begins with the events that are appended after its first step.

    >>> async def first() -> bytes:
    ...     events = aio.tail(home, "orders", wait_s=0.01)
    ...     waiting = asyncio.ensure_future(anext(events))
    ...     while not waiting.done():
    ...         await asyncio.to_thread(home.append, "orders", [tidelog.Event(b"one more")])
    ...     return (await waiting).value
    >>> asyncio.run(first())
    b'one more'
    """
    async with _Calls("tail") as calls:
        tail = await calls.make(Tail, home, topic)
        while True:
            for event in await calls.make(tail.look):
                yield event
            if not tail.has_more:
                await asyncio.sleep(wait_s)


class _Calls:
    """Blocking calls in one thread, in the order in which they are made."""

    def __init__(self, what: str) -> None:
        self.is_ended = False
        self._what = what  # for messages
        self._pool = Pool(1, "tidelog-aio")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.end()

    async def make(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns what the call returns. If the caller is cancelled, the call still completes."""
        return await asyncio.shield(asyncio.wrap_future(self.start(call, *args, **kwargs)))

    def start(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Returns the future of a call that begins after all earlier ones."""
        if self.is_ended:
            raise InvalidError(f"{self._what}: is closed: open another")
        return self._pool.submit(call, *args, **kwargs)

    def end(self) -> None:
        """Lets the thread end after its last call, without waiting for it."""
        self.is_ended = True
        self._pool.shutdown(wait=False)


class AsyncProducer:
    """A producer whose calls are awaited. Close it, or use ``async with``."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._calls = _Calls("producer")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def send(
        self,
        value: bytes | None,
        key: bytes | None = None,
        *,
        id: str | None = None,
        timestamp: int | datetime | str | None = None,
        type: str | None = None,
        headers: Iterable[tuple[str, bytes | None]] | None = (),
    ) -> Position:
        """Returns the position of the event once it is durable.

        Start several with ``asyncio.gather`` to send them together.
        """
        fields: Any = {"id": id, "timestamp": timestamp, "type": type, "headers": headers}
        return await (await self._calls.make(self._producer.send, value, key, **fields))

    async def send_json(
        self,
        value: object,
        key: bytes | None = None,
        *,
        id: str | None = None,
        timestamp: int | datetime | str | None = None,
        type: str | None = None,
        headers: Iterable[tuple[str, bytes | None]] | None = (),
    ) -> Position:
        """Sends a value as JSON, and returns the position of the event once it is durable."""
        fields: Any = {"id": id, "timestamp": timestamp, "type": type, "headers": headers}
        return await (await self._calls.make(self._producer.send_json, value, key, **fields))

    async def flush(self) -> None:
        """Returns once everything sent before is durable; raises if some of it failed."""
        await self._calls.make(self._producer.flush)

    async def close(self) -> None:
        """Flushes and closes the producer."""
        if self._calls.is_ended:
            return
        try:
            await self._calls.make(self._producer.close)
        finally:
            self._calls.end()


class AsyncConsumer:
    """A member of a consumer whose calls are awaited. Close it, or use ``async with``."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._calls = _Calls(f"consumer `{consumer.name}`")
        self._polling: Future[list[Event]] | None = None  # of a poll that was cancelled
        self._turn = asyncio.Lock()  # of polls: two tasks must not get the same events

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yields events as they come, for ever; commits each batch after its last event.

        A commit in the loop covers the events that were yielded. What a ``break`` leaves of a
        batch comes again with the next poll or loop.
        """
        while True:
            for event in self._consumer.one_by_one(await self.poll()):
                yield event
            with contextlib.suppress(FencedError):  # another member has that partition now
                await self.commit()

    async def poll(self, max_events: int = 500, timeout_s: float = 1.0) -> list[Event]:
        """Returns the next events; an empty list if none came in time.

        If this is cancelled, the next poll returns the events that this one would have returned.
        """
        async with self._turn:
            if self._polling is None:
                self._polling = self._calls.start(self._consumer.poll, max_events, timeout_s)
            polling = self._polling
            with contextlib.suppress(Exception):  # raised by the result below
                await asyncio.shield(asyncio.wrap_future(polling))
            self._polling = None
            return polling.result()

    async def commit(self) -> None:
        """Stores the position after the events that were returned, for all partitions.

        Raises ``InvalidError`` after a cancelled poll, and during the poll of another task: no
        caller has seen their events.
        """
        if self._turn.locked():
            raise InvalidError("consumer: another task polls: commit when its poll has returned")
        if self._polling is not None:
            raise InvalidError("consumer: a poll was cancelled: poll again before you commit")
        await self._calls.make(self._consumer.commit)

    async def close(self) -> None:
        """Closes the member; its partitions go to others. Events without a commit come again.

        A poll that waits returns at once, whether it was cancelled or is another task's.
        """
        if self._calls.is_ended:
            return
        self._consumer.end_poll()
        try:
            await self._calls.make(self._consumer.close)
        finally:
            self._calls.end()
