"""The Kafka sink against a real broker: every byte, once, over crashes, repeats and rivals."""

from __future__ import annotations

import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    Message,
    TopicPartition,
)

from tests.servers import kafka
from tests.servers.kafka import Kafka
from tests.support.ranges import EVERYTHING, NAMED, batch_of, stage
from tests.support.waiting import until
from tidelog import Event, Home
from tidelog.codec.event_batch import STORED_SCHEMA
from tidelog.connectors.by_url import sink_at, source_at
from tidelog.connectors.kafka.sink import KafkaSink, open_kafka
from tidelog.connectors.kafka.transactions import Transactions
from tidelog.connectors.sink import TargetSink
from tidelog.connectors.source import SourcePartition, SourceRange
from tidelog.errors import CorruptError, InvalidError, NotFoundError, UnavailableError
from tidelog.home import World, create_home
from tidelog.model.address import parse_address
from tidelog.settings import Settings

pytestmark = pytest.mark.server

GROUP = "tidelog-pipe-from/0"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    with create_home(settings, world=World(environ={}))[0] as made:
        yield made


class Target:
    """A topic of the shared broker, and what is committed in it."""

    def __init__(self, server: Kafka, partitions: int = 3, **settings: str) -> None:
        self.server = server
        self.bootstrap = server.bootstrap
        self.name = f"sink-{uuid.uuid4().hex}"
        self.admin = server.admin()
        self.create(partitions, **settings)

    def create(self, partitions: int = 3, **settings: str) -> None:
        self.partitions = partitions
        settings = {"retention.ms": "-1", **settings}  # our events are from 1970
        self.server.create_topic(self.name, partitions, settings)

    def delete(self) -> None:
        for future in self.admin.delete_topics([self.name]).values():
            future.result()

    def url(self, options: str = "") -> str:
        return f"kafka://{self.bootstrap}/{self.name}{options}"

    def settle(self) -> None:
        self.server.settle(self.name, self.partitions)

    def messages(self, partition: int) -> list[Message]:
        """What is committed, once all transactions are over."""
        self.settle()
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": "reader",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 10,
                "isolation.level": "read_committed",
                "log_level": 0,
            }
        )
        consumer.assign([TopicPartition(self.name, partition, 0)])
        found: list[Message] = []
        while True:
            message = consumer.poll(60)
            assert message is not None, "no end of the partition"
            if message.error() is None:
                found.append(message)
            elif message.error().code() == KafkaError._PARTITION_EOF:
                consumer.close()
                return found

    def values(self) -> list[bytes | None]:
        return [each.value() for p in range(self.partitions) for each in self.messages(p)]


@pytest.fixture
def target(kafka_server: Kafka) -> Target:
    return Target(kafka_server, **{"message.timestamp.after.max.ms": str((1 << 63) - 1)})


def numbered(first: int, end: int) -> list[Event]:
    return [Event(b"%d" % n, None if n % 3 else b"key", None, 1_000 + n) for n in range(first, end)]


def in_order(found: Sequence[bytes | None], end: int) -> bool:
    return [int(value or b"-1") for value in found] == list(range(end))


def test_every_byte_is_kept(home: Home, target: Target) -> None:
    sink = sink_at(home.context, target.url("?partition=same"))
    batch = batch_of(EVERYTHING, partition=2, base=40)
    sink.publish(stage(sink, [batch]))
    found = target.messages(2)
    for message, event in zip(found, EVERYTHING, strict=True):
        assert message.value() == event.value
        assert message.key() == event.key
        zero = (("tidelog-kafka-time", b"0"),) if not event.timestamp else ()
        assert tuple(message.headers() or ()) == (*event.headers, *zero)
        assert message.timestamp()[1] == (event.timestamp or -1)
    source = source_at(home.context, target.url())
    partition = SourcePartition(target.name, "2")
    bounds = source.bounds([partition])[partition]
    (chunk,) = source.read(SourceRange(partition, "0", bounds.end))
    names = STORED_SCHEMA.names
    assert chunk.batch.select(names).to_pylist() == batch.select(names).to_pylist()
    assert target.messages(0) == target.messages(1) == []


def test_ids_and_types_become_headers(home: Home, target: Target) -> None:
    sink = sink_at(home.context, target.url("?partition=same"))
    sink.publish(stage(sink, [batch_of(NAMED)]))
    assert [message.headers() for message in target.messages(0)] == [
        [("h", b"1"), ("tidelog-id", b"id-1"), ("tidelog-type", b"created")],
        [("tidelog-id", b"id-2")],
        [("tidelog-type", b"deleted")],
    ]


