"""A session on the cluster whose change log is read, and the meaning of its errors.

Each process has one session for each table, because connecting takes longer than reading a window.
Rows of the table and its log stay bytes, which ``types`` decodes; the driver decodes others.
Neither the driver nor this module retries: the reader reads the range again.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from tidelog.catalog.cql_session import DRIVER_ERRORS, causes_of, reason_of, tls_error
from tidelog.catalog.cql_tls import tls_context
from tidelog.connectors.scylla.address import ScyllaPlace
from tidelog.errors import InvalidError, NotFoundError, TidelogError, UnavailableError

try:
    import cassandra
    from cassandra import protocol
    from cassandra.auth import PlainTextAuthProvider
    from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile
    from cassandra.cqltypes import BytesType
    from cassandra.policies import (
        DCAwareRoundRobinPolicy,
        ExponentialReconnectionPolicy,
        FallthroughRetryPolicy,
    )
    from cassandra.query import tuple_factory
except ImportError as exc:  # this module is imported only to open such an address
    raise InvalidError("scylla source is not installed: pip install 'tidelog[scylla]'") from exc

__all__ = ["WIDTH_MS_MAX", "ScyllaSession", "StatementPages", "close_sessions", "session_of"]

_CONNECT_TIMEOUT_S = 15.0
_REQUEST_TIMEOUT_S = 30.0  # of one page; servers time out earlier
_PAGE_ROWS = 5_000
WIDTH_MS_MAX = 400 * 86_400_000  # of a window

_FastResult: Any = protocol.ProtocolHandler.message_types_by_opcode[protocol.ResultMessage.opcode]


def _handler(place: ScyllaPlace) -> Any:
    """Returns the driver's protocol, except that rows of the table and its log stay bytes."""
    ours = {(place.keyspace, place.table), (place.keyspace, place.log_table)}

    def as_bytes(metadata: Sequence[Any]) -> list[Any]:
        return [
            (keyspace, table, name, BytesType if (keyspace, table) in ours else kind)
            for keyspace, table, name, kind in metadata
        ]

    class Result(_FastResult):  # type: ignore[misc]
        column_metadata: Any
        kind: int

        def recv_results_metadata(self, f: Any, user_type_map: Any) -> None:
            super().recv_results_metadata(f, user_type_map)
            if self.kind == protocol.RESULT_KIND_ROWS and self.column_metadata:
                self.column_metadata = as_bytes(self.column_metadata)

        def recv_results_rows(
            self, f: Any, version: Any, user_type_map: Any, known: Any, encryption: Any
        ) -> None:
            known = as_bytes(known) if known else known
            super().recv_results_rows(f, version, user_type_map, known, encryption)

    class Handler(protocol.ProtocolHandler):  # type: ignore[misc]
        message_types_by_opcode: ClassVar = {
            **protocol.ProtocolHandler.message_types_by_opcode,
            Result.opcode: Result,
        }

    return Handler


class StatementPages:
    """A statement that was sent. Fetches the next page while one is in use."""

    def __init__(self, session: ScyllaSession, statement: Any, values: Sequence[object]) -> None:
        self._session = session
        self._future = session.send(statement, values)

    def __iter__(self) -> Iterator[list[tuple[bytes | None, ...]]]:
        while True:
            try:
                reply = self._future.result()
                rows, more = reply.current_rows, reply.has_more_pages
                if more:
                    self._future.start_fetching_next_page()
            except DRIVER_ERRORS as exc:
                raise self._session.error(exc) from exc
            if rows:
                yield rows
            if not more:
                return


