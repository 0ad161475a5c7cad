"""Kafka clients: turns an address into librdkafka's properties, and explains its errors.

The address sets properties under librdkafka's own names. Properties that would break a promise are
refused; secrets come from the environment. librdkafka's log is off: what it would log about its
connections becomes the reason in the error that is raised. Consumers join no group.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    TopicDescription,
)

from tidelog.errors import CorruptError, InvalidError, NotFoundError, TidelogError, UnavailableError
from tidelog.model.address import Address
from tidelog.model.event import Event, check_timestamp

__all__ = [
    "ClientWatch",
    "KafkaAddress",
    "TopicRules",
    "check_consumer_properties",
    "client_properties",
    "consumer_properties",
    "create_client",
    "describe_topics",
    "is_lasting",
    "open_admin",
    "open_consumer",
    "parse_kafka_address",
    "source_address",
    "time_limits",
    "topic_id",
    "topic_rules",
    "translated",
]

C = TypeVar("C")

_PORT = 9092
_VARIABLE_PREFIX = "TIDELOG_KAFKA_"
_FROM_ENVIRONMENT = (
    "sasl.oauthbearer.client.secret",
    "sasl.oauthbearer.token.endpoint.url",  # not a secret, but an address may not contain `token`
    "sasl.password",
    "ssl.key.password",
    "ssl.key.pem",
    "ssl.keystore.password",
)
_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"  # the id of topics on brokers before Kafka 2.8, which have none
_USUAL = {"client.id": "tidelog", "log_level": 0}
_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")

_GONE = (
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_TOPIC_ID,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
)
_REFUSED = (
    KafkaError._AUTHENTICATION,
    KafkaError._INVALID_ARG,
    KafkaError._SSL,
    KafkaError._UNSUPPORTED_FEATURE,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.ILLEGAL_SASL_STATE,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.UNSUPPORTED_COMPRESSION_TYPE,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
    KafkaError.UNSUPPORTED_VERSION,
)
_DAMAGED = (KafkaError._BAD_COMPRESSION, KafkaError._BAD_MSG, KafkaError.INVALID_MSG)
_NO_REASON = (KafkaError._ALL_BROKERS_DOWN, KafkaError.GROUP_AUTHORIZATION_FAILED)


@dataclass(frozen=True)
class KafkaAddress:
    """A topic, or a pattern of topics, of one cluster; plain values."""

    url: str
    servers: str
    topic: str
    properties: dict[str, str]
    secrets: dict[str, str] = field(repr=False)
    role: str = "source"  # its name in error messages

    @property
    def is_pattern(self) -> bool:
        """Returns whether the topic is a regular expression."""
        return self.topic.startswith("^")


class ClientWatch:
    """What a client reported about itself: its last error, and how far it has fetched."""

    def __init__(self) -> None:
        self.trouble: KafkaError | None = None
        self.fetched = -1

    def note(self, error: KafkaError) -> None:
        """Keeps the most telling reason. Ignores group errors, since no group is joined."""
        if error.code() not in _NO_REASON:
            self.trouble = error

    def take_statistics(self, text: str) -> None:
        """Updates the next offset to fetch of the one partition that is read."""
        for topic in json.loads(text)["topics"].values():
            for partition in topic["partitions"].values():
                self.fetched = max(self.fetched, partition["next_offset"])


def parse_kafka_address(
    address: Address, environ: Mapping[str, str], role: str, ours: Mapping[str, str]
) -> KafkaAddress:
    """Parses ``kafka://host1,host2:9092/TOPIC?property=value``.

    ``ours`` maps the properties that a user may not set to the reason.
    """
    for name in address.options:
        if name in ours:
            raise InvalidError(
                f"{role} `{address.text}`: may not set `{name}`: leave it out, {ours[name]}"
            )
        if name in _FROM_ENVIRONMENT:
            raise InvalidError(
                f"{role} `kafka://…`: `{name}` may not be in an address: "
                f"give it as {_variable(name)} in the environment"
            )
    secrets = {
        name: environ[_variable(name)] for name in _FROM_ENVIRONMENT if _variable(name) in environ
    }
    hosts = address.host.split(",")
    if not all(hosts):
        raise InvalidError(
            f"{role} `{address.text}`: a broker is missing: give kafka://host1,host2:9092/TOPIC"
        )
    port = address.port or _PORT
    servers = ",".join(host if _has_port(host) else f"{host}:{port}" for host in hosts)
    topic = address.path.removeprefix("/")
    _check_topic(address.text, topic, role)
    return KafkaAddress(address.text, servers, topic, dict(address.options), secrets, role)


def client_properties(kafka: KafkaAddress, usual: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the properties of the address and the environment, with our defaults for the rest."""
    quiet = dict(_USUAL)
    if "debug" in kafka.properties:
        del quiet["log_level"]  # an address that asks for librdkafka's log gets it
    return {**quiet, **usual, **kafka.properties, **kafka.secrets}


