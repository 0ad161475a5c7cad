"""Reads which events strays contain, and from which segment each came. Writes nothing; see
``recover``.

One event may be in several objects: in a segment, in copies of it, in each journal that was built
from it, and in later journals. In all of them it has the same segment id (its **origin**) and the
same index in that segment, which journals list as their sources. The events of one origin for one
partition are a **unit**.

- A segment gives units for the partitions that neither name nor list it.
- A journal gives units for sources that the partition does not hold. It holds a source through a
  live row of a run or a journal, or through a row that lists a segment which still exists, so it
  was trimmed, compiled or recovered. A journal whose sources are all held is not needed. If a
  source is held only by a row that names a missing object, the journal is left: it may be the only
  copy.
- A journal of a compile that died is also listed by the plan of that compile (``unused_objects``).
  What it contains below the partition's start was trimmed since, and is part of a unit only on
  request.
- If a journal contains a range of a unit, it is right, even about events that it lacks: these were
  deleted. Of several journals the newest is right.
- Segments that a recovery has made of a unit are not units while the original unit exists.

Rows are read after the listing. An object that exists after its rows were read was not swept before
that, since sweeps delete objects before the rows that list them.

:class:`TopicSnapshot` decides which events the topic already has. Ids need not be unique: an id may
be that of a thing, and each event a new version of it. So an event counts as present only if the
topic had the same one before the recovery: the same id, key, type, headers and value, and a time
that is not earlier, since a producer may have sent it again. What the recovery itself appends does
not count.

An update replaces a value and leaves no trace in the event. If an id was updated, an event with it
and another value may be an older state of the one in the topic, or another event. Such an event is
**doubted**: it is not appended, and its object is not listed as unused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidelog.catalog.update import read_stable
from tidelog.codec.event_batch import STORED_SCHEMA
from tidelog.codec.journal_file import JOURNAL_SCHEMA, read_sources
from tidelog.codec.segment import read_known
from tidelog.context import Context
from tidelog.coordination.audit import id_hash, read_records
from tidelog.errors import CorruptError, NotFoundError, UnavailableError
from tidelog.journal.lookup import Lookup, Occurrence
from tidelog.log.maintenance.lost_commits import generation_of
from tidelog.log.maintenance.object_references import References, read_references
from tidelog.log.topics import read_head
from tidelog.log.unused_objects import ObjectUses, origin_of, planned_starts
from tidelog.model import layout
from tidelog.model.topic import (
    AppenderView,
    HeldRow,
    JournalOrigin,
    Topic,
    decode_row,
    recovery_id,
)
from tidelog.store.base import ObjectInfo, object_exists

__all__ = [
    "StrayEvents",
    "TopicSnapshot",
    "Unit",
    "UnitEvents",
]


@dataclass(slots=True)
class Unit:
    """The events of one origin for one partition, and which strays contain them."""

    origin: str
    partition: int
    at: int  # their approximate offset
    writer: str | None = None  # its producer, if that has a name; None if only journals are left
    segment: ObjectInfo | None = None
    journals: list[tuple[ObjectInfo, JournalOrigin]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class UnitEvents:
    """The events of a unit that are not deleted, in order."""

    table: pa.Table
    places: npt.NDArray[np.int64]  # indexes in the origin


class StrayEvents:
    """The strays of a topic, from one read of the store and the catalog."""

    def __init__(
        self,
        context: Context,
        topic: Topic,
        below: int | None,
        *,
        include_trimmed: bool = False,
        in_progress: bool = False,
    ) -> None:
        """Segments from generation ``below`` on may be in progress, and are skipped.

        So are journals that a compile may be working on, unless ``in_progress``.
        """
        self._include_trimmed = include_trimmed
        self._context = context
        self.topic = topic
        self.units: list[Unit] = []
        self.unneeded: list[ObjectInfo] = []  # journals that only contain what the topic has
        self.unreadable: list[str] = []
        self.trimmed = 0  # events of journals that were trimmed from the topic
        self.with_others: set[str] = set()  # journals with trimmed or missing events: left
        self._missing: dict[tuple[int, str], int] = {}  # by partition and origin, how many
        self.values: list[str] = []  # large values of updates
        self._read: tuple[str, pa.Table] = ("", None)
        before = self._compilers()
        objects = [
            info
            for folder in (layout.segments, layout.journals, layout.amendments)
            for info in context.store.list(folder(topic.incarnation))
            if below is None or folder is layout.journals or generation_of(info.key) < below
        ]
        self._keys = {info.key for info in objects}
        references = [self._references(each) for each in range(topic.partitions)]
        self._rows = references  # of each partition, as last read
        self._holding: dict[int, dict[str, bool] | None] = {}  # what they hold: see `_read_held`
        after = self._compilers()
        uses = ObjectUses(self._keys)
        for partition, rows in enumerate(references):
            uses.add(partition, rows.objects)
            uses.add(partition, rows.leftovers)
            uses.add_rows(partition, rows.unused)
        found: dict[tuple[str, int], Unit] = {}
        journals = []
        for info in objects:
            if uses.is_settled(info.key):
                continue
            if info.key.startswith(layout.amendments(topic.incarnation)):
                self.values.append(info.key)
            elif info.key.startswith(layout.segments(topic.incarnation)):
                self._add_segment(found, info, uses)
            elif in_progress or _is_compile_over(info.key, before, after):
                journals.append(info)
        self._add_journals(found, journals)
        ours = {recovery_id(origin, partition) for origin, partition in found}
        self.units = sorted(
            (unit for unit in found.values() if unit.origin not in ours),
            key=lambda unit: (unit.at, unit.origin, unit.partition),
        )

    def objects(self) -> int:
        """Returns how many strays contain units."""
        keys = {unit.segment.key for unit in self.units if unit.segment is not None}
        return len(keys | {info.key for unit in self.units for info, _ in unit.journals})

    def missing(self) -> int:
        """Returns how many events of journals are held by rows that name missing objects."""
        return sum(self._missing.values())

    def read(self, unit: Unit) -> UnitEvents | None:
        """Returns the events of a unit.

        None if a sweep has deleted its objects, or one is damaged.
        """
        parts: list[UnitEvents] = []
        covered: list[JournalOrigin] = []
        newest = sorted(unit.journals, key=lambda each: each[0].key, reverse=True)
        for info, source in newest:
            table = self._table(info, unit.partition)
            if table is None:
                return None
            parts.append(_stretch(table, source, covered))
            covered.append(source)
        if unit.segment is not None:
            table = self._table(unit.segment, unit.partition)
            if table is None:
                return None
            whole = JournalOrigin(0, table.num_rows, unit.origin, 0)
            numbered = table.add_column(0, "offset", pa.array(np.arange(table.num_rows)))
            parts.append(_stretch(numbered, whole, covered))
        places = np.concatenate([part.places for part in parts])
        order = np.argsort(places, kind="stable")
        joined = pa.concat_tables([part.table for part in parts])
        taken = joined.take(pa.array(order)).combine_chunks()
        return UnitEvents(taken, places[order])

    def _compilers(self) -> list[HeldRow]:
        found = []
        for partition in range(self.topic.partitions):
            where = layout.topic_partition(self.topic.incarnation, partition)
            row = self._context.catalog.get(where, layout.COMPILE_ROW)
            what = f"compile row of `{self.topic.name}/{partition}`"
            found.append(HeldRow("", 0) if row is None else decode_row(row.value, HeldRow, what))
        return found

    def _references(self, partition: int) -> References:
        """Returns the rows of a partition, read without a compile or a trim in between."""
        head, _ = read_head(self._context, self.topic, partition)

        def read() -> References | None:
            nonlocal head
            found = read_references(self._context, self.topic, partition, head)
            before, (head, _) = head, read_head(self._context, self.topic, partition)
            is_same = (head.start, head.compiled) == (before.start, before.compiled)
            return found if is_same else None

        return read_stable(self._context, read, self._changing_error())

    def _add_segment(
        self, found: dict[tuple[str, int], Unit], info: ObjectInfo, uses: ObjectUses
    ) -> None:
        data = self._data(info)
        if data is None:
            return
        try:
            known: Sequence[AppenderView] = read_known(data, f"segment `{info.key}`")
        except CorruptError:
            self.unreadable.append(info.key)
            return
        origin, _ = origin_of(info.key)
        for each in known:
            is_here = 0 <= each.partition < self.topic.partitions
            if is_here and not uses.is_known(info.key, each.partition):
                unit = found.setdefault(
                    (origin, each.partition), Unit(origin, each.partition, each.next)
                )
                unit.segment, unit.writer = unit.segment or info, each.writer

    def _add_journals(
        self,
        found: dict[tuple[str, int], Unit],
        journals: Sequence[ObjectInfo],
    ) -> None:
        for info in journals:
            data = self._data(info)
            if data is None:
                continue
            partition, _ = layout.journal_place(info.key)
            try:
                sources = self._sources(info.key, data) or [_itself(info.key, data)]
            except CorruptError:
                self.unreadable.append(info.key)
                continue
            here = self._held_origins(partition)
            if here is None:
                continue  # it may be the only copy: left
            sources = self._untrimmed_sources(info.key, sources, here, self._rows[partition])
            forgotten = [each for each in sources if each.origin not in here]
            for source in forgotten:
                key = (source.origin, partition)
                unit = found.setdefault(key, Unit(source.origin, partition, source.base))
                unit.at = source.base
                unit.journals.append((info, source))
            absent = [each for each in sources if not here.get(each.origin, True)]
            self._missing.update({(partition, each.origin): each.count for each in absent})
            if absent:
                self.with_others.add(info.key)
            if info.key not in self.with_others and not forgotten:
                self.unneeded.append(info)

    def _untrimmed_sources(
        self, key: str, sources: list[JournalOrigin], here: Mapping[str, bool], rows: References
    ) -> list[JournalOrigin]:
        """Returns the sources of a journal, without what was trimmed from the partition since.

        Only the plan of its compile proves that: without it, the offsets may have been used twice.
        """
        if self._include_trimmed:
            return sources
        start = planned_starts(rows.unused).get("/".join(layout.journal_work(key)), 0)
        kept = []
        for each in sources:
            passed = min(max(start - each.base, 0), each.count)
            if passed and each.origin not in here:
                self.trimmed += passed
                self.with_others.add(key)
            if passed < each.count:
                kept.append(
                    msgspec.structs.replace(
                        each,
                        base=each.base + passed,
                        count=each.count - passed,
                        place=each.place + passed,
                    )
                )
        return kept

    def holds(self, partition: int, origin: str, row: tuple[str, str | None]) -> bool | None:
        """Returns whether a partition holds the events of an origin, by its rows.

        Reads the rows again unless they included this producer's row, in this version: then they
        also include what was committed with it. Returns None if it holds, or may hold, them in an
        object that is missing.
        """
        if all((each.row, each.version) != row for each in self._rows[partition].producers):
            self._rows[partition] = self._references(partition)
            self._holding.pop(partition, None)
        here = self._held_origins(partition)
        if here is None:
            return None
        return (here[origin] or None) if origin in here else False

    def _held_origins(self, partition: int) -> dict[str, bool] | None:
        if partition not in self._holding:
            self._holding[partition] = self._read_held(partition, self._rows[partition])
        return self._holding[partition]

    def _read_held(self, partition: int, rows: References) -> dict[str, bool] | None:
        """Returns the origins of all events that a partition holds, and whether their objects
        exist.

        Returns None if a row names a missing journal, so that its sources are unknown.
        """
        there = {origin_of(key)[0] for key in self._keys if key.endswith(".arrow")}
        listed = (*rows.leftovers, *(key for row in rows.unused for key in row.objects))
        found = {origin: True for key in listed if (origin := origin_of(key)[0]) in there}
        for key in rows.objects:
            if not key.endswith(".parquet"):
                found[origin_of(key)[0]] = self._is_there(key)
                continue
            try:
                size = self._context.store.head(key).size
                sources = read_sources(
                    lambda start, end, key=key: self._context.store.get(key, start, end),  # type: ignore[misc]
                    size,
                    f"journal `{key}`",
                )
            except NotFoundError:
                if key not in self._references(partition).objects:
                    raise self._changing_error() from None
                self.unreadable.append(key)
                return None
            except CorruptError:
                self.unreadable.append(key)
                return None
            for source in sources:
                found[source.origin] = True
        return found

    def _is_there(self, key: str) -> bool:
        """Returns whether an object exists.

        Asks the store for one that is newer than the listing.
        """
        return key in self._keys or object_exists(self._context.store, key)

    def _sources(self, key: str, data: bytes) -> list[JournalOrigin]:
        return read_sources(lambda start, end: data[start:end], len(data), f"journal `{key}`")

    def _data(self, info: ObjectInfo) -> bytes | None:
        """Returns an object's bytes; None if it was deleted, even if a cache has it."""
        try:
            self._context.store.head(info.key)
            return self._context.store.get(info.key)
        except NotFoundError:
            return None

    def _table(self, info: ObjectInfo, partition: int) -> pa.Table | None:
        """Returns the events that an object has for a partition.

        None if it is missing or damaged.
        """
        if self._read[0] == info.key and info.key.endswith(".parquet"):
            return self._read[1]
        data = self._data(info)
        if data is None:
            return None
        try:
            if info.key.endswith(".parquet"):
                table = _read_journal(data)
                self._read = (info.key, table)
                return table
            return _read_segment(data, partition, info.key)
        except (CorruptError, pa.ArrowInvalid, OSError, EOFError):
            self.unreadable.append(info.key)
            return None

    def _changing_error(self) -> UnavailableError:
        return UnavailableError(
            f"topic `{self.topic.name}`: is compiled or trimmed while it is read: recover it again"
        )


