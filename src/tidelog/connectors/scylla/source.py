"""A Scylla table as a source, by its change log.

The streams of the log are divided into groups, which are the source partitions; order is kept
within each stream. Positions are times (``streams``), so a range is a period of time. It ends a
*lag* before now, because changes arrive after their own time if clocks are skewed or writes are
slow. Three modes::

    safe    lag 30 s; a shorter one logs a warning, because later changes are missed
    fast    lag 1 s, for low latency; notes what it reads, for a sweep
    sweep   lag 1 min, after the ``of`` pipelines: adds what they missed, and how late it was
            (header ``tidelog.late_ms``); with ``lag=last`` shortly before the log's rows expire,
            for rows written with old timestamps

The id of an event is the one that rscylla gives it, so a change has one id on every path. The key
is the primary key in JSON, the type is the operation, and ``changes`` describes the value.

A fast reader passes windows before all of their changes have arrived. A sweep reads the same
windows again later, and adds what is not in the topic yet:

1. the fast reader commits a range; its manifest notes
   every change in it                                      → crash: the next driver finishes it
2. a sweep plans a range that ends at the fast reader's
   committed position, or before                           → crash: the next driver plans it again
3. a task reads the windows again, and skips all changes
   that the manifests of those ranges note                 → crash: staged files without a name
4. the sweep's own cycle commits the rest; its manifest
   notes it, for another sweep after this one              → crash: the next driver finishes it

What the fast reader committed up to a position never changes, and it never goes back. So it noted a
change, or it will never write it. Both pipelines write their own ranges once. A change that arrives
even later is for a sweep after this one.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC
from functools import partial
from typing import Any

from tidelog.catalog.base import Row
from tidelog.clock import Clock, SystemClock
from tidelog.connectors.scylla.changes import LogTable, log_table, read_schema, time_ms_of
from tidelog.connectors.scylla.reader import (
    ChangeRead,
    ChangeReadPlan,
    CommittedRange,
    Generation,
    first_times,
    refresh_ms,
)
from tidelog.connectors.scylla.session import (
    SAFE_LAG_MS,
    ScyllaAddress,
    ScyllaOptions,
    ScyllaSession,
    format_scylla,
    parse_scylla,
    session_of,
)
from tidelog.connectors.scylla.streams import ChangePosition, Generations, is_before
from tidelog.connectors.source import (
    Bounds,
    Chunk,
    CompletingSource,
    PlannedReader,
    ProbingSource,
    RowSource,
    Source,
    SourcePartition,
    SourceRange,
    TimedSource,
    check_incarnation,
    checked_at_end,
)
from tidelog.context import Context, OpenContext
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.errors import InvalidError, NotFoundError
from tidelog.model import layout
from tidelog.model.address import Address, parse_address
from tidelog.model.pipeline import BeginReason, Commit, NamedPipeline
from tidelog.model.topic import decode_row

__all__ = [
    "ReadByAll",
    "ScyllaSource",
    "SweptPipelines",
    "open_scylla",
]

_NOTED_MAX = 100_000  # changes of a range that its manifest notes
_STEPS_MS = ((3_600_000, 60_000), (60_000, 10_000), (10_000, 1_000), (0, 250))  # of ends, by lag
_QUIET_LOOKS = 30  # at a quiet group, before it must be read again
_MARGIN_MS = 60_000  # do not begin with changes that are about to expire


def open_scylla(
    address: Address,
    *,
    environ: Mapping[str, str],
    open_context: OpenContext | None = None,
    clock: Clock | None = None,
) -> ScyllaSource:
    """Opens the source at ``scylla://HOST:9042/KEYSPACE.TABLE?mode=…&lag=…&start=…``.

    ``start`` is ``oldest``, ``first``, a time, or the id of an event, which stands for its second:
    changes of that second come again. A time such as ``-15m`` is relative to this call;
    the source's own URL has the absolute time.
    """
    clock = clock or SystemClock()
    place, way = parse_scylla(address, environ, clock.now_ms())
    if way.of and open_context is None:
        raise InvalidError(
            f"source `{address.text}`: its `of` names pipelines of a home, and none is open: "
            "name the home"
        )
    if way.lag_ms is not None and way.lag_ms < SAFE_LAG_MS:
        behind = "run a sweep behind it" if way.mode == "fast" else "give 30s, or run a sweep too"
        logging.getLogger(__name__).warning(
            "source `%s`: a lag of %s ms is short: changes that land later are missed: %s",
            address.text,
            way.lag_ms,
            behind,
        )
    return ScyllaSource(place, way, open_context=open_context, clock=clock)


class ScyllaSource:
    """The change log of a table. Pickles without secrets: each process has its own."""

    def __init__(
        self,
        place: ScyllaAddress,
        way: ScyllaOptions,
        *,
        open_context: OpenContext | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._place = place
        self._way = way
        self._clock = clock or SystemClock()
        self._swept = SweptPipelines(open_context, place, way) if way.of and open_context else None
        self._lock = threading.Lock()
        self._generations: Generations | None = None
        self._times: list[int] = []  # of generations, as last seen
        self._table: LogTable | None = None  # as last seen
        self._begin_ms: int | None = None  # the first change, after looking for it
        self._last_starts: dict[SourcePartition, str] = {}  # where the last range began
        self._quiet: dict[SourcePartition, int] = {}  # looks at groups whose last range was empty

    @property
    def url(self) -> str:
        return format_scylla(self._place, self._way)

    @property
    def behind(self) -> tuple[str, ...]:
        return self._way.of

    def partitions(self) -> list[SourcePartition]:
        """Lists the groups; for a sweep, those that the pipelines before it have begun.

        Raises ``NotFoundError`` if there is no change log.
        """
        self._look(session_of(self._place))
        groups = [self._partition(number) for number in range(self._way.groups)]
        return groups if self._swept is None else list(self._swept.passed(groups))

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        """Returns bounds up to the lag before now; for a sweep, up to the other pipelines."""
        for each in partitions:
            self._group(each)
        session = session_of(self._place)
        now_ms = min(self._clock.now_ms(), _server_ms(session))  # before reading generations
        table = self._look(session)
        held_ms = max(self._times[0], now_ms - table.ttl_ms if table.ttl_ms else 0)
        end_ms = max(held_ms, self._end_ms(now_ms, table))
        first = self._place_at(max(held_ms, self._first_ms(session, held_ms, end_ms)))
        incarnation = table.id
        passed: dict[SourcePartition, ReadByAll] = {}
        if self._swept is not None:
            passed = self._swept.passed(partitions)
            incarnation = f"{table.id} behind {self._swept.incarnation()}"
        found: dict[SourcePartition, Bounds] = {}
        for each in partitions:
            begin, end = first, self._place_at(max(end_ms, first.time_ms))
            if self._swept is not None:
                if each not in passed:
                    raise NotFoundError(
                        f"source partition `{each.text}`: was not begun by all of "
                        f"{', '.join(self._way.of)}: a sweep goes behind them"
                    )
                begin = max(passed[each].first, begin, key=lambda place: place.time_ms)
                end = min(passed[each].end, end, key=lambda place: place.time_ms)
                end = max(begin, end, key=lambda place: place.time_ms)
            limit = self._quiet_end(each, end.limit().text)
            found[each] = Bounds(
                begin.held(held_ms).text,
                limit,
                incarnation,
                begins=self._begins(held_ms),
                until_ms=end.time_ms,
            )
        return found

    def _begins(self, held_ms: int) -> BeginReason:
        """Returns why nothing before the first place is read."""
        if isinstance(self._way.start, int):
            return "explicit"
        return "retention" if held_ms > self._times[0] else "earliest"

    def waits(self, range: SourceRange) -> bool:
        """Returns whether there is a change, by looking, or silence long enough to commit."""
        span_ms = (
            ChangePosition.parse(range.limit).time_ms - ChangePosition.parse(range.start).time_ms
        )
        plan = self._plan(range)
        if span_ms >= refresh_ms(plan.ttl_ms):
            return True
        return not ChangeRead(session_of(self._place), self._way, plan, self._clock).is_empty()

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        """Implements ``Source.read``. The range ends after the window with enough changes.

        Raises ``NotFoundError`` if the start is older than the log's time to live, or its
        generation does not belong to this cluster.
        """
        return self.reader(range).read()

    def reader(self, range: SourceRange) -> PlannedReader:
        plan = self._plan(range)
        if self._last_starts.get(range.partition) == range.start:
            self._quiet[range.partition] = 0
        else:
            self._quiet.pop(range.partition, None)
        self._last_starts[range.partition] = range.start
        return PlannedReader(range, plan, self.planned)

    def planned(self, plan: ChangeReadPlan) -> Iterator[Chunk]:
        """Yields the chunks of a plan."""
        session = session_of(self._place)
        chunks = ChangeRead(session, self._way, plan, self._clock).chunks()
        return checked_at_end(chunks, partial(_check_table, session, plan.range))

    def cut(self, start: str, end: str, events: int) -> str:
        """Returns a limit that contains the count; for zero, the start as a place to begin at."""
        if not events:
            return ChangePosition.parse(start).plain.text
        place = ChangePosition.parse(end)
        wanted = events if place.events is None else min(events, place.events)
        return place.limit(min(wanted, _NOTED_MAX) if self._way.remembers else wanted).text

    def limit_before(self, limit: str, time_ms: int) -> str:
        """Returns such a limit: places are times, so a range can end before any change."""
        place = ChangePosition.parse(limit)
        return limit if place.time_ms <= time_ms else self._place_at(time_ms).limit().text

    def before(self, one: str, other: str) -> bool:
        return is_before(one, other)

    def count(self, start: str, end: str) -> int | None:
        """Returns None, since a change log does not count; 0 before a position that was reached.

        A range into a generation that was announced too late may end before the time of its start.
        """
        begun, reached = ChangePosition.parse(start), ChangePosition.parse(end)
        is_later = reached.generation_ms > begun.generation_ms
        return None if is_later or is_before(start, end) else 0

    def fetch_row(self, key: bytes) -> dict[str, object] | None:
        """Returns the base row of a change by its event's key, as it is now; None if it is gone.

        Values are as CQL writes them in JSON. Raises ``InvalidError`` for a key that is not the
        whole primary key.
        """
        session = session_of(self._place)
        names = read_schema(session).key
        try:
            values = json.loads(key)
        except ValueError:
            values = None
        if not isinstance(values, dict) or set(values) != set(names):
            raise InvalidError(
                f"table `{self._place.label}`: the event's key is not the whole primary key "
                f"({', '.join(names)}): partition deletes, and pumps with key_column or "
                "key_lookup, have others"
            )
        where = " AND ".join(f'"{name}" = fromJson(?)' for name in names)
        table = f'"{self._place.keyspace}"."{self._place.table}"'
        statement = session.known(f"SELECT JSON * FROM {table} WHERE {where}")  # noqa: S608 - checked
        given = [json.dumps(values[name]) for name in names]
        for page in session.pages(statement, given):
            for (row,) in page:
                found: dict[str, Any] = json.loads(row or b"null")
                return found
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (self.url,))

    def __repr__(self) -> str:
        return f"ScyllaSource({self.url!r})"

    # Internals.

    def _look(self, session: ScyllaSession) -> LogTable:
        """Reads the current log and its generations."""
        with self._lock:
            if self._generations is None:
                self._generations = Generations(session, self._way.groups)
            self._table = log_table(session)
            self._times = self._generations.times()
            return self._table

    def _quiet_end(self, partition: SourcePartition, end: str) -> str:
        """Returns the end or, in silence, where the last range began, so no reader asks again.

        Now and then returns the end anyway, in case another process has moved on from there.
        """
        looks = self._quiet.get(partition)
        if (
            looks is None
            or looks >= _QUIET_LOOKS
            or not is_before(self._last_starts[partition], end)
        ):
            return end
        self._quiet[partition] = looks + 1
        if self.waits(SourceRange(partition, self._last_starts[partition], end)):
            return end
        return ChangePosition.parse(self._last_starts[partition]).limit().text

    def _end_ms(self, now_ms: int, table: LogTable) -> int:
        lag_ms = self._way.lag_ms
        if lag_ms is None:
            if not table.ttl_ms:
                raise InvalidError(
                    f"change log of `{self._place.label}`: keeps its rows for good, so that there "
                    "is no last time to sweep: give a lag, such as 1d, instead of last"
                )
            lag_ms = table.ttl_ms - max(table.ttl_ms // 24, min(_MARGIN_MS, table.ttl_ms // 2))
        step_ms = next(step for least, step in _STEPS_MS if lag_ms >= least)
        return (now_ms - lag_ms) // step_ms * step_ms

    def _first_ms(self, session: ScyllaSession, held_ms: int, end_ms: int) -> int:
        """Returns where to begin, with a margin for changes that are about to expire."""
        ttl_ms = self._table.ttl_ms if self._table else 0
        if isinstance(self._way.start, int):
            return self._way.start
        margin_ms = min(_MARGIN_MS, ttl_ms // 10) if held_ms > self._times[0] else 0
        if self._way.start == "oldest" or self._swept is not None:
            return held_ms + margin_ms
        if self._begin_ms is None:
            self._begin_ms = self._first_change_ms(session, held_ms + margin_ms, end_ms)
        return self._begin_ms

    def _first_change_ms(self, session: ScyllaSession, start_ms: int, end_ms: int) -> int:
        """Returns the second of the first change, or the end if there is none."""
        generations = self._generations or Generations(session, self._way.groups)
        for index, time_ms in enumerate(self._times):
            ends = [*self._times[index + 1 :], end_ms]
            begin, end = max(start_ms, time_ms), min(end_ms, ends[0])
            if begin >= end:
                continue
            found = [
                time_ms_of(time)
                for group in range(self._way.groups)
                for time in first_times(session, generations.streams(time_ms, group), begin, end)
            ]
            if found:
                return min(found) // 1000 * 1000
        return end_ms

    def _plan(self, range: SourceRange) -> ChangeReadPlan:
        group = self._group(range.partition)
        start, limit = ChangePosition.parse(range.start), ChangePosition.parse(range.limit)
        if limit.time_ms < start.time_ms:
            raise InvalidError(
                f"source partition `{range.partition.text}`: range [{range.start}, {range.limit}) "
                "runs backwards: give start <= limit"
            )
        session = session_of(self._place)
        if self._table is None or not {start.generation_ms, limit.generation_ms} <= {*self._times}:
            self._look(session)
        table, generations = self._table, self._generations
        if start.generation_ms not in self._times or table is None or generations is None:
            raise NotFoundError(
                f"change log of `{self._place.label}`: the position {range.start} is in a "
                "generation of streams that the cluster does not list: it is another cluster, "
                "or too old: start a new pipeline",
                lost_from=range.start,
                first=self._times[0] if self._times else None,
            )
        wanted = [
            Generation(time_ms, after, generations.streams(time_ms, group))
            for time_ms, after in zip(self._times, [*self._times[1:], None], strict=True)
            if start.generation_ms <= time_ms <= limit.time_ms
        ]
        plan = ChangeReadPlan(
            range, tuple(wanted), table.ttl_ms, reaches_back=not self._way.remembers
        )
        if self._swept is None:
            return plan
        before, store, until_ms = self._swept.before(range)
        return replace(plan, before=before, store=store, limit_ms=until_ms)

    def _place_at(self, time_ms: int) -> ChangePosition:
        """Returns the position of a time, in its generation."""
        begun = [each for each in self._times if each <= time_ms]
        return ChangePosition(begun[-1] if begun else self._times[0], time_ms)

    def _partition(self, number: int) -> SourcePartition:
        return SourcePartition(self._place.label, str(number))

    def _group(self, partition: SourcePartition) -> int:
        number = partition.number_in(self._place.label)
        if number is None or number >= self._way.groups:
            raise NotFoundError(
                f"source partition `{partition.text}`: is none of `{self._place.label}` in "
                f"{self._way.groups} groups: ask the source for its partitions",
                partition=partition.text,
            )
        return number


def _check_table(session: ScyllaSession, range: SourceRange) -> None:
    """Raises ``NotFoundError`` if the log is not the one that the range was planned for."""
    planned, behind, others = range.incarnation.partition(" behind ")
    if planned:
        check_incarnation(range, f"{log_table(session).id}{behind}{others}")


def _server_ms(session: ScyllaSession) -> int:
    """Returns the cluster's own time: a local clock that is ahead would miss changes."""
    ((now,),) = session.rows("SELECT toTimestamp(now()) FROM system.local")
    return int(now.replace(tzinfo=UTC).timestamp() * 1000)


