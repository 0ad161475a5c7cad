"""Reading a change log from nodes of one's own: one that dies, and one that asks for rights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.connectors.scylla.test_source import fill
from tests.servers.cassandra import running
from tests.servers.scylla_play import Row
from tests.support.scylla_reads import START_MS, a_play, at, opened, read_all
from tidelog import Event
from tidelog.clock import SystemClock
from tidelog.connectors.scylla.session import close_sessions
from tidelog.connectors.source import SourceRange
from tidelog.errors import InvalidError, UnavailableError

RIGHTS = """
authenticator: PasswordAuthenticator
authorizer: CassandraAuthorizer
permissions_validity: 0ms
roles_validity: 0ms
"""


@pytest.fixture(autouse=True)
def _no_session_outlives_its_server() -> Iterator[None]:
    yield
    close_sessions()


@pytest.mark.long
@pytest.mark.server
def test_a_node_that_dies_is_told_and_reading_goes_on_when_it_is_back() -> None:
    with running() as server, a_play(server) as play:
        fill(play, 20)
        source = opened(play.url(), at(5))
        bounds = source.bounds(source.partitions())
        server.process.kill()
        partition, held = next(iter(bounds.items()))
        with pytest.raises(UnavailableError, match="see that the servers are up"):
            list(source.read(SourceRange(partition, held.first, held.end)))
        server.process.restart()
        for _ in range(60):
            try:
                found = read_all(source)
                break
            except UnavailableError:
                SystemClock().sleep(0.5)
        assert len(found) == 20


@pytest.mark.long
@pytest.mark.server
def test_wrong_rights_are_told_and_nothing_is_lost_by_them() -> None:
    with running(RIGHTS) as server, a_play(server, login=("cassandra",) * 2) as play:
        play.write(START_MS + 1_000, Row("insert", "r", 1, {"state": "x"}))
        play.session.execute("CREATE ROLE reader WITH LOGIN = true AND PASSWORD = 'right'")

        def reads(password: str = "right") -> list[Event]:
            login = {"TIDELOG_SCYLLA_USERNAME": "reader", "TIDELOG_SCYLLA_PASSWORD": password}
            return read_all(opened(play.url(), at(5), login))

        with pytest.raises(InvalidError, match=r"refuses the login.*TIDELOG_SCYLLA_PASSWORD"):
            reads("wrong")
        with pytest.raises(InvalidError, match=r"may not read it.*grant it SELECT"):
            reads()
        play.session.execute(f"GRANT SELECT ON KEYSPACE {play.keyspace} TO reader")
        assert len(reads()) == 1
        play.session.execute(f"REVOKE SELECT ON KEYSPACE {play.keyspace} FROM reader")
        with pytest.raises(InvalidError, match=r"may not read it.*grant it SELECT"):
            reads()
        play.session.execute(f"GRANT SELECT ON KEYSPACE {play.keyspace} TO reader")
        assert len(reads()) == 1
