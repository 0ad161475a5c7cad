"""Reads the events of a run, which is a piece of a segment or a journal, and applies amendments.

It fetches a segment's piece as a whole and checks it before it returns anything. Of a journal it
fetches the footer, and only the row groups and columns that the caller wants, and checks each.

**Amendments** that are not compiled yet change the events that a reader gets. A reader reads the
head, then the amendments of its range, and then the rows of runs and journals. A compile deletes an
amendment's row only after a journal contains it. So whatever is compiled or deleted in the
meantime, the reader never sees an older state.

:class:`EventRows` is what passes between the layers of a reader: events, and the offsets that they
cover.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.event_batch import STORED_SCHEMA
from tidelog.codec.journal_file import JournalFile, RowGroup
from tidelog.codec.numbers import mask_array, numbers_of
from tidelog.codec.segment import read_piece
from tidelog.context import Context
from tidelog.errors import CorruptError
from tidelog.model import layout
from tidelog.model.topic import Amendment, Head, Run, Topic, decode_row
from tidelog.store.base import Store
from tidelog.store.fetch import fetch_ahead, fetch_ahead_in_threads
from tidelog.store.wrappers import reread

__all__ = [
    "NO_AMENDMENTS",
    "WHOLE",
    "Amendments",
    "EventRows",
    "Offsets",
    "RunSelection",
    "all_pending",
    "apply",
    "are_pending",
    "describe_run",
    "fetch_run",
    "joined",
    "new_value",
    "pending",
    "read_run",
    "row_groups",
]

_ROWS_MAX = 20_000  # amendments in memory at a time
_BYTES_MAX = 16 << 20  # total size of their values
_FEW = 64  # up to one new value in this many goes between slices; more of them use a mask
_NEW_BYTES_MAX = 64 << 20  # new values in one batch; more are split


@dataclass(frozen=True, eq=False)
class Amendments:
    """The amendments of a range of offsets, by offset. Pickles."""

    offsets: Offsets
    rows: tuple[Amendment, ...]
    end: int | None = None  # all below this offset are known; None: all are

    def __len__(self) -> int:
        return len(self.rows)

    def __eq__(self, other: object) -> bool:
        """Returns whether a second look found the same; two plans are compared by this."""
        if not isinstance(other, Amendments):
            return NotImplemented
        same_rows = (self.rows, self.end) == (other.rows, other.end)
        return same_rows and np.array_equal(self.offsets, other.offsets)

    def __hash__(self) -> int:
        return hash((self.offsets.tobytes(), self.end))

    def get(self, offset: int) -> Amendment | None:
        """Returns the amendment of an event, or None."""
        at = int(np.searchsorted(self.offsets, offset))
        return self.rows[at] if at < len(self) and self.offsets[at] == offset else None

    def between(self, start: int, end: int) -> Amendments:
        """Returns the amendments of ``[start, end)``."""
        first, last = np.searchsorted(self.offsets, (start, end)).tolist()
        if last - first == len(self):
            return self
        return Amendments(self.offsets[first:last], self.rows[first:last], self.end)

    def of_run(self, run: Run) -> Amendments:
        """Returns the amendments that a run does not contain yet."""
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
    """Returns whether ``[start, end)`` may have amendments, by a partition's head."""
    if head.amended is None or head.amended[1] < start:
        return False
    return end is None or head.amended[0] < end


def pending(
    context: Context, topic: Topic, partition: int, head: Head, start: int, end: int | None = None
) -> Amendments:
    """Returns the amendments of ``[start, end)``, or the first of them up to a limit.

    Reads no row if the head, which the caller read before, says that there are none.
    """
    if head.amended is None or not are_pending(head, start, end):
        return NO_AMENDMENTS
    first = max(start, head.amended[0])
    last = head.amended[1] + 1 if end is None else min(end, head.amended[1] + 1)
    where = layout.topic_partition(topic.incarnation, partition)
    offsets: list[int] = []
    found: list[Amendment] = []
    size = 0
    for row in context.catalog.scan(where, layout.amend_row(first), layout.amend_row(last)):
        if len(found) >= _ROWS_MAX or size >= _BYTES_MAX:
            return Amendments(np.array(offsets, np.int64), tuple(found), offsets[-1] + 1)
        what = f"row `{row.row}` of `{topic.name}/{partition}`"
        found.append(decode_row(row.value, Amendment, what))
        offsets.append(layout.amend_offset(row.row))
        size += len(row.value)
    return Amendments(np.array(offsets, np.int64), tuple(found)) if found else NO_AMENDMENTS


