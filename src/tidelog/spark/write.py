"""Batch and streaming writes, as Spark asks for them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from tidelog.codec.digest import Contents
from tidelog.errors import InternalError, NotFoundError, TidelogError, UnknownOutcomeError
from tidelog.home import Home
from tidelog.log.copying import Copier, append_staged
from tidelog.log.staged import Staged
from tidelog.model import layout
from tidelog.model.producers import unnamed_producer
from tidelog.model.topic import Topic
from tidelog.spark.columns import check_writable
from tidelog.spark.commit import Batch, Sink, check_not_swept, report_left_out
from tidelog.spark.options import WriteOptions
from tidelog.spark.plan import open_shared
from tidelog.spark.stage import StagedMessage, Staging, stage

__all__ = ["TidelogStreamWriter", "TidelogWriter"]

_QUERY = "sql.streaming.queryId"  # local properties that Spark gives to the tasks of a stream
_BATCH = "streaming.sql.batchId"
_ONLY_BATCH = 0  # of a write without a name
_AT_ONCE = 8  # segments that are copied, and partitions that are committed, side by side


class TidelogWriter(DataSourceArrowWriter):
    """A batch write: repeatable under the options sink and batch, else stored as it runs."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        self._options = options
        self._staging = _staging(options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """On an executor: stage the rows of a task."""
        task = _task()
        staging, batch = self._staging, self._options.batch or _ONLY_BATCH
        staged = stage(staging, batch, task.partitionId(), iterator)
        return StagedMessage(staging.topic.incarnation, "", *staged)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: make what was staged part of the topic."""
        options = self._options
        with open_shared(options.home) as home, ThreadPoolExecutor(_AT_ONCE) as pool:
            topic = home.topic(options.topic)
            segments = _segments(topic, messages)
            if options.sink is not None and options.batch is not None:
                sink = Sink(home.log, topic, options.sink, pool)
                made = Batch("", options.batch, segments, _contents(messages))
                sink.commit(made, options.accept_repeat)
                return
            check_not_swept(home.log, topic, segments)
            producer = Copier(home.log, topic, self._staging.sink)
            try:
                report_left_out(topic, append_staged(producer, segments, pool=pool))
            except TidelogError as exc:
                raise UnknownOutcomeError(
                    f"write to topic `{topic.name}`: broke off ({exc}): a part of the rows may be "
                    "stored: look, then decide; options sink and batch make a write repeatable"
                ) from exc
            producer.close()
            _remove_all(home, self._staging)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Remove what was staged without a name; what a manifest may name stays."""
        if self._options.sink is None:
            with open_shared(self._options.home) as home:
                _remove_all(home, self._staging)


class TidelogStreamWriter(DataSourceStreamArrowWriter):
    """A streaming write; Spark makes a new one for each micro-batch's commit."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        self._options = options
        self._staging = _staging(options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """On an executor: stage the rows of a task."""
        task = _task()
        query, batch = task.getLocalProperty(_QUERY), task.getLocalProperty(_BATCH)
        if query is None or batch is None:
            raise InternalError(f"streaming write: Spark tells query {query} and batch {batch}")
        staged = stage(self._staging, int(batch), task.partitionId(), iterator)
        return StagedMessage(self._staging.topic.incarnation, query, *staged)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        """On the driver: make the micro-batch part of the topic, unless it is."""
        options, topic = self._options, self._staging.topic
        queries = {message.query for message in _staged(messages)}
        if len(queries) > 1:
            raise InternalError(f"streaming write: one micro-batch of {len(queries)} queries")
        with open_shared(options.home) as home, ThreadPoolExecutor(_AT_ONCE) as pool:
            segments = _segments(topic, messages)
            sink = Sink(home.log, topic, self._staging.sink, pool)
            made = Batch(next(iter(queries), None), batch, segments, _contents(messages))
            sink.commit(made, options.accept_repeat)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        """Nothing: a manifest may name what was staged, and the next commit removes the rest."""


def _staging(options: WriteOptions, schema: StructType) -> Staging:
    """On the driver: check everything, and settle what tasks must know."""
    check_writable(schema, options.use_partition)
    with open_shared(options.home) as home:
        topic = home.topic(options.topic)
        sink = options.sink or unnamed_producer(home.log.ids.new())
        return Staging(home.settings, topic, sink, options.use_partition)


def _task() -> Any:
    task = TaskContext.get()
    if task is None:
        raise InternalError("write: is not called in a Spark task")
    return task


def _staged(messages: Iterable[WriterCommitMessage | None]) -> list[StagedMessage]:
    """The messages, none of which may be missing: a batch is stored whole or not at all."""
    found = [message for message in messages if isinstance(message, StagedMessage)]
    missing = sum(1 for message in messages if not isinstance(message, StagedMessage))
    if missing:
        raise InternalError(f"write: {missing} tasks have told nothing, but Spark commits")
    return found


def _segments(topic: Topic, messages: Iterable[WriterCommitMessage | None]) -> tuple[Staged, ...]:
    """All staged segments, in the order of the tasks."""
    found = _staged(messages)
    if any(message.incarnation != topic.incarnation for message in found):
        raise NotFoundError(
            f"topic `{topic.name}`: was deleted and made again during the write: write again"
        )
    return tuple(segment for message in found for segment in message.segments)


def _contents(messages: Iterable[WriterCommitMessage | None]) -> Contents:
    """Returns the contents of the rows of all tasks."""
    return functools.reduce(Contents.plus, (each.contents for each in _staged(messages)))


def _remove_all(home: Home, staging: Staging) -> None:
    folder = layout.sinks(staging.topic.incarnation, staging.sink)
    home.store.delete([info.key for info in home.store.list(folder)])
