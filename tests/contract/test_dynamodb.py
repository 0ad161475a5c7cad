"""The catalog's contract on DynamoDB Local, and what is DynamoDB's own.

DynamoDB Local checks no credentials and never throttles; what AWS says then is put into the
client's mouth by a hook that answers in the server's place.
"""

import contextlib
import functools
import io
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from botocore.config import Config

from tests.servers.base import HOST, free_port
from tests.servers.dynamodb import DynamoDb
from tests.support.proxy import lossy_proxy
from tests.support.remote_catalog import RemoteCatalogContract, opened, race_creators
from tidelog.catalog import dynamodb_client
from tidelog.catalog.base import ABSENT, Catalog, Put, Row
from tidelog.catalog.checksums import CheckedCatalog
from tidelog.catalog.dynamodb import DynamoCatalog, open_dynamodb
from tidelog.catalog.update import Repeat
from tidelog.clock import RandomIds, SystemClock, system_random
from tidelog.errors import (
    ConflictError,
    CorruptError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.model.address import parse_address
from tidelog.model.times import Backoff
from tidelog.testing.scheduler import FakeClock

ENVIRON = {"AWS_ACCESS_KEY_ID": "anybody", "AWS_SECRET_ACCESS_KEY": "anything"}
WRITES = [
    f"DynamoDB_20120810.{name}".encode() for name in ("PutItem", "DeleteItem", "TransactWriteItems")
]
ids = RandomIds()


def open_table(url: str, create: bool = False, attempts: int = 6) -> DynamoCatalog:
    repeat = Repeat(SystemClock(), system_random(), Backoff(attempts=attempts))
    return open_dynamodb(parse_address(url), create=create, repeat=repeat, environ=ENVIRON)


def url_of(server: DynamoDb, table: str, endpoint: str | None = None) -> str:
    return f"dynamodb://{table}?region={server.region}&endpoint={endpoint or server.endpoint}"


def raw_client(server: DynamoDb) -> Any:
    return boto3.session.Session(region_name=server.region).client(
        "dynamodb",
        endpoint_url=server.endpoint,
        aws_access_key_id="anybody",
        aws_secret_access_key="anything",
        config=Config(retries={"total_max_attempts": 1}, max_pool_connections=16),
    )


@pytest.fixture(scope="module")
def table_url(dynamodb_server: DynamoDb) -> str:
    url = url_of(dynamodb_server, f"Contract.{ids.new()}")
    open_table(url, create=True).close()
    return url


@pytest.mark.server
def test_what_the_server_counts_is_counted_by_request(table_url: str) -> None:
    with contextlib.closing(open_table(table_url)) as catalog:
        assert catalog.units == {}
        catalog.write("units", Put("a", b"1"), write_id=ids.new())
        catalog.write("units", Put("a", b"1"), Put("b", b"2"), write_id=ids.new())
        catalog.get("units", "a")
        assert list(catalog.scan("units"))
        checked = CheckedCatalog(catalog)
        assert checked.units == catalog.units
    units = catalog.units
    assert set(units) == {"put_item", "transact_write_items", "get_item", "query"}
    assert units["put_item"] == 1
    assert units["transact_write_items"] == 4  # two rows, each at the price of two
    assert all(count > 0 for count in units.values())


@pytest.fixture(scope="module")
def shared_catalog(table_url: str) -> Iterator[DynamoCatalog]:
    catalog = open_table(table_url)
    yield catalog
    catalog.close()


@pytest.mark.server
class TestDynamoCatalog(RemoteCatalogContract):
    increments_each = 40  # 200 take a minute and more: see the long tests below
    deleted_rows = 4_000  # 200,000 take a minute to make: see the long test below

    @pytest.fixture
    def catalog(self, shared_catalog: DynamoCatalog) -> Catalog:
        return shared_catalog

    @pytest.fixture(autouse=True)
    def _server(self, dynamodb_server: DynamoDb) -> None:
        self.server = dynamodb_server

    def opener(self, catalog: Catalog) -> Callable[[], Catalog]:
        return functools.partial(open_table, catalog.url)

    @contextlib.contextmanager
    def losing_replies(self, catalog: Catalog) -> Iterator[tuple[Catalog, Callable[[int], None]]]:
        target = urlsplit(self.server.endpoint)
        with lossy_proxy(str(target.hostname), target.port or 0, WRITES) as proxy:
            table = parse_address(catalog.url).host
            lossy = open_table(url_of(self.server, table, f"http://{HOST}:{proxy.port}"))
            yield lossy, proxy.lose
            lossy.close()
            assert proxy.lost > 0

    def leave_deleted_rows(self, catalog: Catalog, partition: str, count: int) -> None:
        leave_deleted_rows(self.server, parse_address(catalog.url).host, partition, count)

    @pytest.mark.long
    def test_a_scan_beyond_or_across_200_000_deleted_rows(
        self, catalog: Catalog, partition: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(self, "deleted_rows", 200_000)
        self.test_a_scan_beyond_or_across_deleted_rows_neither_slows_nor_fails(catalog, partition)

    @pytest.mark.long
    def test_many_increments_by_many_workers_add_up(
        self, catalog: Catalog, partition: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(self, "increments_each", 200)
        self.test_increments_by_many_workers_add_up(catalog, partition)

    def test_a_transaction_says_which_row_conflicts(self, catalog: Catalog, partition: str) -> None:
        self.check_conflicts(catalog, partition)

    def test_transactions_that_collide_are_repeated_not_reported(
        self, catalog: Catalog, partition: str
    ) -> None:
        def write(worker: int) -> None:
            for turn in range(10):
                changes = [Put(f"r{n}", b"%d" % worker) for n in range(4)]
                catalog.write(partition, *changes, write_id=f"{worker}-{turn}")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(4)))
        assert len({row.version for row in catalog.scan(partition)}) == 1


def leave_deleted_rows(server: DynamoDb, table: str, partition: str, count: int) -> None:
    client = raw_client(server)
    rows = [f"d/{number:08}" for number in range(count)]

    def put(row: str) -> dict[str, Any]:
        item = {"version": {"S": "x"}, "value": {"B": b"x"}}
        return {"PutRequest": {"Item": {"partition": {"S": partition}, "row": {"S": row}} | item}}

    def delete(row: str) -> dict[str, Any]:
        return {"DeleteRequest": {"Key": {"partition": {"S": partition}, "row": {"S": row}}}}

    def send(verb: Callable[[str], dict[str, Any]], first: int) -> None:
        requests = [verb(row) for row in rows[first : first + 25]]
        reply = client.batch_write_item(RequestItems={table: requests})
        assert not reply["UnprocessedItems"]

    for verb in (put, delete):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(functools.partial(send, verb), range(0, count, 25)))
    client.close()


