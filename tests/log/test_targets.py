"""Targets: webhooks on a real HTTP server, SNS on moto, and addresses that name neither."""

from __future__ import annotations

import contextlib
import hmac
import importlib.util
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from tests.servers.moto import Moto
from tests.support.lambda_endpoint import FUNCTION
from tests.support.waiting import until
from tidelog.catalog.memory import MemoryCatalog
from tidelog.clock import RandomIds, SystemClock
from tidelog.context import Context
from tidelog.errors import InvalidError, TidelogError, UnavailableError
from tidelog.log.notifier import Notification, Notifier, NotifyTarget
from tidelog.log.notify_targets import (
    LambdaTarget,
    SnsTarget,
    WebhookTarget,
    check_target,
    open_target,
    shown_target,
)
from tidelog.log.producer.producer import Producer
from tidelog.log.topics import create_topic
from tidelog.model.address import parse_address
from tidelog.model.event import Event
from tidelog.model.topic import Topic
from tidelog.store.memory import MemoryStore

LOCAL = {"TIDELOG_NOTIFY_LOCAL": "1"}
TOLD = Notification("orders", 3, 41)
ARN = "arn:aws:sns:us-east-1:123456789012:orders"


class Webhook(ThreadingHTTPServer):
    """A server that answers with the given statuses, then with 200; 0 for no answer at all."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.requests: list[tuple[str, str, Any]] = []
        self.signatures: list[str] = []
        self.released = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hooks/orders"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Webhook)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.signatures.append(self.headers["Tidelog-Signature"] or "")
        self.server.requests.append((self.path, self.headers["Content-Type"], body))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        if status == 0:
            self.server.released.wait(600)
            return
        self.send_response(status)
        if 300 <= status < 400:
            self.send_header("Location", self.path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing on the tests' own output."""


@contextmanager
def answering(*statuses: int) -> Iterator[Webhook]:
    with Webhook(*statuses) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()


@contextmanager
def a_notified_producer(
    url: str, open_: Callable[[str], NotifyTarget] = lambda url: open_target(url, LOCAL)
) -> Iterator[tuple[Notifier, Producer]]:
    clock = SystemClock()
    context = Context(MemoryStore(clock), MemoryCatalog(), clock, RandomIds(), random.Random(7))
    wanted = Topic("orders", context.ids.new(), 1, 0, notify=(url,), max_latency_ms=50)
    topic = create_topic(context, wanted)
    notifier = Notifier(context, open_)
    notifier.watch(topic)
    with Producer(context, topic) as producer:
        yield notifier, producer
    notifier.close(0)


def test_a_webhook_gets_the_notification_as_json() -> None:
    with answering() as server:
        open_target(server.url, LOCAL).send(TOLD)
    body = {"topic": "orders", "partition": 3, "offset": 41}
    assert server.requests == [("/hooks/orders", "application/json", body)]


def test_a_webhook_that_answers_byte_by_byte_times_out_as_a_whole() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def drip() -> None:
            raw, _ = listener.accept()
            with raw, contextlib.suppress(OSError):
                for byte in b"HTTP/1.1 200 OK\r\nx: " + b"x" * 10_000:
                    raw.sendall(bytes((byte,)))
                    if stop.wait(0.05):
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        target = WebhookTarget(parse_address(url), timeout_s=0.5, local=True)
        started_s = time.monotonic()
        with pytest.raises(UnavailableError, match="timed out"):
            target.send(TOLD)
        assert time.monotonic() - started_s < 60, "not as long as it drips"
        stop.set()
        thread.join()


def test_many_addresses_of_a_webhook_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        place = listener.getsockname()
        for _ in range(3):  # more than wait to be accepted: further ones get no answer
            raw = stack.enter_context(socket.socket())
            raw.setblocking(False)
            raw.connect_ex(place)
        found = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **named: found * 200)
        target = WebhookTarget(parse_address(f"http://x:{place[1]}/"), timeout_s=0.5, local=True)
        started_s = time.monotonic()
        with pytest.raises(UnavailableError, match="timed out"):
            target.send(TOLD)
        assert time.monotonic() - started_s < 60, "not half a second for each"


def test_a_name_server_that_does_not_answer_does_not_hold_up_a_webhook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **named: ended.wait(60))
    target = WebhookTarget(parse_address("http://slow.example/"), timeout_s=0.2, local=True)
    with pytest.raises(UnavailableError, match="timed out after"):
        target.send(TOLD)
    assert not ended.is_set()
    ended.set()


