"""The catalog's CQL table: sessions, the driver's errors, and every statement that we send.

**Sessions.** The driver retries nothing on its own. Its errors are translated here, once. Only a
write that is known never to have begun counts as unavailable. After any other trouble it may have
landed, even if an overloaded server refused it: it may have refused only the last step of a decided
write.

**The table.** Keys are blobs of UTF-8, so the table's order is code point order. Every write is
conditional; one that expects nothing asks for ``"unset" = null``, a column that is never set. A
refused write returns the columns in its conditions, so they include the value too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidelog.catalog.cql_tls import TLS_OPTIONS, CqlTls, handshake_trouble, parse_tls, tls_context
from tidelog.catalog.update import LostReplyError
from tidelog.errors import InvalidError, NotFoundError, TidelogError, UnavailableError
from tidelog.model.address import Address

__all__ = [
    "DRIVER_ERRORS",
    "CqlAddress",
    "CqlSession",
    "TombstonesError",
    "causes_of",
    "open_session",
    "parse_cql_address",
    "reason_of",
    "tls_error",
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
class CqlAddress:
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


def parse_cql_address(address: Address, environ: Mapping[str, str]) -> CqlAddress:
    """Parses the address of a table. Raises ``InvalidError`` if it is incomplete."""
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
                f"address `{address.text}`: `{name}` is not a valid {what} name: "
                "give 1 to 48 letters, digits and underscores"
            )
    username, password = (environ.get(f"TIDELOG_CQL_{name}") for name in ("USERNAME", "PASSWORD"))
    if (username is None) != (password is None):
        raise InvalidError(
            f"catalog `{address.text}`: only one of TIDELOG_CQL_USERNAME and TIDELOG_CQL_PASSWORD "
            "is set: set both or none"
        )
    return CqlAddress(
        tuple(host.strip("[]") for host in hosts),
        address.port or 9042,
        keyspace,
        table,
        options.get("datacenter"),
        username,
        password,
        parse_tls(f"catalog `{address.text}`", options, environ, "TIDELOG_CQL_"),
    )


def ensure_table(place: CqlAddress, cluster: Any, session: Any, create: bool) -> None:
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


def missing_error(place: CqlAddress) -> NotFoundError:
    """Returns the error for a table that does not exist."""
    return NotFoundError(
        f"catalog table `{place.label}`: not found: "
        "run `tidelog init --create-catalog` or fix the URL",
        table=place.label,
    )


def unready_error(place: CqlAddress) -> UnavailableError:
    """Returns the error for a table that was just created."""
    return UnavailableError(
        f"catalog table `{place.label}`: made, but not yet known to every node: try again",
        table=place.label,
    )


def statements_of(place: CqlAddress) -> dict[str, str]:
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


def _read_columns(place: CqlAddress, session: Any) -> dict[str, tuple[str, str]]:
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


def _create_keyspace(place: CqlAddress, cluster: Any, session: Any) -> None:
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


try:
    import cassandra
    from cassandra.auth import PlainTextAuthProvider
    from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable
    from cassandra.connection import ConnectionException
    from cassandra.policies import (
        DCAwareRoundRobinPolicy,
        ExponentialReconnectionPolicy,
        FallthroughRetryPolicy,
        TokenAwarePolicy,
    )
    from cassandra.protocol import ErrorMessage, IsBootstrappingErrorMessage
    from cassandra.protocol import RequestValidationException as RefusedMessage
    from cassandra.query import BatchStatement, BatchType, tuple_factory
except ImportError as exc:  # this module is imported only when such an address is opened
    raise InvalidError("cql catalog is not installed: pip install 'tidelog[scylla]'") from exc


_CONNECT_TIMEOUT_S = 3.0  # for one host; a server in another region accepts well within this
_REQUEST_TIMEOUT_S = 6.0  # a little more than the servers' own limits, so that they reply first
_IDLE_S = 3  # whole seconds: a connection that is silent for longer is tested, also below requests
_IDLE_TIMEOUT_S = 4  # and replaced if it does not answer, while ``update`` still retries
_RECONNECT_BASE_S = 0.1  # a lost connection is restored while ``update`` still retries
_RECONNECT_MAX_S = 10.0
_TOO_MANY_TOMBSTONES = 0x0001  # a replica's reason for a failed read
_SERIAL = "serial"  # the execution profile of serial reads
_MISSING = re.compile(r"does not exist|doesn't exist|unconfigured table")

DRIVER_ERRORS = (cassandra.DriverException, ConnectionException, ErrorMessage, NoHostAvailable)


class TombstonesError(Exception):
    """A range has more deleted rows than the server will skip in one read."""


@dataclass(frozen=True, slots=True)
class CqlSession:
    """Connections and prepared statements of the process ``pid``, and of no other."""

    pid: int
    place: CqlAddress
    cluster: Any
    session: Any
    statements: dict[str, Any]

    def read_serially(self, name: str, values: Sequence[object]) -> tuple[Any, ...] | None:
        """Returns the one row that a statement finds, as the last decided write left it."""
        bound = self.statements[name].bind(values)
        try:
            row: tuple[Any, ...] | None = self.session.execute(
                bound, execution_profile=_SERIAL
            ).one()
        except DRIVER_ERRORS as exc:
            raise _read_error(self.place, exc) from exc
        return row

    def read_page(self, name: str, values: Sequence[object]) -> tuple[list[Any], bool]:
        """Returns the first rows that a statement finds, and whether the server has more."""
        bound = self.statements[name].bind(values)
        try:
            reply = self.session.execute(bound)
            # Scylla ends a page when it has read enough, even if it found nothing.
            while not reply.current_rows and reply.has_more_pages:
                reply.fetch_next_page()
        except cassandra.ReadFailure as exc:
            if _may_be_tombstones(exc):
                raise TombstonesError(str(exc)) from exc
            raise _read_error(self.place, exc) from exc
        except DRIVER_ERRORS as exc:
            raise _read_error(self.place, exc) from exc
        return list(reply.current_rows), bool(reply.has_more_pages)

    def write(self, changes: Sequence[tuple[str, Sequence[object]]]) -> list[dict[str, Any]]:
        """Runs conditional statements as one; returns the reply's rows, by column."""
        bound = [self.statements[name].bind(values) for name, values in changes]
        request = bound[0]
        if len(bound) > 1:
            request = BatchStatement(BatchType.UNLOGGED)
            for each in bound:
                request.add(each)
        try:
            reply = self.session.execute(request)
            return [dict(zip(reply.column_names, each, strict=True)) for each in reply]
        except DRIVER_ERRORS as exc:
            raise _write_error(self.place, exc) from exc

    def close(self) -> None:
        """Closes the connections; in a child of the process that made them, leaves them alone."""
        if self.pid == os.getpid():
            self.cluster.shutdown()


