"""Parses the address of the ``scylla`` source: which change log to read, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tidelog.catalog.cql_tls import TLS_OPTIONS, CqlTls, parse_tls, tls_options
from tidelog.errors import InvalidError
from tidelog.model.address import Address, format_address
from tidelog.model.event import to_iso
from tidelog.model.times import duration_ms, moment_ms

__all__ = ["SAFE_LAG_MS", "ScyllaPlace", "ScyllaWay", "format_scylla", "parse_scylla"]

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
    *TLS_OPTIONS,
)
_LEVELS = ("one", "two", "three", "quorum", "all", "local_quorum", "local_one")
_LAGS_MS = {"safe": SAFE_LAG_MS, "fast": 1_000, "sweep": 60_000}


@dataclass(frozen=True, slots=True)
class ScyllaPlace:
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
class ScyllaWay:
    """How to read the log; plain values."""

    mode: Literal["safe", "fast", "sweep"] = "safe"
    lag_ms: int | None = SAFE_LAG_MS  # None: shortly before the log's rows expire
    groups: int = 16  # source partitions
    # Where a new pipeline begins; or a time in ms.
    start: Literal["oldest", "first"] | int = "oldest"
    of: tuple[str, ...] = ()  # pipelines whose changes a sweep skips
    type_column: str | None = None
    key_column: str | None = None
    key_lookup: str | None = None  # the same, but read from the base table if the log lacks it

    @property
    def remembers(self) -> bool:
        """Returns whether each range notes its changes, for a sweep after it."""
        return self.mode != "safe"


def parse_scylla(
    address: Address, environ: Mapping[str, str], now_ms: int
) -> tuple[ScyllaPlace, ScyllaWay]:
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
    place = ScyllaPlace(
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


def format_scylla(place: ScyllaPlace, way: ScyllaWay) -> str:
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


def _way(address: Address, options: Mapping[str, str], now_ms: int) -> ScyllaWay:
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
    return ScyllaWay(
        mode=mode,  # type: ignore[arg-type]
        lag_ms=_lag_ms(address, options.get("lag"), mode),
        groups=_groups(address, options.get("groups", "16")),
        start=_start(options.get("start", "oldest"), now_ms),
        of=of,
        type_column=options.get("type_column"),
        key_column=options.get("key_column"),
        key_lookup=options.get("key_lookup"),
    )


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


def _start(text: str, now_ms: int) -> Literal["oldest", "first"] | int:
    if text in ("oldest", "first"):
        return text  # type: ignore[return-value]
    return moment_ms(text, now_ms)


def _table(address: Address) -> tuple[str, str]:
    keyspace, _, table = address.path.removeprefix("/").partition(".")
    for what, name in (("keyspace", keyspace), ("table", table)):
        if not re.fullmatch(r"[A-Za-z0-9_]{1,48}", name):
            raise _wrong(
                address,
                f"`{name}` is no {what}'s name: give scylla://host:9042/keyspace.table",
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
