"""The state of a topic for people: partitions, consumers with lag and members, and its timeline.

**The timeline** says how many events each stretch of time has, from runs alone. A run says how many
events it holds and between which times, so ten million events are drawn from a few hundred rows:
what lies across several bars is spread over them evenly. Where the range is so narrow that few
events are concerned, these are read, and the counts are exact.

The runs of topics that were looked at are kept, and read on from where they end. A topic with
very many runs is read in portions, and an answer says when it does not know all of them yet.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.catalog.base import prefix_end
from tidelog.context import Context
from tidelog.coordination.members import Member
from tidelog.errors import InvalidError, NotFoundError
from tidelog.log.consumer.leases import decode_registered, read_lease
from tidelog.log.partition_reader import Reader
from tidelog.log.run_reader import Cut, describe_run, read_run
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.limits import TIMESTAMP_MS_END
from tidelog.model.partition_rows import Head, Run, decode_row
from tidelog.model.topic import Topic

__all__ = [
    "Histogram",
    "Lag",
    "LeaseState",
    "MemberState",
    "Members",
    "PartitionState",
    "PartitionTotals",
    "RunTotals",
    "Timelines",
    "consumer_lag",
    "consumer_leases",
    "consumer_names",
    "partition_ends",
    "partition_states",
    "read_heads",
]


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One partition at one point in time. Runs and bytes are None if they were not counted."""

    partition: int
    start: int  # the first readable offset
    next: int  # the offset of the next event
    runs: int | None = None  # including journals
    bytes: int | None = None  # in the store, after compression
    last_ms: int | None = None  # the latest event time
    erased: int = 0  # offsets without an event; 0 if runs were not counted

    @property
    def events(self) -> int:
        """Returns how many events are readable; an upper limit if runs were not counted."""
        return self.next - self.start - self.erased


def read_heads(context: Context, topic: Topic) -> list[Head]:
    """Returns the heads of all partitions, in order; raises as ``read_head``."""
    return [read_head(context, topic, partition)[0] for partition in range(topic.partitions)]


def partition_ends(
    context: Context, topic: Topic, partitions: Iterable[int]
) -> dict[int, tuple[int, int]]:
    """Returns the start and the next offset of some partitions; raises as ``read_head``."""
    heads = {partition: read_head(context, topic, partition)[0] for partition in partitions}
    return {partition: (head.start, head.next) for partition, head in heads.items()}


def partition_states(
    context: Context, topic: Topic, pool: Executor, runs: bool
) -> list[PartitionState]:
    """Returns all partitions in order; reads every run's row if ``runs``, otherwise only the heads.

    Raises ``NotFoundError`` if the topic was deleted.
    """
    look = _with_runs if runs else _head_only
    return list(
        pool.map(lambda partition: look(context, topic, partition), range(topic.partitions))
    )


def _head_only(context: Context, topic: Topic, partition: int) -> PartitionState:
    head, _ = read_head(context, topic, partition)
    return PartitionState(partition, head.start, head.next)


def _with_runs(context: Context, topic: Topic, partition: int) -> PartitionState:
    head, _ = read_head(context, topic, partition)
    amendments = Reader(context, topic, partition).amendments(head.start, head.next)
    count = size = erased = 0
    last_ms: int | None = None
    for run in _runs(context, topic, partition, head):
        count += 1
        size += run.byte_end - run.byte_start
        erased += _count_erased(context, topic, partition, run, head.start)
        erased += sum(row.kind == "delete" for row in amendments.of_run(run).rows)
        if run.events:
            last_ms = run.last_ms if last_ms is None else max(last_ms, run.last_ms)
    return PartitionState(partition, head.start, head.next, count, size, last_ms, erased)


def _count_erased(context: Context, topic: Topic, partition: int, run: Run, start: int) -> int:
    """Returns how many offsets from the start on have no event in a run.

    Reads a journal that reaches below the start, since some of its offsets may have been trimmed.
    """
    if run.base >= start or run.count == run.events:
        return run.count - run.events
    what = describe_run(topic.name, partition, run)
    try:
        parts = read_run(context.store, run, what, Cut(start, columns=["timestamp"]))
        return run.end - start - sum(len(part.offsets) for part in parts)
    except NotFoundError:  # another journal has replaced it
        return _erased_from(run, start)


