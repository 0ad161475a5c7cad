"""Safya's own acceptance list, on S3 with DynamoDB and on S3 with CQL."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator

import pytest

import tidelog
from tests.servers.cassandra import Cassandra
from tests.servers.dynamodb import DynamoDb
from tests.servers.s3 import S3
from tidelog import Event, Home
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_staged
from tidelog.home import create_home
from tidelog.log.producer.append import Appender
from tidelog.settings import Settings

pytestmark = pytest.mark.server

TTL_MS = 600_000  # nothing here is taken over, however slow the machine is


@pytest.fixture(
    scope="module",
    params=[
        "dynamodb",
        pytest.param("cql", marks=pytest.mark.xdist_group("cassandra_server")),
    ],
)
def home(request: pytest.FixtureRequest) -> Iterator[Home]:
    s3: S3 = request.getfixturevalue("s3_server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
        if request.param == "dynamodb":
            dynamodb: DynamoDb = request.getfixturevalue("dynamodb_server")
            name = f"safya{time.monotonic_ns()}"
            catalog = f"dynamodb://{name}?endpoint={dynamodb.endpoint}&region={dynamodb.region}"
        else:
            cassandra: Cassandra = request.getfixturevalue("cassandra_server")
            keyspace = f"safya{time.monotonic_ns()}"
            catalog = f"cql://{cassandra.host}:{cassandra.port}/{keyspace}"
        store = f"s3://{s3.fresh_bucket()}?endpoint={s3.endpoint}&region={s3.region}"
        settings = Settings(store, catalog, linger_ms=10, lease_ttl_ms=TTL_MS)
        with create_home(settings)[0] as made:
            yield made


@pytest.fixture(autouse=True)
def _environment(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """For homes that a test opens by itself."""
    monkeypatch.setenv("TIDELOG_LEASE_TTL_MS", str(TTL_MS))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)


@pytest.fixture
def topic(home: Home) -> str:
    name = f"t{time.monotonic_ns()}"
    home.create_topic(name, 2)
    return name


class Hook:
    """A webhook that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[dict[str, object]] = []
        hook = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.told.append(json.loads(body))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    yield made
    made.close()


def read_all(home: Home, topic: str, name: str) -> list[Event]:
    consumer = home.consumer(topic, name)
    found: list[Event] = []
    for partition in range(2):
        while not consumer.read_once(partition, 100, found.append)["done"]:
            pass
    return found


def test_an_event_is_read_after_it_was_produced_and_not_twice(home: Home, topic: str) -> None:
    home.append(topic, [Event(b"hello", key=b"k")])
    assert [event.value for event in read_all(home, topic, "c")] == [b"hello"]
    assert read_all(home, topic, "c") == []
    assert len(read_all(home, topic, "another")) == 1


def test_order_holds_for_each_of_three_concurrent_writers(home: Home, topic: str) -> None:
    def write(writer: int) -> None:
        with home.producer(topic) as producer:
            for number in range(20):
                producer.send(f"{writer}:{number}".encode(), key=b"same").result(60)

    writers = [threading.Thread(target=write, args=(n,)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    values = [(event.value or b"").decode().split(":") for event in read_all(home, topic, "c")]
    assert len(values) == 60
    for writer_number in range(3):
        numbers = [int(n) for w, n in values if int(w) == writer_number]
        assert numbers == list(range(20))


def test_a_producer_that_dies_before_its_commit_leaves_no_hole(home: Home, topic: str) -> None:
    home.append(topic, [Event(b"before")], partition=0)
    dying = Appender(home.context, home.topic(topic), "~dying")
    dying.upload(encode_staged([(0, table_of([Event(b"never")], 0))]))
    home.append(topic, [Event(b"after")], partition=0)
    events = read_all(home, topic, "c")
    assert [(event.offset, event.value) for event in events] == [(0, b"before"), (1, b"after")]


def test_two_readers_of_one_name_share_five_events(home: Home, topic: str) -> None:
    home.append(topic, [Event(b"%d" % n) for n in range(5)], partition=0)
    handled: list[bytes] = []

    def read() -> None:
        with tidelog.open(home.config) as opened:
            consumer = opened.consumer(topic, "c")
            while not consumer.read_once(0, 5, lambda e: handled.append(e.value or b""))["done"]:
                time.sleep(0.02)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert sorted(handled) == [b"0", b"1", b"2", b"3", b"4"]


def test_one_event_makes_one_notification(home: Home, hook: Hook) -> None:
    name = f"t{time.monotonic_ns()}"
    home.create_topic(name, 1, notify=[hook.url], max_latency_ms=300)
    home.append(name, [Event(b"x")])
    end = time.monotonic() + 60
    while not hook.told:
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(1.5)  # several times as long as a second one would take
    assert hook.told == [{"topic": name, "partition": 0, "offset": 0}]


def test_ten_parallel_writes_make_fewer_notifications_and_cover_the_last(
    home: Home, hook: Hook
) -> None:
    name = f"t{time.monotonic_ns()}"
    home.create_topic(name, 1, notify=[hook.url], max_latency_ms=500)
    home.append(name, [Event(b"first")])
    writers = [threading.Thread(target=home.append, args=(name, [Event(b"x")])) for _ in range(9)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    end = time.monotonic() + 60
    while not hook.told or hook.told[-1]["offset"] != 9:
        assert time.monotonic() < end, hook.told
        time.sleep(0.05)
    assert len(hook.told) < 10


def test_the_config_string_is_all_that_is_needed(home: Home, topic: str) -> None:
    home.append(topic, [Event(b"x")], partition=1)
    with tidelog.open(home.config) as opened:
        assert [event.value for event in opened.read(topic, 1)] == [b"x"]


def test_150_writers_at_3_events_a_second_are_kept_up_with(home: Home, topic: str) -> None:
    """4,096 bytes each, for a few seconds: at least nine tenths of the wanted rate.

    Up to five times, since other work on the machine may hold up a whole run; some time apart, so
    that it does not hold up all of them.
    """
    shares = [share_in_time(home, topic, seconds=4, writers=150, rate=3)]
    while shares[-1] < 0.9 and len(shares) < 5:
        time.sleep(15)
        shares.append(share_in_time(home, topic, seconds=4, writers=150, rate=3))
    assert max(shares) >= 0.9, shares


def share_in_time(home: Home, topic: str, seconds: int, writers: int, rate: int) -> float:
    """Which part of the events that writers should send in so many seconds is stored by then."""
    done: list[float] = []
    with home.producer(topic) as producer:

        def write() -> None:
            for number in range(seconds * rate):
                due = began + number / rate
                time.sleep(max(0, due - time.monotonic()))
                producer.send(b"x" * 4_096, key=b"%d" % number).result(60)
                done.append(time.monotonic())

        began = time.monotonic()
        threads = [threading.Thread(target=write) for _ in range(writers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(done) == seconds * writers * rate
    return sum(at <= began + seconds for at in done) / len(done)
