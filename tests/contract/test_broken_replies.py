"""A reply that is cut, damaged or not the server's own is a lost reply, never an answer."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.contract.test_dynamodb import ids, open_table, url_of
from tests.contract.test_soak import a_store, faulty_store
from tests.servers.dynamodb import DynamoDb
from tests.servers.s3 import S3
from tests.support.faults import FaultPlan, WireFault
from tests.support.proxy import http_proxy
from tidelog.catalog.base import ABSENT, Catalog, Put, Row
from tidelog.catalog.dynamodb import DynamoCatalog
from tidelog.catalog.dynamodb_client import BrokenReplyError, check_reply
from tidelog.clock import SystemClock
from tidelog.errors import ConflictError
from tidelog.model.times import Backoff
from tidelog.store.base import Store
from tidelog.store.wrappers import RetryingStore

BROKEN = [
    WireFault.CUT_REPLY,
    WireFault.SHORTEN_REPLY,
    WireFault.DAMAGE_REPLY,
    WireFault.HTML_200,
    WireFault.ERROR_500,
    WireFault.RESET,
]


@pytest.fixture(scope="module")
def plan() -> FaultPlan:
    return FaultPlan(seed=1)


@pytest.fixture(scope="module")
def catalog(dynamodb_server: DynamoDb, plan: FaultPlan) -> Iterator[DynamoCatalog]:
    table = f"Broken.{ids.new()}"
    open_table(url_of(dynamodb_server, table), create=True).close()
    with http_proxy(dynamodb_server.endpoint, plan) as proxy:
        catalog = open_table(url_of(dynamodb_server, table, proxy.endpoint))
        yield catalog
        catalog.close()


@pytest.mark.server
@pytest.mark.parametrize("fault", BROKEN, ids=lambda fault: fault.name)
class TestDynamoReplies:
    def test_row_is_found(self, catalog: Catalog, plan: FaultPlan, fault: WireFault) -> None:
        where = ids.new()
        catalog.write(where, Put("a", b"1" * 500), write_id="w1")
        before = plan.counts[fault]
        for _ in range(8):  # each reply is cut in another place
            plan.on_next(fault, mark=b".GetItem")
            assert catalog.get(where, "a") == Row("a", b"1" * 500, "w1")
        assert plan.counts[fault] == before + 8

    def test_scan_returns_every_row(
        self, catalog: Catalog, plan: FaultPlan, fault: WireFault
    ) -> None:
        where = ids.new()
        changes = [Put(f"r{number:02}", b"x" * 50) for number in range(20)]
        catalog.write(where, *changes, write_id="w1")
        for _ in range(8):
            plan.on_next(fault, mark=b".Query")
            assert [row.row for row in catalog.scan(where)] == [change.row for change in changes]

    def test_write_is_settled(self, catalog: Catalog, plan: FaultPlan, fault: WireFault) -> None:
        where, version = ids.new(), None
        for number in range(4):
            mine = f"w{number}"
            plan.on_next(fault, mark=b".PutItem")
            catalog.write(where, Put("a", b"%d" % number, version or ABSENT), write_id=mine)
            plan.on_next(fault, mark=b".TransactWriteItems")
            changes = (Put("b", b"%d" % number, version or ABSENT), Put("c", b"x"))
            catalog.write(where, *changes, write_id=mine)
            version = mine
        assert [row.version for row in catalog.scan(where)] == ["w3", "w3", "w3"]


S3_BROKEN = [fault for fault in BROKEN if fault is not WireFault.DAMAGE_REPLY]


@pytest.fixture
def s3_plan() -> FaultPlan:
    return FaultPlan(seed=1)


@pytest.fixture
def store(s3_server: S3, s3_plan: FaultPlan, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    with faulty_store(s3_server, s3_server.fresh_bucket("broken"), s3_plan) as url:
        inner = a_store(url)
        yield RetryingStore(inner, clock=SystemClock(), random=random.Random(1), backoff=Backoff())


@pytest.mark.server
@pytest.mark.parametrize("fault", S3_BROKEN, ids=lambda fault: fault.name)
class TestS3Replies:
    def test_object_is_read_whole(self, store: Store, s3_plan: FaultPlan, fault: WireFault) -> None:
        data = bytes(range(256)) * 40
        store.put("a", data)
        for _ in range(8):  # each reply is cut in another place
            s3_plan.on_next(fault, mark=b"GET ")
            assert store.get("a") == data
            s3_plan.on_next(fault, mark=b"GET ")
            assert store.get("a", 100, 9_000) == data[100:9_000]
        assert s3_plan.counts[fault] == 16

    def test_put_is_settled_by_what_is_there(
        self, store: Store, s3_plan: FaultPlan, fault: WireFault
    ) -> None:
        data = b"x" * 5_000
        for number in range(4):
            s3_plan.on_next(WireFault.LOSE_REPLY, mark=b"PUT ")
            s3_plan.on_next(fault, mark=b"GET ")
            store.put(f"a{number}", data)
        assert s3_plan.counts[fault] == 4


@pytest.mark.server
def test_empty_object_is_read_as_such(store: Store) -> None:
    store.put("empty", b"")
    assert (store.get("empty"), store.get("empty", 0, 10), store.get("empty", 5)) == (b"",) * 3


@pytest.mark.server
def test_refusal_that_arrives_whole_is_still_a_conflict(catalog: Catalog, plan: FaultPlan) -> None:
    where = ids.new()
    catalog.write(where, Put("a", b"1"), write_id="w1")
    plan.on_next(WireFault.SLOW_DOWN, mark=b".PutItem")
    with pytest.raises(ConflictError) as told:
        catalog.write(where, Put("a", b"2", ABSENT), write_id="w2")
    assert told.value.rows == {"a": Row("a", b"1", "w1")}


class _Operation:
    def __init__(self, name: str) -> None:
        self.name = name


GOOD: list[tuple[str, int, dict[str, str], bytes]] = [
    ("GetItem", 200, {}, b"{}"),
    ("GetItem", 200, {"content-length": "2", "x-amz-crc32": "2745614147"}, b"{}"),
    ("Query", 200, {}, b'{"Count":0,"Items":[],"ScannedCount":0}'),
    ("PutItem", 400, {}, b'{"__type":"x#ConditionalCheckFailedException"}'),
    ("PutItem", 500, {}, b"{}"),
]
BAD: list[tuple[str, int, dict[str, str], bytes]] = [
    ("GetItem", 200, {"content-length": "3"}, b"{}"),
    ("GetItem", 200, {"x-amz-crc32": "1"}, b"{}"),
    ("GetItem", 200, {}, b""),
    ("GetItem", 200, {}, b'{"Item":{"row'),
    ("GetItem", 200, {}, b"<html></html>"),
    ("GetItem", 200, {}, b"[]"),
    ("GetItem", 200, {}, b'{"message":"welcome"}'),
    ("PutItem", 400, {}, b"{}"),
    ("PutItem", 403, {"content-type": "text/html"}, b"<html>Forbidden</html>"),
]


def _check(case: tuple[str, int, dict[str, str], bytes]) -> None:
    name, status, headers, body = case
    check_reply(_Operation(name), {"headers": headers, "status_code": status, "body": body})


@pytest.mark.parametrize("case", GOOD)
def test_whole_replies_pass(case: tuple[str, int, dict[str, str], bytes]) -> None:
    _check(case)


@pytest.mark.parametrize("case", BAD)
def test_broken_replies_are_refused(case: tuple[str, int, dict[str, str], bytes]) -> None:
    with pytest.raises(BrokenReplyError, match="is damaged"):
        _check(case)
