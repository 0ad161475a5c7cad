"""Reads the events of a run, which is a piece of a segment or a journal, and applies amendments.

It fetches a segment's piece as a whole and checks it before it returns anything. Of a journal it
fetches the footer, and only the row groups and columns that the caller wants, and checks each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa

from tidelog.codec.event_batch import STORED_SCHEMA
from tidelog.codec.journal_file import JournalFile, RowGroup
from tidelog.codec.segment import read_piece
from tidelog.log.reader.amendments import NO_AMENDMENTS, Amendments, EventRows, apply
from tidelog.model.partition_rows import Run
from tidelog.store.base import Store
from tidelog.store.cache import reread

__all__ = ["WHOLE", "Cut", "EventRows", "describe_run", "fetch_run", "in_turn", "read_run"]

_WHOLE_BYTES = 1 << 20  # a journal up to this size is fetched in one request
_GROUPS_AHEAD = 2

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a run that the caller wants, and the threads that may fetch it in advance."""

    start: int | None = None  # offsets; None: from its first, to its last
    end: int | None = None
    columns: Sequence[str] | None = None  # stored columns, one at least; None: all
    pool: Executor | None = None  # None: no threads; never a pool whose threads call this
    skip: Callable[[RowGroup], bool] | None = None  # row groups of a journal to leave out


WHOLE = Cut()


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
    cut: Cut = WHOLE,
    amendments: Amendments = NO_AMENDMENTS,
    data: bytes | None = None,
) -> Iterator[EventRows]:
    """Yields the wanted events with amendments applied, in consecutive parts without gaps.

    ``data`` is the result of ``fetch_run``. Raises ``NotFoundError`` if the run's object or a new
    value is missing: read the catalog again. Raises ``CorruptError`` if a check fails.
    """
    start = run.base if cut.start is None else max(run.base, cut.start)
    end = run.end if cut.end is None else min(run.end, cut.end)
    if start >= end:
        return
    found = amendments.of_run(run)
    parts = _of_piece if run.journal is None else _of_journal
    for rows in parts(store, run, what, replace(cut, start=start, end=end), data):
        part = rows.slice(start, end)
        if part.base < part.end:
            yield from apply(part, found, store)


def in_turn(
    pool: Executor | None, call: Callable[[T], R], wanted: Iterable[T], ahead: int
) -> Iterator[tuple[T, R]]:
    """Yields each item with the result of ``call``; with a pool, it computes some in advance."""
    if pool is None:
        yield from ((each, call(each)) for each in wanted)
        return
    waiting: deque[tuple[T, Future[R]]] = deque()
    try:
        for each in wanted:
            waiting.append((each, pool.submit(call, each)))
            if len(waiting) > ahead:
                first, coming = waiting.popleft()
                yield first, coming.result()
        while waiting:
            first, coming = waiting.popleft()
            yield first, coming.result()
    finally:
        for _, coming in waiting:
            coming.cancel()


def _of_piece(
    store: Store, run: Run, what: str, cut: Cut, data: bytes | None
) -> Iterator[EventRows]:
    def read(again: bool) -> Iterator[pa.RecordBatch]:
        piece = data
        if piece is None or again:
            piece = store.get(run.object, run.byte_start, run.byte_end)
        return read_piece(piece, run.crc, run.count, what, cut.columns)

    at = run.base
    for batch in reread(store, run.object, read):
        yield EventRows(at, at + batch.num_rows, batch)
        at += batch.num_rows


def _of_journal(
    store: Store, run: Run, what: str, cut: Cut, data: bytes | None
) -> Iterator[EventRows]:
    at, end = cut.start or 0, run.end if cut.end is None else cut.end
    columns = list(cut.columns or STORED_SCHEMA.names)
    if run.events:

        def open_file(again: bool) -> JournalFile:
            return JournalFile(_fetcher(store, run, None if again else data), run, what)

        def read(group: RowGroup) -> pa.RecordBatch:
            def attempt(again: bool) -> pa.RecordBatch:
                return _read_group(open_file(again) if again else file, columns, group)

            return reread(store, run.object, attempt)

        file = reread(store, run.object, open_file)
        groups = [each for each in file.groups_of(at, end) if not (cut.skip and cut.skip(each))]
        for group, batch in in_turn(cut.pool, read, groups, _GROUPS_AHEAD):
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
            base, end, batch.drop_columns(["offset"]), batch.column("offset").to_numpy()
        )
    places = None if base == group.first else np.arange(group.first, end, dtype=np.int64)
    return EventRows(base, end, batch, places)


def _is_dense(group: RowGroup) -> bool:
    """Returns whether a row group has an event at every offset, so that offsets need no read."""
    return group.rows == group.last + 1 - group.first
