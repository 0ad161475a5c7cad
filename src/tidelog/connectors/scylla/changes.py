"""Turns rows of a change log into events: one for each change, in the order of its stream.

All rows of one stream and time are a batch, which is never split: it is within one window, and its
last row has a mark. Pre-images and post-images are joined to the change of the same row. An image
without such a change, for example of a row that a range delete removed, is its own event.

The value of an event is JSON::

    {"columns": {"name":  {"type": "text", "value": "x"},                a column was set
                 "gone":  {"type": "int", "deleted": true},              it was deleted
                 "tags":  {"type": "set<text>", "added": ["a"], "removed": ["b"]},
                 "words": {"type": "list<text>", "value": ["a"]}},       a collection was replaced
     "ttl": 60,                                                          seconds, if it has any
     "before": {"name": {"type": "text", "value": "w"}}, "after": {…},   the images
     "batch": {"number": 0, "of": 2, "whole": true}}                     if it is part of a batch

Unchanged columns are not included. Elements added to a list have their times as keys.

**The schema** of a change log has the columns of the base table, and the log's columns for each. It
is read from the server's own tables, never from the driver's metadata. After reading a window, a
reader compares its schema with the current one: rows cannot have a column that is in neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from tidelog.connectors.scylla.session import ScyllaOptions, ScyllaSession
from tidelog.connectors.scylla.types import (
    ToJson,
    fields_to_json,
    quoted,
    second_text,
    to_json,
    values_to_json,
)
from tidelog.errors import InvalidError, NotFoundError
from tidelog.model.event import Headers

__all__ = [
    "LATE",
    "OPERATIONS",
    "Changes",
    "LogTable",
    "RowLayout",
    "is_present",
    "log_table",
    "read_layout",
    "time_ms_of",
]

FIXED = ("cdc$stream_id", "cdc$time", "cdc$batch_seq_no", "cdc$operation")  # first in each row
_OPTIONAL = ("cdc$ttl", "cdc$end_of_batch")


@dataclass(frozen=True, slots=True)
class Schema:
    """Columns of the base table and its log, and fields of user types; comparable."""

    key: tuple[str, ...]  # partition key, then clustering columns
    values: tuple[tuple[str, str], ...]  # all other columns and their types, by name
    context: frozenset[tuple[str, str]]  # the log's columns and their types
    user_types: frozenset[tuple[str, tuple[str, ...], tuple[str, ...]]]
    partition_key_size: int

    def has_elements(self, name: str) -> bool:
        """Returns whether single elements of a column can change."""
        of = dict(self.values)[name]
        user_types = {each for each, _, _ in self.user_types}
        return of.startswith(("list<", "set<", "map<")) or of.strip('"') in user_types


@dataclass(frozen=True, slots=True)
class Column:
    """A column that can change: where it is in a row, and how to format it."""

    name: str
    label: str  # ``"name":{"type":"…"``
    at: int  # its value
    deleted_at: int  # whether it was deleted; -1 if the log has no such column
    elements_at: int  # which elements were removed; -1 for a single value
    whole: ToJson  # a list as a list, though the log has its elements by time
    added: ToJson  # elements that were added
    removed: ToJson | None  # elements that were removed


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Which column is where in the rows of a window statement."""

    schema: Schema
    statement: Any
    ttl_at: int  # -1 if the log has no such column
    end_at: int  # the mark of a batch's last row; the same
    key: tuple[tuple[str, int, ToJson], ...]  # ``"name":``, its index and its formatter
    columns: tuple[Column, ...]
    told: tuple[tuple[str, ToJson] | Column | None, ...]  # for each cell: how a change formats it
    version: str  # of the server's schema when this one was read

    def column(self, name: str) -> Column | None:
        """Returns the changing column with this name."""
        return next((each for each in self.columns if each.name == name), None)


@dataclass(frozen=True, slots=True)
class LogTable:
    """The table of the log."""

    id: str  # of the table and its log; changes if either is created again
    ttl_ms: int  # how long rows are kept; 0: forever


