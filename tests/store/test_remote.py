"""What answers of S3 mean: refusals for good, refusals for now, and replies that are none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from botocore.credentials import RefreshableCredentials

from tests.support.answers import Answer, AnsweringServer, AskedRequest, answering, s3_error
from tests.support.homes import a_store
from tidelog.clock import SystemClock
from tidelog.errors import (
    AlreadyExistsError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.model.times import Backoff
from tidelog.store import remote, s3
from tidelog.store.base import Store
from tidelog.store.wrappers import RetryingStore
from tidelog.testing.scheduler import FakeClock

WHOLE = {"ETag": '"e"', "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
HTML = Answer(200, b"<html><body>It works!</body></html>", {"Content-Type": "text/html"})


class Fixture:
    """A store whose server says what a test wants."""

    def __init__(self, server: AnsweringServer) -> None:
        self.server = server
        self.raw = a_store(f"s3://bucket/home?endpoint={server.endpoint}&region=eu-west-1")
        self.store: Store = RetryingStore(
            self.raw, clock=FakeClock(), random=random.Random(1), backoff=Backoff()
        )

    def says(self, *answers: Answer) -> None:
        """Give these answers in turn, the last one for ever."""
        left = list(answers)
        self.server.asked.clear()
        self.server.answer = lambda _: left.pop(0) if len(left) > 1 else left[0]

    def calls(self) -> list[Callable[[], object]]:
        return [
            lambda: self.store.put("a", b"x"),
            lambda: self.store.replace("a", b"x", '"e"'),
            lambda: self.store.get("a"),
            lambda: list(self.store.list("a")),
            lambda: self.store.delete(["a"]),
            lambda: self.store.copy("a", "b"),
        ]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fixture]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with answering(lambda _: HTML) as server:
        yield Fixture(server)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (s3_error(400, "ExpiredToken"), "they have expired: renew them"),
        (s3_error(403, "RequestTimeTooSkewed"), "this machine's clock is wrong"),
        (s3_error(403, "AccessDenied"), "check the credentials"),
        (s3_error(403, "SignatureDoesNotMatch"), "check the credentials"),
        (s3_error(400, "AuthorizationHeaderMalformed"), "add [?]region="),
        (s3_error(301, "PermanentRedirect"), "add [?]region="),
        (s3_error(400, "EntityTooLarge"), "lower segment_bytes"),
        (s3_error(405, "MethodNotAllowed"), "check the store's URL"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lasting_refusals_are_permanent_and_asked_once(
    world: Fixture, answer: Answer, told: str
) -> None:
    for call in world.calls():
        world.says(answer)
        with pytest.raises(InvalidError, match=told) as refused:
            call()
        assert "\n" not in str(refused.value)
        assert len(world.server.asked) == 1


def test_conditional_conflict_means_try_again(world: Fixture) -> None:
    busy = s3_error(409, "ConditionalRequestConflict")
    world.says(busy, busy, Answer(200, b"", WHOLE))
    assert world.store.put("a", b"x") == '"e"'
    assert len(world.server.asked) == 3
    world.says(busy, Answer(200, b"", WHOLE))
    assert world.store.replace("a", b"x", '"d"') == '"e"'
    for call in (
        lambda: world.store.put("a", b"x"),
        lambda: world.store.replace("a", b"x", '"d"'),
        lambda: world.store.copy("a", "b"),
    ):
        world.says(busy)
        with pytest.raises(UnavailableError, match="ConditionalRequestConflict"):
            call()
        assert len(world.server.asked) == 8


def test_failed_precondition_means_exists(world: Fixture) -> None:
    world.says(s3_error(412, "PreconditionFailed"))
    with pytest.raises(AlreadyExistsError):
        world.store.put("a", b"x")
    assert len(world.server.asked) == 1


@pytest.mark.parametrize("code", ["RequestTimeout", "IncompleteBody", "BadDigest"])
def test_passing_refusals_are_repeated(world: Fixture, code: str) -> None:
    world.says(s3_error(400, code), Answer(200, b"", WHOLE))
    assert world.store.put("a", b"x") == '"e"'


LISTING = (
    b'<?xml version="1.0"?><ListBucketResult><Name>bucket</Name>%s<KeyCount>%d</KeyCount>'
    b"<IsTruncated>%s</IsTruncated></ListBucketResult>"
)
CONTENTS = (
    b"<Contents><Key>home/%s</Key><LastModified>2015-10-21T07:28:00.000Z</LastModified>"
    b'<ETag>"e"</ETag><Size>1</Size></Contents>'
)


@pytest.mark.parametrize(
    "junk",
    [
        HTML,
        Answer(200, b""),
        Answer(200, b"<html>"),
        Answer(200, LISTING[:60]),
        Answer(200, LISTING % (CONTENTS % b"a", 2, b"false")),
        Answer(200, LISTING % (b"", 0, b"false"), length=4_000),
        Answer(503, b"busy"),
    ],
)
def test_page_that_is_not_a_listing_is_no_empty_listing(world: Fixture, junk: Answer) -> None:
    world.says(junk)
    with pytest.raises(UnavailableError):
        list(world.store.list())
    world.says(junk, Answer(200, LISTING % (CONTENTS % b"a", 1, b"false")))
    assert [info.key for info in world.store.list()] == ["a"]


def test_empty_listing_of_s3_is_empty(world: Fixture) -> None:
    world.says(Answer(200, LISTING % (b"", 0, b"false")))
    assert list(world.store.list()) == []


@pytest.mark.parametrize(
    "junk",
    [
        HTML,
        Answer(200, b"abc", WHOLE, length=10),
        Answer(404, b"<html>no such page</html>", {"Content-Type": "text/html"}),
        Answer(500, b""),
    ],
)
def test_foreign_or_short_object_is_no_object(world: Fixture, junk: Answer) -> None:
    world.says(junk)
    with pytest.raises(UnavailableError):
        world.store.get("a")
    world.says(junk, Answer(200, b"abc", WHOLE))
    assert world.store.get("a") == b"abc"


def test_range_that_is_shorter_than_it_says_is_fetched_again(world: Fixture) -> None:
    part = WHOLE | {"Content-Range": "bytes 10-19/100"}
    world.says(Answer(206, b"abc", part), Answer(206, b"0123456789", part))
    assert world.store.get("a", 10, 20) == b"0123456789"
    other = WHOLE | {"Content-Range": "bytes 0-9/100"}
    world.says(Answer(206, b"abcdefghij", other), Answer(206, b"0123456789", part))
    assert world.store.get("a", 10, 20) == b"0123456789"
    last = WHOLE | {"Content-Range": "bytes 10-14/15"}
    world.says(Answer(206, b"01234", last))
    assert world.store.get("a", 10, 20) == b"01234"


def test_head_without_an_etag_is_not_believed(world: Fixture) -> None:
    world.says(HTML)
    with pytest.raises(UnavailableError, match="no etag"):
        world.store.head("a")
    world.says(s3_error(404, "NoSuchKey"))
    with pytest.raises(NotFoundError):
        world.store.head("a")


def test_put_answered_by_a_page_is_unsure(world: Fixture) -> None:
    world.says(HTML)
    with pytest.raises(UnknownOutcomeError):
        world.raw.put("a", b"x")


def test_hung_connection_is_left_after_its_time_out(
    world: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "REQUEST_TIMEOUT_S", 0.3)
    monkeypatch.setattr(s3, "REQUEST_TIMEOUT_S", 0.3)
    hung = Fixture(world.server)
    release = __import__("threading").Event()

    def hang(_: AskedRequest) -> Answer:
        release.wait(60)
        return HTML

    world.server.answer = hang
    for call in (
        lambda: hung.raw.put("a", b"x"),
        lambda: hung.raw.get("a"),
        lambda: hung.raw.get("a", 0, 10),
        lambda: hung.raw.head("a"),
        lambda: list(hung.raw.list()),
    ):
        with pytest.raises((UnavailableError, UnknownOutcomeError), match="no answer"):
            call()
    assert not release.is_set()
    release.set()


def test_time_outs_grow_with_the_size() -> None:
    made: list[tuple[float, float | None]] = []

    def connect(options: Any) -> Any:
        idle = options.get("read_timeout")
        made.append((options["timeout"].total_seconds(), idle and idle.total_seconds()))
        return object()

    clients = remote.Clients(connect, {})
    for size in (0, 1_000, 8 << 20, 200 << 20):
        clients.for_size(size)
    clients.for_size(8 << 20, reads=True)
    assert made == [(10, None), (20, None), (320, None), (20, 10)]


def test_tries_of_one_operation_have_a_total_bound(world: Fixture) -> None:
    clock = FakeClock()
    began_s = clock.monotonic_s()
    slow = _Slow(world.raw, clock)
    store = RetryingStore(
        slow, clock=clock, random=random.Random(1), backoff=Backoff(attempts=100, total_ms=30_000)
    )
    with pytest.raises(UnavailableError):
        store.get("a")
    assert slow.tries == 3
    assert 30 <= clock.monotonic_s() - began_s <= 40


class _Slow:
    """A store that takes ten seconds to give no answer."""

    def __init__(self, inner: Store, clock: FakeClock) -> None:
        self.inner, self.clock, self.tries = inner, clock, 0

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.tries += 1
        self.clock.sleep(10)
        raise UnavailableError(f"{key}: no answer")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


# Credentials.


class _Session:
    """Gives credentials that expire soon, as a role does."""

    def __init__(self, lasts_s: float) -> None:
        self.given = 0
        self.lasts_s = lasts_s

    def get_credentials(self) -> RefreshableCredentials:
        return RefreshableCredentials.create_from_metadata(
            metadata=self.renew(),
            refresh_using=self.renew,
            method="test",
            advisory_timeout=1,
            mandatory_timeout=1,
        )

    def renew(self) -> dict[str, str]:
        self.given += 1
        end = datetime.now(UTC) + timedelta(seconds=self.lasts_s)
        return {
            "access_key": f"key{self.given}",
            "secret_key": "secret",
            "token": f"token{self.given}",
            "expiry_time": end.isoformat(),
        }


def test_expiring_credentials_are_renewed(world: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    session = _Session(lasts_s=3)
    monkeypatch.setattr(s3, "aws_session", lambda: session)
    store = a_store(f"s3://bucket/home?endpoint={world.server.endpoint}&region=eu-west-1")
    world.says(Answer(200, b"", WHOLE))
    until_s = SystemClock().monotonic_s() + 60
    tokens: list[str] = []
    while len(set(tokens)) < 3:
        assert SystemClock().monotonic_s() < until_s
        store.put("a", b"x")
        tokens.append(world.server.asked[-1].headers["x-amz-security-token"])
        SystemClock().sleep(0.1)
    assert session.given >= 3


def test_credentials_carry_the_end_that_their_provider_names() -> None:
    session = _Session(lasts_s=3_600)
    given = s3.AwsCredentials(session, "s3://b")()
    assert given["token"] == "token1"
    left = given["expires_at"] - datetime.now(UTC)
    assert timedelta(minutes=58) < left <= timedelta(minutes=60)


def test_keys_without_an_end_do_not_expire() -> None:
    class Fixed:
        def get_credentials(self) -> Any:
            from botocore.credentials import Credentials

            return Credentials("key", "secret")

    assert s3.AwsCredentials(Fixed(), "s3://b")()["expires_at"] is None
