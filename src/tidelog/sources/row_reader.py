"""Reading a range of a file of rows, and marking what was read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from tidelog.codec.events import STORED_SCHEMA, with_position
from tidelog.errors import NotFoundError
from tidelog.sources.base import Chunk, Range, RangeReader, offset_at, range_offsets
from tidelog.sources.event_rows import without_errors
from tidelog.sources.merge import gathered, noted
from tidelog.sources.objects import opened
from tidelog.sources.row_marks import Passed, RowMark, mark_from, mark_of, matches, passed_at
from tidelog.sources.rows import RowFile
from tidelog.store.base import ObjectInfo, Store
from tidelog.store.here import open_store_here

__all__ = ["PlannedRows", "not_held"]

_Pieces = Iterator[tuple[pa.RecordBatch, str]]


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Some rows of a file. Pickles."""

    range: Range
    info: ObjectInfo
    file: RowFile
    store: str  # URL
    name: str = ""  # that the file has
    note: bytes = b""  # of what was read of it before
    further: bytes = b""  # of what another pipeline has read of it, which may be more

    def read(self) -> Iterator[Chunk]:
        """The same chunks as ``FilesSource.read``; the last one has the mark of the file.

        ``NotFoundError`` when the file is not the one that was read before, or becomes another one
        while it is read.
        """
        store, notes = open_store_here(self.store), [self.note]
        reading = self._lines(store, notes) if self.file.has_lines else self._others(store, notes)
        chunks = gathered(reading, self.range.limit)
        plain = (replace(each, batch=without_errors(each.batch)) for each in chunks)
        return noted(plain, lambda: notes[-1])

    def _lines(self, store: Store, notes: list[bytes]) -> _Pieces:
        start, limit = range_offsets(self.range)
        if start == limit:
            return
        passed, is_open = self._begun(store, start), False
        with opened(store, self.info.key, self.info.size) as data:
            data.seek(passed.size)
            for found in self.file.lines(data, passed.rows):
                row, lines, text = passed.rows, found.lines, found.text
                if len(lines) > limit - row:
                    lines = lines[: limit - row]
                    text = b"".join(line + self.file.delimiter for line in lines)
                passed.add(text, len(lines))
                is_open = found.is_open
                if passed.rows > start:
                    skipped = max(0, start - row)
                    yield self._piece(self.file.values(lines[skipped:]), row + skipped)
                if passed.rows == limit:
                    break
        if passed.rows < limit:
            raise not_held(self.range, 0, passed.rows)
        mark = passed.mark(is_open, self.info.etag, self.name)
        if self.file.is_plain and not self._is_still(store, mark):
            raise self._replaced()
        if not self.file.is_plain and store.head(self.info.key).etag != self.info.etag:
            raise self._replaced()
        notes.append(mark.note())

    def _begun(self, store: Store, start: int) -> Passed:
        """Where to begin: where the last range ended, if the file is the same."""
        mark, codec = mark_from(self.note), self.file.codec
        if mark is None:
            return Passed()
        if not matches(store, self.info, mark, codec):
            raise self._replaced()
        if self.file.is_plain and mark.rows == start and not mark.is_open:
            return passed_at(store, self.info, mark)
        return Passed()

    def _others(self, store: Store, notes: list[bytes]) -> _Pieces:
        at, limit = range_offsets(self.range)
        if at == limit:
            return
        known, mark = mark_from(self.note), mark_of(store, self.info, limit, self.name)
        if known is not None and not matches(store, self.info, known, None):
            raise self._replaced()
        with opened(store, self.info.key, self.info.size) as data:
            for row, batch in self.file.batches(data, at):
                rows = batch.slice(0, limit - row)
                at = row + rows.num_rows
                yield self._piece(rows, row)
                if at == limit:
                    break
        if at != limit:
            raise not_held(self.range, 0, at)
        if not self._is_still(store, mark):
            raise self._replaced()
        notes.append(mark.note())

    def _is_still(self, store: Store, mark: RowMark) -> bool:
        """Whether the file still is what was read now, and what another pipeline had read."""
        marks = (mark, mark_from(self.further))
        return all(matches(store, self.info, each, None) for each in marks if each is not None)

    def _piece(self, rows: pa.RecordBatch, row: int) -> tuple[pa.RecordBatch, str]:
        stored = rows.select(STORED_SCHEMA.names)
        batch = with_position(stored, self.range.partition.topic, 0, row)
        if "error" in rows.schema.names:
            batch = batch.append_column(rows.schema.field("error"), rows.column("error"))
        return batch, str(row + rows.num_rows)

    def _replaced(self) -> NotFoundError:
        return NotFoundError(
            f"source partition `{self.range.partition.text}`: file `{self.info.key}` was replaced "
            "or cut off: look at the source again",
            file=self.info.key,
        )


def not_held(range: Range, first: int, end: int) -> NotFoundError:
    return NotFoundError(
        f"source partition `{range.partition.text}`: its files hold [{first}, {end}), asked was "
        f"[{range.start}, {range.limit}): files have shrunk or are missing: put them back",
        lost_from=offset_at(range.start),
        first=first,
        end=end,
    )


_: type[RangeReader] = PlannedRows