def _erased_from(run: Run, start: int) -> int:
    """Returns how many offsets of a run from the start on have no event; at least these."""
    return max(0, run.count - run.events - max(0, start - run.base))


def _runs(context: Context, topic: Topic, partition: int, head: Head) -> Iterator[Run]:
    """Yields journals and runs from the start on.

    Counts what is compiled meanwhile at most once.
    """
    where = layout.topic_partition(topic.incarnation, partition)
    first, last = layout.run_row(head.journaled), layout.run_row(head.next)
    at = head.start
    for row in chain(
        context.catalog.scan(where, "journal/", "journal0"),
        context.catalog.scan(where, first, last),
    ):
        run = decode_row(row.value, Run, f"row `{row.row}` of `{topic.name}/{partition}`")
        if run.end > at:
            yield run
            at = run.end


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a consumer is behind in one partition."""

    topic: str
    consumer: str
    partition: int
    cursor: int | None  # None: no member has read it yet
    start: int
    end: int
    owner: str

    @property
    def events(self) -> int:
        """Returns how many offsets are not handled yet. Counts erased events, not trimmed ones."""
        return self.end - max(self.start, self.cursor or 0)


def consumer_names(context: Context, topic: Topic) -> list[str]:
    """Returns all consumers of a topic, including those whose delete did not finish."""
    where, prefix = layout.consumers_partition(topic.incarnation), layout.consumer_row("")
    rows = context.catalog.scan(where, prefix, prefix_end(prefix))
    found = [decode_registered(row) for row in rows]
    return sorted(each.name for each in found if each.state != "deleted")


def consumer_lag(context: Context, topic: Topic, name: str) -> list[Lag]:
    """Returns how far a consumer is behind in every partition of a topic."""
    heads = (read_head(context, topic, partition)[0] for partition in range(topic.partitions))
    return [each.lag for each in consumer_leases(context, topic, name, heads)]


@dataclass(frozen=True, slots=True)
class LeaseState:
    """A consumer's lease on one partition, and how far it is behind there."""

    lag: Lag
    epoch: int
    version: str  # of the lease; empty if there is none


def consumer_leases(
    context: Context, topic: Topic, name: str, heads: Iterable[Head]
) -> Iterator[LeaseState]:
    """Yields a consumer's leases, by partition; ``heads`` are those of the partitions in order."""
    for partition, head in enumerate(heads):
        lease, version = read_lease(context, topic, name, partition) or (None, "")
        cursor, owner = (lease.cursor, lease.owner) if lease else (None, "")
        lag = Lag(topic.name, name, partition, cursor, head.start, head.next, owner)
        yield LeaseState(lag, lease.epoch if lease else 0, version)


@dataclass(frozen=True, slots=True)
class MemberState:
    """A member of a consumer, by its last heartbeat."""

    id: str
    mark: str  # its host and process
    seen_ms: int
    is_silent: bool  # for longer than its leases last


class Members:
    """Watches the members of a topic's consumers, for a process that looks repeatedly."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, tuple[str, float]]] = {}
        """By consumer: each member's row, its version, and since when it is the same."""

    def list(self, context: Context, topic: Topic, name: str) -> list[MemberState]:
        """Returns the members of a consumer. Those that are seen for the first time are alive.

        Silence counts by our own clock, since the clocks of hosts may differ.
        """
        now_s, ttl_s = context.clock.monotonic_s(), context.log_settings.lease_ttl_ms / 1000
        where = layout.consumer_members(topic.incarnation, name)
        before = self._seen.get(name, {})
        seen: dict[str, tuple[str, float]] = {}
        found = []
        for row in context.catalog.scan(where, "member/", "member0"):
            member = decode_row(row.value, Member, f"member row `{row.row}`")
            dead = context.processes.is_dead(member.mark)
            version, since_s = before.get(row.row, ("", 0.0))
            seen[row.row] = (row.version, since_s if version == row.version else now_s)
            silent = dead or now_s - seen[row.row][1] > ttl_s
            member_id = row.row.removeprefix("member/")
            found.append(MemberState(member_id, member.mark, member.seen_ms, silent))
        self._seen[name] = seen
        return found


