"""A session on the cluster whose change log is read, and the meaning of its errors.

Each process has one session for each table, because connecting takes longer than reading a window.
Rows of the table and its log stay bytes, which ``types`` decodes; the driver decodes others.
Neither the driver nor this module retries: the reader reads the range again.

The address of the source says which change log to read, and how.
"""

from __future__ import annotations

import os
import re
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import msgspec

from tidelog.catalog.cql_session import DRIVER_ERRORS, causes_of, reason_of, tls_error
from tidelog.catalog.cql_tls import TLS_OPTIONS, CqlTls, parse_tls, tls_context, tls_options
from tidelog.errors import InvalidError, NotFoundError, TidelogError, UnavailableError
from tidelog.model.address import Address, format_address
from tidelog.model.decoding import decode_json
from tidelog.model.event import to_iso
from tidelog.model.times import duration_ms, moment_ms

__all__ = [
    "SAFE_LAG_MS",
    "WIDTH_MS_MAX",
    "ScyllaAddress",
    "ScyllaOptions",
    "ScyllaSession",
    "StatementPages",
    "StreamAwarePolicy",
    "close_sessions",
    "format_scylla",
    "parse_scylla",
    "session_of",
]

SAFE_LAG_MS = 30_000  # changes by skewed clocks and slow writes arrive within this
_GROUPS_MAX = 4_096
_OPTIONS = (
    "consistency",
    "datacenter",
    "generations",
    "groups",
    "key_column",
    "key_lookup",
    "lag",
    "mode",
    "of",
    "start",
    "type_column",
    "window",
    *TLS_OPTIONS,
)
_LEVELS = ("one", "two", "three", "quorum", "all", "local_quorum", "local_one")
_LAGS_MS = {"safe": SAFE_LAG_MS, "fast": 1_000, "sweep": 60_000}


@dataclass(frozen=True, slots=True)
class ScyllaAddress:
    """The servers, the table and the user."""

    hosts: tuple[str, ...]
    port: int
    keyspace: str
    table: str
    datacenter: str | None
    consistency: str
    generations: str | None  # keyspace of the tables of generations; None: the cluster's own
    username: str | None
    password: str | None = field(repr=False)
    tls: CqlTls | None = None

    @property
    def label(self) -> str:
        """Returns the name of the table for messages."""
        return f"{self.keyspace}.{self.table}"

    @property
    def log_table(self) -> str:
        """Returns the table of the change log."""
        return f"{self.table}_scylla_cdc_log"


@dataclass(frozen=True, slots=True)
class ScyllaOptions:
    """How to read the log; plain values."""

    mode: Literal["safe", "fast", "sweep"] = "safe"
    lag_ms: int | None = SAFE_LAG_MS  # None: shortly before the log's rows expire
    groups: int = 16  # source partitions
    # Where a new pipeline begins; or a time in ms.
    start: Literal["oldest", "first"] | int = "oldest"
    of: tuple[str, ...] = ()  # pipelines whose changes a sweep skips
    type_column: str | None = None
    key_column: str | None = None
    window_ms: int | None = None  # the widest window of a read; None: as wide as its rows allow
    key_lookup: str | None = None  # the same, but read from the base table if the log lacks it

    @property
    def remembers(self) -> bool:
        """Returns whether each range notes its changes, for a sweep after it."""
        return self.mode != "safe"


def parse_scylla(
    address: Address, environ: Mapping[str, str], now_ms: int
) -> tuple[ScyllaAddress, ScyllaOptions]:
    """Parses an address into place and way. Raises ``InvalidError``."""
    options = address.take_options(_OPTIONS)
    consistency = options.get("consistency", "quorum").lower()
    if consistency not in _LEVELS:
        raise _wrong(address, f"consistency `{consistency}`: give one of {', '.join(_LEVELS)}")
    username, password = (
        environ.get(f"TIDELOG_SCYLLA_{name}") for name in ("USERNAME", "PASSWORD")
    )
    if (username is None) != (password is None):
        raise _wrong(
            address,
            "only one of TIDELOG_SCYLLA_USERNAME and TIDELOG_SCYLLA_PASSWORD is set: set both or "
            "none",
        )
    keyspace, table = _table(address)
    generations = options.get("generations")
    if generations is not None:
        _check_name(address, "generations", generations)
    place = ScyllaAddress(
        _hosts(address),
        address.port or 9042,
        keyspace,
        table,
        options.get("datacenter"),
        consistency,
        generations,
        username,
        password,
        parse_tls(f"source `{address.text}`", options, environ, "TIDELOG_SCYLLA_"),
    )
    return place, _way(address, options, now_ms)


