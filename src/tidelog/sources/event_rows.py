"""Files of events as JSON lines that others have written: a wrong line never stops its neighbours.

Each line that is not blank is a row. One that is not an event keeps its place: its bytes are the
value, and the column ``error`` says what is wrong. An archive makes a dead letter of it; a topic
refuses it (``sinks``).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pyarrow as pa

from tidelog.codec.event_json import batch_of_lines, json_problem
from tidelog.codec.events import STORED_SCHEMA, batch_of, one_batch
from tidelog.codec.formats.base import Data
from tidelog.codec.formats.streams import READ_BYTES, decoding, open_text
from tidelog.errors import InvalidError
from tidelog.model.limits import EVENT_BYTES_CEILING

__all__ = ["CHECKED_SCHEMA", "read_event_rows", "with_errors", "without_errors"]

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
