"""Plans a read on the driver: from options and the catalog to tasks that need only the store.

A range of offsets is pinned when it is planned. A task of a batch read updates the rest of its plan
when it starts (``refreshed``). The runs of a range are cut at its borders, and large
journals also within. The slices are grouped into tasks of about equal size, in the order of
partitions and offsets.

**Executors** open the store, and read and write objects, without a catalog. A batch read checks the
catalog before that, if its machine can reach it (``refreshed``). What is read is checked
like by every reader: the bytes against their checksums, the events against their count. Only the
needed row groups and columns of a journal are fetched. Credentials come from the executor's own
environment.
"""

from __future__ import annotations

import fnmatch
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition

from tidelog.backends import open_context
from tidelog.clock import Clock, Ids, RandomIds, SystemClock
from tidelog.codec.event_batch import STORED_SCHEMA, joined_batches
from tidelog.concurrency import Pool
from tidelog.context import Context
from tidelog.errors import CorruptError, InternalError, InvalidError, NotFoundError
from tidelog.journal.lookup import Lookup, can_be_id
from tidelog.log.partition_reader import Reader
from tidelog.log.run_reader import (
    NO_AMENDMENTS,
    Amendments,
    EventRows,
    RunSelection,
    describe_run,
    fetch_run,
    read_run,
)
from tidelog.log.topics import find_topic, list_topics, read_head
from tidelog.model.times import moment_ms
from tidelog.model.topic import Head, Run, Topic
from tidelog.settings import Settings
from tidelog.spark.columns import BatchPosition, to_spark
from tidelog.spark.failures import keep_modules, one_line
from tidelog.spark.filters import EVERYTHING, EventTimes, PushedFilter
from tidelog.spark.options import Offsets, ReadOptions, is_pattern
from tidelog.store import Store, open_store_here
from tidelog.store.fetch import fetch_ahead

__all__ = [
    "ExecutorContext",
    "OffsetRange",
    "OffsetSlice",
    "Planner",
    "ReadTask",
    "check_offsets",
    "find_topics",
    "open_executor",
    "open_shared",
    "range_of",
    "read_task",
    "resolve_times",
    "settings_of",
    "split_tasks",
    "stamp_of",
]

T = TypeVar("T")
SortedOffsets = dict[int, list[int]]  # offsets of each partition, in order
Stamp = tuple[int, int, int]
"""What changes in a head when something in the partition is amended, compiled or trimmed."""

