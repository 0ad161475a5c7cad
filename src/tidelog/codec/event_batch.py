"""Events as Arrow batches, and batches as events.

The event columns have the same names everywhere. A batch in *stored* columns has what a segment
contains. The position (topic, partition, offset) comes from the catalog, and is added in front when
a batch is returned to a caller.

**Digests.** A digest of events does not depend on their order, nor on how they are split into
tables. DuckDB hashes each event, and the hashes are added up. The digest distinguishes a batch that
was computed again from one with other events; it does not withstand an attacker. Another version of
DuckDB may hash differently: digests of different versions are not compared, only the counts are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, repeat
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.numbers import bytes_array, number_array, numbers_of, repeated_text
from tidelog.errors import CorruptError, InternalError, InvalidError
from tidelog.model import limits
from tidelog.model.decoding import Persisted
from tidelog.model.event import (
    Event,
    Headers,
    check_event_bytes,
    check_header_count,
    check_headers,
    check_id_bytes,
    check_timestamp,
    headers_of,
    wrong_type,
)

if TYPE_CHECKING:
    import duckdb

__all__ = [
    "EVENT_SCHEMA",
    "STORED_SCHEMA",
    "Contents",
    "bad_text",
    "batch_bytes",
    "batch_of",
    "bytes_without_value",
    "check_events",
    "check_times",
    "contents_of",
    "event_sizes",
    "events_of",
    "has_additions",
    "joined_batches",
    "one_batch",
    "problem_of_text",
    "refused_events",
    "stored_batch",
    "stored_columns",
    "table_of",
    "value_lengths",
    "whole_ms",
    "with_position",
]

_HEADERS = pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))
_TIME = pa.timestamp("ms", "UTC")
_DAY_MS = 86_400_000

STORED_SCHEMA = pa.schema(
    [
        pa.field("timestamp", _TIME, nullable=False),
        ("id", pa.string()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("type", pa.string()),
        ("headers", _HEADERS),
    ]
)

OWN_HEADERS = ("tidelog-", "tidelog.")  # prefixes of headers that Tidelog adds
EVENT_SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        *STORED_SCHEMA,
    ]
)


def batch_of(columns: Sequence[Sequence[Any] | None]) -> pa.RecordBatch:
    """Returns a stored batch from columns of Python values, in the order of ``STORED_SCHEMA``.

    A column without any value may be None, except the first, the times.
    """
    rows = len(columns[0] or ())
    arrays = [
        pa.nulls(rows, field.type) if values is None else _array(values, field.type)
        for values, field in zip(columns, STORED_SCHEMA, strict=True)
    ]
    return pa.record_batch(arrays, schema=STORED_SCHEMA)


def table_of(events: Sequence[Event], now_ms: int) -> pa.Table:
    """Returns events as a table in stored columns. Raises ``InvalidError`` for wrong types."""
    for kind in set(map(type, events)):
        if not issubclass(kind, Event):
            raise InvalidError(f"append: got {kind.__name__}: give Event objects or an Arrow table")
    columns: dict[str, list[Any]] = {
        name: [getattr(event, name) for event in events] for name in STORED_SCHEMA.names
    }
    for name, kind in (("value", bytes), ("key", bytes), ("id", str), ("type", str)):
        columns[name] = _plain(name, columns[name], kind)
    times = columns["timestamp"]
    if set(map(type, times)) != {int}:
        columns["timestamp"] = [now_ms if t is None else check_timestamp(t) for t in times]
    columns["headers"] = list(map(headers_of, columns["headers"]))
    for headers in columns["headers"]:
        if headers:
            check_headers(headers)
    try:
        table = pa.Table.from_batches([batch_of(list(columns.values()))])
    except (pa.ArrowInvalid, UnicodeEncodeError, OverflowError) as exc:
        raise InvalidError(f"event: cannot be stored: {exc}") from exc
    check_times(table.column("timestamp"))
    return table


def check_events(table: pa.Table | pa.RecordBatch, bytes_max: int, *, own: bool = False) -> None:
    """Raises ``InvalidError`` for events in stored columns that break the rules of ``check_event``.

    ``own`` is for events to which Tidelog itself has added headers or fields: these have extra room
    on top of the limits for events from outside. The error is about the first bad event, and has
    its ``row``.
    """
    try:
        _check(table, bytes_max, own)
    except InvalidError:
        row = _first_refused(table, bytes_max, own)
        try:
            _check(table.slice(row, 1), bytes_max, own)
        except InvalidError as exc:
            where = "" if table.num_rows == 1 else f"row {row}: "
            raise InvalidError(f"{where}{exc}", **{**exc.context, "row": row}) from exc
        raise


def refused_events(
    table: pa.Table | pa.RecordBatch, bytes_max: int, *, own: bool = False
) -> dict[int, str]:
    """Returns why events in stored columns may not be stored, by row."""
    found: dict[int, str] = {}
    parts = [(0, table.num_rows)]
    while parts:
        start, end = parts.pop()
        try:
            _check(table.slice(start, end - start), bytes_max, own)
        except InvalidError as exc:
            if end - start == 1:
                found[start] = str(exc)
            else:
                middle = (start + end) // 2
                parts += [(start, middle), (middle, end)]
    return found


def _first_refused(table: pa.Table | pa.RecordBatch, bytes_max: int, own: bool) -> int:
    """Returns the row of the first event that :func:`_check` refuses; there must be one."""
    low, high = 0, table.num_rows  # rows before low are fine; one before high is not
    while high - low > 1:
        middle = (low + high) // 2
        try:
            _check(table.slice(low, middle - low), bytes_max, own)
        except InvalidError:
            high = middle
        else:
            low = middle
    return low


def _check(table: pa.Table | pa.RecordBatch, bytes_max: int, own: bool) -> None:
    if table.num_rows == 0:
        return
    problem = problem_of_text(table)
    if problem is not None:
        raise InvalidError(f"event: {problem}: give text")
    room = limits.OWN_BYTES_MAX if own else 0
    headers_max = limits.HEADERS_MAX + (limits.OWN_HEADERS_MAX if own else 0)
    ids = pc.min_max(pc.binary_length(table.column("id"))).as_py()
    if ids["min"] is not None:
        check_id_bytes(ids["min"])
        check_id_bytes(ids["max"])
    lengths = [*_field_lengths(table, headers_max), value_lengths(table.column("value"))]
    if sum(int(each.max()) for each in lengths) > bytes_max + room:
        check_event_bytes(int(np.max(sum(lengths))), bytes_max, room)


def problem_of_text(table: pa.Table | pa.RecordBatch) -> str | None:
    """Returns what is wrong with the text of events in stored columns; None if all of it is UTF-8.

    Arrow itself accepts any bytes as text, and fails when they are decoded.
    """
    texts = [("id", table.column("id")), ("type", table.column("type"))]
    headers = table.column("headers")
    if headers.null_count < len(headers):
        texts.append(("header's name", pc.struct_field(pc.list_flatten(headers), "name")))
    for what, column in texts:
        try:
            if column.null_count < len(column):
                column.validate(full=True)
        except pa.ArrowInvalid:
            return f"its {what} is not valid UTF-8"
    return None


def bad_text(batch: pa.RecordBatch) -> CorruptError:
    """Returns the error for a batch in event columns with text that is not UTF-8."""
    rows = range(batch.num_rows)
    row = next((each for each in rows if problem_of_text(batch.slice(each, 1))), 0)
    topic, partition, offset = (
        batch.column(name)[row].as_py() for name in ("topic", "partition", "offset")
    )
    return CorruptError(
        f"partition `{topic}/{partition}`, offset {offset}: "
        f"{problem_of_text(batch.slice(row, 1)) or 'its text is not valid UTF-8'}: "
        f"let readers skip it: seek to offset {offset + 1}",
        offset=offset,
    )


def event_sizes(table: pa.Table | pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Returns the size of each event in stored columns, as ``check_event`` counts it."""
    fields = _field_lengths(table, limits.HEADERS_MAX + limits.OWN_HEADERS_MAX)
    found: npt.NDArray[np.int64] = sum(fields, value_lengths(table.column("value")))
    return found


