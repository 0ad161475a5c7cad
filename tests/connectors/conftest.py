"""What the tests of sources share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.cassandra import Cassandra
from tests.servers.scylla_play import Play
from tests.support.scylla_reads import a_play
from tidelog.connectors.scylla.session import close_sessions


@pytest.fixture(scope="module")
def no_session_outlives_its_server() -> Iterator[None]:
    """For modules that read a change log: a session stays open for who reads it next."""
    yield
    close_sessions()


@pytest.fixture
def play(cassandra_server: Cassandra) -> Iterator[Play]:
    """A played change log with one generation."""
    with a_play(cassandra_server) as made:
        yield made