def open_session(place: CqlAddress, create: bool) -> CqlSession:
    """Connects, checks the table, and prepares the statements."""
    try:
        cluster = _cluster(place)
    except cassandra.UnresolvableContactPoints as exc:
        raise UnavailableError(
            f"catalog table `{place.label}`: no address is known for {', '.join(place.hosts)}: "
            "check the hosts' names and the network",
            table=place.label,
        ) from exc
    ready = False
    try:
        session = cluster.connect()
        session.use_client_timestamp = False  # the ballots of conditional writes are the only clock
        ensure_table(place, cluster, session, create)
        statements = {name: session.prepare(text) for name, text in statements_of(place).items()}
        ready = True
    except DRIVER_ERRORS as exc:
        if _says_missing(exc):  # the server lists a table that is being created before it knows it
            raise unready_error(place) from exc
        what = f"catalog table `{place.label}`"
        error = _datacenter_error(place, cluster) or tls_error(what, place.hosts, cluster, exc)
        raise error or _read_error(place, exc) from exc
    finally:
        if not ready:
            cluster.shutdown()
    return CqlSession(os.getpid(), place, cluster, session, statements)


def _cluster(place: CqlAddress) -> Any:
    def profile(consistency: int) -> Any:
        nearest = DCAwareRoundRobinPolicy(place.datacenter or "")
        return ExecutionProfile(
            load_balancing_policy=TokenAwarePolicy(nearest),
            retry_policy=FallthroughRetryPolicy(),
            consistency_level=consistency,
            serial_consistency_level=cassandra.ConsistencyLevel.SERIAL,
            request_timeout=_REQUEST_TIMEOUT_S,
            row_factory=tuple_factory,
        )

    login = None
    if place.username is not None:
        login = PlainTextAuthProvider(place.username, place.password)
    return Cluster(
        place.hosts,
        port=place.port,
        auth_provider=login,
        ssl_context=tls_context(f"catalog table `{place.label}`", place.tls),
        compression=False,
        connect_timeout=_CONNECT_TIMEOUT_S,
        control_connection_timeout=_CONNECT_TIMEOUT_S,
        idle_heartbeat_interval=_IDLE_S,
        idle_heartbeat_timeout=_IDLE_TIMEOUT_S,
        reconnection_policy=ExponentialReconnectionPolicy(_RECONNECT_BASE_S, _RECONNECT_MAX_S),
        execution_profiles={
            EXEC_PROFILE_DEFAULT: profile(cassandra.ConsistencyLevel.QUORUM),
            _SERIAL: profile(cassandra.ConsistencyLevel.SERIAL),
        },
    )