def bytes_without_value(row: pa.RecordBatch) -> int:
    """Returns the size of an event in stored columns without its value."""
    most = limits.HEADERS_MAX + limits.OWN_HEADERS_MAX
    return sum(int(each[0]) for each in _field_lengths(row, most))


def has_additions(row: pa.RecordBatch) -> bool:
    """Returns whether an event in stored columns has headers of Tidelog, as a dead letter has."""
    headers = row.column("headers")[0].as_py() or ()
    return any(header["name"].startswith(OWN_HEADERS) for header in headers)


def check_times(column: pa.Array | pa.ChunkedArray) -> None:
    """Raises ``InvalidError`` for times outside of the years 1970 to 9999."""
    if len(column) == 0:
        return
    bounds = pc.min_max(column.cast(pa.int64())).as_py()
    if bounds["min"] < 0 or bounds["max"] >= limits.TIMESTAMP_MS_END:
        wrong = bounds["min"] if bounds["min"] < 0 else bounds["max"]
        raise InvalidError(
            f"table: timestamp {wrong} is outside of the years 1970 to 9999: give milliseconds UTC"
        )


def stored_batch(table: pa.Table | pa.RecordBatch, now_ms: int) -> pa.Table:
    """Returns a user's table in stored columns: missing ones are null, times default to now.

    Raises ``InvalidError`` for unknown columns, wrong types and times out of range.
    """
    stored = stored_columns(table, now_ms)
    check_times(stored.column("timestamp"))
    return stored


