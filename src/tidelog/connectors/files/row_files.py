"""Files that hold no offsets: their rows are events, and a row's number is its position.

A line of text is an event's value, as it is. It counts when its newline is there: the rest of a
line may still be written. A last line without an end counts in a file that is finished. A Parquet
file has some of the event columns, ``value`` at least; files of other formats have them all. What
has no time of its own has that of the file. Times finer than milliseconds are cut off, toward the
past.

No row is judged here: one that no topic accepts is a dead letter (``sinks.acceptance``), and so is
one with a field that no event can hold, which gets an ``error``. Only columns are refused.

Files of events as JSON lines that others have written: a wrong line never stops its neighbours.

Each line that is not blank is a row. One that is not an event keeps its place: its bytes are the
value, and the column ``error`` says what is wrong. An archive makes a dead letter of it; a topic
refuses it (``sinks``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tidelog.codec.event_batch import STORED_SCHEMA, batch_of, one_batch, stored_columns
from tidelog.codec.event_json import batch_of_lines, json_problem
from tidelog.codec.formats import open_format
from tidelog.codec.formats.base import Data
from tidelog.codec.formats.streams import READ_BYTES, decoding, open_data, open_text
from tidelog.connectors.files.names import LINES
from tidelog.connectors.files.objects import naming
from tidelog.errors import InvalidError
from tidelog.model.limits import EVENT_BYTES_CEILING, TIMESTAMP_MS_END

__all__ = [
    "CHECKED_SCHEMA",
    "FileLines",
    "LongLineError",
    "RowFile",
    "read_event_rows",
    "with_errors",
    "without_errors",
]

_READ_BYTES = 4 << 20  # of text at a time
_ROWS = 10_000  # of a Parquet file at a time


class LongLineError(InvalidError):
    """A line that is too long to be read; those before it were returned."""

    kind = "long_line"


class FileLines(NamedTuple):
    """Some lines, and the bytes that they are."""

    lines: list[bytes]
    text: bytes
    is_open: bool = False  # it is one without an end


@dataclass(frozen=True, slots=True)
class RowFile:
    """How the rows of one file are read; plain values."""

    what: str  # names it in messages
    format: str
    codec: str | None
    delimiter: bytes
    time_ms: int  # of events that have none of their own

    @property
    def has_lines(self) -> bool:
        """Whether its rows are lines of text, which may still grow."""
        return self.format == LINES

    @property
    def is_plain(self) -> bool:
        """Whether its bytes are not compressed as a whole."""
        return self.codec in (None, "none")

    @property
    def _time_ms(self) -> int:
        return min(max(0, self.time_ms), TIMESTAMP_MS_END - 1)

    def count(self, data: BinaryIO) -> int:
        """How many rows there are in a file of another format than lines."""
        if self.format == "parquet":
            with decoding(self.what):
                return int(pq.ParquetFile(open_data(data)).metadata.num_rows)
        return sum(batch.num_rows for batch in self._events(data))

    def batches(self, data: BinaryIO, start: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Rows from ``start`` on in stored columns, with the number of the first of each batch."""
        if self.format == "parquet":
            yield from self._columns(data, start)
            return
        row = 0
        for batch in self._events(data):
            if row + batch.num_rows > start:
                skipped = max(0, start - row)
                yield row + skipped, batch.slice(skipped)
            row += batch.num_rows

    def values(self, lines: list[bytes]) -> pa.RecordBatch:
        """Lines in stored columns."""
        times = np.full(len(lines), self._time_ms, np.int64)
        return batch_of([times.tolist(), None, None, lines, None, None])

    def lines(self, data: BinaryIO, row: int = 0) -> Iterator[FileLines]:
        """The lines from where the data is; the last ones may be one without an end.

        ``LongLineError`` after those that come before a line which is too long.
        """
        rest = b""
        with decoding(self.what):
            at = data.tell()
            empty = not data.read(1)
            data.seek(at)
            text = None if empty else open_text(data, self.codec or "none")
        while text is not None:
            with decoding(self.what):
                block = text.read(_READ_BYTES)
            if not block:
                break
            block = rest + block
            *lines, rest = block.split(self.delimiter)
            if len(rest) > EVENT_BYTES_CEILING:
                raise LongLineError(
                    f"{self.what}: line {row + len(lines) + 1} has more than {EVENT_BYTES_CEILING} "
                    "bytes, and nothing from it on is read: is it text? give its format or its "
                    "delimiter, or split the line"
                )
            row += len(lines)
            if lines:
                yield FileLines(lines, block[: len(block) - len(rest)])
        if rest:
            yield FileLines([rest], rest, is_open=True)

    def _events(self, data: BinaryIO) -> Iterator[pa.RecordBatch]:
        """Of files in event columns: everything except where the events were once."""
        if self.format == "jsonlines":
            yield from read_event_rows(self.what, data, self.codec or "none", self._time_ms)
            return
        form = open_format(self.format, self.codec)
        with naming(self.what):
            for batch in form.read(data):
                yield batch.select(STORED_SCHEMA.names).cast(STORED_SCHEMA)

    def _columns(self, data: BinaryIO, start: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        with decoding(self.what):
            file = pq.ParquetFile(open_data(data), page_checksum_verification=True)
        row = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if row + rows > start:
                yield from self._group(file, group, row, start)
            row += rows

    def _group(
        self, file: pq.ParquetFile, group: int, row: int, start: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        batches = file.iter_batches(batch_size=_ROWS, row_groups=[group], use_threads=False)
        while True:
            with decoding(self.what):
                batch = next(batches, None)
            if batch is None:
                return
            skipped = min(max(0, start - row), batch.num_rows)
            if skipped < batch.num_rows:
                yield row + skipped, self._stored(batch.slice(skipped))
            row += batch.num_rows

    def _stored(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows with a column ``error``; those whose fields no event can hold have one."""
        try:
            stored_columns(batch.slice(0, 0), self._time_ms)
        except InvalidError as exc:  # of the file's columns, whatever its rows are
            raise InvalidError(f"{self.what}: {exc}") from exc
        return one_batch(list(self._checked(batch)), CHECKED_SCHEMA)

    def _checked(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The same in parts: where rows are wrong, halves are tried."""
        try:
            stored = one_batch(stored_columns(batch, self._time_ms))
            yield with_errors(stored, None)
        except InvalidError as exc:
            if batch.num_rows > 1:
                middle = batch.num_rows // 2
                yield from self._checked(batch.slice(0, middle))
                yield from self._checked(batch.slice(middle))
            else:
                reason = f"row is not an event: {exc.__cause__ or exc}"
                yield with_errors(self._kept(batch), reason)

    def _kept(self, row: pa.RecordBatch) -> pa.RecordBatch:
        """A row without the fields that cannot be stored; its time may be the file's."""
        for field in row.schema:
            beside = {"value", field.name}
            names = [name for name in row.schema.names if name in beside]
            try:
                stored_columns(row.select(names), self._time_ms)
            except InvalidError:
                if field.name != "value":
                    row = row.drop_columns([field.name])
        return one_batch(stored_columns(row, self._time_ms))


CHECKED_SCHEMA = STORED_SCHEMA.append(pa.field("error", pa.string()))  # null: the row is an event

_LINE_BYTES_MAX = 2 * EVENT_BYTES_CEILING  # of JSON, in which bytes are base64
_WRONG = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)  # pa.ArrowInvalid too
_SHOWN_MAX = 300  # characters of a reason


def read_event_rows(what: str, data: Data, codec: str, time_ms: int) -> Iterator[pa.RecordBatch]:
    """Return the rows of a file; those that are not events have its time and an error.

    ``InvalidError`` for a line that is too long or has no end, since it may still be written.
    """
    with decoding(what):
        text = open_text(data, codec)
    rest, row = b"", 0
    while True:
        with decoding(what):
            block = text.read(READ_BYTES)
        if not block:
            break
        lines, line_break, rest_of_block = block.rpartition(b"\n")
        if line_break:
            batch = _rows([each for each in (rest + lines).split(b"\n") if each.strip()], time_ms)
            yield batch
            row, rest = row + batch.num_rows, rest_of_block
        else:
            rest += block
        if len(rest) > _LINE_BYTES_MAX:
            raise InvalidError(
                f"{what}: line {row + 1} has more than {_LINE_BYTES_MAX} bytes: is it a file of "
                "events as JSON? give its format, or remove the line"
            )
    if rest.strip():
        raise InvalidError(
            f"{what}: its last line, {row + 1}, has no newline at its end: put the whole file there"
        )


def without_errors(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch without its column ``error``, if no row has one; else as it is."""
    if "error" not in batch.schema.names or batch.column("error").null_count < batch.num_rows:
        return batch
    return batch.drop_columns(["error"])


def with_errors(stored: pa.RecordBatch, reason: str | None) -> pa.RecordBatch:
    """Return a batch in stored columns with a column ``error``, which is the same in each row."""
    reasons = [None if reason is None else reason[:_SHOWN_MAX]] * stored.num_rows
    return pa.record_batch([*stored.columns, pa.array(reasons, pa.string())], CHECKED_SCHEMA)


def _rows(lines: list[bytes], time_ms: int) -> pa.RecordBatch:
    try:
        batch = batch_of_lines(b"\n".join(lines))
    except _WRONG:
        batch = None
    if batch is not None and batch.num_rows == len(lines):
        return _checked(batch)
    return one_batch([_row(line, time_ms) for line in lines])


def _row(line: bytes, time_ms: int) -> pa.RecordBatch:
    try:
        batch = batch_of_lines(line)
    except _WRONG as exc:
        problem = json_problem(line, exc) if isinstance(exc, msgspec.MsgspecError) else str(exc)
    else:
        if batch.num_rows == 1:
            return _checked(batch)
        problem = f"the line holds {batch.num_rows} of them"
    columns = batch_of([[time_ms], None, None, [line], None, None]).columns
    reason = f"line is not an event as JSON: {problem}"[:_SHOWN_MAX]
    return pa.record_batch([*columns, pa.array([reason])], schema=CHECKED_SCHEMA)


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    stored = batch.select(STORED_SCHEMA.names).cast(STORED_SCHEMA)
    return pa.record_batch([*stored.columns, pa.nulls(batch.num_rows, pa.string())], CHECKED_SCHEMA)
