"""What other pipelines have read of a change log, for the sweep that goes behind them.

A fast reader passes windows before all of their changes have landed. A sweep reads the same windows
again, later, and adds what is not yet in the topic:

1. the fast reader commits a range; its manifest notes
   every change that it brought                            → dead: the next driver finishes it
2. a sweep plans a range that ends at the fast reader's
   committed position, or before                           → dead: the next driver plans it again
3. a task reads the windows again, and leaves out all that
   the manifests of those ranges note                      → dead: staged files that nothing names
4. the sweep's own cycle commits what is left, and its
   manifest notes it, for a sweep behind this one          → dead: the next driver finishes it

What the fast reader has committed up to a position never changes any more, and it never goes back
behind it: so a change is in what it noted, or it will never bring it. Both pipelines bring their
own ranges once. A change that lands even later is for a sweep behind this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tidelog.catalog.base import Row
from tidelog.errors import InvalidError, NotFoundError
from tidelog.log.archives import read_progress
from tidelog.log.base import Log, OpenLog
from tidelog.model import layout
from tidelog.model.address import parse_address
from tidelog.model.pipeline import Committed, NamedPipeline
from tidelog.model.run import decode_row
from tidelog.sources.base import Range, SourcePartition
from tidelog.sources.scylla_place import ScyllaPlace, ScyllaWay, parse_scylla
from tidelog.sources.scylla_position import Place
from tidelog.sources.scylla_read import Before

__all__ = ["Passed", "Swept"]

_RANGES_MAX = 500  # of other pipelines in one range of a sweep


@dataclass(frozen=True, slots=True)
class Passed:
    """What all of the pipelines have read of a source partition: ``[first, end)``."""

    first: Place
    end: Place


@dataclass
class Swept:
    """The pipelines that a sweep goes behind."""

    open_log: OpenLog
    place: ScyllaPlace
    way: ScyllaWay
    _reached: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)

    def incarnation(self) -> str:
        """Which pipelines they are; another when one was made anew."""
        with self.open_log() as log:
            return "+".join(each.incarnation for each in self._pipelines(log))

    def passed(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Passed]:
        """How far they have come; partitions that one of them has not begun are left out."""
        found: dict[SourcePartition, Passed] = {}
        with self.open_log() as log:
            pipelines = self._pipelines(log)
            for partition in partitions:
                each = [_passed(log, one.incarnation, partition.text) for one in pipelines]
                whole = [one for one in each if one is not None]
                if len(whole) == len(pipelines):
                    first = max((one.first for one in whole), key=lambda place: place.order)
                    end = min((one.end for one in whole), key=lambda place: place.order)
                    found[partition] = Passed(first, end)
        return found

    def before(self, range: Range) -> tuple[tuple[Before, ...], str, int | None]:
        """The ranges that they committed there, the store of their manifests, and how far.

        Not further than so many ranges reach; None: to the range's own end.
        """
        start_ms, limit_ms = Place.parse(range.start).time_ms, Place.parse(range.limit).time_ms
        found: list[Before] = []
        with self.open_log() as log:
            for each in self._pipelines(log):
                found += self._commits(log, each.incarnation, range, (start_ms, limit_ms))
            store = log.store.url
        found.sort(key=lambda before: before.end_ms)
        if len(found) <= _RANGES_MAX:
            return tuple(found), store, None
        until_ms = max(start_ms + 1, found[_RANGES_MAX].end_ms)
        return tuple(each for each in found if each.start_ms < until_ms), store, until_ms

    def _commits(
        self, log: Log, pipeline: str, range: Range, times: tuple[int, int]
    ) -> Iterator[Before]:
        """The commits of one that lie in a time and hold any change."""
        start_ms, limit_ms = times
        where = layout.pipeline_partition(pipeline, range.partition.text)
        known = pipeline, range.partition.text
        reached_ms, row = self._reached.get(known, (start_ms + 1, ""))  # by the last range
        if reached_ms > start_ms:
            row = self._row_at(log, where, start_ms)
        for each in log.catalog.scan(where, row, "commit0"):
            commit = _decode(each)
            begin, end = Place.parse(commit.start).time_ms, Place.parse(commit.end).time_ms
            if begin >= limit_ms:
                return
            if begin <= start_ms:
                self._reached[known] = begin, each.row
            if end > start_ms and commit.events:
                yield Before(begin, end, commit.manifest)

    def _row_at(self, log: Log, where: str, time_ms: int) -> str:
        """The row of the last commit that begins at a time or before."""
        for row in log.catalog.scan(where, "commit/", "commit0", reverse=True):
            if Place.parse(_decode(row).start).time_ms <= time_ms:
                return row.row
        return "commit/"

    def _pipelines(self, log: Log) -> list[NamedPipeline]:
        return [self._pipeline(log, name) for name in self.way.of]

    def _pipeline(self, log: Log, name: str) -> NamedPipeline:
        row = log.catalog.get(layout.REGISTRY, layout.pipeline_row(name))
        if row is None:
            raise NotFoundError(
                f"pipeline `{name}`: not found: a sweep goes behind one that is there"
            )
        found = decode_row(row.value, NamedPipeline, f"registry row `{row.row}`")
        if found.transform:
            raise InvalidError(
                f"pipeline `{name}`: has a transform, behind which nobody can tell what it has "
                "brought: sweep behind one without"
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


def _passed(log: Log, pipeline: str, partition: str) -> Passed | None:
    head = read_progress(log, pipeline, partition)
    if head is None:
        return None
    where = layout.pipeline_partition(pipeline, partition)
    oldest = next(iter(log.catalog.scan(where, "commit/", "commit0", 1)), None)
    first = head.position if oldest is None else _decode(oldest).start
    return Passed(Place.parse(first).plain, Place.parse(head.position).plain)


def _decode(row: Row) -> Committed:
    return decode_row(row.value, Committed, f"commit `{row.row}`")
