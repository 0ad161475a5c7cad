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
from tidelog.home import World, create_home
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
