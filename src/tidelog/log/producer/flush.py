"""A flush: events that are stored together, from the buffer to their offsets.

**Failures.** A failed flush is kept until a producer's ``flush`` or ``close`` raises it. A call
that promises durability covers everything that was sent before it. A flush does not record which
thread sent which event, since that would cost time for each of them. So each thread that was alive
when a flush failed gets the failure from its own next ``flush`` or ``close``. A failure that no
call has raised yet goes to the next call of any thread. If the futures of all failed events have
raised, the failure is not raised again.

**The buffer** holds the events that wait, and turns them into Arrow. Most events have only a value
and a time, so these have lists of their own, which are cheap to extend. What only some events have
is kept apart, with the row number.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.codec.event_batch import batch_of
from tidelog.codec.partitioner import split
from tidelog.concurrency import Flag
from tidelog.coordination.outcome import append_error
from tidelog.errors import InternalError, TidelogError, UnavailableError, UnknownOutcomeError
from tidelog.log.producer.append_plan import event_mark
from tidelog.model import limits
from tidelog.model.event import Headers, Position, Positions

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "EVENT_OVERHEAD_BYTES",
    "EventFields",
    "Flush",
    "FlushFailure",
    "FlushFailures",
    "FlushPart",
    "SendFuture",
    "flushes_of",
    "positions_of",
]

EVENT_OVERHEAD_BYTES = 100  # that an event takes in the buffer, besides its own bytes

_log = logging.getLogger(__name__)


class EventFields(NamedTuple):
    """What an event has besides value and time; -1 means "the flush decides" or "none"."""

    id: str | None
    key: bytes | None
    type: str | None
    headers: Headers
    partition: int
    sequence: int
    mark: bytes | None = None  # of the sequence; None: a digest of the event


_PLAIN = EventFields(None, None, None, (), -1, -1)


class EventBuffer:
    """Events in the order in which they were sent."""

    __slots__ = ("fields", "rows", "times", "values")

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        self.times: list[int] = []
        self.fields: list[EventFields] = []
        self.rows: list[int] = []  # the event that each of them belongs to

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: bytes | None, time_ms: int, fields: EventFields) -> None:
        """Adds one event, or nothing of it if a signal handler raises in the middle."""
        rows, fields_before = len(self.values), len(self.fields)
        try:
            if fields != _PLAIN:
                self.rows.append(rows)
                self.fields.append(fields)
            self.times.append(time_ms)
            self.values.append(value)
        except BaseException:
            self.truncate(rows, fields_before)
            raise

    def truncate(self, events: int, fields: int) -> None:
        """Drops what was added after the first events, of which some have fields."""
        del self.values[events:], self.times[events:]
        del self.fields[fields:], self.rows[fields:]

    def table(self) -> pa.Table:
        """Returns the events in stored columns."""
        ids, keys, types, headers = self._columns()
        columns = [self.times, ids, keys, self.values, types, headers]
        return pa.Table.from_batches([batch_of(columns)])

    def partitions(self, keyless: Callable[[int], int]) -> npt.NDArray[np.int32]:
        """Returns the partition of each event.

        Calls ``keyless`` with the number of events that may go anywhere, if there are any.
        """
        partitions = np.full(len(self), -1, np.int32)
        if self.fields:
            partitions[self.rows] = [each.partition for each in self.fields]
        free = partitions < 0
        count = int(np.count_nonzero(free))
        if count:
            partitions[free] = keyless(count)
        return partitions

    def sequences(self) -> list[int]:
        """Returns the sequences of a named producer's events; each has one."""
        return [each.sequence for each in self.fields]

    def mark(self, row: int) -> bytes:
        """Returns the mark of one event of a named producer."""
        fields = self.fields[row]
        if fields.mark is not None:
            return fields.mark
        return event_mark(self.values[row], fields.key, fields.id, fields.type)

    def _columns(self) -> Sequence[tuple[Any, ...] | None]:
        """Returns ids, keys, types, headers; None for a column that no event has."""
        if not self.fields:
            return [None] * 4
        fields = self.fields
        if len(fields) < len(self):
            fields = [_PLAIN] * len(self)
            for row, each in zip(self.rows, self.fields, strict=True):
                fields[row] = each
        return list(zip(*fields, strict=True))[:4]