def time_limits(timeout_s: float, kafka: KafkaAddress) -> dict[str, Any]:
    """Returns limits so that librdkafka tries another broker before we stop waiting."""
    limit_ms = max(1_500, int(timeout_s * 700))
    usual = {"socket.timeout.ms": limit_ms, "socket.connection.setup.timeout.ms": limit_ms}
    return {name: value for name, value in usual.items() if name not in kafka.properties}


def open_admin(kafka: KafkaAddress, timeout_s: float, watch: ClientWatch) -> AdminClient:
    """Opens a client for metadata of topics and offsets."""
    properties = {
        "bootstrap.servers": kafka.servers,
        **client_properties(kafka, {}),
        **time_limits(timeout_s, kafka),
        "error_cb": watch.note,
    }
    return create_client(kafka, lambda: AdminClient(properties))


def describe_topics(
    admin: AdminClient, topics: Iterable[str], timeout_s: float, watch: ClientWatch
) -> dict[str, TopicDescription]:
    """Describes topics. Raises ``NotFoundError`` for one that does not exist.

    ``list_topics`` would make brokers with automatic creation create the topic.
    """
    found: dict[str, TopicDescription] = {}
    names = sorted(topics)
    if names:
        answers = admin.describe_topics(TopicCollection(names), request_timeout=timeout_s)
        for name, answer in answers.items():
            try:
                found[name] = answer.result()
            except KafkaException as exc:
                admin.poll(0)  # delivers the client's callbacks
                raise translated(f"kafka topic `{name}`", exc.args[0], watch) from exc
    return found


@dataclass(frozen=True, slots=True)
class TopicRules:
    """Which events a topic refuses, as far as its settings say."""

    topic: str = ""
    before_ms: int | None = None  # by which an event's time may be before the broker's
    after_ms: int | None = None
    needs_key: bool = False

    def check(self, event: Event, now_ms: int) -> None:
        """Raises ``InvalidError`` for an event that the brokers would refuse."""
        what = f"kafka topic `{self.topic}`"
        if self.needs_key and event.key is None:
            raise InvalidError(
                f"{what}: is compacted, and an event has no key: give it one", refused="record"
            )
        time_ms = check_timestamp(event.timestamp) if event.timestamp else now_ms  # 0: no time
        late_ms = now_ms - time_ms
        if (self.before_ms is not None and late_ms > self.before_ms) or (
            self.after_ms is not None and -late_ms > self.after_ms
        ):
            raise InvalidError(
                f"{what}: does not accept the time of an event, {event.timestamp}: raise its "
                "message.timestamp.before.max.ms or message.timestamp.after.max.ms",
                refused="time",
            )


def topic_rules(admin: AdminClient, topic: str, timeout_s: float) -> TopicRules:
    """Returns the rules of a topic; without the permission to read its settings, none."""
    asked = ConfigResource(ConfigResource.Type.TOPIC, topic)
    try:
        found = admin.describe_configs([asked], request_timeout=timeout_s)[asked].result()
    except KafkaException:
        return TopicRules(topic)  # the brokers refuse events by themselves
    given = {name: str(entry.value) for name, entry in found.items()}
    is_stamped = given.get("message.timestamp.type") == "LogAppendTime"  # by the broker

    def most_ms(name: str) -> int | None:
        text = given.get(f"message.timestamp.{name}.max.ms", "")
        return int(text) if text.isdecimal() and not is_stamped else None

    needs_key = "compact" in given.get("cleanup.policy", "")
    return TopicRules(topic, most_ms("before"), most_ms("after"), needs_key)


def topic_id(topic: TopicDescription) -> str:
    """Returns the id of a topic, which is never reused; empty if the brokers have no ids."""
    text = str(topic.topic_id)
    return "" if text == _NO_ID else text


def create_client(kafka: KafkaAddress, make: Callable[[], C]) -> C:
    """Calls ``make``, and raises ``InvalidError`` for invalid properties."""
    try:
        return make()
    except KafkaException as exc:
        reason = " ".join(exc.args[0].str().split())
        raise InvalidError(f"{kafka.role} `{kafka.url}`: {reason}: fix the address") from exc
    except (TypeError, ValueError) as exc:  # a name reserved by Python, such as a callback
        raise InvalidError(f"{kafka.role} `{kafka.url}`: {exc}: leave it out") from exc


