"""Catalogs on a Cassandra server of the tests: opened, named and looked into."""

from __future__ import annotations

from typing import Any

from tests.servers.cassandra import Cassandra
from tidelog.catalog.cql import CqlCatalog, open_cql
from tidelog.catalog.update import Repeat
from tidelog.clock import RandomIds, SystemClock, system_random
from tidelog.model.address import parse_address
from tidelog.model.times import Backoff

__all__ = ["ids", "new_name", "open_table", "raw_session", "url_of"]

ids = RandomIds()


def open_table(url: str, create: bool = False, attempts: int = 6, **environ: str) -> CqlCatalog:
    repeat = Repeat(SystemClock(), system_random(), Backoff(attempts=attempts))
    return open_cql(parse_address(url), create=create, repeat=repeat, environ=environ)


def url_of(server: Cassandra, keyspace: str, port: int | None = None) -> str:
    return f"cql://{server.host}:{port or server.port}/{keyspace}"


def new_name(prefix: str) -> str:
    return f"{prefix}_{ids.new()[:12]}"


def raw_session(catalog: CqlCatalog) -> Any:
    session = catalog._session
    assert session is not None
    return session.session
