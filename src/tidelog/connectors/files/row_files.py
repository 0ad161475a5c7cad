"""Reads files without offsets: each row is an event, and its row number is the position.

A line of text is the value of an event. It counts once its newline is there, because the rest may
still be written. A last line without a newline counts in a finished file. A Parquet file has some
of the event columns, at least ``value``; files of other formats have all of them. An event without
a time has the time of the file. Times are rounded down to milliseconds.

No row is rejected here. A row that no topic accepts, or with a field that no event can hold,
becomes a dead letter (``connectors.archive.dead_letters``) and gets an ``error``. Only columns are
refused.

In a file of JSON events, each line that is not blank is a row. A line that is not a valid event
keeps its place: its bytes are the value, and the column ``error`` says what is wrong. An archive
makes it a dead letter; a topic refuses it. It never affects other lines.
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
from tidelog.codec.formats.batches import READ_BYTES, decoding, open_data, open_text
from tidelog.connectors.files.listing import LINES
from tidelog.errors import InvalidError
from tidelog.model.limits import EVENT_BYTES_CEILING, TIMESTAMP_MS_END
from tidelog.store.fetch import naming

__all__ = [
    "CHECKED_SCHEMA",
    "FileLines",
    "LongLineError",
    "RowFile",
    "read_event_rows",
    "with_errors",
    "without_errors",
]

_READ_BYTES = 4 << 20  # of text per read
_ROWS = 10_000  # of a Parquet file per read


class LongLineError(InvalidError):
    """A line that is too long to read. The lines before it were returned."""

    kind = "long_line"


class FileLines(NamedTuple):
    """Some lines, and their bytes."""

    lines: list[bytes]
    text: bytes
    is_open: bool = False  # the last one has no newline yet


@dataclass(frozen=True, slots=True)
class RowFile:
    """How to read the rows of one file; plain values."""

    what: str  # its name in error messages
    format: str
    codec: str | None
    delimiter: bytes
    time_ms: int  # of events without their own

    @property
    def has_lines(self) -> bool:
        """Returns whether its rows are lines of text, which may still grow."""
        return self.format == LINES

    @property
    def is_text(self) -> bool:
        """Returns whether it is text, which a rotation copies or compresses as it is."""
        return self.has_lines or self.format == "jsonlines"

    @property
    def text_codec(self) -> str | None:
        """Returns how the text that identifies the file is compressed; None: it is not text."""
        return self.codec if self.is_text else None

    @property
    def is_plain(self) -> bool:
        """Returns whether the file is not compressed as a whole."""
        return self.codec in (None, "none")

    @property
    def _time_ms(self) -> int:
        return min(max(0, self.time_ms), TIMESTAMP_MS_END - 1)

    def count(self, data: BinaryIO) -> int:
        """Returns the number of rows of a file that is not lines."""
        if self.format == "parquet":
            with decoding(self.what):
                return int(pq.ParquetFile(open_data(data)).metadata.num_rows)
        return sum(batch.num_rows for batch in self._events(data))

    def batches(self, data: BinaryIO, start: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yields rows from ``start`` in stored columns, with the row number of each batch."""
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
        """Returns lines in stored columns."""
        times = np.full(len(lines), self._time_ms, np.int64)
        return batch_of([times.tolist(), None, None, lines, None, None])

    def lines(self, data: BinaryIO, row: int = 0) -> Iterator[FileLines]:
        """Yields the lines from the current position; the last one may have no newline.

        Raises ``LongLineError`` after the lines before one that is too long.
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
        """Yields files in event columns, without the place where the events once were."""
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
        """Returns rows with a column ``error``, set for rows with fields that no event can hold."""
        try:
            stored_columns(batch.slice(0, 0), self._time_ms)
        except InvalidError as exc:  # of the columns, so it concerns all rows
            raise InvalidError(f"{self.what}: {exc}") from exc
        return one_batch(list(self._checked(batch)), CHECKED_SCHEMA)

    def _checked(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yields the same rows in parts: halves a batch until the wrong rows are alone."""
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
        """Returns a row without the fields that cannot be stored; it may get the file's time."""
        for field in row.schema:
            beside = {"value", field.name}
            names = [name for name in row.schema.names if name in beside]
            try:
                stored_columns(row.select(names), self._time_ms)
            except InvalidError:
                if field.name != "value":
                    row = row.drop_columns([field.name])
        return one_batch(stored_columns(row, self._time_ms))


CHECKED_SCHEMA = STORED_SCHEMA.append(pa.field("error", pa.string()))  # null: a valid event

_LINE_BYTES_MAX = 2 * EVENT_BYTES_CEILING  # of JSON, where bytes are base64
_WRONG = (
    msgspec.MsgspecError,
    ValueError,
    OverflowError,
    RecursionError,
)  # includes pa.ArrowInvalid
_SHOWN_MAX = 300  # characters of a reason


def read_event_rows(what: str, data: Data, codec: str, time_ms: int) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a file. Invalid events get the time of the file and an error.

    Raises ``InvalidError`` for a line that is too long, or that has no end and may still grow.
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
    """Returns a batch without its column ``error`` if no row has one; else unchanged."""
    if "error" not in batch.schema.names or batch.column("error").null_count < batch.num_rows:
        return batch
    return batch.drop_columns(["error"])


def with_errors(stored: pa.RecordBatch, reason: str | None) -> pa.RecordBatch:
    """Returns a batch in stored columns with a column ``error``, the same in each row."""
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
