"""Nothing acknowledged is lost on S3 with DynamoDB or CQL while requests and replies fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.servers.cassandra import Cassandra
from tests.servers.dynamodb import DynamoDb
from tests.servers.s3 import S3
from tests.support.certificates import make_certificates
from tests.support.faults import FaultPlan, WireFault
from tests.support.homes import a_catalog, a_store
from tests.support.proxy import http_proxy, stream_proxy
from tests.support.soak import PARTITIONS, TOPIC, Soak
from tidelog.catalog import cql_session, dynamodb_client
from tidelog.clock import RandomIds
from tidelog.errors import InvalidError, UnavailableError
from tidelog.home import create_home
from tidelog.settings import load_settings
from tidelog.store import remote, s3

pytestmark = pytest.mark.server
ids = RandomIds()

HTTP_RATES = {
    WireFault.LOSE_REQUEST: 0.01,
    WireFault.LOSE_REPLY: 0.015,
    WireFault.CUT_REPLY: 0.015,
    WireFault.SHORTEN_REPLY: 0.015,
    WireFault.RESET: 0.01,
    WireFault.DELAY: 0.02,
    WireFault.DUPLICATE: 0.01,
    WireFault.ERROR_500: 0.01,
    WireFault.SLOW_DOWN: 0.01,
    WireFault.HTML_200: 0.01,
    WireFault.HANG: 0.002,
}
S3_RATES = HTTP_RATES | {WireFault.CONFLICT_409: 0.02}
DYNAMO_RATES = HTTP_RATES | {WireFault.DAMAGE_REPLY: 0.015}
STREAM_RATES = {
    WireFault.LOSE_REQUEST: 0.003,
    WireFault.LOSE_REPLY: 0.003,
    WireFault.CUT_REPLY: 0.003,
    WireFault.RESET: 0.003,
    WireFault.DELAY: 0.02,
}


@pytest.fixture(autouse=True)
def _short_times(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hung connections cost a time-out each."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    monkeypatch.setenv("AWS_REGION", s3_server.region)
    for module, name in (
        (remote, "REQUEST_TIMEOUT_S"),
        (s3, "REQUEST_TIMEOUT_S"),
        (dynamodb_client, "_READ_TIMEOUT_S"),
        (cql_session, "_REQUEST_TIMEOUT_S"),
    ):
        monkeypatch.setattr(module, name, 2.0)


def config_of(store: str, catalog: str) -> str:
    return f"tidelog:?store={quote(store, safe=':/')}&catalog={quote(catalog, safe=':/')}"


@contextmanager
def faulty_store(server: S3, bucket: str, plan: FaultPlan, tls: Any = None) -> Iterator[str]:
    with http_proxy(server.endpoint, plan, tls) as proxy:
        yield f"s3://{bucket}/home?endpoint={proxy.endpoint}&region={server.region}"


def make_home(store: str, catalog: str, folder: Path) -> None:
    settings = load_settings(config_of(store, catalog), {}, folder)
    with create_home(settings, create_catalog=True)[0] as home:
        home.create_topic(TOPIC, PARTITIONS)


def soak(
    store: tuple[str, str], catalog: tuple[str, str], plans: list[FaultPlan], work: Soak
) -> None:
    """Run it on the faulty addresses, and count on the good ones."""
    for plan in plans:
        plan.enabled = True

    def calm() -> None:
        for plan in plans:
            plan.enabled = False

    work.config = config_of(store[1], catalog[1])
    work.run(calm)
    rows = a_catalog(catalog[0])
    work.check(rows, a_store(store[0]))
    rows.close()
    for plan in plans:
        print({fault.name: count for fault, count in sorted(plan.counts.items(), key=str)})
    print(dict(work.done), len(work.acknowledged), "acknowledged", len(work.deleted), "deleted")
    assert len(work.acknowledged) > work.batches
    assert all(plan.injected for plan in plans)


def on_dynamodb(
    servers: tuple[S3, DynamoDb], folder: Path, seed: int, batches: int, tls: Any = None
) -> None:
    objects, rows = servers
    bucket, table = objects.fresh_bucket("soak"), f"soak-{ids.new()[:12]}"
    store = f"s3://{bucket}/home?endpoint={objects.endpoint}&region={objects.region}"
    catalog = f"dynamodb://{table}?region={rows.region}&endpoint={rows.endpoint}"
    make_home(store, catalog, folder)
    plans = [FaultPlan(seed, S3_RATES), FaultPlan(seed + 1, DYNAMO_RATES)]
    with ExitStack() as stack:
        faulty = stack.enter_context(faulty_store(objects, bucket, plans[0], tls))
        proxy = stack.enter_context(http_proxy(rows.endpoint, plans[1], tls))
        faulty_rows = f"dynamodb://{table}?region={rows.region}&endpoint={proxy.endpoint}"
        soak((store, faulty), (catalog, faulty_rows), plans, Soak("", seed, batches))


def on_cql(servers: tuple[S3, Cassandra], folder: Path, seed: int, batches: int) -> None:
    objects, rows = servers
    bucket, keyspace = objects.fresh_bucket("soak"), f"soak_{ids.new()[:12]}"
    store = f"s3://{bucket}/home?endpoint={objects.endpoint}&region={objects.region}"
    catalog = f"cql://{rows.host}:{rows.port}/{keyspace}"
    make_home(store, catalog, folder)
    plans = [FaultPlan(seed, S3_RATES), FaultPlan(seed + 1, STREAM_RATES)]
    with ExitStack() as stack:
        faulty = stack.enter_context(faulty_store(objects, bucket, plans[0]))
        proxy = stack.enter_context(stream_proxy(rows.host, rows.port, plans[1]))
        faulty_rows = f"cql://{rows.host}:{proxy.port}/{keyspace}"
        soak((store, faulty), (catalog, faulty_rows), plans, Soak("", seed, batches))


def test_s3_and_dynamodb_lose_nothing(
    s3_server: S3, dynamodb_server: DynamoDb, tmp_path: Path
) -> None:
    on_dynamodb((s3_server, dynamodb_server), tmp_path, seed=1, batches=8)


@pytest.mark.long
def test_s3_and_cql_lose_nothing(
    s3_server: S3, cassandra_server: Cassandra, tmp_path: Path
) -> None:
    on_cql((s3_server, cassandra_server), tmp_path, seed=2, batches=8)


def test_tls_with_a_private_authority_loses_nothing(
    s3_server: S3, dynamodb_server: DynamoDb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = make_certificates(tmp_path)
    servers = (s3_server, dynamodb_server)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates.authority))
    on_dynamodb(servers, tmp_path, seed=3, batches=3, tls=certificates.context)


def test_unknown_authority_is_refused(
    s3_server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates, bucket = make_certificates(tmp_path), s3_server.fresh_bucket()
    with faulty_store(s3_server, bucket, FaultPlan(), certificates.context) as url:
        for call in (lambda: a_store(url).get("a"), lambda: list(a_store(url).list())):
            with pytest.raises(UnavailableError):
                call()
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates.authority))
        store = a_store(url)
        store.put("a", b"x")
        assert [info.key for info in store.list()] == ["a"]
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "missing.pem"))
        with pytest.raises(InvalidError, match="AWS_CA_BUNDLE"):
            a_store(url)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 13))
def test_s3_and_dynamodb_lose_nothing_for_long(
    s3_server: S3, dynamodb_server: DynamoDb, tmp_path: Path, seed: int
) -> None:
    on_dynamodb((s3_server, dynamodb_server), tmp_path, seed, batches=150)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20, 23))
def test_s3_and_cql_lose_nothing_for_long(
    s3_server: S3, cassandra_server: Cassandra, tmp_path: Path, seed: int
) -> None:
    on_cql((s3_server, cassandra_server), tmp_path, seed, batches=150)
