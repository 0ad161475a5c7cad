"""Several streams of events back in the one order of their offsets, in Arrow, without holding them.

A stream is opened when its first offset is reached, so only those that overlap are open at once;
of each, one batch is held.
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

__all__ = ["Stream", "gathered", "merged", "noted", "within"]

_MERGE_BYTES = 64 << 20  # sorted at once, far below the 2 GiB of an Arrow array
_CHUNK_ROWS = 20_000  # small batches are joined
_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Stream:
    """Events whose offsets rise, in event columns."""

    what: str  # names it in messages
    first: int  # no offset of it is below
    open: Callable[[], Iterable[pa.RecordBatch]]


def merged(streams: Iterable[Stream]) -> Iterator[pa.RecordBatch]:
    """All events, each once, in the order of their offsets.

    ``CorruptError`` for a stream that is not in order, or an offset that two of them have.
    """
    waiting = sorted(streams, key=lambda stream: stream.first, reverse=True)
    active: list[_Cursor] = []
    while waiting or active:
        border = min((cursor.last for cursor in active), default=-1)
        if waiting and (not active or waiting[-1].first <= border):
            cursor = _Cursor(waiting.pop())
            active += [cursor] if cursor.rows else []
            continue
        yield _taken(active, border)
        active = [cursor for cursor in active if cursor.rows]


def within(batch: pa.RecordBatch, start: int, end: int) -> pa.RecordBatch:
    """The rows whose offsets lie in ``[start, end)``; offsets rise."""
    low, high = np.searchsorted(batch.column("offset").to_numpy(), (start, end))
    return batch.slice(low, high - low)


def gathered(pieces: Iterable[tuple[pa.RecordBatch, str]], limit: str) -> Iterator[Chunk]:
    """Batches with the positions after them, joined to a size that is worth handling.

    The last chunk's position is the limit.
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
    """The same chunks, of which the last one has a note, which is asked for after all were read."""
    last: Chunk | None = None
    for chunk in chunks:
        if last is not None:
            yield last
        last = chunk
    if last is not None:
        yield replace(last, note=note())


class _Cursor:
    """Where the merging stands in one stream."""

    def __init__(self, stream: Stream) -> None:
        self.what = stream.what
        self._batches = iter(stream.open())
        self._batch = pa.RecordBatch.from_pylist([], schema=EVENT_SCHEMA)
        self._offsets = np.array([stream.first - 1], np.int64)
        self._next()

    @property
    def rows(self) -> int:
        """How many rows are held; 0 only at the end of the stream."""
        return int(self._batch.num_rows)

    @property
    def first(self) -> int:
        return int(self._offsets[0])

    @property
    def last(self) -> int:
        return int(self._offsets[-1])

    def upto(self, border: int) -> pa.RecordBatch:
        """The rows up to an offset, and with it."""
        return self._batch.slice(0, np.searchsorted(self._offsets, border, side="right"))

    def skip(self, count: int) -> None:
        """Go on after so many rows."""
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


def _taken(active: list[_Cursor], border: int) -> pa.RecordBatch:
    """The rows of all up to a border, or up to an earlier one if they were too many to sort."""
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