# Opening.


@pytest.mark.server
def test_a_missing_table_is_not_found_and_made_when_asked(dynamodb_server: DynamoDb) -> None:
    url = url_of(dynamodb_server, f"missing-{ids.new()}")
    with pytest.raises(NotFoundError, match="not found in region us-east-1: run `tidelog init"):
        open_table(url)
    catalog = open_table(url, create=True)
    assert catalog.url == url
    catalog.close()
    catalog.close()
    with pytest.raises(InvalidError, match="is closed"):
        catalog.get("p", "r")
    open_table(url, create=True).close()
    open_table(url).close()


@pytest.mark.server
def test_racing_creators_all_succeed(dynamodb_server: DynamoDb) -> None:
    url = url_of(dynamodb_server, f"raced-{ids.new()}")
    race_creators(lambda: open_table(url, create=True))


@pytest.mark.server
@pytest.mark.parametrize("create", [True, False])
def test_a_table_of_another_shape_is_refused(dynamodb_server: DynamoDb, create: bool) -> None:
    name = f"other-{ids.new()}"
    client = raw_client(dynamodb_server)
    client.create_table(
        TableName=name,
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "N"}],
        BillingMode="PAY_PER_REQUEST",
    )
    client.close()
    with pytest.raises(InvalidError, match=r"its key is `id` \(HASH, N\), expected `partition`"):
        open_table(url_of(dynamodb_server, name), create=create)


