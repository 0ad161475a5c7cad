"""Batch and streaming writes, as Spark calls them.

On executors, rows become segments, staged in the store. A task puts its segments into the folder of
its sink and batch, under new ids, and returns them to the driver. They are not part of the topic
yet. An attempt that fails, or that Spark does not count, leaves objects that no row names. They are
deleted when a batch is done, or by a sweep a day later (``log.sink_sweep``).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from tidelog.codec.event_batch import Contents, check_events, contents_of
from tidelog.codec.segment import encode_staged
from tidelog.context import Context
from tidelog.errors import (
    InternalError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnknownOutcomeError,
)
from tidelog.log.ledger import Copier, append_staged
from tidelog.log.partitioner import partitions_for, split
from tidelog.log.producer.staged import Collector, Located, StagedSegment
from tidelog.log.topics import find_topic
from tidelog.model import layout
from tidelog.model.producer_names import UNNAMED, sink_producer, unnamed_producer
from tidelog.model.topic import Topic
from tidelog.pool import Pool
from tidelog.settings import Settings
from tidelog.spark.columns import check_writable, stored
from tidelog.spark.commit import Batch, SparkSink, check_not_swept, report_left_out
from tidelog.spark.failures import one_line
from tidelog.spark.options import WriteOptions
from tidelog.spark.plan import Workshop, open_shared, open_workshop, settings_of
from tidelog.store.base import put_fresh

__all__ = [
    "MeasuredRows",
    "StagedMessage",
    "TidelogStreamWriter",
    "TidelogWriter",
    "WriteStaging",
    "stage",
]

_QUERY = "sql.streaming.queryId"  # local properties that Spark gives to the tasks of a stream
_BATCH = "streaming.sql.batchId"
_ONLY_BATCH = 0  # of a write without a name
_AT_ONCE = 8  # segments to copy, and partitions to commit, in parallel


class TidelogWriter(DataSourceArrowWriter):
    """A batch write: repeatable with the options sink and batch, otherwise stored as it runs."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        self._options = options
        self._prepare_staging = _prepare_staging(options, schema)

    @one_line()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """On an executor: stages the rows of a task."""
        task = _task()
        staging, batch = self._prepare_staging, self._options.batch or _ONLY_BATCH
        staged = stage(staging, batch, task.partitionId(), iterator)
        return StagedMessage(staging.topic.incarnation, "", *staged)

    @one_line()
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: makes what was staged part of the topic."""
        options = self._options
        with open_shared(options.home) as context, Pool(_AT_ONCE) as pool:
            topic = find_topic(context, options.topic)
            segments = _segments(topic, messages)
            if options.sink is not None and options.batch is not None:
                sink = SparkSink(context, topic, options.sink, pool)
                made = Batch("", options.batch, segments, _contents(messages))
                sink.commit(made, options.accept_repeat)
                return
            check_not_swept(context, topic, segments)
            producer = Copier(context, topic, self._prepare_staging.sink)
            try:
                report_left_out(topic, append_staged(producer, segments, pool=pool))
            except TidelogError as exc:
                raise UnknownOutcomeError(
                    f"write to topic `{topic.name}`: broke off ({exc}): a part of the rows may be "
                    "stored: look, then decide; options sink and batch make a write repeatable"
                ) from exc
            producer.close()
            _remove_all(context, self._prepare_staging)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Deletes what was staged without a name; what a manifest may name stays."""
        if self._options.sink is None:
            with open_shared(self._options.home) as context:
                _remove_all(context, self._prepare_staging)


