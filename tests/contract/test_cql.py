"""The catalog's contract on Cassandra, and what is CQL's own."""

from __future__ import annotations

import contextlib
import functools
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import cassandra
import pytest
from cassandra.query import BatchStatement, BatchType

from tests.servers.base import HOST, free_port
from tests.servers.cassandra import Cassandra
from tests.support.cql_tables import ids, new_name, open_table, raw_session, url_of
from tests.support.faults import FaultPlan, WireFault
from tests.support.proxy import LossyProxy, cut, lossy_proxy, stream_proxy
from tests.support.remote_catalog import RemoteCatalogContract, opened, race_creators
from tidelog.catalog import cql, cql_session
from tidelog.catalog import cql_session as cql_table
from tidelog.catalog.base import Catalog, Check, Put
from tidelog.catalog.cql import CqlCatalog
from tidelog.errors import (
    CorruptError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.model.address import parse_address


@pytest.mark.server
class TestCqlCatalog(RemoteCatalogContract):
    closes_in_child = True
    increments_each = 25
    deleted_rows = 120_000  # Cassandra fails a read that meets more than 100,000 of them

    @pytest.fixture
    def catalog(self, cql_catalog: CqlCatalog) -> Catalog:
        return cql_catalog

    @pytest.fixture(autouse=True)
    def _server(self, cassandra_server: Cassandra) -> None:
        self.server = cassandra_server

    def opener(self, catalog: Catalog) -> Callable[[], Catalog]:
        return functools.partial(open_table, catalog.url)

    @contextlib.contextmanager
    def losing_replies(self, catalog: Catalog) -> Iterator[tuple[Catalog, Callable[[int], None]]]:
        with proxied(self.server, catalog) as (lossy, proxy):
            yield lossy, proxy.lose
            assert proxy.lost > 0

    def leave_deleted_rows(self, catalog: Catalog, partition: str, count: int) -> None:
        """Only the deletions, in bulk: what a row was before it was deleted leaves no trace."""
        assert isinstance(catalog, CqlCatalog)
        session = raw_session(catalog)
        name = catalog._place.name
        delete = session.prepare(f'DELETE FROM {name} WHERE "partition" = ? AND "row" = ?')
        for first in range(0, count, 1_000):
            batch = BatchStatement(BatchType.UNLOGGED)
            for number in range(first, min(first + 1_000, count)):
                batch.add(delete, (partition.encode(), f"d/{number:08}".encode()))
            session.execute(batch)

    def test_a_conflict_says_which_row(self, catalog: Catalog, partition: str) -> None:
        self.check_conflicts(catalog, partition, Check("a", "w1"))


@contextlib.contextmanager
def proxied(
    server: Cassandra, catalog: Catalog, attempts: int = 6
) -> Iterator[tuple[CqlCatalog, LossyProxy]]:
    """The same table through a proxy that knows writes by the ids of their prepared statements."""
    with lossy_proxy(server.host, server.port, ()) as proxy:
        place = parse_address(catalog.url)
        url = f"cql://{HOST}:{proxy.port}{place.path}"
        lossy = opened(lambda: open_table(url, attempts=attempts))
        assert lossy._session is not None
        proxy.marks |= {
            statement.query_id
            for name, statement in lossy._session.statements.items()
            if name.startswith(("put", "delete", "check"))
        }
        yield lossy, proxy
        lossy.close()


@pytest.mark.server
def test_connection_that_falls_silent_is_replaced_while_the_request_is_retried(
    cassandra_server: Cassandra, cql_catalog: CqlCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_IDLE_S", "_IDLE_TIMEOUT_S", "_REQUEST_TIMEOUT_S"):
        monkeypatch.setattr(cql_session, name, 1)
    partition, plan = ids.new(), FaultPlan()
    cql_catalog.write(partition, Put("a", b"1"), write_id="w")
    with stream_proxy(cassandra_server.host, cassandra_server.port, plan) as proxy:
        url = f"cql://{HOST}:{proxy.port}{parse_address(cql_catalog.url).path}"
        catalog = opened(lambda: open_table(url, attempts=30))
        assert catalog.get(partition, "a") is not None
        plan.on_next(WireFault.HANG)  # as a firewall that forgot the connection
        assert catalog.get(partition, "a") is not None
        catalog.close()
    assert plan.counts[WireFault.HANG] == 1


@pytest.mark.server
@pytest.mark.long
def test_a_range_with_more_deleted_rows_than_cassandra_reads_is_cut(
    cql_catalog: CqlCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = ids.new()
    cql_catalog.write(
        partition, Put("a", b""), Put("d/00060000+", b""), Put("e", b""), write_id="w"
    )
    TestCqlCatalog().leave_deleted_rows(cql_catalog, partition, 110_000)
    with pytest.raises(cassandra.ReadFailure, match="0x0001"):
        raw_session(cql_catalog).execute(
            f'SELECT "row" FROM {cql_catalog._place.name} WHERE "partition" = %s',
            (partition.encode(),),
        )

    def scan(*args: Any, **options: Any) -> list[str]:
        return [row.row for row in cql_catalog.scan(partition, *args, **options)]

    assert scan() == ["a", "d/00060000+", "e"]
    assert scan(reverse=True) == ["e", "d/00060000+", "a"]
    assert scan(limit=2) == ["a", "d/00060000+"]
    assert scan("d/", "d0") == ["d/00060000+"]
    monkeypatch.setattr(cql, "_SPLITS_MAX", 2)
    with pytest.raises(UnavailableError, match="the server's log"):
        scan()


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (b"", b"\xff"),
        (b"a", b"b"),
        (b"run/00000123", b"run/99999999"),
        (b"a\xff\xff\xff", b"b"),
        (b"a", b"a\0\0"),
        ("ключ".encode(), "ключи".encode()),
    ],
)
def test_cuts_lie_inside_in_order_and_reach_every_key(first: bytes, last: bytes) -> None:
    for _ in range(100):
        cuts = cql._keys_between(first, last, 16)
        bounds = [first, *cuts, last]
        assert bounds == sorted(set(bounds))
        assert len(cuts) <= 15
        if not cuts:
            break
        first, last = bounds[len(bounds) // 2 - 1 : len(bounds) // 2 + 1]
    assert max(len(first), len(last)) < 80


def test_nothing_lies_between_neighbours() -> None:
    assert cql._keys_between(b"a", b"a\0", 16) == []


@pytest.mark.server
def test_large_rows_come_in_pages_of_few(
    cql_catalog: CqlCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition, counts = ids.new(), []
    for number in range(4):
        rows = [Put(f"r{number}{n}", b"v" * 250_000) for n in range(8)]
        cql_catalog.write(partition, *rows, write_id=ids.new())
    read_page = cql_session.CqlSession.read_page

    def counted(self: Any, name: str, values: Any) -> Any:
        counts.append(values[-1])
        return read_page(self, name, values)

    monkeypatch.setattr(cql_session.CqlSession, "read_page", counted)
    monkeypatch.setattr(cql, "_PAGE_ROWS_FIRST", 10)
    assert len(list(cql_catalog.scan(partition))) == 32
    assert counts == [10] + [4] * 6
    counts.clear()
    next(cql_catalog.scan(partition))
    assert len(counts) == 1


# Opening.


@pytest.mark.server
def test_a_missing_keyspace_or_table_is_not_found_and_made_when_asked(
    cassandra_server: Cassandra,
) -> None:
    url = url_of(cassandra_server, new_name("missing"))
    with pytest.raises(NotFoundError, match=r"table `missing_.*tidelog`: not found: run `tidelog"):
        open_table(url)
    catalog = open_table(url, create=True)
    assert catalog.url == url
    with pytest.raises(NotFoundError, match=r"\.other`: not found: run `tidelog init"):
        open_table(f"{url}?table=other")
    raw_session(catalog).execute(f"DROP TABLE {catalog._place.name}")
    with pytest.raises(NotFoundError, match="not found"):
        catalog.get("p", "r")
    with pytest.raises(NotFoundError, match="not found"):
        catalog.write("p", Put("r", b""), write_id="w")
    catalog.close()
    catalog.close()
    with pytest.raises(InvalidError, match="is closed"):
        catalog.get("p", "r")
    open_table(f"{url}?table=Other&datacenter=datacenter1", create=True).close()


def test_a_keyspace_on_several_nodes_is_not_ours_to_make() -> None:
    hosts = [SimpleNamespace(datacenter=name) for name in ("east", "west", "east")]
    cluster = SimpleNamespace(metadata=SimpleNamespace(all_hosts=lambda: hosts))
    session = SimpleNamespace(execute=lambda *_: Nothing())
    place = cql_table.parse_cql_address(parse_address("cql://one,two/Logs"), {})
    wanted = r"3 nodes .* run CREATE KEYSPACE \"Logs\" .*'east': 3, 'west': 3}"
    with pytest.raises(NotFoundError, match=wanted):
        cql_table.ensure_table(place, cluster, session, create=True)


class Nothing(list[Any]):
    """A reply without rows."""

    def one(self) -> None:
        return None


@pytest.mark.server
def test_racing_creators_all_succeed(cassandra_server: Cassandra) -> None:
    url = url_of(cassandra_server, new_name("raced"))
    race_creators(lambda: open_table(url, create=True))


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize(
    "refusal", ["table tidelog does not exist", "Keyspace 'logs' doesn't exist"]
)
def test_a_table_that_is_listed_before_the_server_knows_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, refusal: str, create: bool
) -> None:
    refusals = [cassandra.InvalidRequest(refusal)]
    listed = [
        (name, kind, 0, scalar, "none") for name, (kind, scalar) in cql_table._COLUMNS.items()
    ]
    shut: list[bool] = []

    def prepare(text: str) -> str:
        if refusals:
            raise refusals.pop()
        return text

    session = SimpleNamespace(execute=lambda *_: listed, prepare=prepare)
    cluster = SimpleNamespace(connect=lambda: session, shutdown=lambda: shut.append(True))
    monkeypatch.setattr(cql_session, "_cluster", lambda _: cluster)
    catalog = open_table("cql://one/logs", create=create)
    assert not refusals
    assert len(shut) == 1  # the first connection is not left open
    catalog.close()
    refusals.append(cassandra.InvalidRequest(refusal))
    with pytest.raises(UnavailableError, match=r"made, but not yet known .*: try again"):
        open_table("cql://one/logs", create=create, attempts=1)


@pytest.mark.server
@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize(
    "columns",
    [
        "id int PRIMARY KEY, value blob",
        (
            '"partition" blob, "row" blob, version text, value blob, "unset" tinyint, '
            'PRIMARY KEY ("partition", "row")) WITH CLUSTERING ORDER BY ("row" DESC'
        ),
    ],
    ids=["another key", "the other order"],
)
def test_a_table_of_another_shape_is_refused(
    cql_catalog: CqlCatalog, columns: str, create: bool
) -> None:
    name = new_name("other")
    place = cql_catalog._place
    raw_session(cql_catalog).execute(f'CREATE TABLE "{place.keyspace}".{name} ({columns})')
    with pytest.raises(InvalidError, match=r"its columns are .*, expected `partition`"):
        open_table(f"{cql_catalog.url}?table={name}", create=create)


@pytest.mark.server
def test_a_datacenter_that_is_not_there_is_named(cql_catalog: CqlCatalog) -> None:
    with pytest.raises(InvalidError, match=r"no datacenter `dc9`: give one of datacenter1"):
        open_table(f"{cql_catalog.url}?datacenter=dc9")


@pytest.mark.server
def test_rows_that_somebody_else_wrote_are_corrupt(cql_catalog: CqlCatalog) -> None:
    insert = f'INSERT INTO {cql_catalog._place.name} ("partition", "row", value) VALUES '
    raw_session(cql_catalog).execute(insert + "(textAsBlob('foreign'), 0x61, 0x00)")
    with pytest.raises(CorruptError, match="has no version"):
        cql_catalog.get("foreign", "a")
    raw_session(cql_catalog).execute(insert + "(textAsBlob('foreign2'), 0xff, 0x00)")
    with pytest.raises(CorruptError, match="no version"):
        list(cql_catalog.scan("foreign", reverse=True))


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("cql://host/keyspace?tabel=x", "did you mean `table`"),
        ("cql://host/keyspace?password=x", "looks like a secret"),
        ("cql://user@host/keyspace", "names a user or password"),
        ("cql:///keyspace", "names no hosts"),
        ("cql://one,,two/keyspace", "names no hosts"),
        ("cql://one:9042,two:9042/keyspace", "with one port for all"),
        ("cql://host", "`` is not a valid keyspace name"),
        ("cql://host/a/b", "`a/b` is not a valid keyspace name"),
        ("cql://host/keyspace?table=a-b", "`a-b` is not a valid table name"),
    ],
)
def test_addresses_that_are_refused(url: str, complaint: str) -> None:
    with pytest.raises(InvalidError, match=complaint):
        open_table(url)


