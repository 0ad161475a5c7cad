"""What was deleted from a topic, and what a range of an archive must therefore skip.

The audit of a topic says where events were deleted, and its ledger says which ids. A record that is
``begun`` may belong to a delete that crashed before it deleted anything. An event of such a record
counts only if its amendment exists, or if its journal no longer has it. What was trimmed since
counts too: nothing shows any more whether it was deleted, and the same delete, if it is repeated,
finds only events that are not hidden yet. A record of events that only archives hold is decided
once it is written, and always counts. All of this can be read from a topic that is being deleted,
until its rows and objects are deleted.

An erasure is permanent. It names offsets of a source partition, with its incarnation, and ids or
keys up to a time. Ids and keys erased from an archive count in all of its source partitions, also
in those that begin later, but not in one that was created again since. A source may still hold the
events: a file, a Kafka topic, a folder copied before the erasure, another archive of the same
topic. So each range skips what is named by

- the audit of the archive itself, and of every archive that it is made of (``archives_above``);
- the audit of the topic that its events come from, if a generation is built from another source
  than the archive's own. When that topic is deleted, its deletes are copied to the audits of its
  archives.

Deletes from a topic count by offset, unless only files set aside hold the event: a later one with
its id or key is a new event, even if its time is earlier. A copied folder may hold older events of
an erased id or key, which the topic had trimmed and no archive had. So ids and keys also count
below the starts that the partitions of the topic had then, also in those where none was found. The
account counts skipped events as erased.

A range reads audits after putting its intent, and an erasure looks for intents after putting its
record. So if a range does not see an erasure, the erasure finds the range's intent or commit, and
removes the event from the files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tidelog.archive.derived_archives import (
    UNKNOWN_ORIGIN,
    Copy,
    Origin,
    archives_above,
    archives_of,
    is_of_topic,
    is_same_event,
    origin_of,
)
from tidelog.catalog.update import read_stable
from tidelog.context import Context
from tidelog.coordination.audit import (
    AuditedEvent,
    AuditRecord,
    id_hash,
    key_digest,
    key_hash,
    read_audit,
)
from tidelog.errors import NotFoundError, UnavailableError
from tidelog.journal.listing import MovedError, covering
from tidelog.journal.lookup import amendment_of
from tidelog.log.ledger import NOTHING_ERASED, ErasedIds, erased_until, was_erased
from tidelog.log.run_reader import RunSelection, describe_run, read_run
from tidelog.log.topics import find_head, list_topics
from tidelog.model.archive import Archive
from tidelog.model.topic import Topic
from tidelog.pipeline.tasks import NO_ERASED_ROWS, ErasedRows

__all__ = [
    "Deletions",
    "ErasedBefore",
    "PartitionOffsets",
    "deleted_offsets",
    "deletion_records",
    "knows_all",
    "read_deletions",
]


PartitionOffsets = dict[int, set[int]]
"""Offsets by partition."""


@dataclass(frozen=True, slots=True)
class Deletions:
    """What was deleted from a topic, and what of it by some ids and keys."""

    all: PartitionOffsets = field(default_factory=dict)
    by_id: Mapping[str, PartitionOffsets] = field(default_factory=dict)
    by_key: Mapping[bytes, PartitionOffsets] = field(default_factory=dict)
    ledger: ErasedIds = NOTHING_ERASED  # until when events with these ids and keys were erased

    @classmethod
    def anywhere(
        cls, ids: Iterable[str], keys: Iterable[bytes], ledger: ErasedIds = NOTHING_ERASED
    ) -> Deletions:
        """Returns what finds ids and keys wherever they are: no offsets are known."""
        return cls({}, {each: {} for each in ids}, {each: {} for each in keys}, ledger)


def deleted_offsets(context: Context, topic: Topic) -> PartitionOffsets:
    """Returns every offset of a topic that was ever deleted, by partition."""
    return read_deletions(context, topic).all


def read_deletions(
    context: Context, topic: Topic, ids: Collection[str] = (), keys: Collection[bytes] = ()
) -> Deletions:
    """Returns all deletions, and where each of these ids and keys was; possibly nowhere."""
    found = Deletions(
        by_id={each: {} for each in ids},
        by_key={each: {} for each in keys},
        ledger=erased_until(context, topic, ids, keys),
    )
    marks = {key_hash(key): places for key, places in found.by_key.items()}
    ids_by_mark = {id_hash(each): places for each, places in found.by_id.items()}
    for record, events in deletion_records(context, topic):
        for event in events:
            sought = (ids_by_mark.get(event.id or ""), marks.get(record.key))
            for places in (found.all, *sought):
                if places is not None:
                    places.setdefault(event.partition, set()).add(event.offset)
    return found


def deletion_records(
    context: Context, topic: Topic
) -> Iterator[tuple[AuditRecord, tuple[AuditedEvent, ...]]]:
    """Yields the records of deletes, each with the events that it deleted."""
    for record in read_audit(context, topic):
        if record.op == "delete":
            yield record, tuple(_deleted(context, topic, record))


def knows_all(context: Context, topic: Topic, found: Deletions) -> bool:
    """Returns whether a deletion of each id and key is known, if only to the ledger."""
    ids = (bool(places) or was_erased(context, topic, each) for each, places in found.by_id.items())
    return all(found.by_key.values()) and all(ids)


def _deleted(context: Context, topic: Topic, record: AuditRecord) -> Iterator[AuditedEvent]:
    for event in record.events:
        if record.state == "done" or record.archived or _is_deleted(context, topic, event):
            yield event


def _is_deleted(context: Context, topic: Topic, event: AuditedEvent) -> bool:

    def read() -> bool | None:
        with contextlib.suppress(MovedError, NotFoundError):  # swapped in between
            return _has_amendment(context, topic, event) or _is_compiled_out(context, topic, event)
        if find_head(context, topic, event.partition).closed:
            return False  # the topic is being deleted, so archives have what was deleted
        return None

    busy = UnavailableError(f"topic `{topic.name}`: is compiled again and again: try again")
    return read_stable(context, read, busy)


def _has_amendment(context: Context, topic: Topic, event: AuditedEvent) -> bool:
    found = amendment_of(context, topic, event.partition, event.offset)
    return found is not None and found.kind == "delete"


def _is_compiled_out(context: Context, topic: Topic, event: AuditedEvent) -> bool:
    """Returns whether a journal covers the offset and has no event there, or it was trimmed."""
    head = find_head(context, topic, event.partition)
    if event.offset < head.start:
        return True
    if event.offset >= head.journaled:
        return False
    bounds = (event.offset, event.offset + 1)
    for run in covering(context, topic, event.partition, head, bounds):
        what = describe_run(topic.name, event.partition, run)
        for rows in read_run(context.store, run, what, RunSelection(*bounds, columns=("id",))):
            if event.offset in rows.offsets:
                return False
    return True


@dataclass(frozen=True, slots=True)
class ErasedBefore:
    """What was erased from the source partitions of a generation, read at each call."""

    context: Context
    archive: Archive
    generation: int
    with_topic: bool = False  # also what a source that is the topic itself leaves out

    def __call__(self, partition: str) -> ErasedRows:
        """Returns the events of a source partition that no range may write."""
        own = origin_of(self.context, self.archive.pipeline(self.generation), partition)
        if own is None:
            return NO_ERASED_ROWS
        found = _FoundDeletions(set(), {}, {}, {}, {})
        for above, copy in archives_above(self.context, self.archive, self.generation):
            for record in read_audit(self.context, above):
                self._add_own(found, record, copy, own)
        if (self.with_topic or self.archive.format_of(self.generation).source) and own[1]:
            self._add_deletions(found, own[0])
        offsets = np.array(sorted(found.offsets), np.int64)
        trimmed = ErasedIds(found.trimmed_ids, found.trimmed_keys)
        return ErasedRows(offsets, ErasedIds(found.ids, found.keys), trimmed)

    def _add_own(
        self,
        found: _FoundDeletions,
        record: AuditRecord,
        copy: Copy,
        own: tuple[Origin, bool],
    ) -> None:
        """Adds what a record of an archive names."""
        origins = [Origin(each.partition, each.incarnation) for each in record.sources]
        numbers = {
            number
            for number, origin in enumerate(origins)
            if origin == UNKNOWN_ORIGIN or is_same_event(copy, self.generation, origin, own)
        }
        here = [each for each in record.events if each.partition in numbers]
        found.offsets.update(event.offset for event in here if event.offset >= 0)
        if record.archived:  # an older event may come from a partition where none was found
            if not _is_created_again(own[0], origins):
                found.enter(record, record.events)
        elif numbers:  # of the topic that the archive had
            found.enter_unplaced(record, record.events)
            starts = enumerate(record.starts)
            found.enter_trimmed(record, [s for n, s in starts if n in numbers])

    def _add_deletions(self, found: _FoundDeletions, own: Origin) -> None:
        """Adds what was deleted from the topic that the events come from."""
        name = own.partition.rpartition("/")[0]
        for topic in list_topics(self.context):
            if topic.name != name or not is_of_topic(own, topic):
                continue
            made = {(each.incarnation, number) for each, number in archives_of(self.context, topic)}
            if (self.archive.incarnation, self.generation) not in made:
                continue
            number = own.partition.rpartition("/")[2]
            for record, events in deletion_records(self.context, topic):
                here = [each for each in events if str(each.partition) == number]
                found.offsets.update(each.offset for each in here if each.offset >= 0)
                found.enter_unplaced(record, events)
                starts = enumerate(record.starts if events else ())
                found.enter_trimmed(record, [s for n, s in starts if str(n) == number])


class _FoundDeletions(NamedTuple):
    offsets: set[int]
    ids: dict[bytes, int]
    keys: dict[bytes, int]
    trimmed_ids: dict[bytes, int]  # the last offset
    trimmed_keys: dict[bytes, int]

    def enter(self, record: AuditRecord, events: Collection[AuditedEvent]) -> None:
        """Adds the key of a record, or the ids of some of its events, up to its time."""
        if not record.until_ms:
            return
        if record.key:
            _add(self.keys, [record.key] if events else [], record.until_ms)
        else:
            _add(self.ids, [each.id for each in events if each.id], record.until_ms)

    def enter_unplaced(self, record: AuditRecord, events: Iterable[AuditedEvent]) -> None:
        """Adds events of a topic that have no offset, as only files set aside hold them.

        The others count by their offsets. A delete reads up to the ends of its topic, so an event
        with the same id or key at a later offset is a new one, whatever its time.
        """
        unplaced = [each for each in events if each.offset < 0]
        if record.until_ms and all(each.id for each in unplaced):
            _add(self.ids, [each.id for each in unplaced if each.id], record.until_ms)
        else:
            self.enter(record, unplaced)

    def enter_trimmed(self, record: AuditRecord, starts: Iterable[int]) -> None:
        """Adds the key of a record, or its ids, below the starts that partitions had then."""
        last = max(starts, default=0) - 1
        if last >= 0 and record.key:
            _add(self.trimmed_keys, [record.key], last)
        elif last >= 0:
            _add(self.trimmed_ids, [each.id for each in record.events if each.id], last)


def _is_created_again(own: Origin, origins: Collection[Origin]) -> bool:
    """Returns whether a record names an earlier incarnation of a source partition, and not this."""
    named = [each for each in origins if each.partition == own.partition]
    is_known = UNKNOWN_ORIGIN in origins or any(each.may_be(own) for each in named)
    return bool(named) and not is_known


def _add(ends: dict[bytes, int], marks: Iterable[str], last: int) -> None:
    for digest in map(key_digest, marks):
        ends[digest] = max(ends.get(digest, last), last)