def log_table(session: ScyllaSession) -> LogTable:
    """Returns the log of the table. Raises ``NotFoundError`` if table or log does not exist."""
    place = session.place
    rows = session.rows(
        "SELECT table_name, id, default_time_to_live FROM system_schema.tables "
        "WHERE keyspace_name = ?",
        (place.keyspace,),
    )
    found = {name: (table_id, ttl) for name, table_id, ttl in rows}
    if place.table not in found:
        raise NotFoundError(
            f"table `{place.label}`: is not there: fix the name; if it was dropped, what was not "
            "read of its change log is lost"
        )
    if place.log_table not in found:
        raise NotFoundError(
            f"table `{place.label}`: has no change log: run ALTER TABLE {place.label} WITH "
            "cdc = {'enabled': true}"
        )
    (base_id, _), (log_id, ttl_s) = found[place.table], found[place.log_table]
    if session.is_scylla:
        ttl_s = _scylla_ttl_s(session, ttl_s)
    return LogTable(f"{base_id}+{log_id}", (ttl_s or 0) * 1000)


def read_schema(session: ScyllaSession) -> Schema:
    """Returns the current schema. Raises ``NotFoundError`` if table or log does not exist."""
    place = session.place
    base = _columns(session, place.table)
    context = _columns(session, place.log_table)
    if not base or not context:
        log_table(session)  # raises with the one that is missing
        raise NotFoundError(f"change log of `{place.label}`: has just gone: was the table dropped?")
    names = {name for name, _, _, _ in context}
    missing = [name for name in FIXED if name not in names]
    if missing:
        raise InvalidError(
            f"table `{place.keyspace}.{place.log_table}`: has no column `{missing[0]}`: it is not "
            "a change log of Scylla"
        )
    keys = sorted(
        (kind != "partition_key", position, name)
        for name, kind, position, _ in base
        if kind in ("partition_key", "clustering")
    )
    values = sorted((name, of) for name, kind, _, of in base if kind in ("regular", "static"))
    types = session.rows(
        "SELECT type_name, field_names, field_types FROM system_schema.types "
        "WHERE keyspace_name = ?",
        (place.keyspace,),
    )
    return Schema(
        key=tuple(name for _, _, name in keys),
        values=tuple((name, of) for name, of in values if name in names),
        context=frozenset((name, of) for name, _, _, of in context),
        user_types=frozenset((name, tuple(f or ()), tuple(t or ())) for name, f, t in types),
        partition_key_size=sum(not clustering for clustering, _, _ in keys),
    )


def read_layout(session: ScyllaSession) -> RowLayout:
    """Returns the current schema, with the statement that reads by it."""
    version = _version(session)
    return _window_statement(session, read_schema(session), version)


def is_present(session: ScyllaSession, layout: RowLayout) -> bool:
    """Returns whether the schema of a layout is still current."""
    return _version(session) == layout.version or read_schema(session) == layout.schema


def _version(session: ScyllaSession) -> str:
    ((version,),) = session.rows("SELECT schema_version FROM system.local")
    return str(version)


def _window_statement(session: ScyllaSession, schema: Schema, version: str) -> RowLayout:
    """Prepares the statement that reads a window, and maps the columns of its rows."""
    logged = {name for name, _ in schema.context}
    names = [*FIXED, *(name for name in _OPTIONAL if name in logged), *schema.key]
    for name, _ in schema.values:
        names += [each for each in _beside(schema, name) if each in logged]
    at = {name: index for index, name in enumerate(names)}
    statement = session.prepare(_select(session, names))
    kinds = [kind for _, _, _, kind in statement.result_metadata]
    columns = tuple(_column(schema, name, at, kinds) for name, _ in schema.values)
    return RowLayout(
        schema=schema,
        version=version,
        statement=statement,
        ttl_at=at.get("cdc$ttl", -1),
        end_at=at.get("cdc$end_of_batch", -1),
        key=tuple((f"{quoted(name)}:", at[name], to_json(kinds[at[name]])) for name in schema.key),
        columns=columns,
        told=_cell_formats(columns, len(names)),
    )


def _cell_formats(
    columns: Sequence[Column], width: int
) -> tuple[tuple[str, ToJson] | Column | None, ...]:
    """Returns for each cell of a row how to format it, or the column that it belongs to."""
    told: list[tuple[str, ToJson] | Column | None] = [None] * width
    for each in columns:
        plain = each.elements_at < 0
        told[each.at] = (f'{each.label},"value":', each.whole) if plain else each
        for beside in (each.deleted_at, each.elements_at):
            if beside >= 0:
                told[beside] = each
    return tuple(told)