@dataclass(frozen=True, slots=True)
class FlushPart:
    """The part of a flush that goes to one partition."""

    partition: int
    table: pa.Table
    rows: npt.NDArray[np.int64]  # the row numbers of its events in the flush
    sequences: Sequence[int] | None
    mark: bytes = b""  # of its last event


class Flush:
    """Events on their way; done when all are stored or one of them failed."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.pending = EventBuffer()
        self.limit = 0  # events fit without further checks up to this many bytes
        self.table: pa.Table | None = None
        self.partitions: npt.NDArray[np.int32] | None = None
        self.size = 0
        self.number = -1
        self.lingers = False  # whether the producer's timer knows about it
        self.expected_offset: int | None = None
        self.find_end: Callable[[], int] | None = None  # chooses the offset, again after a conflict
        self.is_refused = False  # ``find_end`` has raised, so nothing of it is stored
        self.error: BaseException | None = None
        self.failure: FlushFailure | None = None  # of events that were sent
        self.links: list[object] = []  # the spans of the requests that it carries
        self._done = Flag()
        self._begun = threading.Lock()  # taken for good by the thread that carries it
        self._calls: list[Callable[[], None]] = []
        self._bases: list[tuple[npt.NDArray[np.int64], int]] = []  # and their first offset
        self._unknown: list[tuple[npt.NDArray[np.int64], BaseException]] = []  # and why
        self._positions: Positions | None = None

    @classmethod
    def of_table(
        cls, topic: str, table: pa.Table, partitions: npt.NDArray[np.int32], size: int
    ) -> Flush:
        """Returns a flush of events that are already Arrow."""
        flush = cls(topic)
        flush.table, flush.partitions, flush.size = table, partitions, size
        return flush

    def __len__(self) -> int:
        return int(self.table.num_rows) if self.table is not None else len(self.pending)

    def parts(self, keyless: Callable[[int], int], named: bool) -> list[FlushPart]:
        """Returns the events of each partition; ``keyless`` chooses that of keyless events."""
        sequences: list[int] | None = None
        pending, whole, partitions = self.pending, self.table, self.partitions
        if whole is None or partitions is None:  # events that were sent one by one
            partitions = self.partitions = pending.partitions(keyless)
            sequences = pending.sequences() if named else None
            whole = self.table = pending.table()
        parts = []
        for partition, table, at in split(whole, partitions):
            if sequences is None:
                parts.append(FlushPart(partition, table, at, None))
                continue
            rows = at.tolist()
            mark = pending.mark(rows[-1])
            parts.append(FlushPart(partition, table, at, [sequences[row] for row in rows], mark))
        return parts

    def ask_end(self) -> int:
        """Returns the offset at which to commit now. Raises what refuses the events."""
        try:
            if self.find_end is None:
                raise InternalError(f"append to `{self.topic}`: has no offset to choose")
            return self.find_end()
        except BaseException:
            self.is_refused = True
            raise

    def note_stored(self, part: FlushPart, base: int) -> None:
        """Notes that a part has its offsets."""
        self._bases.append((part.rows, base))

    def note_unknown(self, part: FlushPart, error: BaseException) -> None:
        """Notes that a part may or may not be stored."""
        self._unknown.append((part.rows, error))

    def track_failure(self, error: BaseException) -> FlushFailure:
        """Starts to track which callers know about a failure; call it before :meth:`finish`."""
        offsets = self.positions().offsets
        stored = int((offsets >= 0).sum()) if isinstance(error, TidelogError) else 0
        self.failure = FlushFailure(error, len(self) - stored)
        return self.failure

    def note_raised(self, index: int) -> None:
        """Notes that the sender of one failed event gets its error now."""
        if self.failure is not None:
            self.failure.note_raised(index)

    def begin(self) -> bool:
        """Returns True in the first call, and False in every later one."""
        return self._begun.acquire(blocking=False)

    def finish(self, error: BaseException | None = None) -> None:
        """Wakes everything that waits for the flush."""
        self.error = error
        self.pending = EventBuffer()
        self.table = None  # the bytes are stored, or the caller still has them
        self._done.set()
        self._call_back()

    def on_done(self, call: Callable[[], None]) -> None:
        """Calls ``call`` once, in the thread that ends the flush; at once if it has ended.

        ``call`` must return quickly and must not raise, since other flushes wait behind it.
        """
        self._calls.append(call)
        if self._done.is_set():
            self._call_back()

    def done(self) -> bool:
        """Returns whether it has ended, successfully or not."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        """Waits until it has ended; returns whether it has."""
        return self._done.wait(timeout_s)

    def positions(self) -> Positions:
        """Returns the position of each event; offset -1 for one that is not stored."""
        if self._positions is None:
            count = len(self.partitions) if self.partitions is not None else 0
            offsets = np.full(count, -1, np.int64)
            for rows, base in self._bases:
                offsets[rows] = np.arange(base, base + len(rows))
            partitions = self.partitions if self.partitions is not None else np.empty(0, np.int32)
            self._positions = Positions(self.topic, partitions, offsets)
        return self._positions

    def unknown_rows(self) -> npt.NDArray[np.bool_]:
        """Returns which events may or may not be stored."""
        unknown = np.zeros(len(self.positions()), np.bool_)
        for rows, _ in self._unknown:
            unknown[rows] = True
        return unknown

    def unknown_error(self) -> BaseException | None:
        """Returns why the outcome of some events is unknown; None if there are none."""
        return self._unknown[0][1] if self._unknown else None

    def error_of(self, index: int) -> BaseException:
        """Returns why one event of a failed flush has no position, and whether it may be stored."""
        for rows, error in self._unknown:
            if index in rows:
                return error
        if not isinstance(self.error, UnknownOutcomeError):
            return self.error or UnavailableError(f"append to `{self.topic}`: is under way: wait")
        known = UnavailableError(
            f"append to `{self.topic}`: this event is not stored, as another partition's part of "
            f"its flush failed ({self.error}): send it again"
        )
        known.__cause__ = self.error
        return known

    def is_stored(self, index: int) -> bool:
        """Returns whether this event has its offset, whatever happened to the others."""
        offsets = self.positions().offsets
        return index < len(offsets) and bool(offsets[index] >= 0)

    def _call_back(self) -> None:
        """Runs the callbacks. Two threads may do so at once: each callback runs in only one."""
        while self._calls:
            try:
                call = self._calls.pop()
            except IndexError:
                return
            call()


class SendFuture(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A light handle on one event of a flush.

    ``isinstance`` takes it for a ``concurrent.futures.Future``, whose methods it has, so that
    ``asyncio.wrap_future`` accepts it. A real subclass takes eight times as long to create.
    """

    flush: Flush
    index: int  # of the event in the flush

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return Future

    def result(self, timeout_s: float | None = None) -> Position:
        """Returns the event's position once it is durable; raises the error if it failed.

        Raises ``UnknownOutcomeError`` if it may be stored anyway: the reply was lost, or
        ``timeout_s`` passed and the event is still on its way.

        >>> producer.send(b"one more").result(timeout_s=10).partition
        0
        """
        flush = self.flush
        if not flush.wait(timeout_s):
            raise UnknownOutcomeError(
                f"append to `{flush.topic}`: not durable after {timeout_s} s, and still under way: "
                "wait longer"
            )
        if flush.error is not None:
            stored = isinstance(flush.error, TidelogError) and flush.is_stored(self.index)
            if not stored:
                flush.note_raised(self.index)
                raise flush.error_of(self.index)
        return flush.positions()[self.index]

    def __repr__(self) -> str:
        flush = self.flush
        if not flush.done():
            state = "pending"
        elif flush.error is None:
            state = str(flush.positions()[self.index])
        else:
            state = "failed"  # without its reason: a program must still ask for that
        return f"<SendFuture {state}>"

    def done(self) -> bool:
        """Returns whether :meth:`result` would return at once.

        >>> future = producer.send(b"one more")
        >>> producer.flush()
        >>> future.done()
        True
        """
        return self.flush.done()

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Returns what :meth:`result` would raise; None if the event is stored.

        >>> producer.send(b"one more").exception(timeout_s=10) is None
        True
        """
        try:
            self.result(timeout_s)
        except BaseException as exc:  # noqa: BLE001 - returned
            return exc
        return None

    def add_done_callback(self, call: Callable[[SendFuture], object]) -> None:
        """Calls ``call`` with this future once it is done, in the thread that stored the event.

        What it raises is logged. It must return quickly: other events wait behind it.

        >>> done = []
        >>> producer.send(b"one more").add_done_callback(done.append)
        >>> producer.flush()
        >>> len(done)
        1
        """

        def run() -> None:
            try:
                call(self)
            except Exception:  # noqa: BLE001 - of the caller's own code
                _log.exception("append to `%s`: a callback of a future failed", self.flush.topic)

        self.flush.on_done(run)

    def cancel(self) -> bool:
        """Returns False: what was sent cannot be taken back.

        >>> producer.send(b"one more").cancel()
        False
        """
        return False

    def cancelled(self) -> bool:
        """Returns False: what was sent cannot be taken back.

        >>> producer.send(b"one more").cancelled()
        False
        """
        return False

    def running(self) -> bool:
        """Returns whether the event is on its way.

        >>> future = producer.send(b"one more")
        >>> producer.flush()
        >>> future.running()
        False
        """
        return not self.done()

    def as_future(self) -> Future[Position]:
        """Returns a standard future of the same event, which ``concurrent.futures.wait`` accepts.

        >>> producer.send(b"one more").as_future().result(timeout=10).partition
        0
        """
        made: Future[Position] = Future()
        made.set_running_or_notify_cancel()  # what was sent cannot be cancelled

        def settle() -> None:
            try:
                made.set_result(self.result())
            except BaseException as exc:  # noqa: BLE001 - the future raises it
                made.set_exception(exc)

        self.flush.on_done(settle)
        return made

    def __await__(self) -> Generator[Any, None, Position]:
        """Waits in an asyncio loop; returns and raises what :meth:`result` does."""
        import asyncio  # noqa: PLC0415 - slow to import, and most programs wait without a loop

        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_settle, woken)

        self.flush.on_done(wake)
        yield from woken
        return self.result()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():  # it may be cancelled
        future.set_result(None)


class FlushFailure:
    """Why events of a flush are not stored, and which callers know it."""

    def __init__(self, error: BaseException, events: int) -> None:
        self.error = error
        self._events: int | None = events  # how many failed; None: of several flushes
        self._raised_by: set[int] = set()  # events whose futures have raised it
        self._is_raised = False  # by ``flush`` or ``close``
        self._threads: set[Thread] = set()  # may have sent some, and do not know yet

    def note_raised(self, index: int) -> None:
        """Notes that the future of a failed event has raised its error."""
        self._raised_by.add(index)

    def note_threads(self, threads: set[Thread]) -> None:
        """Notes which threads are alive at the time of the failure."""
        self._threads = threads

    def is_over(self, living: set[Thread]) -> bool:
        """Returns whether every call that must raise it has done so."""
        self._threads &= living
        return self._have_all_raised() or (self._is_raised and not self._threads)

    def is_due(self, thread: Thread) -> bool:
        """Returns whether a call in this thread must raise it."""
        return not self._have_all_raised() and (not self._is_raised or thread in self._threads)

    def raised_in(self, thread: Thread) -> None:
        """Notes that a call in this thread raises it, or an earlier one."""
        self._is_raised = True
        self._threads.discard(thread)

    def absorb(self, later: FlushFailure) -> None:
        """Merges a later failure into this one, so that fewer have to be kept."""
        self._events = None
        self._is_raised = self._is_raised and later._is_raised
        self._threads |= later._threads

    def _have_all_raised(self) -> bool:
        return self._events is not None and len(self._raised_by) >= self._events


class FlushFailures:
    """The failures of one producer, oldest first. The caller holds its lock."""

    def __init__(self) -> None:
        self._kept: list[FlushFailure] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, failure: FlushFailure) -> None:
        """Adds a failure, for all threads that are alive now."""
        living = set(threading.enumerate())
        failure.note_threads(set(living))
        self._kept = [each for each in self._kept if not each.is_over(living)]
        self._kept.append(failure)
        if len(self._kept) > limits.FAILURES_MAX:
            self._kept[0].absorb(self._kept.pop(1))

    def due(self) -> BaseException | None:
        """Returns the first error that this thread must raise, which counts for all of them."""
        thread = threading.current_thread()
        due = [failure for failure in self._kept if failure.is_due(thread)]
        for failure in due:
            failure.raised_in(thread)
        return due[0].error if due else None


def flushes_of(sent: Iterable[SendFuture]) -> list[tuple[Flush, npt.NDArray[np.int64]]]:
    """Returns the flushes of events that were sent, each once, in order, with the events' rows."""
    rows: dict[Flush, list[int]] = {}
    for each in sent:
        rows.setdefault(each.flush, []).append(each.index)
    return [(flush, np.array(some, np.int64)) for flush, some in rows.items()]