def stored_columns(table: pa.Table | pa.RecordBatch, now_ms: int) -> pa.Table:
    """Returns the same for sources, without checking rows, so that a bad one does not stop others.

    Times may be out of range, and text need not be UTF-8: the sink checks each row. Raises
    ``InvalidError`` for unknown columns, wrong types, and values that no column can hold.
    """
    known = set(STORED_SCHEMA.names) | {"topic", "partition", "offset"}
    for name in table.schema.names:
        if table.schema.names.count(name) > 1:
            raise InvalidError(f"table: has more than one column `{name}`: leave one of them")
    unknown = [name for name in table.schema.names if name not in known]
    if unknown:
        raise InvalidError(
            f"table: unknown column `{unknown[0]}`: events have {', '.join(STORED_SCHEMA.names)}"
        )
    if "value" not in table.schema.names:
        raise InvalidError("table: has no column `value`: name the column of the payload so")
    columns = [_column(table, field, now_ms) for field in STORED_SCHEMA]
    return pa.table(columns, schema=STORED_SCHEMA)


def whole_ms(column: Any) -> Any:
    """Returns numbers, dates or times as an event's times: whole milliseconds UTC.

    Finer digits are cut off, toward the past, so no time moves to the next day. A time that is too
    far for milliseconds becomes the nearest one, which is outside of the allowed years too.
    """
    kind = column.type
    if pa.types.is_integer(kind):
        least = pc.min_element_wise(column, limits.OFFSET_END_MAX, skip_nulls=False)
        return (least if kind == pa.uint64() else column).cast(pa.int64()).cast(_TIME)
    if pa.types.is_date32(kind):
        return pc.multiply(column.cast(pa.int32()).cast(pa.int64()), _DAY_MS).cast(_TIME)
    if not pa.types.is_timestamp(kind) or kind.unit == "ms":
        return column.cast(_TIME)
    number = column.cast(pa.int64())
    if kind.unit == "s":
        low = pc.max_element_wise(number, -limits.TIMESTAMP_MS_END, skip_nulls=False)
        near = pc.min_element_wise(low, limits.TIMESTAMP_MS_END, skip_nulls=False)
        return pc.multiply(near, 1000).cast(_TIME)
    parts = {"us": 1000, "ns": 1_000_000}[kind.unit]
    cut = pc.divide(number, parts)  # toward 1970
    earlier = pc.less(number, pc.multiply(cut, parts)).cast(pa.int64())
    return pc.subtract(cut, earlier).cast(_TIME)


def with_position(
    batch: pa.RecordBatch, topic: str, partition: int, offsets: int | npt.NDArray[np.int64]
) -> pa.RecordBatch:
    """Returns the batch in event columns; ``offsets`` are its offsets, or the first one."""
    rows = batch.num_rows
    if isinstance(offsets, int):
        offsets = np.arange(offsets, offsets + rows, dtype=np.int64)
    front = [
        repeated_text(topic, rows),
        number_array(np.full(rows, partition, np.int32)),
        number_array(offsets),
    ]
    return pa.record_batch([*front, *batch.columns], schema=EVENT_SCHEMA)


def events_of(
    batch: pa.RecordBatch, topic: str, partition: int, offsets: int | npt.NDArray[np.int64]
) -> Iterator[Event]:
    """Yields the events of a stored batch; ``offsets`` are their offsets, or the first one.

    Raises ``CorruptError`` for text that is not UTF-8, with its partition and offset.
    """
    try:
        return _events(batch, topic, partition, offsets)
    except UnicodeDecodeError as exc:
        raise bad_text(with_position(batch, topic, partition, offsets)) from exc


