"""Waiting for new events without a thread: commits of this process wake at once, others by polling.

A wake-up is a hint only. Whoever waits looks into the catalog again, after a wake-up, and at the
latest after a short time, since other processes commit too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator

from tidelog.context import Wakeups
from tidelog.server.http.errors import BusyError
from tidelog.server.http.limits import TAILS_MAX
from tidelog.server.http.metrics import Metrics

__all__ = ["PartitionWatch", "Waiter"]

_FIRST_S = 0.1  # until the catalog is looked at again; longer each time
_GROWTH = 1.5
_LONGEST_S = 1.0

_Key = tuple[str, int]  # a topic's incarnation, and a partition


class PartitionWatch:
    """Who waits for which partitions."""

    def __init__(self, wakeups: Wakeups, metrics: Metrics) -> None:
        self._loop = asyncio.get_running_loop()
        self._metrics = metrics
        self._waiting: dict[_Key, set[asyncio.Event]] = {}
        self.stopping = False
        wakeups.listen(self._committed)

    @contextlib.contextmanager
    def waiting(self, incarnation: str, partitions: Iterable[int]) -> Iterator[Waiter]:
        """Somebody who waits for some partitions. ``BusyError`` when there are too many."""
        if self._metrics.waiting >= TAILS_MAX:
            raise BusyError(
                f"server: {TAILS_MAX} requests wait for events already: poll later",
                retry_after_s=5,
            )
        event = asyncio.Event()
        keys = [(incarnation, partition) for partition in partitions]
        for key in keys:
            self._waiting.setdefault(key, set()).add(event)
        self._metrics.waiting += 1
        try:
            yield Waiter(self, event)
        finally:
            self._metrics.waiting -= 1
            for key in keys:
                self._waiting[key].discard(event)
                if not self._waiting[key]:
                    del self._waiting[key]

    def stop(self) -> None:
        """Wake everybody, as nobody is to wait any more."""
        self.stopping = True
        for events in self._waiting.values():
            for event in events:
                event.set()

    def _committed(self, incarnation: str, partition: int, next_offset: int) -> None:
        """In the thread of a commit."""
        if (incarnation, partition) in self._waiting:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._wake, (incarnation, partition))

    def _wake(self, key: _Key) -> None:
        for event in self._waiting.get(key, ()):
            event.set()


class Waiter:
    """One who waits; what is committed between two calls of :meth:`wait` wakes the second."""

    def __init__(self, watch: PartitionWatch, event: asyncio.Event) -> None:
        self._watch = watch
        self._event = event
        self._pause_s = _FIRST_S

    async def wait(self, most_s: float) -> bool:
        """Until something may be there, for so long at most; whether waiting on makes sense."""
        if self._watch.stopping or most_s <= 0:
            return False
        try:
            async with asyncio.timeout(min(most_s, self._pause_s)):
                await self._event.wait()
            self._pause_s = _FIRST_S
        except TimeoutError:
            self._pause_s = min(self._pause_s * _GROWTH, _LONGEST_S)
        self._event.clear()
        return not self._watch.stopping
