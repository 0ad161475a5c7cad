"""Times in values that are lines of text: found by a pattern, or in the n-th field.

Bytes that are not UTF-8 count as U+FFFD, so that one bad character does not cost a line. What is
found is an epoch if it is a number, otherwise ISO 8601. :func:`texts_of` returns the values of any
events as text.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.parsers.base import FieldTimes, ParsedValues, Spec, TimeParser
from tidelog.codec.parsers.times import Engine, literal, moment_reader
from tidelog.errors import InvalidError

__all__ = [
    "NULL_VALUE",
    "open_delimited",
    "open_regex",
    "texts_of",
]

_FIELDS_MAX = 10_000
_BLANKS = " \t\r\n"  # around a field, and at the end of a line
_ESCAPES = {r"\t": "\t", r"\x01": "\x01"}  # the second is Hive's own separator


def open_regex(spec: Spec) -> TimeParser:
    """Opens ``regex:PATTERN``: the first group of the first match. RE2's syntax, linear time."""
    engine = Engine()
    pattern = literal(spec.argument)
    try:
        engine.check(f"regexp_extract(v, {pattern}, 1)")
    except InvalidError as exc:
        raise spec.refused(f"the pattern does not compile: {exc}") from exc
    try:
        engine.check(f"regexp_extract(v, {pattern}, ['first'])")
    except InvalidError as exc:
        raise spec.refused("the pattern has no group: put (…) around the time") from exc
    picker = _LinePicker(f"regexp_extract(v, {pattern}, 1)", "pattern finds no time", engine)
    return FieldTimes(picker.pick, moment_reader("what the pattern finds", engine))


def open_delimited(spec: Spec) -> TimeParser:
    r"""``delimited:3|,``: the third field between commas; ``\t`` is a tab. Quotes mean nothing."""
    number, bar, separator = spec.argument.partition("|")
    separator = _ESCAPES.get(separator, separator)
    wanted = spec.number(
        number, _FIELDS_MAX, f"no field: give 1 for the first, up to {_FIELDS_MAX}"
    )
    if not (bar and separator):
        raise spec.refused(
            "has no separator: give delimited:3|, for the third field between commas"
        )
    engine = Engine()
    field = f"field {wanted}"
    expression = f"trim(split_part(v, {literal(separator)}, {wanted}), {literal(_BLANKS)})"
    picker = _LinePicker(expression, f"{field} is missing or empty", engine)
    return FieldTimes(picker.pick, moment_reader(field, engine))


class _LinePicker:
    """Picks a text out of each line by an expression that returns nothing if there is none."""

    def __init__(self, expression: str, complaint: str, engine: Engine) -> None:
        self._expression = expression
        self._complaint = complaint
        self._engine = engine

    def pick(self, batch: pa.RecordBatch) -> ParsedValues:
        lines = texts_of(batch, repair=True)
        texts = self._engine.column(self._expression, lines.values)
        empty = pc.equal(pc.binary_length(texts), 0)
        return ParsedValues(texts, lines.errors).reject(empty, self._complaint, lines.values)


NULL_VALUE = "null value"  # the error text of a tombstone
_PIECE_ROWS = 1_024  # rows that are checked one by one around a bad one


def texts_of(batch: pa.RecordBatch, *, repair: bool) -> ParsedValues:
    """Returns every event's value as text.

    Bytes that are not UTF-8 are an error, or with ``repair`` become U+FFFD: a log line is still
    read when one of its names is not.
    """
    values = batch.column("value")
    try:
        texts = values.cast(pa.string())
    except pa.ArrowInvalid:
        texts = _piecewise(values, repair)
    found = ParsedValues(texts, pa.nulls(len(values), pa.string()))
    found = found.reject(pc.is_null(values), NULL_VALUE)
    return found.reject(pc.is_null(texts), "value is not UTF-8 text")


def _piecewise(values: pa.Array, repair: bool) -> pa.Array:
    """Casts piece by piece, since a cast fails for all rows when one is bad; null for bad rows."""
    pieces = []
    for start in range(0, len(values), _PIECE_ROWS):
        piece = values.slice(start, _PIECE_ROWS)
        try:
            pieces.append(piece.cast(pa.string()))
        except pa.ArrowInvalid:
            decoded = [_decoded(value, repair) for value in piece.to_pylist()]
            pieces.append(pa.array(decoded, pa.string()))
    return pa.concat_arrays(pieces)


def _decoded(value: bytes | None, repair: bool) -> str | None:
    if value is None:
        return None
    try:
        return value.decode(errors="replace" if repair else "strict")
    except UnicodeDecodeError:
        return None