def test_a_webhook_is_signed_with_the_secret_of_the_environment() -> None:
    with answering() as server:
        open_target(server.url, {**LOCAL, "TIDELOG_NOTIFY_SECRET": "s3cret"}).send(TOLD)
    signature = server.signatures[0]
    found = re.fullmatch(r"t=(\d+),v1=([0-9a-f]{64})", signature)
    assert found is not None
    body = msgspec.json.encode(TOLD)
    assert hmac.new(b"s3cret", f"{found[1]}.".encode() + body, "sha256").hexdigest() == found[2]
    assert abs(int(found[1]) - time.time()) < 300


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "169.254.169.254",
        "[fe80::1]",
        "0.0.0.0",
        "127.9.9.9",
        "[::ffff:127.0.0.1]",
        "2130706433",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::1]",
        "[fd00:ec2::254]",
        "168.63.129.16",
    ],
)
def test_addresses_of_the_machine_and_its_link_are_refused(host: str) -> None:
    with answering() as server:
        port = server.server_address[1]
        target = open_target(f"http://{host}:{port}/latest/meta-data", {})
        with pytest.raises(TidelogError) as caught:
            target.send(TOLD)
        assert isinstance(caught.value, InvalidError)
        assert server.requests == []


def test_a_target_is_shown_without_what_may_be_a_secret() -> None:
    assert shown_target("https://u:p@hooks.example/T0/B0/xyz?key=1") == "https://hooks.example/…"
    assert shown_target("https://hooks.example/") == "https://hooks.example"
    assert shown_target(f"sns:{ARN}") == f"sns:{ARN}"


def test_a_webhook_that_does_not_answer_times_out() -> None:
    with answering(0) as server:
        target = WebhookTarget(parse_address(server.url), timeout_s=0.2, local=True)
        started_s = time.monotonic()
        with pytest.raises(UnavailableError, match="timed out"):
            target.send(TOLD)
        assert time.monotonic() - started_s < 60


@pytest.mark.parametrize("status", [500, 502, 503, 429, 408])
def test_what_may_pass_is_unavailable(status: int) -> None:
    with answering(status) as server, pytest.raises(UnavailableError, match=f"answered {status}"):
        open_target(server.url, LOCAL).send(TOLD)


@pytest.mark.parametrize("status", [301, 302, 307, 400, 401, 404, 410])
def test_what_will_not_pass_is_invalid_and_redirects_are_not_followed(status: int) -> None:
    with answering(status) as server:
        with pytest.raises(InvalidError, match=f"answered {status}") as caught:
            open_target(server.url, LOCAL).send(TOLD)
        assert "hooks" not in str(caught.value)  # a path may be a secret
        assert len(server.requests) == 1


def test_nobody_at_the_address_is_unavailable() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # bound, but not listening
        target = open_target(f"http://127.0.0.1:{unheard.getsockname()[1]}/", LOCAL)
        with pytest.raises(UnavailableError, match="no answer"):
            target.send(TOLD)


def test_a_500_is_retried_until_it_succeeds() -> None:
    with answering(500, 503) as server, a_notified_producer(server.url) as (notifier, producer):
        producer.append([Event(b"a"), Event(b"b")])
        assert notifier.close(60)
        assert [body["offset"] for _, _, body in server.requests] == [1, 1, 1]
        assert notifier.errors == []


def test_a_400_is_not_retried() -> None:
    with answering(400) as server, a_notified_producer(server.url) as (notifier, producer):
        producer.append([Event(b"a")])
        until(lambda: notifier.error_count == 1)
        assert not notifier.close(60)
        assert len(server.requests) == 1
        assert [type(error) for error in notifier.errors] == [InvalidError]


def test_a_hanging_webhook_does_not_slow_a_producer() -> None:
    def patient(url: str) -> NotifyTarget:
        return WebhookTarget(parse_address(url), timeout_s=600, local=True)

    with answering(0, 0, 0) as server, a_notified_producer(server.url, patient) as (_, producer):
        producer.append([Event(b"first")])
        until(lambda: len(server.requests) == 1)
        for _ in range(50):
            producer.append([Event(b"x")])
        assert len(server.requests) == 1  # which hangs still


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("htps://example.com/", r"unknown scheme `htps` \(did you mean `https`\?\): give one of"),
        ("ftp://example.com/", "unknown scheme `ftp`.*: give one of http, https, lambda, sns"),
        ("example.com/hook", "has no scheme"),
        ("https:///hook", "names no host"),
        ("https://user:word@example.com/", "user or password"),
        ("https://example.com/?token=abc", "looks like a secret"),
        ("https://example.com/a b", "characters that a URL cannot hold"),
        ("sns:orders", "is not the ARN"),
        ("sns:arn:aws:sqs:us-east-1:123456789012:orders", "is not the ARN"),
        (f"sns:{ARN}.fifo", "FIFO"),
        ("lambda:billing", "is not the ARN of a function"),
        (f"lambda:{ARN}", "is not the ARN of a function"),
        (f"sns:{FUNCTION}", "is not the ARN of a topic"),
        (f"lambda:{FUNCTION}?endpoint=127.0.0.1", "endpoint"),
        (f"sns:{ARN}?endpont=http://127.0.0.1", "did you mean `endpoint`"),
        (f"sns:{ARN}?endpoint=127.0.0.1", "endpoint"),
        (f"sns:{ARN}?endpoint=http://me:word@127.0.0.1", "without user or password"),
    ],
)
def test_an_address_that_names_no_target_is_refused(url: str, words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        open_target(url, {})
    with pytest.raises(InvalidError, match=words):
        check_target(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com",
        "https://example.com/a?b=c",
        f"sns:{ARN}",
        f"sns://{ARN}",
        f"lambda:{FUNCTION}:live",
    ],
)
def test_an_address_is_checked_without_being_opened(url: str) -> None:
    check_target(url)


