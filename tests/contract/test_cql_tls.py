"""CQL over TLS: the catalog's contract, a change log, and every way in which a handshake fails."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.servers.base import HOST
from tests.servers.cassandra import Cassandra
from tests.servers.scylla_play import Row
from tests.support import scylla_reads as scylla_reading
from tests.support.certificates import Certificates, make_certificates
from tests.support.cql_tables import new_name, open_table, url_of
from tests.support.faults import FaultPlan
from tests.support.proxy import StreamProxy
from tests.support.remote_catalog import opened
from tests.support.scylla_reads import START_MS, a_play, at, identity, read_all
from tidelog.catalog.base import Catalog
from tidelog.catalog.cql import CqlCatalog
from tidelog.catalog.cql_tls import CqlTls, handshake_trouble, parse_tls, tls_context
from tidelog.connectors.scylla.session import close_sessions, format_scylla, parse_scylla
from tidelog.errors import InvalidError
from tidelog.model.address import parse_address
from tidelog.testing.catalog_contract import CatalogContract


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def keyspace(cassandra_server: Cassandra) -> str:
    name = new_name("Tls")
    opened(lambda: open_table(url_of(cassandra_server, name), create=True)).close()
    return name


@pytest.fixture(scope="module")
def shared(
    cassandra_server: Cassandra, keyspace: str, certificates: Certificates
) -> Iterator[CqlCatalog]:
    with tls_port(cassandra_server, certificates.context) as port:
        url = secure_url(port, keyspace, authority=certificates.authority)
        catalog = opened(lambda: open_table(url))
        yield catalog
        catalog.close()


@contextlib.contextmanager
def tls_port(server: Cassandra, context: ssl.SSLContext) -> Iterator[int]:
    """A port of the server that speaks TLS."""
    proxy = StreamProxy(server.host, server.port, FaultPlan(), context)
    try:
        yield proxy.port
    finally:
        proxy.close()


def secure_url(port: int, keyspace: str, **files: Path | str) -> str:
    names = {
        "authority": "ssl.ca.location",
        "certificate": "ssl.certificate.location",
        "key": "ssl.key.location",
        "check": "ssl.endpoint.identification.algorithm",
    }
    options = {names[name]: str(text) for name, text in files.items()}
    return f"cql://{HOST}:{port}/{keyspace}?{urlencode({'security.protocol': 'ssl', **options})}"


def refusal(url: str) -> str:
    """The one line that an address is refused with."""
    with pytest.raises(InvalidError) as told:
        open_table(url)
    assert "\n" not in str(told.value)
    return str(told.value)


@pytest.mark.server
@pytest.mark.long
class TestCqlCatalogOverTls(CatalogContract):
    increments_each = 5
    deleted_rows = 2_000

    @pytest.fixture
    def catalog(self, shared: CqlCatalog) -> Catalog:
        return shared


@pytest.mark.server
def test_change_log_is_read_over_tls(
    cassandra_server: Cassandra, certificates: Certificates
) -> None:
    with (
        a_play(cassandra_server) as play,
        tls_port(cassandra_server, certificates.context) as port,
    ):
        for number in range(20):
            play.write(START_MS + number * 1_000, Row("insert", "one", number, {"state": "x"}))
        options = {"security.protocol": "ssl", "ssl.ca.location": certificates.authority}
        try:
            secure = play.url(**options).replace(f":{cassandra_server.port}/", f":{port}/")
            events = read_all(scylla_reading.opened(secure, at(10)))
            assert {identity(event): event.type for event in events} == play.expected()
            plain = play.url().replace(f":{cassandra_server.port}/", f":{port}/")
            source = scylla_reading.opened(plain, at(10))
            with pytest.raises(InvalidError, match=r"change log of `.*expects TLS: add security"):
                source.partitions()
        finally:
            close_sessions()


@pytest.mark.server
def test_certificate_of_another_authority_is_refused(
    cassandra_server: Cassandra, keyspace: str, certificates: Certificates, tmp_path: Path
) -> None:
    other = make_certificates(tmp_path)
    with tls_port(cassandra_server, certificates.context) as port:
        for url in (
            secure_url(port, keyspace),
            secure_url(port, keyspace, authority=other.authority),
        ):
            assert "has a certificate that is not trusted" in refusal(url)


@pytest.mark.server
def test_certificate_for_another_host_is_refused_unless_any_name_is_accepted(
    cassandra_server: Cassandra, keyspace: str, tmp_path: Path
) -> None:
    other = make_certificates(tmp_path, names="DNS:elsewhere.example")
    with tls_port(cassandra_server, other.context) as port:
        told = refusal(secure_url(port, keyspace, authority=other.authority))
        assert "has a certificate for another host" in told
        assert "ssl.endpoint.identification.algorithm=none" in told
        url = secure_url(port, keyspace, authority=other.authority, check="none")
        opened(lambda: open_table(url)).close()
        stranger = secure_url(port, keyspace, check="none")
        assert "is not trusted" in refusal(stranger)


@pytest.mark.server
def test_client_certificate_is_sent_where_the_server_asks_for_one(
    cassandra_server: Cassandra, keyspace: str, certificates: Certificates
) -> None:
    asking = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates.authority)
    asking.load_cert_chain(certificates.certificate, certificates.key)
    asking.verify_mode = ssl.CERT_REQUIRED
    with tls_port(cassandra_server, asking) as port:
        told = refusal(secure_url(port, keyspace, authority=certificates.authority))
        assert "refuses the TLS connection" in told
        assert "ssl.certificate.location" in told
        files = {"certificate": certificates.certificate, "key": certificates.key}
        url = secure_url(port, keyspace, authority=certificates.authority, **files)
        opened(lambda: open_table(url)).close()


def test_refusal_is_read_though_the_server_closed_before_the_first_request(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates.authority)
    asking.load_cert_chain(certificates.certificate, certificates.key)
    asking.verify_mode = ssl.CERT_REQUIRED
    tls = tls_context("here", CqlTls(authority=str(certificates.authority)))
    closed = threading.Event()
    send = ssl.SSLSocket.sendall

    def send_late(self: ssl.SSLSocket, request: bytes) -> None:
        assert closed.wait(10)
        send(self, request)

    monkeypatch.setattr(ssl.SSLSocket, "sendall", send_late)
    with socket.create_server((HOST, 0)) as server:

        def refuse() -> None:
            connection, _address = server.accept()
            with connection, contextlib.suppress(ssl.SSLError):
                asking.wrap_socket(connection, server_side=True)
            closed.set()

        thread = threading.Thread(target=refuse)
        thread.start()
        trouble = handshake_trouble([HOST], server.getsockname()[1], tls)
        thread.join(10)
    assert trouble is not None
    assert "refuses the TLS connection" in trouble


@pytest.mark.server
def test_plain_and_tls_ports_that_are_mixed_up_are_named(
    cassandra_server: Cassandra, keyspace: str, certificates: Certificates
) -> None:
    with tls_port(cassandra_server, certificates.context) as port:
        told = refusal(url_of(cassandra_server, keyspace, port))
        assert f"{port} expects TLS: add security.protocol=ssl to the address" in told
    mixed_up = secure_url(cassandra_server.port, keyspace, authority=certificates.authority)
    assert "does not speak TLS" in refusal(mixed_up)


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("ssl.ca.location=/ca.pem", "`ssl.ca.location` has no effect without TLS"),
        ("security.protocol=tls", "give ssl or plaintext"),
        ("security.protocol=ssl&ssl.key.location=/k", "without a certificate"),
        (
            "security.protocol=ssl&ssl.endpoint.identification.algorithm=off",
            "give https, or none to accept any host name",
        ),
        ("security.protocol=ssl&ssl.ca.location=/no/ca.pem", "ssl.ca.location `/no/ca.pem` cannot"),
        (
            "security.protocol=ssl&ssl.certificate.location=/no/me.pem",
            "ssl.certificate.location `/no/me.pem` cannot be used: No such file",
        ),
    ],
)
def test_options_that_are_refused(query: str, complaint: str) -> None:
    assert complaint in refusal(f"cql://{HOST}/keyspace?{query}")


def test_key_is_read_with_the_password_of_the_environment(
    certificates: Certificates, tmp_path: Path
) -> None:
    key = tmp_path / "locked.key"
    lock = ["openssl", "pkey", "-in", str(certificates.key), "-aes256", "-passout", "pass:hush"]
    subprocess.run([*lock, "-out", str(key)], check=True, capture_output=True, timeout=60)
    options = {
        "security.protocol": "ssl",
        "ssl.certificate.location": str(certificates.certificate),
        "ssl.key.location": str(key),
    }
    for environ in ({}, {"TIDELOG_CQL_SSL_KEY_PASSWORD": "wrong"}):
        tls = parse_tls("catalog", options, environ, "TIDELOG_CQL_")
        with pytest.raises(InvalidError, match=r"locked.key` cannot be used: .*password"):
            tls_context("catalog", tls)
    environ = {"TIDELOG_CQL_SSL_KEY_PASSWORD": "hush"}
    tls = parse_tls("catalog", options, environ, "TIDELOG_CQL_")
    assert isinstance(tls_context("catalog", tls), ssl.SSLContext)


def test_source_keeps_its_tls_options_in_its_address_and_no_password() -> None:
    url = (
        "scylla://one,two:9142/shop.orders?security.protocol=SSL&ssl.ca.location=/etc/ca.pem"
        "&ssl.certificate.location=/me.pem&ssl.key.location=/me.key"
        "&ssl.endpoint.identification.algorithm=none"
    )
    environ = {"TIDELOG_SCYLLA_SSL_KEY_PASSWORD": "hush"}
    place, way = parse_scylla(parse_address(url), environ, 0)
    assert place.tls is not None
    assert place.tls.key_password == "hush"
    assert "hush" not in repr(place)
    told = format_scylla(place, way)
    assert "hush" not in told
    assert parse_scylla(parse_address(told), environ, 0) == (place, way)
