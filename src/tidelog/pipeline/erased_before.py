"""What was erased before a range of an archive is done: no writer of a generation brings it back.

An erasure is a standing fact. It names offsets of a source partition, with its incarnation, and ids
or keys up to a time. A source may hold the events all the same: a file, a Kafka topic, a folder
that was copied before the erasure, another archive of the same topic. So each range leaves out what
is named by

- the audit of the archive itself, and of every archive that it is made of (``archives_above``);
- the audit of the topic that its events come from, where a generation is built from another source
  than the archive's own; that topic's deletes are put into the audits of its archives when the
  topic is deleted (``archived.keep_deletions``).

What is left out counts as erased in the account.

Audits are read after the intent of a range was put, and an erasure looks for intents after it has
put its record. So an erasure that a range does not see finds its intent, or its commit, and takes
the event out of the files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tidelog.journal.audit import Audited, AuditRecord, key_digest, read_audit
from tidelog.log.base import Log
from tidelog.log.ledger import ErasedIds
from tidelog.log.topics import list_topics
from tidelog.model.archive import Archive
from tidelog.pipeline.base import NO_ERASED_ROWS, ErasedRows
from tidelog.pipeline.deletions import deletion_records
from tidelog.pipeline.descent import (
    UNKNOWN_LINE,
    Copy,
    Line,
    archives_above,
    generations_of,
    is_line_of,
    is_same_event,
    line_of,
)

__all__ = ["ErasedBefore"]


@dataclass(frozen=True, slots=True)
class ErasedBefore:
    """What was erased of the source partitions of a generation, as it is when it is asked for."""

    log: Log
    archive: Archive
    generation: int

    def __call__(self, partition: str) -> ErasedRows:
        """Returns the events of a source partition that no range may write."""
        own = line_of(self.log, self.archive.pipeline(self.generation), partition)
        if own is None:
            return NO_ERASED_ROWS
        found = _Found(set(), {}, {})
        for above, copy in archives_above(self.log, self.archive, self.generation):
            for record in read_audit(self.log, above):
                self._add_own(found, record, copy, own)
        if self.archive.making(self.generation).source and own[1]:
            self._add_deletions(found, own[0])
        offsets = np.array(sorted(found.offsets), np.int64)
        return ErasedRows(offsets, ErasedIds(found.ids, found.keys))

    def _add_own(
        self, found: _Found, record: AuditRecord, copy: Copy, own: tuple[Line, bool]
    ) -> None:
        """Add what a record of an archive names."""
        here: list[Audited] = []
        for event in record.events:
            source = record.sources[event.partition]
            line = Line(source.partition, source.incarnation)
            if line == UNKNOWN_LINE or is_same_event(copy, self.generation, line, own):
                here.append(event)
        found.offsets.update(event.offset for event in here if event.offset >= 0)
        if here:
            found.enter(record, here)

    def _add_deletions(self, found: _Found, own: Line) -> None:
        """Add what was deleted from the topic that the events come from.

        Ids count only where no offset is known, of events that files set aside alone hold: the
        topic may have another event of the same id, which a producer has sent again.
        """
        name = own.partition.rpartition("/")[0]
        for topic in list_topics(self.log):
            if topic.name != name or not is_line_of(own, topic):
                continue
            made = {(each.incarnation, number) for each, number in generations_of(self.log, topic)}
            if (self.archive.incarnation, self.generation) not in made:
                continue
            number = own.partition.rpartition("/")[2]
            for record, events in deletion_records(self.log, topic):
                here = [each for each in events if str(each.partition) == number]
                found.offsets.update(each.offset for each in here if each.offset >= 0)
                found.enter(record, [each for each in events if each.offset < 0])


class _Found(NamedTuple):
    offsets: set[int]
    ids: dict[bytes, int]
    keys: dict[bytes, int]

    def enter(self, record: AuditRecord, events: Iterable[Audited]) -> None:
        """Add the key of a record, or the ids of some of its events, up to its time."""
        if not record.until_ms:
            return
        for times, marks in (
            (self.keys, [record.key] if record.key else []),
            (self.ids, [] if record.key else [each.id for each in events if each.id is not None]),
        ):
            for digest in map(key_digest, marks):
                times[digest] = max(times.get(digest, 0), record.until_ms)
