"""Plays events into a Kafka topic, in order, in transactions that also record the progress.

Each lot is one transaction, which also commits the planned end of the lot. So a process that
resumes a named playback knows whether the last lot is there, even if some of its events were
deleted or updated since. Committed events appear once. ``kafka.sink`` describes how events look in
Kafka.
"""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from tidelog.codec.event_batch import STORED_SCHEMA, one_batch
from tidelog.connectors.kafka.client import parse_place
from tidelog.connectors.kafka.sink import open_kafka as open_sink
from tidelog.connectors.kafka.transactions import OURS, Transactions
from tidelog.connectors.playback_sinks import Lot, PlaybackSink, SinkContext
from tidelog.connectors.topic.segments import keeps_partition
from tidelog.log.partitioner import split
from tidelog.model.address import Address
from tidelog.model.limits import BATCH_EVENTS_MAX

__all__ = ["KafkaPlaybackSink", "open_kafka"]

_TIMEOUT_S = 15.0  # without any response


def open_kafka(address: Address, setting: SinkContext) -> KafkaPlaybackSink:
    """Opens the sink at ``kafka://host1,host2:9092/TOPIC?partition=key|same&property=value``.

    Raises ``NotFoundError`` if the topic does not exist.
    """
    keep_partition = keeps_partition(address)
    open_sink(address, environ=setting.environ, store="")  # checks the topic and the properties
    place = parse_place(address, setting.environ, "sink", OURS)
    properties = {name: text for name, text in place.properties.items() if name != "partition"}
    place = replace(place, properties=properties)
    name = f"tidelog-playback-{setting.id}"
    return KafkaPlaybackSink(Transactions(place, name, _TIMEOUT_S, setting.clock), keep_partition)


class KafkaPlaybackSink:
    """A Kafka topic."""

    lot_events = BATCH_EVENTS_MAX
    lot_bytes = 4 << 20  # a transaction ends long before its timeout

    def __init__(self, transactions: Transactions, keep_partition: bool) -> None:
        self._transactions = transactions
        self._keep_partition = keep_partition
        self._reached = transactions.reached() or 0
        self._is_closed = False

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


_: type[PlaybackSink] = KafkaPlaybackSink
