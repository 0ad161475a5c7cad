"""Events as JSON, both ways: ``consume --json`` prints it, ``produce --format events`` reads it.

One event is one object on one line::

    {"topic": "orders", "partition": 0, "offset": 41, "timestamp": "2026-11-15T10:00:00.000Z",
     "id": null, "key": "customer-7", "value": "...", "type": null, "headers": [["name", "value"]]}

Bytes (key, value, and the values of headers) are text if they are valid UTF-8, and otherwise
``{"base64": "..."}``. A value that is read may also be any other JSON, such as ``{"amount": 12}``,
and is kept as it is written. A value of null is a tombstone. Only ``value`` is required when read
back; ``timestamp`` may also be whole milliseconds, and the position is ignored, whatever it is. If
a name is given more than once, the last one counts. A dead letter also has its ``error``. Rows of
any other columns become objects with the same bytes and times (:func:`plain_rows`).

It also reads lists of ids, one per line, for commands and forms that erase. Any text is a valid id,
even with line breaks, so a list of plain lines cannot contain every id. A line is the id itself,
or, if it begins with ``"``, a JSON string. Nothing is stripped or folded: a space belongs to its
id. What is ambiguous is refused: a line that ends with a carriage return (part of the id, or a file
with CRLF line ends?), and a list that begins with a byte order mark.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pyarrow as pa

from tidelog.codec.event_batch import EVENT_SCHEMA, bad_text
from tidelog.errors import InvalidError
from tidelog.model.decoding import check_json_depth, json_items
from tidelog.model.event import (
    Event,
    check_event_bytes,
    check_header_count,
    from_iso,
    to_iso,
)

__all__ = [
    "batch_lines",
    "batch_of_lines",
    "event_lines",
    "event_of_line",
    "id_line",
    "ids_of_lines",
    "is_event_line",
    "json_problem",
    "plain_rows",
    "row_lines",
    "text_of_line",
]


class _Base64(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    base64: bytes


_Text = str | _Base64


class _PrintedEvent(msgspec.Struct, gc=False):
    topic: str | None
    partition: int | None
    offset: int | None
    timestamp: str
    id: str | None
    key: _Text | None
    value: _Text | None
    type: str | None
    headers: list[tuple[str, _Text | None]]


class _BuriedValue(_PrintedEvent, gc=False):
    error: str


class _StoredEvent(_PrintedEvent, gc=False):
    """A line of a file, which has its event's position."""

    topic: str
    partition: int
    offset: int


