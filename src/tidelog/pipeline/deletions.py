"""What was deleted from a topic: its audit tells where, its ledger tells which ids.

A record that is ``begun`` may be of a delete that died before it deleted anything. Of such a one an
event counts only if its amendment is there, or if its journal no longer has it. A record of events
that archives alone hold (``pipeline.archived``) is decided once it is written, and always counts.

All of it can be asked of a topic that is being deleted, up to the removal of its rows and objects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from tidelog.errors import NotFoundError, UnavailableError
from tidelog.home import Home
from tidelog.journal.audit import Audited, AuditRecord, id_mark, key_mark, read_audit
from tidelog.journal.lookup import amendment_of
from tidelog.journal.rows import MovedError, covering
from tidelog.log.base import Log
from tidelog.log.contents import Cut, describe_run, read_run
from tidelog.log.ledger import NOTHING_ERASED, ErasedIds, erased_until, was_erased
from tidelog.log.topics import find_head
from tidelog.model.topic import Topic

__all__ = [
    "Deletions",
    "Places",
    "deleted_offsets",
    "deletion_records",
    "knows_all",
    "read_deletions",
]

_ROUNDS = 20  # against compiles that end again and again meanwhile

Places = dict[int, set[int]]
"""Offsets by partition."""


@dataclass(frozen=True, slots=True)
class Deletions:
    """What was deleted from a topic, and what of it by some ids and keys."""

    all: Places = field(default_factory=dict)
    by_id: Mapping[str, Places] = field(default_factory=dict)
    by_key: Mapping[bytes, Places] = field(default_factory=dict)
    ledger: ErasedIds = NOTHING_ERASED  # up to when events with these ids and keys were erased


def deleted_offsets(home: Home, topic: Topic) -> Places:
    """Every offset of a topic that was ever deleted, by partition."""
    return read_deletions(home, topic).all


def read_deletions(
    home: Home, topic: Topic, ids: Collection[str] = (), keys: Collection[bytes] = ()
) -> Deletions:
    """All that was ever deleted; where, for each of these ids and keys, which may be nowhere."""
    found = Deletions(
        by_id={each: {} for each in ids},
        by_key={each: {} for each in keys},
        ledger=erased_until(home.log, topic, ids, keys),
    )
    marks = {key_mark(key): places for key, places in found.by_key.items()}
    ids_by_mark = {id_mark(each): places for each, places in found.by_id.items()}
    for record, events in deletion_records(home.log, topic):
        for event in events:
            sought = (ids_by_mark.get(event.id or ""), marks.get(record.key))
            for places in (found.all, *sought):
                if places is not None:
                    places.setdefault(event.partition, set()).add(event.offset)
    return found


def deletion_records(log: Log, topic: Topic) -> Iterator[tuple[AuditRecord, tuple[Audited, ...]]]:
    """The records of deletes, each with those of its events that were deleted."""
    for record in read_audit(log, topic):
        if record.op == "delete":
            yield record, tuple(_deleted(log, topic, record))


def knows_all(home: Home, topic: Topic, found: Deletions) -> bool:
    """Whether a deletion of each of these ids and keys is known, be it to the ledger alone."""
    ids = (
        bool(places) or was_erased(home.log, topic, each) for each, places in found.by_id.items()
    )
    return all(found.by_key.values()) and all(ids)


def _deleted(log: Log, topic: Topic, record: AuditRecord) -> Iterator[Audited]:
    for event in record.events:
        if record.state == "done" or record.archived or _is_deleted(log, topic, event):
            yield event


def _is_deleted(log: Log, topic: Topic, event: Audited) -> bool:
    for _ in range(_ROUNDS):
        with contextlib.suppress(MovedError, NotFoundError):  # swapped meanwhile
            return _has_amendment(log, topic, event) or _is_compiled_out(log, topic, event)
        if find_head(log, topic, event.partition).closed:
            return False  # the topic's rows or objects go, so archives have what was deleted
    raise UnavailableError(f"topic `{topic.name}`: is compiled again and again: try again")


def _has_amendment(log: Log, topic: Topic, event: Audited) -> bool:
    found = amendment_of(log, topic, event.partition, event.offset)
    return found is not None and found.kind == "delete"


def _is_compiled_out(log: Log, topic: Topic, event: Audited) -> bool:
    """Whether a journal stands for the offset, and has no event there."""
    head = find_head(log, topic, event.partition)
    if not head.start <= event.offset < head.journaled:
        return False
    bounds = (event.offset, event.offset + 1)
    for run in covering(log, topic, event.partition, head, bounds):
        what = describe_run(topic.name, event.partition, run)
        for rows in read_run(log.store, run, what, Cut(*bounds, columns=("id",))):
            if event.offset in rows.offsets:
                return False
    return True
