"""Clients that read Kafka: which properties are ours, and consumers that belong to no group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer

from tidelog.clients.kafka import (
    KafkaPlace,
    Watch,
    client_properties,
    described,
    is_lasting,
    made,
    open_admin,
    parse_place,
    time_limits,
    topic_id,
    translated,
)
from tidelog.model.address import Address

__all__ = [
    "KafkaPlace",
    "Watch",
    "check_properties",
    "consumer_properties",
    "described",
    "is_lasting",
    "open_admin",
    "open_consumer",
    "place_of",
    "topic_id",
    "translated",
]

_OURS = {
    "allow.auto.create.topics": "a reader creates nothing",
    "auto.offset.reset": "a start that is gone must be told, never moved",
    "bootstrap.servers": "the brokers stand in front of the topic: kafka://host1,host2:9092/TOPIC",
    "enable.auto.commit": "positions are kept by whoever reads, not by Kafka",
    "enable.auto.offset.store": "positions are kept by whoever reads, not by Kafka",
    "enable.partition.eof": "it tells where a range without events ends",
    "group.id": "partitions are read by range, and no group is joined",
    "group.instance.id": "partitions are read by range, and no group is joined",
    "metadata.broker.list": "the brokers stand in front of the topic",
    "statistics.interval.ms": "statistics tell whether reading goes on",
}
_OWN = {
    "group.id": "tidelog",  # a consumer must have one; it is neither joined nor committed to
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
}
_USUAL = {
    "check.crcs": True,  # costs nothing that could be measured
    "fetch.queue.backoff.ms": 10,  # librdkafka's own second stalls a fast reader
    "fetch.wait.max.ms": 100,  # how long the end of a partition takes to be told
    "queued.max.messages.kbytes": 32 << 10,  # fetched ahead, in each process that reads
}
_QUEUED_MAX = 30_000  # messages fetched ahead; ten times as many were no faster, but 80 MB larger


def place_of(address: Address, environ: Mapping[str, str]) -> KafkaPlace:
    """Take ``kafka://host1,host2:9092/TOPIC?property=value`` apart."""
    return parse_place(address, environ, "source", _OURS)


def check_properties(place: KafkaPlace) -> None:
    """Refuse what librdkafka would refuse. Nothing is sent."""
    made(place, lambda: Consumer(client_properties(place, _USUAL) | _OWN)).close()


def open_consumer(place: KafkaPlace, timeout_s: float, watch: Watch, count: int) -> Consumer:
    """A client that reads ``count`` offsets or fewer of one partition, and belongs to no group."""
    properties = {
        **consumer_properties(place, timeout_s, count),
        "stats_cb": watch.take_statistics,
        "error_cb": watch.note,
    }
    return made(place, lambda: Consumer(properties))


def consumer_properties(place: KafkaPlace, timeout_s: float, count: int) -> dict[str, Any]:
    """The settings of such a client, without its callbacks."""
    return {
        "bootstrap.servers": place.servers,
        "queued.min.messages": max(1, min(_QUEUED_MAX, count)),  # little is fetched in vain
        **client_properties(place, _USUAL),
        **time_limits(timeout_s, place),
        **_OWN,
        "statistics.interval.ms": max(100, int(timeout_s * 300)),
    }
