"""Archives for monitors that others have: StatsD servers, and offsets of Kafka's groups."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions

import tidelog as library
from tests.servers.kafka import Kafka
from tests.support.cli_run import Run
from tidelog import Event
from tidelog.archive.metrics import statsd_lines


@pytest.fixture
def statsd() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(60)
        yield server


def address(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def archived(tidelog: Run) -> None:
    with library.open() as home:
        home.create_topic("t")
        home.append("t", [Event(b"%d" % n) for n in range(5)])
    assert tidelog("archive", "create", "daily", "--source", "topic:t").code == 0
    assert tidelog("archive", "run", "daily", "--no-spark").code == 0


def test_metrics_are_sent_to_a_statsd_server(tidelog: Run, statsd: socket.socket) -> None:
    archived(tidelog)
    done = tidelog("archive", "status", "daily", "--statsd", address(statsd))
    assert (done.code, done.out) == (0, b"")
    packet = statsd.recv(65_536)
    assert len(packet) <= 1_400
    lines = packet.decode().splitlines()
    assert all(line.startswith("tidelog.") and line.endswith("|g") for line in lines)
    done = tidelog("archive", "run", "daily", "--no-spark", "--statsd", address(statsd))
    assert done.code == 0
    assert b"|g" in statsd.recv(65_536)


def test_labels_become_parts_of_names() -> None:
    text = (
        "# HELP tidelog_archive_lag_events Waiting\n# TYPE tidelog_archive_lag_events gauge\n"
        'tidelog_archive_lag_events{archive="daily",partition="my.t/0"} 5\n'
        'tidelog_x{archive="a \\"b\\" {1} 2"} 0.5\ntidelog_y 7\n'
    )
    assert statsd_lines(text) == [
        "tidelog.archive_lag_events.daily.my_t_0:5|g",
        "tidelog.x.a_b_1_2:0.5|g",
        "tidelog.y:7|g",
    ]


@pytest.mark.parametrize("text", ["here", "here:", ":8125", "here:0", "here:99999", "here:x"])
def test_address_of_statsd_that_is_none_is_refused(tidelog: Run, text: str) -> None:
    archived(tidelog)
    done = tidelog("archive", "status", "daily", "--statsd", text)
    assert (done.code, "give HOST:PORT" in done.err) == (2, True)
    both = tidelog("archive", "status", "daily", "--statsd", "h:1", "--check")
    assert both.code == 2


@pytest.mark.server
def test_positions_are_offsets_of_a_consumer_group(tidelog: Run, kafka_server: Kafka) -> None:
    topic = f"watched-{time.monotonic_ns()}"
    kafka_server.create_topic(topic, 2)
    producer = kafka_server.producer()
    for number in range(7):
        producer.produce(topic, b"x", partition=number % 2)
    assert producer.flush(60) == 0
    source = f"kafka://{kafka_server.bootstrap}/{topic}"
    assert tidelog("archive", "create", "raw", "--source", source).code == 0
    group = f"tidelog-{topic}"
    done = tidelog("archive", "run", "raw", "--no-spark", "--kafka-group", group)
    assert done.code == 0, done.err
    admin = kafka_server.admin()
    found = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group].result()
    assert {each.partition: each.offset for each in found.topic_partitions} == {0: 4, 1: 3}