@pytest.mark.server
def test_items_that_somebody_else_wrote_are_corrupt(
    dynamodb_server: DynamoDb, table_url: str
) -> None:
    client = raw_client(dynamodb_server)
    client.put_item(
        TableName=parse_address(table_url).host,
        Item={"partition": {"S": "foreign"}, "row": {"S": "a"}, "value": {"B": b"x"}},
    )
    client.close()
    catalog = open_table(table_url)
    with pytest.raises(CorruptError, match="row `a` of `foreign`: has no 'version'"):
        catalog.get("foreign", "a")
    catalog.close()


def test_a_server_that_is_down_is_unavailable_and_said_so_soon() -> None:
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="out of reach"):
        open_table(f"dynamodb://some-table?region=x-y-1&endpoint=http://{HOST}:{free_port()}")
    assert time.monotonic() - began < 60


@pytest.mark.server
def test_a_server_that_falls_silent_is_waited_for_so_long_only(
    dynamodb_server: DynamoDb, table_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamodb_client, "_READ_TIMEOUT_S", 0.3)
    target = urlsplit(dynamodb_server.endpoint)
    with lossy_proxy(str(target.hostname), target.port or 0, WRITES) as proxy:
        url = url_of(dynamodb_server, parse_address(table_url).host, f"http://{HOST}:{proxy.port}")
        catalog = opened(lambda: open_table(url, attempts=2))
        proxy.go_silent()
        began = time.monotonic()
        with pytest.raises(UnavailableError, match="Read timeout"):
            catalog.get("p", "r")
        with pytest.raises(UnknownOutcomeError):
            catalog.write("silent", Put("r", b""), write_id="w1")
        assert time.monotonic() - began < 60
        catalog.close()


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("dynamodb://table?regoin=x", "did you mean `region`"),
        ("dynamodb://table?secret_key=x", "looks like a secret"),
        ("dynamodb://user:word@table", "names a user or password"),
        ("dynamodb://table:8000", "names more than a table"),
        ("dynamodb://table/path", "names more than a table"),
        ("dynamodb://", "is not a valid table name"),
        ("dynamodb://a,b", "is not a valid table name"),
        ("dynamodb://table?endpoint=localhost:8000", "is not an http or https address"),
        ("dynamodb://table?endpoint=http://[x", "is not an http or https address"),
        ("dynamodb://table?region=x-1&endpoint=http://me:word@host", "endpoint names a user"),
        ("dynamodb://table?region=no such region", "cannot be opened"),
    ],
)
def test_addresses_that_are_refused(url: str, complaint: str) -> None:
    with pytest.raises(InvalidError, match=complaint) as refused:
        open_table(url)
    assert "word" not in str(refused.value).replace("password", "")


@pytest.fixture
def no_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A machine on which nobody set up AWS."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.mark.usefixtures("no_aws")
def test_missing_region_and_credentials_are_asked_for() -> None:
    with pytest.raises(InvalidError, match="no AWS region: add"):
        open_table("dynamodb://table")
    address = parse_address(f"dynamodb://table?region=eu-west-1&endpoint=http://{HOST}:1")
    with pytest.raises(InvalidError, match="no usable AWS credentials"):
        open_dynamodb(
            address,
            create=False,
            repeat=Repeat(FakeClock(), random.Random(0)),
            environ={},
        )


def test_the_region_may_come_from_the_environment() -> None:
    address = parse_address(f"dynamodb://table?endpoint=http://{HOST}:{free_port()}")
    repeat = Repeat(FakeClock(), random.Random(0), Backoff(attempts=1))
    with pytest.raises(UnavailableError):
        open_dynamodb(
            address, create=False, repeat=repeat, environ=ENVIRON | {"AWS_REGION": "eu-west-1"}
        )


def test_without_the_sdk_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['boto3'] = None\n"
        "from tidelog.errors import InvalidError\n"
        "try:\n    import tidelog.catalog.dynamodb\n"
        "except InvalidError as exc:\n    print(exc)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "dynamodb catalog is not installed: pip install 'tidelog[aws]'\n"


# What AWS answers, and what becomes of it.


