"""Merges the events of all partitions of a topic by time, in Arrow from end to end.

Compiles may run at the same time: when journals replace runs, the merge opens its scans again after
the last event it returned. It sees amendments made before it began, and later ones in runs that
were not loaded yet.

A window is a period of time for which all runs that begin in it are loaded: as many as fit into a
limit of bytes. Their events are joined, sorted and returned, and the rest of them waits for later
windows. So memory follows the limits, not the range. With dense events a window shrinks to one
millisecond, which is returned run by run, because its order is that of partitions and offsets. Runs
that overlap very many windows wait in files. While one window is processed, the runs of the next
are fetched.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import msgspec
import pyarrow as pa

from tidelog.codec.event_batch import STORED_SCHEMA, bad_text, events_of
from tidelog.codec.journal_file import RowGroup
from tidelog.context import Context
from tidelog.errors import CorruptError, InvalidError, NotFoundError
from tidelog.log.reader.partition_reader import lost_object
from tidelog.log.topics import find_topic
from tidelog.model.event import Event
from tidelog.model.limits import BATCH_EVENTS_MAX
from tidelog.model.playback import Cursor, Pin, Time, TimeRange, time_range
from tidelog.model.topic import Topic
from tidelog.playback.request import AsOf, pin_topic, trimmed
from tidelog.playback.run_buffer import BufferedRun, EventFilter, Loader, TimedRows, joined
from tidelog.playback.run_queue import Ahead, FoundRun, SwapGuard, SwappedError
from tidelog.pool import Pool

__all__ = [
    "READERS",
    "BufferBounds",
    "RunsAhead",
    "Windows",
    "play",
    "play_arrow",
    "play_events",
]


def play_events(
    context: Context, topic: str, start: Time = None, end: Time = None, as_of: AsOf = None
) -> Iterator[Event]:
    """Yields the events of ``[start, end)`` by time, as of now; by default the last 15 minutes.

    Raises ``NotFoundError`` if some of them are trimmed in between.
    """
    return itertools.chain.from_iterable(
        map(_events, play_arrow(context, topic, start, end, as_of))
    )


def play_arrow(
    context: Context, topic: str, start: Time = None, end: Time = None, as_of: AsOf = None
) -> Iterator[pa.RecordBatch]:
    """Yields the same as Arrow batches in event columns."""
    found = find_topic(context, topic)
    times = time_range(start, end, context.clock.now_ms())
    with Pool(READERS, "tidelog-playback") as pool:
        pin = pin_topic(context, found, times, as_of, pool)
    return _with_pool(context, found, pin)


def play(
    context: Context,
    topic: Topic,
    pin: Pin,
    *,
    after: Cursor | None = None,
    pool: Executor | None = None,
    bounds: BufferBounds | None = None,
) -> Generator[pa.RecordBatch, None, None]:
    """Yields what was pinned, from the beginning or after a cursor, by time.

    Without a pool it uses no threads. Raises ``NotFoundError`` if some events are trimmed in
    between, or the topic is deleted.
    """
    if topic.incarnation != pin.incarnation:
        raise InvalidError(
            f"playback of `{topic.name}`: the topic was deleted and made again since it began: "
            "begin another playback"
        )
    is_over = False
    while not is_over:
        with contextlib.closing(_PlaybackPass(context, topic, pin, after, pool)) as playing:
            try:
                for batch in playing.batches(bounds or BufferBounds()):
                    after = _last(batch)
                    yield batch
                is_over = True
            except SwappedError:
                continue  # events keep their offsets, so resume after the last one


def _with_pool(context: Context, topic: Topic, pin: Pin) -> Iterator[pa.RecordBatch]:
    with Pool(READERS, "tidelog-playback") as pool:
        yield from play(context, topic, pin, pool=pool)


class _PlaybackPass:
    """A playback from a cursor on, as long as nothing is compiled."""

    def __init__(
        self, context: Context, topic: Topic, pin: Pin, after: Cursor | None, pool: Executor | None
    ) -> None:
        self._topic = topic
        self._pin = pin
        self._after = after
        self._pool = pool
        start_ms = pin.range.start_ms if after is None else after.time_ms
        self._times = TimeRange(start_ms, max(start_ms, pin.range.end_ms))
        self._standing = SwapGuard(context, topic)
        self._loader = Loader(context.store, topic.name)
        self._windows: Windows | None = None

    def batches(self, bounds: BufferBounds) -> Iterator[pa.RecordBatch]:
        """Yields everything that is left. Raises ``SwappedError`` if it must be opened again."""
        ahead = Ahead(self._standing, self._pin, self._times, self._groups, self._pool)
        end_ms = self._times.end_ms
        windows = Windows(self._topic.name, ahead, self._load, end_ms, bounds, self._pool)
        self._windows = windows
        return windows.batches()

    def close(self) -> None:
        """Stops fetching."""
        if self._windows is not None:
            self._windows.stop()

    def _groups(self, found: FoundRun) -> Sequence[RowGroup]:
        try:
            return self._loader.groups(found)
        except NotFoundError as exc:
            raise self._lost(found, exc) from exc

    def _load(self, found: FoundRun) -> TimedRows:
        """Loads the wanted events of a run."""
        partition = found.partition
        wanted = EventFilter(
            partition=partition,
            start_ms=self._times.start_ms,
            end_ms=self._times.end_ms,
            start=self._pin.starts[partition],
            end=self._pin.ends[partition],
            after=self._after,
        )
        head = self._standing.recent(partition)
        while True:
            amendments = self._standing.amendments(partition, found.base, found.end, head)
            try:
                return self._loader.load(found, wanted, amendments)
            except NotFoundError as exc:
                before, head = head, self._standing.check(partition)
                if head.amendments == before.amendments:  # else a value was replaced, and swept
                    raise self._lost(found, exc) from exc

    def _lost(self, found: FoundRun, error: NotFoundError) -> Exception:
        """Returns the error for a missing object: trimmed, ``SwappedError``, or damage."""
        head = self._standing.check(found.partition)
        if found.run.base < head.start:
            return trimmed(self._topic, found.partition, found.base, head.start)
        return lost_object(self._topic.name, found.partition, [found.run], error)


def _last(batch: pa.RecordBatch) -> Cursor:
    """Returns the position of a batch's last event."""
    row = batch.num_rows - 1
    places = (batch.column(name)[row].as_py() for name in ("partition", "offset"))
    return Cursor(batch.column("timestamp")[row].value, *places)


