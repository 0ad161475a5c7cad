"""Kafka as a source, on a real broker: exact ranges, all kinds of gaps, losses that are told."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions

from tests.servers import kafka
from tests.servers.base import free_port
from tests.servers.kafka import Kafka
from tests.support.homes import a_store
from tidelog.catalog.memory import MemoryCatalog
from tidelog.clock import RandomIds, SystemClock
from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.connectors.archive.sink import ArchiveSink, ArchiveSinkSettings
from tidelog.connectors.by_url import open_source
from tidelog.connectors.kafka import reader as kafka_read
from tidelog.connectors.kafka.client import ClientWatch, open_consumer, source_address
from tidelog.connectors.kafka.source import KafkaSource
from tidelog.connectors.source import Bounds, Chunk, SourcePartition, SourceRange
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.errors import InvalidError, NotFoundError, TidelogError, UnavailableError
from tidelog.model.address import parse_address
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.gaps import LostError
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.tasks import LocalWorkers

pytestmark = pytest.mark.server

_numbers = count()


def source_at(bootstrap: str, topic: str, timeout_s: float = 15) -> KafkaSource:
    address = parse_address(f"kafka://{bootstrap}/{topic}")
    return KafkaSource(source_address(address, {}), timeout_s=timeout_s)


class Broker:
    """The shared broker, with names of our own in it."""

    def __init__(self, server: Kafka) -> None:
        self.server = server
        self.bootstrap = server.bootstrap
        self.admin = server.admin()
        self.producer = server.producer()
        self.made: set[str] = set()

    def topic(self, partitions: int = 1, name: str = "", **config: str) -> str:
        """A new topic that takes messages."""
        name = name or f"source-{next(_numbers)}"
        wanted = {key.replace("_", "."): value for key, value in config.items()}
        self.server.create_topic(name, partitions, wanted)
        self.made.add(name)
        until(lambda: len(self.source(name).bounds(self.source(name).partitions())) == partitions)
        return name

    def delete(self, name: str) -> None:
        done(self.admin.delete_topics([name]))
        until(lambda: name not in self.admin.list_topics(timeout=60).topics)

    def send(self, topic: str, values: Iterable[bytes | None], **more: Any) -> None:
        for value in values:
            self.producer.produce(topic, value, **more)
        assert self.producer.flush(60) == 0

    def source(self, topic: str, options: str = "", timeout_s: float = 15) -> KafkaSource:
        return source_at(self.bootstrap, topic + options, timeout_s)

    def transactions(self, name: str) -> Producer:
        producer = self.server.producer(transactional_id=name)
        producer.init_transactions(60)
        return producer


@pytest.fixture(scope="module")
def broker(kafka_server: Kafka) -> Iterator[Broker]:
    opened = Broker(kafka_server)
    yield opened
    for name in opened.made & set(opened.admin.list_topics(timeout=60).topics):
        done(opened.admin.delete_topics([name]))


def done(futures: dict[Any, Any]) -> None:
    for future in futures.values():
        future.result(60)


def until(holds: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if holds():
                return
        except (NotFoundError, UnavailableError, KafkaException):  # topics come and go slowly
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.05)


def chunks_of(source: KafkaSource, start: int, limit: int, number: int = 0) -> list[Chunk]:
    """A range of a topic, after a look at what every read must keep."""
    partition = SourcePartition(source._kafka.topic, str(number))
    chunks = list(source.read(SourceRange(partition, str(start), str(limit))))
    assert chunks[-1].position == str(limit)
    at = start
    for chunk in chunks:
        assert chunk.batch.schema.equals(EVENT_SCHEMA)
        chunk.batch.validate(full=True)
        offsets = chunk.batch.column("offset").to_pylist()
        assert offsets == sorted(set(offsets))
        assert all(at <= offset < int(chunk.position) for offset in offsets)
        at = int(chunk.position)
    return chunks


def rows(source: KafkaSource, start: int, limit: int, number: int = 0) -> list[dict[str, Any]]:
    table = pa.Table.from_batches([c.batch for c in chunks_of(source, start, limit, number)])
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def read(source: KafkaSource, start: int, limit: int) -> list[tuple[int, bytes]]:
    return [(row["offset"], row["value"]) for row in rows(source, start, limit)]


def bounds(source: KafkaSource) -> list[tuple[int, int]]:
    found = source.bounds(source.partitions())
    return [(int(each.first), int(each.end)) for each in found.values()]


def numbered(*offsets: int) -> list[tuple[int, bytes]]:
    return [(offset, b"%d" % offset) for offset in offsets]


def test_ranges_are_exact(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = broker.topic()
    broker.send(topic, [b"%d" % n for n in range(3_000)])
    source = broker.source(topic)
    assert bounds(source) == [(0, 3_000)]
    for start, limit in ((0, 3_000), (0, 1), (499, 501), (1_234, 2_345), (2_999, 3_000), (7, 7)):
        assert read(source, start, limit) == numbered(*range(start, limit))
    monkeypatch.setattr("tidelog.connectors.kafka.reader._CHUNK_MESSAGES", 1_000)
    positions = [int(chunk.position) for chunk in chunks_of(source, 0, 3_000)]
    assert len(positions) == 3
    assert all(n % 1_000 < 500 for n in positions[:2])
    with pytest.raises(InvalidError, match="runs backwards"):
        read(source, 2, 1)


def test_all_of_a_record_is_kept(broker: Broker) -> None:
    topic = broker.topic()
    broker.send(topic, [b"v"], key=b"k", timestamp=1_700_000_000_123)
    broker.send(topic, [b""], key=b"", headers=[("a", b"1"), ("a", b""), ("none", None)])
    broker.send(topic, [None], key=b"k")
    broker.send(topic, [b"bare"])
    broker.send(topic, [bytes(range(256))], headers=[("ä", bytes(range(256)))])
    source = broker.source(topic)
    found = rows(source, 0, 5)
    assert [row["value"] for row in found] == [b"v", b"", None, b"bare", bytes(range(256))]
    assert [row["key"] for row in found] == [b"k", b"", b"k", None, None]
    assert [row["headers"] for row in found] == [
        None,
        [{"name": n, "value": v} for n, v in (("a", b"1"), ("a", b""), ("none", None))],
        None,
        None,
        [{"name": "ä", "value": bytes(range(256))}],
    ]
    assert found[0]["timestamp"].timestamp() == 1_700_000_000.123
    assert {(row["topic"], row["partition"]) for row in found} == {(topic, 0)}
    assert {(row["id"], row["type"]) for row in found} == {(None, None)}


def test_times_are_kept_and_those_out_of_range_are_zero(broker: Broker) -> None:
    limits = {"message_timestamp_after_max_ms": str(2**62)}
    topic = broker.topic(**limits)
    for stamp in (1, 253_402_300_799_999, 253_402_300_800_000, 2**55):
        broker.send(topic, [b"x"], timestamp=stamp)
    (chunk,) = chunks_of(broker.source(topic), 0, 4)
    stamps = chunk.batch.column("timestamp").cast(pa.int64()).to_pylist()
    assert stamps == [1, 253_402_300_799_999, 0, 0]
    appended = broker.topic(message_timestamp_type="LogAppendTime")
    broker.send(appended, [b"x"], timestamp=5)
    (chunk,) = chunks_of(broker.source(appended), 0, 1)
    (stamp,) = chunk.batch.column("timestamp").cast(pa.int64()).to_pylist()
    assert abs(stamp - time.time() * 1_000) < 60_000


def test_an_empty_topic(broker: Broker) -> None:
    source = broker.source(broker.topic(3))
    partitions = source.partitions()
    assert [each.name for each in partitions] == ["0", "1", "2"]
    (found,) = set(source.bounds(partitions).values())
    assert found == Bounds("0", "0", found.incarnation)
    assert source.bounds([]) == {}
    assert read(source, 0, 0) == []


def test_a_pattern_sees_topics_and_partitions_that_come(broker: Broker) -> None:
    first = broker.topic(2, name="pattern-a")
    broker.topic(1, name="other-pattern-b")
    source = broker.source("^pattern-.*")
    assert [each.text for each in source.partitions()] == ["pattern-a/0", "pattern-a/1"]
    broker.topic(1, name="pattern-b")
    done(broker.admin.create_partitions([NewPartitions(first, 3)]))
    wanted = ["pattern-a/0", "pattern-a/1", "pattern-a/2", "pattern-b/0"]
    until(lambda: [each.text for each in source.partitions()] == wanted)
    broker.send("pattern-b", [b"0", b"1"])
    broker.send(first, [b"2"], partition=2)
    found = source.bounds(source.partitions())
    assert [each.end for each in found.values()] == ["0", "0", "1", "2"]
    (chunk,) = source.read(SourceRange(SourcePartition("pattern-b", "0"), "0", "2"))
    assert chunk.batch.column("topic").to_pylist() == ["pattern-b"] * 2
    assert broker.source("^nothing-like-this").partitions() == []


def test_kafkas_own_topics_are_left_out(broker: Broker) -> None:
    broker.transactions("makes-kafkas-own-topic")
    assert "__transaction_state" in broker.admin.list_topics(timeout=60).topics
    names = {each.topic for each in broker.source("^.*").partitions()}
    assert names
    assert not {name for name in names if name.startswith("__")}


def test_a_topic_that_is_missing_is_told_and_not_made(broker: Broker) -> None:
    topic = broker.topic()
    missing = broker.source("never-made")
    partition = SourcePartition("never-made", "0")
    for _ in range(2):  # the brokers would create it at the first question
        with pytest.raises(NotFoundError, match="never-made"):
            missing.partitions()
        with pytest.raises(NotFoundError, match="never-made"):
            missing.bounds([partition, SourcePartition(topic, "0")])
        with pytest.raises(NotFoundError, match="never-made"):
            list(missing.read(SourceRange(partition, "0", "1")))
        time.sleep(0.2)
    beyond = SourcePartition(topic, "1")
    with pytest.raises(NotFoundError, match=beyond.text):
        broker.source(topic).bounds([SourcePartition(topic, "0"), beyond])
    with pytest.raises(NotFoundError, match=beyond.text):
        list(broker.source(topic).read(SourceRange(beyond, "0", "1")))


def test_transactions_under_both_isolation_levels(broker: Broker) -> None:
    topic = broker.topic()
    one, other = broker.transactions("one"), broker.transactions("other")

    def send(producer: Producer, *offsets: int) -> None:
        producer.begin_transaction()
        for offset in offsets:
            producer.produce(topic, b"%d" % offset)
        assert producer.flush(60) == 0

    send(one, 0, 1)
    one.commit_transaction(60)  # its marker is offset 2
    send(one, 3, 4)
    one.abort_transaction(60)  # 5
    committed, uncommitted = (
        broker.source(topic, f"?isolation.level={level}")
        for level in ("read_committed", "read_uncommitted")
    )
    for source in (committed, uncommitted, broker.source(topic)):
        until(lambda source=source: bounds(source) == [(0, 6)])  # a marker comes a little later
    assert read(committed, 0, 6) == numbered(0, 1)
    assert read(uncommitted, 0, 6) == numbered(0, 1, 3, 4)

    send(other, 6)  # stays open
    send(one, 7)
    one.commit_transaction(60)  # 8
    assert bounds(committed) == [(0, 6)]
    until(lambda: bounds(uncommitted) == [(0, 9)])
    assert read(uncommitted, 5, 9) == numbered(6, 7)
    with pytest.raises(NotFoundError, match="ends at offset 6"):
        read(committed, 5, 9)

    other.abort_transaction(60)  # 9
    until(lambda: bounds(committed) == [(0, 10)])
    assert read(committed, 0, 10) == numbered(0, 1, 7)
    for start, limit, wanted in (
        (2, 3, ()),  # a marker alone
        (3, 6, ()),  # an aborted transaction with its marker
        (1, 4, (1,)),
        (5, 8, (7,)),
        (8, 10, ()),  # nothing but markers up to the end
        (6, 7, ()),
    ):
        assert read(committed, start, limit) == numbered(*wanted)


def test_a_long_aborted_transaction_is_passed_over(broker: Broker) -> None:
    topic = broker.topic()
    producer = broker.transactions("long")
    producer.begin_transaction()
    for _ in range(20_000):
        producer.produce(topic, b"x" * 1_000)
        producer.poll(0)
    producer.flush(60)
    producer.abort_transaction(60)
    until(lambda: bounds(broker.source(topic)) == [(0, 20_001)])  # the marker comes a little later
    broker.send(topic, [b"20001"])
    assert read(broker.source(topic, timeout_s=60), 0, 20_002) == numbered(20_001)


def test_the_client_tells_how_far_it_has_fetched(broker: Broker) -> None:
    topic = broker.topic()
    broker.send(topic, [b"x"] * 7)
    watch = ClientWatch()
    place = source_address(parse_address(f"kafka://{broker.bootstrap}/{topic}"), {})
    consumer = open_consumer(place, 0.3, watch, 7)
    consumer.assign([TopicPartition(topic, 0, 0)])
    until(lambda: not consumer.consume(1, 0.1) and watch.fetched == 7)
    consumer.close()


@pytest.fixture
def quick_cleaner(broker: Broker) -> Iterator[None]:
    """The broker looks for logs to compact every 0.1 s, not every 15 s."""
    name = "log.cleaner.backoff.ms"

    def alter(operation: AlterConfigOpType) -> None:
        entry = ConfigEntry(name, "100", incremental_operation=operation)
        resource = ConfigResource(ConfigResource.Type.BROKER, "1", incremental_configs=[entry])
        done(broker.admin.incremental_alter_configs([resource]))

    alter(AlterConfigOpType.SET)
    yield
    alter(AlterConfigOpType.DELETE)


@pytest.mark.usefixtures("quick_cleaner")
def test_a_compacted_topic_has_holes_anywhere(broker: Broker) -> None:
    topic = broker.topic(
        cleanup_policy="compact",
        segment_ms="50",
        min_cleanable_dirty_ratio="0.001",
        min_compaction_lag_ms="0",
        max_compaction_lag_ms="100",
        delete_retention_ms="0",
    )
    keys = [*range(10), *(0, 1, 2, 5, 6, 9), 100, *(200,) * 4]
    for offset, key in enumerate(keys):
        broker.send(topic, [b"%d" % offset], key=b"%d" % key)
        if offset in (9, 15, 16, 19):
            time.sleep(0.2)  # the next message begins a segment; the last one is never compacted
    source = broker.source(topic)
    assert bounds(source) == [(0, 21)]
    kept = [3, 4, 7, 8, 10, 11, 12, 13, 14, 15, 16, 19, 20]
    until(lambda: [offset for offset, _ in read(source, 0, 21)] == kept, 60)
    for start, limit in ((0, 21), (0, 3), (0, 10), (5, 7), (2, 9), (9, 10), (17, 19), (17, 20)):
        wanted = [offset for offset in kept if start <= offset < limit]
        assert read(source, start, limit) == numbered(*wanted)


def test_what_was_deleted_is_told(broker: Broker) -> None:
    topic = broker.topic()
    broker.send(topic, [b"%d" % n for n in range(100)])
    done(broker.admin.delete_records([TopicPartition(topic, 0, 40)]))
    source = broker.source(topic)
    assert bounds(source) == [(40, 100)]
    with pytest.raises(NotFoundError, match="continue from 40") as caught:
        read(source, 10, 100)
    assert caught.value.context == {"lost_from": 10, "first": 40}
    assert read(source, 40, 100) == numbered(*range(40, 100))
    done(broker.admin.delete_records([TopicPartition(topic, 0, 100)]))
    assert bounds(source) == [(100, 100)]
    assert read(source, 100, 100) == []


def test_what_is_deleted_while_it_is_read_is_told(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.connectors.kafka.reader._CHUNK_MESSAGES", 1)
    topic, last = broker.topic(), 1_999
    producer = broker.server.producer(batch_num_messages=1)
    for n in range(last + 1):
        producer.produce(topic, b"%d" % n)
    assert producer.flush(60) == 0
    # A fetch of one byte brings one batch, so reading ahead is far from the end at the delete.
    source = broker.source(topic, "?fetch.message.max.bytes=1&queued.min.messages=1")
    chunks = source.read(SourceRange(SourcePartition(topic, "0"), "0", str(last + 1)))
    positions = [int(next(chunks).position)]
    done(broker.admin.delete_records([TopicPartition(topic, 0, last)]))
    with pytest.raises(NotFoundError) as caught:
        positions.extend(int(chunk.position) for chunk in chunks)
    assert caught.value.context["first"] == last
    lost_from = caught.value.context["lost_from"]
    assert lost_from - positions[-1] in (0, 1), "what came along with the error is not given out"


def test_a_topic_that_was_made_anew_is_told(broker: Broker) -> None:
    topic = broker.topic()
    broker.send(topic, [b"%d" % n for n in range(10)])
    source = broker.source(topic)
    assert bounds(source) == [(0, 10)]
    broker.delete(topic)
    with pytest.raises(NotFoundError):
        source.bounds([SourcePartition(topic, "0")])
    broker.topic(name=topic)
    for sent in ([], [b"0", b"1"]):
        broker.send(topic, sent)
        with pytest.raises(NotFoundError, match=f"ends at offset {len(sent)}") as caught:
            read(source, 5, 10)
        assert caught.value.context == {"lost_from": len(sent), "first": 0, "end": len(sent)}


def test_a_topic_that_was_made_anew_and_outgrew_the_old_one_is_told(
    broker: Broker, tmp_path: Path
) -> None:
    topic = broker.topic(2)
    broker.send(topic, [b"%d" % n for n in range(10)], partition=0)
    source, partition = broker.source(topic), SourcePartition(topic, "0")
    first = source.bounds(source.partitions())
    assert len({each.incarnation for each in first.values()}) == 1
    assert first[partition].incarnation
    done(broker.admin.create_partitions([NewPartitions(topic, 3)]))
    until(lambda: len(source.partitions()) == 3)  # the same topic, only wider
    assert source.bounds([partition])[partition] == first[partition]
    context = Context(
        a_store(str(tmp_path / "o")), MemoryCatalog(), SystemClock(), RandomIds(), random.Random(1)
    )
    sink = ArchiveSink(ArchiveSinkSettings(str(tmp_path / "o"), "archives/a", "dead/a"))
    pipeline = Pipeline("a", "inc", source, sink, LocalWorkers())
    assert Driver(context, pipeline, DriverOptions()).run() == 10
    broker.delete(topic)
    broker.topic(2, name=topic)
    broker.send(topic, [b"new %d" % n for n in range(25)], partition=0)
    until(lambda: source.bounds([partition])[partition].end == "25")
    assert source.bounds([partition])[partition].incarnation != first[partition].incarnation
    with pytest.raises(LostError, match="was deleted and made again"):
        Driver(context, pipeline, DriverOptions()).run()
    head = read_progress(context, "inc", partition.text)
    assert head is not None
    assert (head.position, head.incarnation) == ("10", first[partition].incarnation)
    # What was planned for the old topic is not read from the new one.
    planned = SourceRange(partition, "0", "10", incarnation=first[partition].incarnation)
    with pytest.raises(NotFoundError, match="was deleted and made again since"):
        list(source.read(planned))
    Driver(context, pipeline, DriverOptions(accept_loss=True)).run()
    assert Driver(context, pipeline, DriverOptions()).run() == 0
    ended = read_progress(context, "inc", partition.text)
    assert ended is not None
    assert (ended.position, ended.ended) == ("10", "remade")


def test_topic_that_is_made_again_while_it_is_read_is_noticed(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_read, "_CHUNK_MESSAGES", 5)
    monkeypatch.setattr(kafka_read, "_ASK_MESSAGES", 2)  # so that most are read after the remake
    topic = broker.topic()
    partition = SourcePartition(topic, "0")
    broker.send(topic, [b"%d" % n for n in range(20)])
    source = broker.source(topic)
    made = source.bounds([partition])[partition].incarnation
    chunks = source.read(SourceRange(partition, "0", "20", incarnation=made))
    next(chunks)
    broker.delete(topic)
    broker.topic(name=topic)
    broker.send(topic, [b"new %d" % n for n in range(30)])
    until(lambda: source.bounds([partition])[partition].end == "30")
    with pytest.raises(NotFoundError):  # made again; or the client noticed that it was gone
        list(chunks)


def test_large_messages_stay_within_bounds(broker: Broker) -> None:
    topic = broker.topic(max_message_bytes=str(8 << 20))
    producer = broker.server.producer(message_max_bytes=8 << 20)
    for n in range(24):
        producer.produce(topic, b"%d" % n + bytes(3 << 20))
        producer.flush(60)
    chunks = chunks_of(broker.source(topic), 0, 24)
    assert sum(chunk.batch.num_rows for chunk in chunks) == 24
    assert max(chunk.batch.nbytes for chunk in chunks) < 40 << 20


def test_a_source_pickles(broker: Broker) -> None:
    topic = broker.topic()
    broker.send(topic, [b"0", b"1"])
    there = pickle.loads(pickle.dumps(broker.source(topic, "?client.id=x")))
    assert there.url == f"kafka://{broker.bootstrap}/{topic}?client.id=x"
    assert read(there, 0, 2) == numbered(0, 1)


def test_reading_may_end_early(broker: Broker) -> None:
    topic = broker.topic()
    broker.send(topic, [b"x"] * 50_000)
    chunks = broker.source(topic).read(SourceRange(SourcePartition(topic, "0"), "0", "50000"))
    next(chunks)
    began = time.monotonic()
    chunks.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 60


def told_by(call: Callable[[float], object], reason: str) -> TidelogError:
    """The error of a call; again with more time where the client had not found the reason yet."""
    for timeout_s in (1, 5, 30):
        began = time.monotonic()
        with pytest.raises((InvalidError, UnavailableError)) as caught:
            call(timeout_s)
        assert time.monotonic() - began < 60
        if reason in caught.value.message:
            break
    return caught.value


def test_brokers_that_are_not_there() -> None:
    nobody = f"127.0.0.1:{free_port()}"
    partition = SourcePartition("clicks", "0")

    def source(timeout_s: float) -> KafkaSource:
        return source_at(nobody, "clicks", timeout_s)

    calls: list[Callable[[float], object]] = [
        lambda timeout_s: source(timeout_s).partitions(),
        lambda timeout_s: source_at(nobody, "^clicks", timeout_s).partitions(),
        lambda timeout_s: source(timeout_s).bounds([partition]),
        lambda timeout_s: list(source(timeout_s).read(SourceRange(partition, "0", "1"))),
    ]
    for call in calls:
        error = told_by(call, "Connection refused")
        assert isinstance(error, UnavailableError)
        assert "Connection refused" in error.message
        assert "\n" not in error.message


def test_credentials_that_are_refused(broker: Broker) -> None:
    options = "?security.protocol=SASL_PLAINTEXT&sasl.mechanisms=PLAIN&sasl.username=me"
    url = f"kafka://{broker.bootstrap}/clicks{options}"
    place = source_address(parse_address(url), {"TIDELOG_KAFKA_SASL_PASSWORD": "hush"})
    error = told_by(lambda timeout_s: KafkaSource(place, timeout_s=timeout_s).partitions(), "SASL")
    assert isinstance(error, InvalidError)
    assert "SASL" in error.message
    assert "hush" not in error.message


@pytest.mark.long  # a broker of its own is started twice
def test_a_broker_that_falls_silent_or_dies_while_it_is_read() -> None:
    with kafka.running(session_ms=3_000) as own:
        mine = Broker(own)
        topic = mine.topic()
        for n in range(60):
            mine.send(topic, [b"%d" % n])
        options = "?fetch.message.max.bytes=1&queued.min.messages=1"
        source = mine.source(topic, options, timeout_s=3)
        assert read(source, 0, 60) == numbered(*range(60))
        for harm, mend in (
            (own.process.pause, own.process.resume),
            (own.process.kill, own.process.start),
        ):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("tidelog.connectors.kafka.reader._CHUNK_MESSAGES", 1)
                chunks = source.read(SourceRange(SourcePartition(topic, "0"), "0", "60"))
                next(chunks)
                harm()
                began = time.monotonic()
                with pytest.raises(UnavailableError):
                    list(chunks)
                assert time.monotonic() - began < 60
            mend()
            until(lambda: bounds(source) == [(0, 60)])
            assert read(source, 0, 60) == numbered(*range(60))


def test_bounds_of_a_thousand_partitions_cost_little(broker: Broker) -> None:
    topic = broker.topic(1_000)
    source = open_source(f"kafka://{broker.bootstrap}/{topic}", environ={})
    broker.send(topic, [b"x"], partition=999)
    costs: list[float] = []
    for _ in range(5):
        if costs and min(costs) < 1:
            break
        if costs:
            time.sleep(10)  # other work on the machine may hold it up, but not for so long
        began = time.perf_counter()
        found = source.bounds(source.partitions())
        costs.append(time.perf_counter() - began)
    assert len(found) == 1_000
    assert [each.end for each in found.values()] == ["0"] * 999 + ["1"]
    print(f"bounds of 1,000 partitions: {min(costs):.3f} to {max(costs):.3f} s")
    assert min(costs) < 1
    broker.delete(topic)
