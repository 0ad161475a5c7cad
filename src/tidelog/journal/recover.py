"""Recovers events of objects that the catalog has lost, by appending them again.

A stray is an object that fewer partitions name or list as unused than it has events of
(``log.maintenance.lost_commits``). Its commit was lost with a newer catalog, or a producer died
before it. Segments and journals say which events they contain (``stray_events``). A large value of
an update does not name its event, so it is counted and left.

1. Raise the topic's generation above that of every object and every floor, then the floor of every
   head. A producer that has uploaded a stray and is still working must upload it again to commit
   it. Raise the epoch of compilers above that of every journal, so that no swap can commit one.
2. List the objects below that generation, then read all rows: the rest are the strays. The events
   of one segment for one partition are a unit, whichever strays contain them.
3. For each unit, leave out events that the topic had before this step (``TopicSnapshot``), and
   those that its ledger says are erased, as every copy does (``log.ledger``). The event's own time
   counts for that: an object may be older or newer than its events, and its date is lost when a
   store is copied. Append the others to that partition, in a commit of a producer that is named
   after the unit, with the events' indexes in it as sequences. If a living producer uploads the
   segment again, its commit creates the same row (``log.producer.append``), so only one of them
   lands. The commit expects the ledger that was read; if it has grown, the events are checked
   again.
4. List the segment as unused in that commit, and each journal in the last commit of its units. From
   then on they are not strays, and sweeps delete them. Objects of a unit with doubted or waiting
   events stay.

Each event found is one of appended, present, erased, doubted, waiting, trimmed, missing or earlier.
Objects where these do not add up stay. A dry run decides in the same way.

- **waiting**: a named writer sent it, and the topic does not have it. The writer's row, position
  and batch are as old as the catalog, so it sends the event again, in a segment with another id
  that nothing would match. The caller may say that these writers have resumed. A segment names its
  writer; a unit of which only journals are left waits if any named writer has a row in the
  partition.
- **trimmed**: a compile had read it before it died, and it was trimmed since. It stays in its
  journal (``stray_events``) unless the caller includes it.
- **earlier**: the row of the unit's producer exists, since an earlier call has appended the unit or
  a copy of its segment was committed. That row outlives the events, so it proves nothing alone.
  They count as earlier if the partition contains what was committed with the row, otherwise as
  trimmed.
- **missing**: a journal contains it, and a row holds it in an object that is missing. It stays.

| crash after | what it leaves                           | repair                                |
|-------------|------------------------------------------|---------------------------------------|
| 1           | a higher generation                      | producers upload again if they must   |
| 3, partly   | some of the units, and their rows        | the next call appends the others      |
| 3, upload   | a segment that has the unit's own id     | the next call and a sweep skip it     |
| 4           | all events                               | sweeps delete the strays              |

So a second call duplicates nothing, even events without an id, and two concurrent calls share the
work. The producer's row is kept for a week, like that of every unnamed one.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.catalog.update import Decision, Rows, attempts, update
from tidelog.codec.segment import encode_segment
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import list_pipelines
from tidelog.errors import (
    AlreadyExistsError,
    NotFoundError,
    UnavailableError,
)
from tidelog.journal.lookup import Lookup
from tidelog.journal.stray_events import StrayEvents, TopicSnapshot, Unit, UnitEvents
from tidelog.log.ledger import NOTHING_ERASED, ErasedIds, read_ledger
from tidelog.log.maintenance.lost_commits import generation_of
from tidelog.log.producer.append_plan import ALL_SEQUENCES, StoredSegment
from tidelog.log.producer.copier import Copier, LedgerMovedError
from tidelog.log.status import read_heads
from tidelog.log.topics import raise_epoch, raise_head, read_head
from tidelog.log.unused_objects import list_now
from tidelog.model import layout, limits
from tidelog.model.topic import (
    Head,
    Piece,
    ProducerState,
    Topic,
    decode_row,
    encode_row,
    pipeline_of,
    recovery_id,
    recovery_producer,
    writer_name,
    writer_words,
)

__all__ = ["RecoverReport", "recover_topic"]

_LEFT_OUT = ("present", "trimmed", "erased", "doubted", "earlier")  # counts of a report


@dataclass(slots=True)
class RecoverReport:
    """What was found and done; with ``dry_run``, what would be done."""

    topic: str
    dry_run: bool
    objects: int = 0  # strays that were read
    events: int = 0  # in strays, for partitions that do not know them
    appended: int = 0
    present: int = 0  # events that the topic has
    trimmed: int = 0  # events that were trimmed: left in their objects
    missing: int = 0  # events whose row names a missing object: left in their journals
    erased: int = 0  # events that were deleted, by the ledger
    doubted: int = 0  # events whose id has an updated value in the topic: left in their objects
    earlier: int = 0  # events that an earlier call has appended
    unaccounted: int = 0  # all other events: left in their objects
    waiting: int = 0  # events of named writers, which send them again: left in their objects
    writers: list[str] = field(default_factory=list)  # these writers, in words
    values: int = 0  # of updates, which do not name their event: left
    unreadable: list[str] = field(default_factory=list)  # objects that do not decode: left

    @property
    def is_clean(self) -> bool:
        """Returns whether nothing that a person must look at is left in the objects."""
        left = self.unreadable or self.waiting or self.trimmed or self.missing or self.unaccounted
        return not left


def recover_topic(
    context: Context,
    lookup: Lookup,
    *,
    dry_run: bool = False,
    writers_resumed: bool = False,
    include_trimmed: bool = False,
) -> RecoverReport:
    """Appends the events of a topic's strays that the topic does not have.

    Appends those of named writers only with ``writers_resumed``: these send again what the catalog
    has lost, and then the topic has it. Appends events that were trimmed after a compile that died
    had read them only with ``include_trimmed``. Raises ``CorruptError`` for rows that do not
    decode, and ``UnavailableError``: call it again.
    """
    topic = lookup.topic if dry_run else _fence(context, lookup.topic)
    below = None if dry_run else topic.generation
    found = StrayEvents(context, topic, below, include_trimmed=include_trimmed)
    report = RecoverReport(topic.name, dry_run, found.objects(), values=len(found.values))
    report.trimmed, report.missing = found.trimmed, found.missing()
    report.events = report.trimmed + report.missing
    recovery = _Recovery(context, lookup, found, report)
    recovery.writers_resumed = writers_resumed
    recovery.include_trimmed = include_trimmed
    recovery.keep(found.with_others)
    left = Counter(info.key for unit in found.units for info, _ in unit.journals)
    for unit in found.units:
        events = found.read(unit)
        if events is None:
            continue  # its journals are not listed either
        left.subtract({info.key for info, _ in unit.journals})
        finished = [info.key for info, _ in unit.journals if not left[info.key]]
        recovery.run(unit, events, finished)
    report.writers = _describe_writers(context, recovery.writers)
    report.unreadable = sorted(set(found.unreadable))
    for info in () if dry_run else found.unneeded:
        list_now(context, topic, layout.journal_place(info.key)[0], [info.key])
    return report


def _fence(context: Context, topic: Topic) -> Topic:
    """Step 1: returns the topic with a generation above all of its objects and floors."""
    heads = read_heads(context, topic)
    highest = max(topic.generation, *(head.floor for head in heads))
    for folder in (layout.segments(topic.incarnation), layout.amendments(topic.incarnation)):
        for info in context.store.list(folder):
            highest = max(highest, generation_of(info.key))
    raised = _raise_generation(context, topic, highest + 1)
    for partition in range(topic.partitions):

        def with_floor(head: Head) -> Head:
            return msgspec.structs.replace(head, floor=max(head.floor, raised.generation))

        raise_head(context, raised, partition, with_floor)
    epochs = Counter[int]()  # of the newest journal of each partition
    for info in context.store.list(layout.journals(topic.incarnation)):
        with contextlib.suppress(ValueError):  # not ours
            partition, epoch = layout.journal_place(info.key)
            epochs[partition] = max(epochs[partition], epoch)
    for partition in range(topic.partitions):
        raise_epoch(context, raised, partition, epochs[partition])
    return raised


def _raise_generation(context: Context, topic: Topic, wanted: int) -> Topic:
    name = layout.topic_row(topic.name)

    def decide(rows: Rows) -> Decision[Topic]:
        row = rows[name]
        now = None if row is None else decode_row(row.value, Topic, f"registry row `{name}`")
        if now is None or now.incarnation != topic.incarnation:
            raise NotFoundError(f"topic `{topic.name}`: was deleted: nothing was recovered")
        if now.generation >= wanted:
            return Decision(now)
        raised = msgspec.structs.replace(now, generation=wanted)
        return Decision(raised, [rows.put(name, encode_row(raised))])

    return update(context, layout.REGISTRY, [name], decide, f"topic `{topic.name}`")


class _UnitRecovery(Copier):
    """Appends the events of one unit."""

    finished: Sequence[str] = ()  # strays that the next commit lists as unused

    def producer_row(self, partition: int) -> tuple[ProducerState, tuple[str, str | None]]:
        """Returns the producer's row, and its name and version."""
        state, version = self._state(partition)
        return state, (layout.producer_row(self._producer), version)

    def reset_row(self, partition: int) -> None:
        """Lets the next commit replace the row, since its contents are no longer true."""
        _, version = self._state(partition)
        self._states[partition] = (ProducerState(self._epoch), version)

    def upload_as(
        self, segment_id: str, table: pa.Table, partition: int
    ) -> tuple[StoredSegment, Piece]:
        segment = encode_segment([(partition, table)], self.known([partition]))
        return self._upload(segment, segment_id, self._context.ids.new()), segment.pieces[0]

    def _unused(self, partition: int) -> Sequence[str]:
        return [*super()._unused(partition), *self.finished]


