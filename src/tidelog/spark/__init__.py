"""The Spark data source `tidelog`: batch and streaming, reading and writing, in Arrow.

This room promises that a read returns each event of its range once, and that a write stores each
row once under task retries and replayed micro-batches. The driver plans from the catalog and
commits to it. Executors need only the store, so a home on SQLite works with remote executors.

The class that Spark loads is here, with its batch reads. ``options`` parses its options and
filters, and ``columns`` maps events to Spark's types. ``plan`` and ``stream`` read;
``write`` writes and commits. ``session`` opens and replaces Spark sessions, ``failures`` words
their errors. ``workers`` runs the tasks of pipelines, ``session`` those of maintenance, and
``playback`` those of playbacks. It must not know the command line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.types import StructType

from tidelog.clock import RandomIds
from tidelog.context import Context
from tidelog.errors import InvalidError, NotFoundError
from tidelog.log.topics import find_topic, read_head
from tidelog.model.address import parse_address
from tidelog.model.topic import Head, Topic
from tidelog.settings import Settings, config_string
from tidelog.spark.columns import arrow_schema, spark_schema
from tidelog.spark.failures import keep_modules, note_path, one_line, worker_name
from tidelog.spark.filters import EVERYTHING, EventTimes, PushedFilter, push
from tidelog.spark.options import (
    BATCH_READ,
    BATCH_WRITE,
    STREAM_READ,
    STREAM_WRITE,
    ReadOptions,
    check_not_table,
    read_columns,
    read_options,
    write_options,
)
from tidelog.spark.plan import (
    OffsetRange,
    OffsetSlice,
    Planner,
    ReadTask,
    check_offsets,
    find_topics,
    open_shared,
    range_of,
    read_task,
    resolve_times,
    stamp_of,
)
from tidelog.spark.stream import TidelogStreamReader
from tidelog.spark.write import TidelogStreamWriter, TidelogWriter

__all__ = [
    "FILTER_PUSHDOWN",
    "TidelogDataSource",
    "TidelogFilterReader",
    "TidelogReader",
    "refreshed",
    "register",
]


FILTER_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_PUSHDOWN_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"


class TidelogDataSource(DataSource):
    """``spark.read.format("tidelog")``, and ``readStream``, ``write`` and ``writeStream``."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._load = RandomIds().new()  # of the table: Spark keeps this object with it

    @classmethod
    def name(cls) -> str:
        return "tidelog"

    @one_line()
    def schema(self) -> StructType:
        check_not_table(self.options)
        found = spark_schema(read_columns(self.options))
        keep_modules()
        return found

    @one_line()
    def reader(self, schema: StructType) -> DataSourceReader:
        options, wanted = read_options(self.options, BATCH_READ), arrow_schema(schema)
        if options.push_filters and _pushes_filters():
            return TidelogFilterReader(options, wanted, self._load)
        return TidelogReader(options, wanted)

    @one_line()
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return TidelogStreamReader(read_options(self.options, STREAM_READ), arrow_schema(schema))

    @one_line()
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        _refuse_overwrite(overwrite)
        return TidelogWriter(write_options(self.options, BATCH_WRITE), schema)

    @one_line()
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        _refuse_overwrite(overwrite)
        return TidelogStreamWriter(write_options(self.options, STREAM_WRITE), schema)


def register(spark: SparkSession) -> None:
    """Registers the format ``tidelog`` with a session, and lets it push filters down."""
    spark.dataSource.register(TidelogDataSource)
    spark.conf.set(FILTER_PUSHDOWN, "true")


def _pushes_filters() -> bool:
    """Returns whether Spark has filters for the reader, in the Python worker that plans a read.

    Spark has a worker of its own for that, which runs if the session's setting is on. All others
    refuse a reader that accepts filters while the setting is off.
    """
    return worker_name() == _PUSHDOWN_WORKER


def _refuse_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise InvalidError("write: a log is not overwritten: use mode append")


