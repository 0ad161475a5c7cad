"""Streaming reads, as Spark calls them.

Spark stores offsets in the checkpoint, and shows them in the progress of a query. For each topic
they have the next offset of each partition, and the topic's incarnation: a topic that was deleted
and created again is another one, and is refused. Spark asks for what comes next under a limit, then
plans that range. Planning it again gives the same result, unless events were trimmed meanwhile.

With ``failOnDataLoss=false`` a stream goes on where events were trimmed before it had read them.
The offsets record the latest gaps.

Spark asks a hundred times a second while nothing comes. A stream that has read everything looks at
the catalog once a second.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from tidelog.catalog.update import rounds
from tidelog.context import Context
from tidelog.errors import InternalError, InvalidError, NotFoundError
from tidelog.log.partition_reader import Reader, find_offset
from tidelog.model.times import moment_ms
from tidelog.model.topic import Head, Topic
from tidelog.spark.failures import one_line
from tidelog.spark.filters import ALL_TIMES, EventTimes
from tidelog.spark.options import ReadOptions
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
)

__all__ = ["Positions", "TidelogStreamReader", "TopicPosition", "shares"]

_logger = logging.getLogger("tidelog.spark")
_LOOK_S = 1.0  # between two looks at the catalog while nothing comes
_PLANS_MAX = 10  # of a batch whose events are trimmed meanwhile
_GAPS_MAX = 16  # of a topic; Spark writes them with every batch
_INCARNATION = "incarnation"
_GAPS = "gaps"

NamedPartition = tuple[str, int]
"""A topic's name and a partition."""

Gap = tuple[int, int, int]
"""A partition, and the offsets ``[start, end)`` that were trimmed unread."""


@dataclass(frozen=True, slots=True)
class TopicPosition:
    """Where a stream is in a topic."""

    incarnation: str
    next: tuple[int, ...]  # by partition
    gaps: tuple[Gap, ...] = ()

    def check(self, topic: Topic) -> None:
        """Raises ``InvalidError`` unless this is a position in the topic."""
        if self.incarnation != topic.incarnation or len(self.next) != topic.partitions:
            raise InvalidError(
                f"topic `{topic.name}`: was deleted and made again after the checkpoint was "
                "written: start a new query with a new checkpoint"
            )

    def to_json(self) -> dict[str, Any]:
        """Returns it for Spark, always in the same order: Spark compares offsets as text."""
        found: dict[str, Any] = {str(partition): at for partition, at in enumerate(self.next)}
        found[_INCARNATION] = self.incarnation
        if self.gaps:
            found[_GAPS] = [list(gap) for gap in self.gaps[-_GAPS_MAX:]]
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> TopicPosition:
        """Returns what :meth:`to_json` returned."""
        numbers = sorted(int(partition) for partition in found if partition.isdecimal())
        return cls(
            str(found.get(_INCARNATION)),
            tuple(int(found[str(number)]) for number in numbers),
            tuple((int(p), int(start), int(end)) for p, start, end in found.get(_GAPS, ())),
        )


Positions = dict[str, TopicPosition]
"""Where a stream is, by the names of its topics."""


@dataclass(frozen=True, slots=True)
class _Look:
    """The stream's topics at one moment."""

    topics: Mapping[str, Topic]
    heads: Mapping[NamedPartition, Head]
    at_s: float

    def ends(self) -> dict[NamedPartition, int]:
        return {place: head.next for place, head in self.heads.items()}


class TidelogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One per query on the driver, with an open home; pickled to executors without it."""

    def __init__(self, options: ReadOptions, wanted: pa.Schema) -> None:
        self._options = options
        self._wanted = wanted
        self._context: Context | None = None
        self._initial: dict[str, Any] | None = None
        self._until: dict[NamedPartition, int] | None = None  # where a run to "available now" ends
        self._look: _Look | None = None  # the last one
        self._reached: Positions = {}  # what Spark was last offered
        self._gaps: list[tuple[str, Gap]] = []  # that no offset has yet

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_context": None, "_look": None}

    @one_line()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Returns where a new query begins; Spark asks twice and gets the same answer."""
        if self._initial is None:
            self._initial = _to_json(self._find_initial())
        return self._initial

    @one_line()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Returns what comes next after ``start``: everything, or as much as the limit allows."""
        before = _from_json(start, self._options)
        if self._is_idle(before):
            return start
        look = self._look_now()
        before = self._without_lost(self._current(before, look), look)
        places = {
            (name, partition): at
            for name, found in sorted(before.items())
            for partition, at in enumerate(found.next)
        }
        ends = look.ends()
        if self._until is not None:
            ends = {place: self._until.get(place, at) for place, at in places.items()}
        _check_ahead(places, ends)
        reached = self._limited(look, places, ends, limit)
        self._reached = {
            name: replace(found, next=tuple(reached[name, p] for p in range(len(found.next))))
            for name, found in before.items()
        }
        return _to_json(self._reached)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.trigger_events is not None:
            return ReadMaxRows(self._options.trigger_events)
        if self._options.trigger_bytes is not None:
            return ReadMaxBytes(self._options.trigger_bytes)
        return ReadAllAvailable()

    @one_line()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Pins the ends: later events belong to the next run."""
        self._until = self._look_now().ends()

    @one_line()
    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Returns the topics' own ends and the lag, for the query's progress."""
        look = self._look or self._look_now()
        found: dict[str, Any] = {}
        for name, topic in sorted(look.topics.items()):
            ends = [look.heads[name, partition].next for partition in range(topic.partitions)]
            at = self._reached[name].next if name in self._reached else ends
            lags = [max(0, end - start) for start, end in zip(at, ends, strict=True)]
            found[name] = {
                **{str(partition): end for partition, end in enumerate(ends)},
                "lagEvents": sum(lags),
                "lagSeconds": self._lag_seconds(topic, at, lags),
            }
        return found

    @one_line()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Returns the tasks of one micro-batch. Raises ``NotFoundError`` if events were trimmed."""
        first, last = _from_json(start, self._options), _from_json(end, self._options)
        look = self._look or self._look_now()
        tasks: list[InputPartition] = []
        for name, wanted in sorted(last.items()):
            topic = look.topics.get(name)
            if topic is None:
                raise NotFoundError(
                    f"topic `{name}`: was deleted after Spark had planned to read it: start a new "
                    "query with a new checkpoint"
                )
            wanted.check(topic)
            tasks += self._tasks(topic, first.get(name), wanted)
        return tasks

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

    def _opened(self) -> Context:
        if self._context is None:
            self._context = open_shared(self._options.home)
        return self._context

    def _look_now(self) -> _Look:
        context = self._opened()
        at_s = context.clock.monotonic_s()
        topics = {topic.name: topic for topic in find_topics(context, self._options)}
        heads = {
            (name, partition): head
            for name, topic in topics.items()
            for partition, head in enumerate(Planner(context, topic).heads())
        }
        self._look = _Look(topics, heads, at_s)
        return self._look

    def _is_idle(self, before: Positions) -> bool:
        """Returns whether the last look is recent, and showed nothing after these positions."""
        if self._look is None or self._gaps:
            return False
        age_s = self._opened().clock.monotonic_s() - self._look.at_s
        at = {
            (name, partition): at
            for name, found in before.items()
            for partition, at in enumerate(found.next)
        }
        return 0 <= age_s < _LOOK_S and at == self._look.ends()

    def _find_initial(self) -> Positions:
        context, options = self._opened(), self._options
        look = self._look_now()
        check_offsets(list(look.topics.values()), options.start_offsets)
        found: Positions = {}
        for name, topic in look.topics.items():
            partitions = range(topic.partitions)
            if options.start_time is not None:
                moment = moment_ms(options.start_time, context.clock.now_ms())
                starts = [find_offset(context, topic, p, moment) for p in partitions]
            else:
                starts = [
                    range_of(topic, p, look.heads[name, p], options).start for p in partitions
                ]
            found[name] = TopicPosition(topic.incarnation, tuple(starts))
        return found

    def _current(self, before: Positions, look: _Look) -> Positions:
        """Returns the positions in the topics of now: of new ones, their start."""
        found: Positions = {}
        for name, topic in look.topics.items():
            if name in before:
                before[name].check(topic)
                found[name] = before[name]
            else:
                starts = (look.heads[name, p].start for p in range(topic.partitions))
                found[name] = TopicPosition(topic.incarnation, tuple(starts))
        for name in before.keys() - found.keys():
            if self._options.fail_on_loss:
                raise NotFoundError(
                    f"topic `{name}`: was deleted, and the stream may not have read all of it: set "
                    "option failOnDataLoss to false to continue without it"
                )
            _logger.warning("topic `%s`: was deleted: the stream continues without it", name)
        return found

    def _without_lost(self, before: Positions, look: _Look) -> Positions:
        """Returns the positions after what was trimmed. Raises if that is not allowed."""
        for name, found in before.items():
            for partition, at in enumerate(found.next):
                start = look.heads[name, partition].start
                if at < start:
                    self._lose(name, (partition, at, start), start)
        for name, gap in self._gaps:
            if name in before:
                found, (partition, _, end) = before[name], gap
                after = list(found.next)
                after[partition] = max(after[partition], end)
                before = {
                    **before,
                    name: replace(found, next=tuple(after), gaps=(*found.gaps, gap)),
                }
        self._gaps = []
        return before

    def _lose(self, name: str, gap: Gap, first: int) -> None:
        """Notes a gap. Raises ``NotFoundError`` unless the stream may have some."""
        partition, start, _ = gap
        what = f"partition `{name}/{partition}`: offset {start} was trimmed, the first is {first}"
        if self._options.fail_on_loss:
            raise NotFoundError(
                f"{what}: set option failOnDataLoss to false to continue from there, or start a "
                "new query with a new checkpoint",
                offset=start,
                start=first,
            )
        _logger.warning("%s: the stream continues from there", what)
        self._gaps.append((name, gap))

    def _limited(
        self,
        look: _Look,
        before: dict[NamedPartition, int],
        ends: dict[NamedPartition, int],
        limit: ReadLimit,
    ) -> dict[NamedPartition, int]:
        if isinstance(limit, ReadMaxRows):
            taken = shares([ends[place] - at for place, at in before.items()], limit.max_rows)
            return {
                place: at + count for (place, at), count in zip(before.items(), taken, strict=True)
            }
        if isinstance(limit, ReadMaxBytes):
            planners = {name: Planner(self._opened(), t) for name, t in look.topics.items()}
            return _ends_by_bytes(planners, before, ends, limit.max_bytes)
        if not isinstance(limit, ReadAllAvailable):
            raise InternalError(f"streaming read: Spark asks for {limit}, which was never offered")
        return {place: ends[place] for place in before}

    def _tasks(
        self, topic: Topic, begin: TopicPosition | None, wanted: TopicPosition
    ) -> list[ReadTask]:
        """Returns the tasks of one topic; plans again if events were trimmed meanwhile."""
        planner = Planner(self._opened(), topic)
        known = list(begin.next) if begin is not None else [0] * topic.partitions
        trimmed = NotFoundError(f"topic `{topic.name}`: is trimmed faster than it can be read")
        for _ in rounds(_PLANS_MAX, trimmed):
            starts = list(known)
            for partition, head in enumerate(planner.heads()):
                end = min(head.start, wanted.next[partition])
                if starts[partition] < end:
                    gap = (partition, starts[partition], end)
                    if begin is not None and not _covers(wanted.gaps, gap):
                        self._lose(topic.name, gap, head.start)
                    known[partition] = starts[partition] = end
            ranges = [
                OffsetRange(p, start, wanted.next[p])
                for p, start in enumerate(starts)
                if start < wanted.next[p]
            ]
            try:
                return planner.tasks(ranges, self._options, self._times())
            except NotFoundError as exc:
                if "start" not in exc.context:
                    raise
        raise trimmed

    def _times(self) -> EventTimes:
        """Returns the times that a stream is limited to. Its start is a position."""
        if self._options.end_time is None:
            return ALL_TIMES
        return EventTimes(None, moment_ms(self._options.end_time, 0))

    def _lag_seconds(
        self, topic: Topic, at: tuple[int, ...] | list[int], lags: list[int]
    ) -> float | None:
        """Returns the age of the first unread run of the partition that is furthest behind."""
        behind = max(range(len(lags)), key=lags.__getitem__)
        if not lags[behind]:
            return 0.0
        context = self._opened()
        try:
            runs = Reader(context, topic, behind).runs(at[behind])
        except NotFoundError:
            return None
        if not runs:
            return 0.0
        return max(0, context.clock.now_ms() - runs[0].first_ms) / 1000


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