class TidelogStreamWriter(DataSourceStreamArrowWriter):
    """A streaming write; Spark makes a new one for each micro-batch's commit."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        self._options = options
        self._prepare_staging = _prepare_staging(options, schema)

    @one_line()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """On an executor: stages the rows of a task."""
        task = _task()
        query, batch = task.getLocalProperty(_QUERY), task.getLocalProperty(_BATCH)
        if query is None or batch is None:
            raise InternalError(f"streaming write: Spark tells query {query} and batch {batch}")
        staged = stage(self._prepare_staging, int(batch), task.partitionId(), iterator)
        return StagedMessage(self._prepare_staging.topic.incarnation, query, *staged)

    @one_line()
    def commit(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        """On the driver: makes the micro-batch part of the topic, unless it already is."""
        options, topic = self._options, self._prepare_staging.topic
        queries = {message.query for message in _staged_messages(messages)}
        if len(queries) > 1:
            raise InternalError(f"streaming write: one micro-batch of {len(queries)} queries")
        with open_shared(options.home) as context, Pool(_AT_ONCE) as pool:
            segments = _segments(topic, messages)
            sink = SparkSink(context, topic, self._prepare_staging.sink, pool)
            made = Batch(next(iter(queries), None), batch, segments, _contents(messages))
            sink.commit(made, options.accept_repeat)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        """Does nothing: a manifest may name what was staged; the next commit deletes the rest."""


def _prepare_staging(options: WriteOptions, schema: StructType) -> WriteStaging:
    """On the driver: checks everything, and returns what tasks need."""
    check_writable(schema, options.use_partition)
    with open_shared(options.home) as context:
        topic = find_topic(context, options.topic)
        sink = options.sink or unnamed_producer(context.ids.new())
        return WriteStaging(settings_of(context), topic, sink, options.use_partition)


def _task() -> Any:
    task = TaskContext.get()
    if task is None:
        raise InternalError("write: is not called in a Spark task")
    return task


def _staged_messages(messages: Iterable[WriterCommitMessage | None]) -> list[StagedMessage]:
    """Returns the messages. Raises if one is missing: a batch is stored whole or not at all."""
    found = [message for message in messages if isinstance(message, StagedMessage)]
    missing = sum(1 for message in messages if not isinstance(message, StagedMessage))
    if missing:
        raise InternalError(f"write: {missing} tasks have told nothing, but Spark commits")
    return found


def _segments(
    topic: Topic, messages: Iterable[WriterCommitMessage | None]
) -> tuple[StagedSegment, ...]:
    """Returns all staged segments, in the order of the tasks."""
    found = _staged_messages(messages)
    if any(message.incarnation != topic.incarnation for message in found):
        raise NotFoundError(
            f"topic `{topic.name}`: was deleted and made again during the write: write again"
        )
    return tuple(segment for message in found for segment in message.segments)


def _contents(messages: Iterable[WriterCommitMessage | None]) -> Contents:
    """Returns the contents of the rows of all tasks."""
    return functools.reduce(Contents.plus, (each.contents for each in _staged_messages(messages)))


def _remove_all(context: Context, staging: WriteStaging) -> None:
    folder = layout.sinks(staging.topic.incarnation, staging.sink)
    context.store.delete([info.key for info in context.store.list(folder)])


_NOT_STORED = ("topic", "offset")  # columns that a write ignores


@dataclass(frozen=True)
class StagedMessage(WriterCommitMessage):
    """What a task returns to the driver."""

    incarnation: str  # of the topic that it wrote for
    query: str  # which Spark query, "" for a batch write
    segments: tuple[StagedSegment, ...] = field(default=())
    contents: Contents = field(default_factory=Contents)  # of all rows of the task


@dataclass(frozen=True, slots=True)
class WriteStaging:
    """What a task needs: where to put segments, and how to make them."""

    settings: Settings
    topic: Topic
    sink: str
    use_partition: bool


class MeasuredRows:
    """Rows that pass through, with a digest of them."""

    def __init__(self, rows: Iterable[pa.RecordBatch], use_partition: bool) -> None:
        self._rows = rows
        self._left_out = _NOT_STORED if use_partition else (*_NOT_STORED, "partition")
        self.contents = Contents()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._rows:
            if batch.num_rows:
                # Before a missing time becomes the current one, which a repeat would not have.
                names = [name for name in batch.schema.names if name not in self._left_out]
                part = contents_of(pa.Table.from_batches([batch]).select(names))
                self.contents = self.contents.plus(part)
                yield batch


def stage(
    staging: WriteStaging, batch: int, task_index: int, rows: Iterable[pa.RecordBatch]
) -> tuple[tuple[StagedSegment, ...], Contents]:
    """Stages all rows of a task as segments of a batch."""
    workshop = open_workshop(staging.settings)
    measured = MeasuredRows(rows, staging.use_partition)
    # Each batch begins elsewhere, so many small ones of one task do not all use one partition.
    first = zlib.crc32(staging.sink.encode()) + batch + task_index
    segments = tuple(
        _put(staging, workshop, batch, _parts(staging, table, places, first + number))
        for number, (table, places) in enumerate(_collect_segments(staging, workshop, measured))
    )
    return segments, measured.contents


def _collect_segments(
    staging: WriteStaging, workshop: Workshop, rows: Iterable[pa.RecordBatch]
) -> Iterator[Located]:
    """Yields as many rows as one segment holds, repeatedly."""
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
    staging: WriteStaging, table: pa.Table, places: npt.NDArray[np.int32] | None, turn: int
) -> list[tuple[int, pa.Table]]:
    """Returns each partition with its events; those without a key take turns by segment."""
    partitions = staging.topic.partitions
    if places is None:
        places = partitions_for(table.column("key"), partitions, turn % partitions)
    return [(partition, part) for partition, part, _ in split(table, places)]


def _put(
    staging: WriteStaging, workshop: Workshop, batch: int, parts: list[tuple[int, pa.Table]]
) -> StagedSegment:
    is_named = not staging.sink.startswith(UNNAMED)
    segment = encode_staged(parts, writer=sink_producer(staging.sink) if is_named else "")
    incarnation, staged_id = staging.topic.incarnation, workshop.ids.new()
    generation = staging.topic.generation
    key = layout.sink_staged(incarnation, staging.sink, batch, generation, staged_id)
    put_fresh(workshop.store, key, segment.data)
    return StagedSegment(key, segment.pieces)
