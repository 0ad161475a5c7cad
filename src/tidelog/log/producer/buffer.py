"""The buffer of a producer: events that wait, and how they become Arrow.

Most events have only a value and a time, so these have lists of their own, which are cheap to
extend. What only some events have is kept apart, with the row number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.codec.event_batch import batch_of
from tidelog.log.producer.append_plan import event_mark
from tidelog.model.event import Headers

__all__ = ["EventBuffer", "Rest"]


class Rest(NamedTuple):
    """What an event has besides value and time; -1 means "the flush decides" or "none"."""

    id: str | None
    key: bytes | None
    type: str | None
    headers: Headers
    partition: int
    sequence: int
    mark: bytes | None = None  # of the sequence; None: a digest of the event


_PLAIN = Rest(None, None, None, (), -1, -1)


class EventBuffer:
    """Events in the order in which they were sent."""

    __slots__ = ("rests", "rows", "times", "values")

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        self.times: list[int] = []
        self.rests: list[Rest] = []
        self.rows: list[int] = []  # the event that each rest belongs to

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: bytes | None, time_ms: int, rest: Rest) -> None:
        """Adds one event."""
        if rest != _PLAIN:
            self.rows.append(len(self.values))
            self.rests.append(rest)
        self.times.append(time_ms)
        self.values.append(value)

    def table(self) -> pa.Table:
        """Returns the events in stored columns."""
        ids, keys, types, headers = self._columns()
        columns = [self.times, ids, keys, self.values, types, headers]
        return pa.Table.from_batches([batch_of(columns)])

    def places(self, keyless: Callable[[int], int]) -> npt.NDArray[np.int32]:
        """Returns the partition of each event.

        Calls ``keyless`` with the number of events that may go anywhere, if there are any.
        """
        places = np.full(len(self), -1, np.int32)
        if self.rests:
            places[self.rows] = [rest.partition for rest in self.rests]
        free = places < 0
        count = int(np.count_nonzero(free))
        if count:
            places[free] = keyless(count)
        return places

    def sequences(self) -> list[int]:
        """Returns the sequences of a named producer's events; each has one."""
        return [rest.sequence for rest in self.rests]

    def mark(self, row: int) -> bytes:
        """Returns the mark of one event of a named producer."""
        rest = self.rests[row]
        if rest.mark is not None:
            return rest.mark
        return event_mark(self.values[row], rest.key, rest.id, rest.type)

    def _columns(self) -> Sequence[tuple[Any, ...] | None]:
        """Returns ids, keys, types, headers; None for a column that no event has."""
        if not self.rests:
            return [None] * 4
        rests = self.rests
        if len(rests) < len(self):
            rests = [_PLAIN] * len(self)
            for row, rest in zip(self.rows, self.rests, strict=True):
                rests[row] = rest
        return list(zip(*rests, strict=True))[:4]