def _to_json(positions: Positions) -> dict[str, Any]:
    return {name: positions[name].to_json() for name in sorted(positions)}


def _from_json(offset: Mapping[str, Any], options: ReadOptions) -> Positions:
    """Returns the positions of an offset, also of one from before topics were named in it."""
    if isinstance(offset.get(_INCARNATION), str):
        return {options.topics[0]: TopicPosition.from_json(offset)}
    return {name: TopicPosition.from_json(found) for name, found in offset.items()}


def _covers(gaps: tuple[Gap, ...], wanted: Gap) -> bool:
    return any(p == wanted[0] and s <= wanted[1] and wanted[2] <= e for p, s, e in gaps)


def _check_ahead(before: dict[NamedPartition, int], ends: dict[NamedPartition, int]) -> None:
    for (name, partition), at in before.items():
        end = ends[name, partition]
        if at > end:
            raise InvalidError(
                f"partition `{name}/{partition}`: the checkpoint has read up to offset {at}, "
                f"but it ends at {end}: the catalog is older than the checkpoint, restore it"
            )


def _ends_by_bytes(
    planners: Mapping[str, Planner],
    before: dict[NamedPartition, int],
    ends: dict[NamedPartition, int],
    most: int,
) -> dict[NamedPartition, int]:
    """Returns ends of whole runs, always of the partition with the least so far; at least one."""
    reached = dict(before)
    todo: list[tuple[int, NamedPartition, Iterator[OffsetSlice]]] = [
        (0, place, planners[place[0]].slices(OffsetRange(place[1], at, ends[place]), ALL_TIMES))
        for place, at in before.items()
        if at < ends[place]
    ]
    heapq.heapify(todo)
    total = 0
    while todo:
        size, place, slices = heapq.heappop(todo)
        piece = next(slices, None)
        if piece is None:
            continue
        if total and total + piece.size > most:
            return reached
        total += piece.size
        reached[place] = piece.end
        heapq.heappush(todo, (size + piece.size, place, slices))
    return reached
