"""Describes a change log: the columns of the base table, and the log's columns for each.

The schema is read from the server's own tables, never from the driver's metadata. After reading a
window, a reader compares its schema with the current one: rows cannot have a column that is in
neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidelog.connectors.scylla.session import ScyllaSession
from tidelog.connectors.scylla.types import ToJson, fields_to_json, quoted, to_json, values_to_json
from tidelog.errors import InvalidError, NotFoundError

__all__ = [
    "FIXED",
    "Column",
    "LogTable",
    "RowLayout",
    "Schema",
    "is_present",
    "log_table",
    "read_layout",
    "read_schema",
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
            f"table `{place.keyspace}.{place.log_table}`: has no column `{missing[0]}`: it is no "
            "change log of Scylla's"
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
