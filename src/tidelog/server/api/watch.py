"""Waiting for new events without a thread: commits of this process wake at once, others by polling.

One poll of a topic serves all requests that wait for it, in threads of its own: however many tails
are idle, a topic costs one look a second, and appends do not wait behind them. A wake-up is a hint
only: a request that is woken looks into the catalog itself. A poll that fails wakes all, so that
each finds what is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from tidelog.context import Context
from tidelog.errors import contained
from tidelog.log.status import partition_ends
from tidelog.model.topic import Topic
from tidelog.server.http.errors import BusyError
from tidelog.server.http.limits import CLIENT_SHARE, TAILS_MAX
from tidelog.server.http.metrics import Metrics

__all__ = ["PartitionWatch", "Waiter"]

_FIRST_S = 0.1  # until the catalog is looked at again; longer each time
_GROWTH = 1.5
_LONGEST_S = 1.0
_THREADS = 4  # for polls: a topic has one at a time

_Ends = tuple[int, int]  # start and next of a partition


class PartitionWatch:
    """The requests that wait, and for which partitions."""

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
        """A request that waits for some partitions. ``BusyError`` when there are too many."""
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
        """Raise ``BusyError`` if too many requests wait, of all clients or of this one."""
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
        """Wake all requests, as none is to wait any more."""
        self.stopping = True
        for poll in self._topics.values():
            poll.wake(None)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _committed(self, incarnation: str, partition: int, next_offset: int) -> None:
        """In the thread of a commit."""
        if incarnation in self._topics:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no request waits
                self._loop.call_soon_threadsafe(self._wake, incarnation, partition)

    def _wake(self, incarnation: str, partition: int) -> None:
        poll = self._topics.get(incarnation)
        if poll is not None:
            poll.wake(partition)


class Waiter:
    """One that waits; what is committed between two calls of :meth:`wait` wakes the second."""

    def __init__(self, watch: PartitionWatch, partitions: frozenset[int]) -> None:
        self.partitions = partitions
        self.event = asyncio.Event()
        self.was_woken = False  # by the last wait: else the catalog has nothing new
        self._watch = watch

    async def wait(self, most_s: float) -> bool:
        """Wait until something may be there, at most this long; whether to go on waiting."""
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
    """Looks at the partitions of one topic that requests wait for, as long as any does."""

    def __init__(self, context: Context, topic: Topic, pool: ThreadPoolExecutor) -> None:
        self.waiters: set[Waiter] = set()
        self._context = context
        self._topic = topic
        self._pool = pool
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Poll from now on."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Poll no more."""
        if self._task is not None:
            self._task.cancel()

    def wake(self, partition: int | None) -> None:
        """Wake those that wait for a partition; with None, all."""
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