class _Recovery:
    """Steps 3 and 4."""

    writers_resumed = False
    include_trimmed = False

    def __init__(
        self, context: Context, lookup: Lookup, found: StrayEvents, report: RecoverReport
    ) -> None:
        self._context = context
        self._topic = found.topic
        self._lookup = lookup
        self._found = found
        self._report = report
        self._erased = read_ledger(context, self._topic) if report.dry_run else NOTHING_ERASED
        self._present = TopicSnapshot(context, lookup)
        self._doubted: set[str] = set()  # objects with events that the topic may have, or will
        self._any: dict[int, str] = {}  # of each partition, a named writer with a row in it
        self.writers: set[str] = set()  # whose events wait

    def keep(self, objects: Iterable[str]) -> None:
        """Leaves these objects as they are, although all their units are done."""
        self._doubted.update(objects)

    def run(self, unit: Unit, events: UnitEvents, journals: Sequence[str]) -> None:
        """Recovers one unit, and these journals, which contain nothing else to recover."""
        self._report.events += events.table.num_rows
        if self._waits(unit, events):
            return
        if self._report.dry_run:
            appended = len(self._to_append(unit, events, self._appender(unit)))
            self._report.appended += appended
            return
        for _ in attempts(self._context, _busy(self._topic)):
            before = self._counted()
            try:
                self._report.appended += self._append(unit, events, journals)
            except AlreadyExistsError:  # another call recovers it at the same time
                self._count(before)
            else:
                return

    def _waits(self, unit: Unit, events: UnitEvents) -> bool:
        """Returns whether a named writer will send events of a unit again; if so, it is left."""
        writer = unit.writer
        if writer is None and not self.writers_resumed:
            writer = self._any_writer(unit.partition)
        if not writer or self.writers_resumed:
            return False
        before = self._counted()
        self._erased = read_ledger(self._context, self._topic)
        absent = len(self._to_append(unit, events, self._appender(unit)))
        if not absent:
            self._count(before)
            return False  # it has sent them
        self._report.waiting += absent
        self.writers.add(writer)
        self._doubted.update(_objects(unit))
        return True

    def _any_writer(self, partition: int) -> str:
        if partition not in self._any:
            self._any[partition] = _find_writer(self._context, self._topic, partition)
        return self._any[partition]

    def _counted(self) -> dict[str, int]:
        """Returns the counts so far of events that are not appended."""
        return {name: getattr(self._report, name) for name in _LEFT_OUT}

    def _count(self, counted: dict[str, int]) -> None:
        for name, count in counted.items():
            setattr(self._report, name, count)

    def _to_append(
        self, unit: Unit, events: UnitEvents, appender: _UnitRecovery
    ) -> npt.NDArray[np.int64]:
        """Returns the rows of events to append; counts all others.

        Leaves the objects of a unit with events that fall into no category of the report.
        """
        before = sum(self._counted().values())
        rows = self._absent(unit, events)
        rows = rows[~self._had(unit, events.places[rows], appender)]
        counted = sum(self._counted().values()) - before
        rest = events.table.num_rows - counted - len(rows)
        if rest:
            self._report.unaccounted += rest
            self._doubted.update(_objects(unit))
        return rows

    def _absent(self, unit: Unit, events: UnitEvents) -> npt.NDArray[np.int64]:
        """Returns the rows of events that the topic does not have, by their contents."""
        has, doubted = self._present.look(events.table)
        kept = self._kept(events.table)
        self._report.present += int(has.sum())
        self._report.erased += int((~has & ~kept).sum())
        doubted &= ~has & kept
        if doubted.any():
            self._report.doubted += int(doubted.sum())
            self._doubted.update(_objects(unit))
        return np.flatnonzero(~has & kept & ~doubted)

    def _kept(self, events: pa.Table) -> npt.NDArray[np.bool_]:
        """Returns which events were not erased, by the ledger as last read."""
        kept = self._erased.kept(events)
        return np.ones(events.num_rows, np.bool_) if kept is None else kept

    def _had(
        self, unit: Unit, places: npt.NDArray[np.int64], appender: _UnitRecovery
    ) -> npt.NDArray[np.bool_]:
        """Returns which of a unit's events the partition had once, by the row of the unit's
        producer.

        That row alone proves nothing, since it outlives the events. They count as appended if the
        partition contains what was committed with the row, otherwise as trimmed. Trimmed ones are
        appended on request, and then the row is replaced. If an object is missing they are doubted,
        and so are those that an earlier call left out, since a later commit has numbered others.
        """
        state, row = appender.producer_row(unit.partition)
        said = places <= state.last
        if not said.any():
            return said
        is_claim = state.last == ALL_SEQUENCES
        listed = np.array([each for one in state.recent for each in one.sequences()], np.int64)
        known = said if is_claim else said & np.isin(places, listed)
        held = self._found.holds(
            unit.partition,
            unit.origin if is_claim else recovery_id(unit.origin, unit.partition),
            row,
        )
        if held and not is_claim:
            start = read_head(self._context, self._topic, unit.partition)[0].start
            held = all(one.base + one.count > start for one in state.recent)
        if held is False and self.include_trimmed:
            appender.reset_row(unit.partition)
            return np.zeros(len(places), np.bool_)
        if held:
            self._report.earlier += int(known.sum())
            self._doubt(unit, int((said & ~known).sum()))
            return said
        if held is None:
            self._doubt(unit, len(places))
        else:
            self._report.trimmed += len(places)
            self._doubted.update(_objects(unit))
        return np.ones(len(places), np.bool_)

    def _doubt(self, unit: Unit, events: int) -> None:
        if events:
            self._report.doubted += events
            self._doubted.update(_objects(unit))

    def _appender(self, unit: Unit) -> _UnitRecovery:
        producer = recovery_producer(unit.origin, unit.partition)
        return _UnitRecovery(self._context, self._topic, producer)

    def _append(self, unit: Unit, events: UnitEvents, journals: Sequence[str]) -> int:
        """Appends what no earlier call has, and lists the strays.

        Returns how many were appended.
        """
        appender = self._appender(unit)
        appender.erased = self._erased
        before = self._counted()

        def attempt(erased: ErasedIds) -> int:
            self._erased = erased
            self._count(before)
            left = self._to_append(unit, events, appender)
            finished = [*([] if unit.segment is None else [unit.segment.key]), *journals]
            finished = [key for key in finished if key not in self._doubted]
            self._commit(appender, unit, events, left, finished)
            return len(left)

        return appender.copy(attempt)

    def _commit(
        self,
        appender: _UnitRecovery,
        unit: Unit,
        events: UnitEvents,
        rows: npt.NDArray[np.int64],
        finished: Sequence[str],
    ) -> None:
        most = limits.SEGMENT_EVENTS_MAX  # all events of a segment at once
        for first in range(0, len(rows), most):
            taken = rows[first : first + most]
            stored, piece = appender.upload_as(
                recovery_id(unit.origin, unit.partition),
                events.table.take(pa.array(taken)),
                unit.partition,
            )
            appender.finished = finished if first + most >= len(rows) else ()
            try:
                appender.commit(stored, piece, events.places[taken].tolist())
            except (AlreadyExistsError, LedgerMovedError):
                appender.abandon(unit.partition, stored)  # it may contain erased events
                appender.list_abandoned()
                raise
        if finished and not len(rows):
            list_now(self._context, self._topic, unit.partition, finished)


