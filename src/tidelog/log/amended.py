"""Amendments that are not compiled in yet, and what they do to the events that a reader gets.

A reader reads the head, then the amendments of its range, and only then the rows of runs and
journals. So whatever is compiled or removed meanwhile, it never sees an older state: an amendment's
row goes only when a journal that has it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.log.base import Log
from tidelog.log.rows import Offsets, Rows
from tidelog.model import layout
from tidelog.model.run import Amendment, Head, Run, decode_row
from tidelog.model.topic import Topic
from tidelog.store.ahead import fetched_ahead
from tidelog.store.base import Store

__all__ = [
    "NO_AMENDMENTS",
    "Amendments",
    "all_pending",
    "apply",
    "are_pending",
    "joined",
    "pending",
]

_ROWS_MAX = 20_000  # of amendments that are held at once
_BYTES_MAX = 16 << 20  # of their values
_FEW = 64  # one new value in so many is put between slices; more of them go by a mask
_NEW_BYTES_MAX = 64 << 20  # of new values in one batch; more of them are given out in several


@dataclass(frozen=True, eq=False)
class Amendments:
    """Those of a stretch of offsets, by offset. Pickles."""

    offsets: Offsets
    rows: tuple[Amendment, ...]
    end: int | None = None  # all below this offset are known; None: all

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, offset: int) -> Amendment | None:
        """What became of an event, if anything."""
        at = int(np.searchsorted(self.offsets, offset))
        return self.rows[at] if at < len(self) and self.offsets[at] == offset else None

    def between(self, start: int, end: int) -> Amendments:
        """Those of ``[start, end)``."""
        first, last = np.searchsorted(self.offsets, (start, end)).tolist()
        if last - first == len(self):
            return self
        return Amendments(self.offsets[first:last], self.rows[first:last], self.end)

    def of_run(self, run: Run) -> Amendments:
        """Those that are not in a run yet."""
        found = self.between(run.base, run.end) if len(self) else self
        if run.journal is None or not len(found):
            return found
        applied = run.journal.applied
        new = [index for index, row in enumerate(found.rows) if row.sequence > applied]
        if len(new) == len(found):
            return found
        return Amendments(found.offsets[new], tuple(found.rows[index] for index in new), found.end)


NO_AMENDMENTS = Amendments(np.empty(0, np.int64), ())


def are_pending(head: Head, start: int, end: int | None = None) -> bool:
    """Whether ``[start, end)`` may have amendments, by a partition's head."""
    if head.amended is None or head.amended[1] < start:
        return False
    return end is None or head.amended[0] < end


def pending(
    log: Log, topic: Topic, partition: int, head: Head, start: int, end: int | None = None
) -> Amendments:
    """The amendments of ``[start, end)``, or as many of the first as are read at once.

    No row is read where the head, which was read before, says that there are none.
    """
    if head.amended is None or not are_pending(head, start, end):
        return NO_AMENDMENTS
    first = max(start, head.amended[0])
    last = head.amended[1] + 1 if end is None else min(end, head.amended[1] + 1)
    where = layout.topic_partition(topic.incarnation, partition)
    offsets: list[int] = []
    found: list[Amendment] = []
    size = 0
    for row in log.catalog.scan(where, layout.amend_row(first), layout.amend_row(last)):
        if len(found) >= _ROWS_MAX or size >= _BYTES_MAX:
            return Amendments(np.array(offsets, np.int64), tuple(found), offsets[-1] + 1)
        what = f"row `{row.row}` of `{topic.name}/{partition}`"
        found.append(decode_row(row.value, Amendment, what))
        offsets.append(layout.amend_offset(row.row))
        size += len(row.value)
    return Amendments(np.array(offsets, np.int64), tuple(found)) if found else NO_AMENDMENTS


def all_pending(
    log: Log, topic: Topic, partition: int, head: Head, start: int, end: int
) -> Amendments:
    """The amendments of ``[start, end)``, however many they are."""
    found = [pending(log, topic, partition, head, start, end)]
    while (known := found[-1].end) is not None and known < end:
        found.append(pending(log, topic, partition, head, known, end))
    return joined(found)


def joined(parts: Sequence[Amendments]) -> Amendments:
    """Several that follow one another."""
    if len(parts) == 1:
        return parts[0]
    rows = tuple(row for part in parts for row in part.rows)
    return Amendments(np.concatenate([part.offsets for part in parts]), rows, parts[-1].end)


def apply(rows: Rows, amendments: Amendments, store: Store) -> Iterator[Rows]:
    """The rows as amendments leave them; in several parts where new values are large.

    ``amendments`` are those that are not in the run that the rows come from (``of_run``).
    ``NotFoundError`` when a value is gone from the store: then it was replaced by a newer one, or
    compiled in, and the catalog is to be read again.
    """
    found = amendments.between(rows.base, rows.end) if len(amendments) else amendments
    if not len(found):
        yield rows
        return
    numbers, is_here = rows.find(found.offsets)
    deleted: list[int] = []
    updated: list[tuple[int, Amendment]] = []
    for number, here, row in zip(numbers.tolist(), is_here.tolist(), found.rows, strict=True):
        if not here:
            continue
        if row.kind == "delete":
            deleted.append(number)
        else:
            updated.append((number, row))
    if "value" not in rows.batch.schema.names:
        updated = []
    keep = np.ones(rows.batch.num_rows, np.bool_)
    keep[deleted] = False
    for first, last, numbers_here, values in _portions(updated, rows.batch.num_rows, store):
        part = rows.numbered(first, last)
        if numbers_here:
            part = replace(part, batch=_replaced(part.batch, numbers_here, values))
        yield part.only(keep[first:last]) if deleted else part


def _portions(
    updated: Sequence[tuple[int, Amendment]], count: int, store: Store
) -> Iterator[tuple[int, int, list[int], list[bytes | None]]]:
    """From which event to which, which of these get a new value, and which one."""
    first = size = 0
    numbers: list[int] = []
    values: list[bytes | None] = []
    keys = [row.object for _, row in updated if row.object is not None]
    fetched = fetched_ahead(keys, store.get)
    for number, row in updated:
        value = row.value if row.object is None else next(fetched)[1]
        numbers.append(number - first)
        values.append(value)
        size += len(value or b"")
        if size >= _NEW_BYTES_MAX:
            yield first, number + 1, numbers, values
            first, size, numbers, values = number + 1, 0, [], []
    yield first, count, numbers, values


def _replaced(
    batch: pa.RecordBatch, numbers: list[int], values: list[bytes | None]
) -> pa.RecordBatch:
    index = batch.schema.get_field_index("value")
    old, new = batch.column(index), pa.array(values, pa.binary())
    if len(numbers) * _FEW < len(old):
        column = pa.concat_arrays(list(_spliced(old, new, numbers)))
    else:
        mask = np.zeros(len(old), np.bool_)
        mask[numbers] = True
        column = pc.replace_with_mask(old, pa.array(mask), new)
    return batch.set_column(index, batch.schema.field(index), column)


def _spliced(old: pa.Array, new: pa.Array, numbers: list[int]) -> Iterator[pa.Array]:
    """The old values, and the new ones at their places, as slices."""
    at = 0
    for index, number in enumerate(numbers):
        yield old.slice(at, number - at)
        yield new.slice(index, 1)
        at = number + 1
    yield old.slice(at)
