"""Sends a range to Kafka in transactions that also commit how far the range got.

1. Open a producer whose transactional id is that of the source partition. Kafka aborts what an
   older producer has begun, and refuses what it still tries.
2. Read the committed offset of the source partition's group: the number of the next event.
3. Begin, send events, add the new number to the same transaction, commit. Repeat to the end.

After a crash or a lost reply, the next process starts at step 1: a transaction is there with its
number, or not at all. The number is stored as a committed offset on partition 0 of the target,
since Kafka keeps offsets only for partitions that exist. Each source partition has its own group.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from tidelog.clock import Clock
from tidelog.codec.event_batch import batch_bytes
from tidelog.codec.formats.batches import slices
from tidelog.connectors.kafka.client import (
    ClientWatch,
    KafkaAddress,
    client_properties,
    create_client,
    time_limits,
    translated,
)
from tidelog.connectors.kafka.records import kafka_headers, time_to_kafka
from tidelog.errors import InvalidError, TidelogError, UnavailableError
from tidelog.model import limits

__all__ = ["OURS", "Transactions", "check_producer_properties"]

OURS = {
    "acks": "an event counts once all replicas have it",
    "bootstrap.servers": "the brokers come before the topic: kafka://host1,host2:9092/TOPIC",
    "enable.auto.commit": "numbers are committed with the events that they count",
    "enable.idempotence": "events go in by transactions",
    "group.id": "groups say how far a range came",
    "group.instance.id": "groups say how far a range came",
    "isolation.level": "what is not committed does not count",
    "max.in.flight": "the order of events must stay",
    "max.in.flight.requests.per.connection": "the order of events must stay",
    "metadata.broker.list": "the brokers come before the topic",
    "request.required.acks": "an event counts once all replicas have it",
    "transactional.id": "it fences drivers that were replaced",
}
Headers = list[tuple[str, bytes | None]]

_TRANSACTION_MS = 60_000
_USUAL = {
    "compression.type": "zstd",
    "linger.ms": 20,
    "message.max.bytes": limits.EVENT_BYTES_CEILING + (1 << 20),  # the broker says what it takes
    "partitioner": "murmur2_random",  # the broker has its own limit
    "queue.buffering.max.kbytes": 128 << 10,
    "queue.buffering.max.messages": 100_000,
    "transaction.timeout.ms": _TRANSACTION_MS,
}
_EVENTS_MAX = 100_000  # of one transaction
_BYTES_MAX = 64 << 20
_AT_ONCE = 5_000  # events between two checks of the clock
_AT_ONCE_BYTES = 4 << 20
_WAIT_S = 0.05  # for room in the queue
_ANY_PARTITION = -1  # lets the partitioner choose
_ID_HEADER = "tidelog-id"  # of events that have an id
_TYPE_HEADER = "tidelog-type"

_FENCED = (
    KafkaError._FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
)
_TOO_LARGE = (
    "size",
    "an event is larger than it takes ({reason}): raise its max.message.bytes",
)
# Errors of single events: what is refused of them, and what to do.
_OF_EVENT = {
    KafkaError.MSG_SIZE_TOO_LARGE: _TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE: _TOO_LARGE,
    KafkaError.INVALID_RECORD: (
        "record",
        "does not accept an event ({reason}): a compacted topic needs keys",
    ),
    KafkaError.INVALID_TIMESTAMP: (
        "time",
        (
            "does not accept the time of an event ({reason}): raise its "
            "message.timestamp.before.max.ms or message.timestamp.after.max.ms"
        ),
    ),
}
_REFUSED = (
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.INVALID_TRANSACTION_TIMEOUT,
    KafkaError.POLICY_VIOLATION,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
)


def check_producer_properties(kafka: KafkaAddress) -> None:
    """Raises ``InvalidError`` for properties that librdkafka refuses. Sends nothing."""
    name = {"transactional.id": "check"}
    create_client(kafka, lambda: Producer(client_properties(kafka, _USUAL) | name))


class Transactions:
    """Sends the events of one source partition. Opening it fences earlier ones.

    Raises ``UnavailableError`` also if another process opened one since, because a second look
    loses nothing. Raises ``InvalidError`` for what the brokers refuse.
    """

    def __init__(self, kafka: KafkaAddress, name: str, timeout_s: float, clock: Clock) -> None:
        self._kafka = kafka
        self._name = name
        self._timeout_s = timeout_s
        self._clock = clock
        self._watch = ClientWatch()
        self._open_events = self._open_bytes = 0
        self._began_s: float | None = None
        self._undelivered: KafkaError | None = None  # why brokers refused an event
        shared = {
            "bootstrap.servers": kafka.servers,
            **client_properties(kafka, _USUAL),
            **time_limits(timeout_s, kafka),
            **_quiet(kafka),
            "error_cb": self._watch.note,
        }
        own = {
            "transactional.id": name,
            "delivery.report.only.error": True,
            "on_delivery": self._note_undelivered,
        }
        self._producer = create_client(kafka, lambda: Producer(shared | own))
        self._transaction_s = int(shared["transaction.timeout.ms"]) / 1000
        self._consumer = self._open_consumer()
        try:
            self._producer.init_transactions(timeout_s)
        except KafkaException as exc:
            error = self._abort_and_explain(exc)
            self.close()
            raise error from exc

    def reached(self) -> int | None:
        """Returns the number of the next event, from the last transaction; None if none."""
        asked = [TopicPartition(self._kafka.topic, 0)]
        try:
            (found,) = self._consumer.committed(asked, timeout=self._timeout_s)
            if found.error is not None:
                raise KafkaException(found.error)
        except KafkaException as exc:
            if exc.args[0].code() == KafkaError._TIMED_OUT:  # the brokers responded before
                raise UnavailableError(
                    f"kafka topic `{self._kafka.topic}`: its brokers do not return the offset "
                    f"of group `{self._name}`: try again; if that lasts, a transaction hangs: see "
                    "`kafka-transactions.sh find-hanging`"
                ) from exc
            raise self._abort_and_explain(exc) from exc
        return found.offset if found.offset >= 0 else None

    def send(self, batch: pa.RecordBatch, partition: int | None, number: int | None = None) -> None:
        """Sends events in stored columns, the first with this number.

        Commits a transaction when it is large or old. Without a number everything is one
        transaction, up to :meth:`finish`.
        """
        where = _ANY_PARTITION if partition is None else partition
        try:
            for part in _slices(batch):
                if self._began_s is None:
                    self._begin()
                self._produce(part, where)
                self._open_events += part.num_rows
                self._open_bytes += batch_bytes(part)
                if number is not None:
                    number += part.num_rows
                    if self._is_full():
                        self._commit(number)
        except KafkaException as exc:
            raise self._abort_and_explain(exc) from exc

    def finish(self, number: int) -> None:
        """Commits the open transaction, and records the number as the progress of the group."""
        try:
            if self._began_s is None:
                self._begin()
            self._commit(number)
        except KafkaException as exc:
            raise self._abort_and_explain(exc) from exc

    def close(self) -> None:
        """Closes both clients. The next process to open aborts what is not committed."""
        self._consumer.close()
        self._producer.purge()

    def _open_consumer(self) -> Consumer:
        """Opens a consumer that never joins: it reads the group's offsets and names the group."""
        kafka = self._kafka
        properties: dict[str, Any] = {
            "bootstrap.servers": kafka.servers,
            **client_properties(kafka, {}),
            **time_limits(self._timeout_s, kafka),
            "group.id": self._name,
            "enable.auto.commit": False,
            "isolation.level": "read_committed",  # wait for transactions that are being completed
            "error_cb": self._watch.note,
        }
        return create_client(kafka, lambda: Consumer(properties))

    def _note_undelivered(self, error: KafkaError, _: object) -> None:
        self._undelivered = self._undelivered or error

    def _begin(self) -> None:
        self._undelivered = None
        self._producer.begin_transaction()
        self._began_s = self._clock.monotonic_s()
        self._open_events = self._open_bytes = 0

    def _commit(self, number: int) -> None:
        group = self._consumer.consumer_group_metadata()
        offsets = [TopicPartition(self._kafka.topic, 0, number)]
        self._producer.send_offsets_to_transaction(offsets, group, self._timeout_s)
        self._producer.commit_transaction(self._transaction_s)
        self._began_s = None

    def _is_full(self) -> bool:
        began_s = self._began_s
        if began_s is None:
            return False
        old = self._clock.monotonic_s() - began_s > self._transaction_s / 4
        return old or self._open_events >= _EVENTS_MAX or self._open_bytes >= _BYTES_MAX

    def _produce(self, batch: pa.RecordBatch, where: int) -> None:
        produce, topic = self._producer.produce, self._kafka.topic
        for value, key, time_ms, headers in _records(batch):
            while True:
                try:
                    produce(topic, value, key, where, timestamp=time_ms, headers=headers)
                    break
                except BufferError:
                    self._wait_for_room()
        self._producer.poll(0)  # frees delivered events

    def _wait_for_room(self) -> None:
        """Waits until the brokers have accepted something."""
        waiting, since_s = len(self._producer), self._clock.monotonic_s()
        while len(self._producer) >= waiting:
            self._producer.poll(_WAIT_S)
            if self._clock.monotonic_s() - since_s > self._timeout_s:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    def _abort_and_explain(self, exc: KafkaException) -> TidelogError:
        """Returns the error to raise, after aborting the transaction if possible."""
        error: KafkaError = exc.args[0]
        try:
            self._producer.poll(0)  # delivers the client's callbacks
        except KafkaException as told:
            if error.code() == KafkaError._FATAL:  # the client is unusable, and this is the reason
                error = told.args[0]
        if error.code() == KafkaError._STATE and self._undelivered is not None:
            error = self._undelivered  # it came first; the call itself only says that it is late
        what = f"kafka topic `{self._kafka.topic}`"
        reason = " ".join(error.str().split())
        if error.code() in _FENCED:
            return UnavailableError(
                f"{what}: another driver has begun to send the same range ({reason}): look again "
                "how far it came"
            )
        if self._began_s is not None and not error.fatal():
            self._abort()
        if error.code() in _OF_EVENT:
            refused, remedy = _OF_EVENT[error.code()]
            return InvalidError(f"{what}: {remedy.format(reason=reason)}", refused=refused)
        if error.code() in _REFUSED:
            return InvalidError(
                f"{what}: {reason}: fix the address, the topic's settings or the permission"
            )
        return translated(what, error, self._watch)

    def _abort(self) -> None:
        """Best effort: the next process to open aborts it too."""
        self._began_s = None
        with contextlib.suppress(KafkaException):
            self._producer.abort_transaction(self._timeout_s)