def all_pending(
    context: Context, topic: Topic, partition: int, head: Head, start: int, end: int
) -> Amendments:
    """Returns all amendments of ``[start, end)``, without a limit."""
    found = [pending(context, topic, partition, head, start, end)]
    while (known := found[-1].end) is not None and known < end:
        found.append(pending(context, topic, partition, head, known, end))
    return joined(found)


def joined(parts: Sequence[Amendments]) -> Amendments:
    """Returns consecutive amendments as one."""
    if len(parts) == 1:
        return parts[0]
    rows = tuple(row for part in parts for row in part.rows)
    return Amendments(np.concatenate([part.offsets for part in parts]), rows, parts[-1].end)


def apply(rows: EventRows, amendments: Amendments, store: Store) -> Iterator[EventRows]:
    """Yields the rows with amendments applied, in several parts if new values are large.

    ``amendments`` are those that the run of these rows does not contain (``of_run``). Raises
    ``NotFoundError`` if a value is missing from the store. It was replaced by a newer one or was
    compiled: read the catalog again.
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
            part = replace(part, batch=_replace_values(part.batch, numbers_here, values))
        yield part.only(keep[first:last]) if deleted else part


def new_value(store: Store, row: Amendment) -> bytes | None:
    """Returns the new value of an updated event.

    Raises ``NotFoundError`` if its object is missing, and ``CorruptError`` if that is damaged.
    """
    key = row.object
    if key is None:
        return row.value

    def read(_: bool) -> bytes:
        value = store.get(key)
        if crc32c.crc32c(value) != row.crc:
            raise CorruptError(
                f"object `{key}`: is not the new value that an update stored, by its checksum: "
                "keep it, and restore it from a copy"
            )
        return value

    return reread(store, key, read)


def _portions(
    updated: Sequence[tuple[int, Amendment]], count: int, store: Store
) -> Iterator[tuple[int, int, list[int], list[bytes | None]]]:
    """Yields the first and last event of a part, the events that change, and their new values."""
    first = size = 0
    numbers: list[int] = []
    values: list[bytes | None] = []
    large = [row for _, row in updated if row.object is not None]
    fetched = fetch_ahead_in_threads(partial(new_value, store), large)
    for number, row in updated:
        value = row.value if row.object is None else next(fetched)[1]
        numbers.append(number - first)
        values.append(value)
        size += len(value or b"")
        if size >= _NEW_BYTES_MAX:
            yield first, number + 1, numbers, values
            first, size, numbers, values = number + 1, 0, [], []
    yield first, count, numbers, values


def _replace_values(
    batch: pa.RecordBatch, numbers: list[int], values: list[bytes | None]
) -> pa.RecordBatch:
    index = batch.schema.get_field_index("value")
    old, new = batch.column(index), pa.array(values, pa.binary())
    if len(numbers) * _FEW < len(old):
        column = pa.concat_arrays(list(_splice(old, new, numbers)))
    else:
        mask = np.zeros(len(old), np.bool_)
        mask[numbers] = True
        column = pc.replace_with_mask(old, mask_array(mask), new)
    return batch.set_column(index, batch.schema.field(index), column)


def _splice(old: pa.Array, new: pa.Array, numbers: list[int]) -> Iterator[pa.Array]:
    """Yields the old values, with the new ones instead, as slices."""
    at = 0
    for index, number in enumerate(numbers):
        yield old.slice(at, number - at)
        yield new.slice(index, 1)
        at = number + 1
    yield old.slice(at)


Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class EventRows:
    """All events of the offsets ``[base, end)``, in order; fewer than offsets if some were erased.

    It may be empty: then a reader just continues at ``end``.
    """

    base: int
    end: int
    batch: pa.RecordBatch  # all stored columns, or some of them
    sparse: Offsets | None = None  # None: the events are at ``base`` and the offsets that follow

    @property
    def offsets(self) -> Offsets:
        """Returns the offset of each event."""
        if self.sparse is not None:
            return self.sparse
        return np.arange(self.base, self.base + self.batch.num_rows, dtype=np.int64)

    def slice(self, start: int, end: int) -> EventRows:
        """Returns the events in ``[start, end)`` that are here."""
        if start <= self.base and self.end <= end:
            return self
        start = min(max(start, self.base), self.end)
        end = max(start, min(end, self.end))
        first, last = self._index(start), self._index(end)
        return self._part(start, end, first, last - first)

    def numbered(self, first: int, last: int) -> EventRows:
        """Returns the events numbered ``[first, last)``, with the erased offsets around them."""
        start = self.base if first == 0 else self._offset(first - 1) + 1
        end = self.end if last >= self.batch.num_rows else self._offset(last - 1) + 1
        return self._part(start, end, first, last - first)

    def take(self, count: int, start: int | None = None) -> EventRows:
        """Returns the first ``count`` events from ``start`` on, at least one; all if there are
        fewer.
        """
        start = self.base if start is None else start
        first, rows = self._index(start), int(self.batch.num_rows)
        last = min(first + count, rows)
        end = self.end if last == rows else self._offset(last - 1) + 1
        return self._part(start, end, first, last - first)

    def only(self, keep: npt.NDArray[np.bool_]) -> EventRows:
        """Returns only the events to keep; covers the same offsets."""
        mask, offsets = mask_array(keep), self.offsets[keep]
        columns = [
            column.slice(0, len(offsets))
            if column.null_count == len(column)
            else column.filter(mask)
            for column in self.batch.columns
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=self.batch.schema)
        return EventRows(self.base, self.end, batch, offsets)

    def find(self, offsets: Offsets) -> tuple[Offsets, npt.NDArray[np.bool_]]:
        """Returns each offset's event number, and whether it is here; offsets must be ascending."""
        if self.sparse is None:
            found = offsets - self.base
            return found, (found >= 0) & (found < self.batch.num_rows)
        if not len(self.sparse):
            return np.zeros_like(offsets), np.zeros(len(offsets), np.bool_)
        found = np.minimum(np.searchsorted(self.sparse, offsets), len(self.sparse) - 1)
        return found, self.sparse[found] == offsets

    def _index(self, offset: int) -> int:
        """Returns how many events come before an offset."""
        if self.sparse is None:
            return min(offset - self.base, int(self.batch.num_rows))
        return int(np.searchsorted(self.sparse, offset))

    def _offset(self, number: int) -> int:
        return self.base + number if self.sparse is None else int(self.sparse[number])

    def _part(self, start: int, end: int, first: int, count: int) -> EventRows:
        offsets = None if self.sparse is None else self.sparse[first : first + count]
        return EventRows(start, end, self.batch.slice(first, count), offsets)


