"""Kafka as a source: one topic, or all topics whose names match a pattern.

Positions are offsets. A partition ends at its last stable offset: open transactions are not read,
and aborted ones are skipped. If the beginning of an open transaction was deleted, that offset may
be before the first one that is left; the partition ends there then. With
``isolation.level=read_uncommitted`` it ends at the high watermark. Offsets without an event
(transaction markers, compacted records) belong to the range they are in. A deleted offset is an
error: librdkafka must never choose another. After reading a range, the topic must still have the id
that the range was planned for.

Values and keys of records do not change, null included. A header name that is not UTF-8 becomes a
text that no other name becomes (``records``); a null value stays null. A time that is missing, or
outside the years 1970 to 9999, is 0, so a second read gives the same result. Events have no id and
no type.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import OffsetSpec, TopicDescription  # type: ignore[attr-defined]

from tidelog.clock import Clock, SystemClock
from tidelog.connectors.kafka.client import (
    ClientWatch,
    KafkaAddress,
    check_consumer_properties,
    consumer_properties,
    describe_topics,
    open_admin,
    open_consumer,
    source_address,
    topic_id,
    translated,
)
from tidelog.connectors.kafka.reader import MessageColumns, PartitionRead
from tidelog.connectors.kafka.records import RecordConsumer
from tidelog.connectors.source import (
    Bounds,
    Chunk,
    DirectReader,
    DividingSource,
    Source,
    SourcePartition,
    SourceRange,
    VanishingSource,
    check_incarnation,
    checked_at_end,
    even_cuts,
    offset_at,
    range_offsets,
)
from tidelog.errors import InvalidError, TidelogError, UnavailableError
from tidelog.model.address import Address, parse_address

__all__ = ["KafkaSource", "open_kafka"]

_TIMEOUT_S = 15.0  # without any progress; then the brokers count as unreachable
_RETRY_S = 0.1  # before asking again about a partition that moves to another broker
_MOVING = (
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError._NOENT,  # no leader at all
)


def open_kafka(address: Address, *, environ: Mapping[str, str]) -> KafkaSource:
    """Opens the source at ``kafka://host1,host2:9092/TOPIC?property=value``.

    A topic that begins with ``^`` is a regular expression, matched from the start of each name.
    Options are librdkafka's properties. Passwords come from ``TIDELOG_KAFKA_SASL_PASSWORD`` and
    similar variables in ``environ``. Raises ``InvalidError`` for unknown or forbidden properties.
    """
    kafka = source_address(address, environ)
    check_consumer_properties(kafka)
    return KafkaSource(kafka)


class KafkaSource:
    """A topic, or a pattern of topics.

    Pickles without secrets: they come from the environment of the process that unpickles it.
    """

    def __init__(
        self, kafka: KafkaAddress, *, timeout_s: float = _TIMEOUT_S, clock: Clock | None = None
    ) -> None:
        self._kafka = kafka
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()

    @property
    def url(self) -> str:
        return self._kafka.url

    def partitions(self) -> list[SourcePartition]:
        topics = _ClusterRequests(self._kafka, self._timeout_s, self._clock).topics()
        return [
            SourcePartition(name, str(n)) for name in sorted(topics) for n in sorted(topics[name])
        ]

    def publish_offsets(self, group: str, positions: Mapping[SourcePartition, str]) -> None:
        """Sets the offsets of a consumer group, for tools that watch those.

        Nothing here reads them. Raises ``InvalidError`` for a group that consumers are in.
        """
        if not positions:
            return
        watch = ClientWatch()
        admin = open_admin(self._kafka, self._timeout_s, watch)
        offsets = [
            TopicPartition(each.topic, int(each.name), int(position))
            for each, position in positions.items()
        ]
        what = f"consumer group `{group}` of `{self._kafka.url}`"
        try:
            wanted = [ConsumerGroupTopicPartitions(group, offsets)]
            done = admin.alter_consumer_group_offsets(wanted, request_timeout=self._timeout_s)
            failed = [each.error for each in done[group].result().topic_partitions if each.error]
        except KafkaException as exc:
            error = exc.args[0]
            if error.code() in (KafkaError.NON_EMPTY_GROUP, KafkaError.UNKNOWN_MEMBER_ID):
                raise InvalidError(f"{what}: has consumers: give a name of its own") from exc
            raise translated(what, error, watch) from exc
        if failed:
            raise translated(what, failed[0], watch)

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        """Sends three requests for all.

        Asks for the first offset first. It may be past the last stable one nevertheless.
        """
        cluster = _ClusterRequests(self._kafka, self._timeout_s, self._clock)
        ids = cluster.check_there(partitions)
        first = cluster.offsets(partitions, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        end = cluster.offsets(partitions, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        return {
            each: Bounds(
                str(first[each]),
                str(max(first[each], end[each])),
                ids[each.topic],
                begins="retention" if first[each] else "earliest",
            )
            for each in partitions
        }

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        """Implements ``Source.read``. The last position is always the limit.

        Raises ``NotFoundError`` also for a limit beyond the end. A limit is an end that was seen,
        so the partition was created again or truncated.
        """
        start, limit = range_offsets(range)
        if start == limit:
            yield Chunk(MessageColumns(range.partition).take(), range.limit)
            return
        watch = ClientWatch()
        consumer = open_consumer(self._kafka, self._timeout_s, watch, limit - start)
        try:
            reading = PartitionRead(
                consumer,
                range.partition,
                watch,
                self._timeout_s,
                self._clock,
                partial(self._records, range, watch),
            )
            yield from checked_at_end(reading.chunks(start, limit), partial(self._check, range))
        finally:
            consumer.close()

    def _records(self, range: SourceRange, watch: ClientWatch, offset: int) -> RecordConsumer:
        """Opens a client that reads the rest of a range from an offset."""
        count = offset_at(range.limit) - offset
        properties = consumer_properties(self._kafka, self._timeout_s, count)
        return RecordConsumer(properties, range.partition, offset, watch)

    def _check(self, range: SourceRange) -> None:
        """Raises ``NotFoundError`` if the topic is not the one that the range was planned for."""
        if range.incarnation:
            cluster = _ClusterRequests(self._kafka, self._timeout_s, self._clock)
            ids = cluster.check_there([range.partition])
            check_incarnation(range, ids[range.partition.topic])

    def may_vanish(self) -> bool:
        """Returns True for a pattern: a deleted topic just stops matching."""
        return self._kafka.is_pattern

    def reader(self, range: SourceRange) -> DirectReader:
        return DirectReader(self, range)

    def cut(self, start: str, end: str, events: int) -> str:
        return str(min(offset_at(end), offset_at(start) + events))

    def divide(self, range: SourceRange, parts: int) -> tuple[str, ...]:
        return even_cuts(range, parts)

    def before(self, one: str, other: str) -> bool:
        return offset_at(one) < offset_at(other)

    def count(self, start: str, end: str) -> int | None:
        """Returns an upper bound: some offsets may hold no event."""
        return max(0, offset_at(end) - offset_at(start))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (self.url, self._timeout_s))

    def __repr__(self) -> str:
        return f"KafkaSource({self.url!r})"


class _ClusterRequests:
    """Requests to a cluster, through one client."""

    def __init__(self, kafka: KafkaAddress, timeout_s: float, clock: Clock) -> None:
        self._kafka = kafka
        self._timeout_s = timeout_s
        self._clock = clock
        self._watch = ClientWatch()
        self._admin = open_admin(kafka, timeout_s, self._watch)

    def topics(self) -> dict[str, set[int]]:
        """Returns the partitions of the topic, or of each topic that matches the pattern."""
        if not self._kafka.is_pattern:
            return _numbers(self._describe({self._kafka.topic}))
        pattern = re.compile(self._kafka.topic)
        try:
            found = self._admin.list_topics(timeout=self._timeout_s).topics
        except KafkaException as exc:
            raise self._failure(f"kafka `{self._kafka.servers}`", exc.args[0]) from exc
        return {
            name: set(topic.partitions)
            for name, topic in found.items()
            if pattern.match(name)
            and not name.startswith("__")  # Kafka's own
            and topic.error is None  # being created or deleted: the next call lists it if it stays
        }

    def check_there(self, partitions: Sequence[SourcePartition]) -> dict[str, str]:
        """Returns the ids of topics, which are never reused. Raises if a partition is deleted.

        Call this before asking for offsets: a client that does not know the brokers of a partition
        yet sometimes waits for seconds before it sends a request.
        """
        found = self._describe({each.topic for each in partitions})
        known = _numbers(found)
        for each in partitions:
            if _number(each) not in known[each.topic]:
                error = KafkaError(KafkaError._UNKNOWN_PARTITION)
                raise translated(f"kafka partition `{each.text}`", error)
        return {name: topic_id(topic) for name, topic in found.items()}

    def offsets(
        self, partitions: Sequence[SourcePartition], wanted: OffsetSpec
    ) -> dict[SourcePartition, int]:
        """Returns the first or end offset of each. Asks again for partitions that move."""
        known: dict[SourcePartition, int] = {}
        deadline_s = self._clock.monotonic_s() + self._timeout_s
        while asked := {_topic_partition(each): each for each in partitions if each not in known}:
            left_s = max(1.0, deadline_s - self._clock.monotonic_s())
            answers = self._admin.list_offsets(
                dict.fromkeys(asked, wanted),
                isolation_level=self._isolation(),
                request_timeout=left_s,
            )
            moving: TidelogError | None = None
            for each, answer in answers.items():
                found = self._answer(asked[each], answer, left_s)
                if isinstance(found, int):
                    known[asked[each]] = found
                else:
                    moving = found
            if moving is not None:
                if self._clock.monotonic_s() >= deadline_s:
                    raise moving
                self._clock.sleep(_RETRY_S)
        return known

    def _answer(
        self, partition: SourcePartition, answer: Future[Any], left_s: float
    ) -> int | TidelogError:
        """Returns an offset, or an error that may pass soon. Raises any other error."""
        what = f"kafka partition `{partition.text}`"
        try:
            offset: int = answer.result(left_s + 1).offset
        except TimeoutError:
            error = KafkaError(KafkaError._TIMED_OUT)
        except KafkaException as exc:
            error = exc.args[0]
        else:
            if offset >= 0:
                return offset
            # The client returns this for "no response", after it lost a connection.
            return UnavailableError(f"{what}: its offsets came without a number: try again")
        if error.code() in _MOVING:
            return translated(what, error)
        raise self._failure(what, error)

    def _describe(self, topics: set[str]) -> dict[str, TopicDescription]:
        return describe_topics(self._admin, topics, self._timeout_s, self._watch)

    def _failure(self, what: str, error: KafkaError) -> TidelogError:
        self._admin.poll(0)  # delivers the client's callbacks
        return translated(what, error, self._watch)

    def _isolation(self) -> IsolationLevel:
        level = self._kafka.properties.get("isolation.level", "")
        uncommitted = level.lower() == "read_uncommitted"
        return IsolationLevel.READ_UNCOMMITTED if uncommitted else IsolationLevel.READ_COMMITTED


def _reopen(url: str, timeout_s: float) -> KafkaSource:
    """Opens the source in another process, with the secrets of that process."""
    environ = os.environ  # noqa: TID251 - a worker reads its own environment
    return KafkaSource(source_address(parse_address(url), environ), timeout_s=timeout_s)


def _numbers(topics: Mapping[str, TopicDescription]) -> dict[str, set[int]]:
    """Returns the partition numbers of each topic."""
    return {name: {each.id for each in topic.partitions} for name, topic in topics.items()}


def _topic_partition(partition: SourcePartition) -> TopicPartition:
    return TopicPartition(partition.topic, _number(partition))


def _number(partition: SourcePartition) -> int:
    if not partition.name.isdecimal():
        raise InvalidError(f"kafka partition `{partition.text}`: give a number after the topic")
    return int(partition.name)


_: type[Source] = KafkaSource
_vanishing: type[VanishingSource] = KafkaSource
_dividing: type[DividingSource] = KafkaSource
