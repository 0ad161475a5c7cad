"""Recovering events of objects that the catalog has forgotten: they are appended again.

A stray is an object that fewer partitions name or list as unused than it has events of (``losses``
in ``log``): its commit was lost with a newer catalog, or a producer died before it. Segments and
journals say which events they hold. A large value of an update does not name its event, so it is
counted and left.

1. raise the topic's generation above that of every object, and the floor of every head: a producer
   that has uploaded a stray and is still at work can no longer commit it
2. list the objects, then read all rows: what is left over are the strays
3. for each stray and each partition that does not know it: leave out events that the topic has by
   id, and those that were deleted after the object was stored; append the others to that partition,
   in commits of a producer that is named after the stray, with the events' places in it as
   sequences
4. list the stray as unused, in the last of these commits: from then on it is not a stray, and
   sweeps delete it

| dies after  | what is there                              | who repairs                           |
|-------------|--------------------------------------------|---------------------------------------|
| 1           | a higher generation                        | producers upload again if they must   |
| 3, partly   | some of the events, and the producer's row | the next call appends the others      |
| 3, upload   | a segment that has the stray's own id      | the next call passes it, a sweep too  |
| 4           | all events                                 | sweeps delete the stray               |

So a second call doubles nothing, also for events without an id, and two calls at once share the
work. The producer's row is kept for a week, as that of every unnamed one.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tidelog.catalog.base import Put
from tidelog.codec.events import STORED_SCHEMA
from tidelog.codec.segment import Piece, encode_segment, read_known
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.journal.audit import id_mark, key_mark, read_records
from tidelog.journal.lookup import Lookup
from tidelog.log.append import Appender, Stored, _Plan
from tidelog.log.base import Log
from tidelog.log.heads import RACE, raise_head
from tidelog.log.references import read_references
from tidelog.log.topics import read_head
from tidelog.log.unused import Uses, list_now, list_unused, origin_of
from tidelog.model import layout, limits
from tidelog.model.producers import once_producer
from tidelog.model.run import Head, HeldRow, decode_row, encode_row
from tidelog.model.topic import Topic
from tidelog.store.base import ObjectInfo

__all__ = ["RecoverReport", "recover_topic"]

_LOOKED_UP = 10_000  # ids at once


@dataclass(slots=True)
class RecoverReport:
    """What was found and done; with ``dry_run``, what would be done."""

    topic: str
    dry_run: bool
    objects: int = 0  # strays that were read
    events: int = 0  # that they hold for partitions which do not know them
    appended: int = 0
    present: int = 0  # events whose id the topic has
    erased: int = 0  # events that were deleted after the object was stored
    values: int = 0  # of updates, which do not name their event: left
    unreadable: list[str] = field(default_factory=list)  # objects that do not decode: left


@dataclass(frozen=True, slots=True)
class _Stray:
    """Events of one object for one partition."""

    info: ObjectInfo
    partition: int
    at: int  # about at which offset they were
    table: pa.Table


def recover_topic(log: Log, lookup: Lookup, *, dry_run: bool = False) -> RecoverReport:
    """Append the events of a topic's strays that the topic does not have.

    ``CorruptError`` for rows that do not decode, ``UnavailableError`` as usual: call it again.
    """
    topic = lookup.topic if dry_run else _fence(log, lookup.topic)
    report = RecoverReport(topic.name, dry_run)
    found = _Strays(log, topic, report)
    for stray in found.read():
        one = _Recovery(log, topic, lookup, report)
        one.run(stray, found.deleted)
    return report


def _fence(log: Log, topic: Topic) -> Topic:
    """Step 1: the topic with a generation that is above all of its objects."""
    highest = topic.generation
    for folder in (layout.segments(topic.incarnation), layout.amendments(topic.incarnation)):
        for info in log.store.list(folder):
            highest = max(highest, _generation(info.key))
    raised = _raise_generation(log, topic, highest + 1)
    for partition in range(topic.partitions):

        def with_floor(head: Head) -> Head:
            return msgspec.structs.replace(head, floor=max(head.floor, raised.generation))

        raise_head(log, raised, partition, with_floor)
    return raised


def _raise_generation(log: Log, topic: Topic, wanted: int) -> Topic:
    for delay_s in RACE.delays_s(log.random):
        row = log.catalog.get(layout.REGISTRY, layout.topic_row(topic.name))
        now = None if row is None else decode_row(row.value, Topic, f"registry row `{row.row}`")
        if row is None or now is None or now.incarnation != topic.incarnation:
            raise NotFoundError(f"topic `{topic.name}`: was deleted: nothing was recovered")
        if now.generation >= wanted:
            return now
        raised = msgspec.structs.replace(now, generation=wanted)
        change = Put(row.row, encode_row(raised), expect=row.version)
        try:
            log.catalog.write(layout.REGISTRY, change, write_id=log.ids.new())
        except (ConflictError, UnknownOutcomeError):
            log.clock.sleep(delay_s)
    raise _busy(topic)


class _Strays:
    """Step 2, and what strays hold."""

    def __init__(self, log: Log, topic: Topic, report: RecoverReport) -> None:
        self._log = log
        self._topic = topic
        self._report = report
        self._objects = [
            info
            for folder in (layout.segments, layout.journals, layout.amendments)
            for info in log.store.list(folder(topic.incarnation))
        ]
        self._uses = Uses(info.key for info in self._objects)
        for partition in range(topic.partitions):
            head, _ = read_head(log, topic, partition)
            rows = read_references(log, topic, partition, head)
            self._uses.add(partition, rows.objects)
            self._uses.add(partition, rows.leftovers)
            self._uses.add_rows(partition, rows.unused)
        self.deleted = _deleted(log, topic)

    def read(self) -> Iterator[_Stray]:
        """The events of all strays, in about the order in which they were committed once."""
        strays = [info for info in self._objects if not self._uses.is_settled(info.key)]
        ours = {
            _own_id(origin_of(info.key)[0], partition)
            for info in strays
            for partition in range(self._topic.partitions)
        }
        places = [
            (at, info.key, info, partition)
            for info in strays
            if origin_of(info.key)[0] not in ours
            for at, partition in self._places(info)
        ]
        self._report.objects = len({key for _, key, _, _ in places})
        for at, _, info, partition in sorted(places, key=lambda each: each[:2]):
            for table in self._tables(info, partition):
                yield _Stray(info, partition, at, table)

    def _places(self, info: ObjectInfo) -> Iterator[tuple[int, int]]:
        """Where the events of a stray were, for partitions that do not know it."""
        if info.key.startswith(layout.amendments(self._topic.incarnation)):
            self._report.values += 1
            return
        try:
            if info.key.startswith(layout.journals(self._topic.incarnation)):
                found = self._journal_places(info.key)
            else:
                data = self._log.store.get(info.key)
                known = read_known(data, f"segment `{info.key}`")
                found = [(each.next, each.partition) for each in known]
        except NotFoundError:
            return  # a sweep has deleted it meanwhile
        except (CorruptError, ValueError):
            self._report.unreadable.append(info.key)
            return
        for at, partition in found:
            is_here = 0 <= partition < self._topic.partitions
            if is_here and not self._uses.is_known(info.key, partition):
                yield at, partition

    def _journal_places(self, key: str) -> list[tuple[int, int]]:
        partition, epoch = layout.journal_place(key)
        where = layout.topic_partition(self._topic.incarnation, partition)
        row = self._log.catalog.get(where, layout.COMPILE_ROW)
        if row is not None:
            lease = decode_row(row.value, HeldRow, f"compile row of `{self._topic.name}`")
            if lease.owner and lease.epoch == epoch:
                return []  # it is being compiled
        return [(layout.journal_base(key), partition)]

    def _tables(self, info: ObjectInfo, partition: int) -> Iterator[pa.Table]:
        """The events that an object has for a partition; none if it is missing or damaged."""
        try:
            data = self._log.store.get(info.key)
            if info.key.endswith(".parquet"):
                yield _read_journal(data)
            else:
                yield _read_segment(data, partition, info.key)
        except NotFoundError:
            return
        except (CorruptError, pa.ArrowInvalid, OSError, EOFError):
            self._report.unreadable.append(info.key)


class _Recovering(Appender):
    """Appends the events of one stray to one partition."""

    finished = ""  # the stray, which the next commit lists as unused

    def upload_as(self, segment_id: str, table: pa.Table, partition: int) -> tuple[Stored, Piece]:
        segment = encode_segment([(partition, table)], self.known([partition]))
        return self._upload(segment, segment_id, self._log.ids.new()), segment.pieces[0]

    def _plan(self, *given: object) -> _Plan:
        plan = super()._plan(*given)  # type: ignore[arg-type]
        if not self.finished:
            return plan
        listed = list_unused(plan.write_id, [self.finished])
        return dataclasses.replace(plan, changes=(*plan.changes, *listed))


class _Recovery:
    """Steps 3 and 4 for one stray and partition."""

    def __init__(self, log: Log, topic: Topic, lookup: Lookup, report: RecoverReport) -> None:
        self._log = log
        self._topic = topic
        self._lookup = lookup
        self._report = report

    def run(self, stray: _Stray, deleted: Mapping[str, int]) -> None:
        rows = self._absent(stray, deleted)
        self._report.events += stray.table.num_rows
        if self._report.dry_run:
            self._report.appended += len(rows)
            return
        for delay_s in RACE.delays_s(self._log.random):
            try:
                self._report.appended += self._append(stray, rows)
            except AlreadyExistsError:  # another call recovers it at the same time
                self._log.clock.sleep(delay_s)
            else:
                return
        raise _busy(self._topic)

    def _absent(self, stray: _Stray, deleted: Mapping[str, int]) -> npt.NDArray[np.int64]:
        """The rows of events that are to be appended."""
        ids: list[str | None] = stray.table.column("id").to_pylist()
        asked = sorted({each for each in ids if each is not None})
        there: set[str] = set()
        for first in range(0, len(asked), _LOOKED_UP):
            there.update(self._lookup.find(asked[first : first + _LOOKED_UP]).events)
        keys = stray.table.column("key").to_pylist() if deleted else [None] * len(ids)
        kept = []
        for row, (event_id, key) in enumerate(zip(ids, keys, strict=True)):
            if event_id is not None and event_id in there:
                self._report.present += 1
            elif deleted and _is_deleted(deleted, event_id, key, stray.info.modified_ms):
                self._report.erased += 1
            else:
                kept.append(row)
        return np.array(kept, np.int64)

    def _append(self, stray: _Stray, rows: npt.NDArray[np.int64]) -> int:
        """Append those that no earlier call has appended, and list the stray; how many."""
        origin = origin_of(stray.info.key)[0]
        producer = once_producer(_own_id(origin, stray.partition))
        appender = _Recovering(self._log, self._topic, producer)
        left = rows[rows > appender.last_sequence(stray.partition)]
        most = limits.BATCH_EVENTS_MAX
        for first in range(0, len(left), most):
            taken = left[first : first + most]
            table = stray.table.take(pa.array(taken))
            segment_id = _own_id(origin, stray.partition)
            stored, piece = appender.upload_as(segment_id, table, stray.partition)
            if first + most >= len(left):
                appender.finished = stray.info.key
            appender.commit(stored, piece, taken.tolist())
        if not len(left):
            list_now(self._log, self._topic, stray.partition, [stray.info.key])
        return len(left)


def _read_segment(data: bytes, partition: int, key: str) -> pa.Table:
    known = read_known(data, f"segment `{key}`")
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    if sum(each.count for each in known) != table.num_rows:
        raise CorruptError(f"segment `{key}`: holds {table.num_rows} events, and says otherwise")
    parts, first = [], 0
    for each in known:
        if each.partition == partition:
            parts.append(table.slice(first, each.count))
        first += each.count
    return pa.concat_tables(parts).combine_chunks()


def _read_journal(data: bytes) -> pa.Table:
    table = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
    return table.select(STORED_SCHEMA.names).cast(STORED_SCHEMA).combine_chunks()


def _deleted(log: Log, topic: Topic) -> dict[str, int]:
    """When ids and keys were deleted last, by their marks."""
    found: dict[str, int] = {}
    for record, _ in read_records(log, topic):
        if record.op == "delete":
            marks: Sequence[str] = [each.id for each in record.events if each.id is not None]
            for mark in (*marks, *((record.key,) if record.key else ())):
                found[mark] = max(found.get(mark, 0), record.at_ms)
    return found


def _is_deleted(
    deleted: Mapping[str, int], event_id: str | None, key: bytes | None, stored_ms: int
) -> bool:
    marks = [id_mark(event_id)] if event_id is not None else []
    marks += [key_mark(key)] if key is not None else []
    return any(deleted.get(mark, -1) >= stored_ms for mark in marks)


def _own_id(origin: str, partition: int) -> str:
    """The id of segments that are made of a stray, so that those of a dead call are known."""
    return hashlib.sha256(f"{origin}/{partition}".encode()).hexdigest()[:32]


def _generation(key: str) -> int:
    try:
        return layout.segment_generation(key)
    except ValueError:
        return -1


def _busy(topic: Topic) -> UnavailableError:
    return UnavailableError(f"topic `{topic.name}`: too many writers at once: recover it again")
