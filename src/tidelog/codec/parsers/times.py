"""Texts as times: epochs, ISO 8601 and patterns, column by column; and times in lines of text.

An epoch's unit follows from its size, as in Secor: from 10^18 on nanoseconds, from 10^15 on
microseconds, from 10^12 on milliseconds, below that seconds. A time outside of the years 1970 to
9999 is an error, never a default. A time without a zone is UTC.

DuckDB evaluates one expression for a whole column of text, on the caller's own core. It reads no
files, loads no extension and uses no network. The column is named ``v``.

**Lines of text** have their time where a pattern finds it, or in the n-th field. Bytes that are not
UTF-8 count as U+FFFD, so that one bad character does not cost a line. What is found is an epoch if
it is a number, otherwise ISO 8601. :func:`texts_of` returns the values of any events as text.

:class:`FirstTimes` is for events whose times are not all written in one way.
"""

from __future__ import annotations

import decimal
import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.parsers.base import FieldTimes, ParsedValues, Spec, TimeParser, shown
from tidelog.errors import InternalError, InvalidError
from tidelog.model.limits import TIMESTAMP_MS_END

if TYPE_CHECKING:
    import duckdb

__all__ = [
    "NULL_VALUE",
    "Engine",
    "FirstTimes",
    "epoch_reader",
    "iso_reader",
    "literal",
    "moment_reader",
    "open_delimited",
    "open_regex",
    "pattern_reader",
    "texts_of",
]


_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "threads": 1,  # a task has one core
    "enable_external_access": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}


@functools.cache
def _database() -> duckdb.DuckDBPyConnection:
    """Returns one connection for each process: opening takes longer than parsing many events."""
    import duckdb  # noqa: PLC0415 - slow to load

    return duckdb.connect(":memory:", config=_SETTINGS)


class Engine:
    """Belongs to one thread, as a connection of DuckDB does."""

    def __init__(self) -> None:
        self._connection = _database().cursor()
        self._connection.execute("SET TimeZone = 'UTC'")  # what a time without a zone means

    def column(self, expression: str, texts: pa.Array) -> pa.Array:
        """Returns the expression's value for every row, in order.

        Raises ``InvalidError`` if DuckDB refuses the expression or some row.
        """
        import duckdb  # noqa: PLC0415 - slow to load

        self._connection.register("rows_of_batch", pa.table({"v": texts}))
        try:
            query = f"SELECT {expression} AS found FROM rows_of_batch"  # noqa: S608 - quoted by literal
            found = self._connection.sql(query).to_arrow_table().column(0).combine_chunks()
        except (
            duckdb.InvalidInputException,
            duckdb.BinderException,
            duckdb.ConversionException,
            duckdb.OutOfRangeException,
        ) as exc:
            raise InvalidError(_first_line(exc)) from exc
        except UnicodeDecodeError as exc:  # of its message, which cuts a quoted row at a byte
            raise InvalidError("a row is refused, with a message that is not UTF-8") from exc
        except duckdb.Error as exc:
            raise InternalError(f"DuckDB failed on `{expression}`: {_first_line(exc)}") from exc
        finally:
            self._connection.unregister("rows_of_batch")
        if len(found) != len(texts):
            raise InternalError(f"`{expression}` gave {len(found)} values for {len(texts)} rows")
        return found

    def check(self, expression: str) -> None:
        """Raises ``InvalidError`` unless the expression compiles."""
        self.column(expression, pa.array([""], pa.string()))


def literal(text: str) -> str:
    """Returns text as a constant inside an expression."""
    return "'" + text.replace("'", "''") + "'"


def _first_line(exc: duckdb.Error) -> str:
    line = (str(exc).splitlines() or [""])[0]
    return shown(line.partition(": ")[2] or line)


Reader = Callable[[ParsedValues], ParsedValues]

_WHOLE_DIGITS_MAX = 19  # such a number always fits 64 bits without a sign
_DECIMAL = r"^[+-]?[0-9]{1,40}(?:\.[0-9]{1,40})?(?:[eE][+-]?[0-9]{1,2})?$"  # never over a double
_ISO = (
    r"^[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
    r"(?:[T ](?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9](?:\.[0-9]+)?)?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3])(?::?[0-5][0-9])?)?)?$"
)
_ISO_BASIC = r"^([0-9]{4})([0-9]{2})([0-9]{2})T([0-9]{2})([0-9]{2})([0-9]{2})"
_ISO_EXTENDED = r"\1-\2-\3T\4:\5:\6"
_DIRECTIVES = set("YymdHIMSfpbBjzaA%")  # what DuckDB reads as Python's strptime does


