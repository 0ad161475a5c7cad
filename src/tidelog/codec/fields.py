"""Fields of JSON values: extracts key, id, type and time from them, and filters events by them.

Every command that extracts fields uses this module, so a path and a value mean the same everywhere.
A field is named as in parsers: ``user.id``, or a JSON pointer (``/user.id``) if the name itself has
a dot. A time is ISO 8601 text, or a number since 1970 whose size determines its unit.

If a field cannot be extracted, a pump keeps the event as it is, with a header that says why
(:class:`FieldTaker`). ``produce`` stops at such a line (:class:`JsonLines`).

**Filters** look like ``amount > 10 and user.id = u-7``. A field is named as in parsers and pumps. A
number without quotes is compared as a number, exactly; anything else as text. ``contains`` ignores
case. ``null`` stands for a field that is missing or null. Values that are not JSON have no fields,
so that they fit ``= null`` only.

**CSV** becomes lines of JSON: a header names the fields, and each row becomes an object of texts.
Rows are those of Python's ``csv`` module: commas, and double quotes around fields with commas,
quotes or newlines. A row with newlines covers several lines. So that lines keep their numbers, each
line gives one text: the object for the last line of a row, and an empty one for other lines.
"""

from __future__ import annotations

import codecs
import csv
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.event_batch import EVENT_SCHEMA, event_sizes, value_lengths
from tidelog.codec.numbers import bytes_array
from tidelog.codec.parsers.base import ParsedValues, Spec
from tidelog.codec.parsers.json import JsonField, is_lenient_json
from tidelog.codec.parsers.times import Engine, moment_reader, texts_of
from tidelog.errors import FailedError, InvalidError
from tidelog.model import limits
from tidelog.model.decoding import is_deep_json
from tidelog.model.event import Event

__all__ = [
    "NOT_EXTRACTED_HEADER",
    "CsvRows",
    "FieldFilter",
    "FieldPaths",
    "FieldTaker",
    "JsonLines",
    "parse_field_filter",
]


NOT_EXTRACTED_HEADER = "tidelog.not_extracted"  # names the field that was not, and why

_REASON_MAX = 1_000  # characters of that header
_REASON_ROOM = 5_000  # bytes, for that header
_TOO_LARGE = "its fields make the event larger than event_bytes_max allows"
_TIME = EVENT_SCHEMA.field("timestamp").type
_HEADERS = EVENT_SCHEMA.field("headers").type


@dataclass(frozen=True, slots=True)
class FieldPaths:
    """Where an event's own fields are in its JSON; empty for those that do not change."""

    key: str = ""
    id: str = ""
    type: str = ""
    time: str = ""

    def given(self) -> bool:
        """Returns whether any path is given."""
        return any(getattr(self, field.name) for field in fields(self))


class _Fields:
    """Extracts the columns of some paths. Belongs to one thread."""

    def __init__(self, paths: FieldPaths) -> None:
        engine = Engine()
        self._fields: dict[str, JsonField] = {}
        for field in fields(paths):
            path = getattr(paths, field.name)
            if path:
                spec = Spec(f"json:{path}", "json", path)
                self._fields[field.name] = JsonField(spec, path, engine)
        if "time" in self._fields:
            self._moment = moment_reader(self._fields["time"].what, engine)

    def find(self, batch: pa.RecordBatch) -> dict[str, ParsedValues]:
        """Returns each event column that a path gives: for every row a value or an error text."""
        columns: dict[str, ParsedValues] = {}
        for name, field in self._fields.items():
            if name == "time":
                found = self._moment(field.pick_exact(batch))
                columns["timestamp"] = ParsedValues(_times(found.values), found.errors)
                continue
            found = field.pick(batch)
            nested = f"{field.what} is an object or an array, not a plain value"
            found = found.reject(field.nested(batch), nested)
            found = found.reject(
                field.rounded(batch, found.values),
                f"{field.what} is a number with a fraction or an exponent: write it as a string",
            )
            if name == "id":
                found = _checked_ids(found)
            columns[name] = ParsedValues(
                found.values.cast(EVENT_SCHEMA.field(name).type), found.errors
            )
        return columns