class _EventLine(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    value: _Text | None
    key: _Text | None = None
    id: str | None = None
    timestamp: str | int | float | None = None
    type: str | None = None
    headers: list[tuple[str, _Text | None]] | None = None
    topic: Any = None
    partition: Any = None
    offset: Any = None


class _JsonValueLine(_EventLine, forbid_unknown_fields=True, gc=False):
    """The same, with any JSON as its value."""

    value: msgspec.Raw  # type: ignore[assignment]


_NULL = msgspec.Raw(b"null")


class _RawLine(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The fields of a line, none of them parsed. Of several with one name, it has the last."""

    value: msgspec.Raw
    key: msgspec.Raw = _NULL
    id: msgspec.Raw = _NULL
    timestamp: msgspec.Raw = _NULL
    type: msgspec.Raw = _NULL
    headers: msgspec.Raw = _NULL
    topic: msgspec.Raw = _NULL
    partition: msgspec.Raw = _NULL
    offset: msgspec.Raw = _NULL


_LONG_BYTES = 65_536  # from which a line is parsed field by field
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_encoder = msgspec.json.Encoder()
_stored = msgspec.json.Decoder(_StoredEvent)
_given = msgspec.json.Decoder(_EventLine)
_given_any = msgspec.json.Decoder(_JsonValueLine)
_given_raw = msgspec.json.Decoder(_RawLine)
_of_text = msgspec.json.Decoder(_Text | None)
_any = msgspec.json.Decoder()
_EXPECTED = {  # what errors say about fields of another type
    "key": 'text, or {"base64": …}',
    "id": "text",
    "timestamp": "ISO 8601, or milliseconds since 1970",
    "type": "text",
    "headers": "a list of [name, value]",
}


def event_lines(events: Iterable[Event]) -> bytes:
    """Returns each event as a JSON object on its own line."""
    return _encode_lines(map(_to_line, events))


def batch_lines(batch: pa.RecordBatch) -> bytes:
    """Returns the same for a batch in event columns, with or without ``error``.

    Raises ``CorruptError`` for text that is not UTF-8.
    """
    try:
        return _batch_lines(batch)
    except UnicodeDecodeError as exc:
        raise bad_text(batch) from exc


def _batch_lines(batch: pa.RecordBatch) -> bytes:
    columns = [batch.column(name) for name in EVENT_SCHEMA.names]
    cells: list[Iterable[Any]] = [column.to_pylist() for column in columns[:3]]
    cells += [map(_iso, columns[3].cast(pa.int64()).to_pylist()), columns[4].to_pylist()]
    cells += [map(_text_of, column.to_pylist()) for column in columns[5:7]]
    cells += [columns[7].to_pylist(), map(_pairs, columns[8].to_pylist())]
    if "error" not in batch.schema.names:
        return _encode_lines(map(_PrintedEvent, *cells))
    return _encode_lines(map(_BuriedValue, *cells, batch.column("error").to_pylist()))


def _encode_lines(values: Iterable[object]) -> bytes:
    """Returns JSON lines, of a list: msgspec never frees an iterator, nor what that holds."""
    return _encoder.encode_lines(list(values))


def row_lines(batch: pa.RecordBatch) -> bytes:
    """Returns rows of any columns, a JSON object for each; events as events."""
    names = set(batch.schema.names) - {"error"}
    time = EVENT_SCHEMA.field("timestamp").type
    if names == set(EVENT_SCHEMA.names) and batch.schema.field("timestamp").type == time:
        return batch_lines(batch)
    return _encode_lines(map(_plain, plain_rows(batch, _time_text)))


def event_of_line(line: bytes, bytes_max: int | None = None) -> Event:
    """Returns the event of a line, without its position. Raises ``InvalidError``.

    A long line is parsed field by field. So no single call takes long, and neither headers beyond
    their number nor a JSON value beyond ``bytes_max`` take memory. Others check the event's size.
    A short line is parsed at once, which is faster, and only if that fails field by field: lines
    of both kinds are accepted by the same rules.
    """
    check_json_depth(line)
    if len(line) > _LONG_BYTES:
        given, value = _fields_by_name(line, bytes_max)
    else:
        given, value = _fields_of_short(line)
    time = given.timestamp
    if isinstance(time, float):  # JSON has one kind of number: 5.0 is a whole one
        if not time.is_integer():
            raise InvalidError(f"timestamp {time}: give whole milliseconds, or ISO 8601")
        time = int(time)
    return Event(
        value=value,
        key=_bytes_of(given.key),
        id=given.id,
        timestamp=from_iso(time) if isinstance(time, str) else time,
        type=given.type,
        headers=tuple((name, _bytes_of(value)) for name, value in given.headers or ()),
    )


def _fields_by_name(line: bytes, bytes_max: int | None = None) -> tuple[_EventLine, bytes | None]:
    """Returns the fields of a line, each parsed by itself, and its value."""
    try:
        raw = _raw_of(line)
        given = _typed(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise InvalidError(f"is not an event as JSON: {_event_problem(line, exc)}") from exc
    text = bytes(raw.value).strip()
    value: bytes | None
    try:
        return given, _bytes_of(_of_text.decode(text))
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        if bytes_max is not None:
            check_event_bytes(len(text), bytes_max)
        try:
            value = _json_value(text)
        except (msgspec.MsgspecError, UnicodeDecodeError) as other:
            raise InvalidError(f"is not an event as JSON: {other}") from other
        if value is None:
            raise InvalidError(f"is not an event as JSON: {exc}") from exc
    return given, value


def _raw_of(line: bytes) -> _RawLine:
    """Returns the fields of a line as they are written. Raises ``msgspec``'s errors."""
    _check_text(line)
    return _given_raw.decode(line)


def _check_text(line: bytes) -> None:
    """Raises ``UnicodeDecodeError``: ``msgspec`` checks only the strings that it parses."""
    bytes(line).decode()


def _typed(raw: _RawLine) -> _EventLine:
    """Returns all fields except value and position. Raises ``msgspec``'s, and ``InvalidError``."""
    headers = bytes(raw.headers)
    if headers.startswith(b"["):
        check_header_count(json_items(headers))
    names = ("key", "id", "timestamp", "type", "headers")
    rest = b",".join(b'"%s":%s' % (name.encode(), bytes(getattr(raw, name))) for name in names)
    return _given.decode(b'{"value":null,%s}' % rest)


def _fields_of_short(line: bytes) -> tuple[_EventLine, bytes | None]:
    """Returns the fields of a line, and its value."""
    error: Exception
    try:
        given = _given.decode(line)
        return given, _bytes_of(given.value)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        error = exc
    try:
        _check_text(line)
        given = _given_any.decode(line)
        value = _json_value(bytes(given.value).strip())
        if value is not None:
            return given, value
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:  # another field is wrong
        error = exc
    try:  # what is wrong may be a field that does not count
        return _fields_by_name(line)
    except InvalidError:
        raise InvalidError(f"is not an event as JSON: {_event_problem(line, error)}") from error


def is_event_line(line: bytes) -> bool:
    """Returns whether a text has the form of an event as JSON: a value, and no unknown field."""
    try:
        _typed(_raw_of(line))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidError):
        return False
    return True


def _json_value(text: bytes) -> bytes | None:
    """Returns a value that is JSON, byte for byte; None for text and for what should be base64."""
    found = _any.decode(text)  # raises for half of a surrogate pair, which no reader could decode
    if found is None or isinstance(found, str):
        return None
    return None if isinstance(found, dict) and found.keys() == {"base64"} else text


def json_problem(line: bytes, error: Exception) -> str:
    """Returns why a text is refused; msgspec reports half of a surrogate pair as other errors."""
    if len(line) > _LONG_BYTES:
        return str(error)  # another parser would take long, and much memory
    try:
        json.dumps(json.loads(bytes(line)), ensure_ascii=False).encode()  # it may be msgspec.Raw
    except UnicodeEncodeError:
        return "a lone surrogate is not valid Unicode: give text"
    except (ValueError, RecursionError):
        pass
    return str(error)


def _event_problem(line: bytes, error: Exception) -> str:
    """Returns why a line is not an event, and what to give instead."""
    text = json_problem(line, error)
    if ": give " in text:
        return text
    for field, hint in _EXPECTED.items():
        if f"`$.{field}" in text:
            return f"{text}: give {hint}"
    return f'{text}: give {{"value": …}}, with key, id, timestamp, type or headers beside it'


def batch_of_lines(data: bytes) -> pa.RecordBatch:
    """Returns the events of whole lines, with positions. Raises ``msgspec``'s errors."""
    lines = _stored.decode_lines(data)
    columns: dict[str, list[Any]] = {
        name: [getattr(line, name) for line in lines] for name in EVENT_SCHEMA.names
    }
    columns["timestamp"] = list(map(from_iso, columns["timestamp"]))
    for name in ("key", "value"):
        columns[name] = list(map(_bytes_of, columns[name]))
    columns["headers"] = [
        [{"name": name, "value": _bytes_of(value)} for name, value in each] or None
        for each in columns["headers"]
    ]
    arrays = [pa.array(columns[field.name], field.type) for field in EVENT_SCHEMA]
    return pa.record_batch(arrays, schema=EVENT_SCHEMA)


def _to_line(event: Event) -> _PrintedEvent:
    return _PrintedEvent(
        event.topic,
        event.partition,
        event.offset,
        _iso(event.timestamp),
        event.id,
        _text_of(event.key),
        _text_of(event.value),
        event.type,
        [(name, _text_of(value)) for name, value in event.headers],
    )


def _pairs(headers: list[dict[str, Any]] | None) -> list[tuple[str, _Text | None]]:
    return [(each["name"], _text_of(each["value"])) for each in headers] if headers else []


def _plain(value: Any) -> Any:
    """Returns a value that JSON can represent, with bytes as in events."""
    if isinstance(value, bytes):
        return _text_of(value)
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _time_text(count: int, kind: pa.DataType) -> str | int:
    """Returns a time as in events, with its own precision; a number if it is off the calendar."""
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
    if pa.types.is_date32(kind):
        units, seconds, rest = 1, count * 86_400, 0
    else:
        units = 10**3 if pa.types.is_date64(kind) else per_second[kind.unit]
        seconds, rest = divmod(count, units)
    try:
        moment = _EPOCH + dt.timedelta(seconds=seconds)
    except OverflowError:
        return count
    if pa.types.is_date(kind):
        return moment.date().isoformat()
    digits = f"{rest * 10**9 // units:09}"
    while len(digits) > 3 and digits.endswith("000"):
        digits = digits[:-3]
    return f"{moment.date().isoformat()}T{moment:%H:%M:%S}.{digits}Z"


def _text_of(value: bytes | None) -> _Text | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return _Base64(value)


def _bytes_of(text: _Text | None) -> bytes | None:
    if isinstance(text, str):
        return text.encode()
    return None if text is None else text.base64


def _iso(time_ms: Any) -> str:
    seconds, rest_ms = divmod(int(time_ms), 1000)
    return f"{_second(seconds)}{rest_ms:03}Z"


@functools.lru_cache(maxsize=4096)
def _second(seconds: int) -> str:
    """Returns the part of a time that many events share."""
    return to_iso(seconds * 1000)[:-4]


_QUOTE = '"'
_BYTE_ORDER_MARK = "\ufeff"


def ids_of_lines(text: str, what: str) -> list[str]:
    """Returns the ids of lines that end with a newline; skips empty ones.

    If the first of several ends with a carriage return too, as Windows writes it, all lines may.
    Raises ``InvalidError`` for a line that could mean two ids, or is not a JSON string if it begins
    with a quote.
    """
    if text.startswith(_BYTE_ORDER_MARK):
        raise InvalidError(
            f"{what}: begins with a byte order mark: save it without one, or write an id that "
            'begins so as a JSON string, "\\ufeff..."'
        )
    ids = []
    lines = text.split("\n")
    end = "\r" if len(lines) > 1 and lines[0].endswith("\r") else ""
    for number, each in enumerate(lines, 1):
        line = each.removesuffix(end)
        if line.endswith("\r"):
            raise InvalidError(
                f"{what}: line {number} ends with a carriage return: save it with LF line ends, "
                'or write an id that ends so as a JSON string, "...\\r"'
            )
        if line:
            ids.append(text_of_line(line, f"{what}: line {number}"))
    return ids


def text_of_line(line: str, what: str) -> str:
    """Returns the id, or key, of a line. Raises ``InvalidError``."""
    if not line.startswith(_QUOTE):
        return line
    try:
        if not line.endswith(_QUOTE):  # refuses spaces after it, which JSON would allow
            raise ValueError("has no end")
        found = json.loads(line)
        found.encode()
    except ValueError as exc:
        raise InvalidError(
            f'{what} begins with `"` but is not a JSON string: write such an id or key as '
            'one, "\\"..."'
        ) from exc
    return str(found)


def id_line(text: str) -> str:
    """Returns the line for an id, or key: the id itself if pages and editors preserve it."""
    if text.isprintable() and not text.startswith(_QUOTE):
        return text
    return json.dumps(text)


TimeOf = Callable[[int, pa.DataType], Any]
"""Returns the value for a time, which is a count of its type's units since 1970."""


def plain_rows(batch: pa.RecordBatch, time_of: TimeOf) -> list[dict[str, Any]]:
    """Returns the rows of a batch; ``time_of`` converts dates and timestamps at any depth.

    ``to_pylist`` makes ``datetime`` objects, which end with the year 9999, and pandas objects for
    nanoseconds, so it fails on times that a column can hold. One such time must not stop the
    reading of the rest: read columns that a schema made, or that others wrote, by this function.
    """
    columns = [_values(column, time_of) for column in batch.columns]
    return [
        dict(zip(batch.schema.names, cells, strict=True)) for cells in zip(*columns, strict=True)
    ]


def _values(array: pa.Array, time_of: TimeOf) -> list[Any]:
    kind = _numeric(array.type)
    if kind == array.type:
        values: list[Any] = array.to_pylist()
        return values
    return [_convert_times(value, array.type, time_of) for value in array.cast(kind).to_pylist()]


def _numeric(kind: pa.DataType) -> pa.DataType:
    """Returns the same type with numbers for times, and without dictionaries."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_timestamp(kind) or pa.types.is_date64(kind):
        return pa.int64()
    if pa.types.is_date32(kind):
        return pa.int32()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_numeric(field.type)) for field in kind])
    if pa.types.is_map(kind):
        item = kind.item_field.with_type(_numeric(kind.item_type))
        return pa.map_(kind.key_field.with_type(_numeric(kind.key_type)), item)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        made = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return made(kind.value_field.with_type(_numeric(kind.value_type)))
    return kind


def _convert_times(value: Any, kind: pa.DataType, time_of: TimeOf) -> Any:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if value is None:
        return None
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return time_of(value, kind)
    if pa.types.is_struct(kind):
        return {
            field.name: _convert_times(value[field.name], field.type, time_of) for field in kind
        }
    if pa.types.is_map(kind):
        return [
            (
                _convert_times(key, kind.key_type, time_of),
                _convert_times(item, kind.item_type, time_of),
            )
            for key, item in value
        ]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_convert_times(item, kind.value_type, time_of) for item in value]
    return value