_TASK_BYTES_MAX = 32 << 20  # stored; some seconds of one core
_TASK_BYTES_MIN = 4 << 20  # below this, starting a task costs more than it reads
_SLICE_BYTES = 8 << 20  # of a journal; two slices read the row group at their border
_TASKS_AT_LEAST = 4  # of a large enough read; each costs Spark about 0.05 s
_AT_ONCE = 8  # partitions to plan in parallel
_IDS_MAX = 100  # that are looked up; with more, all ids are read


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets ``[start, end)`` of a partition."""

    partition: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class OffsetSlice:
    """Offsets ``[start, end)`` of one run."""

    partition: int
    run: Run
    start: int
    end: int
    amendments: Amendments = NO_AMENDMENTS  # that are not in the run

    @property
    def is_whole(self) -> bool:
        """Returns whether it is the whole run."""
        return (self.start, self.end) == (self.run.base, self.run.end)

    @property
    def size(self) -> int:
        """Returns its stored bytes, as if all events of the run had the same size."""
        stored = self.run.byte_end - self.run.byte_start
        return max(1, stored * (self.end - self.start) // self.run.count)


@dataclass(frozen=True)
class ReadTask(InputPartition):
    """What one Spark task reads, and everything it needs for that."""

    settings: Settings
    topic: str
    times: EventTimes
    slices: tuple[OffsetSlice, ...]
    incarnation: str = ""  # of the topic
    # By partition; empty: the plan is final.
    stamps: Mapping[int, Stamp] = field(default_factory=dict)
    pushed: PushedFilter = EVERYTHING  # which rows of the slices a query wants


class Planner:
    """Plans reads of one topic."""

    def __init__(self, context: Context, topic: Topic) -> None:
        self._context = context
        self._topic = topic

    def heads(self) -> list[Head]:
        """Returns the head of each partition."""
        context, topic = self._context, self._topic
        return self._each(lambda partition: read_head(context, topic, partition)[0])

    def tasks(
        self,
        ranges: Sequence[OffsetRange],
        options: ReadOptions,
        times: EventTimes,
        heads: Sequence[Head] = (),
        pushed: PushedFilter = EVERYTHING,
    ) -> list[ReadTask]:
        """Returns the tasks that read these ranges. Raises ``NotFoundError`` if one was trimmed.

        With ``heads``, read before, a task checks whether they have changed when it starts.
        """
        stamps = {partition: stamp_of(head) for partition, head in enumerate(heads)}
        times = times.within(pushed.times)
        ranges = self._narrowed(ranges, pushed)
        places = self._places(ranges, pushed)
        by_partition = {each.partition: each for each in ranges}

        def slices_of(partition: int) -> list[OffsetSlice]:
            wanted = by_partition.get(partition)
            found = [] if wanted is None else self.amended_slices(wanted, times)
            return found if places is None else _around(found, places.get(partition, []))

        slices = [each for found in self._each(slices_of) for each in found]
        settings, name = settings_of(self._context), self._topic.name
        return [
            ReadTask(settings, name, times, portion, self._topic.incarnation, stamps, pushed)
            for portion in split_tasks(slices, options.task_bytes)
        ]

    def _narrowed(
        self, ranges: Sequence[OffsetRange], pushed: PushedFilter
    ) -> Sequence[OffsetRange]:
        """Returns the parts of ranges that can have wanted events."""
        if pushed == EVERYTHING:
            return ranges
        if pushed.topics is not None and self._topic.name not in pushed.topics:
            return []
        cut = [
            replace(
                each,
                start=max(each.start, pushed.start or 0),
                end=each.end if pushed.end is None else min(each.end, pushed.end),
            )
            for each in ranges
            if pushed.partitions is None or each.partition in pushed.partitions
        ]
        return [each for each in cut if each.start < each.end]

    def _places(self, ranges: Sequence[OffsetRange], pushed: PushedFilter) -> SortedOffsets | None:
        """Returns the offsets with the wanted ids, by the indexes of ids; None for all offsets."""
        if pushed.ids is None or len(pushed.ids) > _IDS_MAX or not ranges:
            return None
        ids = [each for each in sorted(pushed.ids) if can_be_id(each)]
        partitions = [each.partition for each in ranges]
        found = Lookup(self._context, self._topic).find(ids, partitions=partitions)
        places: SortedOffsets = {partition: [] for partition in partitions}
        for event in sorted(
            (event for events in found.events.values() for event in events),
            key=lambda event: event.offset,
        ):
            places[event.partition].append(event.offset)
        return places

    def slices(self, wanted: OffsetRange, times: EventTimes) -> Iterator[OffsetSlice]:
        """Yields the runs of a range that may have events of these times, cut at its borders.

        Raises ``NotFoundError`` if it was trimmed.
        """
        reader = Reader(self._context, self._topic, wanted.partition)
        at = wanted.start
        while at < wanted.end:
            runs = reader.runs(at)
            if not runs:
                raise InvalidError(
                    f"partition `{self._topic.name}/{wanted.partition}`: ends at offset {at}, "
                    f"{wanted.end} was asked for: give an end that is there"
                )
            for run in runs:
                if at >= wanted.end:
                    return
                end = min(run.end, wanted.end)
                if not times.miss(run):
                    yield from _cut(OffsetSlice(wanted.partition, run, at, end))
                at = end

    def amended_slices(self, wanted: OffsetRange, times: EventTimes) -> list[OffsetSlice]:
        """Returns the slices of a range with the amendments of each, which are read first."""
        reader = Reader(self._context, self._topic, wanted.partition)
        found = reader.amendments(wanted.start, wanted.end)
        slices = list(self.slices(wanted, times))
        if not len(found):
            return slices
        return [
            replace(each, amendments=found.between(each.start, each.end).of_run(each.run))
            for each in slices
        ]

    def _each(self, call: Callable[[int], T]) -> list[T]:
        """Calls it for every partition, in parallel if there are many."""
        partitions = range(self._topic.partitions)
        if len(partitions) < _AT_ONCE:
            return [call(partition) for partition in partitions]
        with Pool(_AT_ONCE) as pool:
            return list(pool.map(call, partitions))


def stamp_of(head: Head) -> Stamp:
    """Returns the stamp of a partition's head."""
    return head.amendments, head.compiled, head.start


