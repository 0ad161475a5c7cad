"""Promotes of archives of Kafka: records that retention has deleted, and deleted topics."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition

from tests.archive.test_archive import an_archive, payload
from tests.archive.test_fill import backfill, drive, live
from tests.servers.kafka import Kafka
from tests.support.waiting import until
from tidelog import Home
from tidelog.archive.generations import promote, rollback
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.home import World, create_home
from tidelog.model.pipeline import Gap
from tidelog.pipeline.gaps import LostError
from tidelog.settings import Settings

pytestmark = pytest.mark.server


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    with create_home(settings, world=World(environ={}))[0] as made:
        yield made


def produce(server: Kafka, topic: str, numbers: range) -> None:
    producer = server.producer()
    for number in numbers:
        producer.produce(topic, payload(number))
    assert producer.flush(60) == 0


def test_expired_records_and_a_deleted_topic_of_a_pattern_survive_a_promote(
    home: Home, kafka_server: Kafka
) -> None:
    mark = uuid.uuid4().hex
    one, other = f"{mark}-one", f"{mark}-other"
    for name, numbers in ((one, range(110)), (other, range(200, 240))):
        kafka_server.create_topic(name, 1)
        produce(kafka_server, name, numbers)
    source = f"kafka://{kafka_server.bootstrap}/^{mark}-.*"
    drive(home, an_archive(home, "daily", source, parser="json:at"))
    admin = kafka_server.admin()
    expired = TopicPartition(one, 0, 60)  # as its retention would
    admin.delete_records([expired])[expired].result()
    admin.delete_topics([other])[other].result()
    until(lambda: not kafka_server.partitions(other))
    backfill(home)
    promote(home.context, "daily")
    everything = [*range(110), *range(200, 240)]
    assert live(home) == Counter(everything)
    produce(kafka_server, one, range(110, 120))
    assert drive(home, home.archives.get("daily").info) == 10
    rollback(home.context, "daily")
    assert live(home) == Counter([*everything, *range(110, 120)])


def test_open_transaction_whose_beginning_was_deleted_stops_no_archive(
    home: Home, kafka_server: Kafka
) -> None:
    """Until it ends, readers see nothing, and the partition ends before its first offset."""
    topic = uuid.uuid4().hex
    kafka_server.create_topic(topic, 1)
    produce(kafka_server, topic, range(2))
    source = f"kafka://{kafka_server.bootstrap}/{topic}"
    archive = an_archive(home, "daily", source, parser="json:at")
    hanging = kafka_server.producer(transactional_id=topic)
    hanging.init_transactions(60)
    hanging.begin_transaction()
    hanging.produce(topic, payload(2))  # offset 2
    assert hanging.flush(60) == 0
    produce(kafka_server, topic, range(3, 5))
    assert drive(home, archive) == 2
    deleted = TopicPartition(topic, 0, 4)
    admin = kafka_server.admin()  # lives until the answer is there
    admin.delete_records([deleted])[deleted].result()
    late = an_archive(home, "late", source, parser="json:at")
    assert drive(home, late) == 0
    with pytest.raises(LostError, match="holds nothing before 4, committed is 2"):
        drive(home, archive)
    assert drive(home, archive, accept_loss=True) == 0
    for name in ("daily", "late"):
        assert drive(home, home.archives.get(name).info) == 0
        status = home.archives.get(name).status().partitions[0]
        assert (status.position, status.end, status.remade) == ("4", "4", "")
    hanging.commit_transaction(60)
    kafka_server.settle(topic, 1)
    for name in ("daily", "late"):
        assert drive(home, home.archives.get(name).info) == 1
    assert live(home) == Counter([0, 1, 4])
    gaps = read_progress(home.context, archive.pipeline(), f"{topic}/0")
    assert gaps is not None
    assert gaps.gaps == (Gap("2", "4", "retention", 2),)
