"""Readers of ranges that come from another generation's files, completely or in part.

A carried range is read from the files alone. A completed one is read from the source, and the files
add the events that the source no longer has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.codec.event_batch import one_batch
from tidelog.connectors.merge import within
from tidelog.connectors.source import (
    ChangingReader,
    Chunk,
    CountedRange,
    DividingReader,
    RangeReader,
    SourceRange,
)
from tidelog.model.pipeline import FileEntry

__all__ = ["CarriedRange", "CarriedReader", "CompletedReader"]


@dataclass(frozen=True, slots=True)
class CarriedRange:
    """What a pipeline must know about a range from another generation's files."""

    generation: int
    as_is: bool  # the files hold the output of a transform, so no other transform runs
    counted: CountedRange | None = None  # of ranges whose events the pipeline numbers itself
    note: bytes = b""  # identifies the source partition, for a source that tracks
    files: tuple[FileEntry, ...] = ()  # to copy beside what is read; `staged` is where they are


@dataclass(frozen=True, slots=True)
class CarriedReader:
    """Reads a range from another generation's files; pickles."""

    reader: RangeReader
    carried: CarriedRange

    @property
    def range(self) -> SourceRange:
        return self.reader.range

    @property
    def is_changing(self) -> bool:
        return isinstance(self.reader, ChangingReader) and self.reader.is_changing

    def read(self) -> Iterator[Chunk]:
        return self.reader.read()

    def part(self, start: str, limit: str) -> CarriedReader | None:
        """Implements ``DividingReader.part``, if events keep their offsets."""
        if self.carried.counted is not None or not isinstance(self.reader, DividingReader):
            return None
        part = self.reader.part(start, limit)
        return None if part is None else replace(self, reader=part)


@dataclass(frozen=True, slots=True)
class CompletedReader:
    """Reads a range of a source, and from files the events that the source no longer has.

    Kafka's compaction deletes records inside the range that a partition still holds. A backup may
    be a copy without dead letters, or without some files. The live generation may have these
    events in its files. So a generation that is being built reads both, in offset order. For an
    offset in both, the source's event counts. The files are opened at the first offset that the
    source lacks.
    """

    reader: RangeReader
    files: RangeReader  # of a part of the range
    generation: int  # of the files

    @property
    def range(self) -> SourceRange:
        return self.reader.range

    @property
    def is_changing(self) -> bool:
        return any(
            isinstance(each, ChangingReader) and each.is_changing
            for each in (self.reader, self.files)
        )

    def part(self, start: str, limit: str) -> RangeReader | None:
        """Implements ``DividingReader.part``, if both of its readers do."""
        if not (isinstance(self.reader, DividingReader) and isinstance(self.files, DividingReader)):
            return None
        reader, whole = self.reader.part(start, limit), self.files.range
        first, last = max(int(start), int(whole.start)), min(int(limit), int(whole.limit))
        if reader is None or first >= last:
            return reader  # the files have nothing of this part
        files = self.files.part(str(first), str(last))
        return None if files is None else replace(self, reader=reader, files=files)

    def read(self) -> Iterator[Chunk]:
        """Yields the chunks of the source, with the missing events in between."""
        rows, at = _FileRows(self.files), int(self.range.start)
        for chunk in self.reader.read():
            end = int(chunk.position)
            if chunk.batch.num_rows < end - at:
                yield from _fill_chunk(chunk, rows, at, end)
            else:
                yield chunk
            at = max(at, end)


def _fill_chunk(chunk: Chunk, rows: _FileRows, start: int, end: int) -> Iterator[Chunk]:
    """Yields a chunk that ends at an offset, in parts of bounded size."""
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
    """The events of files, from the first requested offset on."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        self._chunks: Iterator[Chunk] | None = None
        self._left: pa.RecordBatch | None = None  # of the last batch

    def between(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yields the events of ``[start, end)``. Calls must go forward."""
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
