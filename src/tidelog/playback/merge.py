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

**Loading.** A run is read once, however many windows it is part of, and kept until its last event
is out. One that waits long may be moved into a file without a name, which vanishes with the
process.

``Loader`` loads runs, journals and their row groups, with amendments applied. It needs only the
store, so tasks use it too. It caches the footers of journals while their row groups are played.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import tempfile
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.codec.event_batch import (
    EVENT_SCHEMA,
    STORED_SCHEMA,
    bad_text,
    batch_bytes,
    events_of,
    one_batch,
)
from tidelog.codec.journal_file import JournalFile, RowGroup
from tidelog.codec.numbers import mask_array, number_array, numbers_of, repeated_text
from tidelog.concurrency import Pool
from tidelog.context import Context
from tidelog.errors import CorruptError, InvalidError, NotFoundError
from tidelog.log.partition_reader import lost_object
from tidelog.log.run_reader import Amendments, RunSelection, apply, describe_run, read_run
from tidelog.log.run_reader import EventRows as Stored
from tidelog.log.topics import find_topic
from tidelog.model.event import Event
from tidelog.model.limits import BATCH_EVENTS_MAX
from tidelog.model.playback import Cursor, Pin, Time, TimeRange, time_range
from tidelog.model.topic import Topic
from tidelog.playback.request import AsOf, pin_topic, trimmed
from tidelog.playback.run_queue import FoundRun, RunQueue, SwapGuard, SwappedError
from tidelog.store.base import Store

__all__ = [
    "READERS",
    "BufferBounds",
    "EventFilter",
    "Loader",
    "RunsAhead",
    "TimedRows",
    "Windows",
    "play",
    "play_arrow",
    "play_events",
    "times_of",
]

_SCHEMA = STORED_SCHEMA.append(pa.field("offset", pa.int64(), nullable=False))


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which events of a partition are wanted: times, offsets, and those after a cursor."""

    partition: int
    start_ms: int
    end_ms: int
    start: int
    end: int
    after: Cursor | None = None

    def mask(
        self, times: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Returns which events of a run, at these offsets, are wanted."""
        wanted = (offsets >= self.start) & (offsets < self.end)
        wanted &= (times >= self.start_ms) & (times < self.end_ms)
        if self.after is not None and self.partition <= self.after.partition:
            out = times == self.after.time_ms
            if self.partition == self.after.partition:
                out &= offsets <= self.after.offset
            wanted &= ~out
        return wanted


@dataclass(frozen=True, slots=True)
class TimedRows:
    """Events of one run by time, then by offset."""

    batch: pa.RecordBatch  # in stored columns, with offsets
    times: npt.NDArray[np.int64]
    bytes: int


@dataclass(frozen=True, slots=True)
class RunSlice:
    """Consecutive events of a run, by time."""

    partition: int
    base: int  # of the run
    batch: pa.RecordBatch
    times: npt.NDArray[np.int64]


class BufferedRun:
    """One run; ``load`` returns its events. With a pool it can be fetched in advance."""

    def __init__(self, found: FoundRun, load: Callable[[], TimedRows]) -> None:
        self.found = found
        self._load = load
        self._coming: Future[TimedRows] | None = None
        self._rows: TimedRows | None = None
        self._at = 0
        self._aside = False
        self.is_done = False  # all its events are out

    def fetch(self, pool: Executor | None) -> None:
        """Starts to fetch it, unless that has begun."""
        if pool is not None and self._coming is None and self._rows is None:
            self._coming = pool.submit(self._load)

    def cancel(self) -> None:
        """Cancels the fetch."""
        if self._coming is not None:
            self._coming.cancel()

    @property
    def next_ms(self) -> int:
        """Returns the time of its next event; before it is loaded, a lower bound."""
        return self.found.first_ms if self._rows is None else int(self._rows.times[self._at])

    @property
    def bytes(self) -> int:
        """Returns how much memory it uses now."""
        return 0 if self._rows is None or self._aside else self._rows.bytes

    def bytes_before(self, time_ms: int) -> int:
        """Returns the size of its next events before a time."""
        return batch_bytes(self._get_rows().batch.slice(self._at, self._before(time_ms)))

    def take(self, time_ms: int) -> RunSlice | None:
        """Returns its next events before a time, and moves on."""
        rows, first = self._get_rows(), self._at
        self._at += self._before(time_ms)
        if self._at == len(rows.times):
            self.is_done, self._rows = True, None
        if self._at == first:
            return None
        part, times = rows.batch.slice(first, self._at - first), rows.times[first : self._at]
        return RunSlice(self.found.partition, self.found.base, part, times)

    def put_aside(self) -> None:
        """Moves what is left into a file, and reads it from there later."""
        left = self._get_rows().batch.slice(self._at)
        with tempfile.TemporaryFile(prefix="tidelog-playback-") as file:
            with pa.ipc.new_file(file, _SCHEMA) as writer:
                writer.write_batch(left)
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        batch = pa.ipc.open_file(pa.py_buffer(mapped)).get_batch(0)
        self._rows, self._at, self._aside = (
            TimedRows(batch, times_of(batch), batch_bytes(left)),
            0,
            True,
        )

    def _before(self, time_ms: int) -> int:
        return int(np.searchsorted(self._get_rows().times, time_ms)) - self._at

    def _get_rows(self) -> TimedRows:
        if self._rows is None:
            self._rows = self._load() if self._coming is None else self._coming.result()
            self._coming = None
        return self._rows


