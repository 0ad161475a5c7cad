"""What Cassandra answers to a request, and what the catalog makes of it."""

from __future__ import annotations

from typing import Any

import cassandra
import pytest
from cassandra.cluster import NoHostAvailable
from cassandra.connection import ConnectionShutdown
from cassandra.protocol import IsBootstrappingErrorMessage, OverloadedErrorMessage, ServerError

from tests.servers.cassandra import Cassandra
from tests.support.cql_tables import ids, new_name, open_table, raw_session, url_of
from tests.support.remote_catalog import opened
from tidelog.catalog.base import ABSENT, Put, Row
from tidelog.catalog.cql import CqlCatalog
from tidelog.errors import (
    ConflictError,
    InvalidError,
    UnavailableError,
    UnknownOutcomeError,
)


class Refusals:
    """Stands in for a session's ``execute``: raises while it has something to raise."""

    def __init__(self, session: Any, *errors: Exception) -> None:
        self.left = list(errors)
        self.execute = session.execute

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.left:
            raise self.left.pop(0)
        return self.execute(*args, **options)


SERIAL, QUORUM = cassandra.ConsistencyLevel.SERIAL, cassandra.ConsistencyLevel.QUORUM
NEVER_BEGAN = [
    cassandra.Unavailable("too few replicas", consistency=SERIAL),
    IsBootstrappingErrorMessage(0x1002, "bootstrapping", None),
    NoHostAvailable("no host", {"host": ConnectionShutdown("gone")}),
]
MAY_HAVE_LANDED = [
    cassandra.Unavailable("too few replicas", consistency=QUORUM),
    cassandra.WriteTimeout("slow", write_type=6, consistency=SERIAL),
    cassandra.WriteFailure("failed", write_type=6, consistency=QUORUM),
    cassandra.OperationTimedOut(),
    ConnectionShutdown("cut"),
    OverloadedErrorMessage(0x1001, "overloaded", None),
    ServerError(0x0000, "a bug", None),
    cassandra.RateLimitReached(cassandra.OperationType.Write, False),
]


def name_of(error: Exception) -> str:
    return type(error).__name__


@pytest.mark.server
@pytest.mark.parametrize("error", NEVER_BEGAN, ids=name_of)
def test_a_write_that_never_began_is_repeated(
    cql_catalog: CqlCatalog, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    partition = ids.new()
    cql_catalog.write(partition, Put("a", b"1"), write_id="w1")
    session = raw_session(cql_catalog)
    refusals = Refusals(session, error, error)
    monkeypatch.setattr(session, "execute", refusals)
    with pytest.raises(ConflictError):
        cql_catalog.write(partition, Put("a", b"2", ABSENT), write_id="w2")
    refusals.left = [error] * 6
    with pytest.raises(UnavailableError):
        cql_catalog.write(partition, Put("a", b"2", ABSENT), write_id="w2")
    refusals.left = [error] * 2
    assert cql_catalog.get(partition, "a") == Row("a", b"1", "w1")


@pytest.mark.server
@pytest.mark.parametrize("error", MAY_HAVE_LANDED, ids=name_of)
def test_a_write_that_may_have_landed_is_settled(
    cql_catalog: CqlCatalog, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    partition = ids.new()
    session = raw_session(cql_catalog)
    refusals = Refusals(session, error)
    monkeypatch.setattr(session, "execute", refusals)
    cql_catalog.write(partition, Put("a", b"1", ABSENT), Put("b", b"", ABSENT), write_id="w1")
    refusals.left = [error]
    with pytest.raises(UnknownOutcomeError):
        cql_catalog.write(partition, Put("a", b"2", ABSENT), write_id="w2")
    refusals.left = [error]
    assert cql_catalog.get(partition, "a") == Row("a", b"1", "w1")
    refusals.left = [error]
    assert [row.row for row in cql_catalog.scan(partition)] == ["a", "b"]


@pytest.mark.server
@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (cassandra.Unauthorized("User me has no MODIFY permission"), "this login may not do that"),
        (cassandra.InvalidRequest("LWT is not supported here"), "refuses the request: LWT is not"),
    ],
    ids=["unauthorized", "invalid"],
)
def test_what_the_server_forbids_is_invalid(
    cql_catalog: CqlCatalog,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    complaint: str,
) -> None:
    session = raw_session(cql_catalog)
    monkeypatch.setattr(session, "execute", Refusals(session, error, error))
    with pytest.raises(InvalidError, match=complaint):
        cql_catalog.get("p", "r")
    with pytest.raises(InvalidError, match=complaint):
        cql_catalog.write("p", Put("r", b""), write_id="w")


@pytest.mark.server
def test_a_failed_read_of_an_older_server_may_be_for_deleted_rows_and_is_cut(
    cql_catalog: CqlCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = ids.new()
    cql_catalog.write(partition, Put("a", b""), Put("b", b""), write_id="w1")
    session = raw_session(cql_catalog)
    silent = cassandra.ReadFailure("failed")
    other = cassandra.ReadFailure("failed", error_code_map={"127.0.0.1": 0x0000})
    refusals = Refusals(session, silent, silent, silent)
    monkeypatch.setattr(session, "execute", refusals)
    assert [row.row for row in cql_catalog.scan(partition)] == ["a", "b"]
    refusals.left = [silent] * 2
    assert [row.row for row in cql_catalog.scan(partition, reverse=True)] == ["b", "a"]
    refusals.left = [other] * 6
    with pytest.raises(UnavailableError, match="cannot answer"):
        list(cql_catalog.scan(partition))


@pytest.mark.server
def test_write_without_a_quorum_names_the_reason(cassandra_server: Cassandra) -> None:
    name = new_name("Quorum")
    catalog = opened(lambda: open_table(url_of(cassandra_server, name), create=True, attempts=2))
    catalog.write("p", Put("a", b"1"), write_id="w1")
    raw_session(catalog).execute(
        f'ALTER KEYSPACE "{name}" WITH replication = '
        "{'class': 'SimpleStrategy', 'replication_factor': 3}",
        timeout=60,
    )
    with pytest.raises(UnavailableError, match="Cannot achieve consistency level"):
        catalog.get("p", "a")
    # At this level the servers may have accepted it: "nothing was written" would be a guess.
    with pytest.raises(UnknownOutcomeError, match="Cannot achieve consistency level"):
        catalog.write("p", Put("a", b"2", expect="w1"), write_id="w2")
    catalog.close()
