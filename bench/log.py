"""The log beside Kafka on the same machine: one process, 200-byte events, a local home.

Tidelog's figures are with fsync; the broker's are with acks=all and without fsync. Then the same
log on S3 with DynamoDB, beside the loop that stores one object and raises one counter per event.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator

import boto3
import pyarrow as pa
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import Producer as KafkaProducer
from confluent_kafka.admin import AdminClient, NewTopic

from bench.measure import scratch
from bench.rates import Rate, against, contest
from tests.servers import dynamodb, kafka, s3
from tidelog import Event, Home
from tidelog.home import create_home
from tidelog.settings import Settings

EVENTS = 300_000
KEYED = 1_000_000
PARTITIONS = 4
VALUES = [os.urandom(50).hex().encode() + b"x" * 100 for _ in range(10_000)]


def run() -> list[Rate]:
    """All cases."""
    rates = local()
    rates += remote()
    return rates


def local() -> list[Rate]:
    with scratch() as folder, kafka.running() as broker:
        settings = Settings(f"{folder}/objects", f"{folder}/catalog.sqlite")
        with create_home(settings)[0] as home:
            return writing(home, broker.bootstrap) + reading(home, broker.bootstrap)


def writing(home: Home, bootstrap: str) -> list[Rate]:
    values = [VALUES[n % len(VALUES)] for n in range(KEYED)]
    table = pa.table({"value": pa.array(values[:EVENTS], pa.binary())})
    keys = pa.array([b"key-%07d" % n for n in range(KEYED)], pa.binary())
    keyed = pa.table({"value": pa.array(values, pa.binary()), "key": keys})
    events = [Event(value) for value in values[:EVENTS]]
    home.create_topic("w", PARTITIONS)
    kafka_topic(bootstrap, "w")

    def to_kafka() -> float:
        producer = KafkaProducer({"bootstrap.servers": bootstrap, "acks": "all", **LARGE_QUEUE})
        began = time.perf_counter()
        for value in values[:EVENTS]:
            while True:
                try:
                    producer.produce("w", value)
                    break
                except BufferError:
                    producer.poll(0.01)
        producer.flush()
        return EVENTS / (time.perf_counter() - began)

    def send() -> float:
        began = time.perf_counter()
        with home.producer("w") as producer:
            for value in values[:EVENTS]:
                producer.send(value)
            producer.flush()
            return EVENTS / (time.perf_counter() - began)

    def timed(rows: pa.Table | list[Event], count: int) -> float:
        began = time.perf_counter()
        home.append("w", rows)
        return count / (time.perf_counter() - began)

    rates = contest(
        {
            "confluent-kafka produce, acks=all": to_kafka,
            "append of Arrow tables": lambda: timed(table, EVENTS),
            "append of Arrow, a million keys": lambda: timed(keyed, KEYED),
            "append of Event lists": lambda: timed(events, EVENTS),
            "send of single events": send,
        }
    )
    peer = rates["confluent-kafka produce, acks=all"]
    against(rates["append of Arrow tables"], peer, 2.0)
    against(rates["append of Arrow, a million keys"], peer, 1.0)
    against(rates["append of Event lists"], peer, 0.4)
    against(rates["send of single events"], peer, 0.4)
    return list(rates.values())


def reading(home: Home, bootstrap: str) -> list[Rate]:
    table = pa.table({"value": [VALUES[n % len(VALUES)] for n in range(EVENTS)]})
    home.create_topic("r", PARTITIONS)
    for first in range(0, EVENTS, EVENTS // 20):
        home.append("r", table.slice(first, EVENTS // 20))
    kafka_topic(bootstrap, "r")
    producer = KafkaProducer({"bootstrap.servers": bootstrap, **LARGE_QUEUE})
    for number in range(EVENTS):
        producer.produce("r", VALUES[number % len(VALUES)], partition=number % PARTITIONS)
        if number % 50_000 == 0:
            producer.flush()
    producer.flush()

    def from_kafka() -> float:
        group = uuid.uuid4().hex
        settings = {"bootstrap.servers": bootstrap, "group.id": group, **FROM_START}
        consumer = KafkaConsumer(settings)
        consumer.subscribe(["r"])
        messages: list[object] = []
        while not messages:
            messages = consumer.consume(500, 1.0)
        began, count = time.perf_counter(), 0
        while count < EVENTS - 500:
            for message in consumer.consume(500, 1.0):
                message.value(), message.key(), message.offset(), message.timestamp()
                count += 1
        rate = count / (time.perf_counter() - began)
        consumer.close()
        return rate

    def poll() -> float:
        with home.consumer("r", uuid.uuid4().hex) as consumer:
            consumer.poll(1)
            began, count = time.perf_counter(), 1
            while count < EVENTS:
                for event in consumer.poll(500):
                    event.value, event.key, event.offset, event.timestamp  # noqa: B018
                    count += 1
            return count / (time.perf_counter() - began)

    def poll_arrow() -> float:
        with home.consumer("r", uuid.uuid4().hex) as consumer:
            consumer.poll(1)
            began, count = time.perf_counter(), 1
            while count < EVENTS:
                count += consumer.poll_arrow(50_000).num_rows
            return count / (time.perf_counter() - began)

    rates = contest(
        {
            "confluent-kafka consume, fields touched": from_kafka,
            "poll, fields touched": poll,
            "poll_arrow": poll_arrow,
        }
    )
    peer = rates["confluent-kafka consume, fields touched"]
    against(rates["poll, fields touched"], peer, 0.5)
    against(rates["poll_arrow"], peer, 3.0)
    return list(rates.values())


def remote() -> list[Rate]:
    with remote_home() as (home, bucket, table, endpoints):
        home.create_topic("w", PARTITIONS)
        rows = pa.table({"value": [VALUES[n % len(VALUES)] for n in range(EVENTS)]})
        store = boto3.client("s3", endpoint_url=endpoints[0], region_name="us-east-1")
        counters = boto3.client("dynamodb", endpoint_url=endpoints[1], region_name="us-east-1")

        def one_by_one() -> float:
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < 3:
                raised = counters.update_item(
                    TableName=table,
                    Key={"partition": {"S": "counter"}, "row": {"S": "0"}},
                    UpdateExpression="ADD #n :one",
                    ExpressionAttributeNames={"#n": "n"},
                    ExpressionAttributeValues={":one": {"N": "1"}},
                    ReturnValues="UPDATED_NEW",
                )
                key = f"events/0/{raised['Attributes']['n']['N']}"
                store.put_object(Bucket=bucket, Key=key, Body=VALUES[count % len(VALUES)])
                count += 1
            return count / (time.perf_counter() - began)

        def append() -> float:
            began = time.perf_counter()
            home.append("w", rows)
            return EVENTS / (time.perf_counter() - began)

        rates = contest(
            {
                "one object and one counter per event, on S3 and DynamoDB": one_by_one,
                "append of Arrow tables, on S3 and DynamoDB": append,
            },
            rounds=2,
        )
        one, many = rates.values()
        against(many, one, 500)
        return [one, many, *acknowledgement(home), *cost(home, rows)]


def acknowledgement(home: Home) -> list[Rate]:
    """How long 1,000 events a second wait until they are durable, at the default linger."""
    waits: list[float] = []
    with home.producer("w") as producer:
        began = time.perf_counter()
        sent = []
        for number in range(5_000):
            due = began + number / 1_000
            time.sleep(max(0.0, due - time.perf_counter()))
            sent.append((time.perf_counter(), producer.send(VALUES[0])))
            while sent and sent[0][1].done():
                waits.append(time.perf_counter() - sent.pop(0)[0])
        for at, future in sent:
            future.result(60)
            waits.append(time.perf_counter() - at)
    waits.sort()
    note = f"linger {home.context.log_settings.linger_ms} ms"
    return [
        Rate(
            "acknowledged at 1,000 events/s, p50", [waits[len(waits) // 2] * 1000], "ms", note=note
        ),
        Rate("acknowledged at 1,000 events/s, p99", [waits[len(waits) * 99 // 100] * 1000], "ms"),
    ]


def cost(home: Home, rows: pa.Table) -> list[Rate]:
    """Requests and bytes per 1,000 events, with 8 MiB flushes and at 1,000 events a second."""
    before = {verb: (usage.requests, usage.bytes) for verb, usage in home.meter.verbs.items()}
    home.append("w", rows)
    puts = home.meter.verbs["put"]
    count = puts.requests - before.get("put", (0, 0))[0]
    size = puts.bytes - before.get("put", (0, 0))[1]
    thousands = rows.num_rows / 1_000
    return [
        Rate("store PUTs per 1,000 events, bulk", [count / thousands], "requests"),
        Rate("stored bytes per 1,000 events, bulk", [size / thousands], "bytes"),
    ]


@contextlib.contextmanager
def remote_home() -> Iterator[tuple[Home, str, str, tuple[str, str]]]:
    with s3.running() as objects, dynamodb.running() as rows:
        os.environ["AWS_ACCESS_KEY_ID"] = objects.access_key
        os.environ["AWS_SECRET_ACCESS_KEY"] = objects.secret_key
        bucket = objects.fresh_bucket()
        settings = Settings(
            f"s3://{bucket}?endpoint={objects.endpoint}&region=us-east-1",
            f"dynamodb://bench?endpoint={rows.endpoint}&region=us-east-1",
        )
        with create_home(settings)[0] as home:
            yield home, bucket, "bench", (objects.endpoint, rows.endpoint)


def kafka_topic(bootstrap: str, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.create_topics([NewTopic(name, PARTITIONS, 1)]).values():
        future.result()


LARGE_QUEUE = {"linger.ms": 5, "queue.buffering.max.messages": 500_000, "batch.size": 1_000_000}
FROM_START = {"auto.offset.reset": "earliest", "enable.auto.commit": False}