def _events(
    batch: pa.RecordBatch, topic: str, partition: int, offsets: int | npt.NDArray[np.int64]
) -> Iterator[Event]:
    columns = {name: batch.column(name) for name in batch.schema.names}
    headers: Iterable[Any] = repeat(())
    if columns["headers"].null_count < batch.num_rows:
        headers = map(_headers, columns["headers"].to_pylist())
    return map(
        Event,
        columns["value"].to_pylist(),
        _values(columns["key"]),
        _values(columns["id"]),
        numbers_of(columns["timestamp"].cast(pa.int64())).tolist(),
        _values(columns["type"]),
        headers,
        repeat(topic),
        repeat(partition),
        count(offsets) if isinstance(offsets, int) else offsets.tolist(),
    )


def batch_bytes(batch: pa.RecordBatch | pa.Table) -> int:
    """Returns how many bytes a batch refers to, which is its size before compression."""
    return int(batch.nbytes)


def one_batch(
    batches: Iterable[pa.RecordBatch] | pa.Table, schema: pa.Schema | None = None
) -> pa.RecordBatch:
    """Returns all rows as one batch; ``schema`` is that of an empty result.

    Raises ``InternalError`` if they do not fit into one batch: an Arrow array of bytes holds less
    than 2 GiB, and ``combine_chunks`` then leaves several chunks. Callers limit what they join, see
    :func:`joined_batches`.
    """
    if not isinstance(batches, pa.Table):
        given = list(batches)
        if len(given) == 1:
            return given[0]
        batches = pa.Table.from_batches(given, schema)
    found = batches.combine_chunks().to_batches()
    if not found:
        return pa.RecordBatch.from_pylist([], schema=batches.schema)
    if len(found) > 1:
        raise InternalError(
            f"{batches.num_rows} rows of {batch_bytes(batches)} bytes do not fit into one batch"
        )
    return found[0]


def joined_batches(
    batches: Iterable[pa.RecordBatch], rows: int, size: int
) -> Iterator[pa.RecordBatch]:
    """Yields all rows in batches of at least ``rows`` rows or ``size`` bytes, except the last.

    No batch gets too large for Arrow. Empty batches are left out.
    """
    waiting: list[pa.RecordBatch] = []
    waiting_rows = waiting_bytes = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        given = batch_bytes(batch)
        if waiting and waiting_bytes + given > limits.BATCH_BYTES_MAX:
            yield one_batch(waiting)
            waiting, waiting_rows, waiting_bytes = [], 0, 0
        waiting.append(batch)
        waiting_rows += batch.num_rows
        waiting_bytes += given
        if waiting_rows >= rows or waiting_bytes >= size:
            yield one_batch(waiting)
            waiting, waiting_rows, waiting_bytes = [], 0, 0
    if waiting:
        yield one_batch(waiting)


def _field_lengths(
    table: pa.Table | pa.RecordBatch, headers_max: int
) -> list[npt.NDArray[np.int64]]:
    """Returns the sizes of each event's key, id, type and headers."""
    lengths = [value_lengths(table.column(name)) for name in ("key", "id", "type")]
    headers = table.column("headers")
    if headers.null_count == len(headers):
        return lengths
    return [*lengths, _header_lengths(headers, headers_max)]


