"""A range of a source, completed from files: what the source no longer holds inside of it.

Kafka's compaction deletes records inside of what a partition still holds. A backup may be a copy
without its dead letters, or without some of its files. The generation that is live may have these
events in its files. So a generation that is being built reads both, in the order of their offsets;
of an offset that both have, the source's event counts. The files are opened at the first offset
that the source lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.codec.event_batch import one_batch
from tidelog.connectors.merge import within
from tidelog.connectors.source import ChangingReader, Chunk, RangeReader, SourceRange

__all__ = ["CompletedReader"]


@dataclass(frozen=True, slots=True)
class CompletedReader:
    """A range of a source whose positions are offsets, and the files that complete it; pickles."""

    reader: RangeReader
    files: RangeReader  # of a part of the range
    generation: int  # whose files they are

    @property
    def range(self) -> SourceRange:
        return self.reader.range

    @property
    def is_changing(self) -> bool:
        return any(
            isinstance(each, ChangingReader) and each.is_changing
            for each in (self.reader, self.files)
        )

    def read(self) -> Iterator[Chunk]:
        """The chunks of the source, with the events that it lacks between its own."""
        rows, at = _FileRows(self.files), int(self.range.start)
        for chunk in self.reader.read():
            end = int(chunk.position)
            if chunk.batch.num_rows < end - at:
                yield from _completed(chunk, rows, at, end)
            else:
                yield chunk
            at = max(at, end)


def _completed(chunk: Chunk, rows: _FileRows, start: int, end: int) -> Iterator[Chunk]:
    """A chunk that ends at an offset, in as many as it needs not to hold too much at once."""
    left = chunk.batch
    for more in rows.between(start, end):
        offsets = _offsets(more)
        if not (mask := np.isin(offsets, _offsets(left), invert=True)).any():
            continue
        border = int(offsets[-1]) + 1
        before, left = within(left, 0, border), within(left, border, end)
        both = one_batch([before, more.filter(pa.array(mask)).cast(before.schema)])
        order = np.argsort(_offsets(both), kind="stable")
        yield Chunk(both.take(pa.array(order)), str(border))
    yield replace(chunk, batch=left)


class _FileRows:
    """The events of files, taken from the first offset on that is asked for."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        self._chunks: Iterator[Chunk] | None = None
        self._left: pa.RecordBatch | None = None  # of the batch that was read last

    def between(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Events of ``[start, end)``; none that lie before are asked for again."""
        if self._chunks is None:
            self._chunks = self._reader.read()
        while True:
            batch = self._left
            if batch is None:
                chunk = next(self._chunks, None)
                if chunk is None:
                    return
                batch = chunk.batch
            wanted = within(batch, start, end)
            rest = batch.slice(np.searchsorted(_offsets(batch), end))
            self._left = rest if rest.num_rows else None
            if wanted.num_rows:
                yield wanted
            if self._left is not None:
                return


def _offsets(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = batch.column("offset").to_numpy()
    return found
