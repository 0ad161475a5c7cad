"""Sources that the product has no scheme for: several topics, and a backup with holes.

``ManyTopics`` are several topics, of which more appear later, as with a pattern of Kafka topics.

An archive of it is run with ``--start latest`` only: what was there when it was created begins at
the ends that its creation saw, and what appears later begins at its first event. ``HoledBackup`` is
a copy of what an archive holds of a topic, without every third event; so is a compacted topic.
``HoledFolder`` is the same as a folder of files: it does not know whether it ever had these events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import pyarrow as pa

from tidelog.connectors.files import source as files_source
from tidelog.connectors.source import (
    Bounds,
    Chunk,
    ExplainingSource,
    MissingOffsets,
    RangeReader,
    Source,
    SourcePartition,
    SourceRange,
    range_offsets,
)
from tidelog.connectors.topic.source import TopicSource
from tidelog.context import OpenContext
from tidelog.log.topics import list_topics

__all__ = ["HoledBackup", "HoledFolder", "ManyTopics", "is_hole"]


class ManyTopics:
    """All topics of a home whose names begin so."""

    def __init__(self, open_context: OpenContext, prefix: str) -> None:
        self._open_context = open_context
        self._prefix = prefix

    @property
    def url(self) -> str:
        return f"many:{self._prefix}"

    def partitions(self) -> list[SourcePartition]:
        with self._open_context() as context:
            names = [each.name for each in list_topics(context) if each.state == "ready"]
        topics = [self._topic(name) for name in sorted(names) if name.startswith(self._prefix)]
        return [each for topic in topics for each in topic.partitions()]

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        found: dict[SourcePartition, Bounds] = {}
        for topic, each in groupby(partitions, lambda partition: partition.topic):
            found |= self._topic(topic).bounds(list(each))
        return found

    def missing(self, range: SourceRange, read: int) -> MissingOffsets:
        return self._topic(range.partition.topic).missing(range, read)

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        return self._topic(range.partition.topic).read(range)

    def reader(self, range: SourceRange) -> RangeReader:
        return self._topic(range.partition.topic).reader(range)

    def cut(self, start: str, end: str, events: int) -> str:
        return self._topic("any").cut(start, end, events)

    def before(self, one: str, other: str) -> bool:
        return self._topic("any").before(one, other)

    def count(self, start: str, end: str) -> int | None:
        return self._topic("any").count(start, end)

    def _topic(self, name: str) -> TopicSource:
        return TopicSource(self._open_context, name)


class HoledBackup:
    """Topic ``t`` as far as it goes, without every third event: often further than an archive."""

    def __init__(self, open_context: OpenContext, archive: str) -> None:
        self._open_context = open_context
        self._archive = archive
        self._topic = TopicSource(open_context, "t")

    @property
    def url(self) -> str:
        return f"holed:{self._archive}"

    def partitions(self) -> list[SourcePartition]:
        return self._topic.partitions()

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        return self._topic.bounds(partitions)

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        return self.reader(range).read()

    def reader(self, range: SourceRange) -> RangeReader:
        return _Holed(self._topic.reader(range), self.lacks)

    def lacks(self, partition: SourcePartition, offset: int) -> bool:
        """Whether the event of an offset is missing."""
        return is_hole(offset)

    def cut(self, start: str, end: str, events: int) -> str:
        return self._topic.cut(start, end, events)

    def before(self, one: str, other: str) -> bool:
        return self._topic.before(one, other)

    def count(self, start: str, end: str) -> int | None:
        return self._topic.count(start, end)


class HoledFolder(HoledBackup):
    """The same as files of a folder, some of which are missing."""

    @property
    def url(self) -> str:
        return f"folder:{self._archive}"

    def missing(self, range: SourceRange, read: int) -> MissingOffsets:
        start, limit = range_offsets(range)
        found = [chunk.batch.column("offset").to_numpy() for chunk in self.read(range)]
        held = np.concatenate([*found, np.empty(0, np.int64)])
        lacking = files_source.holes_between(held, start, limit)
        return files_source.missing_in_files(range, lacking, limit - start - read)


@dataclass(frozen=True)
class _Holed:
    reader: RangeReader
    lacks: Callable[[SourcePartition, int], bool]

    @property
    def range(self) -> SourceRange:
        return self.reader.range

    def read(self) -> Iterator[Chunk]:
        for chunk in self.reader.read():
            offsets = chunk.batch.column("offset").to_pylist()
            kept = [not self.lacks(self.range.partition, offset) for offset in offsets]
            yield replace(chunk, batch=chunk.batch.filter(pa.array(kept, pa.bool_())))


def is_hole(offset: int) -> bool:
    """Whether a backup lacks the event of an offset."""
    return offset % 3 == 1


_source: type[Source] = ManyTopics
_holed: type[Source] = HoledBackup
_explaining: tuple[type[ExplainingSource], ...] = (ManyTopics, HoledFolder)
