"""Runs into batches by time, window by window.

A window is a stretch of time for which all runs that begin in it are at hand: as many as fit into a
bound of bytes. What they hold is joined, sorted and given out, and the rest of them waits for later
windows. So memory follows the bounds, not the range: a window becomes as short as a millisecond
where events are dense, and that one is given out run by run, as its order is that of partitions and
offsets. Runs that overlap very many windows wait in files. While a window is worked on, the runs of
the next one are fetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from tidelog.model.limits import BATCH_EVENTS_MAX
from tidelog.playback.ahead import Found
from tidelog.playback.held import Held, Rows, joined

__all__ = ["READERS", "Bounds", "RunsAhead", "Windows"]

READERS = 8  # runs fetched at once


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much a playback holds."""

    window_bytes: int = 32 << 20  # of events that are sorted at once
    ahead_bytes: int = 64 << 20  # of runs that are fetched before they are needed
    held_bytes: int = 128 << 20  # of runs that wait for later windows; more go into files
    batch_events: int = BATCH_EVENTS_MAX


class RunsAhead(Protocol):
    """Runs by the time of their first event."""

    def peek(self) -> Found | None:
        """The next run, or None when there are no more."""
        ...

    def take(self) -> Found:
        """The same, which then counts as taken."""
        ...


class Windows:
    """One playback under way; ``load`` gets the wanted events of a run, all before ``end_ms``."""

    def __init__(
        self,
        topic: str,
        ahead: RunsAhead,
        load: Callable[[Found], Rows],
        end_ms: int,
        bounds: Bounds,
        pool: Executor | None,
    ) -> None:
        self._topic = topic
        self._ahead = ahead
        self._load = load
        self._end_ms = end_ms
        self._bounds = bounds
        self._pool = pool
        self._coming: deque[Held] = deque()  # being fetched, by their first time
        self._coming_bytes = 0
        self._held: list[Held] = []  # that have begun

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All windows, in batches."""
        while (at_ms := self._next_ms()) is not None:
            end_ms = self._narrowed(at_ms, self._admit(at_ms))
            if end_ms == at_ms:
                yield from self._one_by_one(at_ms)
            else:
                slices = [part for held in self._held if (part := held.take(end_ms))]
                self._settle()
                if slices:
                    yield from self._cut(joined(self._topic, slices))

    def stop(self) -> None:
        """Whatever is on its way is not needed any more."""
        for held in (*self._coming, *self._held):
            held.cancel()

    def _next_ms(self) -> int | None:
        """A time before which there is no event any more; None at the end."""
        times = [held.next_ms for held in self._held]
        following = self._peek()
        if following is not None:
            times.append(following.first_ms)
        return min(times, default=None)

    def _admit(self, at_ms: int) -> int:
        """Let runs begin, as many as fit; the time up to which all that begin are at hand.

        The same time where those that begin at it alone are too many.
        """
        following = self._peek()
        room = self._bounds.window_bytes
        if following is not None and following.first_ms > at_ms:
            room -= sum(held.bytes_before(following.first_ms) for held in self._held)
        while following is not None:
            room -= following.raw_bytes
            if room < 0 and self._held:
                return max(at_ms, following.first_ms)
            self._begin()
            following = self._peek()
        return self._end_ms

    def _narrowed(self, at_ms: int, end_ms: int) -> int:
        """An earlier end, where too much is held up to this one; at worst none at all."""
        while end_ms > at_ms:
            size = sum(held.bytes_before(end_ms) for held in self._held)
            if size <= 2 * self._bounds.window_bytes or len(self._held) == 1:
                return end_ms
            end_ms = at_ms + (end_ms - at_ms) // 2
        return at_ms

    def _one_by_one(self, at_ms: int) -> Iterator[pa.RecordBatch]:
        """A millisecond that holds more than a window may: run by run, by partition and offset."""
        while self._coming and self._coming[0].found.first_ms <= at_ms:
            self._begin()
        while (found := self._ahead.peek()) is not None and found.first_ms <= at_ms:
            self._held.append(self._hold(self._ahead.take()))
        order = sorted(self._held, key=lambda each: (each.found.partition, each.found.base))
        waiting = 0
        for index, held in enumerate(order):
            for following in order[index : index + READERS]:
                following.fetch(self._pool)
            part = held.take(at_ms + 1)
            waiting += held.bytes
            if waiting > self._bounds.held_bytes:
                waiting -= held.bytes
                held.put_aside()
            if part is not None:
                yield from self._cut(joined(self._topic, [part]))
        self._settle()

    def _cut(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        for first in range(0, batch.num_rows, self._bounds.batch_events):
            yield batch.slice(first, self._bounds.batch_events)

    def _peek(self) -> Found | None:
        """The next run that has not begun; runs behind it are fetched meanwhile."""
        ahead_bytes = self._bounds.ahead_bytes if self._pool is not None else 0
        while not self._coming or self._coming_bytes < ahead_bytes:
            if self._ahead.peek() is None:
                break
            held = self._hold(self._ahead.take())
            held.fetch(self._pool)
            self._coming.append(held)
            self._coming_bytes += held.found.raw_bytes
        return self._coming[0].found if self._coming else None

    def _begin(self) -> None:
        held = self._coming.popleft()
        self._coming_bytes -= held.found.raw_bytes
        self._held.append(held)

    def _settle(self) -> None:
        """Let go of runs that are done, and put some aside where they hold too much."""
        self._held = [held for held in self._held if not held.is_done]
        total = sum(held.bytes for held in self._held)
        for held in sorted(self._held, key=lambda each: each.bytes, reverse=True):
            if total <= self._bounds.held_bytes:
                return
            total -= held.bytes
            held.put_aside()

    def _hold(self, found: Found) -> Held:
        return Held(found, lambda: self._load(found))