def _quiet(kafka: KafkaAddress) -> dict[str, Any]:
    """Returns a disabled logger: librdkafka prints fencing errors at any log level."""
    if "debug" in kafka.properties:
        return {}
    logger = logging.getLogger(__name__)
    logger.disabled = True
    return {"logger": logger}


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yields slices small enough to check the clock in between."""
    return slices(batch, _AT_ONCE_BYTES, _AT_ONCE)


def _records(batch: pa.RecordBatch) -> Iterator[tuple[bytes | None, bytes | None, int, Any]]:
    """Yields value, key, time and headers; id and type become headers."""
    times = batch.column("timestamp").cast(pa.int64()).to_pylist()
    headers: Iterator[Headers | None] = _headers(batch)
    if 0 in times:
        headers, times = _odd_times(headers, times)
    return zip(
        batch.column("value").to_pylist(),
        batch.column("key").to_pylist(),
        times,
        (each and kafka_headers(each) for each in headers),
        strict=True,
    )


def _odd_times(
    headers: Iterator[Headers | None], times: list[int]
) -> tuple[Iterator[Headers | None], list[int]]:
    """Replaces times of 0 with Kafka's own: those that headers keep, or none."""
    found: list[Headers | None] = []
    for row, each in enumerate(headers):
        kept = each
        if times[row] == 0:
            times[row], kept = time_to_kafka(each or [])
        found.append(kept)
    return iter(found), times


def _headers(batch: pa.RecordBatch) -> Iterator[Headers | None]:
    names = ("headers", "id", "type")
    if all(batch.column(name).null_count == batch.num_rows for name in names):
        return repeat(None, batch.num_rows)
    return map(_header_list, *(batch.column(name).to_pylist() for name in names))


def _header_list(
    headers: list[dict[str, Any]] | None, event_id: str | None, event_type: str | None
) -> Headers:
    found: Headers = [(each["name"], each["value"]) for each in headers or ()]
    if event_id is not None:
        found.append((_ID_HEADER, event_id.encode()))
    if event_type is not None:
        found.append((_TYPE_HEADER, event_type.encode()))
    return found
