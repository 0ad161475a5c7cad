"""A source of several topics, of which more appear later, as with a pattern of Kafka topics.

An archive of it is run with ``--start latest`` only: what was there when it was created begins at
the ends that its creation saw, and what appears later begins at its first event.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from tidelog.log.base import OpenLog
from tidelog.log.topics import list_topics
from tidelog.sources.base import (
    Bounds,
    Chunk,
    Explaining,
    Missing,
    Range,
    RangeReader,
    Source,
    SourcePartition,
)
from tidelog.sources.topic import TopicSource

__all__ = ["ManyTopics"]


class ManyTopics:
    """All topics of a home whose names begin so."""

    def __init__(self, open_log: OpenLog, prefix: str) -> None:
        self._open_log = open_log
        self._prefix = prefix

    @property
    def url(self) -> str:
        return f"many:{self._prefix}"

    def partitions(self) -> list[SourcePartition]:
        with self._open_log() as log:
            names = [each.name for each in list_topics(log) if each.state == "ready"]
        topics = [self._topic(name) for name in sorted(names) if name.startswith(self._prefix)]
        return [each for topic in topics for each in topic.partitions()]

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        found: dict[SourcePartition, Bounds] = {}
        for topic, each in groupby(partitions, lambda partition: partition.topic):
            found |= self._topic(topic).bounds(list(each))
        return found

    def missing(self, range: Range, read: int) -> Missing:
        return self._topic(range.partition.topic).missing(range, read)

    def read(self, range: Range) -> Iterator[Chunk]:
        return self._topic(range.partition.topic).read(range)

    def reader(self, range: Range) -> RangeReader:
        return self._topic(range.partition.topic).reader(range)

    def cut(self, start: str, end: str, events: int) -> str:
        return self._topic("any").cut(start, end, events)

    def before(self, one: str, other: str) -> bool:
        return self._topic("any").before(one, other)

    def count(self, start: str, end: str) -> int | None:
        return self._topic("any").count(start, end)

    def _topic(self, name: str) -> TopicSource:
        return TopicSource(self._open_log, name)


_source: type[Source] = ManyTopics
_explaining: type[Explaining] = ManyTopics