def kept_rows(parts: Sequence[Stored], wanted: EventFilter) -> TimedRows:
    """Returns the wanted events of consecutive rows."""
    batches = [part.batch for part in parts]
    offsets = np.concatenate([part.offsets for part in parts] or [np.zeros(0, np.int64)])
    table = pa.Table.from_batches(batches, STORED_SCHEMA)
    batch = one_batch(table.append_column(_SCHEMA.field("offset"), number_array(offsets)))
    times = times_of(batch)
    mask = wanted.mask(times, offsets)
    if not mask.all():
        batch, times = batch.filter(mask_array(mask)), times[mask]
    if not _is_sorted(times):
        order = np.argsort(times, kind="stable")
        batch, times = batch.take(number_array(order)), times[order]
    return TimedRows(batch, times, batch_bytes(batch))


def joined(topic: str, slices: list[RunSlice]) -> pa.RecordBatch:
    """Joins slices in event columns, by time; ties by partition and offset."""
    ordered = sorted(slices, key=lambda each: (each.partition, each.base))
    batch = one_batch([each.batch for each in ordered], _SCHEMA)
    places = np.repeat(
        np.array([each.partition for each in ordered], np.int32),
        [each.batch.num_rows for each in ordered],
    )
    times = np.concatenate([each.times for each in ordered])
    if not _is_sorted(times):
        # Runs come by partition and offset, so ties do too.
        order = np.argsort(times, kind="stable")
        batch, places = batch.take(number_array(order)), places[order]
    name = repeated_text(topic, batch.num_rows)
    front = [name, number_array(places), batch.column("offset")]
    return pa.record_batch([*front, *batch.columns[:-1]], schema=EVENT_SCHEMA)


def _is_sorted(times: npt.NDArray[np.int64]) -> bool:
    return not bool((times[1:] < times[:-1]).any())


def times_of(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Returns the event times of a batch, in ms."""
    return numbers_of(batch.column("timestamp").cast(pa.int64()))


_FOOTERS = 64  # of journals that are played at once


class Loader:
    """Loads events of one topic from the store. Safe to share among threads.

    Raises ``NotFoundError`` if an object is missing.
    """

    def __init__(self, store: Store, topic: str) -> None:
        self._store = store
        self._topic = topic
        self._files: OrderedDict[str, JournalFile] = OrderedDict()
        self._lock = threading.Lock()

    def groups(self, found: FoundRun) -> Sequence[RowGroup]:
        """Returns the row groups of a journal."""
        return self._file(found).groups

    def load(self, found: FoundRun, wanted: EventFilter, amendments: Amendments) -> TimedRows:
        """Returns the wanted events of a run."""
        return kept_rows(list(self._parts(found, wanted, amendments)), wanted)

    def _parts(
        self, found: FoundRun, wanted: EventFilter, amendments: Amendments
    ) -> Iterator[Stored]:
        if found.group is None:
            what = describe_run(self._topic, found.partition, found.run)
            selection = RunSelection(wanted.start, wanted.end)
            yield from read_run(self._store, found.run, what, selection, amendments)
            return
        batch = self._file(found).read(found.group)
        places = numbers_of(batch.column("offset"))
        rows = Stored(found.base, found.end, batch.drop_columns(["offset"]), places)
        yield from apply(rows, amendments.of_run(found.run), self._store)

    def _file(self, found: FoundRun) -> JournalFile:
        key = found.run.object
        with self._lock:
            file = self._files.get(key)
            if file is not None:
                self._files.move_to_end(key)
                return file
        what = describe_run(self._topic, found.partition, found.run)
        file = JournalFile(partial(self._store.get, key), found.run, what)
        with self._lock:
            self._files[key] = file
            if len(self._files) > _FOOTERS:
                self._files.popitem(last=False)
        return file


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
        self._guard = SwapGuard(context, topic)
        self._loader = Loader(context.store, topic.name)
        self._windows: Windows | None = None

    def batches(self, bounds: BufferBounds) -> Iterator[pa.RecordBatch]:
        """Yields everything that is left. Raises ``SwappedError`` if it must be opened again."""
        queue = RunQueue(self._guard, self._pin, self._times, self._groups, self._pool)
        end_ms = self._times.end_ms
        windows = Windows(self._topic.name, queue, self._load, end_ms, bounds, self._pool)
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
        head = self._guard.recent(partition)
        while True:
            amendments = self._guard.amendments(partition, found.base, found.end, head)
            try:
                return self._loader.load(found, wanted, amendments)
            except NotFoundError as exc:
                before, head = head, self._guard.check(partition)
                if head.amendments == before.amendments:  # else a value was replaced, and swept
                    raise self._lost(found, exc) from exc

    def _lost(self, found: FoundRun, error: NotFoundError) -> Exception:
        """Returns the error for a missing object: trimmed, ``SwappedError``, or damage."""
        head = self._guard.check(found.partition)
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