def test_a_login_is_a_name_and_a_password() -> None:
    with pytest.raises(InvalidError, match="only one of TIDELOG_CQL_USERNAME"):
        open_table("cql://host/keyspace", TIDELOG_CQL_USERNAME="me")


def test_without_the_driver_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['cassandra'] = None\n"
        "from tidelog.errors import InvalidError\n"
        "try:\n    import tidelog.catalog.cql\n"
        "except InvalidError as exc:\n    print(exc)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "cql catalog is not installed: pip install 'tidelog[scylla]'\n"


# Servers that are gone, and logins that they refuse.


def test_a_server_that_is_down_is_unavailable_said_soon_and_without_noise() -> None:
    code = (
        "import random\n"
        "from tidelog.catalog import open_catalog\n"
        "from tidelog.catalog.update import Repeat\n"
        "from tidelog.clock import SystemClock\n"
        "repeat = Repeat(SystemClock(), random.Random(0))\n"
        f"url = 'cql://{HOST}:{free_port()}/keyspace'\n"
        "try:\n    open_catalog(url, create=False, repeat=repeat, environ={})\n"
        "except Exception as exc:\n    print(type(exc).__name__, exc)"
    )
    began = time.monotonic()
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert time.monotonic() - began < 60
    assert told.stdout.startswith("UnavailableError catalog table `keyspace.tidelog`: 127.0.0.1")
    assert "Connection refused" in told.stdout
    assert told.stderr == ""


