"""Key, id, type and time of events from fields of their JSON values, column by column.

A field is named as parsers name it: ``user.id``, or a JSON pointer. What cannot be taken leaves the
event as it was, and a header says why: an event is never lost because a field of it is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.events import EVENT_SCHEMA
from tidelog.codec.parsers.base import Found, Spec
from tidelog.codec.parsers.engine import Engine
from tidelog.codec.parsers.json import JsonField
from tidelog.codec.parsers.times import moment_reader
from tidelog.model import limits

__all__ = ["UNTAKEN_HEADER", "FieldPaths", "FieldTaker"]

UNTAKEN_HEADER = "tidelog.untaken"  # of an event: which field could not be taken, and why

_TIME = EVENT_SCHEMA.field("timestamp").type
_HEADERS = EVENT_SCHEMA.field("headers").type


@dataclass(frozen=True, slots=True)
class FieldPaths:
    """Where an event's own fields are in its JSON; empty for those that stay as they come."""

    key: str = ""
    id: str = ""
    type: str = ""
    time: str = ""

    def given(self) -> bool:
        """Whether any is."""
        return any(getattr(self, field.name) for field in fields(self))


class FieldTaker:
    """Takes fields out of batches in event columns. Belongs to one thread."""

    def __init__(self, paths: FieldPaths) -> None:
        engine = Engine()
        self._picks: dict[str, JsonField] = {}
        for field in fields(paths):
            path = getattr(paths, field.name)
            if path:
                spec = Spec(f"json:{path}", "json", path)
                self._picks[field.name] = JsonField(spec, path, engine)
        if "time" in self._picks:
            self._moment = moment_reader(self._picks["time"].what, engine)

    def take(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with the fields that were found."""
        columns = {name: batch.column(name) for name in batch.schema.names}
        untaken: list[pa.Array] = []
        for name, field in self._picks.items():
            found = field.pick(batch)
            target = "timestamp" if name == "time" else name
            if name == "time":
                found = self._moment(found)
            elif name == "id":
                found = _checked_ids(found)
            kind = EVENT_SCHEMA.field(target).type
            values = found.values.cast(kind) if target != "timestamp" else _times(found.values)
            columns[target] = pc.if_else(pc.is_valid(found.errors), columns[target], values)
            untaken.append(found.errors)
        columns["headers"] = _with_reasons(columns["headers"], untaken)
        return pa.record_batch(list(columns.values()), schema=EVENT_SCHEMA)


def _times(values: pa.Array) -> pa.Array:
    return values.cast(pa.int64()).cast(_TIME)


def _checked_ids(found: Found) -> Found:
    found = found.reject(pc.equal(found.values, ""), "id is empty")
    length = pc.binary_length(found.values)
    return found.reject(pc.greater(length, limits.ID_BYTES_MAX), "id is too long")


def _with_reasons(headers: pa.Array, untaken: list[pa.Array]) -> pa.Array:
    """One more header for the events of which something could not be taken."""
    reasons = [pc.fill_null(errors, "") for errors in untaken]
    if not any(pc.any(pc.not_equal(each, "")).as_py() for each in reasons):
        return headers
    said = zip(*(each.to_pylist() for each in reasons), strict=True)
    listed = headers.to_pylist()
    for row, each in enumerate(said):
        text = "; ".join(filter(None, each))
        if text:
            more = {"name": UNTAKEN_HEADER, "value": text.encode()}
            listed[row] = [*(listed[row] or ()), more]
    return pa.array(listed, _HEADERS)
