"""One flush: events that travel together, from the buffer to their offsets.

Failed flushes that ``flush`` and ``close`` of a producer have yet to raise.

A call that promises durability looks at everything that was sent before it. Whose events a flush
carries is not noted, as that would cost time for each of them: so each thread that lived when a
flush failed gets the failure from its own next ``flush`` or ``close``, and a failure that no call
has raised yet goes to the next call of any thread. What the futures of all failed events have
raised is not raised again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Thread

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.errors import TidelogError, UnavailableError, UnknownOutcomeError
from tidelog.log.partitioner import split
from tidelog.log.producer.buffer import EventBuffer
from tidelog.model import limits
from tidelog.model.event import Position
from tidelog.model.positions import Positions

__all__ = [
    "Flush",
    "FlushFailure",
    "FlushFailures",
    "FlushPart",
    "SendFuture",
]


@dataclass(frozen=True, slots=True)
class FlushPart:
    """What one partition gets of a flush."""

    partition: int
    table: pa.Table
    rows: npt.NDArray[np.int64]  # where its events stood in the flush
    sequences: Sequence[int] | None
    mark: bytes = b""  # of the last of them


class Flush:
    """Events on their way; done when all are stored, or when one of them could not be."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.pending = EventBuffer()
        self.limit = 0  # bytes up to which events may be put into it without asking anybody
        self.table: pa.Table | None = None
        self.places: npt.NDArray[np.int32] | None = None
        self.size = 0
        self.number = -1
        self.expected_offset: int | None = None
        self.error: BaseException | None = None
        self.failure: FlushFailure | None = None  # of events that were sent
        self.links: list[object] = []  # to the spans of the requests that it carries
        self._done = threading.Event()
        self._calls: list[Callable[[], None]] = []
        self._bases: list[tuple[npt.NDArray[np.int64], int]] = []  # rows and their first offset
        self._unknown: list[tuple[npt.NDArray[np.int64], BaseException]] = []  # rows, and why
        self._positions: Positions | None = None

    @classmethod
    def of_table(
        cls, topic: str, table: pa.Table, places: npt.NDArray[np.int32], size: int
    ) -> Flush:
        """A flush of events that are Arrow already."""
        flush = cls(topic)
        flush.table, flush.places, flush.size = table, places, size
        return flush

    def __len__(self) -> int:
        return int(self.table.num_rows) if self.table is not None else len(self.pending)

    def parts(self, keyless: Callable[[int], int], named: bool) -> list[FlushPart]:
        """The events of each partition; ``keyless`` is asked for that of events without a place."""
        sequences: list[int] | None = None
        pending = self.pending
        if self.table is None:
            self.places = self.pending.places(keyless)
            sequences = self.pending.sequences() if named else None
            self.table = self.pending.table()
        if self.places is None:
            self.places = np.full(self.table.num_rows, keyless(self.table.num_rows), np.int32)
        parts = []
        for partition, table, at in split(self.table, self.places):
            if sequences is None:
                parts.append(FlushPart(partition, table, at, None))
                continue
            rows = at.tolist()
            mark = pending.mark(rows[-1])
            parts.append(FlushPart(partition, table, at, [sequences[row] for row in rows], mark))
        return parts

    def stored(self, part: FlushPart, base: int) -> None:
        """Note that a part has its offsets."""
        self._bases.append((part.rows, base))

    def unknown(self, part: FlushPart, error: BaseException) -> None:
        """Note that a part may or may not be stored."""
        self._unknown.append((part.rows, error))

    def failed(self, error: BaseException) -> FlushFailure:
        """Begin to note who knows of a failure; before :meth:`finish`."""
        offsets = self.positions().offsets
        stored = int((offsets >= 0).sum()) if isinstance(error, TidelogError) else 0
        self.failure = FlushFailure(error, len(self) - stored)
        return self.failure

    def tell(self, index: int) -> None:
        """Note that the sender of one failed event gets its error now."""
        if self.failure is not None:
            self.failure.tell(index)

    def finish(self, error: BaseException | None = None) -> None:
        """Let those who wait go on."""
        self.error = error
        self.pending = EventBuffer()
        self.table = None  # the bytes are stored, or are the caller's again
        self._done.set()
        self._call_back()

    def on_done(self, call: Callable[[], None]) -> None:
        """Call this once when it has ended, in the thread that ends it; or now, if it has.

        It must return at once and raise nothing, since other flushes wait behind it.
        """
        self._calls.append(call)
        if self._done.is_set():
            self._call_back()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def settled(self, timeout_s: float | None) -> bool:
        """Wait until it has ended; whether it has."""
        return self._done.wait(timeout_s)

    def positions(self) -> Positions:
        """Where each event stands; -1 as offset of one that is not stored."""
        if self._positions is None:
            count = len(self.places) if self.places is not None else 0
            offsets = np.full(count, -1, np.int64)
            for rows, base in self._bases:
                offsets[rows] = np.arange(base, base + len(rows))
            places = self.places if self.places is not None else np.empty(0, np.int32)
            self._positions = Positions(self.topic, places, offsets)
        return self._positions

    def unknown_rows(self) -> npt.NDArray[np.bool_]:
        """Which events may or may not be stored."""
        unknown = np.zeros(len(self.positions()), np.bool_)
        for rows, _ in self._unknown:
            unknown[rows] = True
        return unknown

    def unknown_error(self) -> BaseException | None:
        """Why the fate of some events is unknown; None when there are none."""
        return self._unknown[0][1] if self._unknown else None

    def error_of(self, index: int) -> BaseException:
        """Why one event of a failed flush has no position; says whether it may be stored."""
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
        """Whether this one event has its offset, whatever became of the others."""
        offsets = self.positions().offsets
        return index < len(offsets) and bool(offsets[index] >= 0)

    def _call_back(self) -> None:
        """Two threads may come here at once: what one has taken, the other does not find."""
        while self._calls:
            try:
                call = self._calls.pop()
            except IndexError:
                return
            call()