def test_a_host_that_nobody_knows_is_unavailable() -> None:
    with pytest.raises(UnavailableError, match=r"no address is known for nowhere\.invalid"):
        open_table("cql://nowhere.invalid/keyspace", attempts=1)


@pytest.mark.server
def test_a_server_that_falls_silent_or_dies_is_waited_for_so_long_only(
    cassandra_server: Cassandra, cql_catalog: CqlCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cql_session, "_REQUEST_TIMEOUT_S", 0.5)
    with proxied(cassandra_server, cql_catalog, attempts=3) as (catalog, proxy):
        began = time.monotonic()
        proxy.go_silent()
        with pytest.raises(UnavailableError, match="cannot be reached or cannot answer"):
            catalog.get("p", "r")
        with pytest.raises(UnknownOutcomeError):
            catalog.write(ids.new(), Put("r", b""), write_id="w1")
        proxy.close()
        with pytest.raises(UnavailableError):
            list(catalog.scan("p"))
        with pytest.raises((UnavailableError, UnknownOutcomeError)):
            catalog.write(ids.new(), Put("r", b""), write_id="w1")
        assert time.monotonic() - began < 60


def test_a_login_that_the_server_refuses_is_invalid() -> None:
    login = {"TIDELOG_CQL_USERNAME": "me", "TIDELOG_CQL_PASSWORD": "hush"}
    with login_server() as port:
        url = f"cql://{HOST}:{port}/keyspace"
        with pytest.raises(InvalidError, match=r"refuses the login: .*are incorrect") as told:
            open_table(url, **login)
        assert "hush" not in str(told.value)
        with pytest.raises(InvalidError, match=r"refuses the login: .*requires authentication"):
            open_table(url)