def _stretch(
    table: pa.Table, source: JournalOrigin, covered: Sequence[JournalOrigin]
) -> UnitEvents:
    """Returns the rows of one source, without indexes that newer journals cover."""
    offsets = table.column("offset").to_numpy()
    first, last = np.searchsorted(offsets, [source.base, source.base + source.count])
    places = offsets[first:last] - source.base + source.place
    keep = np.ones(len(places), np.bool_)
    for other in covered:
        keep &= (places < other.place) | (places >= other.place + other.count)
    rows = table.slice(first, last - first).filter(pa.array(keep)).select(STORED_SCHEMA.names)
    return UnitEvents(rows, places[keep].astype(np.int64))


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
    return table.select(JOURNAL_SCHEMA.names).cast(JOURNAL_SCHEMA).combine_chunks()


def _itself(key: str, data: bytes) -> JournalOrigin:
    """Returns what a journal without a list of sources counts as. Raises ``CorruptError``."""
    try:
        offsets = pq.read_table(pa.BufferReader(data), columns=["offset"]).column("offset")
    except (pa.ArrowInvalid, OSError, EOFError) as exc:
        raise CorruptError(f"journal `{key}`: does not decode ({exc}): keep the object") from exc
    base = layout.journal_base(key)
    end = pc.max(offsets).as_py() if len(offsets) else base
    return JournalOrigin(base, end + 1 - base, origin_of(key)[0], 0)


