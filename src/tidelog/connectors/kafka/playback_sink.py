"""Events into a topic of Kafka, in order, by transactions that also say how far they came.

Each lot is one transaction, which says where the lot ends as it was intended. So whoever resumes a
playback with a name knows whether the lot under way is there, whatever events of it were deleted or
updated since, and what is committed comes once. How events look in Kafka is told in
``sinks.kafka``.
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

_TIMEOUT_S = 15.0  # without any answer


def open_kafka(address: Address, setting: SinkContext) -> KafkaPlaybackSink:
    """The sink at ``kafka://host1,host2:9092/TOPIC?partition=key|same&property=value``.

    ``NotFoundError`` when the topic is not there.
    """
    keep_partition = keeps_partition(address)
    open_sink(address, environ=setting.environ, store="")  # looks at the topic, and the properties
    place = parse_place(address, setting.environ, "sink", OURS)
    properties = {name: text for name, text in place.properties.items() if name != "partition"}
    place = replace(place, properties=properties)
    name = f"tidelog-playback-{setting.id}"
    return KafkaPlaybackSink(Transactions(place, name, _TIMEOUT_S, setting.clock), keep_partition)


class KafkaPlaybackSink:
    """One topic of Kafka."""

    lot_events = BATCH_EVENTS_MAX
    lot_bytes = 4 << 20  # so that a transaction is over long before its time is

    def __init__(self, transactions: Transactions, keep_partition: bool) -> None:
        self._transactions = transactions
        self._keep_partition = keep_partition
        self._reached = transactions.reached() or 0
        self._is_closed = False

    def put(self, lot: Lot) -> None:
        if self._reached >= lot.end:
            return
        # A task of Spark may be cut into other lots when it runs again, always of the same events.
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