def epoch_reader(what: str) -> Reader:
    """Reads numbers, or text that is one."""

    def read(found: ParsedValues) -> ParsedValues:
        times = _epoch_ms(found.values)
        if times.null_count:
            iso = pc.and_(pc.is_null(times), pc.match_substring_regex(found.values, pattern=_ISO))
            advice = f"{what} is not an epoch time (use the parser iso8601)"
            found = found.reject(iso, advice, found.values)
        return _settled(found, times, f"{what} is not an epoch time")

    return read


def iso_reader(what: str, engine: Engine) -> Reader:
    """Reads ISO 8601: a date, or date and time to the minute or finer, with or without a zone."""
    return lambda found: _settled(
        found, _iso_ms(found.values, engine), f"{what} is not an ISO 8601 time"
    )


def moment_reader(what: str, engine: Engine) -> Reader:
    """Reads an epoch if the text is a number, otherwise ISO 8601."""

    def read(found: ParsedValues) -> ParsedValues:
        times = _epoch_ms(found.values)
        rest = pc.and_(pc.is_null(times), pc.is_valid(found.values))
        if pc.any(rest, min_count=0).as_py():
            others = pc.if_else(rest, found.values, None)
            times = pc.coalesce(times, _iso_ms(others, engine))
        return _settled(found, times, f"{what} is neither an epoch nor an ISO 8601 time")

    return read


def pattern_reader(what: str, pattern: str, engine: Engine) -> Reader:
    """Reads dates by a pattern of ``strptime``. Raises ``InvalidError`` for a bad pattern."""
    directives = re.findall(r"%(-?.?)", pattern, re.DOTALL)
    unknown = [each for each in directives if each not in _DIRECTIVES]
    if unknown:
        raise InvalidError(
            f"pattern has `%{unknown[0]}`: it takes %{' %'.join(sorted(_DIRECTIVES))}"
        )
    if not {"Y", "y"} & set(directives):
        raise InvalidError("pattern has no year: put %Y or %y into it")
    expression = f"epoch_us(try_strptime(v, {literal(pattern)}))"
    engine.check(expression)

    def read(found: ParsedValues) -> ParsedValues:
        texts = found.values.dictionary_encode()  # many events share a date: each is read once
        dates = texts.dictionary
        if pattern.endswith("%z"):  # Python accepts a Z there, DuckDB does not
            dates = pc.replace_substring_regex(dates, pattern="Z$", replacement="+0000")
        distinct = _floored(engine.column(expression, dates))
        return _settled(found, distinct.take(texts.indices), f"{what} does not fit `{pattern}`")

    return read


def _settled(found: ParsedValues, times: pa.Array, complaint: str) -> ParsedValues:
    """Returns the times that were read; an error if a text was not one, or is out of range."""
    result = ParsedValues(times, found.errors)
    result = result.reject(pc.is_null(times), complaint, found.values)
    outside = pc.or_(pc.less(times, 0), pc.greater_equal(times, TIMESTAMP_MS_END))
    return result.reject(outside, "time is outside of the years 1970 to 9999", found.values)


