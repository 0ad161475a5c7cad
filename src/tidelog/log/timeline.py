"""Timelines: how many events each stretch of a topic's time has.

Events are counted from runs alone. A run says how many events it holds and between which times, so
ten million events are drawn from a few hundred rows. A run that lies across several bars is spread
over them evenly; of a journal, each row group is. If little has to be read, the times of these
events are read, and the counts are exact.

The runs of topics that were looked at are kept, and read on from where they end. A topic with
very many runs is read in portions, and an answer says when it does not know all of them yet.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.codec.journal_file import groups_expected
from tidelog.codec.numbers import numbers_of
from tidelog.context import Context
from tidelog.errors import InvalidError, NotFoundError
from tidelog.log.partition_reader import Reader
from tidelog.log.run_reader import RunSelection, describe_run, read_run, row_groups
from tidelog.log.topics import read_head
from tidelog.model.limits import TIMESTAMP_MS_END
from tidelog.model.topic import Topic

__all__ = ["BARS_MAX", "Histogram", "Timelines"]

BARS_MAX = 400
_TOPICS_KEPT = 16
_ROWS_MAX = 20_000  # of runs that one request reads
_EXACT_EVENTS = 500_000  # whose times are read so that counts are exact
_EXACT_BYTES = 16 << 20  # whole runs, but of a journal only the times
_EXACT_READS = 250  # of the store, the first time: runs, and row groups of journals
_TIME_BYTES = 8
_TIMES_KEPT = 1_000_000  # of events that were read
_SPREAD_ROWS = 2_000  # runs that are spread at once
_STEPS_MS: tuple[int, ...] = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 15_000, 30_000),
    *(minutes * 60_000 for minutes in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720)),
    *(days * 86_400_000 for days in (1, 2, 7)),
)

_BASE, _END, _EVENTS, _FIRST, _LAST, _BYTES, _GROUPS = range(7)  # what is kept of a run
_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
_NO_TIMES: _Ints = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts from a time on, each of the same width."""

    start_ms: int
    width_ms: int
    counts: list[int]
    sizes: list[int]  # bytes before compression; a run's are spread as its events are
    first_ms: int | None  # of all events that are known
    last_ms: int | None
    is_exact: bool  # the events were read; else runs were spread evenly
    is_whole: bool  # all runs are known

    @property
    def end_ms(self) -> int:
        return self.start_ms + self.width_ms * len(self.counts)


@dataclass(slots=True)
class _PartitionRuns:
    """The runs of one partition: base, end, events, first and last time, bytes, row groups.

    A run that is not a journal has no row groups; of a journal their number is an estimate.
    """

    at: int = 0
    mark: tuple[int, int] = (-1, -1)
    amendments: int = 0
    rows: _Ints = field(default_factory=lambda: np.empty((0, 7), np.int64))


@dataclass(frozen=True, slots=True)
class _Runs:
    """Some runs of a partition, and what tells them from those that may come in their place."""

    partition: int
    key: tuple[object, ...]
    rows: _Ints


@dataclass(slots=True)
class _Topic:
    parts: list[_PartitionRuns]
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_whole: bool = False


