"""The data source that Spark loads, and its batch reads.

Each use goes to the module for it. Spark plans a table when it is first used, and keeps that plan
as long as the table or a view of it lives. An event that is deleted after that is still in the
plan, and a compile and a sweep delete the planned objects. So a task of a batch read first reads
the heads of its partitions, and plans its own offsets again if something was amended, compiled or
trimmed since.

A catalog in a SQLite file on another machine cannot be reached from a task. Then the plan is used
as it is, and the table must be loaded again to see later deletes.

Streaming reads, as Spark calls them.

Spark stores offsets in the checkpoint. They have the next offset of each partition and the topic's
incarnation: a topic that was deleted and created again is another one, and is refused. Spark asks
for what comes next under a limit, then plans that range. Planning it again gives the same result.
"""

from __future__ import annotations

import hashlib
import heapq
import sys
import tempfile
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
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from tidelog.clock import RandomIds
from tidelog.context import Context
from tidelog.errors import InternalError, InvalidError, NotFoundError
from tidelog.log.reader.partition_reader import find_offset
from tidelog.log.topics import find_topic, read_head
from tidelog.model.address import parse_address
from tidelog.model.partition_rows import Head
from tidelog.model.times import moment_ms
from tidelog.model.topic import Topic
from tidelog.settings import Settings, config_string
from tidelog.spark.columns import arrow_schema, spark_schema
from tidelog.spark.filters import ALL_TIMES, EVERYTHING, PushedFilter, push
from tidelog.spark.options import (
    BATCH_READ,
    BATCH_WRITE,
    STREAM_READ,
    STREAM_WRITE,
    ReadOptions,
    read_columns,
    read_options,
    write_options,
)
from tidelog.spark.plan import (
    OffsetRange,
    OffsetSlice,
    Planner,
    ReadTask,
    check_partitions,
    open_shared,
    range_of,
    read_task,
    resolve_times,
    stamp_of,
)
from tidelog.spark.write import TidelogStreamWriter, TidelogWriter

__all__ = [
    "FILTER_PUSHDOWN",
    "TidelogDataSource",
    "TidelogFilterReader",
    "TidelogReader",
    "TidelogStreamReader",
    "refreshed",
    "register",
    "shares",
]

_INCARNATION = "incarnation"


class TidelogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One per query on the driver, with an open home; pickled to executors without it."""

    def __init__(self, options: ReadOptions, wanted: pa.Schema) -> None:
        self._options = options
        self._wanted = wanted
        self._context: Context | None = None
        self._initial: dict[str, Any] | None = None
        self._until: list[int] | None = None  # where a run to "available now" ends

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_context": None}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Returns where a new query begins; Spark asks twice and gets the same answer."""
        if self._initial is None:
            self._initial = self._find_initial()
        return self._initial

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Returns what comes next after ``start``: everything, or as much as the limit allows."""
        context, topic = self._topic()
        planner = Planner(context, topic)
        before = _positions(topic, start)
        ends = self._ends(planner)
        _check_ahead(topic, before, ends)
        if isinstance(limit, ReadMaxRows):
            taken = shares([end - at for at, end in zip(before, ends, strict=True)], limit.max_rows)
            ends = [at + count for at, count in zip(before, taken, strict=True)]
        elif isinstance(limit, ReadMaxBytes):
            ends = _ends_by_bytes(planner, before, ends, limit.max_bytes)
        elif not isinstance(limit, ReadAllAvailable):
            raise InternalError(f"streaming read: Spark asks for {limit}, which was never offered")
        return _offset(topic, ends)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.trigger_events is not None:
            return ReadMaxRows(self._options.trigger_events)
        if self._options.trigger_bytes is not None:
            return ReadMaxBytes(self._options.trigger_bytes)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Pins the ends: later events belong to the next run."""
        self._until = [head.next for head in Planner(*self._topic()).heads()]

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Returns the topic's own ends, for the query's progress."""
        context, topic = self._topic()
        return _offset(topic, [head.next for head in Planner(context, topic).heads()])

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Returns the tasks of one micro-batch. Raises ``NotFoundError`` if events were trimmed."""
        context, topic = self._topic()
        bounds = zip(_positions(topic, start), _positions(topic, end), strict=True)
        ranges = [
            OffsetRange(p, first, last) for p, (first, last) in enumerate(bounds) if first < last
        ]
        return list(Planner(context, topic).tasks(ranges, self._options, ALL_TIMES))

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """Yields the events of one task."""
        if not isinstance(partition, ReadTask):
            return iter(())
        return read_task(partition, self._wanted)

    def stop(self) -> None:
        """Closes the home."""
        if self._context is not None:
            self._context.close()
            self._context = None

    def _topic(self) -> tuple[Context, Topic]:
        if self._context is None:
            self._context = open_shared(self._options.home)
        return self._context, find_topic(self._context, self._options.topic)

    def _find_initial(self) -> dict[str, Any]:
        context, topic = self._topic()
        options = self._options
        check_partitions(topic, options.start_offsets)
        if options.start_time is not None:
            moment = moment_ms(options.start_time, context.clock.now_ms())
            partitions = range(topic.partitions)
            return _offset(topic, [find_offset(context, topic, p, moment) for p in partitions])
        heads = Planner(context, topic).heads()
        ranges = [range_of(topic, partition, head, options) for partition, head in enumerate(heads)]
        return _offset(topic, [each.start for each in ranges])

    def _ends(self, planner: Planner) -> list[int]:
        return self._until or [head.next for head in planner.heads()]


