"""Recovering events of objects that the catalog has forgotten: they are appended again.

A stray is an object that fewer partitions name or list as unused than it has events of (``losses``
in ``log``): its commit was lost with a newer catalog, or a producer died before it. Segments and
journals say which events they hold (``forgotten``). A large value of an update does not name its
event, so it is counted and left.

1. raise the topic's generation above that of every object and every floor, then the floor of every
   head: a producer that has uploaded a stray and is still at work must upload it to commit it.
   Raise the epoch of compilers above that of every journal: no swap can bring one in any more
2. list the objects below that generation, then read all rows: what is left over are the strays. The
   events of one segment for one partition are a unit, in whichever strays they are
3. for each unit: leave out events that the topic had before this step (``present``), and those that
   its ledger says are erased, as every copy does (``log.copying``): by the event's own time, since
   an object may be older or newer than what it holds, and its date is lost when a store is copied.
   Append the others to that partition, in a commit of a producer that is named after the unit, with
   the events' places in it as sequences. The commit of a living producer that has uploaded the
   segment again creates the same row (``log.append``): only one of them lands. The commit expects
   the ledger that was read, else the events are looked at again
   Events of a named writer that the topic does not have **wait**, unless the caller says that these
   writers have resumed: its row, its position and its batch are as old as the catalog, so it sends
   them again under another segment's id, which nothing would match. A segment names its writer; a
   unit of which only journals are left waits if any named writer has a row in the partition
   Events that a compile had read before it died, and that were **trimmed** since, stay in their
   journal too (``forgotten``), unless the caller includes them
   The row of the unit's producer may be there already: an earlier call has appended the unit, or
   a copy of its segment was committed. That row outlives the events, so it proves nothing alone.
   They count as appended **earlier** where the partition holds what was committed with the row,
   else as trimmed
   Events that a journal has, and that a row holds in an object which is **missing**, stay in it
4. each event found is one of appended, present, erased, doubted, waiting, trimmed, missing or
   earlier; objects where these do not add up stay. A dry run decides in the same way
   list the segment as unused in that commit, and each journal in the last commit of its units: from
   then on they are not strays, and sweeps delete them. Objects of a unit with doubted events, or
   with events that wait, stay

| dies after  | what is there                            | who repairs                           |
|-------------|------------------------------------------|---------------------------------------|
| 1           | a higher generation                      | producers upload again if they must   |
| 3, partly   | some of the units, and their rows        | the next call appends the others      |
| 3, upload   | a segment that has the unit's own id     | the next call passes it, a sweep too  |
| 4           | all events                               | sweeps delete the strays              |

So a second call doubles nothing, also for events without an id, and two calls at once share the
work. The producer's row is kept for a week, as that of every unnamed one.

The named writers of a topic, which send again what a restored catalog has forgotten of them.
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

from tidelog.catalog.base import Put
from tidelog.codec.segment import Piece, encode_segment
from tidelog.context import Context
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.journal.lookup.lookup import Lookup
from tidelog.journal.recover.stray_events import Forgotten, Present, Unit, UnitEvents
from tidelog.log.heads import RACE, raise_epoch, raise_head
from tidelog.log.ledger import NOTHING_ERASED, Copier, ErasedIds, LedgerMovedError, read_ledger
from tidelog.log.maintenance.unused import list_now
from tidelog.log.producer.append_plan import ALL_SEQUENCES, StoredSegment
from tidelog.log.topics import read_head
from tidelog.model import layout, limits
from tidelog.model.partition_rows import Head, ProducerState, decode_row, encode_row
from tidelog.model.pipeline import NamedPipeline
from tidelog.model.producer_names import (
    pipeline_of,
    recovery_id,
    recovery_producer,
    writer_name,
    writer_words,
)
from tidelog.model.topic import Topic

__all__ = [
    "RecoverReport",
    "any_writer",
    "in_words",
    "recover_topic",
]

_LEFT_OUT = ("present", "trimmed", "erased", "doubted", "earlier")  # counts of a report


@dataclass(slots=True)
class RecoverReport:
    """What was found and done; with ``dry_run``, what would be done."""

    topic: str
    dry_run: bool
    objects: int = 0  # strays that were read
    events: int = 0  # that they hold for partitions which do not know them
    appended: int = 0
    present: int = 0  # events that the topic has
    trimmed: int = 0  # events that the topic was trimmed of: left in their objects
    missing: int = 0  # events whose row names a missing object: left in their journals
    erased: int = 0  # events that were deleted, by the ledger
    doubted: int = 0  # events whose id the topic has with an updated value: left in their objects
    earlier: int = 0  # events that an earlier call has appended
    unaccounted: int = 0  # events that are none of these: left in their objects
    waiting: int = 0  # events of named writers, which send them again: left in their objects
    writers: list[str] = field(default_factory=list)  # these, in words
    values: int = 0  # of updates, which do not name their event: left
    unreadable: list[str] = field(default_factory=list)  # objects that do not decode: left


def recover_topic(
    context: Context,
    lookup: Lookup,
    *,
    dry_run: bool = False,
    writers_resumed: bool = False,
    include_trimmed: bool = False,
) -> RecoverReport:
    """Append the events of a topic's strays that the topic does not have.

    Those of named writers only with ``writers_resumed``: these send again what the catalog has
    forgotten, and then the topic has it. Those that the topic was trimmed of, after a compile that
    died had read them, only with ``include_trimmed``.

    ``CorruptError`` for rows that do not decode, ``UnavailableError`` as usual: call it again.
    """
    topic = lookup.topic if dry_run else _fence(context, lookup.topic)
    below = None if dry_run else topic.generation
    found = Forgotten(context, topic, below, include_trimmed=include_trimmed)
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
            continue  # nor are its journals listed
        left.subtract({info.key for info, _ in unit.journals})
        finished = [info.key for info, _ in unit.journals if not left[info.key]]
        recovery.run(unit, events, finished)
    report.writers = in_words(context, recovery.writers)
    report.unreadable = sorted(set(found.unreadable))
    for info in () if dry_run else found.unneeded:
        list_now(context, topic, layout.journal_place(info.key)[0], [info.key])
    return report


def _fence(context: Context, topic: Topic) -> Topic:
    """Step 1: the topic with a generation that is above all of its objects and floors."""
    heads = [read_head(context, topic, partition)[0] for partition in range(topic.partitions)]
    highest = max(topic.generation, *(head.floor for head in heads))
    for folder in (layout.segments(topic.incarnation), layout.amendments(topic.incarnation)):
        for info in context.store.list(folder):
            highest = max(highest, _generation(info.key))
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
    for delay_s in RACE.delays_s(context.random):
        row = context.catalog.get(layout.REGISTRY, layout.topic_row(topic.name))
        now = None if row is None else decode_row(row.value, Topic, f"registry row `{row.row}`")
        if row is None or now is None or now.incarnation != topic.incarnation:
            raise NotFoundError(f"topic `{topic.name}`: was deleted: nothing was recovered")
        if now.generation >= wanted:
            return now
        raised = msgspec.structs.replace(now, generation=wanted)
        change = Put(row.row, encode_row(raised), expect=row.version)
        try:
            context.catalog.write(layout.REGISTRY, change, write_id=context.ids.new())
        except (ConflictError, UnknownOutcomeError):
            context.clock.sleep(delay_s)
    raise _busy(topic)


class _UnitRecovery(Copier):
    """Appends the events of one unit."""

    finished: Sequence[str] = ()  # strays, which the next commit lists as unused

    def said(self, partition: int) -> tuple[ProducerState, tuple[str, str | None]]:
        """What the producer's row says, and its name and version."""
        state, version = self._state(partition)
        return state, (layout.producer_row(self._producer), version)

    def disown(self, partition: int) -> None:
        """Let the next commit replace the row as it is: what it says is not true any more."""
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
        self, context: Context, lookup: Lookup, found: Forgotten, report: RecoverReport
    ) -> None:
        self._context = context
        self._topic = found.topic
        self._lookup = lookup
        self._found = found
        self._report = report
        self._erased = read_ledger(context, self._topic) if report.dry_run else NOTHING_ERASED
        self._present = Present(context, lookup)
        self._doubted: set[str] = set()  # objects with events that the topic may have, or will
        self._any: dict[int, str] = {}  # of each partition, a named writer that has a row in it
        self.writers: set[str] = set()  # whose events wait

    def keep(self, objects: Iterable[str]) -> None:
        """Leave these objects as they are, though all their units are done."""
        self._doubted.update(objects)

    def run(self, unit: Unit, events: UnitEvents, journals: Sequence[str]) -> None:
        """One unit, and these journals, which have nothing else to recover."""
        self._report.events += events.table.num_rows
        if self._waits(unit, events):
            return
        if self._report.dry_run:
            appended = len(self._to_append(unit, events, self._appender(unit)))
            self._report.appended += appended
            return
        for delay_s in RACE.delays_s(self._context.random):
            before = self._counted()
            try:
                self._report.appended += self._append(unit, events, journals)
            except AlreadyExistsError:  # another call recovers it at the same time
                self._count(before)
                self._context.clock.sleep(delay_s)
            else:
                return
        raise _busy(self._topic)

    def _waits(self, unit: Unit, events: UnitEvents) -> bool:
        """Whether a named writer will send events of a unit again: then the unit is left."""
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
            self._any[partition] = any_writer(self._context, self._topic, partition)
        return self._any[partition]

    def _counted(self) -> dict[str, int]:
        """What was counted so far of events that are not appended."""
        return {name: getattr(self._report, name) for name in _LEFT_OUT}

    def _count(self, counted: dict[str, int]) -> None:
        for name, count in counted.items():
            setattr(self._report, name, count)

    def _to_append(
        self, unit: Unit, events: UnitEvents, appender: _UnitRecovery
    ) -> npt.NDArray[np.int64]:
        """The rows of events that are to be appended; all others are counted.

        The objects of a unit with events that are none of those that the report knows are left.
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
        """The rows of events that the topic does not have, as far as their contents tell."""
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
        """Which events were not erased, by the ledger as it was read last."""
        kept = self._erased.kept(events)
        return np.ones(events.num_rows, np.bool_) if kept is None else kept

    def _had(
        self, unit: Unit, places: npt.NDArray[np.int64], appender: _UnitRecovery
    ) -> npt.NDArray[np.bool_]:
        """Which of a unit's events the partition had once, by the row of the unit's producer.

        That row alone proves nothing: it outlives the events. They count as appended where the
        partition holds what was committed with the row, else as trimmed. Trimmed ones are appended
        on request, and the row is replaced then. Where an object is missing they are doubted, and
        so are those that an earlier call left out, since a later commit has numbered others.
        """
        state, row = appender.said(unit.partition)
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
            appender.disown(unit.partition)
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
        """Append those that no earlier call has appended, and list the strays; how many."""
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
                appender.abandon(unit.partition, stored)  # it may hold erased events
                appender.list_abandoned()
                raise
        if finished and not len(rows):
            list_now(self._context, self._topic, unit.partition, finished)


def _objects(unit: Unit) -> set[str]:
    """The strays that hold a unit."""
    journals = {info.key for info, _ in unit.journals}
    return journals if unit.segment is None else journals | {unit.segment.key}


def _generation(key: str) -> int:
    try:
        return layout.segment_generation(key)
    except ValueError:
        return -1


def _busy(topic: Topic) -> UnavailableError:
    return UnavailableError(f"topic `{topic.name}`: too many writers at once: recover it again")


def any_writer(context: Context, topic: Topic, partition: int) -> str:
    """A named writer that has a row in a partition; an empty text if there is none."""
    where = layout.topic_partition(topic.incarnation, partition)
    rows = context.catalog.scan(where, *layout.producer_rows())
    return next((name for row in rows if (name := writer_name(layout.producer_of(row.row)))), "")


def in_words(context: Context, writers: Collection[str]) -> list[str]:
    """Names writers as users know them; a pump or restore by its name, if its row is there."""
    pipelines = {pipeline for writer in writers if (pipeline := pipeline_of(writer))}
    names: dict[str, str] = {}
    for row in context.catalog.scan(layout.REGISTRY, *layout.pipeline_rows()) if pipelines else ():
        found = decode_row(row.value, NamedPipeline, f"registry row `{row.row}`")
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