def format_scylla(place: ScyllaAddress, way: ScyllaOptions) -> str:
    """Returns the address of both, without login and with absolute times."""
    options = {
        "consistency": place.consistency,
        "datacenter": place.datacenter,
        "generations": place.generations,
        "groups": str(way.groups),
        "mode": way.mode,
        "lag": "last" if way.lag_ms is None else f"{way.lag_ms}ms",
        "start": to_iso(way.start) if isinstance(way.start, int) else way.start,
        "of": ",".join(way.of) or None,
        "type_column": way.type_column,
        "key_column": way.key_column,
        "key_lookup": way.key_lookup,
        "window": None if way.window_ms is None else f"{way.window_ms}ms",
        **tls_options(place.tls),
    }
    defaults = {"consistency": "quorum", "groups": "16", "mode": "safe", "start": "oldest"}
    said = {
        name: text
        for name, text in options.items()
        if text is not None and defaults.get(name) != text
    }
    if way.lag_ms == _LAGS_MS[way.mode]:
        del said["lag"]
    hosts = ",".join(f"[{host}]" if ":" in host else host for host in place.hosts)
    return format_address("scylla", f"{hosts}:{place.port}", f"/{place.label}", said)


def _way(address: Address, options: Mapping[str, str], now_ms: int) -> ScyllaOptions:
    mode = options.get("mode", "safe")
    if mode not in _LAGS_MS:
        raise _wrong(address, f"mode `{mode}`: give safe, fast or sweep")
    of = tuple(filter(None, options.get("of", "").split(",")))
    if bool(of) != (mode == "sweep"):
        raise _wrong(
            address,
            "mode=sweep and of=PIPELINE[,PIPELINE] belong together: a sweep adds what those "
            "pipelines have missed",
        )
    for name in ("type_column", "key_column", "key_lookup"):
        if name in options:
            _check_name(address, name, options[name])
    if "key_column" in options and "key_lookup" in options:
        raise _wrong(address, "key_column and key_lookup contradict each other: give one of them")
    return ScyllaOptions(
        mode=mode,  # type: ignore[arg-type]
        lag_ms=_lag_ms(address, options.get("lag"), mode),
        groups=_groups(address, options.get("groups", "16")),
        start=_start(address, options.get("start", "oldest"), now_ms),
        of=of,
        type_column=options.get("type_column"),
        key_column=options.get("key_column"),
        key_lookup=options.get("key_lookup"),
        window_ms=_window_ms(address, options.get("window")),
    )


def _window_ms(address: Address, text: str | None) -> int | None:
    if text is None:
        return None
    window_ms = duration_ms(text)
    if window_ms < 1:
        raise _wrong(address, "window is 0: give a duration, such as 1s")
    return window_ms


def _lag_ms(address: Address, text: str | None, mode: str) -> int | None:
    if text is None:
        return _LAGS_MS[mode]
    if text == "last":
        if mode != "sweep":
            raise _wrong(address, "lag=last is for a sweep: add mode=sweep, or give a duration")
        return None
    lag_ms = duration_ms(text)
    if lag_ms < 1:
        raise _wrong(
            address,
            "lag is 0: changes land after their own time, and would be missed: give 30s, or 1s "
            "with mode=fast and a sweep behind it",
        )
    return lag_ms


def _groups(address: Address, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= _GROUPS_MAX):
        raise _wrong(address, f"groups `{text}`: give a number from 1 to {_GROUPS_MAX}")
    return int(text)


def _start(address: Address, text: str, now_ms: int) -> Literal["oldest", "first"] | int:
    if text in ("oldest", "first"):
        return text  # type: ignore[return-value]
    if not text.startswith("{"):
        return moment_ms(text, now_ms)
    try:
        cursor = decode_json(text, _EventId).cursor_time
    except msgspec.MsgspecError as exc:
        raise _wrong(address, f"start is not a valid event id: {exc}: give the whole id") from exc
    return moment_ms(cursor, now_ms) // 1000 * 1000


class _EventId(msgspec.Struct):
    """The id of a change, of which a start needs the time."""

    cursor_time: str


def _table(address: Address) -> tuple[str, str]:
    keyspace, _, table = address.path.removeprefix("/").partition(".")
    for what, name in (("keyspace", keyspace), ("table", table)):
        if not re.fullmatch(r"[A-Za-z0-9_]{1,48}", name):
            raise _wrong(
                address,
                f"`{name}` is not a valid {what} name: give scylla://host:9042/keyspace.table",
            )
    if table.endswith("_scylla_cdc_log"):
        raise _wrong(address, "names the change log itself: give the table that it belongs to")
    return keyspace, table


