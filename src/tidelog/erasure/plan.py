"""Counts what an erasure would delete, before a person confirms it. Changes no event.

**A topic.** Its events are looked up by id, or its keys are read. An archive of the topic holds
those that it has read: its positions show that, so its files are not searched. They are searched
for what the topic has trimmed, as a delete does.

**An archive without a topic.** Its files and those of its copies are searched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from tidelog.archive.coverage import are_offsets
from tidelog.archive.derived_archives import copies_of, partitions_of, reachable_archives_of
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import read_partitions, read_progress
from tidelog.erasure.search import matcher_of, search_generation
from tidelog.journal.lookup import Lookup, can_be_id, with_key
from tidelog.log.topics import read_head
from tidelog.model.archive import Archive
from tidelog.model.pipeline import Progress
from tidelog.model.topic import Topic

__all__ = ["ErasurePlan", "plan_archive_erasure", "plan_erasure"]


@dataclass(frozen=True, slots=True)
class ErasurePlan:
    """Which events an erasure would delete, as things are now."""

    partitions: Mapping[str, int] = field(default_factory=dict)  # events by partition: orders/0
    archives: Mapping[str, int] = field(default_factory=dict)  # events in files of each archive
    trimmed: int = 0  # of these events, those that only archives hold

    @property
    def events(self) -> int:
        """Returns how many events it would delete."""
        return sum(self.partitions.values())


def plan_erasure(
    context: Context,
    lookup: Lookup,
    ids: Collection[str],
    key: bytes | None,
    progress: Callable[[int], None],
) -> ErasurePlan:
    """Counts the events of a topic with one of these ids, or with a key, and their copies."""
    topic, sought = lookup.topic, matcher_of(ids, key)
    held = _held_by_topic(context, lookup, ids, key, progress)
    trimmed: set[tuple[str, int]] = set()
    archives: Counter[str] = Counter()
    for archive, generation in reachable_archives_of(context, topic):
        if archive.state_of(generation) != "live":
            continue
        pipeline = archive.pipeline(generation)
        own = partitions_of(context, pipeline, topic)
        starts: dict[str, int | None] = {
            name: read_head(context, topic, number)[0].start for name, number in own.items()
        }
        found = search_generation(context, archive, generation, starts, (sought, []))
        places = {(origin.partition, offset) for origin, offset in found}
        trimmed |= places
        heads = {name: read_progress(context, pipeline, name) for name in own}
        copied = sum(_has_read(heads.get(name), offset) for name, offset in held)
        archives[archive.name] += copied + len(places)
    partitions = Counter(name for name, _ in (*held, *trimmed))
    return ErasurePlan(dict(sorted(partitions.items())), _some(archives), len(trimmed))


def plan_archive_erasure(
    context: Context, archive: Archive, ids: Collection[str], key: bytes | None
) -> ErasurePlan:
    """Counts the events of an archive, and those of the archives that were made of it."""
    sought = matcher_of(ids, key)
    partitions: Counter[str] = Counter()
    archives: Counter[str] = Counter()
    for copy in copies_of(context, archive):
        known = read_partitions(context, copy.archive.pipeline())
        found = search_generation(
            context, copy.archive, copy.archive.generation, dict.fromkeys(known), (sought, [])
        )
        archives[copy.archive.name] += len(found)
        if copy.archive.name == archive.name:
            partitions.update(origin.partition for origin, _ in found)
    return ErasurePlan(dict(sorted(partitions.items())), _some(archives))


def _held_by_topic(
    context: Context,
    lookup: Lookup,
    ids: Collection[str],
    key: bytes | None,
    progress: Callable[[int], None],
) -> set[tuple[str, int]]:
    """Returns the partition and offset of each event that the topic has."""
    topic: Topic = lookup.topic
    if key is None:
        found = lookup.find([each for each in ids if can_be_id(each)])
        each_of = (event for events in found.events.values() for event in events)
        return {(f"{topic.name}/{event.partition}", event.offset) for event in each_of}
    held: set[tuple[str, int]] = set()
    for partition in range(topic.partitions):
        head, _ = read_head(context, topic, partition)
        some = with_key(context, topic, partition, key, (head.start, head.next), progress)
        held |= {(f"{topic.name}/{partition}", offset) for _, offset, _ in some}
    return held


def _has_read(head: Progress | None, offset: int) -> bool:
    """Returns whether a pipeline has read an offset; positions that are no offsets do not say."""
    if head is None or head.begin is None:
        return False
    if not are_offsets(head.begin.position, head.position):
        return True
    return int(head.begin.position) <= offset < int(head.position)


def _some(counts: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in sorted(counts.items()) if count}