def translated(what: str, error: KafkaError, watch: ClientWatch | None = None) -> TidelogError:
    """Returns the error to raise. The reason of a timeout is what the client reported before it."""
    if watch is not None and watch.trouble is not None and not is_lasting(error):
        error = watch.trouble
    reason = " ".join(error.str().split())
    if error.code() in _GONE:
        return NotFoundError(f"{what}: is not there: {reason}: create it, or fix the name")
    if error.code() in _REFUSED:
        return InvalidError(f"{what}: {reason}: fix the address, the credentials or the permission")
    if error.code() in _DAMAGED:
        return CorruptError(f"{what}: {reason}: keep it, and look at the broker's disk")
    return UnavailableError(f"{what}: {reason}: see that its brokers can be reached, and try again")


def is_lasting(error: KafkaError) -> bool:
    """Returns whether waiting cannot fix the error."""
    return error.code() in (*_GONE, *_REFUSED, *_DAMAGED)


def _check_topic(url: str, topic: str, role: str) -> None:
    if topic.startswith("^") and role == "source":
        try:
            re.compile(topic)
        except re.error as exc:
            raise InvalidError(
                f"{role} `{url}`: `{topic}` is not a valid regular expression: {exc}: fix it"
            ) from exc
    elif not _TOPIC_NAME.fullmatch(topic) or topic in (".", ".."):
        pattern = ", or a regular expression that begins with ^" if role == "source" else ""
        raise InvalidError(
            f"{role} `{url}`: `{topic}` is not a valid topic: give one after the brokers, "
            f"kafka://host:9092/TOPIC{pattern}"
        )


def _variable(name: str) -> str:
    return _VARIABLE_PREFIX + name.replace(".", "_").upper()


def _has_port(host: str) -> bool:
    return host.rpartition(":")[0] != "" and host.rpartition(":")[2].isdecimal()


_OURS = {
    "allow.auto.create.topics": "a reader creates nothing",
    "auto.offset.reset": "a start that is gone is an error, and never moved",
    "bootstrap.servers": "the brokers come before the topic: kafka://host1,host2:9092/TOPIC",
    "enable.auto.commit": "the reader keeps positions, not Kafka",
    "enable.auto.offset.store": "the reader keeps positions, not Kafka",
    "enable.partition.eof": "it shows where a range without events ends",
    "group.id": "partitions are read by range, and no group is joined",
    "group.instance.id": "partitions are read by range, and no group is joined",
    "metadata.broker.list": "the brokers come before the topic",
    "statistics.interval.ms": "statistics show whether reading continues",
}
_OWN = {
    "group.id": "tidelog",  # a consumer must have one; it never joins it or commits to it
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
}
_READER_DEFAULTS = {
    "check.crcs": True,  # no measurable cost
    "fetch.queue.backoff.ms": 10,  # librdkafka's default of one second stalls a fast reader
    "fetch.wait.max.ms": 100,  # how long until the end of a partition is reported
    "queued.max.messages.kbytes": 32 << 10,  # prefetch limit of each process that reads
}
_QUEUED_MAX = 30_000  # messages to prefetch; ten times more was no faster and took 80 MB more


def source_address(address: Address, environ: Mapping[str, str]) -> KafkaAddress:
    """Parses ``kafka://host1,host2:9092/TOPIC?property=value`` of a source."""
    return parse_kafka_address(address, environ, "source", _OURS)


def check_consumer_properties(kafka: KafkaAddress) -> None:
    """Raises ``InvalidError`` for properties that librdkafka refuses. Sends nothing."""
    create_client(
        kafka, lambda: Consumer(client_properties(kafka, _READER_DEFAULTS) | _OWN)
    ).close()


def open_consumer(
    kafka: KafkaAddress, timeout_s: float, watch: ClientWatch, count: int
) -> Consumer:
    """Opens a client without a group, to read up to ``count`` offsets of one partition."""
    properties = {
        **consumer_properties(kafka, timeout_s, count),
        "stats_cb": watch.take_statistics,
        "error_cb": watch.note,
    }
    return create_client(kafka, lambda: Consumer(properties))


def consumer_properties(kafka: KafkaAddress, timeout_s: float, count: int) -> dict[str, Any]:
    """Returns the properties of such a client, without its callbacks."""
    return {
        "bootstrap.servers": kafka.servers,
        "queued.min.messages": max(1, min(_QUEUED_MAX, count)),  # prefetch no more than needed
        **client_properties(kafka, _READER_DEFAULTS),
        **time_limits(timeout_s, kafka),
        **_OWN,
        "statistics.interval.ms": max(100, int(timeout_s * 300)),
    }
