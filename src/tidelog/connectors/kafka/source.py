"""Events of Kafka: one topic, or all whose names match a pattern.

Positions are offsets. A partition ends at its last stable offset, so that open transactions are
not read and aborted ones are passed over; with ``isolation.level=read_uncommitted`` it ends at the
high watermark. Offsets that hold no event (transaction markers, what compaction removed) belong to
the range that they lie in. An offset that is gone is told: librdkafka may never choose another.
After a range is read, the topic must still have the id that the range was planned for.

Records become events so: values and keys as they are, null too, and headers: a name that is not
UTF-8 becomes text that no other name becomes (``codec.header_names``), a null value stays null. A
time that is absent, or outside of the years 1970 to 9999, is 0, so that reading again gives the
same. Events have no id and no type.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec, TopicDescription  # type: ignore[attr-defined]

from tidelog.clock import Clock, SystemClock
from tidelog.connectors.kafka.client import (
    ClientWatch,
    KafkaPlace,
    check_properties,
    consumer_properties,
    described,
    open_admin,
    open_consumer,
    place_of,
    topic_id,
    translated,
)
from tidelog.connectors.kafka.reader import MessageColumns, PartitionRead
from tidelog.connectors.kafka.records import RecordConsumer
from tidelog.connectors.source import (
    Bounds,
    Chunk,
    DirectReader,
    Source,
    SourcePartition,
    SourceRange,
    Vanishing,
    check_incarnation,
    checked_at_end,
    offset_at,
    range_offsets,
)
from tidelog.errors import InvalidError, TidelogError, UnavailableError
from tidelog.model.address import Address, parse_address

__all__ = ["KafkaSource", "open_kafka"]

_TIMEOUT_S = 15.0  # without any progress; then the brokers count as unreachable
_RETRY_S = 0.1  # between questions about a partition that is moving to another broker
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
    """The source at ``kafka://host1,host2:9092/TOPIC?property=value``.

    A topic that begins with ``^`` is a regular expression, matched from the beginning of each name.
    Options are librdkafka's properties; passwords come from ``TIDELOG_KAFKA_SASL_PASSWORD`` and
    its like in ``environ``. ``InvalidError`` for properties that are unknown or not to be given.
    """
    place = place_of(address, environ)
    check_properties(place)
    return KafkaSource(place)


class KafkaSource:
    """A topic, or a pattern of topics.

    It is pickled without secrets: they come from the environment of whoever unpickles it.
    """

    def __init__(
        self, place: KafkaPlace, *, timeout_s: float = _TIMEOUT_S, clock: Clock | None = None
    ) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()

    @property
    def url(self) -> str:
        return self._place.url

    def partitions(self) -> list[SourcePartition]:
        topics = _Questions(self._place, self._timeout_s, self._clock).topics()
        return [
            SourcePartition(name, str(n)) for name in sorted(topics) for n in sorted(topics[name])
        ]

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        """Three questions for all. The first offset is asked before the end, so never behind it."""
        questions = _Questions(self._place, self._timeout_s, self._clock)
        made = questions.check_there(partitions)
        first = questions.offsets(partitions, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        end = questions.offsets(partitions, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        return {
            each: Bounds(
                str(first[each]),
                str(end[each]),
                made[each.topic],
                begins="retention" if first[each] else "earliest",
            )
            for each in partitions
        }

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        """As the interface says, and whole: the last position is the limit.

        ``NotFoundError`` also for a limit beyond the end: limits are ends that were seen, so the
        partition was made again, or cut off.
        """
        start, limit = range_offsets(range)
        if start == limit:
            yield Chunk(MessageColumns(range.partition).take(), range.limit)
            return
        watch = ClientWatch()
        consumer = open_consumer(self._place, self._timeout_s, watch, limit - start)
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
        """A client that reads the rest of a range from an offset on."""
        count = offset_at(range.limit) - offset
        properties = consumer_properties(self._place, self._timeout_s, count)
        return RecordConsumer(properties, range.partition, offset, watch)

    def _check(self, range: SourceRange) -> None:
        """Refuse what was read of a topic that is not the one which the range was planned for."""
        if range.incarnation:
            questions = _Questions(self._place, self._timeout_s, self._clock)
            made = questions.check_there([range.partition])
            check_incarnation(range, made[range.partition.topic])

    def may_vanish(self) -> bool:
        """A topic that is deleted no longer matches a pattern."""
        return self._place.is_pattern

    def reader(self, range: SourceRange) -> DirectReader:
        return DirectReader(self, range)

    def cut(self, start: str, end: str, events: int) -> str:
        return str(min(offset_at(end), offset_at(start) + events))

    def before(self, one: str, other: str) -> bool:
        return offset_at(one) < offset_at(other)

    def count(self, start: str, end: str) -> int | None:
        """At most so many: some offsets may hold no event."""
        return max(0, offset_at(end) - offset_at(start))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopened, (self.url, self._timeout_s))

    def __repr__(self) -> str:
        return f"KafkaSource({self.url!r})"


class _Questions:
    """What is asked of a cluster, through one client."""

    def __init__(self, place: KafkaPlace, timeout_s: float, clock: Clock) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._clock = clock
        self._watch = ClientWatch()
        self._admin = open_admin(place, timeout_s, self._watch)

    def topics(self) -> dict[str, set[int]]:
        """The partitions of the topic, or of each topic that matches the pattern."""
        if not self._place.is_pattern:
            return _numbers(self._described({self._place.topic}))
        pattern = re.compile(self._place.topic)
        try:
            found = self._admin.list_topics(timeout=self._timeout_s).topics
        except KafkaException as exc:
            raise self._failed(f"kafka `{self._place.servers}`", exc.args[0]) from exc
        return {
            name: set(topic.partitions)
            for name, topic in found.items()
            if pattern.match(name)
            and not name.startswith("__")  # Kafka's own
            and topic.error is None  # being made or deleted: seen next time, if it stays
        }

    def check_there(self, partitions: Sequence[SourcePartition]) -> dict[str, str]:
        """Refuse partitions that are gone; the ids of their topics, which no later topic has.

        This comes before the questions about offsets: a client that has not yet heard of the
        partitions' brokers now and then waits for seconds before it asks them.
        """
        found = self._described({each.topic for each in partitions})
        known = _numbers(found)
        for each in partitions:
            if _number(each) not in known[each.topic]:
                error = KafkaError(KafkaError._UNKNOWN_PARTITION)
                raise translated(f"kafka partition `{each.text}`", error)
        return {name: topic_id(topic) for name, topic in found.items()}

    def offsets(
        self, partitions: Sequence[SourcePartition], wanted: OffsetSpec
    ) -> dict[SourcePartition, int]:
        """The first or the end offset of each; those on the move are asked for again."""
        known: dict[SourcePartition, int] = {}
        deadline_s = self._clock.monotonic_s() + self._timeout_s
        while asked := {_place(each): each for each in partitions if each not in known}:
            left_s = max(1.0, deadline_s - self._clock.monotonic_s())
            answers = self._admin.list_offsets(
                dict.fromkeys(asked, wanted),
                isolation_level=self._isolation(),
                request_timeout=left_s,
            )
            moving: TidelogError | None = None
            for place, answer in answers.items():
                found = self._answer(asked[place], answer, left_s)
                if isinstance(found, int):
                    known[asked[place]] = found
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
        """An offset, or an error that may pass soon; one that will not is raised."""
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
            # The client's word for "no answer", after it lost a connection.
            return UnavailableError(f"{what}: its offsets came without a number: try again")
        if error.code() in _MOVING:
            return translated(what, error)
        raise self._failed(what, error)

    def _described(self, topics: set[str]) -> dict[str, TopicDescription]:
        return described(self._admin, topics, self._timeout_s, self._watch)

    def _failed(self, what: str, error: KafkaError) -> TidelogError:
        self._admin.poll(0)  # what the client has to tell comes with this
        return translated(what, error, self._watch)

    def _isolation(self) -> IsolationLevel:
        level = self._place.properties.get("isolation.level", "")
        uncommitted = level.lower() == "read_uncommitted"
        return IsolationLevel.READ_UNCOMMITTED if uncommitted else IsolationLevel.READ_COMMITTED


def _reopened(url: str, timeout_s: float) -> KafkaSource:
    """A source in another process, with that one's secrets."""
    environ = os.environ  # noqa: TID251 - a worker's world comes in here
    return KafkaSource(place_of(parse_address(url), environ), timeout_s=timeout_s)


def _numbers(topics: Mapping[str, TopicDescription]) -> dict[str, set[int]]:
    """The partitions of topics."""
    return {name: {each.id for each in topic.partitions} for name, topic in topics.items()}


def _place(partition: SourcePartition) -> TopicPartition:
    return TopicPartition(partition.topic, _number(partition))


def _number(partition: SourcePartition) -> int:
    if not partition.name.isdecimal():
        raise InvalidError(f"kafka partition `{partition.text}`: give a number after the topic")
    return int(partition.name)


_: type[Source] = KafkaSource
_vanishing: type[Vanishing] = KafkaSource