class TidelogReader(DataSourceReader):
    """Plans on the driver, reads on executors.

    Spark plans a table when it is first used, and keeps that plan as long as the table or a view of
    it lives. An event that is deleted after that is still in the plan, and a compile and a sweep
    delete the planned objects. So a task first reads the heads of its partitions, and plans its own
    offsets again if something was amended, compiled or trimmed since.

    A catalog in a SQLite file on another machine cannot be reached from a task. Then the plan is
    used as it is, and the table must be loaded again to see later deletes.
    """

    def __init__(self, options: ReadOptions, wanted: pa.Schema) -> None:
        self._options = options
        self._wanted = wanted
        self._pushed: PushedFilter = EVERYTHING

    @one_line()
    def partitions(self) -> list[InputPartition]:
        """Returns one for each task; the ends are those of this moment."""
        options = self._options
        with open_shared(options.home) as context:
            topics = find_topics(context, options)
            check_offsets(topics, options.start_offsets, options.end_offsets)
            times = resolve_times(options, context.clock.now_ms())
            tasks = [task for topic in topics for task in self._tasks(context, topic, times)]
        keep_modules()
        return list[InputPartition](tasks)

    def _tasks(self, context: Context, topic: Topic, times: EventTimes) -> list[ReadTask]:
        if self._pushed.topics is not None and topic.name not in self._pushed.topics:
            return []
        planner = Planner(context, topic)
        heads = planner.heads()
        ranges = [
            range_of(topic, partition, head, self._options) for partition, head in enumerate(heads)
        ]
        return planner.tasks(ranges, self._options, times, heads, self._pushed)

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """Yields the events of one task. Without tasks, Spark passes a partition of its own."""
        if not isinstance(partition, ReadTask):
            return iter(())
        with one_line():
            current = refreshed(partition)
        return read_task(current, self._wanted)


class TidelogFilterReader(TidelogReader):
    """A reader to which Spark passes the filters of a query.

    Spark 4.2 keeps one plan with a loaded table: a second query of the table would get the rows of
    the first one's filters. So a table with this reader is for one query. Other filters are
    refused; a query without filters cannot be noticed here.
    """

    def __init__(self, options: ReadOptions, wanted: pa.Schema, load: str) -> None:
        super().__init__(options, wanted)
        self._load = load

    @one_line()
    def pushFilters(self, filters: list[Filter]) -> list[Filter]:  # noqa: N802
        """Takes over what it understands. Returns what Spark has to check.

        Raises ``InvalidError`` if the table was already used with other filters.
        """
        digest = hashlib.sha256("\n".join(sorted(map(repr, filters))).encode()).digest()
        note = note_path(f"filters-{self._load}")
        try:
            with note.open("xb") as file:
                file.write(digest)
        except FileExistsError:
            if note.read_bytes() != digest:
                raise InvalidError(
                    "option pushFilters: this table was already used with other filters, and Spark "
                    "would mix them up: load it again for each query, or leave the option out"
                ) from None
        self._pushed, rest = push(filters)
        return rest


def refreshed(task: ReadTask) -> ReadTask:
    """Returns the task with its current plan. ``NotFoundError`` if topic or events are deleted."""
    if not task.stamps:
        return task
    context = _open_here(task.settings)
    if context is None:
        return task
    with context:
        try:
            return _planned_again(context, task)
        except NotFoundError as exc:
            raise NotFoundError(f"{exc}: load the table again") from exc


def _open_here(settings: Settings) -> Context | None:
    """Opens the home if this machine can reach its catalog."""
    address = parse_address(settings.catalog, plain_scheme="sqlite")
    is_file = address.scheme == "sqlite"
    if is_file and not Path(address.path).is_file():
        return None
    try:
        return open_shared(config_string(settings.store, settings.catalog))
    except InvalidError:
        if is_file:  # a file with that name, but not the home's own catalog
            return None
        raise


def _planned_again(context: Context, task: ReadTask) -> ReadTask:
    topic = find_topic(context, task.topic)
    if topic.incarnation != task.incarnation:
        raise NotFoundError(f"topic `{task.topic}`: was deleted and made again")
    planner = Planner(context, topic)
    slices: list[OffsetSlice] = []
    for partition, found in groupby(task.slices, lambda each: each.partition):
        planned = list(found)
        head: Head = read_head(context, topic, partition)[0]
        if stamp_of(head) == task.stamps[partition]:
            slices += planned
            continue
        for wanted in _ranges(planned):
            slices += planner.amended_slices(wanted, task.times)
    return replace(task, slices=tuple(slices))


def _ranges(slices: list[OffsetSlice]) -> Iterator[OffsetRange]:
    """Yields the offsets of slices of one partition, with neighbors merged."""
    at: OffsetRange | None = None
    for each in slices:
        if at is not None and at.end == each.start:
            at = replace(at, end=each.end)
            continue
        if at is not None:
            yield at
        at = OffsetRange(each.partition, each.start, each.end)
    if at is not None:
        yield at
