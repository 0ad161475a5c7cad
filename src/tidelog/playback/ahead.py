"""The runs that a playback comes to, over all partitions, by the time of their first event.

Slot rows are read some at a time, always of the partition that lags most. A run is given out once
no row that is still unread can bring one that begins before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from tidelog.errors import CorruptError
from tidelog.log.base import Log
from tidelog.log.topics import read_head
from tidelog.model.playback import Pin, TimeRange
from tidelog.model.run import Run
from tidelog.model.topic import Topic
from tidelog.playback.pin import check_needed, trimmed
from tidelog.playback.slots import Listed, PartitionSlots

__all__ = ["Ahead", "Found"]

_ROWS = 500  # slot rows read at once, of one partition
_ROWS_ALL = 20_000  # of all partitions together, about


@dataclass(frozen=True, order=True, slots=True)
class Found:
    """A run that overlaps the range."""

    first_ms: int  # of the run, or of what is wanted where that is later
    partition: int
    base: int
    run: Run = field(compare=False)


class Ahead:
    """Runs in the order in which a playback from ``times.start_ms`` on needs them."""

    def __init__(
        self, log: Log, topic: Topic, pin: Pin, times: TimeRange, pool: Executor | None
    ) -> None:
        self._log = log
        self._topic = topic
        self._pin = pin
        self._times = times
        self._rows_at_once = max(16, min(_ROWS, _ROWS_ALL // topic.partitions))
        self._heap: list[Found] = []
        self._known = [_Known() for _ in range(topic.partitions)]
        each: Callable[..., Iterable[Any]] = map if pool is None else pool.map
        self._timelines: list[_Timeline] = list(each(self._open, range(topic.partitions)))
        self._unread = [
            (timeline.next.start_ms, partition)
            for partition, timeline in enumerate(self._timelines)
            if timeline.next is not None
        ]
        heapq.heapify(self._unread)

    def peek(self) -> Found | None:
        """The next run, or None when there are no more."""
        while self._unread and (not self._heap or self._unread[0][0] < self._heap[0].first_ms):
            _, partition = self._unread[0]
            following = self._read_on(partition)
            if following is None:
                heapq.heappop(self._unread)
            else:
                heapq.heapreplace(self._unread, (following.start_ms, partition))
        return self._heap[0] if self._heap else None

    def take(self) -> Found:
        """The same, which then counts as taken."""
        return heapq.heappop(self._heap)

    def _open(self, partition: int) -> _Timeline:
        timeline = _Timeline(PartitionSlots(self._log, self._topic, partition, self._times))
        if timeline.next is None:  # nothing there, or nothing left
            check_needed(self._log, self._topic, self._pin, partition, self._times.start_ms)
        return timeline

    def _read_on(self, partition: int) -> Listed | None:
        """Read some rows of a partition and find their runs; the row after them."""
        timeline = self._timelines[partition]
        from_ms = timeline.next.start_ms if timeline.next else self._times.end_ms
        listed = [
            each for each in timeline.read(self._rows_at_once) if self._is_new(partition, each)
        ]
        runs = timeline.slots.runs(listed)
        check_needed(
            self._log, self._topic, self._pin, partition, max(from_ms, self._times.start_ms)
        )
        for each in listed:
            run = runs.get(each.base)
            if run is None:
                self._check_replaced(partition, each)
            elif run.last_ms >= self._times.start_ms and run.first_ms < self._times.end_ms:
                first_ms = max(run.first_ms, self._times.start_ms)
                heapq.heappush(self._heap, Found(first_ms, partition, run.base, run))
        return timeline.next

    def _is_new(self, partition: int, listed: Listed) -> bool:
        """Whether a row brings a run that is wanted and has not come before."""
        if listed.base >= self._pin.ends[partition] or listed.end <= self._pin.starts[partition]:
            return False
        return self._known[partition].add(listed)

    def _check_replaced(self, partition: int, listed: Listed) -> None:
        head, _ = read_head(self._log, self._topic, partition)
        if listed.end <= head.start:
            raise trimmed(self._topic, partition, listed.base, head.start)
        raise CorruptError(
            f"partition `{self._topic.name}/{partition}`: a slot row names offsets {listed.base} "
            f"to {listed.end}, but no run begins there: keep the catalog, and run `tidelog verify`"
        )


class _Known:
    """Which runs have come already, as long as their second row may still come."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}
        self._room = _ROWS

    def add(self, listed: Listed) -> bool:
        """Whether the run is a new one. Its second slot follows the first at once."""
        if len(self._ends) >= self._room:
            at_ms = listed.start_ms
            self._ends = {base: end for base, end in self._ends.items() if end >= at_ms}
            self._room = max(_ROWS, 2 * len(self._ends))
        is_new = listed.base not in self._ends
        self._ends[listed.base] = listed.end_ms
        return is_new


class _Timeline:
    """The slot rows of one partition, with a look at the next one."""

    def __init__(self, slots: PartitionSlots) -> None:
        self.slots = slots
        self._rows: Iterator[Listed] = slots.by_start()
        self.next = next(self._rows, None)

    def read(self, count: int) -> list[Listed]:
        found: list[Listed] = []
        while self.next is not None and len(found) < count:
            found.append(self.next)
            self.next = next(self._rows, None)
        return found
