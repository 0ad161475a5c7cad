"""Merges streams of events into one stream ordered by offset, in Arrow, with bounded memory.

A stream is opened when the merge reaches its first offset, so only overlapping streams are open at
the same time. The merge keeps one batch of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from tidelog.codec.event_batch import EVENT_SCHEMA, batch_bytes, one_batch
from tidelog.connectors.source import Chunk
from tidelog.errors import CorruptError
from tidelog.model.limits import BATCH_BYTES_MAX

__all__ = ["MergeInput", "gathered", "merged", "noted", "within"]

_MERGE_BYTES = 64 << 20  # the most to sort in one step; far below the 2 GiB limit of an Arrow array
_CHUNK_ROWS = 20_000  # join small batches up to this many rows
_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class MergeInput:
    """Events with rising offsets, in event columns."""

    what: str  # its name in error messages
    first: int  # every offset is at or above this
    open: Callable[[], Iterable[pa.RecordBatch]]


def merged(streams: Iterable[MergeInput]) -> Iterator[pa.RecordBatch]:
    """Yields every event once, in offset order.

    Raises ``CorruptError`` if a stream is out of order, or if two streams have the same offset.
    """
    waiting = sorted(streams, key=lambda stream: stream.first, reverse=True)
    active: list[_Cursor] = []
    while waiting or active:
        border = min((cursor.last for cursor in active), default=-1)
        if waiting and (not active or waiting[-1].first <= border):
            cursor = _Cursor(waiting.pop())
            active += [cursor] if cursor.rows else []
            continue
        yield _next_rows(active, border)
        active = [cursor for cursor in active if cursor.rows]


def within(batch: pa.RecordBatch, start: int, end: int) -> pa.RecordBatch:
    """Returns the rows with offsets in ``[start, end)``. The offsets of the batch must rise."""
    low, high = np.searchsorted(batch.column("offset").to_numpy(), (start, end))
    return batch.slice(low, high - low)


def gathered(pieces: Iterable[tuple[pa.RecordBatch, str]], limit: str) -> Iterator[Chunk]:
    """Joins batches, each with the position after it, into chunks large enough to process.

    The position of the last chunk is the limit.
    """
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    reached = limit
    for batch, position in pieces:
        if not batch.num_rows:
            continue
        given = batch_bytes(batch)
        if waiting and size + given > BATCH_BYTES_MAX:
            yield Chunk(one_batch(waiting), reached)
            waiting, rows, size = [], 0, 0
        waiting.append(batch)
        rows += batch.num_rows
        size += given
        reached = position
        if rows >= _CHUNK_ROWS or size >= _CHUNK_BYTES:
            yield Chunk(one_batch(waiting), reached)
            waiting, rows, size = [], 0, 0
    schema = waiting[0].schema if waiting else EVENT_SCHEMA
    yield Chunk(one_batch(waiting, schema), limit)


def noted(chunks: Iterable[Chunk], note: Callable[[], bytes]) -> Iterator[Chunk]:
    """Yields the same chunks, and adds a note to the last one after all of them were read."""
    last: Chunk | None = None
    for chunk in chunks:
        if last is not None:
            yield last
        last = chunk
    if last is not None:
        yield replace(last, note=note())


class _Cursor:
    """The current batch of one stream in the merge."""

    def __init__(self, stream: MergeInput) -> None:
        self.what = stream.what
        self._batches = iter(stream.open())
        self._batch = pa.RecordBatch.from_pylist([], schema=EVENT_SCHEMA)
        self._offsets = np.array([stream.first - 1], np.int64)
        self._next()

    @property
    def rows(self) -> int:
        """Returns how many rows the current batch has; 0 only at the end of the stream."""
        return int(self._batch.num_rows)

    @property
    def first(self) -> int:
        return int(self._offsets[0])

    @property
    def last(self) -> int:
        return int(self._offsets[-1])

    def upto(self, border: int) -> pa.RecordBatch:
        """Returns the rows up to and including an offset."""
        return self._batch.slice(0, np.searchsorted(self._offsets, border, side="right"))

    def skip(self, count: int) -> None:
        """Drops this many rows from the front."""
        if count < self.rows:
            self._batch, self._offsets = self._batch.slice(count), self._offsets[count:]
        else:
            self._next()

    def _next(self) -> None:
        before = self.last
        for batch in self._batches:
            if batch.num_rows:
                self._batch, self._offsets = batch, batch.column("offset").to_numpy()
                if self.first <= before or bool((np.diff(self._offsets) <= 0).any()):
                    raise CorruptError(
                        f"{self.what}: its offsets do not rise after {before}: keep it, and "
                        "restore it from a copy"
                    )
                return
        self._batch = self._batch.slice(0, 0)


def _next_rows(active: list[_Cursor], border: int) -> pa.RecordBatch:
    """Returns the rows of all streams up to ``border``, or fewer if they are too many to sort."""
    first = min(cursor.first for cursor in active)
    parts = [cursor.upto(border) for cursor in active]
    while len(active) > 1 and border > first and sum(map(batch_bytes, parts)) > _MERGE_BYTES:
        border = first + (border - first) // 2
        parts = [cursor.upto(border) for cursor in active]
    given = [(cursor, part) for cursor, part in zip(active, parts, strict=True) if part.num_rows]
    for cursor, part in given:
        cursor.skip(part.num_rows)
    whole = one_batch([part for _, part in given])
    if len(given) == 1:
        return whole
    offsets = whole.column("offset").to_numpy()
    order = np.argsort(offsets, kind="stable")
    twice = offsets[order][1:][np.diff(offsets[order]) == 0]
    if len(twice):
        both = [c.what for c, part in given if within(part, twice[0], twice[0] + 1).num_rows]
        raise CorruptError(
            f"{' and '.join(both)}: both have offset {twice[0]}: keep them, and find out who "
            "wrote them"
        )
    return whole.take(pa.array(order))