class Timelines:
    """Histograms of topics."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._kept: OrderedDict[str, _Topic] = OrderedDict()
        self._times: OrderedDict[tuple[object, ...], _Ints] = (
            OrderedDict()
        )  # of runs that were read
        self._times_count = 0
        self._lock = threading.Lock()

    def histogram(self, topic: Topic, start_ms: int | None, end_ms: int | None) -> Histogram:
        """Returns the histogram of a range of times, or of all events. Raises ``InvalidError``."""
        known = self._topic(topic)
        with known.lock:
            self._read_on(topic, known)
            runs = [
                _Runs(
                    partition, (topic.incarnation, partition, part.mark, part.amendments), part.rows
                )
                for partition, part in enumerate(known.parts)
            ]
            is_whole = known.is_whole
        rows = np.concatenate([each.rows for each in runs])
        first = int(rows[:, _FIRST].min()) if len(rows) else None
        last = int(rows[:, _LAST].max()) if len(rows) else None
        start = (first or 0) if start_ms is None else start_ms
        end = (last or 0) + 1 if end_ms is None else end_ms
        if not 0 <= start <= end <= TIMESTAMP_MS_END:
            raise InvalidError("timeline: its range ends before it begins: give start and end")
        begin, width, bars = _grid(start, max(end, start + 1))
        edges = begin + width * np.arange(bars + 1, dtype=np.int64)
        totals, is_exact = self._count(topic, runs, edges)
        counts, sizes = ([round(each) for each in row] for row in totals.tolist())
        return Histogram(begin, width, counts, sizes, first, last, is_exact, is_whole)

    def _count(self, topic: Topic, runs: list[_Runs], edges: _Ints) -> tuple[_Floats, bool]:
        """Events and bytes of each bar, and whether the events are exact."""
        totals = np.zeros((2, len(edges) - 1))
        across: list[_Runs] = []
        for each in runs:
            rows = each.rows
            here = rows[(rows[:, _LAST] >= edges[0]) & (rows[:, _FIRST] < edges[-1])]
            bars = np.searchsorted(edges, here[:, _FIRST : _LAST + 1], "right") - 1
            within = (bars[:, 0] == bars[:, 1]) & (bars[:, 0] >= 0) & (bars[:, 0] < len(edges) - 1)
            for at, column in enumerate((_EVENTS, _BYTES)):
                np.add.at(totals[at], bars[within, 0], here[within, column])
            across.append(replace(each, rows=here[~within]))
        events = sum(int(each.rows[:, _EVENTS].sum()) for each in across)
        if _can_be_read(np.concatenate([each.rows for each in across])):
            try:
                return totals + sum(self._read(topic, each, edges) for each in across), True
            except NotFoundError:
                pass  # trimmed or compiled meanwhile: the next one knows
        for each in across:
            totals += _spread(self._split(topic, each), edges)
        return totals, not events

    def _read(self, topic: Topic, runs: _Runs, edges: _Ints) -> _Floats:
        """Events and bytes of some runs, the events counted by their own times."""
        reader = Reader(self._context, topic, runs.partition)
        totals = np.zeros((2, len(edges) - 1))
        for base, end, size in runs.rows[:, (_BASE, _END, _BYTES)].tolist():
            key = (*runs.key, base)
            with self._lock:
                times = self._times.get(key)
            if times is None:
                times = self._read_times(topic, reader, runs.partition, base, end)
                self._keep(key, times)
            counts = np.diff(np.searchsorted(times, edges))
            totals += counts, counts * (size / max(1, len(times)))
        return totals

    def _read_times(
        self, topic: Topic, reader: Reader, partition: int, base: int, end: int
    ) -> _Ints:
        """Returns the times of a run's events, sorted."""
        plan, selection = reader.plan(base, end), RunSelection(base, end, columns=["timestamp"])
        found = [
            numbers_of(rows.batch.column("timestamp").cast(pa.int64()))
            for run in plan.runs
            for rows in read_run(
                self._context.store,
                run,
                describe_run(topic.name, partition, run),
                selection,
                plan.amendments,
            )
        ]
        return np.sort(np.concatenate([*found, _NO_TIMES]))

    def _split(self, topic: Topic, runs: _Runs) -> _Ints:
        """Returns the runs with journals split into row groups, which have narrower times."""
        is_long = runs.rows[:, _GROUPS] > 1
        if not 0 < is_long.sum() <= _EXACT_READS:
            return runs.rows
        reader = Reader(self._context, topic, runs.partition)
        found = [runs.rows[~is_long]]
        for row in runs.rows[is_long]:
            key = (*runs.key, int(row[_BASE]), "groups")
            with self._lock:
                groups = self._times.get(key)
            if groups is None:
                try:
                    groups = self._read_groups(topic, reader, runs.partition, row)
                except NotFoundError:  # trimmed or compiled meanwhile: the next one knows
                    groups = row[np.newaxis]
                else:
                    self._keep(key, groups)
            found.append(groups)
        return np.concatenate(found)

    def _read_groups(self, topic: Topic, reader: Reader, partition: int, row: _Ints) -> _Ints:
        """Returns a row for each row group of a journal."""
        base, _, events, _, _, size, _ = row.tolist()
        run = reader.runs(base)[0]
        if run.journal is None or run.end != row[_END]:
            return row[np.newaxis]
        found = []
        for group in row_groups(self._context.store, run, describe_run(topic.name, partition, run)):
            count = min(group.rows, group.last + 1 - base)  # the first may be trimmed in part
            if count > 0:
                times = (group.first_ms, group.last_ms)
                part = size * count // max(1, events)
                found.append((group.first, group.last + 1, count, *times, part, 1))
        return np.array(found, np.int64) if found else row[np.newaxis]

    def _keep(self, key: tuple[object, ...], times: _Ints) -> None:
        """For the next look; what was read first goes when there is too much."""
        with self._lock:
            self._times[key] = times
            self._times_count += len(times)
            while self._times_count > _TIMES_KEPT:
                self._times_count -= len(self._times.popitem(last=False)[1])

    def _topic(self, topic: Topic) -> _Topic:
        with self._lock:
            known = self._kept.pop(topic.incarnation, None)
            if known is None:
                known = _Topic([_PartitionRuns() for _ in range(topic.partitions)])
            self._kept[topic.incarnation] = known
            while len(self._kept) > _TOPICS_KEPT:
                self._kept.popitem(last=False)
            return known

    def _read_on(self, topic: Topic, known: _Topic) -> None:
        room = _ROWS_MAX
        known.is_whole = True
        for partition, part in enumerate(known.parts):
            head, _ = read_head(self._context, topic, partition)
            part.amendments = head.amendments
            if part.mark != (head.start, head.compiled):
                part.mark, part.at = (head.start, head.compiled), head.start
                part.rows = part.rows[:0]
            fresh: list[tuple[int, ...]] = []
            reader = Reader(self._context, topic, partition)
            while part.at < head.next and room > 0:
                try:
                    runs = reader.runs(part.at)
                except NotFoundError:
                    break
                if not runs:
                    break
                for run in (each for each in runs if each.events):
                    base = max(run.base, head.start)  # the first may be trimmed in part
                    events = min(run.events, run.end - base)
                    times = (run.first_ms, run.last_ms)
                    size = run.raw_bytes * events // run.events
                    groups = 0 if run.journal is None else groups_expected(events, size)
                    fresh.append((base, run.end, events, *times, size, groups))
                part.at = runs[-1].end
                room -= len(runs)
            if fresh:
                part.rows = np.concatenate([part.rows, np.array(fresh, np.int64)])
            known.is_whole = known.is_whole and part.at >= head.next