def open_shared(home: str) -> Context:
    """Opens a home that Spark's processes can share. Raises ``InvalidError`` for one in memory."""
    opened = open_context(home)
    if opened.store.url.startswith("memory:"):
        opened.close()
        raise InvalidError(
            f"option home: `{home}` lives in one process, Spark has many: give a folder"
        )
    return opened


def settings_of(context: Context) -> Settings:
    """Returns the settings with which tasks open the home's store."""
    if context.settings is None:
        raise InternalError("spark: this context was not opened by settings")
    return context.settings


def resolve_times(options: ReadOptions, now_ms: int) -> EventTimes:
    """Returns the times that a batch read is limited to."""
    times = EventTimes(
        None if options.start_time is None else moment_ms(options.start_time, now_ms),
        None if options.end_time is None else moment_ms(options.end_time, now_ms),
    )
    if times.start_ms is not None and times.end_ms is not None and times.end_ms < times.start_ms:
        raise InvalidError(
            f"options startTime `{options.start_time}` and endTime `{options.end_time}`: "
            "the end comes before the start: exchange them"
        )
    return times


def range_of(topic: Topic, partition: int, head: Head, options: ReadOptions) -> OffsetRange:
    """Returns the requested range of one partition. Raises if it does not exist any more."""
    start = _offset(options.start_offsets, topic, partition, head.start, head)
    end = _offset(options.end_offsets, topic, partition, head.next, head)
    name = f"partition `{topic.name}/{partition}`"
    if start < head.start:
        raise NotFoundError(
            f"{name}: offset {start} was trimmed, the first is {head.start}: "
            f"start at {head.start}, or at earliest",
            offset=start,
            start=head.start,
        )
    if max(start, end) > head.next:
        raise InvalidError(
            f"{name}: ends at offset {head.next}, {max(start, end)} was asked for: "
            "give an offset that is there"
        )
    if end < start:
        raise InvalidError(f"{name}: range [{start}, {end}) runs backwards: give start <= end")
    return OffsetRange(partition, start, end)


def find_topics(context: Context, options: ReadOptions) -> list[Topic]:
    """Returns the topics of a read, by name. Raises ``NotFoundError`` if there is none."""
    found: dict[str, Topic] = {}
    for wanted in options.topics:
        if not is_pattern(wanted):
            found[wanted] = find_topic(context, wanted)
            continue
        matches = re.compile(fnmatch.translate(wanted)).fullmatch
        for topic in list_topics(context):
            if topic.state == "ready" and matches(topic.name):
                found[topic.name] = topic
    if not found:
        raise NotFoundError(
            f"option topic: no topic matches `{options.what}`: see `tidelog topic list`"
        )
    return [found[name] for name in sorted(found)]


def check_offsets(topics: Sequence[Topic], *offsets: Offsets) -> None:
    """Raises for offsets of topics and partitions that do not exist."""
    by_name = {topic.name: topic for topic in topics}
    for each in offsets:
        for name, given in each.items() if isinstance(each, dict) else ():
            if name and name not in by_name:
                raise InvalidError(
                    f"topic `{name}`: offsets are given for it, but it is not read: name it in "
                    "option topic"
                )
            for partition in given:
                (by_name[name] if name else topics[0]).check_partition(partition)


