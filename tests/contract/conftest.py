"""What several contract suites share: one catalog on Cassandra."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.cassandra import Cassandra
from tests.support.cql_tables import new_name, open_table, url_of
from tidelog.catalog.cql import CqlCatalog


@pytest.fixture(scope="session")
def cql_catalog(cassandra_server: Cassandra) -> Iterator[CqlCatalog]:
    url = url_of(cassandra_server, new_name("Contract"))
    open_table(url, create=True).close()
    catalog = open_table(url)
    yield catalog
    catalog.close()