class ScyllaSession:
    """The connections of one process."""

    def __init__(self, place: ScyllaPlace) -> None:
        self.place = place
        self.layout: Any = None  # of the log's rows, as last seen
        self.width_ms = WIDTH_MS_MAX  # of windows, as last used
        self._what = f"change log of `{place.label}`"
        self._prepared: dict[str, Any] = {}
        self._lock = threading.Lock()
        try:
            self._cluster = _cluster(place)
        except cassandra.UnresolvableContactPoints as exc:
            raise UnavailableError(
                f"{self._what}: no address is known for {', '.join(place.hosts)}: check the hosts' "
                "names and the network"
            ) from exc
        try:
            self._session = self._cluster.connect()
        except DRIVER_ERRORS as exc:
            refused = tls_error(self._what, place.hosts, self._cluster, exc)
            error = self._datacenter_error() or refused or self.error(exc)
            self._cluster.shutdown()
            raise error from exc
        self._session.client_protocol_handler = _handler(place)
        self._session.default_fetch_size = _PAGE_ROWS

    @property
    def is_scylla(self) -> bool:
        """Returns whether the servers are Scylla, and not just compatible with CQL."""
        return bool(self._cluster.is_shard_aware())

    def rows(self, text: str, values: Sequence[object] = ()) -> list[Any]:
        """Returns all rows of a statement. Raises Tidelog's errors."""
        try:
            return list(self._session.execute(self.known(text), values))
        except DRIVER_ERRORS as exc:
            raise self.error(exc) from exc

    def known(self, text: str) -> Any:
        """Returns a prepared statement whose result types never change; prepares it once."""
        with self._lock:
            if text not in self._prepared:
                self._prepared[text] = self.prepare(text)
            return self._prepared[text]

    def prepare(self, text: str) -> Any:
        """Prepares a statement again, so that its types are those of the current schema."""
        try:
            return self._session.prepare(text)
        except DRIVER_ERRORS as exc:
            raise self.error(exc) from exc

    def prepare_bytes(self, text: str) -> Any:
        """Does the same for values that are bytes in the server's format."""
        statement = self.prepare(text)
        statement.column_metadata = [
            each._replace(type=BytesType) for each in statement.column_metadata
        ]
        return statement

    def pages(self, statement: Any, values: Sequence[object]) -> StatementPages:
        """Sends a statement. Waits for its pages when they are used."""
        return StatementPages(self, statement, values)

    def send(self, statement: Any, values: Sequence[object]) -> Any:
        """Returns the driver's future of a statement."""
        try:
            return self._session.execute_async(statement, values)
        except DRIVER_ERRORS as exc:
            raise self.error(exc) from exc

    def error(self, exc: Exception) -> TidelogError:
        """Translates an error of the driver."""
        if any(
            isinstance(each, cassandra.AuthenticationFailed) for each in causes_of(exc).values()
        ):
            return InvalidError(
                f"{self._what}: the server refuses the login: {reason_of(exc)}: set "
                "TIDELOG_SCYLLA_USERNAME and TIDELOG_SCYLLA_PASSWORD to one that it knows"
            )
        if isinstance(exc, cassandra.Unauthorized):
            return InvalidError(
                f"{self._what}: this login may not read it: {reason_of(exc)}: grant it SELECT on "
                f"{self.place.keyspace}.{self.place.log_table} and the tables of generations"
            )
        refused = isinstance(
            exc, cassandra.RequestValidationException | protocol.RequestValidationException
        )
        if refused and re.search(r"does not exist|unconfigured table", str(exc)):
            return NotFoundError(f"{self._what}: is gone: {reason_of(exc)}: was the table dropped?")
        if refused and not isinstance(exc, cassandra.RateLimitReached):
            return InvalidError(f"{self._what}: the server refuses the request: {reason_of(exc)}")
        return UnavailableError(
            f"{self._what}: {','.join(self.place.hosts)} port {self.place.port} cannot be reached "
            f"or cannot answer: {reason_of(exc)}: see that the servers are up, then try again"
        )

    def close(self) -> None:
        """Closes the connections."""
        self._cluster.shutdown()

    def _datacenter_error(self) -> InvalidError | None:
        found = {host.datacenter for host in self._cluster.metadata.all_hosts()} - {None}
        if self.place.datacenter is None or not found or self.place.datacenter in found:
            return None
        return InvalidError(
            f"{self._what}: the cluster has no datacenter `{self.place.datacenter}`: give one of "
            f"{', '.join(sorted(found))}"
        )


_sessions: dict[tuple[int, ScyllaPlace], ScyllaSession] = {}
_opening = threading.Lock()


def session_of(place: ScyllaPlace) -> ScyllaSession:
    """Returns the session of this process, and opens it if needed. Raises Tidelog's errors."""
    with _opening:
        known = os.getpid(), place
        if known not in _sessions:
            _sessions[known] = ScyllaSession(place)
        return _sessions[known]


def close_sessions() -> None:
    """Closes all sessions of this process."""
    with _opening:
        for pid, place in list(_sessions):
            session = _sessions.pop((pid, place))
            if pid == os.getpid():
                session.close()


def _cluster(place: ScyllaPlace) -> Any:
    login = None
    if place.username is not None:
        login = PlainTextAuthProvider(place.username, place.password)
    profile = ExecutionProfile(
        load_balancing_policy=DCAwareRoundRobinPolicy(place.datacenter or ""),
        retry_policy=FallthroughRetryPolicy(),
        consistency_level=cassandra.ConsistencyLevel.name_to_value[place.consistency.upper()],
        request_timeout=_REQUEST_TIMEOUT_S,
        row_factory=tuple_factory,
    )
    return Cluster(
        place.hosts,
        port=place.port,
        auth_provider=login,
        ssl_context=tls_context(f"change log of `{place.label}`", place.tls),
        compression=False,
        connect_timeout=_CONNECT_TIMEOUT_S,
        control_connection_timeout=_CONNECT_TIMEOUT_S,
        reconnection_policy=ExponentialReconnectionPolicy(0.1, 10.0),
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
        schema_metadata_enabled=False,  # we only ask for the one table we read
        token_metadata_enabled=False,  # no statement of ours names a single partition
    )