# Errors of the driver.


def _datacenter_error(place: CqlAddress, cluster: Any) -> InvalidError | None:
    """Returns the error if servers were found, but none in the requested datacenter."""
    found = {host.datacenter for host in cluster.metadata.all_hosts()} - {None}
    if place.datacenter is None or not found or place.datacenter in found:
        return None
    return InvalidError(
        f"catalog table `{place.label}`: the cluster has no datacenter `{place.datacenter}`: "
        f"give one of {', '.join(sorted(found))}",
        table=place.label,
    )


def tls_error(what: str, hosts: Sequence[str], cluster: Any, exc: Exception) -> InvalidError | None:
    """Returns the error if no server could be reached because of TLS."""
    causes = causes_of(exc).values()
    if not isinstance(exc, NoHostAvailable) or any(map(_is_login, causes)):
        return None
    trouble = handshake_trouble(hosts, cluster.port, cluster.ssl_context)
    return InvalidError(f"{what}: {trouble}") if trouble else None


def _read_error(place: CqlAddress, exc: Exception) -> TidelogError:
    return _lasting_error(place, exc) or UnavailableError(
        f"catalog table `{place.label}`: {','.join(place.hosts)} port {place.port} cannot be "
        f"reached or cannot answer: {reason_of(exc)}: see that the servers are up, then try again",
        table=place.label,
    )


def _write_error(place: CqlAddress, exc: Exception) -> Exception:
    error = _read_error(place, exc)
    if not isinstance(error, UnavailableError) or _never_began(exc):
        return error
    return LostReplyError(str(error))


def _never_began(exc: Exception) -> bool:
    """Returns whether a write that failed like this changed nothing, now and later."""
    if isinstance(exc, cassandra.Unavailable):
        # At the serial level consensus did not begin. At another it may have been reached: the
        # coordinator looks for a quorum once more before it commits what was accepted.
        return bool(cassandra.ConsistencyLevel.is_serial(exc.consistency))
    return isinstance(exc, NoHostAvailable | IsBootstrappingErrorMessage)


def _lasting_error(place: CqlAddress, exc: Exception) -> TidelogError | None:
    """Returns the error if a retry will not help; None if it may."""
    if any(map(_is_login, causes_of(exc).values())):
        return InvalidError(
            f"catalog table `{place.label}`: the server refuses the login: {reason_of(exc)}: "
            "set TIDELOG_CQL_USERNAME and TIDELOG_CQL_PASSWORD to one that it knows",
            table=place.label,
        )
    if isinstance(exc, cassandra.Unauthorized):
        return InvalidError(
            f"catalog table `{place.label}`: this login may not do that: {reason_of(exc)}: "
            "grant it SELECT and MODIFY on the table, and CREATE to make it",
            table=place.label,
        )
    if _says_missing(exc):
        return missing_error(place)
    if not _refused(exc) or isinstance(exc, cassandra.RateLimitReached):
        return None
    return InvalidError(
        f"catalog table `{place.label}`: the server refuses the request: {reason_of(exc)}",
        table=place.label,
    )


def _is_login(cause: object) -> bool:
    return isinstance(cause, cassandra.AuthenticationFailed)


def _says_missing(exc: Exception) -> bool:
    return _refused(exc) and _MISSING.search(str(exc)) is not None


def _refused(exc: Exception) -> bool:
    return isinstance(exc, cassandra.RequestValidationException | RefusedMessage)


def _may_be_tombstones(exc: Any) -> bool:
    """Returns whether deleted rows may have failed a read; older protocols do not say why."""
    return exc.error_code_map is None or _TOO_MANY_TOMBSTONES in exc.error_code_map.values()


def causes_of(exc: Exception) -> dict[str, object]:
    """Returns what went wrong, by host; the driver has a list of hosts if it tried none."""
    if isinstance(exc, NoHostAvailable) and isinstance(exc.errors, dict):
        return {str(host): error for host, error in exc.errors.items()} or {"": "no connection"}
    return {"": exc}


def reason_of(exc: Exception) -> str:
    """Returns why a request failed, in one line."""
    causes = [f"{host} {cause}".strip() for host, cause in causes_of(exc).items()]
    return " ".join("; ".join(causes).split())
