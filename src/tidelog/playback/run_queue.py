"""Queues the runs of a playback over all partitions, by the time of their first event.

Slot rows are read in pages, always of the partition that is furthest behind. A run is returned once
no unread row can have one that begins before it. For a large journal its row groups are returned
instead, each by its own first time, so memory does not grow with journals.

``SwapGuard`` checks that what a playback found in the catalog is still valid. Journals may replace
runs at any time. Events keep their offsets and times, but rows are deleted, new ones may appear
before the time that was reached, and objects are swept later. Each swap raises the head's
``compiled``. So a playback notes it before it reads rows, and compares it after each read, before
it uses what was read: while it is the same, so is the list of runs. If it has changed, the playback
is opened again after the last event that is out, like a resume.

Amendments are read when a run is loaded, and ``compiled`` and the start are compared after that: an
amendment's row is deleted only after a swap whose journal has it, or a trim past its offset.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from tidelog.codec.journal_file import RowGroup
from tidelog.context import Context
from tidelog.errors import ConflictError, CorruptError
from tidelog.log.run_reader import NO_AMENDMENTS, Amendments, all_pending, are_pending
from tidelog.log.topics import read_head
from tidelog.model.playback import Pin, TimeRange
from tidelog.model.topic import Head, Run, Topic
from tidelog.playback.request import PartitionSlots, SlotEntry, check_needed, trimmed

__all__ = [
    "FoundRun",
    "Groups",
    "RunQueue",
    "SwapGuard",
    "SwappedError",
]

_ROWS = 500  # slot rows per read, of one partition
_ROWS_ALL = 20_000  # of all partitions together, about
_WHOLE_BYTES = 8 << 20  # a journal up to this size is played like a run


@dataclass(frozen=True, order=True, slots=True)
class FoundRun:
    """A run that overlaps the range, or one row group of a journal that does."""

    first_ms: int  # of the run, or of its wanted part if that is later
    partition: int
    base: int
    run: Run = field(compare=False)
    group: RowGroup | None = field(default=None, compare=False)
    amendments: Amendments = field(default=NO_AMENDMENTS, compare=False)  # if it was planned

    @property
    def end(self) -> int:
        """Returns the offset after its last."""
        return self.run.end if self.group is None else self.group.last + 1

    @property
    def last_ms(self) -> int:
        """Returns the time of its last event."""
        return self.run.last_ms if self.group is None else self.group.last_ms

    @property
    def raw_bytes(self) -> int:
        """Returns about how much it holds."""
        if self.group is None:
            return self.run.raw_bytes
        return self.run.raw_bytes * self.group.rows // max(1, self.run.events)


Groups = Callable[[FoundRun], Iterable[RowGroup]]
"""Returns the row groups of a journal."""


class RunQueue:
    """Runs in the order in which a playback from ``times.start_ms`` needs them.

    Raises ``SwappedError`` if the list of runs has changed since it was opened.
    """

    def __init__(
        self,
        guard: SwapGuard,
        pin: Pin,
        times: TimeRange,
        groups: Groups,
        pool: Executor | None,
    ) -> None:
        self._guard = guard
        self._topic = guard.topic
        self._pin = pin
        self._times = times
        self._groups = groups
        partitions = range(self._topic.partitions)
        self._rows_at_once = max(16, min(_ROWS, _ROWS_ALL // len(partitions)))
        self._heap: list[FoundRun] = []
        self._known = [_SeenRuns() for _ in partitions]
        each: Callable[..., Iterable[Any]] = map if pool is None else pool.map
        self._timelines: list[_Timeline] = list(each(self._open, partitions))
        self._unread = [
            (timeline.next.start_ms, partition)
            for partition, timeline in enumerate(self._timelines)
            if timeline.next is not None
        ]
        heapq.heapify(self._unread)

    def peek(self) -> FoundRun | None:
        """Returns the next run, or None if there are no more."""
        while True:
            self._read_up_to()
            if not self._heap or not _is_large(self._heap[0]):
                return self._heap[0] if self._heap else None
            self._open_journal(heapq.heappop(self._heap))

    def take(self) -> FoundRun:
        """Returns the same, and moves on."""
        return heapq.heappop(self._heap)

    def _read_up_to(self) -> None:
        """Reads rows until no unread one can have a run before the first."""
        while self._unread and (not self._heap or self._unread[0][0] < self._heap[0].first_ms):
            _, partition = self._unread[0]
            following = self._read_on(partition)
            if following is None:
                heapq.heappop(self._unread)
            else:
                heapq.heapreplace(self._unread, (following.start_ms, partition))

    def _open(self, partition: int) -> _Timeline:
        head = self._guard.note(partition)
        context, journaled = self._guard.context, head.journaled
        slots = PartitionSlots(context, self._topic, partition, self._times, journaled)
        timeline = _Timeline(slots)
        head = self._guard.check(partition)  # the first row decides what others wait for
        if timeline.next is None:  # nothing there, or nothing left
            check_needed(self._topic, self._pin, partition, self._times.start_ms, head)
        return timeline

    def _read_on(self, partition: int) -> SlotEntry | None:
        """Reads some rows of a partition and finds their runs. Returns the row after them."""
        timeline = self._timelines[partition]
        from_ms = timeline.next.start_ms if timeline.next else self._times.end_ms
        listed = [
            each for each in timeline.read(self._rows_at_once) if self._is_new(partition, each)
        ]
        runs = timeline.slots.runs(listed)
        head = self._guard.check(partition)
        at_ms = max(from_ms, self._times.start_ms)
        check_needed(self._topic, self._pin, partition, at_ms, head)
        for each in listed:
            run = runs.get(each.base)
            if run is None:
                raise self._missing(partition, each, head)
            self._add(FoundRun(run.first_ms, partition, run.base, run))
        return timeline.next

    def _add(self, found: FoundRun) -> None:
        """Queues a run, if it is wanted."""
        start_ms, end_ms = self._times.start_ms, self._times.end_ms
        if found.last_ms >= start_ms and found.first_ms < end_ms:
            first_ms = max(found.first_ms, start_ms)
            heapq.heappush(
                self._heap, FoundRun(first_ms, found.partition, found.base, found.run, found.group)
            )

    def _open_journal(self, found: FoundRun) -> None:
        """Replaces a journal with its row groups."""
        start, end = self._pin.starts[found.partition], self._pin.ends[found.partition]
        for group in self._groups(found):
            if group.first < end and group.last >= start:
                part = FoundRun(group.first_ms, found.partition, group.first, found.run, group)
                self._add(part)

    def _is_new(self, partition: int, listed: SlotEntry) -> bool:
        """Returns whether a row has a wanted run that has not appeared before."""
        if listed.base >= self._pin.ends[partition] or listed.end <= self._pin.starts[partition]:
            return False
        return self._known[partition].add(listed)

    def _missing(self, partition: int, listed: SlotEntry, head: Head) -> Exception:
        """Returns the error for a slot row without a run, though nothing was compiled."""
        if listed.end <= head.start:
            return trimmed(self._topic, partition, listed.base, head.start)
        return CorruptError(
            f"partition `{self._topic.name}/{partition}`: a slot row names offsets {listed.base} "
            f"to {listed.end}, but no run begins there: keep the catalog, and run `tidelog verify`"
        )


def _is_large(found: FoundRun) -> bool:
    """Returns whether a journal is played by its row groups."""
    is_whole = found.run.journal is not None and found.group is None
    return is_whole and found.run.raw_bytes > _WHOLE_BYTES


class _SeenRuns:
    """The runs that have appeared, while their second row may still come."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}
        self._room = _ROWS

    def add(self, listed: SlotEntry) -> bool:
        """Returns whether the run is new. Its second slot follows right after the first."""
        if len(self._ends) >= self._room:
            at_ms = listed.start_ms
            self._ends = {base: end for base, end in self._ends.items() if end >= at_ms}
            self._room = max(_ROWS, 2 * len(self._ends))
        is_new = listed.base not in self._ends
        self._ends[listed.base] = listed.end_ms
        return is_new


