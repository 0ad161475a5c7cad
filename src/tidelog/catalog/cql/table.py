"""The catalog's CQL table: its address, its shape, and every statement that we send to it.

Keys are blobs of UTF-8, so the table's order is code point order. Every write is conditional; one
that expects nothing asks for ``"unset" = null``, a column that is never set. A refused write
returns the columns in its conditions, so they include the value too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tidelog.catalog.cql.tls import TLS_OPTIONS, CqlTls, parse_tls
from tidelog.errors import InvalidError, NotFoundError, UnavailableError
from tidelog.model.address import Address

__all__ = [
    "CqlPlace",
    "ensure_table",
    "missing_error",
    "place_of",
    "statements_of",
    "unready_error",
]

_SCHEMA_TIMEOUT_S = 30.0  # a table is created on all nodes before the reply

_COLUMNS = {
    "partition": ("partition_key", "blob"),
    "row": ("clustering", "blob"),
    "version": ("regular", "text"),
    "value": ("regular", "blob"),
    "unset": ("regular", "tinyint"),
}


@dataclass(frozen=True, slots=True)
class CqlPlace:
    """The table, its servers, and the user."""

    hosts: tuple[str, ...]
    port: int
    keyspace: str
    table: str
    datacenter: str | None
    username: str | None
    password: str | None = field(repr=False)
    tls: CqlTls | None = None

    @property
    def name(self) -> str:
        """Returns the table's name in statements."""
        return f'"{self.keyspace}"."{self.table}"'

    @property
    def label(self) -> str:
        """Returns the table's name for people."""
        return f"{self.keyspace}.{self.table}"