def _events(batch: pa.RecordBatch) -> Iterator[Event]:
    """Yields each event of a batch in event columns."""
    columns = batch.select(STORED_SCHEMA.names)
    places = zip(
        batch.column("partition").to_pylist(), batch.column("offset").to_pylist(), strict=True
    )
    topic = batch.column("topic")[0].as_py()
    try:
        events = events_of(columns, topic, 0, 0)
    except CorruptError as exc:  # the error has no position
        raise bad_text(batch) from exc
    for event, (partition, offset) in zip(events, places, strict=True):
        yield msgspec.structs.replace(event, partition=partition, offset=offset)


READERS = 8  # runs to fetch in parallel


@dataclass(frozen=True, slots=True)
class BufferBounds:
    """How much a playback keeps in memory."""

    window_bytes: int = 32 << 20  # of events to sort at once
    ahead_bytes: int = 64 << 20  # of runs to fetch in advance
    held_bytes: int = 128 << 20  # of runs that wait for later windows; more go into files
    batch_events: int = BATCH_EVENTS_MAX


class RunsAhead(Protocol):
    """Runs by the time of their first event."""

    def peek(self) -> FoundRun | None:
        """Returns the next run, or None if there are no more."""
        ...

    def take(self) -> FoundRun:
        """Returns the same, and moves on."""
        ...


class Windows:
    """One running playback. ``load`` returns the wanted events of a run before ``end_ms``."""

    def __init__(
        self,
        topic: str,
        ahead: RunsAhead,
        load: Callable[[FoundRun], TimedRows],
        end_ms: int,
        bounds: BufferBounds,
        pool: Executor | None,
    ) -> None:
        self._topic = topic
        self._ahead = ahead
        self._load = load
        self._end_ms = end_ms
        self._bounds = bounds
        self._pool = pool
        self._coming: deque[BufferedRun] = deque()  # being fetched, by first time
        self._coming_bytes = 0
        self._held: list[BufferedRun] = []  # runs that have begun

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields all windows, in batches."""
        while (at_ms := self._next_ms()) is not None:
            end_ms = self._earlier_end(at_ms, self._admit(at_ms))
            if end_ms == at_ms:
                yield from self._one_by_one(at_ms)
            else:
                slices = [part for held in self._held if (part := held.take(end_ms))]
                self._settle()
                if slices:
                    yield from self._cut(joined(self._topic, slices))

    def stop(self) -> None:
        """Cancels what is being fetched."""
        for held in (*self._coming, *self._held):
            held.cancel()

    def _next_ms(self) -> int | None:
        """Returns a time before which there is no more event; None at the end."""
        times = [held.next_ms for held in self._held]
        following = self._peek()
        if following is not None:
            times.append(following.first_ms)
        return min(times, default=None)

    def _admit(self, at_ms: int) -> int:
        """Adds as many runs as fit. Returns the time up to which all that begin are loaded.

        Returns the same time if the runs that begin at it are already too many.
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

    def _earlier_end(self, at_ms: int, end_ms: int) -> int:
        """Returns an earlier end if there is too much up to this one; at worst the start."""
        while end_ms > at_ms:
            size = sum(held.bytes_before(end_ms) for held in self._held)
            if size <= 2 * self._bounds.window_bytes or len(self._held) == 1:
                return end_ms
            end_ms = at_ms + (end_ms - at_ms) // 2
        return at_ms

    def _one_by_one(self, at_ms: int) -> Iterator[pa.RecordBatch]:
        """Yields a millisecond that exceeds a window: run by run, by partition and offset."""
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

    def _peek(self) -> FoundRun | None:
        """Returns the next run that has not begun, and fetches runs after it."""
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
        """Drops finished runs, and moves some into files if they use too much memory."""
        self._held = [held for held in self._held if not held.is_done]
        total = sum(held.bytes for held in self._held)
        for held in sorted(self._held, key=lambda each: each.bytes, reverse=True):
            if total <= self._bounds.held_bytes:
                return
            total -= held.bytes
            held.put_aside()

    def _hold(self, found: FoundRun) -> BufferedRun:
        return BufferedRun(found, lambda: self._load(found))