def _epoch_ms(texts: pa.Array) -> pa.Array:
    """Returns null for what is not a number; some number out of range if out of range."""
    short = pc.less_equal(pc.binary_length(texts), _WHOLE_DIGITS_MAX)
    whole = pc.fill_null(pc.and_(pc.ascii_is_decimal(texts), short), False)
    numbers = pc.if_else(whole, texts, None).cast(pa.uint64()).fill_null(0).to_numpy()
    scaled = np.select(
        [numbers >= 10**18, numbers >= 10**15, numbers >= 10**12],
        [numbers // 10**6, numbers // 10**3, numbers],
        numbers * 1_000,
    )
    times = pa.array(scaled.astype(np.int64))
    rest = pc.and_(pc.invert(whole), pc.is_valid(texts))
    if pc.any(rest, min_count=0).as_py():
        times = pc.if_else(whole, times, _decimal_ms(pc.if_else(rest, texts, None)))
    return pc.if_else(pc.is_valid(texts), times, None)


def _decimal_ms(texts: pa.Array) -> pa.Array:
    """Reads numbers with a sign, a fraction or an exponent, and those too long for 64 bits.

    Cuts digits off the text: a double would round 23:59:59.999999999 up to the next day.
    """
    number = pc.fill_null(pc.match_substring_regex(texts, pattern=_DECIMAL), False)
    texts = pc.if_else(number, texts, None)
    has_exponent = pc.fill_null(pc.match_substring_regex(texts, pattern="[eE]"), False)
    if pc.any(has_exponent, min_count=0).as_py():
        plain = [_without_exponent(text) for text in texts.filter(has_exponent).to_pylist()]
        texts = pc.replace_with_mask(texts, has_exponent, pa.array(plain, texts.type))
    digits = pc.replace_substring_regex(texts, pattern=r"^[+-]?0*", replacement="")
    whole = pc.replace_substring_regex(digits, pattern=r"\..*$", replacement="")
    fraction = pc.replace_substring_regex(digits, pattern=r"^[0-9]*\.?", replacement="")
    thousandths = pc.utf8_slice_codeunits(pc.utf8_rpad(fraction, 3, padding="0"), 0, 3)
    length = pc.binary_length(whole)
    cut = pc.case_when(
        pc.make_struct(
            pc.greater(length, 18),  # nanoseconds
            pc.greater(length, 15),  # microseconds
            pc.greater(length, 12),  # milliseconds
        ),
        pc.utf8_slice_codeunits(whole, 0, -6),
        pc.utf8_slice_codeunits(whole, 0, -3),
        whole,
        pc.binary_join_element_wise(whole, thousandths, ""),
    )
    fits = pc.less(pc.binary_length(cut), _WHOLE_DIGITS_MAX)
    negative = pc.match_substring_regex(texts, pattern="^-.*[1-9]")
    inside = pc.and_(fits, pc.invert(negative))
    return pc.if_else(inside, pc.if_else(inside, cut, "0").cast(pa.int64()), -1)


def _without_exponent(text: str) -> str:
    return f"{decimal.Decimal(text):f}"


def _iso_ms(texts: pa.Array, engine: Engine) -> pa.Array:
    """Returns null for what is not ISO 8601, or not a day of the calendar."""
    texts = pc.replace_substring(pc.ascii_upper(texts), pattern=",", replacement=".")
    fits = pc.match_substring_regex(texts, pattern=_ISO)
    if not pc.all(fits, min_count=0).as_py():
        texts = pc.replace_substring_regex(texts, pattern=_ISO_BASIC, replacement=_ISO_EXTENDED)
        fits = pc.match_substring_regex(texts, pattern=_ISO)
    texts = pc.if_else(fits, texts, None)
    return _floored(engine.column("epoch_us(try_cast(v AS TIMESTAMPTZ))", texts))


def _floored(micros: pa.Array) -> pa.Array:
    """Returns milliseconds, toward the past: 10:59:59.9999 belongs to its own hour."""
    numbers = micros.fill_null(0).to_numpy() // 1_000
    return pc.if_else(pc.is_valid(micros), pa.array(numbers), None)


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


class FirstTimes:
    """The time of the first of several parsers that finds one; without any, all their reasons."""

    def __init__(self, parsers: Sequence[TimeParser]) -> None:
        self._parsers = parsers

    def times(self, batch: pa.RecordBatch) -> ParsedValues:
        first, *others = self._parsers
        found = first.times(batch)
        for parser in others:
            rest = pc.is_valid(found.errors)
            if not pc.any(rest, min_count=0).as_py():
                break
            tried = parser.times(batch.filter(rest))
            before = found.errors.filter(rest)
            both = pc.binary_join_element_wise(before, tried.errors, "; ")  # null if one is null
            reasons = pc.if_else(pc.equal(before, tried.errors), before, both)
            found = ParsedValues(
                pc.replace_with_mask(found.values, rest, tried.values),
                pc.replace_with_mask(found.errors, rest, reasons),
            )
        return found


_: type[TimeParser] = FirstTimes

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
