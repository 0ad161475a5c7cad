"""Events that wait in a producer's buffer, and how they become Arrow.

Most events have a value and a time and nothing else, so those two are lists of their own, which
cost next to nothing to extend; what only some events have stands aside, with its row.
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
    """What an event has beside its value and time; -1 for "as the flush says" and for "none"."""

    id: str | None
    key: bytes | None
    type: str | None
    headers: Headers
    partition: int
    sequence: int
    mark: bytes | None = None  # of the sequence; None: a digest of the event


_PLAIN = Rest(None, None, None, (), -1, -1)


class EventBuffer:
    """A buffer of events, in the order in which they were sent."""

    __slots__ = ("rests", "rows", "times", "values")

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        self.times: list[int] = []
        self.rests: list[Rest] = []
        self.rows: list[int] = []  # to which event each rest belongs

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: bytes | None, time_ms: int, rest: Rest) -> None:
        """One more event."""
        if rest != _PLAIN:
            self.rows.append(len(self.values))
            self.rests.append(rest)
        self.times.append(time_ms)
        self.values.append(value)

    def table(self) -> pa.Table:
        """The events in stored columns."""
        ids, keys, types, headers = self._columns()
        columns = [self.times, ids, keys, self.values, types, headers]
        return pa.Table.from_batches([batch_of(columns)])

    def places(self, keyless: Callable[[int], int]) -> npt.NDArray[np.int32]:
        """The partition of each event.

        ``keyless`` is asked for that of events that may go anywhere, with their number, if any.
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
        """The sequence of each event of a named producer, all of whose events have one."""
        return [rest.sequence for rest in self.rests]

    def mark(self, row: int) -> bytes:
        """The mark of one event of a named producer."""
        rest = self.rests[row]
        if rest.mark is not None:
            return rest.mark
        return event_mark(self.values[row], rest.key, rest.id, rest.type)

    def _columns(self) -> Sequence[tuple[Any, ...] | None]:
        """Ids, keys, types, headers; None for those that no event has."""
        if not self.rests:
            return [None] * 4
        rests = self.rests
        if len(rests) < len(self):
            rests = [_PLAIN] * len(self)
            for row, rest in zip(self.rows, self.rests, strict=True):
                rests[row] = rest
        return list(zip(*rests, strict=True))[:4]