def place_of(address: Address, environ: Mapping[str, str]) -> CqlPlace:
    """Returns the place of an address. Raises ``InvalidError`` if it is incomplete."""
    options = address.take_options(("datacenter", "table", *TLS_OPTIONS))
    hosts = tuple(address.host.split(","))
    if not all(re.fullmatch(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+", host) for host in hosts):
        raise InvalidError(
            f"address `{address.text}`: `{address.host}` names no hosts: "
            "give cql://host1,host2:9042/keyspace, with one port for all"
        )
    keyspace, table = address.path.removeprefix("/"), options.get("table", "tidelog")
    for what, name in (("keyspace", keyspace), ("table", table)):
        if not re.fullmatch(r"[A-Za-z0-9_]{1,48}", name):
            raise InvalidError(
                f"address `{address.text}`: `{name}` is no {what}'s name: "
                "give 1 to 48 letters, digits and underscores"
            )
    username, password = (environ.get(f"TIDELOG_CQL_{name}") for name in ("USERNAME", "PASSWORD"))
    if (username is None) != (password is None):
        raise InvalidError(
            f"catalog `{address.text}`: only one of TIDELOG_CQL_USERNAME and TIDELOG_CQL_PASSWORD "
            "is set: set both or none"
        )
    return CqlPlace(
        tuple(host.strip("[]") for host in hosts),
        address.port or 9042,
        keyspace,
        table,
        options.get("datacenter"),
        username,
        password,
        parse_tls(f"catalog `{address.text}`", options, environ, "TIDELOG_CQL_"),
    )


def ensure_table(place: CqlPlace, cluster: Any, session: Any, create: bool) -> None:
    """Returns when the table exists in our shape; otherwise raises with what to do."""
    columns = _read_columns(place, session)
    if not columns and not create:
        raise missing_error(place)
    if not columns:
        _create_keyspace(place, cluster, session)
        session.execute(
            f'CREATE TABLE IF NOT EXISTS {place.name} ("partition" blob, "row" blob, '
            '"version" text, "value" blob, "unset" tinyint, PRIMARY KEY ("partition", "row"))',
            timeout=_SCHEMA_TIMEOUT_S,
        )
        columns = _read_columns(place, session)
    if not columns:
        raise unready_error(place)
    if columns != _COLUMNS:
        raise InvalidError(
            f"catalog table `{place.label}`: its columns are {_spell(columns)}, "
            f"expected {_spell(_COLUMNS)}: give the catalog a table of its own",
            table=place.label,
        )


def missing_error(place: CqlPlace) -> NotFoundError:
    """Returns the error for a table that does not exist."""
    return NotFoundError(
        f"catalog table `{place.label}`: not found: "
        "run `tidelog init --create-catalog` or fix the URL",
        table=place.label,
    )


def unready_error(place: CqlPlace) -> UnavailableError:
    """Returns the error for a table that was just created."""
    return UnavailableError(
        f"catalog table `{place.label}`: made, but not yet known to every node: try again",
        table=place.label,
    )


def statements_of(place: CqlPlace) -> dict[str, str]:
    """Returns every statement by name; a change's name is its verb and its kind of expectation.

    Only the table's name is interpolated, and that was checked; all values are bound.
    """
    where = 'WHERE "partition" = ? AND "row" = ?'
    put = f'UPDATE {place.name} SET "version" = ?, "value" = ? {where}'  # noqa: S608
    delete = f"DELETE FROM {place.name} {where}"  # noqa: S608
    check = f'UPDATE {place.name} SET "unset" = null {where}'  # noqa: S608
    absent = 'IF "version" = null AND "value" = null'
    version = 'IF "version" = ? AND "value" != null'
    scan = (
        f'SELECT "row", "version", "value" FROM {place.name} '  # noqa: S608
        'WHERE "partition" = ? AND "row" >= ? AND "row" < ? ORDER BY "row"'
    )
    return {
        "put any": f'{put} IF "unset" = null',
        "put absent": f"{put} {absent}",
        "put version": f"{put} {version}",
        "delete any": f'{delete} IF "unset" = null',
        "delete version": f"{delete} {version}",
        "check absent": f"{check} {absent}",
        "check version": f"{check} {version}",
        "get": f'SELECT "row", "version", "value" FROM {place.name} {where}',  # noqa: S608
        "scan": f"{scan} ASC LIMIT ?",
        "scan back": f"{scan} DESC LIMIT ?",
    }


def _read_columns(place: CqlPlace, session: Any) -> dict[str, tuple[str, str]]:
    """Returns kind and type of each column; a descending clustering key has a kind of its own."""
    found = session.execute(
        "SELECT column_name, kind, position, type, clustering_order FROM system_schema.columns "
        "WHERE keyspace_name = %s AND table_name = %s",
        (place.keyspace, place.table),
    )
    columns = {}
    for name, kind, position, scalar, order in found:
        suffix = f" {position}" if position > 0 else ""
        suffix += " descending" if order == "desc" else ""
        columns[name] = (kind + suffix, scalar)
    return columns


def _create_keyspace(place: CqlPlace, cluster: Any, session: Any) -> None:
    there = session.execute(
        "SELECT keyspace_name FROM system_schema.keyspaces WHERE keyspace_name = %s",
        (place.keyspace,),
    )
    if there.one():
        return
    hosts = cluster.metadata.all_hosts()
    if len(hosts) > 1:
        copies = ", ".join(f"'{name}': 3" for name in sorted({host.datacenter for host in hosts}))
        raise NotFoundError(
            f"catalog keyspace `{place.keyspace}`: not found, and how {len(hosts)} nodes shall "
            f'replicate it is not ours to guess: run CREATE KEYSPACE "{place.keyspace}" '
            f"WITH replication = {{'class': 'NetworkTopologyStrategy', {copies}}}, then try again",
            keyspace=place.keyspace,
        )
    session.execute(
        f'CREATE KEYSPACE IF NOT EXISTS "{place.keyspace}" '
        "WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}",
        timeout=_SCHEMA_TIMEOUT_S,
    )


def _spell(columns: Mapping[str, tuple[str, str]]) -> str:
    return ", ".join(f"`{name}` ({kind}, {of})" for name, (kind, of) in sorted(columns.items()))
