"""Extracts key, id, type and time of events from fields of their JSON values, column by column.

Every command that extracts fields uses this module, so a path and a value mean the same everywhere.
A field is named as in parsers: ``user.id``, or a JSON pointer (``/user.id``) if the name itself has
a dot. A time is ISO 8601 text, or a number since 1970 whose size determines its unit.

If a field cannot be extracted, a pump keeps the event as it is, with a header that says why
(:class:`FieldTaker`). ``produce`` stops at such a line (:class:`JsonLines`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.event_batch import EVENT_SCHEMA, event_sizes
from tidelog.codec.parsers.base import ParsedValues, Spec
from tidelog.codec.parsers.json import JsonField, is_lenient_json
from tidelog.codec.parsers.text_lines import texts_of
from tidelog.codec.parsers.times import Engine, moment_reader
from tidelog.errors import InvalidError
from tidelog.model import limits
from tidelog.model.decoding import is_deep_json
from tidelog.model.event import Event

__all__ = ["UNTAKEN_HEADER", "FieldPaths", "FieldTaker", "JsonLines"]

UNTAKEN_HEADER = "tidelog.untaken"  # names the field that could not be extracted, and why

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
            found = field.pick(batch)
            if name == "time":
                found = self._moment(found)
                columns["timestamp"] = ParsedValues(_times(found.values), found.errors)
                continue
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
            sizes = sizes + _lengths(kept) - _lengths(old)
        large = pa.array(sizes > np.maximum(before, self._bytes_max) + room)
        return {name: each.reject(large, _TOO_LARGE) for name, each in found.items()}


class JsonLines:
    """Makes events of lines that are JSON objects. Belongs to one thread."""

    def __init__(self, paths: FieldPaths) -> None:
        self._fields = _Fields(paths)
        self._engine = Engine()

    def events(self, lines: Sequence[bytes]) -> list[Event | InvalidError]:
        """Returns for each line its event, or the error that says why it has none."""
        batch = pa.record_batch({"value": pa.array(lines, pa.binary())})
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


def _lengths(column: pa.Array) -> npt.NDArray[np.int64]:
    found = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
    return np.asarray(found, np.int64)


def _times(values: pa.Array) -> pa.Array:
    return values.cast(pa.int64()).cast(_TIME)


def _checked_ids(found: ParsedValues) -> ParsedValues:
    found = found.reject(pc.equal(found.values, ""), "id is empty")
    length = pc.binary_length(found.values)
    return found.reject(pc.greater(length, limits.ID_BYTES_MAX), "id is too long")


def _with_reasons(headers: pa.Array, untaken: list[pa.Array]) -> pa.Array:
    """Returns headers with one more for events with a field that could not be extracted."""
    reasons = [pc.fill_null(errors, "") for errors in untaken]
    if not any(pc.any(pc.not_equal(each, "")).as_py() for each in reasons):
        return headers
    said = zip(*(each.to_pylist() for each in reasons), strict=True)
    listed = headers.to_pylist()
    for row, each in enumerate(said):
        text = "; ".join(filter(None, dict.fromkeys(each)))[:_REASON_MAX]
        if text:
            more = {"name": UNTAKEN_HEADER, "value": text.encode()}
            given = listed[row] or []
            if len(given) >= limits.HEADERS_MAX + limits.OWN_HEADERS_MAX:  # after many pumps
                given = [pair for pair in given if pair["name"] != UNTAKEN_HEADER]
            listed[row] = [*given, more]
    return pa.array(listed, _HEADERS)