class _Timeline:
    """The slot rows of one partition, with one row of lookahead."""

    def __init__(self, slots: PartitionSlots) -> None:
        self.slots = slots
        self._rows: Iterator[SlotEntry] = slots.by_start()
        self.next = next(self._rows, None)

    def read(self, count: int) -> list[SlotEntry]:
        found: list[SlotEntry] = []
        while self.next is not None and len(found) < count:
            found.append(self.next)
            self.next = next(self._rows, None)
        return found


_RECENT_S = 1.0  # a head this old is recent enough: later amendments need not show


class SwappedError(ConflictError):
    """Journals replaced runs that a playback had found: open it again where it is."""


class SwapGuard:
    """The heads of a topic as a playback found them. Safe to share among threads."""

    def __init__(self, context: Context, topic: Topic) -> None:
        self.context = context
        self.topic = topic
        self._compiled: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._recent: dict[int, tuple[Head, float]] = {}

    def note(self, partition: int) -> Head:
        """Notes the head; call this before reading any row of a partition."""
        head = self._read(partition)
        self._compiled[partition] = head.compiled
        self._starts[partition] = head.start
        return head

    def check(self, partition: int) -> Head:
        """Returns the current head. Raises ``SwappedError`` if something was compiled since.

        Raises ``NotFoundError`` if the topic was deleted.
        """
        return self._check_compiled(partition, self._read(partition))

    def recent(self, partition: int) -> Head:
        """Returns a head of a moment ago, after the playback began. Raises like ``check``."""
        head, read_s = self._recent[partition]
        if self.context.clock.monotonic_s() - read_s > _RECENT_S:
            return self.check(partition)
        return self._check_compiled(partition, head)  # another thread may have seen the swap

    def amendments(self, partition: int, start: int, end: int, head: Head) -> Amendments:
        """Returns the amendments of ``[start, end)`` that are in no journal which was found.

        ``head`` is a recent one, or newer. Raises ``SwappedError`` if they may be incomplete.
        """
        found = NO_AMENDMENTS
        if are_pending(head, start, end):
            found = all_pending(self.context, self.topic, partition, head, start, end)
            head = self.check(partition)
        if head.start > max(start, self._starts[partition]):
            raise SwappedError(
                f"partition `{self.topic.name}/{partition}`: was trimmed while it was played: "
                "play again"
            )
        return found

    def _check_compiled(self, partition: int, head: Head) -> Head:
        if head.compiled != self._compiled[partition]:
            raise SwappedError(
                f"partition `{self.topic.name}/{partition}`: was compiled while it was played: "
                "play again"
            )
        return head

    def _read(self, partition: int) -> Head:
        read_s = self.context.clock.monotonic_s()
        head, _ = read_head(self.context, self.topic, partition)
        self._recent[partition] = (head, read_s)
        return head
