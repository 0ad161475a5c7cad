"""Batch and streaming writes, as Spark calls them.

On executors, rows become segments, staged in the store. A task puts its segments into the folder of
its sink and batch, under new ids, and returns them to the driver. They are not part of the topic
yet. An attempt that fails, or that Spark does not count, leaves objects that no row names. They are
deleted when a batch is done, or by a sweep a day later (``log.maintenance.unfinished_writes``).

**Commits.** On the driver, staged segments become runs of the topic, once. A batch of a named sink
has six steps:

1. tasks stage segments in the folder of the batch    → crash: objects that no row names
2. before the first batch, record the topic in the
   registry                                           → crash: the same, and a row that says so
3. put a manifest that names the staged segments      → crash: the same
4. change the sink's row from the last batch to this
   one, with the manifest: now the content is decided → crash: the next process resumes at step 5
5. copy each staged segment to the topic's segments,
   in its current generation, and commit its pieces,
   guarded by the sink's producer rows; then put a
   witness for it (``producer.staged``)               → crash: some runs; the next one skips these
6. mark the sink's row as done; then delete what is
   staged for this batch and earlier ones             → crash: the batch, perhaps with leftovers

A repeated batch finds its number in the sink's row. If that is done, it does nothing. If it is
decided, it resumes with the manifest of the first attempt. The row also has the number of events
and a digest of them (``codec.event_batch``). A repeat that differs may hold events that are not
stored, for example after a checkpoint was set back by one batch, and is refused; ``acceptRepeat``
declares that it is the same batch. Spark repeats only its last batch; an older one is refused.

The row is deleted with its topic. So before the first batch, a row in the registry records which
query writes to which topic with that name. A query that finds another topic is refused: its topic
was deleted and created again, and what the query had stored is deleted.

Two drivers may do this at once. The row changes by its version, so one manifest counts. Both then
commit the same pieces with the same sequences, and a piece that the producer's row already shows is
skipped. So no driver must be fenced. The row is never older than a decided batch, so a stalled
driver cannot decide an old batch again, and a manifest can be deleted when its batch is done.

Events that were erased from the topic are skipped at step 5, unless they are newer
(``log.ledger``). The row counts them, and a warning is logged.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import msgspec
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

from tidelog.catalog.base import ABSENT, Change, Check, Put
from tidelog.catalog.update import attempts
from tidelog.codec.event_batch import Contents, check_events, contents_of
from tidelog.codec.partitioner import partitions_for, split
from tidelog.codec.segment import encode_staged
from tidelog.concurrency import Pool
from tidelog.context import Context
from tidelog.errors import (
    ConflictError,
    CorruptError,
    InternalError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.maintenance.unfinished_writes import SinkState, are_young, read_swept
from tidelog.log.producer.copier import Copier, append_staged
from tidelog.log.producer.staged import Collector, Located, StagedSegment
from tidelog.log.topics import find_topic, read_head
from tidelog.model import layout
from tidelog.model.decoding import Persisted, open_json, seal_json
from tidelog.model.topic import (
    UNNAMED,
    Topic,
    decode_row,
    encode_row,
    sink_producer,
    unnamed_producer,
)
from tidelog.settings import Settings
from tidelog.spark.columns import check_writable, to_stored
from tidelog.spark.failures import keep_modules, one_line
from tidelog.spark.options import WriteOptions
from tidelog.spark.plan import ExecutorContext, open_executor, open_shared, settings_of
from tidelog.store.base import put_fresh
from tidelog.store.wrappers import reread

__all__ = [
    "Batch",
    "MeasuredRows",
    "SparkSink",
    "StagedMessage",
    "TidelogStreamWriter",
    "TidelogWriter",
    "WriteStaging",
    "check_not_swept",
    "stage",
]

_logger = logging.getLogger("tidelog.spark")
_ORDINAL = 1 << 32  # sequences of one batch in one partition


class SinkTarget(Persisted, frozen=True):
    """The registry's row of a sink: which topic a query writes to."""

    query: str
    incarnation: str  # of the topic


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch to store."""

    query: str | None  # "" for batch writes, None if unknown
    number: int
    staged: tuple[StagedSegment, ...]
    contents: Contents


class BatchManifest(Persisted, frozen=True):
    """The content of one batch."""

    batch: int
    segments: tuple[StagedSegment, ...]
    format: int = layout.FORMAT


class SparkSink:
    """A named sink of one topic; with a pool it copies in parallel, otherwise without threads."""

    def __init__(
        self, context: Context, topic: Topic, name: str, pool: Executor | None = None
    ) -> None:
        self._context = context
        self._topic = topic
        self._name = name
        self._pool = pool
        self._where = layout.topic_partition(topic.incarnation, 0)

    def commit(self, batch: Batch, accept_repeat: int | None = None) -> None:
        """Makes a batch part of the topic, unless it already is.

        Raises ``InvalidError`` if the sink belongs to another query, is past this batch, or has
        stored other events under its number. With ``accept_repeat`` the batch with that number
        counts as stored.
        """
        number = batch.number
        busy = UnavailableError(f"{self._what}: others keep changing it: try again")
        for _ in attempts(self._context, busy):
            state, version = self._read()
            if state is not None and version is not None:
                if not state.done:  # also for another query: it is decided, and its own may be gone
                    self._finish(state, version)
                    continue
                self._check_query(state, batch.query)
                if number == state.batch:
                    if batch.staged and number != accept_repeat:
                        self._check_repeat(state, batch)
                    self._remove_staged(number)
                    return
            if not batch.staged:
                return
            if state is not None and number < state.batch:
                raise InvalidError(
                    f"{self._what}: batch {number} comes after batch {state.batch}, which is "
                    "stored: another driver runs the same query, or its checkpoint was set back: "
                    "stop this one, or choose another sink name to store everything again"
                )
            if state is None and batch.query and not self._note_target(batch.query):
                continue
            wanted = SinkState(batch.query or "", number, 0, "", contents=batch.contents)
            self._decide(state, version, wanted, batch.staged)

    def _decide(
        self,
        before: SinkState | None,
        version: str | None,
        wanted: SinkState,
        staged: tuple[StagedSegment, ...],
    ) -> None:
        """Steps 3 and 4. The row shows afterwards whether they succeeded."""
        _check_count(staged)
        swept = check_not_swept(self._context, self._topic, staged)
        manifest_id = self._context.ids.new()
        incarnation, batch = self._topic.incarnation, wanted.batch
        key = layout.sink_manifest(incarnation, self._name, batch, manifest_id)
        put_fresh(self._context.store, key, seal_json(BatchManifest(batch, staged)))
        ordinal = 0 if before is None else before.ordinal + 1
        left_out = 0 if before is None else before.left_out
        state = msgspec.structs.replace(wanted, ordinal=ordinal, manifest=key, left_out=left_out)
        guard: tuple[Change, ...] = (Check(layout.STAGED_ROW, swept or ABSENT),)
        if version is None:  # ABSENT alone could become true again later
            _, head_version = read_head(self._context, self._topic, 0)
            guard = (*guard, Check("head", head_version))
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            self._write(state, version, *guard)

    def _finish(self, state: SinkState, version: str) -> None:
        """Steps 5 and 6 for a decided batch."""
        try:
            manifest = self._manifest(state)
            producer = Copier(self._context, self._topic, sink_producer(self._name))
            first = state.ordinal * _ORDINAL
            left_out = append_staged(producer, manifest.segments, first, self._pool)
        except NotFoundError as exc:
            if self._read()[1] != version:
                return  # another driver finished it and deleted what was staged
            raise CorruptError(
                f"{self._what}: batch {state.batch} is decided, but something of it is gone "
                f"({exc}): restore it from a copy, and start the query again"
            ) from exc
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            done = msgspec.structs.replace(state, done=True, left_out=state.left_out + left_out)
            self._write(done, version)
            report_left_out(self._topic, left_out)
            self._remove_staged(state.batch)

    def _manifest(self, state: SinkState) -> BatchManifest:
        store, key = self._context.store, state.manifest
        what = f"manifest `{key}`"
        return reread(store, key, lambda _: open_json(store.get(key), BatchManifest, what))

    def _read(self) -> tuple[SinkState, str] | tuple[None, None]:
        row = self._context.catalog.get(self._where, layout.sink_row(self._name))
        if row is None:
            return None, None
        return decode_row(row.value, SinkState, self._what), row.version

    def _write(self, state: SinkState, version: str | None, *guard: Change) -> None:
        change = Put(layout.sink_row(self._name), encode_row(state), expect=version or ABSENT)
        self._context.catalog.write(self._where, change, *guard, write_id=self._context.ids.new())

    def _check_query(self, state: SinkState, query: str | None) -> None:
        if query is not None and state.query != query:
            raise InvalidError(
                f"{self._what}: belongs to {_query_name(state.query)}, which wrote up to batch "
                f"{state.batch}; this is {_query_name(query)}: bring its checkpoint back, or "
                "choose another sink name to store everything again",
            )

    def _check_repeat(self, state: SinkState, batch: Batch) -> None:
        """Raises for a repeat of the last batch that may hold events which are not stored."""
        if state.contents.differs(batch.contents):
            raise InvalidError(
                f"{self._what}: batch {state.batch} is stored with {state.contents.events} events, "
                f"and comes again with {batch.contents.events}, which are others: the checkpoint "
                "was set back, or the query computes other rows each time: bring the checkpoint "
                "back, or store the batch again under another sink name; if none of its events is "
                f"new, set option acceptRepeat to {state.batch}"
            )

    def _note_target(self, query: str) -> bool:
        """Step 2. Returns whether it is recorded.

        ``InvalidError`` if the query had another topic.
        """
        name = layout.sink_target_row(self._topic.name, self._name)
        row = self._context.catalog.get(layout.REGISTRY, name)
        found = decode_row(row.value, SinkTarget, self._what) if row else None
        wanted = SinkTarget(query, self._topic.incarnation)
        if found == wanted:
            return True
        if found is not None and found.query == query:
            raise InvalidError(
                f"{self._what}: the topic was deleted and made again since query {query} wrote to "
                "it, and what it had stored is deleted: start the query with a new checkpoint to "
                "store everything again, or choose another sink name to continue"
            )
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            change = Put(name, encode_row(wanted), row.version if row else ABSENT)
            self._context.catalog.write(layout.REGISTRY, change, write_id=self._context.ids.new())
            return True
        return False

    def _remove_staged(self, batch: int) -> None:
        """Deletes what any driver staged for batches up to this one."""
        keys = []
        with contextlib.suppress(UnavailableError):  # the next batch deletes it too
            for info in self._context.store.list(layout.sinks(self._topic.incarnation, self._name)):
                if layout.sink_batch(info.key)[1] > batch:
                    break
                keys.append(info.key)
            self._context.store.delete(keys)

    @property
    def _what(self) -> str:
        return f"sink `{self._name}` of topic `{self._topic.name}`"


def report_left_out(topic: Topic, left_out: int) -> None:
    """Logs how many events a write skipped because they were erased."""
    if left_out:
        _logger.warning(
            "topic `%s`: %d events were left out: they were erased from the topic, and are not "
            "newer than that",
            topic.name,
            left_out,
        )


def check_not_swept(context: Context, topic: Topic, staged: Sequence[StagedSegment]) -> str | None:
    """Returns the version of the ``staged`` row. ``UnavailableError`` if segments may be swept."""
    found, version = read_swept(context, topic)
    older = [each.key for each in staged if layout.sink_generation(each.key) < found.swept]
    if older and not are_young(context, older):
        raise UnavailableError(
            f"write to topic `{topic.name}`: it took longer than a day, and a sweep has deleted "
            "what it had staged: nothing was stored: write again, in smaller parts"
        )
    return version


def _check_count(segments: Sequence[StagedSegment]) -> None:
    """Raises for a batch whose sequences would overlap those of the next."""
    events = sum(piece.count for staged in segments for piece in staged.pieces)
    if events >= _ORDINAL:
        raise InvalidError(f"write: {events} events in one batch: give fewer than {_ORDINAL}")


def _query_name(query: str) -> str:
    return f"query {query}" if query else "batch writes"


_QUERY = "sql.streaming.queryId"  # local properties that Spark gives to the tasks of a stream
_BATCH = "streaming.sql.batchId"
_ONLY_BATCH = 0  # of a write without a name
_AT_ONCE = 8  # segments to copy, and partitions to commit, in parallel


class TidelogWriter(DataSourceArrowWriter):
    """A batch write: repeatable with the options sink and batch, otherwise stored as it runs."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        self._options = options
        self._staging = _prepare_staging(options, schema)

    @one_line()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """On an executor: stages the rows of a task."""
        task = _task()
        staging, batch = self._staging, self._options.batch or _ONLY_BATCH
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
            producer = Copier(context, topic, self._staging.sink)
            try:
                report_left_out(topic, append_staged(producer, segments, pool=pool))
            except TidelogError as exc:
                raise UnknownOutcomeError(
                    f"write to topic `{topic.name}`: broke off ({exc}): a part of the rows may be "
                    "stored: look, then decide; options sink and batch make a write repeatable"
                ) from exc
            producer.close()
            _remove_all(context, self._staging)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Deletes what was staged without a name; what a manifest may name stays."""
        if self._options.sink is None:
            with open_shared(self._options.home) as context:
                _remove_all(context, self._staging)


class TidelogStreamWriter(DataSourceStreamArrowWriter):
    """A streaming write; Spark makes a new one for each micro-batch's commit."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        self._options = options
        self._staging = _prepare_staging(options, schema)

    @one_line()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """On an executor: stages the rows of a task."""
        task = _task()
        query, batch = task.getLocalProperty(_QUERY), task.getLocalProperty(_BATCH)
        if query is None or batch is None:
            raise InternalError(f"streaming write: Spark reports query {query} and batch {batch}")
        staged = stage(self._staging, int(batch), task.partitionId(), iterator)
        return StagedMessage(self._staging.topic.incarnation, query, *staged)

    @one_line()
    def commit(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        """On the driver: makes the micro-batch part of the topic, unless it already is."""
        options, topic = self._options, self._staging.topic
        queries = {message.query for message in _staged_messages(messages)}
        if len(queries) > 1:
            raise InternalError(f"streaming write: one micro-batch of {len(queries)} queries")
        with open_shared(options.home) as context, Pool(_AT_ONCE) as pool:
            segments = _segments(topic, messages)
            sink = SparkSink(context, topic, self._staging.sink, pool)
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
    executor = open_executor(staging.settings)
    measured = MeasuredRows(rows, staging.use_partition)
    # Each batch begins elsewhere, so many small ones of one task do not all use one partition.
    first = zlib.crc32(staging.sink.encode()) + batch + task_index
    segments = tuple(
        _put(staging, executor, batch, _parts(staging, table, places, first + number))
        for number, (table, places) in enumerate(_collect_segments(staging, executor, measured))
    )
    keep_modules()
    return segments, measured.contents


def _collect_segments(
    staging: WriteStaging, executor: ExecutorContext, rows: Iterable[pa.RecordBatch]
) -> Iterator[Located]:
    """Yields as many rows as one segment holds, repeatedly."""
    collector = Collector()
    for batch in rows:
        table = to_stored(batch, executor.clock.now_ms())
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
    staging: WriteStaging, executor: ExecutorContext, batch: int, parts: list[tuple[int, pa.Table]]
) -> StagedSegment:
    is_named = not staging.sink.startswith(UNNAMED)
    segment = encode_staged(parts, writer=sink_producer(staging.sink) if is_named else "")
    incarnation, staged_id = staging.topic.incarnation, executor.ids.new()
    generation = staging.topic.generation
    key = layout.sink_staged(incarnation, staging.sink, batch, generation, staged_id)
    put_fresh(executor.store, key, segment.data)
    return StagedSegment(key, segment.pieces)