def shares(available: list[int], limit: int) -> list[int]:
    """Returns how many events of each partition make up ``limit``, in proportion."""
    total = sum(available)
    if total <= limit:
        return available
    taken = [count * limit // total for count in available]
    left = limit - sum(taken)
    for partition in sorted(range(len(available)), key=lambda p: taken[p] - available[p])[:left]:
        taken[partition] += 1
    return taken


def _offset(topic: Topic, positions: list[int]) -> dict[str, Any]:
    """Returns offsets as Spark stores them, always in this order: it compares them as text."""
    found: dict[str, Any] = {str(partition): at for partition, at in enumerate(positions)}
    return {**found, _INCARNATION: topic.incarnation}


def _positions(topic: Topic, offset: dict[str, Any]) -> list[int]:
    if offset.get(_INCARNATION) != topic.incarnation:
        raise InvalidError(
            f"topic `{topic.name}`: was deleted and made again after the checkpoint was written: "
            "start a new query with a new checkpoint"
        )
    return [int(offset[str(partition)]) for partition in range(topic.partitions)]


def _check_ahead(topic: Topic, before: list[int], ends: list[int]) -> None:
    for partition, (at, end) in enumerate(zip(before, ends, strict=True)):
        if at > end:
            raise InvalidError(
                f"partition `{topic.name}/{partition}`: the checkpoint has read up to offset {at}, "
                f"but it ends at {end}: the catalog is older than the checkpoint, restore it"
            )


def _ends_by_bytes(
    planner: Planner, before: list[int], ends: list[int], bytes_max: int
) -> list[int]:
    """Returns ends of whole runs, always of the partition with the least so far; at least one."""
    reached = list(before)
    todo: list[tuple[int, int, Iterator[OffsetSlice]]] = [
        (0, partition, planner.slices(OffsetRange(partition, at, end), ALL_TIMES))
        for partition, (at, end) in enumerate(zip(before, ends, strict=True))
        if at < end
    ]
    total = 0
    while todo:
        size, partition, slices = heapq.heappop(todo)
        piece = next(slices, None)
        if piece is None:
            continue
        if total and total + piece.size > bytes_max:
            return reached
        total += piece.size
        reached[partition] = piece.end
        heapq.heappush(todo, (size + piece.size, partition, slices))
    return reached


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

    def schema(self) -> StructType:
        return spark_schema(read_columns(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        options, wanted = read_options(self.options, BATCH_READ), arrow_schema(schema)
        if options.push_filters and _pushes_filters():
            return TidelogFilterReader(options, wanted, self._load)
        return TidelogReader(options, wanted)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return TidelogStreamReader(read_options(self.options, STREAM_READ), arrow_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        _refuse_overwrite(overwrite)
        return TidelogWriter(write_options(self.options, BATCH_WRITE), schema)

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
    main = getattr(sys.modules["__main__"], "__spec__", None)
    return _PUSHDOWN_WORKER in sys.modules or (main is not None and main.name == _PUSHDOWN_WORKER)


def _refuse_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise InvalidError("write: a log is not overwritten: use mode append")


class TidelogReader(DataSourceReader):
    """Plans on the driver, reads on executors."""

    def __init__(self, options: ReadOptions, wanted: pa.Schema) -> None:
        self._options = options
        self._wanted = wanted
        self._pushed: PushedFilter = EVERYTHING

    def partitions(self) -> list[InputPartition]:
        """Returns one for each task; the ends are those of this moment."""
        options = self._options
        with open_shared(options.home) as context:
            topic = find_topic(context, options.topic)
            check_partitions(topic, options.start_offsets, options.end_offsets)
            times = resolve_times(options, context.clock.now_ms())
            planner = Planner(context, topic)
            heads = planner.heads()
            ranges = [
                range_of(topic, partition, head, options) for partition, head in enumerate(heads)
            ]
            return list(planner.tasks(ranges, options, times, heads, self._pushed))

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """Yields the events of one task. Without tasks, Spark passes a partition of its own."""
        if not isinstance(partition, ReadTask):
            return iter(())
        return read_task(refreshed(partition), self._wanted)


class TidelogFilterReader(TidelogReader):
    """A reader to which Spark passes the filters of a query.

    Spark 4.2 keeps one plan with a loaded table: a second query of the table would get the rows of
    the first one's filters. So a table with this reader is for one query. Other filters are
    refused; a query without filters cannot be noticed here.
    """

    def __init__(self, options: ReadOptions, wanted: pa.Schema, load: str) -> None:
        super().__init__(options, wanted)
        self._note = Path(tempfile.gettempdir()) / f"tidelog-filters-{load}"

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:  # noqa: N802
        """Takes over what it understands. Returns what Spark has to check.

        Raises ``InvalidError`` if the table was already used with other filters.
        """
        digest = hashlib.sha256("\n".join(sorted(map(repr, filters))).encode()).digest()
        try:
            with self._note.open("xb") as file:
                file.write(digest)
        except FileExistsError:
            if self._note.read_bytes() != digest:
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
