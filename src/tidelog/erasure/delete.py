"""Deletes events, and counts before that what an erasure would delete.

**Plans** change no event: a person confirms the counts. For a topic, its events are looked up by
id, or its keys are read. An archive of the topic holds those that it has read: its positions show
that, so its files are not searched. They are searched for what the topic has trimmed, as a delete
does. For an archive without a topic, its files and those of its copies are searched. A search of
files that meets a rewrite that died finishes it.

**Deletes** remove events from a topic, and from archives and objects that alone still hold them.
A delete first amends the topic: no reader that starts later sees the events (``journal.amend``). It
then searches the topic's archives for what the topic has trimmed (``erasure.delete_archived``).
``delete_strays`` also finds what only objects hold that no row names. Maintenance removes the bytes
later; ``maintenance.erase`` does so at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tidelog.archive.coverage import are_offsets
from tidelog.archive.derived_archives import Origin, copies_of, partitions_of, reachable_archives_of
from tidelog.context import Context
from tidelog.coordination.outcome import SentWrites
from tidelog.coordination.pipeline_rows import read_partitions, read_progress
from tidelog.erasure.delete_archived import (
    DELETE_AGAIN,
    TopicPlaces,
    delete_trimmed,
    record_deletes,
)
from tidelog.erasure.event_search import FileSearch, matcher_of, search_generation, search_strays
from tidelog.erasure.proof_scope import TopicScope
from tidelog.erasure.redaction import redact_reasons
from tidelog.journal.amend import Amender, AmendResult
from tidelog.journal.lookup import Lookup, can_be_id, with_key
from tidelog.log.topics import read_head, read_starts
from tidelog.model.archive import Archive
from tidelog.model.pipeline import Progress
from tidelog.model.topic import Topic

__all__ = [
    "DeleteResult",
    "ErasurePlan",
    "delete_events",
    "delete_key",
    "delete_strays",
    "plan_archive_erasure",
    "plan_erasure",
]


@dataclass(frozen=True, slots=True)
class ErasurePlan:
    """Which events an erasure would delete, as things are now."""

    partitions: Mapping[str, int] = field(default_factory=dict)  # events by partition: orders/0
    archives: Mapping[str, int] = field(default_factory=dict)  # events in files of each archive
    trimmed: int = 0  # of these events, those that only archives hold
    missing: tuple[str, ...] = ()  # ids that no event has

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
    *,
    archives: bool = True,
) -> ErasurePlan:
    """Counts the events of a topic with one of these ids, or with a key, and their copies."""
    topic, sought = lookup.topic, matcher_of(ids, key)
    held, there = _held_by_topic(context, lookup, ids, key, progress)
    trimmed: set[tuple[str, int]] = set()
    archived: Counter[str] = Counter()
    for archive, generation in reachable_archives_of(context, topic) if archives else ():
        if archive.state_of(generation) != "live":
            continue
        pipeline = archive.pipeline(generation)
        own = partitions_of(context, pipeline, topic)
        starts: dict[str, int | None] = {
            name: read_head(context, topic, number)[0].start for name, number in own.items()
        }
        found = search_generation(context, archive, generation, starts, FileSearch(sought))
        places = {(origin.partition, offset) for origin, offset in found}
        trimmed |= places
        there |= {each.id for each in found.values()}
        heads = {name: read_progress(context, pipeline, name) for name in own}
        copied = sum(_has_read(heads.get(name), offset) for name, offset in held)
        archived[archive.name] += copied + len(places)
    partitions = Counter(name for name, _ in (*held, *trimmed))
    missing = tuple(each for each in dict.fromkeys(ids) if each not in there)
    return ErasurePlan(dict(sorted(partitions.items())), _some(archived), len(trimmed), missing)


def plan_archive_erasure(
    context: Context, archive: Archive, ids: Collection[str], key: bytes | None
) -> ErasurePlan:
    """Counts the events of an archive, and those of the archives that were made of it."""
    sought = matcher_of(ids, key)
    partitions: Counter[str] = Counter()
    archives: Counter[str] = Counter()
    there: set[str | None] = set()
    for copy in copies_of(context, archive):
        known = read_partitions(context, copy.archive.pipeline())
        found = search_generation(
            context, copy.archive, copy.archive.generation, dict.fromkeys(known), FileSearch(sought)
        )
        archives[copy.archive.name] += len(found)
        there |= {each.id for each in found.values()}
        if copy.archive.name == archive.name:
            partitions.update(origin.partition for origin, _ in found)
    missing = tuple(each for each in dict.fromkeys(ids) if each not in there)
    return ErasurePlan(dict(sorted(partitions.items())), _some(archives), missing=missing)


def _held_by_topic(
    context: Context,
    lookup: Lookup,
    ids: Collection[str],
    key: bytes | None,
    progress: Callable[[int], None],
) -> tuple[set[tuple[str, int]], set[str | None]]:
    """Returns the partition and offset of each event that the topic has, and which ids it has."""
    topic: Topic = lookup.topic
    if key is None:
        found = lookup.find([each for each in ids if can_be_id(each)])
        each_of = (event for events in found.events.values() for event in events)
        places = {(f"{topic.name}/{event.partition}", event.offset) for event in each_of}
        return places, {each for each, events in found.events.items() if events}
    held: set[tuple[str, int]] = set()
    for partition in range(topic.partitions):
        head, _ = read_head(context, topic, partition)
        some = with_key(context, topic, partition, key, (head.start, head.next), progress)
        held |= {(f"{topic.name}/{partition}", offset) for _, offset, _ in some}
    return held, set()


def _has_read(head: Progress | None, offset: int) -> bool:
    """Returns whether a pipeline has read an offset; positions that are no offsets do not say."""
    if head is None or head.begin is None:
        return False
    if not are_offsets(head.begin.position, head.position):
        return True
    return int(head.begin.position) <= offset < int(head.position)


def _some(counts: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in sorted(counts.items()) if count}


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """What a delete found, in the topic and in its archives."""

    events: int = 0  # of the topic
    archived: int = 0  # that only archives held
    strays: int = 0  # that objects held which no row names, and which a recovery would append
    missing: tuple[str, ...] = ()  # ids without any event
    unseen: tuple[str, ...] = ()  # files of archives without ids or keys to search for

    @property
    def found(self) -> int:
        """Returns how many events were deleted, wherever they were."""
        return self.events + self.archived + self.strays

    @property
    def is_clean(self) -> bool:
        """Returns whether everything that was given was found, and every file could be searched."""
        return bool(self.found) and not self.missing and not self.unseen


def delete_events(context: Context, amender: Amender, ids: Collection[str]) -> DeleteResult:
    """Permanently deletes all events with one of these ids, also those that only archives hold.

    Ids that no topic accepts, such as an empty one, are searched in archives, whose dead letters
    may have them.
    """
    topic = amender.topic
    sought = matcher_of(ids, None)  # raises for what nothing can hold before anything is deleted
    wanted = [each for each in ids if can_be_id(each)]
    odd = tuple(each for each in ids if not can_be_id(each))
    amended = AmendResult(missing=odd)
    if wanted:
        held = amender.delete(wanted)
        amended = AmendResult(held.events, (*held.missing, *odd))
    events = amended.events
    with _after(topic.name, amended) as sent:
        trimmed = delete_trimmed(context, topic, amender.why, ids)
        sent.any |= bool(trimmed.events)
        if trimmed.found and wanted:  # a restore may have copied them before the ledger had them
            events += amender.delete(wanted).events
        redact_reasons(context, TopicScope(context, topic).owners(), sought.deletions)
    missing = tuple(each for each in amended.missing if each not in trimmed.ids)
    return DeleteResult(events, trimmed.events, missing=missing, unseen=trimmed.unseen)


def delete_key(
    context: Context,
    amender: Amender,
    key: bytes,
    progress: Callable[[int], None] = lambda done: None,
) -> DeleteResult:
    """Permanently deletes all events with this key, also those that only archives hold."""
    topic = amender.topic
    amended = amender.delete_key(key, progress)
    events = amended.events
    with _after(topic.name, amended) as sent:
        trimmed = delete_trimmed(context, topic, amender.why, key=key)
        sent.any |= bool(trimmed.events)
        if trimmed.found:  # as above
            events += amender.delete_key(key, progress).events
        sought = matcher_of((), key)
        redact_reasons(context, TopicScope(context, topic).owners(), sought.deletions)
    return DeleteResult(events, trimmed.events, unseen=trimmed.unseen)


@contextmanager
def _after(topic: str, amended: AmendResult) -> Iterator[SentWrites]:
    """Runs what follows a delete in the topic; its errors never say that nothing was stored."""
    sent = SentWrites()
    sent.any = bool(amended.events)
    with sent.unknown_if_any(f"delete in `{topic}`", DELETE_AGAIN):
        yield sent


def delete_strays(
    context: Context,
    amender: Amender,
    deleted: DeleteResult,
    ids: Collection[str],
    keys: Collection[bytes],
) -> DeleteResult:
    """Deletes what only objects hold that no row names, under ids or keys that were deleted.

    A delete looks at the topic and its archives. A restored catalog has lost the events that were
    appended since its copy, and a producer that died has left what it did not commit. So a recovery
    would append such an event after it was deleted. The ledger keeps it from that; the recovery or
    a sweep deletes the object. Returns ``deleted`` with what was found.
    """
    topic, found_ids, strays, events = amender.topic, set[str](), 0, deleted.events
    searches: list[tuple[Collection[str], bytes | None]] = [((), each) for each in keys]
    if ids:
        searches.append((ids, None))
    sent = SentWrites()
    with sent.unknown_if_any(f"delete in `{topic.name}`", DELETE_AGAIN):
        for some, key in searches:
            found = search_strays(context, topic, matcher_of(some, key))
            for partition, here in found.items():
                origin = Origin(f"{topic.name}/{partition}", topic.incarnation)
                places = {(origin, offset): each for offset, each in here.items()}
                at = TopicPlaces({origin: partition}, tuple(read_starts(context, topic).values()))
                record_deletes(sent.tracked(context), topic, amender.why, places, at, key)
                strays += len(here)
                found_ids |= {each.id for each in here.values() if each.id is not None}
            if any(found.values()):  # a recovery may have appended them before the ledger had them
                events += _delete_again(amender, found_ids & set(some), key)
    missing = tuple(each for each in deleted.missing if each not in found_ids)
    return replace(deleted, events=events, strays=strays, missing=missing)


def _delete_again(amender: Amender, ids: Collection[str], key: bytes | None) -> int:
    if key is not None:
        return amender.delete_key(key, lambda _: None).events
    return amender.delete([each for each in ids if can_be_id(each)]).events
