"""Who still needs events of a topic: what a trim or a delete would take from its readers.

Readers are those that the catalog knows: consumers by their cursors, archives and pumps by their
committed positions, and named playbacks that have not finished. A consumer, an archive or a pump
that has not begun a partition needs all of it. What reads by offsets that it keeps itself, such as
a Spark stream or a client of the server, is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from tidelog.errors import InvalidError
from tidelog.log.archives import read_progress
from tidelog.log.base import Log
from tidelog.log.lag import consumer_names
from tidelog.log.lease import read_lease
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.address import parse_address
from tidelog.model.archive import Archive
from tidelog.model.pipeline import NamedPipeline
from tidelog.model.playback import Pinned, PlaybackState
from tidelog.model.run import Head, decode_row
from tidelog.model.topic import Topic

__all__ = ["Behind", "DeletedTopic", "check_all_read", "check_readers", "readers_behind"]

_NAMED = 5  # readers that an error names; the others are counted


@dataclass(frozen=True, slots=True)
class Behind:
    """A reader that has not read all that a trim or a delete of the topic would delete."""

    reader: str  # such as: consumer `billing`
    partition: int
    position: int  # the first offset that it still needs
    start: int  # where the partition would start


def check_readers(log: Log, topic: Topic, starts: Mapping[int, int]) -> None:
    """Refuse a trim that passes a reader. ``InvalidError`` that names readers and positions."""
    _refuse(f"trim of `{topic.name}`", readers_behind(log, topic, starts), "trim")


def check_all_read(log: Log, topic: Topic) -> None:
    """Refuse to delete a topic that a reader has not read to its end. ``InvalidError``."""
    ends = {each: read_head(log, topic, each)[0].next for each in range(topic.partitions)}
    _refuse(f"delete of topic `{topic.name}`", readers_behind(log, topic, ends), "delete it")


@dataclass(frozen=True, slots=True)
class DeletedTopic:
    """A topic that was deleted: its closed heads stay, and say where its partitions ended."""

    incarnation: str
    ends: tuple[int, ...]  # by partition

    @classmethod
    def read(cls, log: Log, incarnation: str) -> DeletedTopic | None:
        """What is left of an incarnation; None while its topic is not deleted."""
        ends: list[int] = []
        while True:
            where = layout.topic_partition(incarnation, len(ends))
            row = log.catalog.get(where, "head")
            head = None if row is None else decode_row(row.value, Head, f"head of `{where}`")
            if head is None or not head.closed:
                return cls(incarnation, tuple(ends)) if ends else None
            ends.append(head.next)

    @classmethod
    def named(cls, log: Log, name: str) -> DeletedTopic | None:
        """The only deleted topic of a name; None where there are none or several."""
        rows = log.catalog.scan(layout.REGISTRY, layout.deleted_row(""), "deleted0")
        found = [row.row for row in rows if row.value == name.encode()]
        if len(found) != 1:
            return None
        return cls.read(log, found[0].removeprefix(layout.deleted_row("")))

    def unread(self, partition: int, position: str) -> int:
        """How many offsets of a partition come after what a reader has read."""
        end = self.ends[partition] if partition < len(self.ends) else 0
        return max(0, end - (int(position) if position.isdecimal() else 0))


def _refuse(what: str, behind: list[Behind], again: str) -> None:
    if not behind:
        return
    parts = []
    for reader, same in groupby(behind, key=lambda each: each.reader):
        places = [f"{each.partition}:{each.position}" for each in same]
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        parts.append(f"{reader} at {', '.join(places[:3])}{more}")
    named = "; ".join(parts[:_NAMED])
    if len(parts) > _NAMED:
        named += f"; and {len(parts) - _NAMED} more"
    raise InvalidError(
        f"{what}: would delete events that have not been read, by partition and "
        f"offset: {named}: let them read on, or {again} with --past-readers",
        readers=[
            {"reader": each.reader, "partition": each.partition, "position": each.position}
            for each in behind
        ],
    )


def readers_behind(log: Log, topic: Topic, starts: Mapping[int, int]) -> list[Behind]:
    """The readers that need an offset below where a partition would start, by reader."""
    raised = {}
    for partition, start in starts.items():
        head, _ = read_head(log, topic, partition)
        if start > head.start:
            raised[partition] = start
    if not raised:
        return []
    found = [
        Behind(reader, partition, position, raised[partition])
        for reader, partition, position in _needs(log, topic, sorted(raised))
        if position < raised[partition]
    ]
    return sorted(found, key=lambda each: (each.reader, each.partition))


_Need = tuple[str, int, int]  # a reader, a partition, and the first offset that it needs there


def _needs(log: Log, topic: Topic, partitions: list[int]) -> Iterator[_Need]:
    for name in consumer_names(log, topic):
        for partition in partitions:
            found = read_lease(log, topic, name, partition)
            yield f"consumer `{name}`", partition, found[0].cursor if found else 0
    for reader, pipeline in _pipelines(log, topic.name):
        for partition in partitions:
            position = _position(log, pipeline, topic, partition)
            if position is not None:
                yield reader, partition, position
    yield from _playbacks(log, topic, partitions)


def _pipelines(log: Log, topic: str) -> Iterator[tuple[str, str]]:
    """The archives and pumps that read a topic, and the incarnation of each one's pipelines."""
    for row in log.catalog.scan(layout.REGISTRY, layout.archive_row(""), "archive0"):
        archive = decode_row(row.value, Archive, f"registry row `{row.row}`")
        if archive.state == "ready" and _reads(archive.source, topic):
            for generation in archive.in_state("live", "building"):
                what = f"archive `{archive.name}`"
                if generation != archive.generation:
                    what += f" (generation {generation})"
                yield what, archive.pipeline(generation)
    for row in log.catalog.scan(layout.REGISTRY, layout.pipeline_row(""), "pipeline0"):
        named = decode_row(row.value, NamedPipeline, f"registry row `{row.row}`")
        if named.state == "ready" and _reads(named.source, topic):
            yield f"pump `{named.name}`", named.incarnation


def _reads(source: str, topic: str) -> bool:
    address = parse_address(source)
    return address.scheme == "topic" and address.path == topic


def _position(log: Log, pipeline: str, topic: Topic, partition: int) -> int | None:
    """The first offset that a pipeline needs; None for one that has retired."""
    progress = read_progress(log, pipeline, f"{topic.name}/{partition}")
    if progress is None or progress.incarnation not in ("", topic.incarnation):
        return 0  # it has not begun this topic
    if progress.closed:
        return None
    return int(progress.position) if progress.position.isdecimal() else 0


def _playbacks(log: Log, topic: Topic, partitions: list[int]) -> Iterator[_Need]:
    for row in log.catalog.scan(layout.REGISTRY, layout.playback_row(""), "playback0"):
        name = row.value.decode()
        where = layout.playback_partition(name)
        pin_row = log.catalog.get(where, layout.PLAYBACK_PIN)
        if pin_row is None:
            continue
        pin = decode_row(pin_row.value, Pinned, f"playback `{name}`").pin
        state_row = log.catalog.get(where, layout.PLAYBACK_STATE)
        state = PlaybackState()
        if state_row is not None:
            state = decode_row(state_row.value, PlaybackState, f"playback `{name}`")
        if state.finished_ms or pin.incarnation != topic.incarnation:
            continue
        reached_ms = state.cursor.time_ms if state.cursor else pin.range.start_ms
        for partition in partitions:
            needed = pin.floors[partition].needed(reached_ms)
            if needed is not None:
                yield f"playback `{name}`", partition, needed