class FieldTaker:
    """Extracts fields from batches in event columns. Belongs to one thread."""

    def __init__(self, paths: FieldPaths, bytes_max: int = limits.EVENT_BYTES_CEILING) -> None:
        self._fields = _Fields(paths)
        self._bytes_max = bytes_max

    def take(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the batch with the fields that were found.

        Fields and the header may use the room of Tidelog's own additions on top of ``bytes_max``.
        An event that would become larger stays as it is, and its header says so.
        """
        columns = {name: batch.column(name) for name in batch.schema.names}
        found = self._fitting(batch, self._fields.find(batch))
        for name, each in found.items():
            columns[name] = pc.if_else(pc.is_valid(each.errors), columns[name], each.values)
        columns["headers"] = _with_reasons(
            columns["headers"], [each.errors for each in found.values()]
        )
        return pa.record_batch(list(columns.values()), schema=EVENT_SCHEMA)

    def _fitting(
        self, batch: pa.RecordBatch, found: dict[str, ParsedValues]
    ) -> dict[str, ParsedValues]:
        """Rejects the fields of events that would be too large with them."""
        room = limits.OWN_BYTES_MAX - _REASON_ROOM
        names = [name for name in found if name != "timestamp"]
        if batch.nbytes + sum(found[name].values.nbytes for name in names) <= self._bytes_max:
            return found
        try:
            before = sizes = event_sizes(batch)
        except InvalidError:  # the sink refuses one of these events, and names it
            return found
        for name in names:
            new, old = found[name].values, batch.column(name)
            kept = pc.if_else(pc.is_valid(found[name].errors), old, new)
            sizes = sizes + value_lengths(kept) - value_lengths(old)
        large = pa.array(sizes > np.maximum(before, self._bytes_max) + room)
        return {name: each.reject(large, _TOO_LARGE) for name, each in found.items()}


class JsonLines:
    """Makes events of lines that are JSON objects. Belongs to one thread."""

    def __init__(self, paths: FieldPaths) -> None:
        self._fields = _Fields(paths)
        self._engine = Engine()

    def events(self, lines: Sequence[bytes]) -> list[Event | InvalidError]:
        """Returns for each line its event, or the error that says why it has none."""
        batch = pa.record_batch({"value": bytes_array(lines)})
        found = self._fields.find(batch)
        columns = {
            name: each.values.cast(pa.int64()) if name == "timestamp" else each.values
            for name, each in found.items()
        }
        values = {name: column.to_pylist() for name, column in columns.items()}
        errors = [self._errors(batch, lines), *(each.errors.to_pylist() for each in found.values())]
        return [
            InvalidError(problem)
            if (problem := next(filter(None, said), None))
            else Event(line, **{name: column[row] for name, column in values.items()})
            for row, (line, *said) in enumerate(zip(lines, *errors, strict=True))
        ]

    def _errors(self, batch: pa.RecordBatch, lines: Sequence[bytes]) -> list[str | None]:
        """Returns for each line why it is not a JSON object; None if it is one."""
        texts = texts_of(batch, repair=False)
        kind = self._engine.column("coalesce(try(json_type(v)), '') = 'OBJECT'", texts.values)
        kind = pc.and_(kind, pc.invert(is_lenient_json(texts.values)))
        objects = texts.reject(pc.invert(kind), "is not a JSON object")
        deep = f"is nested too deeply: the limit is {limits.NESTING_MAX} levels"
        return [
            deep if is_deep_json(line) else error
            for line, error in zip(lines, objects.errors.to_pylist(), strict=True)
        ]


def _times(values: pa.Array) -> pa.Array:
    return values.cast(pa.int64()).cast(_TIME)


def _checked_ids(found: ParsedValues) -> ParsedValues:
    found = found.reject(pc.equal(found.values, ""), "id is empty")
    length = pc.binary_length(found.values)
    return found.reject(pc.greater(length, limits.ID_BYTES_MAX), "id is too long")


def _with_reasons(headers: pa.Array, problems: list[pa.Array]) -> pa.Array:
    """Returns headers with one more for events with a field that could not be extracted."""
    reasons = [pc.fill_null(errors, "") for errors in problems]
    if not any(pc.any(pc.not_equal(each, "")).as_py() for each in reasons):
        return headers
    said = zip(*(each.to_pylist() for each in reasons), strict=True)
    listed = headers.to_pylist()
    for row, each in enumerate(said):
        text = "; ".join(filter(None, dict.fromkeys(each)))[:_REASON_MAX]
        if text:
            more = {"name": NOT_EXTRACTED_HEADER, "value": text.encode()}
            given = listed[row] or []
            if len(given) >= limits.HEADERS_MAX + limits.OWN_HEADERS_MAX:  # after many pumps
                given = [pair for pair in given if pair["name"] != NOT_EXTRACTED_HEADER]
            listed[row] = [*given, more]
    return pa.array(listed, _HEADERS)


_CONDITIONS_MAX = 8
_TEXT_MAX = 1_000  # characters
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,300})(?:\.[0-9]{1,300})?(?:[eE][-+]?[0-9]{1,3})?")
_CONDITION = re.compile(
    r"""\s*(?P<path>/\S+|[^\s=<>!"'/]+)
        \s*(?P<op>!=|>=|<=|=|>|<|\bcontains\b)
        \s*(?P<value>"[^"]*"|'[^']*'|[^\s"'=<>!](?:(?!\s+and\s)[^"'=<>!])*?)
        \s*(?P<more>\sand\s|$)""",
    re.VERBOSE | re.IGNORECASE,
)
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


@dataclass(frozen=True, slots=True)
class _FieldCondition:
    path: str
    op: str
    text: str | None  # None: null
    number: Decimal | None

    def fits(self, found: str | None) -> bool:
        """Returns whether a field fits; None is one that is missing or null."""
        if self.text is None:
            return (found is None) == (self.op == "=")
        if found is None:
            return self.op == "!="
        if self.op == "contains":
            return self.text.lower() in found.lower()
        if self.number is None:
            return _COMPARED[self.op](found, self.text)
        number = _number(found)
        if number is None:
            return self.op == "!="
        return _COMPARED[self.op](number, self.number)


@dataclass(frozen=True, slots=True)
class FieldFilter:
    """Conditions that all must hold; :func:`parse_field_filter` makes one of a text."""

    text: str
    conditions: tuple[_FieldCondition, ...]

    def fits(self, values: pa.Array) -> pa.Array:
        """Returns for each value, as bytes, whether it fits."""
        batch = pa.record_batch({"value": values.cast(pa.binary())})
        engine = Engine()
        fitting = [True] * len(values)
        for each in self.conditions:
            spec = Spec(f"json:{each.path}", "json", each.path)
            texts = JsonField(spec, each.path, engine).pick(batch).values.to_pylist()
            fitting = [fits and each.fits(text) for fits, text in zip(fitting, texts, strict=True)]
        return pa.array(fitting, pa.bool_())


def parse_field_filter(text: str) -> FieldFilter:
    """Returns the filter of a text. Raises ``InvalidError``."""
    if len(text) > _TEXT_MAX:
        raise InvalidError(f"filter: has more than {_TEXT_MAX} characters: use SQL for it")
    conditions: list[_FieldCondition] = []
    at, more = 0, "and"
    while more:
        found = _CONDITION.match(text, at)
        if found is None:
            raise InvalidError(
                f"filter `{text[at:][:80].strip()}`: is not a condition: write one such as "
                '`amount > 10`, `user.id = u-7` or `city contains "San"`, joined by `and`'
            )
        conditions.append(_condition(found["path"], found["op"].lower(), found["value"]))
        at, more = found.end(), found["more"]
    if len(conditions) > _CONDITIONS_MAX:
        raise InvalidError(f"filter: has more than {_CONDITIONS_MAX} conditions: use SQL for it")
    return FieldFilter(text.strip(), tuple(conditions))


def _condition(path: str, op: str, given: str) -> _FieldCondition:
    JsonField(Spec(f"json:{path}", "json", path), path, Engine())  # refuses an invalid path
    if given[:1] in ("'", '"'):
        return _FieldCondition(path, op, given[1:-1], None)
    if given.lower() == "null":
        if op not in ("=", "!="):
            raise InvalidError(f"filter `{path} {op} null`: compare null with = or != only")
        return _FieldCondition(path, op, None, None)
    return _FieldCondition(path, op, given, None if op == "contains" else _number(given))


def _number(text: str) -> Decimal | None:
    """Returns a number exactly; None for a text that is not one in JSON."""
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


_OPEN = "unexpected end of data"  # as the module says of a quoted field that has not ended


class CsvRows:
    """Makes JSON objects of the rows of one input, as its lines come."""

    def __init__(self) -> None:
        self._header: list[str] | None = None
        self._begun: list[str] = []  # lines of a row that has not ended
        self._next = 1  # number of the next line

    @property
    def is_open(self) -> bool:
        """Returns whether the last row has a quoted field that has not ended."""
        return bool(self._begun)

    def objects(self, lines: Sequence[bytes]) -> tuple[list[bytes], FailedError | None]:
        """Returns a text for each line of the rows that end in the next lines.

        Also returns the error of a line that is not valid; the texts are those before it.
        """
        done: list[bytes] = []
        first = self._next - len(self._begun)
        try:
            texts = self._begun + [f"{self._text(line, n)}\n" for n, line in enumerate(lines)]
            self._next += len(lines)
            rows = csv.reader(texts, strict=True)
            while len(done) < len(texts):
                try:
                    row = next(rows)
                except csv.Error as exc:
                    if str(exc) == _OPEN:
                        break
                    raise _bad_line(first + rows.line_num - 1, f"{exc}: fix it") from exc
                text = self._object(row, first + len(done))
                done += [b""] * (rows.line_num - len(done) - 1) + [text]
        except FailedError as exc:
            return done, exc
        self._begun = texts[len(done) :]
        return done, None

    def _text(self, line: bytes, index: int) -> str:
        number = self._next + index
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)  # as spreadsheets write it
        try:
            return line.decode()
        except UnicodeDecodeError as exc:
            raise _bad_line(number, "is not UTF-8: convert the file first") from exc

    def _object(self, row: list[str], number: int) -> bytes:
        if not row:
            return b""
        if self._header is None:
            if len(set(row)) < len(row) or "" in row:
                raise _bad_line(number, "the header needs a name of its own for each field")
            self._header = row
            return b""
        if len(row) != len(self._header):
            fields = "field" if len(row) == 1 else "fields"
            counts = f"has {len(row)} {fields}, and the header has {len(self._header)}"
            raise _bad_line(number, f"{counts}: fix it, or quote what has a comma")
        return msgspec.json.encode(dict(zip(self._header, row, strict=True)))


def _bad_line(number: int, what: str) -> FailedError:
    return FailedError(f"line {number}: {what}", line=number)