def value_lengths(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Returns the length of each value in bytes; 0 for a null."""
    found = pc.binary_length(column)
    if found.null_count:
        found = pc.fill_null(found, 0)
    if isinstance(found, pa.ChunkedArray):
        found = found.combine_chunks()
    return numbers_of(found).astype(np.int64)


def _header_lengths(column: pa.Array | pa.ChunkedArray, headers_max: int) -> npt.NDArray[np.int64]:
    """Returns the size of each event's headers. Raises ``InvalidError`` for a missing name."""
    counts = np.asarray(pc.fill_null(pc.list_value_length(column), 0), np.int64)
    check_header_count(int(counts.max()), headers_max)
    rows = np.repeat(np.arange(len(column)), counts)
    pairs = pc.list_flatten(column)
    names = pc.struct_field(pairs, "name")
    if pairs.null_count or names.null_count:
        raise InvalidError("event: has a header without a name: give pairs of a name and bytes")
    total = counts * limits.HEADER_OVERHEAD_BYTES
    for values in (names, pc.struct_field(pairs, "value")):
        np.add.at(total, rows, value_lengths(values))
    return total


def _plain(name: str, values: list[Any], kind: type) -> list[Any]:
    """Returns values of a column as one plain type. Raises ``InvalidError`` for other types.

    Converts subtypes of text or bytes, such as members of a ``StrEnum`` and NumPy's.
    """
    others = set(map(type, values)) - {kind, type(None)}
    for other in others:
        if not issubclass(other, kind):
            raise wrong_type(name, other, kind)
    if not others:
        return values
    plain: Callable[[Any], Any] = bytes if kind is bytes else str.__str__  # not an enum's own
    return [value if value is None else plain(value) for value in values]


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if kind == _TIME:
        times = np.fromiter(values, np.int64, len(values))
        return pa.Array.from_buffers(_TIME, len(times), [None, pa.py_buffer(times)])
    if kind == pa.binary():
        return _binary_array(values)
    if kind == _HEADERS:
        if not any(values):
            return pa.nulls(len(values), kind)
        listed = [
            [{"name": name, "value": value} for name, value in each] if each else None
            for each in values
        ]
        return pa.array(listed, kind)
    return pa.array(values, kind)


def _binary_array(values: Sequence[Any]) -> pa.Array:
    """Returns an array, joined at once if no value is missing."""
    return pa.array(values, pa.binary()) if None in values else bytes_array(values)


def _values(column: pa.Array) -> Iterable[Any]:
    return repeat(None) if column.null_count == len(column) else column.to_pylist()


def _headers(value: list[dict[str, Any]] | None) -> Headers:
    return tuple((each["name"], each["value"]) for each in value) if value else ()


def _column(table: pa.Table | pa.RecordBatch, field: pa.Field, now_ms: int) -> Any:
    if field.name not in table.schema.names:
        if field.name == "timestamp":
            return pa.array(np.full(table.num_rows, now_ms, np.int64)).cast(_TIME)
        return pa.nulls(table.num_rows, field.type)
    column = table.column(field.name)
    try:
        if field.name == "timestamp":
            column = whole_ms(_zoned(column))
            return pc.fill_null(column, pa.scalar(now_ms, pa.int64()).cast(_TIME))
        return column if column.type == field.type else _cast(column, field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as exc:
        raise InvalidError(
            f"table: column `{field.name}` is {column.type}: give {field.type}"
        ) from exc


def _cast(column: Any, kind: pa.DataType) -> Any:
    """Returns a column as another type; bytes that become text are checked later, row by row."""
    return column.cast(options=pc.CastOptions(target_type=kind, allow_invalid_utf8=True))


def _zoned(column: Any) -> Any:
    """Raises for a timestamp column without a zone, which would be ambiguous."""
    if pa.types.is_timestamp(column.type) and column.type.tz is None:
        raise InvalidError("table: column `timestamp` has no time zone: give UTC times")
    return column


_MODULUS = 1 << 64


class Contents(Persisted, frozen=True):
    """How many events there are, and the sum of their hashes."""

    events: int = 0
    digest: str = ""  # hexadecimal
    by: str = ""  # what computed it

    def plus(self, other: Contents) -> Contents:
        """Returns the contents of both."""
        total = (int(self.digest or "0", 16) + int(other.digest or "0", 16)) % _MODULUS
        return Contents(self.events + other.events, f"{total:016x}", self.by or other.by)

    def differs(self, other: Contents) -> bool:
        """Returns whether these are certainly other events."""
        if self.events != other.events:
            return True
        return self.by == other.by and self.digest != other.digest


def contents_of(table: pa.Table) -> Contents:
    """Returns the contents of the events in a table, over all of its columns."""
    import duckdb  # noqa: PLC0415 - Spark's workers that only read do without it

    columns = ", ".join(f'"{name}"' for name in sorted(table.schema.names))
    connection = _database().cursor()
    connection.register("events_of_batch", table)
    query = f"SELECT sum(hash({columns}))::VARCHAR FROM events_of_batch"  # noqa: S608 - our own names
    try:
        (total,) = connection.execute(query).fetchall()[0]
    finally:
        connection.close()
    found = Contents(table.num_rows, by=f"duckdb {duckdb.__version__}")
    return msgspec.structs.replace(found, digest=f"{int(total or 0) % _MODULUS:016x}")


@functools.cache
def _database() -> duckdb.DuckDBPyConnection:
    """Returns one connection for each process; a task has one core."""
    import duckdb  # noqa: PLC0415 - the same

    return duckdb.connect(":memory:", config={"threads": 1})