class Answers:
    """Stands between a client and its server; answers itself while it has something to say."""

    def __init__(self, *answers: dict[str, Any], status: int = 400) -> None:
        self.left = list(answers)
        self.status = status
        self.asked: list[str] = []

    def __call__(self, request: Any, **_: Any) -> AWSResponse | None:
        self.asked.append(request.headers["X-Amz-Target"].decode().partition(".")[2])
        if not self.left:
            return None
        answer = self.left.pop(0)
        body = json.dumps(answer | {"__type": f"com.amazonaws.dynamodb.v20120810#{answer['code']}"})
        headers = {"content-type": "application/x-amz-json-1.0"}
        return AWSResponse(request.url, self.status, headers, _Body(body.encode()))


class _Body(io.BytesIO):
    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self.read()


def hooked(
    answers: Answers, server: DynamoDb | None = None, table: str = "table", attempts: int = 6
) -> tuple[DynamoCatalog, FakeClock]:
    """A catalog whose requests pass by ``answers``; without a server nobody else replies."""
    clock = FakeClock()

    def connect() -> Any:
        endpoint = server.endpoint if server else f"http://{HOST}:{free_port()}"
        client = dynamodb_client.connect(
            "dynamodb://table",
            "us-east-1",
            endpoint,
            {"aws_access_key_id": "anybody", "aws_secret_access_key": "anything"},
        )
        client.meta.events.register("before-send.dynamodb", answers)
        return client

    repeat = Repeat(clock, random.Random(0), Backoff(attempts=attempts))
    return DynamoCatalog("dynamodb://table", table, connect, repeat), clock


def failure(code: str, *reasons: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"code": code, "message": f"{code} says AWS"}
    if reasons:
        answer["CancellationReasons"] = [{"Code": reason} for reason in reasons]
    return answer


BUSY = [
    failure("ThrottlingException"),
    failure("ProvisionedThroughputExceededException"),
    failure("RequestLimitExceeded"),
    failure("TransactionConflictException"),
    failure("TransactionCanceledException", "None", "TransactionConflict"),
    failure("TransactionCanceledException", "ThrottlingError", "ProvisionedThroughputExceeded"),
]


@pytest.mark.server
@pytest.mark.parametrize("answer", BUSY, ids=lambda answer: answer["code"])
def test_a_write_refused_for_load_is_repeated(
    dynamodb_server: DynamoDb, table_url: str, answer: dict[str, Any]
) -> None:
    answers = Answers(answer, answer)
    catalog, clock = hooked(answers, dynamodb_server, parse_address(table_url).host)
    began, partition = clock.monotonic_s(), ids.new()
    catalog.write(partition, Put("a", b"1", ABSENT), Put("b", b"2", ABSENT), write_id="w1")
    assert answers.asked == ["TransactWriteItems"] * 3
    assert clock.monotonic_s() > began
    assert [row.row for row in catalog.scan(partition)] == ["a", "b"]
    catalog.close()


@pytest.mark.parametrize("answer", BUSY, ids=lambda answer: answer["code"])
def test_a_write_refused_for_load_to_the_end_is_unavailable_not_a_conflict(
    answer: dict[str, Any],
) -> None:
    answers = Answers(*[answer] * 3)
    catalog, _ = hooked(answers, attempts=3)
    with pytest.raises(UnavailableError, match="too busy"):
        catalog.write("p", Put("a", b"1", ABSENT), Put("b", b"2", ABSENT), write_id="w1")
    assert answers.asked == ["TransactWriteItems"] * 3


@pytest.mark.server
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (500, "InternalServerError"),
        (503, "ServiceUnavailable"),
        (400, "TransactionInProgressException"),
    ],
)
def test_a_server_that_failed_during_a_write_is_asked_what_became_of_it(
    dynamodb_server: DynamoDb, table_url: str, status: int, code: str
) -> None:
    answers = Answers(failure(code), status=status)
    catalog, _ = hooked(answers, dynamodb_server, parse_address(table_url).host)
    partition = ids.new()
    catalog.write(partition, Put("a", b"1", ABSENT), write_id="w1")
    assert answers.asked == ["PutItem", "GetItem", "PutItem"]
    answers.left = [failure(code)]
    with pytest.raises(UnknownOutcomeError):
        catalog.write(partition, Put("a", b"1", ABSENT), write_id="w2")
    answers.left = [failure(code)]
    assert catalog.get(partition, "a") == Row("a", b"1", "w1")
    catalog.close()


