"""Parsers of an event's time and offset, whatever its value, and folders by a field's value.

A tombstone has a time and an offset too, so it is not a dead letter here. :class:`SplitParser`
makes folders by the value of a JSON field first, and inside them as another parser does.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.parsers.base import (
    Layout,
    ParsedValues,
    Parser,
    Spec,
    TimeParser,
    escaped,
    paths_of,
)
from tidelog.codec.parsers.json import JsonField
from tidelog.model.limits import FOLDER_PATH_BYTES_MAX

__all__ = [
    "OffsetParser",
    "SplitParser",
    "TimestampTimes",
    "open_offset",
    "open_timestamp",
]

_BUCKET_MAX = 1 << 62


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

    def lay_out(self, batch: pa.RecordBatch) -> Layout:
        offsets = batch.column("offset").to_numpy()
        encoded = pa.array(offsets // self._bucket, pa.int64()).dictionary_encode()
        names = [f"offset={each * self._bucket}" for each in encoded.dictionary.to_pylist()]
        rows = batch.num_rows
        paths = paths_of(encoded.indices, names)
        return Layout(paths, pa.nulls(rows, pa.string()), pa.nulls(rows, pa.int64()))


def open_timestamp(spec: Spec) -> TimeParser:
    """Opens ``timestamp``, which takes no argument."""
    if spec.argument:
        raise spec.refused("it has no argument: give timestamp alone")
    return TimestampTimes()


def open_offset(spec: Spec) -> Parser:
    """Opens ``offset:10000``: ten thousand offsets to a folder."""
    problem = "no number of offsets: give one such as offset:10000"
    return OffsetParser(spec.number(spec.argument, _BUCKET_MAX, problem))


_: type[TimeParser] = TimestampTimes
__: type[Parser] = OffsetParser


class SplitParser:
    """Makes the path ``{value of the field}/{the inner parser's path}``.

    A missing, null or empty value is a dead letter, and so is an object or an array.
    """

    def __init__(self, field: JsonField, inner: Parser) -> None:
        self._field = field
        self._inner = inner

    def lay_out(self, batch: pa.RecordBatch) -> Layout:
        names = self._names(batch)
        inner = self._inner.lay_out(batch)
        paths = pc.binary_join_element_wise(names.values, inner.paths.dictionary_decode(), "/")
        found = ParsedValues(paths, pc.coalesce(names.errors, inner.errors))
        long = pc.greater(pc.binary_length(paths), FOLDER_PATH_BYTES_MAX)
        found = found.reject(long, f"its path has more than {FOLDER_PATH_BYTES_MAX} bytes")
        times = pc.if_else(pc.is_null(found.errors), inner.times, None)
        return Layout(found.values.dictionary_encode(), found.errors, times)

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


___: type[Parser] = SplitParser