_WHOLE_BYTES = 1 << 20  # a journal up to this size is fetched in one request
_GROUPS_AHEAD = 2

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RunSelection:
    """The part of a run that the caller wants, and the threads that may fetch it in advance."""

    start: int | None = None  # offsets; None: from its first, to its last
    end: int | None = None
    columns: Sequence[str] | None = None  # stored columns, one at least; None: all
    pool: Executor | None = None  # None: no threads; never a pool whose threads call this
    skip: Callable[[RowGroup], bool] | None = None  # row groups of a journal to leave out


WHOLE = RunSelection()


def describe_run(topic: str, partition: int | str, run: Run) -> str:
    """Returns where a run is, for messages."""
    return (
        f"object `{run.object}`, bytes {run.byte_start} to {run.byte_end}, partition "
        f"`{topic}/{partition}`, offsets {run.base} to {run.end}"
    )


def fetch_run(store: Store, run: Run) -> bytes | None:
    """Returns all bytes of a run; None for a journal that is too large to fetch whole."""
    if run.journal is not None and run.byte_end > _WHOLE_BYTES:
        return None
    return store.get(run.object, run.byte_start, run.byte_end)


def read_run(
    store: Store,
    run: Run,
    what: str,
    selection: RunSelection = WHOLE,
    amendments: Amendments = NO_AMENDMENTS,
    data: bytes | None = None,
) -> Iterator[EventRows]:
    """Yields the wanted events with amendments applied, in consecutive parts without gaps.

    ``data`` is the result of ``fetch_run``. Raises ``NotFoundError`` if the run's object or a new
    value is missing: read the catalog again. Raises ``CorruptError`` if a check fails.
    """
    start = run.base if selection.start is None else max(run.base, selection.start)
    end = run.end if selection.end is None else min(run.end, selection.end)
    if start >= end:
        return
    found = amendments.of_run(run)
    parts = _of_piece if run.journal is None else _of_journal
    for rows in parts(store, run, what, replace(selection, start=start, end=end), data):
        part = rows.slice(start, end)
        if part.base < part.end:
            yield from apply(part, found, store)


