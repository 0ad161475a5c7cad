"""Updates and deletes events, so that every reader that starts after the call returned sees it.

A delete has seven steps; an update has 1, 2, 6 and 7. After a crash anywhere, the same call again
resumes. What a crash after each step leaves:

    1. look up the ids in all partitions; a delete
       also reads the store's time                  → nothing
    2. write an audit record, as ``begun``          → a record of something that was not done
    3. write the hashes of the ids into the ledger  → ids that no copy brings back, with events
    4. raise ``erasures`` in the head of each
       partition that something copies into         → the same; copies read the ledger again
    5. look up the ids again in those of these
       partitions that got events since step 1;
       add what is found to the record              → the same
    6. write an ``amend/<offset>`` row for each
       event, several in one write with the
       ``head``                                     → those events are amended
    7. write the audit record, as ``done``          → everything

If several events have the id, all are amended. The last write wins, by the sequence that the head
of the partition counts. But a delete is final: an update that finds a delete finds no event. A
batch of rows that is durable is never written again, even if a compile forces the rest to be looked
up again, or a reply was lost (``amendment_writer``). An update replaces only the value. A value
that is too large for a row is put into the store between steps 2 and 6. If the call dies there, no
row names it, and a sweep deletes it. ``log.ledger`` explains how steps 3 to 5 keep out copies of a
deleted event. From step 2 on, a call that cannot continue raises ``UnknownOutcomeError``, never
``UnavailableError``, which means that nothing was stored (``coordination.outcome``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from tidelog.catalog.update import rounds
from tidelog.codec.event_batch import bytes_without_value, has_additions
from tidelog.context import Context
from tidelog.coordination.audit import (
    HASH_BYTES,
    RECORD_BYTES_MAX,
    AuditedEvent,
    AuditRecord,
    Why,
    id_hash,
    key_digest,
    key_hash,
    put_record,
)
from tidelog.coordination.outcome import SentWrites
from tidelog.coordination.trusted_time import latest_now_ms
from tidelog.errors import InvalidError, UnavailableError
from tidelog.journal.amendment_writer import AmendmentChange, AmendmentWriter, Applied
from tidelog.journal.listing import MovedError
from tidelog.journal.lookup import FIELD_COLUMNS, Lookup, LookupResult, VersionedHead, with_key
from tidelog.log.ledger import announce_erasure, enter_erased
from tidelog.log.topics import read_head, read_starts
from tidelog.log.unused_objects import list_apart
from tidelog.model import limits
from tidelog.model.event import Event, check_event, check_event_bytes

__all__ = ["AmendResult", "Amender"]

_IDS_AT_ONCE = 1_000  # ids looked up together
_PLACE_BYTES = 24  # per event in a record, besides its id
_ROUNDS = 20  # attempts against concurrent compiles


@dataclass(frozen=True, slots=True)
class AmendResult:
    """What a call did."""

    events: int = 0  # that were amended
    missing: tuple[str, ...] = ()  # ids without an event


class Amender:
    """Amends events of one topic, for one author and reason. Thread-safe."""

    def __init__(
        self, context: Context, lookup: Lookup, why: Why, pool: Executor | None = None
    ) -> None:
        self._context = context
        self._lookup = lookup
        self.topic = lookup.topic
        self.why = why
        self._pool = pool

    def update(self, values: Mapping[str, bytes | None]) -> AmendResult:
        """Replaces the values of events, by id; None is a value too.

        Raises ``InvalidError`` if an event would become larger than an append allows: key, id,
        type, headers and the new value together. Ids are looked up in batches. The batches before
        the one that was refused may be updated; the same call again may include them.
        """
        for value in values.values():
            check_event(Event(value), self._context.log_settings.event_bytes_max)
        with self._call("update", "read the events, then decide") as call:
            return call._amend("update", values)

    def delete(self, ids: Iterable[str]) -> AmendResult:
        """Deletes all events that have one of these ids, for good."""
        with self._call("delete", "delete again") as call:
            return call._amend("delete", dict.fromkeys(ids))

    def delete_key(self, key: bytes, progress: Callable[[int], None]) -> AmendResult:
        """Deletes all events that have this key, up to the current ends, with or without ids.

        If it finds some, it then checks what was appended in the meantime, which finds copies that
        arrived before the ledger had the key.
        """
        with self._call("delete", "delete again") as call:
            return call._delete_key(key, progress)

    @contextmanager
    def _call(self, op: str, advice: str) -> Iterator[Amender]:
        """Runs one call, and tracks what is sent, which decides the error that the call raises."""
        sent = SentWrites()
        with sent.unknown_if_any(f"{op} in `{self.topic.name}`", advice):
            yield Amender(sent.tracked(self._context), self._lookup, self.why, self._pool)

    def _delete_key(self, key: bytes, progress: Callable[[int], None]) -> AmendResult:
        amended = 0
        starts = [0] * self.topic.partitions
        for _ in range(2):
            for partition, start in enumerate(starts):
                head, _ = read_head(self._context, self.topic, partition)
                bounds = max(start, head.start), head.next
                amended += self._delete_key_here(key, partition, bounds, progress)
                starts[partition] = head.next
            if not amended:
                break
        return AmendResult(amended)

    def _delete_key_here(
        self, key: bytes, partition: int, bounds: tuple[int, int], progress: Callable[[int], None]
    ) -> int:
        amended = 0
        found = with_key(self._context, self.topic, partition, key, bounds, progress)
        changes = (
            AmendmentChange(each, partition, offset, "delete", time_ms=time_ms)
            for each, offset, time_ms in found
        )
        for some in _records(changes):
            heads = {partition: read_head(self._context, self.topic, partition)}
            amended += len(self._apply("delete", some, heads, key))
        return amended

    def _amend(
        self, op: Literal["update", "delete"], values: Mapping[str, bytes | None]
    ) -> AmendResult:
        ids = list(values)
        amended = 0
        missing: list[str] = []
        for first in range(0, len(ids), _IDS_AT_ONCE):
            some = ids[first : first + _IDS_AT_ONCE]
            found = self._find(op, some, values)  # step 1
            done: set[str | None] = set()
            for changes in _records(_changes(op, found, some, values)):
                # Each record uses the heads of this lookup. The record before it only looked up its
                # own events again, so newer heads prove nothing about these.
                applied = self._apply(op, changes, dict(found.heads))
                done |= {change.id for change in applied}
                amended += len(applied)
            missing += [each for each in some if each not in done]
        return AmendResult(amended, tuple(missing))

    def _find(
        self,
        op: Literal["update", "delete"],
        ids: Sequence[str],
        values: Mapping[str, bytes | None],
    ) -> LookupResult:
        """Looks up ids. Raises ``InvalidError`` if an update would make an event too large.

        Such an event could be read, but neither played into a topic nor restored, since those check
        events as an append does.
        """
        if op == "delete":
            return self._lookup.find(ids)
        found = self._lookup.find(ids, columns=FIELD_COLUMNS)
        for each, events in found.events.items():
            size = len(values[each] or b"") + max(bytes_without_value(e.row) for e in events)
            room = limits.OWN_BYTES_MAX if any(has_additions(e.row) for e in events) else 0
            try:
                check_event_bytes(size, self._context.log_settings.event_bytes_max, room)
            except InvalidError as exc:
                raise InvalidError(
                    f"update of id `{each[:200]}`: with the new value its {exc}", **exc.context
                ) from exc
        return found

    def _apply(
        self,
        op: Literal["update", "delete"],
        changes: Sequence[AmendmentChange],
        heads: dict[int, VersionedHead],
        key: bytes | None = None,
    ) -> Sequence[AmendmentChange]:
        """Runs steps 2 to 7 for one record; returns the changes whose events existed."""
        record = AuditRecord(
            id=self._context.ids.new(),
            op=op,
            who=self.why.who,
            at_ms=self._context.clock.now_ms(),
            why=self.why.why,
            events=_audit_events(changes),
            key="" if key is None else key_hash(key),
            starts=self._starts(heads) if op == "delete" else (),
        )
        until_ms = max(record.at_ms, latest_now_ms(self._context)) if op == "delete" else 0
        record, version = put_record(self._context, self.topic, record)
        if op == "delete":
            found = self._enter(record, changes, heads, until_ms)
            if len(found) > len(changes):
                changes = found
                record = msgspec.structs.replace(record, events=_audit_events(changes))
                record, version = put_record(self._context, self.topic, record, version)
        applied = self._put(record, changes, heads)
        done = msgspec.structs.replace(record, state="done")
        put_record(self._context, self.topic, done, version)
        return applied

    def _starts(self, heads: Mapping[int, VersionedHead]) -> tuple[int, ...]:
        """Returns the first offset of every partition, also of those without such an event.

        A folder that was copied before a trim may have older ones in any partition.
        """
        known = {number: head.start for number, (head, _) in heads.items()}
        missing = [each for each in range(self.topic.partitions) if each not in known]
        known |= read_starts(self._context, self.topic, missing)
        return tuple(known[each] for each in sorted(known)) if any(known.values()) else ()

    def _enter(
        self,
        record: AuditRecord,
        changes: Sequence[AmendmentChange],
        heads: dict[int, VersionedHead],
        until_ms: int,
    ) -> Sequence[AmendmentChange]:
        """Runs steps 3 to 5; returns the changes, with those of events that were copied in
        meanwhile.

        The ledger marks events up to ``until_ms`` as erased, or later ones if they were found. For
        a delete by key, the caller looks for copies.
        """
        known = {(change.partition, change.offset): change for change in changes}
        busy = UnavailableError(
            f"topic `{self.topic.name}`: copies of the events come faster than they can be "
            "found: try again"
        )
        for _ in rounds(_ROUNDS, busy):
            until: dict[str, int] = {}
            for change in known.values():
                if change.id is not None:
                    until[change.id] = max(until_ms, change.time_ms, until.get(change.id, 0))
            keys: dict[bytes, int] = {}
            if record.key:
                latest = max(change.time_ms for change in known.values())
                keys[key_digest(record.key)] = max(until_ms, latest)
            enter_erased(self._context, self.topic, until, keys, self._pool)
            ends = self._announce()
            grown = [each for each, seen in heads.items() if ends[each] > seen[0].next]
            if record.key or not grown:
                break
            found = self._lookup.find(list(until), partitions=grown)
            heads.update(found.heads)
            values: dict[str, bytes | None] = dict.fromkeys(until)
            more = list(_changes("delete", found, list(until), values))
            new = {(m.partition, m.offset): m for m in more} | known
            if len(new) == len(known):
                break
            known = new
        return list(known.values())

    def _announce(self) -> Sequence[int]:
        """Step 4: returns where each partition ended then."""

        def announce(partition: int) -> int:
            return announce_erasure(self._context, self.topic, partition).next

        numbers = range(self.topic.partitions)
        if self._pool is None or self._context.commits_at_once == 1:
            return list(map(announce, numbers))
        return list(self._pool.map(announce, numbers))

    def _put(
        self,
        record: AuditRecord,
        changes: Sequence[AmendmentChange],
        heads: dict[int, VersionedHead],
    ) -> Sequence[AmendmentChange]:
        """Step 6 in each partition; looks up again what was compiled in the meantime.

        ``heads`` are those by which the events of this record were found. They change with what is
        looked up again and written, so other records need their own.
        """
        applied: Applied = {}
        what = f"topic `{self.topic.name}`: is compiled again and again: try again"
        for _ in rounds(_ROUNDS, UnavailableError(what)):

            def put(here: Sequence[AmendmentChange]) -> Sequence[AmendmentChange]:
                return self._put_here(record, here, heads, applied)

            moved = [change for left in self._each(put, _by_partition(changes)) for change in left]
            if not moved:
                return list(applied.values())
            found = self._lookup.find([change.id for change in moved if change.id is not None])
            heads.update(found.heads)
            there = {
                (each.partition, each.offset): each.amendment
                for some in found.events.values()
                for each in some
            }
            changes = [
                replace(change, before=row.object if row is not None else None)
                for change in moved
                if (change.partition, change.offset) in there
                for row in [there[change.partition, change.offset]]
            ]
        raise UnavailableError(what)

    def _put_here(
        self,
        record: AuditRecord,
        changes: Sequence[AmendmentChange],
        heads: dict[int, VersionedHead],
        applied: Applied,
    ) -> Sequence[AmendmentChange]:
        """Writes the changes of one partition; returns those that must be looked up again.

        A durable batch is not among these. Readers have seen it, and by now may have seen a newer
        value, which a repeat would replace with the older one.
        """
        partition = changes[0].partition
        seen = heads[partition]
        writer = AmendmentWriter(
            self._context, self.topic, partition, seen, record.id, record.at_ms, applied
        )
        try:
            writer.put(changes)
        except MovedError:
            return [change for change in changes if (partition, change.offset) not in applied]
        finally:
            if writer.abandoned:
                list_apart(self._context, self.topic, partition, writer.abandoned)
        heads[partition] = writer.reached
        return ()

    def _each(
        self,
        call: Callable[[Sequence[AmendmentChange]], Sequence[AmendmentChange]],
        lots: Iterable[Sequence[AmendmentChange]],
    ) -> Iterable[Sequence[AmendmentChange]]:
        """Calls ``call`` for each batch, in parallel if a write is a round trip."""
        if self._pool is None or self._context.commits_at_once == 1:
            return map(call, lots)
        return self._pool.map(call, lots)


def _changes(
    op: Literal["update", "delete"],
    found: LookupResult,
    ids: Sequence[str],
    values: Mapping[str, bytes | None],
) -> Iterator[AmendmentChange]:
    for each in ids:
        for event in found.events.get(each, ()):
            row = event.amendment
            yield AmendmentChange(
                each,
                event.partition,
                event.offset,
                op,
                values[each],
                event.time_ms,
                is_looked=True,
                before=row.object if row is not None else None,
            )


def _audit_events(changes: Iterable[AmendmentChange]) -> tuple[AuditedEvent, ...]:
    return tuple(
        AuditedEvent(
            None if change.id is None else id_hash(change.id), change.partition, change.offset
        )
        for change in changes
    )


def _records(changes: Iterable[AmendmentChange]) -> Iterator[list[AmendmentChange]]:
    """Yields as many changes as one audit record can list."""
    some: list[AmendmentChange] = []
    size = 0
    for change in changes:
        own = HASH_BYTES + _PLACE_BYTES
        if some and size + own > RECORD_BYTES_MAX:
            yield some
            some, size = [], 0
        some.append(change)
        size += own
    if some:
        yield some


def _by_partition(changes: Iterable[AmendmentChange]) -> list[list[AmendmentChange]]:
    found: dict[int, list[AmendmentChange]] = {}
    for change in changes:
        found.setdefault(change.partition, []).append(change)
    return [sorted(some, key=_offset) for some in found.values()]


def _offset(change: AmendmentChange) -> int:
    return change.offset