def _grid(start_ms: int, end_ms: int) -> tuple[int, int, int]:
    """Returns where bars begin, their width and number: round numbers that cover the range."""
    wanted = (end_ms - start_ms) / 120
    width = next((step for step in _STEPS_MS if step >= wanted), 0)
    if not width:
        width = -(-int(wanted) // _STEPS_MS[-1]) * _STEPS_MS[-1]
    begin = start_ms // width * width
    bars = max(1, -(-(end_ms - begin) // width))
    return begin, width, min(bars, BARS_MAX)


def _can_be_read(rows: _Ints) -> bool:
    """Whether it is little work to read the times of all events of these runs."""
    times = rows[:, _EVENTS] * _TIME_BYTES
    size = np.where(rows[:, _GROUPS] > 0, times, rows[:, _BYTES]).sum()
    reads = np.maximum(rows[:, _GROUPS], 1).sum()
    return bool(
        rows[:, _EVENTS].sum() <= _EXACT_EVENTS and size <= _EXACT_BYTES and reads <= _EXACT_READS
    )


def _spread(rows: _Ints, edges: _Ints) -> _Floats:
    """Events and bytes of runs, evenly over the time between their first and their last."""
    below = np.zeros((2, len(edges)))  # what lies before each edge
    for at in range(0, len(rows), _SPREAD_ROWS):
        _, _, counts, first, last, sizes, _ = rows[at : at + _SPREAD_ROWS].T
        parts = (edges - first[:, None]) / (last + 1 - first)[:, None]
        below += np.stack([counts, sizes]) @ np.clip(parts, 0.0, 1.0)
    return np.diff(below)