def positions_of(
    topic: str, ended: Sequence[tuple[Flush, npt.NDArray[np.int64] | None]]
) -> Positions:
    """Returns the positions of these rows of flushes that have ended; None stands for all rows.

    Raises the error of the append if some are not stored: ``PartialAppendError`` if others are.
    """
    fates = [_fates_of(flush, rows) for flush, rows in ended]
    positions = Positions.joined(topic, [each.positions for each in fates])
    error = next((each.error for each in fates if each.error is not None), None)
    if error is None:
        return positions
    doubt = next((each.doubt for each in fates if each.doubt is not None), None)
    unknown = np.flatnonzero(np.concatenate([each.unknown for each in fates]))
    raise append_error(positions, unknown.tolist(), doubt or error)


class _EventFates(NamedTuple):
    """What became of some events of one flush."""

    positions: Positions
    unknown: npt.NDArray[np.bool_]  # which of them may or may not be stored
    error: BaseException | None = None
    doubt: BaseException | None = None  # why it is unknown


def _fates_of(flush: Flush, rows: npt.NDArray[np.int64] | None) -> _EventFates:
    found, unknown = flush.positions(), flush.unknown_rows()
    if rows is None:
        return _EventFates(found, unknown, flush.error, flush.unknown_error())
    if len(found):
        partitions, offsets, unknown = found.partitions[rows], found.offsets[rows], unknown[rows]
    else:  # it failed before its events got partitions
        partitions, offsets = np.zeros(len(rows), np.int32), np.full(len(rows), -1, np.int64)
        unknown = np.zeros(len(rows), np.bool_)
    positions = Positions(flush.topic, partitions, offsets)
    failed = rows[offsets < 0].tolist()
    if flush.error is None or not failed:
        return _EventFates(positions, unknown)
    for row in failed:
        flush.note_raised(row)
    if not isinstance(flush.error, TidelogError):
        unknown = offsets < 0
    doubt = flush.error_of(int(rows[unknown][0])) if unknown.any() else None
    return _EventFates(positions, unknown, flush.error_of(failed[0]), doubt)
