"""A write's part on executors: rows become segments, which are staged in the store.

A task puts its segments into the folder of its sink and batch, under fresh ids, and tells the
driver what it put there. Nothing of that is part of the topic. An attempt that fails, or that Spark
does not count, leaves objects that nobody names; they go when a batch is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import WriterCommitMessage

from tidelog.codec.events import batch_bytes, check_sizes
from tidelog.codec.segment import Piece, encode_segment
from tidelog.errors import InvalidError
from tidelog.log.partitioner import partitions_for, split
from tidelog.model import layout
from tidelog.model.limits import SEGMENT_EVENTS_MAX
from tidelog.model.topic import Topic
from tidelog.settings import Settings
from tidelog.spark.columns import stored
from tidelog.spark.task import Workshop, open_workshop

__all__ = ["Staged", "StagedMessage", "Staging", "stage"]

# Larger than a producer's: nobody waits for its linger, and fewer segments are fewer commits.
_SEGMENT_BYTES = 32 << 20


class Staged(msgspec.Struct, frozen=True):
    """A staged segment, and what is where in it."""

    key: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class StagedMessage(WriterCommitMessage):
    """What a task tells the driver."""

    incarnation: str  # of the topic that it wrote for
    query: str  # which Spark query, "" for a batch write
    segments: tuple[Staged, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Staging:
    """What a task must know: where to put segments, and how to make them."""

    settings: Settings
    topic: Topic
    sink: str
    use_partition: bool


def stage(
    staging: Staging, batch: int, task_index: int, rows: Iterable[pa.RecordBatch]
) -> tuple[Staged, ...]:
    """Stage all rows of a task as segments of a batch."""
    workshop = open_workshop(staging.settings)
    tables = _tables(staging, workshop, rows)
    return tuple(
        _put(staging, workshop, batch, _parts(staging, table, places, task_index + number))
        for number, (table, places) in enumerate(_collected(tables))
    )


_Located = tuple[pa.Table, npt.NDArray[np.int32] | None]  # events, and partitions if they are given


def _tables(
    staging: Staging, workshop: Workshop, rows: Iterable[pa.RecordBatch]
) -> Iterator[_Located]:
    for given in rows:
        for first in range(0, given.num_rows, SEGMENT_EVENTS_MAX):
            batch = given.slice(first, SEGMENT_EVENTS_MAX)
            table = stored(batch, workshop.clock.now_ms())
            check_sizes(table, staging.settings.event_bytes_max)
            yield table, _given_places(staging.topic, batch) if staging.use_partition else None


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


def _collected(tables: Iterator[_Located]) -> Iterator[_Located]:
    """As much as one segment holds."""
    waiting: list[_Located] = []
    size = events = 0
    for table, places in tables:
        if waiting and events + table.num_rows > SEGMENT_EVENTS_MAX:
            yield _joined(waiting)
            waiting, size, events = [], 0, 0
        waiting.append((table, places))
        size += batch_bytes(table)
        events += table.num_rows
        if size >= _SEGMENT_BYTES:
            yield _joined(waiting)
            waiting, size, events = [], 0, 0
    if waiting:
        yield _joined(waiting)


def _joined(tables: list[_Located]) -> _Located:
    table = pa.concat_tables([table for table, _ in tables]).combine_chunks()
    given = [places for _, places in tables if places is not None]
    return table, np.concatenate(given) if given else None


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
    segment = encode_segment(parts)
    incarnation, staged_id = staging.topic.incarnation, workshop.ids.new()
    key = layout.sink_staged(incarnation, staging.sink, batch, staged_id)
    workshop.store.put(key, segment.data)
    return Staged(key, segment.pieces)