def split_tasks(
    slices: Sequence[OffsetSlice], task_bytes: int | None
) -> list[tuple[OffsetSlice, ...]]:
    """Groups slices, in order, into tasks of about equal size."""
    total = sum(each.size for each in slices)
    if task_bytes is None:
        task_bytes = min(_TASK_BYTES_MAX, max(_TASK_BYTES_MIN, total // _TASKS_AT_LEAST))
    count = -(-total // task_bytes)
    portions: list[list[OffsetSlice]] = [[] for _ in range(count)]
    before = 0
    for each in slices:
        middle = before + each.size // 2
        portions[middle * count // total].append(each)
        before += each.size
    return [tuple(portion) for portion in portions if portion]


def _cut(whole: OffsetSlice) -> Iterator[OffsetSlice]:
    """Yields parts of a slice of a large journal, as if all offsets had the same size."""
    parts = 1 if whole.run.journal is None else -(-whole.size // _SLICE_BYTES)
    step = -(-(whole.end - whole.start) // parts)
    for start in range(whole.start, whole.end, step):
        yield replace(whole, start=start, end=min(start + step, whole.end))


def _around(slices: Sequence[OffsetSlice], places: list[int]) -> list[OffsetSlice]:
    """Returns the slices that have one of the places, cut to these."""
    found = []
    for each in slices:
        within = places[bisect_left(places, each.start) : bisect_left(places, each.end)]
        if within:
            found.append(replace(each, start=within[0], end=within[-1] + 1))
    return found


def _offset(given: Offsets, topic: Topic, partition: int, otherwise: int, head: Head) -> int:
    if isinstance(given, dict):
        return given.get(topic.name, given.get("", {})).get(partition, otherwise)
    return head.start if given == "earliest" else head.next


_AHEAD = 3  # objects to prefetch
_ROWS_MIN = 4_000  # of a batch for Spark; batches of small runs are joined
_BYTES_MIN = 16 << 20  # large values make a batch of fewer rows


@dataclass(frozen=True)
class ExecutorContext:
    """What a task works with on an executor: no catalog."""

    store: Store
    clock: Clock
    ids: Ids


def open_executor(settings: Settings) -> ExecutorContext:
    """Opens the store of the settings, with this machine's clock and environment."""
    store = open_store_here(settings.store, settings.backoff())
    return ExecutorContext(store, SystemClock(), RandomIds())


def read_task(task: ReadTask, wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yields the events of a task in Spark's columns."""
    store = open_executor(task.settings).store
    return joined_batches(_in_one_line(_batches(store, task, wanted)), _ROWS_MIN, _BYTES_MIN)


def _in_one_line(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    with one_line():
        yield from batches


def _batches(store: Store, task: ReadTask, wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
    # Times are always decoded: they count the rows, and a filter may need them.
    needed = ("timestamp", *wanted.names, *task.pushed.columns)
    columns = [name for name in STORED_SCHEMA.names if name in needed]
    with Pool(_AHEAD, "tidelog-fetch") as pool:
        for piece, data in fetch_ahead(pool, partial(_fetch, store, task), task.slices, _AHEAD):
            place, is_within = (
                BatchPosition(task.topic, piece.partition),
                task.times.hold(piece.run),
            )
            selection = RunSelection(
                piece.start, piece.end, columns, pool, None if is_within else task.times.miss
            )
            for rows in _rows(store, task, piece, selection, data):
                found = to_spark(rows, place, wanted)
                mask = task.pushed.mask(rows.batch)
                if not is_within:
                    times = task.times.mask(rows.batch)
                    mask = times if mask is None else pc.and_(mask, times)
                yield found if mask is None else found.filter(mask)
    keep_modules()


def _fetch(store: Store, task: ReadTask, piece: OffsetSlice) -> bytes | None:
    """Fetches all of a segment's piece; nothing of a journal, which others may read too."""
    if piece.run.journal is not None and not piece.is_whole:
        return None
    try:
        return fetch_run(store, piece.run)
    except NotFoundError as exc:
        raise _gone(task, piece) from exc


def _rows(
    store: Store, task: ReadTask, piece: OffsetSlice, selection: RunSelection, data: bytes | None
) -> Iterator[EventRows]:
    what = describe_run(task.topic, piece.partition, piece.run)
    try:
        yield from read_run(store, piece.run, what, selection, piece.amendments, data)
    except NotFoundError as exc:
        raise _gone(task, piece) from exc


def _gone(task: ReadTask, piece: OffsetSlice) -> CorruptError:
    return CorruptError(
        f"{describe_run(task.topic, piece.partition, piece.run)}: is gone: if the topic was "
        "trimmed, compiled or deleted after this read was planned, read again; if not, restore it "
        "from a copy, and run `tidelog verify`"
    )