def row_groups(store: Store, run: Run, what: str) -> tuple[RowGroup, ...]:
    """Returns the row groups of a journal, from its footer. Raises as ``read_run`` does."""

    def read(again: bool) -> tuple[RowGroup, ...]:
        return JournalFile(partial(store.get, run.object), run, what).groups

    return reread(store, run.object, read)


def _of_piece(
    store: Store, run: Run, what: str, selection: RunSelection, data: bytes | None
) -> Iterator[EventRows]:
    def read(again: bool) -> Iterator[pa.RecordBatch]:
        piece = data
        if piece is None or again:
            piece = store.get(run.object, run.byte_start, run.byte_end)
        return read_piece(piece, run.crc, run.count, what, selection.columns)

    at = run.base
    for batch in reread(store, run.object, read):
        yield EventRows(at, at + batch.num_rows, batch)
        at += batch.num_rows


def _of_journal(
    store: Store, run: Run, what: str, selection: RunSelection, data: bytes | None
) -> Iterator[EventRows]:
    at, end = selection.start or 0, run.end if selection.end is None else selection.end
    columns = list(selection.columns or STORED_SCHEMA.names)
    if run.events:

        def open_file(again: bool) -> JournalFile:
            return JournalFile(_fetcher(store, run, None if again else data), run, what)

        def read(group: RowGroup) -> pa.RecordBatch:
            def attempt(again: bool) -> pa.RecordBatch:
                return _read_group(open_file(again) if again else file, columns, group)

            return reread(store, run.object, attempt)

        file = reread(store, run.object, open_file)
        groups = [
            each
            for each in file.groups_of(at, end)
            if not (selection.skip and selection.skip(each))
        ]
        for group, batch in fetch_ahead(selection.pool, read, groups, _GROUPS_AHEAD):
            rows = _group_rows(group, batch, at)
            at = rows.end
            yield rows
    if at < end:
        fields = [field for field in STORED_SCHEMA if field.name in columns]
        yield EventRows(at, end, pa.RecordBatch.from_pylist([], schema=pa.schema(fields)))


def _fetcher(store: Store, run: Run, data: bytes | None) -> Callable[[int, int], bytes]:
    if data is None:
        return partial(store.get, run.object)
    return lambda start, end: data[start:end]


def _read_group(file: JournalFile, columns: list[str], group: RowGroup) -> pa.RecordBatch:
    return file.read(group, columns if _is_dense(group) else ["offset", *columns])


def _group_rows(group: RowGroup, batch: pa.RecordBatch, at: int) -> EventRows:
    """Returns a row group from ``at`` on, including the erased offsets before it."""
    base, end = min(at, group.first), group.last + 1
    if not _is_dense(group):
        return EventRows(
            base, end, batch.drop_columns(["offset"]), numbers_of(batch.column("offset"))
        )
    offsets = None if base == group.first else np.arange(group.first, end, dtype=np.int64)
    return EventRows(base, end, batch, offsets)


def _is_dense(group: RowGroup) -> bool:
    """Returns whether a row group has an event at every offset, so that offsets need no read."""
    return group.rows == group.last + 1 - group.first
