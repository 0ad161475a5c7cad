"""Erases events that archives still hold and their topic does not: trimmed, or deleted.

For an existing topic there are four steps. The scribe finishes them after a crash:

1. search the files of its archives for the ids or the key, below the
   topic's start; not while a range with trimmed events is under way  → crash: nothing
2. put an audit record with the places, as ``begun``: now it is decided → crash: resume at 3
3. put ids and key into the ledger, and raise ``erasures`` in the heads → crash: resume at 3
4. mark the record as ``done``                                        → crash: nothing is missing

A restore may bring the events back into the topic between a delete's look at the topic and step 3.
So a delete that found events here looks at the topic again after step 3, and deletes what came.

A driver may bring more such events between steps 1 and 2. So after the record an erasure looks
again: it lists the generations, waits for their ranges under way, and searches. It records what is
new, and looks again until it finds nothing new (``_record_all``). Ranges that begin after a record
leave out what it names. A delete looks again only at generations that are being built from a source
outside of the home, since what other ones read is in the topic or in files that it has searched.

From step 2 on these places count as deleted (``archive.erased_events``), so ``delete --prove`` and
the scribe rewrite the archives' files without them, as after any delete. A call may skip what
another call's record already deletes. It completes that record first (``settled_offsets``), because
the other call may be between steps 2 and 3, or dead there.

An archive whose topic is deleted, or whose source is another system, has no ledger. Its own audit
(``audit/<archive>``) has the record, step 3 rewrites its files and those of its copies, and step 4
follows once no unfinished range may hold one of the events. The record has the incarnation of each
source partition: a copy of another incarnation keeps what is at these offsets. No file of a range
under way can be searched yet, and it may hold what its source has deleted since: the look after the
record waits for such ranges, and the result names those that take too long. A look searches only
the files that no earlier one has searched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from tidelog.archive.derived_archives import (
    UNKNOWN_ORIGIN,
    Copy,
    Origin,
    archives_of,
    copies_of,
    held_offsets,
    is_of_topic,
    partitions_of,
    reachable_archives_of,
    with_later_ones,
)
from tidelog.archive.erased_events import PartitionOffsets, deleted_offsets, deletion_records
from tidelog.context import Context
from tidelog.coordination.audit import (
    HASH_BYTES,
    RECORD_BYTES_MAX,
    AuditedEvent,
    AuditedSource,
    AuditRecord,
    Why,
    id_hash,
    key_digest,
    key_hash,
    put_record,
    read_audit,
    read_records,
)
from tidelog.coordination.outcome import SentWrites
from tidelog.coordination.pipeline_rows import read_partitions
from tidelog.coordination.trusted_time import latest_now_ms
from tidelog.erasure.event_search import (
    SEARCHED_STATES,
    ArchiveSearch,
    FileSearch,
    FoundEvent,
    SourceOffset,
    check_trimmed,
    matcher_of,
    search_aside,
    search_generation,
)
from tidelog.erasure.matcher import EventMatcher
from tidelog.erasure.metadata_objects import files_named_by_events
from tidelog.erasure.redaction import redact_reasons, remove_quotes
from tidelog.erasure.rewrite import ArchiveErasure, erase_aside, erase_from_archive
from tidelog.erasure.topic_copies import (
    IN_HOME,
    copies_of_archives,
    original_archives,
    other_sources,
)
from tidelog.erasure.unfinished_ranges import still_under_way
from tidelog.errors import NotFoundError, UnavailableError, raise_first
from tidelog.log.ledger import ErasedIds, announce_erasure, enter_erased
from tidelog.log.topics import read_head, read_starts
from tidelog.model.address import parse_address
from tidelog.model.archive import Archive
from tidelog.model.topic import Topic

__all__ = [
    "DELETE_AGAIN",
    "ErasedFromArchives",
    "TopicPlaces",
    "closed_offsets",
    "complete_erasures",
    "delete_trimmed",
    "erase_archived",
    "finish_archive",
    "keep_deletions",
    "record_deletes",
    "settled_offsets",
]

_PLACE_BYTES = 24  # of an event in a record, besides its id
DELETE_AGAIN = "delete again, which completes it"


@dataclass(frozen=True, slots=True)
class ErasedFromArchives:
    """What was found in archives and is erased there."""

    events: int = 0
    ids: frozenset[str] = frozenset()  # of everything that was found
    found: int = 0  # including what was deleted before, which another call may just have decided
    unseen: tuple[str, ...] = ()  # files without ids or keys to search for
    archives: tuple[ArchiveErasure, ...] = ()  # files that were already rewritten
    # Archives that still hold them, because the erased archive was made of these, or may hold them
    # in a range that was not finished.
    left: tuple[str, ...] = ()
    out_of_reach: tuple[str, ...] = ()  # sources and copies that were not searched
    named: tuple[str, ...] = ()  # empty files in folders that erased events gave their names
    is_waiting: bool = False  # whether a range was not finished that may hold such events

    @property
    def is_clean(self) -> bool:
        """Returns whether something was found, and nothing of it is left in an archive."""
        is_left = self.unseen or self.left or self.named or self.is_waiting
        return bool(self.found) and not is_left


class TopicPlaces(NamedTuple):
    """The partitions of a topic that events were found in."""

    numbers: Mapping[Origin, int]
    starts: tuple[int, ...] = ()  # by number: below these offsets, archives were searched


def delete_trimmed(
    context: Context, topic: Topic, why: Why, ids: Collection[str] = (), key: bytes | None = None
) -> ErasedFromArchives:
    """Deletes what archives of a topic hold under ids or a key, and the topic has trimmed.

    The next ``purge`` or turn of the scribe deletes the bytes from the files. Safe to repeat.
    """
    sought = matcher_of(ids, key)
    first = reachable_archives_of(context, topic)
    looked = _search_trimmed(context, topic, first, sought)
    found, numbers = looked.found, looked.numbers
    # Also if nothing is found: another call may have erased it.
    new = looked.without(settled_offsets(context, topic))
    search = FileSearch(sought)
    for archive in {each.name: each for each, _ in first}.values():
        of_topic = partial(is_of_topic, topic=topic)
        aside = search_aside(context, archive, search, len(found), of_topic)
        found, new = found | aside, new | aside
        numbers = dict.fromkeys((origin for origin, _ in aside), 0) | numbers
    sent, places = SentWrites(), looked.places(numbers)

    def look_again() -> _Found:
        nonlocal places
        built = _built_from_outside(context, topic, first)
        if not built:
            return {}
        _wait_for_ranges(context, built)
        later = _search_trimmed(context, topic, built, sought)
        places = later.places()
        found.update(later.found)
        return later.without(settled_offsets(context, topic))

    def record(events: _Found) -> None:
        record_deletes(sent.tracked(context), topic, why, events, places, key)

    with sent.unknown_if_any(f"delete in `{topic.name}`", DELETE_AGAIN):
        new = _record_all(new, look_again, record)
    found_ids = frozenset(each.id for each in found.values() if each.id is not None)
    return ErasedFromArchives(len(new), found_ids, len(found), tuple(looked.unseen))


_Found = Mapping[SourceOffset, FoundEvent]


def _record_all(
    first: _Found, look_again: Callable[[], _Found], record: Callable[[_Found], None]
) -> dict[SourceOffset, FoundEvent]:
    """Records events, and looks again until nothing new is found. Returns all that it recorded.

    A range reads the records after it has put its intent. So one that sees no record began before
    it, and the look after the record waits for that range, or finds what it committed.
    """
    record(first)
    recorded = dict(first)
    while new := look_again():
        record(new)
        recorded |= new
    return recorded


class _Trimmed(NamedTuple):
    """What generations hold of trimmed events, and below which offsets of the topic."""

    found: dict[SourceOffset, FoundEvent]
    numbers: dict[Origin, int]
    starts: list[int]
    unseen: list[str]

    def without(self, known: PartitionOffsets) -> dict[SourceOffset, FoundEvent]:
        """Returns what was found and not deleted before."""
        return {
            place: each
            for place, each in self.found.items()
            if place[1] not in known.get(self.numbers[place[0]], ())
        }

    def places(self, numbers: Mapping[Origin, int] | None = None) -> TopicPlaces:
        return TopicPlaces(self.numbers if numbers is None else numbers, tuple(self.starts))


def _search_trimmed(
    context: Context,
    topic: Topic,
    generations: Iterable[tuple[Archive, int]],
    sought: EventMatcher,
) -> _Trimmed:
    """Step 1."""
    looked = _Trimmed({}, {}, [*read_starts(context, topic).values()], [])
    for archive, generation in generations:
        if archive.state_of(generation) == "removing":
            continue  # all of it is deleted
        own = partitions_of(context, archive.pipeline(generation), topic)
        starts = {name: read_head(context, topic, p)[0].start for name, p in own.items()}
        check_trimmed(context, archive, generation, starts)
        search = FileSearch(sought, looked.unseen)
        some = search_generation(context, archive, generation, starts, search)
        for (origin, offset), each in some.items():
            looked.found[Origin(origin.partition, topic.incarnation), offset] = each
        for name, partition in own.items():
            looked.numbers[Origin(name, topic.incarnation)] = partition
            looked.starts[partition] = max(looked.starts[partition], starts[name])
    return looked


def _built_from_outside(
    context: Context, topic: Topic, first: Iterable[tuple[Archive, int]]
) -> list[tuple[Archive, int]]:
    """Returns generations that may hold events which no archive had when ``first`` was listed.

    Their source is outside of the home, and each is being built, or was at that time.
    """
    complete = {
        (archive.incarnation, generation)
        for archive, generation in first
        if archive.state_of(generation) != "building"
    }
    return [
        (archive, generation)
        for archive, generation in reachable_archives_of(context, topic)
        if _is_from_outside(archive, generation)
        and (
            archive.state_of(generation) == "building"
            or (archive.incarnation, generation) not in complete
        )
    ]


def _is_from_outside(archive: Archive, generation: int) -> bool:
    source = archive.format_of(generation).source
    return bool(source) and parse_address(source).scheme not in IN_HOME


def _wait_for_ranges(context: Context, generations: Iterable[tuple[Archive, int]]) -> None:
    """Waits for ranges that began before the record, and may have read such events.

    Raises ``UnavailableError`` if that takes too long.
    """
    for archive, generation in generations:
        left = still_under_way(context, [archive.pipeline(generation)])
        for _, partition, start, _ in sorted(left):
            raise UnavailableError(
                f"archive `{archive.name}`: {partition} from {start} is being read into generation "
                f"{generation}, and may hold such events: try again after that. If no driver runs, "
                f"resume the backfill, or run `tidelog archive drop {archive.name} {generation}`"
            )


def record_deletes(
    context: Context,
    topic: Topic,
    why: Why,
    found: Mapping[SourceOffset, FoundEvent],
    places: TopicPlaces,
    key: bytes | None,
) -> None:
    """Steps 2 to 4 for events that were found under ids or a key."""
    hashed = "" if key is None else key_hash(key)
    for events, until_ms in _lots(found, places.numbers):
        record = _record(context, why, events, until_ms, hashed)
        record = msgspec.structs.replace(record, starts=places.starts)
        record, version = put_record(context, topic, record)  # step 2
        _enter(context, topic, record, version)


def settled_offsets(context: Context, topic: Topic) -> PartitionOffsets:
    """Returns every offset that was ever deleted, after steps 3 and 4 of all those records."""
    known = deleted_offsets(context, topic)
    complete_erasures(context, topic)  # after the read, so it covers everything that was read
    return known


def closed_offsets(context: Context, topic: Topic) -> PartitionOffsets:
    """Returns the same for a topic whose heads are closed, where it is final.

    No copy can bring an event back there, so heads need not say that the ledger has grown.
    """
    for record, _ in read_records(context, topic):
        if record.archived and record.state == "begun":
            _enter_ledger(context, topic, record)  # it erases files that were set aside
    return deleted_offsets(context, topic)


def keep_deletions(context: Context, topic: Topic) -> None:
    """Copies all deletes of a topic to the audits of its archives, before its audit is deleted.

    A generation that is built later skips these events (``ErasedBefore``). Safe to repeat: a record
    keeps its time and id.
    """
    archives = {each.incarnation: each for each, _ in archives_of(context, topic)}
    for record, events in deletion_records(context, topic) if archives else ():
        # Of events without an offset the partition is not known either.
        everywhere = record.starts or any(event.offset < 0 for event in events)
        every = range(topic.partitions) if everywhere else {event.partition for event in events}
        numbers = sorted(every)
        places = {number: place for place, number in enumerate(numbers)}
        kept = msgspec.structs.replace(
            record,
            events=tuple(AuditedEvent(e.id, places[e.partition], e.offset) for e in events),
            sources=tuple(AuditedSource(f"{topic.name}/{n}", topic.incarnation) for n in numbers),
            state="done",
            archived=False,  # of the topic, not of the archive itself
        )
        for archive in archives.values() if events else ():
            known = read_audit(context, archive, record.at_ms)
            if not any(each.id == record.id for each in known if each.at_ms == record.at_ms):
                with suppress(NotFoundError):  # another process was faster
                    put_record(context, archive, kept)


def complete_erasures(context: Context, topic: Topic) -> None:
    """Steps 3 and 4 of records that a process left unfinished."""
    for record, version in read_records(context, topic):
        if record.archived and record.state == "begun":
            _enter(context, topic, record, version)


def _enter(context: Context, topic: Topic, record: AuditRecord, version: str) -> None:
    """Steps 3 and 4."""
    _enter_ledger(context, topic, record)
    for partition in range(topic.partitions):
        announce_erasure(context, topic, partition)
    put_record(context, topic, msgspec.structs.replace(record, state="done"), version)


def _enter_ledger(context: Context, topic: Topic, record: AuditRecord) -> None:
    until = {key_digest(each.id): record.until_ms for each in record.events if each.id is not None}
    keys = {key_digest(record.key): record.until_ms} if record.key else {}
    enter_erased(context, topic, until, keys)


def erase_archived(
    context: Context,
    archive: Archive,
    why: Why,
    ids: Collection[str] = (),
    key: bytes | None = None,
) -> ErasedFromArchives:
    """Erases what an archive holds under ids or a key, from its files and from its copies.

    Archives that it was made of are searched, but keep the events. ``left`` names archives that
    still hold them, ranges of this archive that were under way for more than ten seconds, and
    copies with a range under way. ``named`` lists files whose folders have names from erased
    events. Raises ``InvalidError`` if such an event comes from an existing topic: delete it there.
    Safe to repeat and to kill: the scribe resumes.
    """
    finish_archive(context, archive)
    sought = matcher_of(ids, key)
    search = ArchiveSearch(context, archive, FileSearch(sought))
    hashed = "" if key is None else key_hash(key)
    sent = SentWrites()
    context = sent.tracked(context)

    def record(new: _Found) -> None:
        origins = sorted({origin for origin, _ in new})
        sources = tuple(AuditedSource(origin.partition, origin.incarnation) for origin in origins)
        numbers = {origin: number for number, origin in enumerate(origins)}
        for events, until_ms in _lots(new, numbers):
            named = _record(context, why, events, until_ms, hashed)
            put_record(context, archive, msgspec.structs.replace(named, sources=sources))

    with sent.unknown_if_any(f"erase from archive `{archive.name}`", "erase again"):
        found = _record_all(search.look(), search.wait_and_look, record)
        done = tuple(finish_archive(context, archive))
        left = (
            *search.unfinished_ranges(),
            *_waiting_copies(archive, done),
            *_left(context, archive, sought),
        )
        covered = [copy.archive for copy in copies_of(context, archive)]
        copied = copies_of_archives(context, {each.name for each in covered})
        redact_reasons(context, covered, sought.deletions)
        remove_quotes(context, covered, found)
        out_of_reach = (*other_sources(context, archive), *copied)
        named = tuple(name for each in covered for name in files_named_by_events(context, each))
    return ErasedFromArchives(
        events=len(found),
        ids=frozenset(each.id for each in found.values() if each.id is not None),
        found=len(found),
        unseen=tuple(search.files.unseen),
        archives=done,
        left=left,
        out_of_reach=out_of_reach,
        named=named,
        is_waiting=bool(search.unfinished) or any(each.waiting for each in done),
    )


def _waiting_copies(archive: Archive, done: Iterable[ArchiveErasure]) -> Iterator[str]:
    """Yields messages about ranges that may have read such events, except those of a search.

    These are ranges of copies of an archive, and replays of its own dead letters.
    """
    searched = set(map(archive.any_pipeline, archive.formats))
    waiting = {
        (each.archive, each.generation, remedy)
        for each in done
        for pipeline, remedy in each.unfinished.items()
        if pipeline not in searched
    }
    for name, generation, remedy in sorted(waiting):
        yield (
            f"archive `{name}`: a range of generation {generation} is under way that may hold "
            f"such events: {remedy}, then `tidelog archive erase {archive.name} --prove`"
        )


def _left(context: Context, archive: Archive, sought: EventMatcher) -> Iterator[str]:
    """Yields messages about archives that an archive was made of and that hold the events."""
    for each in original_archives(context, archive):
        held: set[SourceOffset] = set()
        for generation in each.in_state(*SEARCHED_STATES):
            known = dict.fromkeys(read_partitions(context, each.pipeline(generation)))
            found = search_generation(context, each, generation, known, FileSearch(sought))
            held |= found.keys()
        if held:
            yield (
                f"archive `{each.name}`: `{archive.name}` was made from it, and it holds "
                f"{len(held)} of these events: run `tidelog archive erase {each.name}`, "
                "which erases from its copies too"
            )


def finish_archive(context: Context, archive: Archive) -> list[ArchiveErasure]:
    """Steps 3 and 4 of all records of an archive that are not done."""
    reports: list[ArchiveErasure] = []
    for record, version in list(read_records(context, archive)):
        if record.state == "done":
            continue
        wanted: dict[Origin, list[int]] = {}
        origins: set[Origin] = set()
        for event in record.events:
            source = record.sources[event.partition]
            origin = Origin(source.partition, source.incarnation)
            origins.add(origin)
            if event.offset >= 0:  # negative ones are in files that were set aside
                wanted.setdefault(origin, []).append(event.offset)
        done = [
            erase_from_archive(context, each, generation, offsets)
            for each, generation, offsets in _generations_with(context, archive, wanted)
        ]
        erased = partial(_erased_ids, record)
        for copy in copies_of(context, archive):
            done.append(ArchiveErasure(copy.archive.name, copy.archive.generation))
            erase_aside(context, copy.archive, erased, partial(_is_one_of, origins), done[-1])
        reports += done
        raise_first(error for each in done for error in each.failed.values())
        if not any(each.waiting for each in done):
            put_record(context, archive, msgspec.structs.replace(record, state="done"), version)
    return reports


def _generations_with(
    context: Context, archive: Archive, wanted: Mapping[Origin, Collection[int]]
) -> Iterator[tuple[Archive, int, Mapping[str, Sequence[int]]]]:
    """Yields the generations of an archive and its copies, with where each has the events."""
    copies: dict[str, Copy] = {}

    def look() -> list[tuple[Archive, int]]:
        found = copies_of(context, archive)
        copies.update({each.archive.name: each for each in found})
        return [(each.archive, number) for each in found for number in each.archive.from_live]

    for each, generation in with_later_ones(look):
        # Read when its turn comes: its driver may have begun a source partition since.
        yield each, generation, held_offsets(context, copies[each.name], generation, wanted)


def _is_one_of(origins: Collection[Origin], own: Origin) -> bool:
    """Returns whether a file that was set aside may hold events of one of these origins."""
    unknown = own == UNKNOWN_ORIGIN or UNKNOWN_ORIGIN in origins
    return unknown or any(origin.may_be(own) for origin in origins)


def _erased_ids(record: AuditRecord) -> ErasedIds:
    """Returns the ids and keys in a record of an archive."""
    if record.key:
        return ErasedIds(keys={key_digest(record.key): record.until_ms})
    ids = {key_digest(each.id): record.until_ms for each in record.events if each.id is not None}
    return ErasedIds(ids)


def _lots(
    found: Mapping[SourceOffset, FoundEvent], numbers: Mapping[Origin, int]
) -> Iterator[tuple[tuple[AuditedEvent, ...], int]]:
    """Yields as many events as one audit record can name, and the latest of their times."""
    some: list[AuditedEvent] = []
    size = latest = 0
    for (origin, offset), each in sorted(found.items()):
        own = HASH_BYTES + _PLACE_BYTES
        if some and size + own > RECORD_BYTES_MAX:
            yield tuple(some), latest
            some, size, latest = [], 0, 0
        hashed = None if each.id is None else id_hash(each.id)
        some.append(AuditedEvent(hashed, numbers[origin], offset))
        size, latest = size + own, max(latest, each.time_ms)
    if some:
        yield tuple(some), latest


def _record(
    context: Context, why: Why, events: Iterable[AuditedEvent], until_ms: int, key: str
) -> AuditRecord:
    now_ms = context.clock.now_ms()
    return AuditRecord(
        id=context.ids.new(),
        op="delete",
        who=why.who,
        at_ms=now_ms,
        why=why.why,
        events=tuple(events),
        key=key,
        archived=True,
        until_ms=max(now_ms, until_ms, latest_now_ms(context)),
    )