def _hosts(address: Address) -> tuple[str, ...]:
    hosts = tuple(address.host.split(","))
    if not all(re.fullmatch(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+", host) for host in hosts):
        raise _wrong(
            address,
            f"`{address.host}` names no hosts: give scylla://host1,host2:9042/keyspace.table, "
            "with one port for all",
        )
    return tuple(host.strip("[]") for host in hosts)


def _check_name(address: Address, what: str, name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_]{1,48}", name):
        raise _wrong(address, f"{what} `{name}`: give 1 to 48 letters, digits and underscores")


def _wrong(address: Address, what: str) -> InvalidError:
    return InvalidError(f"source `{address.text}`: {what}")


try:
    import cassandra
    from cassandra import protocol
    from cassandra.auth import PlainTextAuthProvider
    from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile
    from cassandra.cqltypes import BytesType
    from cassandra.metadata import Murmur3Token
    from cassandra.policies import (
        DCAwareRoundRobinPolicy,
        ExponentialReconnectionPolicy,
        FallthroughRetryPolicy,
    )
    from cassandra.query import tuple_factory
except ImportError as exc:  # this module is imported only to open such an address
    raise InvalidError("scylla source is not installed: pip install 'tidelog[scylla]'") from exc


_CONNECT_TIMEOUT_S = 15.0
_REQUEST_TIMEOUT_S = 30.0  # of one page; servers time out earlier
_IDLE_S = 5  # a connection that is silent for longer is tested, and replaced if that fails
_IDLE_TIMEOUT_S = 5
_PAGE_ROWS = 5_000
WIDTH_MS_MAX = 400 * 86_400_000  # of a window

_FastResult: Any = protocol.ProtocolHandler.message_types_by_opcode[protocol.ResultMessage.opcode]


def _handler(place: ScyllaAddress) -> Any:
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

    def __init__(
        self, session: ScyllaSession, statement: Any, values: Sequence[object], near: bytes | None
    ) -> None:
        self._session = session
        self._future = session.send(statement, values, near)

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

    def __init__(self, place: ScyllaAddress) -> None:
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

    def pages(
        self, statement: Any, values: Sequence[object], near: bytes | None = None
    ) -> StatementPages:
        """Sends a statement, to a server that holds the stream ``near`` if there is one.

        Waits for its pages when they are used.
        """
        return StatementPages(self, statement, values, near)

    def send(self, statement: Any, values: Sequence[object], near: bytes | None = None) -> Any:
        """Returns the driver's future of a statement."""
        try:
            bound = statement.bind(values)
            bound.near = near
            return self._session.execute_async(bound)
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


_sessions: dict[tuple[int, ScyllaAddress], ScyllaSession] = {}
_opening = threading.Lock()


def session_of(place: ScyllaAddress) -> ScyllaSession:
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


class StreamAwarePolicy(DCAwareRoundRobinPolicy):  # type: ignore[misc]
    """Asks a server that holds the streams of a statement, then the others of the datacenter.

    The driver's own policy hashes a partition key. The partition of a change log is a stream, whose
    id begins with its token: streams of a vnode are together on the same servers.
    """

    def populate(self, cluster: Any, hosts: Any) -> None:
        self._metadata = cluster.metadata
        super().populate(cluster, hosts)

    def make_query_plan(self, working_keyspace: Any = None, query: Any = None) -> Iterator[Any]:
        hosts = list(super().make_query_plan(working_keyspace, query))
        near = getattr(query, "near", None)
        first = None if near is None else self._holder(near, hosts)
        if first is not None:
            yield first
        yield from (host for host in hosts if host is not first)

    def _holder(self, stream: bytes, hosts: Sequence[Any]) -> Any | None:
        """Returns the first of these hosts after the stream's token: it has a replica."""
        ring = getattr(self._metadata.token_map, "ring", None) or ()
        owners = getattr(self._metadata.token_map, "token_to_host_owner", {})
        token = Murmur3Token(int.from_bytes(stream[:8], "big", signed=True))
        begin = bisect_left(ring, token)
        around = (owners.get(ring[(begin + step) % len(ring)]) for step in range(len(ring)))
        return next((host for host in around if host in hosts), None)


def _cluster(place: ScyllaAddress) -> Any:
    login = None
    if place.username is not None:
        login = PlainTextAuthProvider(place.username, place.password)
    profile = ExecutionProfile(
        load_balancing_policy=StreamAwarePolicy(place.datacenter or ""),
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
        idle_heartbeat_interval=_IDLE_S,
        idle_heartbeat_timeout=_IDLE_TIMEOUT_S,
        reconnection_policy=ExponentialReconnectionPolicy(0.1, 10.0),
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
        schema_metadata_enabled=False,  # we only ask for the one table we read
        token_metadata_enabled=True,  # so that streams are read where they are
    )