class SendFuture(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A light handle on one event of a flush."""

    flush: Flush
    index: int  # of the event in it

    def result(self, timeout_s: float | None = None) -> Position:
        """The event's position, once it is durable; raises why it is not.

        ``UnknownOutcomeError`` when it may be stored all the same: its reply was lost, or
        ``timeout_s`` has passed and it is still under way.
        """
        flush = self.flush
        if not flush.settled(timeout_s):
            raise UnknownOutcomeError(
                f"append to `{flush.topic}`: not durable after {timeout_s} s, and still under way: "
                "wait longer"
            )
        if flush.error is not None:
            stored = isinstance(flush.error, TidelogError) and flush.is_stored(self.index)
            if not stored:
                flush.tell(self.index)
                raise flush.error_of(self.index)
        return flush.positions()[self.index]

    def done(self) -> bool:
        """Whether :meth:`result` would return at once."""
        return self.flush.done()


class FlushFailure:
    """Why events of one flush are not stored, and who knows that."""

    def __init__(self, error: BaseException, events: int) -> None:
        self.error = error
        self._events: int | None = events  # how many failed; None: of several flushes
        self._told: set[int] = set()  # those whose futures have raised it
        self._is_raised = False  # by a call for the producer as a whole
        self._threads: set[Thread] = set()  # that may have sent some, and do not know yet

    def tell(self, index: int) -> None:
        """Note that the future of a failed event has raised its error."""
        self._told.add(index)

    def met_by(self, threads: set[Thread]) -> None:
        """Note which threads live at the time of the failure."""
        self._threads = threads

    def is_over(self, living: set[Thread]) -> bool:
        """Whether no call is left that has to raise it."""
        self._threads &= living
        return self._is_told() or (self._is_raised and not self._threads)

    def is_due(self, thread: Thread) -> bool:
        """Whether a call in this thread has to raise it."""
        return not self._is_told() and (not self._is_raised or thread in self._threads)

    def raised_in(self, thread: Thread) -> None:
        """Note that a call in this thread raises it, or an earlier one."""
        self._is_raised = True
        self._threads.discard(thread)

    def absorb(self, later: FlushFailure) -> None:
        """Count for another one too, so that fewer have to be kept."""
        self._events = None
        self._is_raised = self._is_raised and later._is_raised
        self._threads |= later._threads

    def _is_told(self) -> bool:
        return self._events is not None and len(self._told) >= self._events


class FlushFailures:
    """Those of one producer, oldest first. Its lock is the caller's."""

    def __init__(self) -> None:
        self._kept: list[FlushFailure] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, failure: FlushFailure) -> None:
        """Keep one more, for all threads that live now."""
        living = set(threading.enumerate())
        failure.met_by(set(living))
        self._kept = [each for each in self._kept if not each.is_over(living)]
        self._kept.append(failure)
        if len(self._kept) > limits.FAILURES_MAX:
            self._kept[0].absorb(self._kept.pop(1))

    def due(self) -> BaseException | None:
        """The first error that the calling thread must raise, which then knows of all of them."""
        thread = threading.current_thread()
        due = [failure for failure in self._kept if failure.is_due(thread)]
        for failure in due:
            failure.raised_in(thread)
        return due[0].error if due else None