def _is_compile_over(key: str, before: Sequence[HeldRow], after: Sequence[HeldRow]) -> bool:
    """Returns whether no compile works on a journal, or has since the objects were listed."""
    try:
        partition, epoch = layout.journal_place(key)
        layout.journal_base(key)
    except ValueError:
        return False  # not ours
    if not 0 <= partition < len(before):
        return False
    if before[partition].owner and epoch == before[partition].epoch:
        return False
    return not before[partition].epoch < epoch <= after[partition].epoch


_LOOKED_UP = 10_000  # ids per lookup
_READ = 200  # events per read, with their values
_SAME = [name for name in STORED_SCHEMA.names if name != "timestamp"]

Rows = npt.NDArray[np.bool_]


class TopicSnapshot:
    """What a topic had when this was created."""

    def __init__(self, context: Context, lookup: Lookup) -> None:
        self._context = context
        self._lookup = lookup
        self._topic = lookup.topic
        partitions = range(self._topic.partitions)
        self._ends = [read_head(context, self._topic, each)[0].next for each in partitions]

    def look(self, events: pa.Table) -> tuple[Rows, Rows]:
        """Returns which rows the topic has, and which are doubted."""
        has, doubted = (np.zeros(events.num_rows, np.bool_) for _ in range(2))
        rows: dict[str, list[int]] = {}
        for row, event_id in enumerate(events.column("id").to_pylist()):
            if event_id is not None:
                rows.setdefault(event_id, []).append(row)
        met = self._known_ids(sorted(rows))
        updated = self._updated_marks() if met else set()
        times = events.column("timestamp").cast(pa.int64())
        for first in range(0, len(met), _READ):
            found = self._lookup.find(met[first : first + _READ], columns=None).events
            for event_id, some in found.items():
                there = [each for each in some if self._was_here(each)]
                is_updated = id_hash(event_id) in updated
                for row in rows[event_id]:
                    content, time_ms = _content(events.slice(row, 1)), times[row].as_py()
                    if any(e.time_ms >= time_ms and _content(e.row) == content for e in there):
                        has[row] = True
                    else:
                        doubted[row] = is_updated and bool(there)
        return has, doubted

    def _known_ids(self, ids: Sequence[str]) -> list[str]:
        """Returns the ids that events of the topic have."""
        met: list[str] = []
        for first in range(0, len(ids), _LOOKED_UP):
            found = self._lookup.find(ids[first : first + _LOOKED_UP]).events
            met += [each for each in found if any(map(self._was_here, found[each]))]
        return met

    def _was_here(self, event: Occurrence) -> bool:
        return event.offset < self._ends[event.partition]

    def _updated_marks(self) -> set[str]:
        """Returns the hashes of ids whose events were updated."""
        records = read_records(self._context, self._topic)
        updates = (record for record, _ in records if record.op == "update")
        return {each.id for record in updates for each in record.events if each.id is not None}


def _content(row: pa.RecordBatch | pa.Table) -> dict[str, Any]:
    """Returns everything except the time of the single event in it."""
    content: dict[str, Any] = row.select(_SAME).to_pylist()[0]
    return content