@contextlib.contextmanager
def login_server() -> Iterator[int]:
    """Speaks the native protocol, version 4, as far as a login, which it always refuses."""
    listener = socket.create_server((HOST, 0))

    def text(value: str) -> bytes:
        return struct.pack(">H", len(value)) + value.encode()

    def error(code: int, message: str) -> tuple[int, bytes]:
        return 0x00, struct.pack(">i", code) + text(message)

    def answer(version: int, opcode: int) -> tuple[int, bytes]:
        if version != 4:
            return error(0x000A, "Invalid or unsupported protocol version: 5")
        if opcode == 0x05:
            versions = text("CQL_VERSION") + b"\0\1" + text("3.4.7")
            return 0x06, b"\0\2" + versions + text("COMPRESSION") + b"\0\0"
        if opcode == 0x01:
            return 0x03, text("org.apache.cassandra.auth.PasswordAuthenticator")
        return error(0x0100, "Provided username me and/or password are incorrect")

    def serve(client: socket.socket) -> None:
        with client, client.makefile("rb") as requests, contextlib.suppress(OSError):
            while header := requests.read(9):
                version, _, stream, opcode, length = struct.unpack(">BBhBi", header)
                requests.read(length)
                reply, body = answer(version, opcode)
                client.sendall(struct.pack(">BBhBi", 0x84, 0, stream, reply, len(body)) + body)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    cut(listener)