@dataclass(frozen=True, slots=True)
class RunTotals:
    """Runs from the start up to an offset."""

    at: int
    runs: int = 0
    bytes: int = 0
    erased: int = 0  # offsets whose events were deleted and compiled
    first_ms: int | None = None
    last_ms: int | None = None


@dataclass(slots=True)
class PartitionTotals:
    """Counts a partition's runs piece by piece, so that no request reads them all.

    A count continues as runs are added. When the oldest runs are trimmed or compiled into journals,
    it starts again, and ``shown`` keeps the count before until the new one has reached the end.
    """

    shown: RunTotals | None = None  # None: never yet counted to the end
    _mark: tuple[int, int] = (-1, -1)
    _going: RunTotals = field(default_factory=lambda: RunTotals(0))

    def count_on(
        self, context: Context, topic: Topic, partition: int, head: Head, rows: int
    ) -> int:
        """Reads about ``rows`` run rows at most; returns how many it has read."""
        mark = (head.start, head.compiled)
        if mark != self._mark:
            self._mark, self._going = mark, RunTotals(head.start)
        if self._going.at >= head.next:
            self.shown = self._going
            return 0
        read = 0
        reader = Reader(context, topic, partition)
        while self._going.at < head.next and read < rows:
            try:
                runs = reader.runs(self._going.at)
            except NotFoundError:  # trimmed meanwhile: the next head says so
                return read
            if not runs:
                break
            read += len(runs)
            before = self._going
            held = [run for run in runs if run.events]  # an emptied journal has no times
            first = [run.first_ms for run in held]
            last = [run.last_ms for run in held]
            self._going = RunTotals(
                at=runs[-1].end,
                runs=before.runs + len(runs),
                bytes=before.bytes + sum(run.byte_end - run.byte_start for run in runs),
                erased=before.erased + sum(_erased_from(run, head.start) for run in runs),
                first_ms=min([*first, *_known(before.first_ms)], default=None),
                last_ms=max([*last, *_known(before.last_ms)], default=None),
            )
        if self._going.at >= head.next:
            self.shown = self._going
        return read


def _known(time_ms: int | None) -> list[int]:
    return [] if time_ms is None else [time_ms]


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
        size = sum(int(each.rows[:, _BYTES].sum()) for each in across)
        count = sum(len(each.rows) for each in across)
        if events <= _EXACT_EVENTS and size <= _EXACT_BYTES and count <= _EXACT_RUNS:
            try:
                return totals + sum(self._read(topic, each, edges) for each in across), True
            except NotFoundError:
                pass  # trimmed or compiled meanwhile: the next one knows
        for each in across:
            totals += _spread(each.rows, edges)
        return totals, not events

    def _read(self, topic: Topic, runs: _Runs, edges: _Ints) -> _Floats:
        """Events and bytes of some runs, the events counted by their own times."""
        reader = Reader(self._context, topic, runs.partition)
        totals = np.zeros((2, len(edges) - 1))
        for base, end, _, _, _, size in runs.rows.tolist():
            key = (*runs.key, base)
            with self._lock:
                times = self._times.get(key)
            if times is None:
                found = [
                    stretch.arrow().column("timestamp").cast(pa.int64()).to_numpy()
                    for stretch in reader.read(base, end)
                ]
                times = np.sort(np.concatenate([*found, _NO_TIMES]))
                self._keep(key, times)
            counts = np.diff(np.searchsorted(times, edges))
            totals += counts, counts * (size / max(1, len(times)))
        return totals

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
                    fresh.append((base, run.end, events, *times, size))
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


def _spread(rows: _Ints, edges: _Ints) -> _Floats:
    """Events and bytes of runs, evenly over the time between their first and their last."""
    below = np.zeros((2, len(edges)))  # what lies before each edge
    for at in range(0, len(rows), _SPREAD_ROWS):
        _, _, counts, first, last, sizes = rows[at : at + _SPREAD_ROWS].T
        parts = (edges - first[:, None]) / (last + 1 - first)[:, None]
        below += np.stack([counts, sizes]) @ np.clip(parts, 0.0, 1.0)
    return np.diff(below)