def test_partitions_are_chosen_as_kafka_does(home: Home, target: Target) -> None:
    sink = sink_at(home.context, target.url())
    events = [Event(b"%d" % n, b"key-%d" % (n % 7)) for n in range(70)]
    sink.publish(stage(sink, [batch_of(events)]))
    keys = [{message.key() for message in target.messages(p)} for p in range(3)]
    assert sum(map(len, keys)) == 7  # each key in one partition
    assert b"key-0" in keys[_murmur2(b"key-0") % 3]
    assert len(target.values()) == 70


def test_a_range_that_is_published_again_sends_nothing(home: Home, target: Target) -> None:
    sink = sink_at(home.context, target.url("?partition=same"))
    first = stage(sink, [batch_of(numbered(0, 10))])
    second = stage(sink, [batch_of(numbered(10, 25))], 10)
    for manifest in (first, first, second, second):
        sink.publish(manifest)
    with pytest.raises(InvalidError, match="says number 25"):
        sink.publish(first)  # its driver was fenced long ago, or the catalog is an older copy
    sink.discard(first)
    sink.discard(second)
    sink_at(home.context, target.url("?partition=same")).publish(second)
    assert in_order(target.values(), 25)
    assert list(home.store.list("staging/")) == []


def test_ranges_without_events_leave_no_trace(home: Home, target: Target) -> None:
    sink = sink_at(home.context, target.url("?partition=same"))
    sink.publish(stage(sink, []))
    sink.publish(stage(sink, [batch_of(numbered(0, 3))]))
    sink.publish(stage(sink, [], 3))
    assert in_order(target.values(), 3)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transactions of ten events, and segments of 25."""
    monkeypatch.setattr("tidelog.connectors.kafka.transactions._AT_ONCE", 5)
    monkeypatch.setattr("tidelog.connectors.kafka.transactions._EVENTS_MAX", 10)
    monkeypatch.setattr("tidelog.log.producer.staged.SEGMENT_EVENTS_MAX", 25)


class Death(BaseException):
    """The process ends here."""


def dying(after: int, monkeypatch: pytest.MonkeyPatch, name: str) -> Callable[[], None]:
    """Let the n-th call of a step be the last, its effect included; gives what undoes that."""
    real = getattr(Transactions, name)
    calls = [0]

    def step(self: Transactions, *args: object) -> object:
        result = real(self, *args)
        calls[0] += 1
        if calls[0] == after:
            raise Death
        return result

    monkeypatch.setattr(Transactions, name, step)
    return lambda: monkeypatch.setattr(Transactions, name, real)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "step",
    [
        pytest.param("_begin", marks=pytest.mark.long),
        pytest.param("_produce", marks=pytest.mark.long),
        "_commit",
    ],
)
def test_who_dies_inside_of_a_range_is_finished_by_the_next(
    home: Home, target: Target, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    sink = sink_at(home.context, target.url("?partition=same"))
    ordinal = 0
    for after in range(1, 7):
        manifest = stage(sink, [batch_of(numbered(ordinal, ordinal + 37))], ordinal)
        revive = dying(after, monkeypatch, step)
        try:
            sink.publish(manifest)
            died = False
        except Death:
            died = True
        revive()
        assert died == (after <= {"_begin": 4, "_produce": 8, "_commit": 4}[step])
        sink_at(home.context, target.url("?partition=same")).publish(manifest)
        ordinal += 37
        assert in_order(target.values(), ordinal)


@pytest.mark.usefixtures("small")
def test_two_drivers_that_send_the_same_range_at_once_send_it_once(
    home: Home, target: Target
) -> None:
    manifest = stage(
        sink_at(home.context, target.url("?partition=same")), [batch_of(numbered(0, 200))]
    )
    fenced: list[UnavailableError] = []

    def publish() -> None:
        for _ in range(50):
            try:
                sink_at(home.context, target.url("?partition=same")).publish(manifest)
                return
            except UnavailableError as exc:
                fenced.append(exc)
                time.sleep(0.01 * len(fenced))

    drivers = [threading.Thread(target=publish) for _ in range(2)]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join()
    assert in_order(target.values(), 200)
    told = {str(exc) for exc in fenced}
    assert all("another driver has begun to send the same range" in text for text in told), told


def test_an_older_driver_is_fenced(home: Home, target: Target) -> None:
    sink = sink_at(home.context, target.url("?partition=same"))
    assert isinstance(sink, KafkaSink)
    clock = home.world.clock
    old = Transactions(sink._kafka, GROUP, 10.0, clock)
    old.send(batch_of(numbered(0, 5)).select(STORED_SCHEMA.names), 0, 0)
    sink.publish(stage(sink, [batch_of(numbered(0, 5))]))
    with pytest.raises(UnavailableError, match="another driver has begun to send"):
        old.finish(5)
    old.close()
    assert in_order(target.values(), 5)


def test_an_older_driver_that_hears_of_it_while_it_sends_is_told_why(
    home: Home, target: Target
) -> None:
    sink = sink_at(home.context, target.url("?partition=same"))
    assert isinstance(sink, KafkaSink)
    old = Transactions(sink._kafka, GROUP, 10.0, home.world.clock)
    old._begin()
    sink.publish(stage(sink, [batch_of(numbered(0, 5))]))
    events = batch_of(numbered(0, 5)).select(STORED_SCHEMA.names)

    def send_on() -> None:
        for _ in range(1_000):
            old.send(events, 0, 0)
            time.sleep(0.05)

    with pytest.raises(UnavailableError, match="another driver has begun to send"):
        send_on()
    old.close()
    assert in_order(target.values(), 5)


def forget(target: Target) -> None:
    """As Kafka does after a week."""
    for future in target.admin.delete_consumer_groups([GROUP]).values():
        future.result()


def test_a_range_that_was_never_sent_needs_no_number(home: Home, target: Target) -> None:
    sink = sink_at(home.context, target.url("?partition=same"))
    sink.publish(stage(sink, [batch_of(numbered(0, 10))]))
    forget(target)
    sink.publish(stage(sink, [batch_of(numbered(10, 20))], 10))
    assert in_order(target.values(), 20)


def test_a_number_that_is_forgotten_while_a_range_is_sent_is_never_guessed(
    home: Home, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_at(home.context, target.url("?partition=same"))
    sink.publish(stage(sink, [batch_of(numbered(0, 10))]))
    manifest = stage(sink, [batch_of(numbered(10, 20))], 10)
    with monkeypatch.context() as patch:
        patch.setattr(Transactions, "send", died)
        with pytest.raises(DiedError):
            sink.publish(manifest)
    forget(target)
    with pytest.raises(InvalidError, match=f"`{GROUP}` says nothing, .* number 10 at least"):
        sink.publish(manifest)
    say = ConsumerGroupTopicPartitions(GROUP, [TopicPartition(target.name, 0, 10)])
    for future in target.admin.alter_consumer_group_offsets([say]).values():
        future.result()
    sink.publish(manifest)
    assert in_order(target.values(), 20)


class DiedError(Exception):
    """As if the process had died."""


def died(*_: object) -> None:
    raise DiedError


def test_a_first_range_whose_driver_died_has_a_number(
    home: Home, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_at(home.context, target.url("?partition=same"))
    manifest = stage(sink, [batch_of(numbered(0, 5))])
    with monkeypatch.context() as patch:
        patch.setattr(Transactions, "send", died)
        with pytest.raises(DiedError):
            sink.publish(manifest)
    sink.publish(manifest)
    sink.publish(manifest)
    assert in_order(target.values(), 5)
    again = stage(sink, [batch_of(numbered(5, 9))], 5)
    forget(target)
    with monkeypatch.context() as patch:
        patch.setattr(Transactions, "send", died)
        with pytest.raises(DiedError):
            sink.publish(again)
    forget(target)
    with pytest.raises(InvalidError, match="says nothing"):
        sink.publish(again)


def test_targets_that_cannot_be(home: Home, target: Target) -> None:
    with pytest.raises(NotFoundError, match="kafka topic `nope`: is not there"):
        sink_at(home.context, f"kafka://{target.bootstrap}/nope")
    sink = sink_at(home.context, target.url("?partition=same"))
    with pytest.raises(InvalidError, match="has 3 partitions, and there are events of partition 5"):
        sink.check(["from/5"])
    with pytest.raises(InvalidError, match="has 3 partitions, and there are events of partition 3"):
        stage(sink, [batch_of(numbered(0, 1), partition=3)])


def test_a_topic_that_was_made_anew_is_another(home: Home, target: Target) -> None:
    sink = sink_at(home.context, target.url("?partition=same"))
    manifest = stage(sink, [batch_of(numbered(0, 5))])
    target.delete()
    until(lambda: not target.server.partitions(target.name))
    with pytest.raises(NotFoundError, match="is not there"):
        sink.publish(manifest)
    target.create()
    with pytest.raises(NotFoundError, match="was deleted and made again since this pipeline"):
        sink.publish(manifest)
    assert sink_at(home.context, target.url()).incarnation != sink.incarnation


def test_an_event_that_the_topic_does_not_take_is_told(home: Home, kafka_server: Kafka) -> None:
    narrow = Target(kafka_server, 1, **{"max.message.bytes": "2000"})
    sink = sink_at(home.context, narrow.url("?partition=same"))
    manifest = stage(sink, [batch_of([Event(b"small"), Event(uuid.uuid4().bytes * 5_000)])])
    url = narrow.url("?partition=same&compression.type=none")
    with pytest.raises(InvalidError, match=r"larger than it takes.*raise its max.message.bytes"):
        sink_at(home.context, url).publish(manifest)
    assert narrow.values() == []


def test_an_event_without_a_key_into_a_compacted_topic_is_told(
    home: Home, kafka_server: Kafka
) -> None:
    compacted = Target(kafka_server, 1, **{"cleanup.policy": "compact"})
    sink = sink_at(home.context, compacted.url("?partition=same"))
    with pytest.raises(InvalidError, match="a compacted topic needs keys"):
        sink.publish(stage(sink, [batch_of([Event(b"no key")])]))


def test_a_time_that_the_topic_does_not_take_is_told(home: Home, kafka_server: Kafka) -> None:
    today = Target(kafka_server, 1)
    sink = sink_at(home.context, today.url("?partition=same"))
    with pytest.raises(InvalidError, match=r"message\.timestamp\.after\.max\.ms"):
        sink.publish(stage(sink, [batch_of([Event(b"x", timestamp=253_402_300_799_999)])]))
    assert today.values() == []


def test_what_is_neither_staged_nor_sent_is_corruption(home: Home, target: Target) -> None:
    sink = sink_at(home.context, target.url("?partition=same"))
    sink.publish(stage(sink, [batch_of(numbered(0, 1))]))
    manifest = stage(sink, [batch_of(numbered(1, 2))], 1)
    sink.discard(manifest)
    with pytest.raises(CorruptError, match="is neither staged nor sent"):
        sink.publish(manifest)


def test_brokers_that_do_not_answer_are_told(home: Home) -> None:
    address = parse_address("kafka://127.0.0.1:9/t")
    with pytest.raises(UnavailableError, match=r"127.0.0.1:9.*see that its brokers can be reached"):
        open_kafka(address, environ={}, store=home.store.url, timeout_s=2.0)


@pytest.mark.long
def test_a_broker_that_goes_away_and_comes_back(home: Home) -> None:
    with kafka.running(session_ms=3_000) as server:
        target = Target(server)
        address = parse_address(target.url("?partition=same"))
        patient = open_kafka(address, environ={}, store=home.store.url, timeout_s=60.0)
        patient.publish(stage(patient, [batch_of(numbered(0, 10))]))
        sink: TargetSink = open_kafka(address, environ={}, store=home.store.url, timeout_s=3.0)
        manifest = stage(sink, [batch_of(numbered(10, 20))], 10)
        target.settle()  # Kafka 4.3 may forget the markers of a transaction that it is ending
        server.process.kill()
        with pytest.raises(UnavailableError, match="see that its brokers can be reached"):
            sink.publish(manifest)
        server.process.restart()
        until(lambda: _published(sink, manifest), 120)
        assert in_order(target.values(), 20)


def _published(sink: TargetSink, manifest: object) -> bool:
    try:
        sink.publish(manifest)  # type: ignore[arg-type]
    except (UnavailableError, NotFoundError):  # a broker that starts may not know its topics yet
        return False
    return True


def test_it_pickles_without_secrets(home: Home, target: Target) -> None:
    environ = {"TIDELOG_KAFKA_SASL_PASSWORD": "hunter2"}
    address = parse_address(target.url("?partition=same"))
    sink = open_kafka(address, environ=environ, store=home.store.url)
    data = pickle.dumps(sink)
    assert b"hunter2" not in data
    assert "hunter2" not in repr(sink) + repr(sink._kafka)
    sent = pickle.loads(data)
    manifest = stage(sent, [batch_of(numbered(0, 3))])
    sink.publish(manifest)
    assert in_order(target.values(), 3)


def _murmur2(data: bytes) -> int:
    """Kafka's hash of keys, as its own clients have it; positive."""
    mask, length = 0xFFFFFFFF, len(data)
    mixed = (0x9747B28C ^ length) & mask
    for start in range(0, length - length % 4, 4):
        word = int.from_bytes(data[start : start + 4], "little") * 0x5BD1E995 & mask
        word = (word ^ word >> 24) * 0x5BD1E995 & mask
        mixed = (mixed * 0x5BD1E995 & mask) ^ word
    rest = data[length - length % 4 :]
    if rest:
        mixed = (mixed ^ int.from_bytes(rest, "little")) * 0x5BD1E995 & mask
    mixed = (mixed ^ mixed >> 13) * 0x5BD1E995 & mask
    return (mixed ^ mixed >> 15) & 0x7FFFFFFF