def test_sns_without_its_sdk_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidError, match=r"pip install 'tidelog\[aws\]'"):
        open_target(f"sns:{ARN}", {})


def test_sns_without_credentials_is_invalid() -> None:
    target = open_target(f"sns:{ARN}?endpoint=http://127.0.0.1:9", {})
    with pytest.raises(InvalidError, match="credentials"):
        target.send(TOLD)


KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "word"}


def test_sns_out_of_reach_is_unavailable() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        with pytest.raises(UnavailableError, match="no answer"):
            open_target(f"sns:{ARN}?endpoint={endpoint}", KEYS).send(TOLD)


def test_aws_that_accepts_no_connection_in_time_is_unavailable() -> None:
    with socket.socket() as busy, contextlib.ExitStack() as waiting:
        busy.bind(("127.0.0.1", 0))
        busy.listen(0)
        for _ in range(3):  # fills its queue
            raw = waiting.enter_context(socket.socket())
            raw.setblocking(False)
            raw.connect_ex(busy.getsockname())
        address = parse_address(f"sns:{ARN}?endpoint=http://127.0.0.1:{busy.getsockname()[1]}")
        with pytest.raises(UnavailableError, match="no answer"):
            SnsTarget(address, KEYS, timeout_s=0.2).send(TOLD)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (409, "ResourceConflictException", UnavailableError),  # a function that is being updated
        (403, "ExpiredTokenException", UnavailableError),  # new ones are on their way
        (400, "ThrottlingException", UnavailableError),
        (403, "AccessDeniedException", InvalidError),
        (404, "ResourceNotFoundException", InvalidError),
    ],
)
def test_aws_is_asked_again_where_its_refusal_may_pass(
    status: int, code: str, kind: type[TidelogError], monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.exceptions import ClientError

    def refuse(*_: object) -> None:
        said = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
        raise ClientError(said, "Invoke")  # type: ignore[arg-type]

    monkeypatch.setattr(LambdaTarget, "_call", refuse)
    with pytest.raises(kind):
        open_target(f"lambda:{FUNCTION}", KEYS).send(TOLD)


def a_client(service: str, moto: Moto) -> Any:
    import boto3

    return boto3.session.Session("key", "word", region_name=moto.region).client(
        service, endpoint_url=moto.endpoint
    )


@pytest.mark.server
def test_sns_delivers_to_a_queue(moto_server: Moto) -> None:
    sns, sqs = a_client("sns", moto_server), a_client("sqs", moto_server)
    arn = sns.create_topic(Name="notify-target")["TopicArn"]
    queue = sqs.create_queue(QueueName="notify-target")["QueueUrl"]
    queue_arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])
    sns.subscribe(
        TopicArn=arn,
        Protocol="sqs",
        Endpoint=queue_arn["Attributes"]["QueueArn"],
        Attributes={"RawMessageDelivery": "true"},
    )
    try:
        for prefix in ("sns:", "sns://"):
            open_target(f"{prefix}{arn}?endpoint={moto_server.endpoint}", KEYS).send(TOLD)
            received = sqs.receive_message(QueueUrl=queue, WaitTimeSeconds=20)["Messages"]
            assert [json.loads(message["Body"]) for message in received] == [
                {"topic": "orders", "partition": 3, "offset": 41}
            ]
            sqs.delete_message(QueueUrl=queue, ReceiptHandle=received[0]["ReceiptHandle"])
    finally:
        sqs.delete_queue(QueueUrl=queue)
        sns.delete_topic(TopicArn=arn)


@pytest.mark.server
def test_an_sns_topic_that_is_not_there_is_invalid(moto_server: Moto) -> None:
    target = open_target(f"sns:{ARN}-missing?endpoint={moto_server.endpoint}", KEYS)
    with pytest.raises(InvalidError, match="NotFound"):
        target.send(TOLD)
