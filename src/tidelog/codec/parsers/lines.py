"""Times in values that are lines of text: found by a pattern, or in the n-th field.

Bytes that are not UTF-8 count as U+FFFD, so that one bad letter does not cost a line. What is found
is an epoch where it is a number, else ISO 8601.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.parsers.base import FieldTimes, Found, Spec, TimeParser
from tidelog.codec.parsers.engine import Engine, literal
from tidelog.codec.parsers.texts import texts_of
from tidelog.codec.parsers.times import moment_reader
from tidelog.errors import InvalidError

__all__ = ["open_delimited", "open_regex"]

_FIELDS_MAX = 10_000
_BLANKS = " \t\r\n"  # around a field, and at the end of a line
_ESCAPES = {r"\t": "\t", r"\x01": "\x01"}  # the second is Hive's own separator


def open_regex(spec: Spec) -> TimeParser:
    """``regex:PATTERN``: the first group of the first match. RE2's syntax, in linear time."""
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
    """Picks a text out of each line by an expression that gives nothing where there is none."""

    def __init__(self, expression: str, complaint: str, engine: Engine) -> None:
        self._expression = expression
        self._complaint = complaint
        self._engine = engine

    def pick(self, batch: pa.RecordBatch) -> Found:
        lines = texts_of(batch, repair=True)
        texts = self._engine.column(self._expression, lines.values)
        empty = pc.equal(pc.binary_length(texts), 0)
        return Found(texts, lines.errors).reject(empty, self._complaint, lines.values)
