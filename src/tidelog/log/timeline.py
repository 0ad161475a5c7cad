"""The timeline of a topic: how many events each stretch of time has, from its runs alone.

A run says how many events it holds and between which times, so ten million events are drawn from a
few hundred rows: what lies across several bars is spread over them evenly. Where the range is so
narrow that few events are concerned, these are read, and the counts are exact.

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

from tidelog.context import Context
from tidelog.errors import InvalidError, NotFoundError
from tidelog.log.partition_reader import Reader
from tidelog.log.topics import read_head
from tidelog.model.limits import TIMESTAMP_MS_END
from tidelog.model.topic import Topic

__all__ = ["Histogram", "Timelines"]

BARS_MAX = 400
_TOPICS_KEPT = 16
_ROWS_MAX = 20_000  # of runs that one request reads
_EXACT_EVENTS = 60_000  # that are read so that counts are exact
_EXACT_BYTES = 16 << 20
_EXACT_RUNS = 250  # each is a read of the store, the first time
_TIMES_KEPT = 1_000_000  # of events that were read
_SPREAD_ROWS = 2_000  # runs that are spread at once
_STEPS_MS: tuple[int, ...] = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 15_000, 30_000),
    *(minutes * 60_000 for minutes in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720)),
    *(days * 86_400_000 for days in (1, 2, 7)),
)

_EVENTS, _FIRST, _LAST, _BYTES = 2, 3, 4, 5  # columns of what is kept of a run
_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
_NO_TIMES: _Ints = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts from a time on, each of the same width."""

    start_ms: int
    width_ms: int
    counts: list[int]
    first_ms: int | None  # of all events that are known
    last_ms: int | None
    is_exact: bool  # the events were read; else runs were spread evenly
    is_whole: bool  # all runs are known

    @property
    def end_ms(self) -> int:
        return self.start_ms + self.width_ms * len(self.counts)


@dataclass(slots=True)
class _PartitionRuns:
    """The runs of one partition: base, end, events, first and last time, bytes."""

    at: int = 0
    mark: tuple[int, int] = (-1, -1)
    amendments: int = 0
    rows: _Ints = field(default_factory=lambda: np.empty((0, 6), np.int64))


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
        """Of a range of times, or of all that there is. ``InvalidError``."""
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
        counts, is_exact = self._count(topic, runs, edges)
        return Histogram(begin, width, counts, first, last, is_exact, is_whole)

    def _count(self, topic: Topic, runs: list[_Runs], edges: _Ints) -> tuple[list[int], bool]:
        totals = np.zeros(len(edges) - 1)
        across: list[_Runs] = []
        for each in runs:
            rows = each.rows
            here = rows[(rows[:, _LAST] >= edges[0]) & (rows[:, _FIRST] < edges[-1])]
            bars = np.searchsorted(edges, here[:, _FIRST : _LAST + 1], "right") - 1
            within = (bars[:, 0] == bars[:, 1]) & (bars[:, 0] >= 0) & (bars[:, 0] < len(totals))
            np.add.at(totals, bars[within, 0], here[within, _EVENTS])
            across.append(replace(each, rows=here[~within]))
        events = sum(int(each.rows[:, _EVENTS].sum()) for each in across)
        size = sum(int(each.rows[:, _BYTES].sum()) for each in across)
        count = sum(len(each.rows) for each in across)
        if events <= _EXACT_EVENTS and size <= _EXACT_BYTES and count <= _EXACT_RUNS:
            try:
                for each in across:
                    totals += self._read(topic, each, edges)
                return [round(count) for count in totals], True
            except NotFoundError:
                pass  # trimmed or compiled meanwhile: the next one knows
        for each in across:
            totals += _spread(each.rows, edges)
        return [round(count) for count in totals], not events

    def _read(self, topic: Topic, runs: _Runs, edges: _Ints) -> _Floats:
        """The events of some runs, counted by their own times."""
        reader = Reader(self._context, topic, runs.partition)
        counts = np.zeros(len(edges) - 1)
        for base, end in runs.rows[:, :2].tolist():
            key = (*runs.key, base)
            with self._lock:
                times = self._times.get(key)
            if times is None:
                found = [
                    stretch.arrow().column("timestamp").cast(pa.int64()).to_numpy()
                    for stretch in reader.stretches(base, end)
                ]
                times = np.sort(np.concatenate([*found, _NO_TIMES]))
                self._keep(key, times)
            counts += np.diff(np.searchsorted(times, edges))
        return counts

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
                    fresh.append((base, run.end, events, *times, run.raw_bytes))
                part.at = runs[-1].end
                room -= len(runs)
            if fresh:
                part.rows = np.concatenate([part.rows, np.array(fresh, np.int64)])
            known.is_whole = known.is_whole and part.at >= head.next


def _grid(start_ms: int, end_ms: int) -> tuple[int, int, int]:
    """Where bars begin, how wide they are, and how many: round numbers that cover the range."""
    wanted = (end_ms - start_ms) / 120
    width = next((step for step in _STEPS_MS if step >= wanted), 0)
    if not width:
        width = -(-int(wanted) // _STEPS_MS[-1]) * _STEPS_MS[-1]
    begin = start_ms // width * width
    bars = max(1, -(-(end_ms - begin) // width))
    return begin, width, min(bars, BARS_MAX)


def _spread(rows: _Ints, edges: _Ints) -> _Floats:
    """The events of runs, evenly over the time between their first and their last."""
    below = np.zeros(len(edges))  # how many events lie before each edge
    for at in range(0, len(rows), _SPREAD_ROWS):
        _, _, counts, first, last, _ = rows[at : at + _SPREAD_ROWS].T
        parts = (edges - first[:, None]) / (last + 1 - first)[:, None]
        below += counts @ np.clip(parts, 0.0, 1.0)
    return np.diff(below)
