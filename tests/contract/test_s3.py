"""The store contract on S3, by versitygw, and what happens when the server says no."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator

import boto3
import pytest

from tests.servers.moto import Moto
from tests.servers.s3 import S3
from tests.support.homes import a_store
from tests.support.waiting import until
from tidelog.catalog.memory import MemoryCatalog
from tidelog.clock import SystemClock
from tidelog.context import Context
from tidelog.errors import AlreadyExistsError, InvalidError, NotFoundError, UnavailableError
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.model.times import Backoff
from tidelog.store.base import Store
from tidelog.store.wrappers import RetryingStore
from tidelog.testing.scheduler import FakeClock, seeded_ids
from tidelog.testing.store_contract import StoreContract

pytestmark = pytest.mark.server


@pytest.fixture(autouse=True)
def _credentials(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)


@pytest.fixture
def url(s3_server: S3) -> str:
    bucket = s3_server.fresh_bucket()
    return f"s3://{bucket}/some/prefix?endpoint={s3_server.endpoint}&region={s3_server.region}"


class TestS3Store(StoreContract):
    @pytest.fixture
    def store(self, url: str) -> Iterator[Store]:
        yield RetryingStore(
            a_store(url), clock=SystemClock(), random=random.Random(1), backoff=Backoff()
        )


def test_wrong_credentials_are_told_in_one_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = a_store(url)
    for call in (lambda: store.put("a", b"x"), lambda: store.get("a"), lambda: list(store.list())):
        with pytest.raises(InvalidError, match="credentials") as told:
            call()
        assert "\n" not in str(told.value)


def test_missing_credentials_are_told_before_anything_is_sent(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(InvalidError, match="no AWS credentials found"):
        a_store(url)


def test_a_missing_bucket_is_told_from_a_missing_object(s3_server: S3) -> None:
    store = a_store(f"s3://no-such-bucket-here?endpoint={s3_server.endpoint}")
    for call in (lambda: store.put("a", b"x"), lambda: store.get("a"), lambda: list(store.list())):
        with pytest.raises(NotFoundError, match="the bucket does not exist"):
            call()


def test_a_server_that_is_down_is_unavailable() -> None:
    store = a_store("s3://bucket?endpoint=http://127.0.0.1:9")
    for call in (
        lambda: store.put("a", b"x"),
        lambda: store.get("a"),
        lambda: list(store.list()),
        lambda: store.delete(["a"]),
    ):
        with pytest.raises(UnavailableError, match="try again"):
            call()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", "names no bucket"),
        ("s3://bucket?regoin=x", "did you mean `region`"),
        ("s3://bucket?path_style=maybe", "give true or false"),
        ("s3://bucket?kms_key=a b", "not a valid KMS key"),
        ("s3://bucket?storage_class=DEEP_ARCHIVE", "that can be read at once"),
        ("s3://bucket?tags=team", "give up to 10 NAME=VALUE"),
        ("s3://bucket?endpoint=ftp://x", "is not an http or https address"),
        ("s3://key:secret@bucket", "credentials come from the environment"),
        ("s3://bucket?secret_access_key=x", "looks like a secret"),
        ("s33://bucket", "did you mean `s3`"),
        ("s3://bucket/a/../b", "plain names"),
    ],
)
def test_malformed_addresses_are_refused(url: str, message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        a_store(url)


def test_objects_and_copies_are_encrypted_by_the_key_of_the_address(moto_server: Moto) -> None:
    """On moto, since the other server takes no such header."""
    bucket, key = f"kms-{uuid.uuid4().hex[:8]}", "arn:aws:kms:us-east-1:123456789012:key/1234"
    client = boto3.client("s3", endpoint_url=moto_server.endpoint, region_name=moto_server.region)
    client.create_bucket(Bucket=bucket)
    where = f"endpoint={moto_server.endpoint}&region={moto_server.region}"
    for given, wanted in (("", None), (f"&kms_key={key}", key)):
        store = a_store(f"s3://{bucket}/{len(given)}?{where}{given}")
        store.put("one", b"1")
        store.copy("one", "two")
        for name in ("one", "two"):
            head = client.head_object(Bucket=bucket, Key=f"{len(given)}/{name}")
            assert head.get("SSEKMSKeyId") == wanted
            assert (head.get("ServerSideEncryption") == "aws:kms") == (wanted is not None)
    client.close()


def test_objects_and_copies_have_the_class_and_tags_of_the_address(moto_server: Moto) -> None:
    """On moto, which keeps both; the contract below holds on the other server."""
    bucket = f"marks-{uuid.uuid4().hex[:8]}"
    client = boto3.client("s3", endpoint_url=moto_server.endpoint, region_name=moto_server.region)
    client.create_bucket(Bucket=bucket)
    where = f"endpoint={moto_server.endpoint}&region={moto_server.region}"
    store = a_store(f"s3://{bucket}/p?{where}&storage_class=STANDARD_IA&tags=team=data,cost+id=a/1")
    store.put("staging/one", b"1")
    store.copy("staging/one", "archives/two")
    etag = store.put("archives/three", b"3")
    store.replace("archives/three", b"33", etag)
    with pytest.raises(NotFoundError):
        store.copy("nothing", "archives/four")
    with pytest.raises(AlreadyExistsError):
        store.copy("staging/one", "archives/two")
    assert list(store.uploads()) == []
    for name, wanted in (("staging/one", None), ("archives/two", "STANDARD_IA")):
        place = {"Bucket": bucket, "Key": f"p/{name}"}
        assert client.head_object(**place).get("StorageClass") == wanted
        tags = client.get_object_tagging(**place)["TagSet"]
        assert {each["Key"]: each["Value"] for each in tags} == {"team": "data", "cost id": "a/1"}
    head = client.head_object(Bucket=bucket, Key="p/archives/three")
    assert (head["ContentLength"], head["StorageClass"]) == (2, "STANDARD_IA")
    client.close()


class TestS3StoreWithMarks(StoreContract):
    @pytest.fixture
    def store(self, url: str) -> Iterator[Store]:
        marked = f"{url}&storage_class=STANDARD_IA&tags=team=data"
        yield RetryingStore(
            a_store(marked), clock=SystemClock(), random=random.Random(1), backoff=Backoff()
        )


@pytest.mark.server
def test_broken_uploads_are_aborted_by_their_age(s3_server: S3, url: str) -> None:
    store = a_store(url)
    bucket = url.removeprefix("s3://").partition("/")[0]
    client = s3_server._client()
    for key in ("some/prefix/a", "some/prefix/b", "elsewhere/c"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    begun_ms = SystemClock().now_ms()
    found = list(store.uploads())
    assert [upload.name for upload in found] == ["a", "b"]
    assert all(upload.may_end and upload.read is None for upload in found)
    assert store.abort_uploads(begun_ms - 3_600_000) == 0
    assert store.abort_uploads(begun_ms + 60_000) == 2
    assert store.abort_uploads(begun_ms + 60_000) == 0
    left = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [upload["Key"] for upload in left] == ["elsewhere/c"]
    client.close()


def test_sweep_aborts_uploads_that_lost_replies_left(s3_server: S3, url: str) -> None:
    bucket = url.removeprefix("s3://").partition("/")[0]
    client = s3_server._client()
    client.create_multipart_upload(Bucket=bucket, Key="some/prefix/topics/x")
    # A clock ahead does not count: the store's own time is the earlier one.
    clock = FakeClock(SystemClock().now_ms() + 7_200_000)
    context = Context(a_store(url), MemoryCatalog(), clock, seeded_ids(1), random.Random(1))
    assert sweep_home(context, 3_600_000).uploads_aborted == 0
    until(lambda: sweep_home(context, 0).uploads_aborted == 1)
    assert sweep_home(context, 0).uploads_aborted == 0
    client.close()
