"""One flush: events that travel together, from the buffer to their offsets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.errors import TidelogError, UnavailableError, UnknownOutcomeError
from tidelog.log.failures import Failure
from tidelog.log.partitioner import split
from tidelog.log.pending import Pending
from tidelog.log.positions import Positions
from tidelog.model.event import Position

__all__ = ["Flush", "Part", "SendFuture"]


@dataclass(frozen=True, slots=True)
class Part:
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
        self.pending = Pending()
        self.limit = 0  # bytes up to which events may be put into it without asking anybody
        self.table: pa.Table | None = None
        self.places: npt.NDArray[np.int32] | None = None
        self.size = 0
        self.number = -1
        self.expected_offset: int | None = None
        self.error: BaseException | None = None
        self.failure: Failure | None = None  # of events that were sent
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

    def parts(self, keyless: Callable[[int], int], named: bool) -> list[Part]:
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
                parts.append(Part(partition, table, at, None))
                continue
            rows = at.tolist()
            mark = pending.mark(rows[-1])
            parts.append(Part(partition, table, at, [sequences[row] for row in rows], mark))
        return parts

    def stored(self, part: Part, base: int) -> None:
        """Note that a part has its offsets."""
        self._bases.append((part.rows, base))

    def unknown(self, part: Part, error: BaseException) -> None:
        """Note that a part may or may not be stored."""
        self._unknown.append((part.rows, error))

    def failed(self, error: BaseException) -> Failure:
        """Begin to note who knows of a failure; before :meth:`finish`."""
        offsets = self.positions().offsets
        stored = int((offsets >= 0).sum()) if isinstance(error, TidelogError) else 0
        self.failure = Failure(error, len(self) - stored)
        return self.failure

    def tell(self, index: int) -> None:
        """Note that the sender of one failed event gets its error now."""
        if self.failure is not None:
            self.failure.tell(index)

    def finish(self, error: BaseException | None = None) -> None:
        """Let those who wait go on."""
        self.error = error
        self.pending = Pending()
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