@pytest.mark.parametrize(
    "code",
    [
        "AccessDeniedException",
        "ExpiredTokenException",
        "InvalidSignatureException",
        "MissingAuthenticationTokenException",
        "UnrecognizedClientException",
    ],
)
def test_refused_credentials_are_invalid_and_not_tried_again(code: str) -> None:
    answers = Answers(*[failure(code)] * 3)
    catalog, _ = hooked(answers)
    calls: list[Callable[[], object]] = [
        lambda: catalog.get("p", "r"),
        lambda: catalog.write("p", Put("r", b""), write_id="w"),
        lambda: catalog.ensure_table(create=True),
    ]
    for call in calls:
        with pytest.raises(InvalidError, match=f"AWS refuses these credentials: .*{code}") as told:
            call()
        assert "\n" not in str(told.value)
    assert len(answers.asked) == 3


def test_wrong_clock_is_named_as_the_cause() -> None:
    skewed = failure("InvalidSignatureException") | {
        "message": "Signature expired: 20261116T000000Z is now earlier than 20261116T010000Z"
    }
    answers = Answers(skewed, skewed)
    catalog, _ = hooked(answers)
    with pytest.raises(InvalidError, match="this machine's clock is wrong"):
        catalog.get("p", "r")
    with pytest.raises(InvalidError, match="this machine's clock is wrong"):
        catalog.write("p", Put("r", b""), write_id="w")
    assert len(answers.asked) == 2


def test_conflict_reads_nothing_and_returns_the_rows() -> None:
    item = {
        "partition": {"S": "p"},
        "row": {"S": "a"},
        "version": {"S": "v9"},
        "value": {"B": "MQ=="},
    }
    refused = failure("TransactionCanceledException", "ConditionalCheckFailed", "None")
    refused["CancellationReasons"][0]["Item"] = item
    answers = Answers(refused)
    catalog, _ = hooked(answers)
    with pytest.raises(ConflictError) as told:
        catalog.write("p", Put("a", b"2", "v1"), Put("b", b"2", ABSENT), write_id="w")
    assert told.value.rows == {"a": Row("a", b"1", "v9")}
    assert answers.asked == ["TransactWriteItems"]


def test_value_that_does_not_decode_is_a_broken_reply() -> None:
    class Once(Answers):
        """Gives one reply without a checksum, whose value lost a character."""

        def __call__(self, request: Any, **_: Any) -> AWSResponse | None:
            self.asked.append("GetItem")
            item = '{"Item":{"row":{"S":"r"},"version":{"S":"v"},"value":{"B":"%s"}}}'
            body = item % ("MQ=" if len(self.asked) == 1 else "MQ==")
            return AWSResponse(request.url, 200, {}, _Body(body.encode()))

    answers = Once()
    catalog, _ = hooked(answers)
    assert catalog.get("p", "r") == Row("r", b"1", "v")
    assert len(answers.asked) == 2


def test_other_refusals_are_invalid() -> None:
    answers = Answers(
        failure("ValidationException"),
        failure("TransactionCanceledException", "None", "ValidationError"),
    )
    catalog, _ = hooked(answers)
    with pytest.raises(InvalidError, match="ValidationException says AWS"):
        catalog.get("p", "r")
    with pytest.raises(InvalidError, match="TransactionCanceledException says AWS"):
        catalog.write("p", Put("r", b""), Put("s", b""), write_id="w")


def test_a_table_deleted_under_us_is_not_found() -> None:
    answers = Answers(*[failure("ResourceNotFoundException")] * 2)
    catalog, _ = hooked(answers)
    with pytest.raises(NotFoundError, match="catalog table `table`: not found in region us-east-1"):
        catalog.get("p", "r")
    with pytest.raises(NotFoundError):
        catalog.write("p", Put("r", b""), write_id="w")