def _objects(unit: Unit) -> set[str]:
    """Returns the strays that contain a unit."""
    journals = {info.key for info, _ in unit.journals}
    return journals if unit.segment is None else journals | {unit.segment.key}


def _busy(topic: Topic) -> UnavailableError:
    return UnavailableError(f"topic `{topic.name}`: too many writers at once: recover it again")


def _find_writer(context: Context, topic: Topic, partition: int) -> str:
    """Returns a named writer that has a row in a partition; empty if there is none."""
    where = layout.topic_partition(topic.incarnation, partition)
    rows = context.catalog.scan(where, *layout.producer_rows())
    return next((name for row in rows if (name := writer_name(layout.producer_of(row.row)))), "")


def _describe_writers(context: Context, writers: Collection[str]) -> list[str]:
    """Returns writers as users know them; a pump or restore by its name, if its row exists."""
    pipelines = {pipeline for writer in writers if (pipeline := pipeline_of(writer))}
    names: dict[str, str] = {}
    for found in list_pipelines(context) if pipelines else ():
        names[found.incarnation] = found.name
    told = set()
    for writer in writers:
        pipeline = pipeline_of(writer)
        if pipeline is None:
            told.add(writer_words(writer))
        elif pipeline in names:
            told.add(f"pump or restore `{names[pipeline]}`")
        else:
            told.add("a pump or restore that the catalog does not know")
    return sorted(told)