def _reopen(url: str) -> ScyllaSource:
    """Opens the source in another process, with its login, to read what was planned elsewhere."""
    environ = os.environ  # noqa: TID251 - a worker reads its own environment
    clock = SystemClock()
    place, way = parse_scylla(parse_address(url), environ, clock.now_ms())
    return ScyllaSource(place, way, clock=clock)


_source: type[Source] = ScyllaSource
_probing: type[ProbingSource] = ScyllaSource
_timed: type[TimedSource] = ScyllaSource
_completing: type[CompletingSource] = ScyllaSource
_with_rows: type[RowSource] = ScyllaSource


_RANGES_MAX = 500  # of other pipelines in one range of a sweep


@dataclass(frozen=True, slots=True)
class ReadByAll:
    """What all of the pipelines have read of a source partition: ``[first, end)``."""

    first: ChangePosition
    end: ChangePosition


@dataclass
class SweptPipelines:
    """The pipelines that a sweep follows."""

    open_context: OpenContext
    place: ScyllaAddress
    way: ScyllaOptions
    _reached: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)

    def incarnation(self) -> str:
        """Returns an id of the pipelines; it changes if one is created again."""
        with self.open_context() as context:
            return "+".join(each.incarnation for each in self._pipelines(context))

    def passed(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, ReadByAll]:
        """Returns how far they are. Omits partitions that one of them has not begun."""
        found: dict[SourcePartition, ReadByAll] = {}
        with self.open_context() as context:
            pipelines = self._pipelines(context)
            for partition in partitions:
                each = [_read_by(context, one.incarnation, partition.text) for one in pipelines]
                whole = [one for one in each if one is not None]
                if len(whole) == len(pipelines):
                    first = max((one.first for one in whole), key=lambda place: place.order)
                    end = min((one.end for one in whole), key=lambda place: place.order)
                    found[partition] = ReadByAll(first, end)
        return found

    def before(self, range: SourceRange) -> tuple[tuple[CommittedRange, ...], str, int | None]:
        """Returns the ranges that they committed there, the store of their manifests, and a limit.

        The limit bounds the number of ranges; None: the range's own end.
        """
        start_ms, limit_ms = (
            ChangePosition.parse(range.start).time_ms,
            ChangePosition.parse(range.limit).time_ms,
        )
        found: list[CommittedRange] = []
        with self.open_context() as context:
            for each in self._pipelines(context):
                found += self._commits(context, each.incarnation, range, (start_ms, limit_ms))
            store = context.store.url
        found.sort(key=lambda before: before.end_ms)
        if len(found) <= _RANGES_MAX:
            return tuple(found), store, None
        until_ms = max(start_ms + 1, found[_RANGES_MAX].end_ms)
        return tuple(each for each in found if each.start_ms < until_ms), store, until_ms

    def _commits(
        self, context: Context, pipeline: str, range: SourceRange, times: tuple[int, int]
    ) -> Iterator[CommittedRange]:
        """Yields the commits of a pipeline in a time, if they have changes."""
        start_ms, limit_ms = times
        where = layout.pipeline_partition(pipeline, range.partition.text)
        known = pipeline, range.partition.text
        reached_ms, row = self._reached.get(known, (start_ms + 1, ""))  # by the last range
        if reached_ms > start_ms:
            row = self._row_at(context, where, start_ms)
        for each in context.catalog.scan(where, row, "commit0"):
            commit = _decode(each)
            begin, end = (
                ChangePosition.parse(commit.start).time_ms,
                ChangePosition.parse(commit.end).time_ms,
            )
            if begin >= limit_ms:
                return
            if begin <= start_ms:
                self._reached[known] = begin, each.row
            if end > start_ms and commit.events:
                yield CommittedRange(begin, end, commit.manifest)

    def _row_at(self, context: Context, where: str, time_ms: int) -> str:
        """Returns the row of the last commit that begins at or before a time."""
        for row in context.catalog.scan(where, "commit/", "commit0", reverse=True):
            if ChangePosition.parse(_decode(row).start).time_ms <= time_ms:
                return row.row
        return "commit/"

    def _pipelines(self, context: Context) -> list[NamedPipeline]:
        return [self._pipeline(context, name) for name in self.way.of]

    def _pipeline(self, context: Context, name: str) -> NamedPipeline:
        row = context.catalog.get(layout.REGISTRY, layout.pipeline_row(name))
        if row is None:
            raise NotFoundError(
                f"pipeline `{name}`: not found: a sweep goes behind one that is there"
            )
        found = decode_row(row.value, NamedPipeline, f"registry row `{row.row}`")
        if found.transform:
            raise InvalidError(
                f"pipeline `{name}`: has a transform, which hides what it has written: sweep "
                "behind a pipeline without one"
            )
        address = parse_address(found.source)
        if address.scheme == "scylla":
            place, way = parse_scylla(address, {}, 0)
            if place.label == self.place.label and way.groups == self.way.groups and way.remembers:
                return found
        raise InvalidError(
            f"pipeline `{name}`: reads `{found.source}`: a sweep of `{self.place.label}` in "
            f"{self.way.groups} groups goes behind one that reads the same table in as many, with "
            "mode=fast or mode=sweep"
        )


def _read_by(context: Context, pipeline: str, partition: str) -> ReadByAll | None:
    head = read_progress(context, pipeline, partition)
    if head is None:
        return None
    where = layout.pipeline_partition(pipeline, partition)
    oldest = next(iter(context.catalog.scan(where, "commit/", "commit0", 1)), None)
    first = head.position if oldest is None else _decode(oldest).start
    return ReadByAll(ChangePosition.parse(first).plain, ChangePosition.parse(head.position).plain)


def _decode(row: Row) -> Commit:
    return decode_row(row.value, Commit, f"commit `{row.row}`")
