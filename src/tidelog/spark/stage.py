"""A write's part on executors: rows become segments, which are staged in the store.

A task puts its segments into the folder of its sink and batch, under fresh ids, and tells the
driver what it put there. Nothing of that is part of the topic. An attempt that fails, or that Spark
does not count, leaves objects that no row names; they are deleted when a batch is done, or by a
sweep a day later (``log.sink_sweep``).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import WriterCommitMessage

from tidelog.codec.digest import Contents, contents_of
from tidelog.codec.events import check_events
from tidelog.codec.segment import encode_staged
from tidelog.errors import InvalidError
from tidelog.log.partitioner import partitions_for, split
from tidelog.log.staged import Collector, Located, Staged
from tidelog.model import layout
from tidelog.model.producers import UNNAMED, sink_producer
from tidelog.model.topic import Topic
from tidelog.settings import Settings
from tidelog.spark.columns import stored
from tidelog.spark.task import Workshop, open_workshop
from tidelog.store.fresh import put_fresh

__all__ = ["Measured", "StagedMessage", "Staging", "stage"]

_NOT_STORED = ("topic", "offset")  # columns that a write ignores


@dataclass(frozen=True)
class StagedMessage(WriterCommitMessage):
    """What a task tells the driver."""

    incarnation: str  # of the topic that it wrote for
    query: str  # which Spark query, "" for a batch write
    segments: tuple[Staged, ...] = field(default=())
    contents: Contents = field(default_factory=Contents)  # of all rows of the task


@dataclass(frozen=True, slots=True)
class Staging:
    """What a task must know: where to put segments, and how to make them."""

    settings: Settings
    topic: Topic
    sink: str
    use_partition: bool


class Measured:
    """Rows that pass through, with a digest of them."""

    def __init__(self, rows: Iterable[pa.RecordBatch], use_partition: bool) -> None:
        self._rows = rows
        self._left_out = _NOT_STORED if use_partition else (*_NOT_STORED, "partition")
        self.contents = Contents()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._rows:
            if batch.num_rows:
                # Before a missing time becomes the present one, which a repeat would not give.
                names = [name for name in batch.schema.names if name not in self._left_out]
                part = contents_of(pa.Table.from_batches([batch]).select(names))
                self.contents = self.contents.plus(part)
                yield batch


def stage(
    staging: Staging, batch: int, task_index: int, rows: Iterable[pa.RecordBatch]
) -> tuple[tuple[Staged, ...], Contents]:
    """Stage all rows of a task as segments of a batch."""
    workshop = open_workshop(staging.settings)
    measured = Measured(rows, staging.use_partition)
    # Each batch begins elsewhere: many small ones of one task do not all go to one partition.
    first = zlib.crc32(staging.sink.encode()) + batch + task_index
    segments = tuple(
        _put(staging, workshop, batch, _parts(staging, table, places, first + number))
        for number, (table, places) in enumerate(_collected(staging, workshop, measured))
    )
    return segments, measured.contents


def _collected(
    staging: Staging, workshop: Workshop, rows: Iterable[pa.RecordBatch]
) -> Iterator[Located]:
    """As much as one segment holds, again and again."""
    collector = Collector()
    for batch in rows:
        table = stored(batch, workshop.clock.now_ms())
        check_events(table, staging.settings.event_bytes_max)
        places = _given_places(staging.topic, batch) if staging.use_partition else None
        yield from collector.add(table, places)
    yield from collector.rest()


def _given_places(topic: Topic, batch: pa.RecordBatch) -> npt.NDArray[np.int32]:
    column = batch.column("partition")
    bounds = pc.min_max(column).as_py()
    if column.null_count or bounds["min"] < 0 or bounds["max"] >= topic.partitions:
        found = "null" if column.null_count else f"{bounds['min']} to {bounds['max']}"
        raise InvalidError(
            f"table: column `partition` has {found}, topic `{topic.name}` has 0 to "
            f"{topic.partitions - 1}: give these, or leave out usePartition"
        )
    places: npt.NDArray[np.int32] = column.to_numpy().astype(np.int32)
    return places


def _parts(
    staging: Staging, table: pa.Table, places: npt.NDArray[np.int32] | None, turn: int
) -> list[tuple[int, pa.Table]]:
    """Each partition with its events; those without a key take turns, segment by segment."""
    partitions = staging.topic.partitions
    if places is None:
        places = partitions_for(table.column("key"), partitions, turn % partitions)
    return [(partition, part) for partition, part, _ in split(table, places)]


def _put(
    staging: Staging, workshop: Workshop, batch: int, parts: list[tuple[int, pa.Table]]
) -> Staged:
    is_named = not staging.sink.startswith(UNNAMED)
    segment = encode_staged(parts, writer=sink_producer(staging.sink) if is_named else "")
    incarnation, staged_id = staging.topic.incarnation, workshop.ids.new()
    generation = staging.topic.generation
    key = layout.sink_staged(incarnation, staging.sink, batch, generation, staged_id)
    put_fresh(workshop.store, key, segment.data)
    return Staged(key, segment.pieces)