def _beside(schema: Schema, name: str) -> tuple[str, ...]:
    """Returns the log's columns for a column of the base table; elements only if it has any."""
    elements = (f"cdc$deleted_elements_{name}",) if schema.has_elements(name) else ()
    return (name, f"cdc$deleted_{name}", *elements)


def _select(session: ScyllaSession, names: Sequence[str]) -> str:
    place = session.place
    columns = ", ".join(_quoted(name) for name in names)
    bypass = " BYPASS CACHE" if session.is_scylla else ""
    return (
        f'SELECT {columns} FROM "{place.keyspace}"."{place.log_table}" '  # noqa: S608 - checked
        'WHERE "cdc$stream_id" IN ? AND "cdc$time" >= minTimeuuid(?) '
        f'AND "cdc$time" < minTimeuuid(?){bypass}'
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _column(schema: Schema, name: str, at: dict[str, int], kinds: Sequence[Any]) -> Column:
    of = dict(schema.values)[name]
    kind, elements_at = kinds[at[name]], -1
    added = whole = to_json(kind)
    removed = None
    if schema.has_elements(name) and f"cdc$deleted_elements_{name}" in at:
        elements_at = at[f"cdc$deleted_elements_{name}"]
        removed = to_json(kinds[elements_at])
        if getattr(kind, "fieldnames", None):
            added, removed = fields_to_json(kind)
        elif of.startswith("list<") and kind.typename == "map":
            whole = values_to_json(kind)
    return Column(
        name=name,
        label=f'{quoted(name)}:{{"type":{quoted(of)}',
        at=at[name],
        deleted_at=at.get(f"cdc$deleted_{name}", -1),
        elements_at=elements_at,
        whole=whole,
        added=added,
        removed=removed,
    )


def _columns(session: ScyllaSession, table: str) -> list[Any]:
    return session.rows(
        "SELECT column_name, kind, position, type FROM system_schema.columns "
        "WHERE keyspace_name = ? AND table_name = ?",
        (session.place.keyspace, table),
    )


def _scylla_ttl_s(session: ScyllaSession, otherwise: int) -> int:
    """Returns the time to live of the change log, with which Scylla writes its rows."""
    rows = session.rows(
        "SELECT cdc FROM system_schema.scylla_tables WHERE keyspace_name = ? AND table_name = ?",
        (session.place.keyspace, session.place.table),
    )
    told = dict(rows[0][0] or {}).get("ttl") if rows else None
    return otherwise if told is None else int(told)


LATE = "tidelog.late_ms"  # header of an event that a sweep added: its age when found
OPERATIONS = (
    "pre_image",
    "update",
    "insert",
    "row_delete",
    "partition_delete",
    "range_delete_start_inclusive",
    "range_delete_start_exclusive",
    "range_delete_end_inclusive",
    "range_delete_end_exclusive",
    "post_image",
)
_PRE_IMAGE, _POST_IMAGE = b"\x00", b"\x09"
_TRUE = b"\x01"
_TICKS_1970 = 0x01B21DD213814000  # of 100 ns, the epoch of timeuuids

_Made = tuple[int, str, bytes, bytes, str, Headers, bytes]


def time_ms_of(timeuuid: bytes) -> int:
    """Returns the time of a timeuuid."""
    low = int.from_bytes(timeuuid[:4], "big")
    high = int.from_bytes(timeuuid[6:8], "big") & 0x0FFF
    ticks = high << 48 | int.from_bytes(timeuuid[4:6], "big") << 32 | low
    return (ticks - _TICKS_1970) // 10_000


class Changes:
    """The events of one window."""

    def __init__(
        self,
        layout: RowLayout,
        way: ScyllaOptions,
        generation_ms: int,
        known: AbstractSet[bytes] = frozenset(),
        now_ms: int = 0,
    ) -> None:
        self._layout = layout
        self._way = way
        self._known = known  # changes that other pipelines committed
        self._now_ms = now_ms
        self._front = f'{{"cursor_gen":"{_moment(generation_ms)}","cursor_time":"'
        self._seconds: dict[int, str] = {}
        self._streams: dict[bytes, str] = {}
        self._unit: list[Any] = []
        self.events: list[_Made] = []
        self.unnamed: list[tuple[int, tuple[bytes, ...]]] = []  # their keys must be looked up

    def __len__(self) -> int:
        return len(self.events)

    def add(self, rows: Iterable[Any]) -> None:
        """Adds rows of some streams in order; the rows of each stream are consecutive."""
        unit, end_at = self._unit, self._layout.end_at
        for row in rows:
            if unit and (row[1] != unit[0][1] or row[0] != unit[0][0]):
                self._take(unit)
                unit.clear()
            if end_at < 0 or row[end_at] != _TRUE:
                unit.append(row)
            elif unit:
                self._take([*unit, row])
                unit.clear()
            else:
                self._put(row, "")  # a batch of one row, like most

    def end(self) -> None:
        """Ends these streams: no more rows follow."""
        if self._unit:
            self._take(self._unit)
        self._unit.clear()

    def extend(self, other: Changes) -> None:
        """Appends all events of another window."""
        base = len(self.events)
        self.events += other.events
        self.unnamed += [(base + index, values) for index, values in other.unnamed]

    def columns(self) -> list[Sequence[Any]]:
        """Returns the columns of all events: time, id, key, value, type, headers, identity."""
        return list(zip(*self.events, strict=True)) if self.events else [()] * 7

    # Internals.

    def _take(self, unit: list[Any]) -> None:
        """Adds a batch: the rows of one stream and time."""
        end_at = self._layout.end_at
        whole = end_at < 0 or unit[-1][end_at] == _TRUE
        if not whole and self._way.mode == "fast":
            return  # the sweep finds it complete
        if len(unit) == 1:
            self._put(unit[0], "" if whole else ',"batch":{"number":0,"of":1,"whole":false}')
            return
        changes, before, after = _join_images(self._layout, unit)
        texts = {True: "true", False: "false"}
        for number, row in enumerate(changes):
            tail = ""
            for name, images in (("before", before), ("after", after)):
                image = images.get(number)
                if image is not None:
                    tail += f',"{name}":{{{self._image(image)}}}'
            if len(changes) > 1 or not whole:
                tail += f',"batch":{{"number":{number},"of":{len(changes)},"whole":{texts[whole]}}}'
            self._put(row, tail, (before.get(number), after.get(number)))

    def _put(self, row: Any, tail: str, images: Sequence[Any] = ()) -> None:
        stream, time, seq, operation, *_ = row
        identity = stream + time + seq
        if identity in self._known:
            return
        time_ms = time_ms_of(time)
        name = OPERATIONS[operation[0]] if operation[0] < len(OPERATIONS) else str(operation[0])
        is_image = operation in (_PRE_IMAGE, _POST_IMAGE)
        columns = self._image(row) if is_image else self._columns(row)
        ttl_at = self._layout.ttl_at
        if ttl_at >= 0 and row[ttl_at] is not None:
            tail = f',"ttl":{int.from_bytes(row[ttl_at], "big", signed=True)}{tail}'
        if self._way.type_column is not None:
            name = self._of_column(self._way.type_column, row, images) or name
        late = ((LATE, b"%d" % max(0, self._now_ms - time_ms)),) if self._way.of else ()
        event_id = self._id(stream, time, seq, time_ms)
        value = f'{{"columns":{{{columns}}}{tail}}}'.encode()
        key = self._key(row, images)
        self.events.append((max(0, time_ms), event_id, key, value, name, late, identity))

    def _id(self, stream: bytes, time: bytes, seq: bytes, time_ms: int) -> str:
        second = self._seconds.get(time_ms // 1000)
        if second is None:
            second = self._seconds[time_ms // 1000] = _moment(time_ms // 1000 * 1000)
        name = self._streams.get(stream)
        if name is None:
            name = self._streams[stream] = f'","stream_id":"{stream.hex()}","stream_time":"'
        text = time.hex()
        return (
            f"{self._front}{second}{name}{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-"
            f'{text[20:]}","stream_seq":{int.from_bytes(seq, "big", signed=True)}}}'
        )

    def _key(self, row: Any, images: Sequence[Any]) -> bytes:
        wanted = self._way.key_column or self._way.key_lookup
        if wanted is not None:
            found = self._of_column(wanted, row, images)
            if found is not None:
                return found.encode()
            values = tuple(row[at] for _, at, _ in self._layout.key)
            if self._way.key_lookup is not None and None not in values:
                self.unnamed.append((len(self.events), values))
        parts = [
            label + kind(row[at]) for label, at, kind in self._layout.key if row[at] is not None
        ]
        return f"{{{','.join(parts)}}}".encode()

    def _columns(self, row: Any) -> str:
        parts: list[str] = []
        done: Column | None = None  # the cells of a column are adjacent
        for told, cell in zip(self._layout.told, row, strict=True):
            if cell is None or told is None:
                continue
            if isinstance(told, tuple):
                parts.append(f"{told[0]}{told[1](cell)}}}")
            elif told is not done:
                done = told
                text = _elements(told, row) if told.elements_at >= 0 else _deletion(told, row)
                if text:
                    parts.append(text)
        return ",".join(parts)

    def _image(self, row: Any) -> str:
        return ",".join(
            f'{each.label},"value":{each.whole(row[each.at])}}}'
            for each in self._layout.columns
            if row[each.at] is not None
        )

    def _of_column(self, name: str, row: Any, images: Sequence[Any]) -> str | None:
        """Returns a column as text: from the change, otherwise from the images."""
        for label, at, kind in self._layout.key:
            if label == f'"{name}":' and row[at] is not None:
                return text_of(kind(row[at]))
        column = self._layout.column(name)
        for each in (row, *reversed(images)) if column is not None else ():
            if column is not None and each is not None and each[column.at] is not None:
                return text_of(column.whole(each[column.at]))
        return None


def text_of(value: str) -> str:
    """Returns a JSON value as plain text."""
    return str(json.loads(value)) if value.startswith('"') else value


def _deletion(column: Column, row: Any) -> str:
    """Returns what the deletion mark of a column says."""
    if row[column.at] is None and row[column.deleted_at] == _TRUE:
        return f'{column.label},"deleted":true}}'
    return ""


def _elements(column: Column, row: Any) -> str:
    """Returns what changed in a collection or a user type; empty if nothing did."""
    value, removed = row[column.at], row[column.elements_at]
    if column.deleted_at >= 0 and row[column.deleted_at] == _TRUE:
        if value is None:
            return f'{column.label},"deleted":true}}'
        return f'{column.label},"value":{column.whole(value)}}}'
    text = "" if value is None else f',"added":{column.added(value)}'
    if removed is not None and column.removed is not None:
        text += f',"removed":{column.removed(removed)}'
    return f"{column.label}{text}}}" if text else ""


def _join_images(
    layout: RowLayout, unit: list[Any]
) -> tuple[list[Any], dict[int, Any], dict[int, Any]]:
    """Returns the changes of a batch and, by their numbers, the images of the same rows."""
    key = [at for _, at, _ in layout.key]

    def place(row: Any) -> tuple[bytes | None, ...]:
        return tuple(row[at] for at in key)

    first: dict[Any, Any] = {}
    last: dict[Any, Any] = {}
    for row in unit:
        if row[3] not in (_PRE_IMAGE, _POST_IMAGE):
            first.setdefault(place(row), row)
            last[place(row)] = row
    before: dict[int, Any] = {}
    after: dict[int, Any] = {}
    changes: list[Any] = []
    joined: list[tuple[dict[int, Any], Any, Any]] = []
    for row in unit:
        if row[3] == _PRE_IMAGE and place(row) in first:
            joined.append((before, first[place(row)], row))
        elif row[3] == _POST_IMAGE and place(row) in last:
            joined.append((after, last[place(row)], row))
        else:
            changes.append(row)
    numbers = {id(row): number for number, row in enumerate(changes)}
    for images, change, image in joined:
        images[numbers[id(change)]] = image
    return changes, before, after


def _moment(time_ms: int) -> str:
    """Formats a time like rscylla does: RFC 3339, without trailing digits."""
    whole, rest = divmod(time_ms, 1000)
    text = second_text(whole)
    return f"{text}.{rest:03}".rstrip("0") + "Z" if rest else f"{text}Z"
