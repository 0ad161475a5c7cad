"""Rows of a partition on their way to a reader: events, and the offsets that they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["Offsets", "Rows"]

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """All events of the offsets ``[base, end)``, in order; fewer than offsets where some are gone.

    There may be none at all: then a reader only goes on from ``end``.
    """

    base: int
    end: int
    batch: pa.RecordBatch  # in stored columns, or some of them
    places: Offsets | None = None  # None: the events stand at ``base`` and what follows, each

    @property
    def offsets(self) -> Offsets:
        """The offset of each event."""
        if self.places is not None:
            return self.places
        return np.arange(self.base, self.base + self.batch.num_rows, dtype=np.int64)

    def slice(self, start: int, end: int) -> Rows:
        """What stands in ``[start, end)``, as far as it is here."""
        if start <= self.base and self.end <= end:
            return self
        start = min(max(start, self.base), self.end)
        end = max(start, min(end, self.end))
        first, last = self._index(start), self._index(end)
        return self._part(start, end, first, last - first)

    def numbered(self, first: int, last: int) -> Rows:
        """From one event to before another, counted from 0, with what is gone around them."""
        start = self.base if first == 0 else self._offset(first - 1) + 1
        end = self.end if last >= self.batch.num_rows else self._offset(last - 1) + 1
        return self._part(start, end, first, last - first)

    def take(self, count: int, start: int | None = None) -> Rows:
        """So many of the first events from ``start`` on, one at least; all if there are no more."""
        start = self.base if start is None else start
        first, rows = self._index(start), int(self.batch.num_rows)
        last = min(first + count, rows)
        end = self.end if last == rows else self._offset(last - 1) + 1
        return self._part(start, end, first, last - first)

    def only(self, keep: npt.NDArray[np.bool_]) -> Rows:
        """Those events that are to be kept; it stands for the same offsets."""
        mask, places = pa.array(keep), self.offsets[keep]
        columns = [
            column.slice(0, len(places))
            if column.null_count == len(column)
            else column.filter(mask)
            for column in self.batch.columns
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=self.batch.schema)
        return Rows(self.base, self.end, batch, places)

    def find(self, offsets: Offsets) -> tuple[Offsets, npt.NDArray[np.bool_]]:
        """The number of each offset's event, and whether it is here at all; offsets rise."""
        if self.places is None:
            found = offsets - self.base
            return found, (found >= 0) & (found < self.batch.num_rows)
        if not len(self.places):
            return np.zeros_like(offsets), np.zeros(len(offsets), np.bool_)
        found = np.minimum(np.searchsorted(self.places, offsets), len(self.places) - 1)
        return found, self.places[found] == offsets

    def _index(self, offset: int) -> int:
        """How many events stand before an offset."""
        if self.places is None:
            return min(offset - self.base, int(self.batch.num_rows))
        return int(np.searchsorted(self.places, offset))

    def _offset(self, number: int) -> int:
        return self.base + number if self.places is None else int(self.places[number])

    def _part(self, start: int, end: int, first: int, count: int) -> Rows:
        places = None if self.places is None else self.places[first : first + count]
        return Rows(start, end, self.batch.slice(first, count), places)
