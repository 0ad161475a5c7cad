"""Writes events to a Kafka topic, exactly once for readers of committed records.

A writer stages segments in the home's store. Publishing sends their events in transactions that
also commit the progress (``transactions``), numbered from the ordinal of the range. So a second
publish, after a crash or by another driver, resumes after the last transaction.

Keys, values, times and headers do not change, nulls included. An id and a type become the headers
``tidelog-id`` and ``tidelog-type``, since Kafka has no other place for them. ``records`` describes
how unusual times are written.

Kafka deletes the offsets of a group without commits after a week (``offsets.retention.minutes``).
So before the first events of a range, two things are written, in this order: the number of its
first event as the group's offset, unless the group has a number, and an object next to the staged
files, which records that sending has begun. If the group has no number now:

1. A range without the object was never sent. It begins at its own ordinal.
2. A range with the object had a number, which Kafka has deleted. It is not sent again on a guess: a
   person must say how far it got. No clock decides this.

**Playbacks** send each lot in one transaction, which also commits the planned end of the lot. So a
process that resumes a named playback knows whether the last lot is there, even if some of its
events were deleted or updated since. Committed events appear once. A named playback gives its group
a number before it plans the first lot. So where the last lot is in doubt and the group has no
number, Kafka has deleted it, and a person must decide.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.clock import Clock, SystemClock
from tidelog.codec.event_batch import STORED_SCHEMA, one_batch
from tidelog.codec.partitioner import split
from tidelog.connectors.archive.staging import discard_files
from tidelog.connectors.kafka.client import (
    ClientWatch,
    KafkaAddress,
    TopicRules,
    describe_topics,
    open_admin,
    parse_kafka_address,
    topic_id,
    topic_rules,
)
from tidelog.connectors.kafka.transactions import OURS, Transactions, check_producer_properties
from tidelog.connectors.sink import ForwardSink, Lot, RangeWriter, SinkContext, TargetSink
from tidelog.connectors.topic.segments import (
    SegmentTarget,
    SegmentWriter,
    check_numbers,
    keeps_partition,
    same_places,
    staged_events,
)
from tidelog.errors import AlreadyExistsError, CorruptError, InvalidError, NotFoundError
from tidelog.model import layout
from tidelog.model.address import Address, parse_address
from tidelog.model.event import Event
from tidelog.model.limits import BATCH_EVENTS_MAX
from tidelog.model.pipeline import Manifest
from tidelog.store import open_store_here
from tidelog.store.base import Store, object_exists

__all__ = ["KafkaPlaybackSink", "KafkaSettings", "KafkaSink", "open_kafka", "open_kafka_playback"]

_TIMEOUT_S = 15.0  # without any response; then the brokers count as unreachable
_BRIEF_S = 5.0  # the same, while a caller waits


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """How events get into Kafka; plain values."""

    store: str  # URL of the home's store, which stages the segments
    partitions: int
    incarnation: str  # Kafka's id of the topic, if it has one
    keep_partition: bool  # otherwise Kafka's partitioner chooses
    timeout_s: float = _TIMEOUT_S


def open_kafka(
    address: Address, *, environ: Mapping[str, str], store: str, timeout_s: float = _TIMEOUT_S
) -> KafkaSink:
    """Opens the sink at ``kafka://host1,host2:9092/TOPIC?partition=key|same&property=value``.

    Other options are librdkafka's properties. Raises ``NotFoundError`` if the topic does not exist.
    """
    keep_partition = keeps_partition(address)
    kafka = _sink_address(address, environ)
    check_producer_properties(kafka)
    incarnation, partitions = _look(kafka, timeout_s)
    settings = KafkaSettings(store, partitions, incarnation, keep_partition, timeout_s)
    return KafkaSink(kafka, settings)


class KafkaSink:
    """A Kafka topic. Pickles without secrets; writers need none."""

    def __init__(
        self,
        kafka: KafkaAddress,
        settings: KafkaSettings,
        open_store: Callable[[str], Store] = open_store_here,
        clock: Clock | None = None,
    ) -> None:
        self._kafka = kafka
        self._settings = settings
        self._open_store = open_store
        self._clock = clock or SystemClock()

    @property
    def url(self) -> str:
        return self._kafka.url

    @property
    def incarnation(self) -> str:
        return self._settings.incarnation

    def check(self, partitions: Sequence[str]) -> None:
        if self._settings.keep_partition:
            check_numbers(self._what, self._settings.partitions, partitions)

    def writer(self, partition: str, staging: str) -> RangeWriter:
        store = self._open_store(self._settings.store)
        return SegmentWriter(store, staging, SegmentTarget(self.url), self._places)

    def publish(self, manifest: Manifest) -> int:
        """Implements ``Sink.publish``. Raises ``InvalidError`` if Kafka lost the progress."""
        if not manifest.read:
            return 0
        end = manifest.ordinal + manifest.read
        if _look(self._kafka, self._settings.timeout_s)[0] != self.incarnation:
            raise NotFoundError(
                f"{self._what}: was deleted and made again since this pipeline began: "
                "start a new pipeline into it"
            )
        name = f"tidelog-{manifest.pipeline}-{manifest.partition}"
        timeout_s = self._settings.timeout_s
        with closing(Transactions(self._kafka, name, timeout_s, self._clock)) as transactions:
            reached = transactions.reached()
            number = self._start(manifest, reached, name)
            if number >= end:
                return 0
            if reached is None:
                transactions.finish(number)
            self._begin(manifest, number)
            try:
                store, skip = self._open_store(self._settings.store), number - manifest.ordinal
                for batch, partition in staged_events(store, manifest, skip):
                    where = partition if self._settings.keep_partition else None
                    transactions.send(batch, where, number)
                    number += batch.num_rows
            except NotFoundError as exc:
                if (transactions.reached() or 0) >= end:
                    return 0  # another driver sent everything and deleted the staged files
                raise CorruptError(
                    f"{self._what}: a part of source partition `{manifest.partition}`, "
                    f"{manifest.start} to {manifest.end}, is neither staged nor sent ({exc}): "
                    "find out who deleted it, and restore it from a copy"
                ) from exc
            transactions.finish(end)
        return 0

    def discard(self, manifest: Manifest) -> None:
        store = self._open_store(self._settings.store)
        discard_files(store, manifest.files)
        store.delete([layout.sending(file.staged) for file in manifest.files[:1]])

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (self.url, self._settings))

    def __repr__(self) -> str:
        return f"KafkaSink({self.url!r})"

    def _places(self, batch: pa.RecordBatch) -> npt.NDArray[np.int32]:
        if self._settings.keep_partition:
            return same_places(batch, self._settings.partitions, self._what)
        return np.zeros(batch.num_rows, np.int32)

    def _start(self, manifest: Manifest, reached: int | None, name: str) -> int:
        """Returns the number of the first event that is not in Kafka yet."""
        end = manifest.ordinal + manifest.read
        if reached is not None and reached > end:
            raise InvalidError(
                f"{self._what}: its group `{name}` says number {reached}, but source partition "
                f"`{manifest.partition}` comes to number {end} only: the catalog was restored from "
                f"an older copy: see which events of {manifest.start} to {manifest.end} are there, "
                f"and set the group's offset on partition 0 to {manifest.ordinal} plus their count",
                group=name,
                number=reached,
            )
        if reached is not None and reached >= manifest.ordinal:
            return reached
        if reached is None and self._is_unsent(manifest):
            return manifest.ordinal
        known = "nothing" if reached is None else f"number {reached}"
        raise InvalidError(
            f"{self._what}: its group `{name}` says {known}, but source partition "
            f"`{manifest.partition}` came to number {manifest.ordinal} at least: Kafka has "
            f"forgotten it, or it was set back: see which events of {manifest.start} to "
            f"{manifest.end} are there, and set the group's offset on partition 0 to "
            f"{manifest.ordinal} plus their count",
            group=name,
            number=manifest.ordinal,
        )

    def _begin(self, manifest: Manifest, number: int) -> None:
        """Records that sending begins, when the group has a number. The first record stays."""
        store = self._open_store(self._settings.store)
        if manifest.files:
            with contextlib.suppress(AlreadyExistsError):
                store.put(layout.sending(manifest.files[0].staged), str(number).encode())

    def _is_unsent(self, manifest: Manifest) -> bool:
        """Returns whether nothing of a range was sent, if its group has no number."""
        if not manifest.files:
            return True
        store = self._open_store(self._settings.store)
        return not object_exists(store, layout.sending(manifest.files[0].staged))

    @property
    def _what(self) -> str:
        return f"kafka topic `{self._kafka.topic}`"


def _sink_address(address: Address, environ: Mapping[str, str]) -> KafkaAddress:
    kafka = parse_kafka_address(address, environ, "sink", OURS)
    properties = {name: text for name, text in kafka.properties.items() if name != "partition"}
    return replace(kafka, properties=properties)


def _look(kafka: KafkaAddress, timeout_s: float) -> tuple[str, int]:
    """Returns the id of the topic and its number of partitions."""
    watch = ClientWatch()
    admin = open_admin(kafka, timeout_s, watch)
    topic = describe_topics(admin, [kafka.topic], timeout_s, watch)[kafka.topic]
    return topic_id(topic) or f"{kafka.servers}/{kafka.topic}", len(topic.partitions)


def _reopen(url: str, settings: KafkaSettings) -> KafkaSink:
    """Opens the sink in another process, with the secrets of that process."""
    environ = os.environ  # noqa: TID251 - a worker reads its own environment
    return KafkaSink(_sink_address(parse_address(url), environ), settings)


_: type[TargetSink] = KafkaSink


def open_kafka_playback(address: Address, setting: SinkContext) -> KafkaPlaybackSink:
    """Opens the sink at ``kafka://host1,host2:9092/TOPIC?partition=key|same&property=value``.

    Raises ``NotFoundError`` if the topic does not exist.
    """
    keep_partition = keeps_partition(address)
    timeout_s = _BRIEF_S if setting.is_brief else _TIMEOUT_S
    # Checks the topic and the properties.
    open_kafka(address, environ=setting.environ, store="", timeout_s=timeout_s)
    kafka = _sink_address(address, setting.environ)
    name = f"tidelog-playback-{setting.id}"
    rules = TopicRules()
    if setting.is_brief:
        rules = topic_rules(open_admin(kafka, timeout_s, ClientWatch()), kafka.topic, timeout_s)
    transactions = Transactions(kafka, name, timeout_s, setting.clock)
    if setting.name is not None:
        _begin_playback(transactions, setting, f"kafka topic `{kafka.topic}`: its group `{name}`")
    return KafkaPlaybackSink(transactions, keep_partition, rules)


def _begin_playback(transactions: Transactions, setting: SinkContext, group: str) -> None:
    """Gives the group a number before the first lot is planned.

    So a group without one, where a lot is in doubt, had one. Raises ``InvalidError`` then.
    """
    if transactions.reached() is not None:
        return
    if setting.in_doubt:
        transactions.close()
        raise InvalidError(
            f"{group} says nothing, but playback `{setting.name}` had begun to send: Kafka has "
            "forgotten how far it got: see which events are there, and play those after them under "
            "another name"
        )
    transactions.finish(0)


class KafkaPlaybackSink:
    """A Kafka topic."""

    lot_events = BATCH_EVENTS_MAX
    lot_bytes = 4 << 20  # a transaction ends long before its timeout

    def __init__(self, transactions: Transactions, keep_partition: bool, rules: TopicRules) -> None:
        self._transactions = transactions
        self._rules = rules
        self._keep_partition = keep_partition
        self._reached = transactions.reached() or 0
        self._is_closed = False

    def check(self, event: Event, now_ms: int) -> None:
        """Raises ``InvalidError`` for a time, or a missing key, that the topic refuses."""
        self._rules.check(event, now_ms)

    def put(self, lot: Lot) -> None:
        if self._reached >= lot.end:
            return
        # A repeated Spark task may divide the same events into other lots.
        known = max(0, self._reached - lot.number)
        for partition, part in self._parts(lot.batch.slice(known)):
            self._transactions.send(part, partition)
        self._transactions.finish(lot.end)
        self._reached = lot.end

    def reached(self) -> int:
        return 0

    def close(self, failed: bool = False) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._transactions.close()

    def _parts(self, batch: pa.RecordBatch) -> list[tuple[int | None, pa.RecordBatch]]:
        stored = batch.select(STORED_SCHEMA.names)
        if not self._keep_partition:
            return [(None, stored)]
        table = pa.Table.from_batches([stored])
        parts = split(table, batch.column("partition").to_numpy())
        return [(partition, one_batch(part)) for partition, part, _ in parts]


_is_forward_sink: type[ForwardSink] = KafkaPlaybackSink
