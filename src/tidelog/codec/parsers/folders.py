"""Folders of an archive: by the times that a parser finds, by offset, and by a field's value.

Times become one name for each distinct day, hour or minute of a batch, so that rows cost no Python.
:func:`decoded_times` is for values that must be decoded one by one. A decoder gets a value's bytes
and returns the field as text, which is an epoch if it is a number, otherwise ISO 8601. For a bad
value it raises ``InvalidError``, whose message is the row's error text.

A tombstone has a time and an offset too, so ``timestamp`` and ``offset`` make no dead letter of it.
:class:`SplitParser` makes folders by the value of a JSON field first, and inside them as another
parser does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.parsers.base import (
    FieldTimes,
    FolderPaths,
    FolderSettings,
    ParsedValues,
    Parser,
    Spec,
    TimeParser,
    escaped,
    paths_of,
    shown,
)
from tidelog.codec.parsers.json import JsonField
from tidelog.codec.parsers.times import NULL_VALUE, Engine, moment_reader
from tidelog.errors import InvalidError
from tidelog.model.limits import FOLDER_PATH_BYTES_MAX, TIMESTAMP_MS_END

__all__ = [
    "DatedParser",
    "Decode",
    "OffsetParser",
    "SplitParser",
    "TimestampTimes",
    "decoded_times",
    "field_text",
    "open_offset",
    "open_timestamp",
    "time_text",
]

_BUCKET_MAX = 1 << 62
_HOUR_MS = 3_600_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_OFFSET_MS = TIMESTAMP_MS_END - 48 * _HOUR_MS  # no datetime near its end in any zone


class DatedParser:
    """Folders from the times that a time parser finds."""

    def __init__(self, parser: TimeParser, settings: FolderSettings) -> None:
        self._parser = parser
        self._format = settings.path_format
        self._unit_ms = settings.unit_ms
        self._zone = None if settings.time_zone == "UTC" else ZoneInfo(settings.time_zone)

    def lay_out(self, batch: pa.RecordBatch) -> FolderPaths:
        found = self._parser.times(batch)
        local = self._local_ms(found.values.fill_null(0).to_numpy())
        outside = pc.or_(
            pc.or_(pc.less(found.values, 0), pc.greater_equal(found.values, TIMESTAMP_MS_END)),
            pa.array(local >= TIMESTAMP_MS_END),
        )
        found = found.reject(
            outside, "time is outside of the years 1970 to 9999", found.values.cast(pa.string())
        )
        units = pc.if_else(pc.is_valid(found.values), pa.array(local // self._unit_ms), None)
        encoded = units.dictionary_encode()
        names = [self._name(unit) for unit in encoded.dictionary.to_pylist()]
        return FolderPaths(paths_of(encoded.indices, names), found.errors, found.values)

    def _name(self, unit: int) -> str:
        return (_EPOCH + timedelta(milliseconds=unit * self._unit_ms)).strftime(self._format)

    def _local_ms(self, times_ms: Any) -> Any:
        """Returns what the zone's clocks show, as if it were UTC."""
        if self._zone is None:
            return times_ms
        inside = np.clip(times_ms, 0, TIMESTAMP_MS_END - 1)  # the caller refuses others
        hours, of_row = np.unique(inside // _HOUR_MS, return_inverse=True)
        before = np.array([_offset_ms(self._zone, hour * _HOUR_MS) for hour in hours.tolist()])
        after = np.array([_offset_ms(self._zone, (hour + 1) * _HOUR_MS) for hour in hours.tolist()])
        shift = before.astype(np.int64)[of_row] if len(hours) else inside
        for index in np.flatnonzero(before != after).tolist():
            change_ms = _change_ms(self._zone, int(hours[index]) * _HOUR_MS)
            shift[(of_row == index) & (inside >= change_ms)] = after[index]
        return times_ms + shift


def _offset_ms(zone: ZoneInfo, time_ms: int) -> int:
    moment = _EPOCH + timedelta(milliseconds=min(time_ms, _LAST_OFFSET_MS))
    offset = moment.astimezone(zone).utcoffset()
    return 0 if offset is None else offset // timedelta(milliseconds=1)


def _change_ms(zone: ZoneInfo, start_ms: int) -> int:
    """Returns when a zone's clocks change within the hour from ``start_ms`` on."""
    old, low, high = _offset_ms(zone, start_ms), start_ms, start_ms + _HOUR_MS
    while high - low > 1:
        middle = (low + high) // 2
        if _offset_ms(zone, middle) == old:
            low = middle
        else:
            high = middle
    return high


Decode = Callable[[bytes], str]


def decoded_times(decode: Decode, what: str) -> TimeParser:
    """Returns a time parser that decodes each value."""
    return FieldTimes(_Picker(decode).pick, moment_reader(what, Engine()))


@dataclass(frozen=True, slots=True)
class _Picker:
    decode: Decode

    def pick(self, batch: pa.RecordBatch) -> ParsedValues:
        decode = self.decode
        texts: list[str | None] = []
        errors: list[str | None] = []
        for value in batch.column("value").to_pylist():
            text = error = None
            if value is None:
                error = NULL_VALUE
            else:
                try:
                    text = decode(value)
                except InvalidError as exc:
                    error = exc.message
            texts.append(text)
            errors.append(error)
        return ParsedValues(pa.array(texts, pa.string()), pa.array(errors, pa.string()))


def field_text(record: Any, path: tuple[str, ...], what: str) -> str:
    """Returns the text of a field inside maps inside a map."""
    for name in path:
        if not isinstance(record, dict) or name not in record:
            raise InvalidError(f"{what} is missing or null")
        record = record[name]
    return time_text(record, what)


def time_text(value: Any, what: str) -> str:
    """Returns a decoded value as the text of a time. Raises ``InvalidError``."""
    kind = type(value)
    if kind is int:
        if -(10**30) < value < 10**30:  # Python refuses to print very long ones
            return str(value)
        raise InvalidError(f"time is outside of the years 1970 to 9999: {what}")
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise InvalidError(f"{what} is not valid Unicode") from exc
        return str(value)
    if kind is float:
        return repr(value)
    if isinstance(value, date | datetime):
        return value.isoformat()
    if value is None:
        raise InvalidError(f"{what} is missing or null")
    raise InvalidError(f"{what} is {shown(kind.__name__)}, not a time")


class TimestampTimes:
    """The event's own time."""

    def times(self, batch: pa.RecordBatch) -> ParsedValues:
        times = batch.column("timestamp").cast(pa.int64())
        found = ParsedValues(times, pa.nulls(len(times), pa.string()))
        return found.reject(times.is_null(), "event has no time")


class OffsetParser:
    """Folders of a fixed number of offsets: ``offset=30000`` has those from 30000 on."""

    def __init__(self, bucket: int) -> None:
        self._bucket = bucket

    def lay_out(self, batch: pa.RecordBatch) -> FolderPaths:
        offsets = batch.column("offset").to_numpy()
        encoded = pa.array(offsets // self._bucket, pa.int64()).dictionary_encode()
        names = [f"offset={each * self._bucket}" for each in encoded.dictionary.to_pylist()]
        rows = batch.num_rows
        paths = paths_of(encoded.indices, names)
        return FolderPaths(paths, pa.nulls(rows, pa.string()), pa.nulls(rows, pa.int64()))


def open_timestamp(spec: Spec) -> TimeParser:
    """Opens ``timestamp``, which takes no argument."""
    if spec.argument:
        raise spec.refused("it has no argument: give timestamp alone")
    return TimestampTimes()


def open_offset(spec: Spec) -> Parser:
    """Opens ``offset:10000``: ten thousand offsets to a folder."""
    problem = "no number of offsets: give one such as offset:10000"
    return OffsetParser(spec.number(spec.argument, _BUCKET_MAX, problem))


class SplitParser:
    """Makes the path ``{value of the field}/{the inner parser's path}``.

    A missing, null or empty value is a dead letter, and so is an object or an array.
    """

    def __init__(self, field: JsonField, inner: Parser) -> None:
        self._field = field
        self._inner = inner
        self.changes_values = bool(getattr(inner, "changes_values", False))

    def lay_out(self, batch: pa.RecordBatch) -> FolderPaths:
        names = self._names(batch)
        inner = self._inner.lay_out(batch)
        paths = pc.binary_join_element_wise(names.values, inner.paths.dictionary_decode(), "/")
        found = ParsedValues(paths, pc.coalesce(names.errors, inner.errors))
        long = pc.greater(pc.binary_length(paths), FOLDER_PATH_BYTES_MAX)
        found = found.reject(long, f"its path has more than {FOLDER_PATH_BYTES_MAX} bytes")
        times = pc.if_else(pc.is_null(found.errors), inner.times, None)
        return FolderPaths(found.values.dictionary_encode(), found.errors, times, inner.values)

    def _names(self, batch: pa.RecordBatch) -> ParsedValues:
        found = self._field.pick(batch)
        found = found.reject(pc.equal(found.values, ""), f"{self._field.what} is empty")
        opens = pc.match_substring_regex(found.values, pattern=r"^[\[{]")
        if pc.any(opens, min_count=0).as_py():  # or a string that only looks like one
            nested = self._field.nested(batch)
            found = found.reject(nested, f"{self._field.what} is an object or an array")
        encoded = found.values.dictionary_encode()
        distinct = pa.array(map(escaped, encoded.dictionary.to_pylist()), pa.string())
        return ParsedValues(distinct.take(encoded.indices), found.errors)


_: type[Parser] = DatedParser
_times: type[TimeParser] = TimestampTimes
_offsets: type[Parser] = OffsetParser
_split: type[Parser] = SplitParser
