"""What the archive's benchmark reads: messages that hardly repeat, in Kafka and in a topic."""

from __future__ import annotations

import base64
import random

import pyarrow as pa
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tidelog.home import Home

EVENTS = 2_000_000
PARTITIONS = 4
TOPIC = "clicks"
ONE_PARTITION = "clicks-one"  # the same events in one partition of Kafka
_FIRST_MS = 1_794_700_800_000
_DATES_MS = 30 * 24 * 3_600_000
_NOISE = 97  # bytes of each message: 16 in its id, the rest in its text
_LOTS = 20


def fill(servers: str, home: Home) -> None:
    """The same events into Kafka, twice, and into a topic of the home."""
    make_topic(servers, TOPIC, PARTITIONS)
    make_topic(servers, ONE_PARTITION, 1)
    home.create_topic(TOPIC, PARTITIONS)
    producer = a_producer(servers)
    for lot in range(_LOTS):
        values = messages(EVENTS // _LOTS, lot)
        for number, value in enumerate(values):
            producer.produce(TOPIC, value, partition=number % PARTITIONS)
            producer.produce(ONE_PARTITION, value, partition=0)
            if number % 10_000 == 0:
                producer.poll(0)
        producer.flush()
        home.append(TOPIC, pa.table({"value": pa.array(values, pa.binary())}))


def messages(count: int, seed: int) -> list[bytes]:
    """JSON of about 200 bytes, with times over 30 dates."""
    chance = random.Random(seed)
    noise = chance.randbytes(_NOISE * count)
    return [
        b'{"timestamp":%d,"id":"%s","user":%d,"text":"%s"}'
        % (
            _FIRST_MS + chance.randrange(_DATES_MS),
            noise[at : at + 16].hex().encode(),
            chance.randrange(1_000_000),
            base64.b64encode(noise[at + 16 : at + _NOISE]),
        )
        for at in range(0, _NOISE * count, _NOISE)
    ]


def a_producer(servers: str) -> Producer:
    return Producer(
        {
            "bootstrap.servers": servers,
            "compression.type": "lz4",
            "linger.ms": 50,
            "queue.buffering.max.messages": 500_000,
            "batch.size": 1_000_000,
        }
    )


def make_topic(servers: str, name: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    for future in admin.create_topics([NewTopic(name, partitions, 1)]).values():
        future.result()
