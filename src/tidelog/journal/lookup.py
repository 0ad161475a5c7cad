"""Finds events by id, exactly, among any number of them.

Runs and journals have id indexes (``codec.segment``), which are cached in memory for each
partition. A lookup reads the partition's head, the rows and indexes that are new, and only those
blocks of events whose index has the id's hash. It checks each hit by the id itself. If a compile, a
trim or a sweep comes in between, it starts over. What does not fit into memory is read from the
store each time.

Several events may have one id. Within a partition, the newest is the one with the highest offset;
across partitions, the one with the latest time. Compiling does not change that.

:func:`with_key` finds all events of a partition that have a key. It reads only ids, keys and times.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.catalog.update import read_stable
from tidelog.codec.event_batch import events_of
from tidelog.codec.journal_file import JOURNAL_SCHEMA, JournalFile
from tidelog.codec.numbers import bytes_array, numbers_of, text_array
from tidelog.codec.segment import hash_ids, read_piece
from tidelog.context import Context
from tidelog.errors import CorruptError, InvalidError, NotFoundError, UnavailableError
from tidelog.journal.id_cache import EventBlock, Halves, PartitionIds
from tidelog.journal.listing import MovedError, is_settled, read_row
from tidelog.log.partition_reader import Reader, lost_object, may_have_gone
from tidelog.log.run_reader import (
    EventRows,
    RunSelection,
    describe_run,
    new_value,
    pending,
    read_run,
)
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.event import Event, check_event
from tidelog.model.limits import EVENT_BYTES_CEILING
from tidelog.model.topic import Amendment, Head, Run, Topic, decode_row
from tidelog.store.wrappers import reread

__all__ = [
    "FIELD_COLUMNS",
    "Lookup",
    "LookupResult",
    "Lookups",
    "Occurrence",
    "VersionedHead",
    "amendment_of",
    "can_be_id",
    "check_id",
    "with_key",
]

_BYTES_MAX = 128 << 20  # of cached indexes per home: 16 million ids
_GETS_MAX = 8  # amendments that are read one by one
_ID_COLUMNS = ("timestamp", "id")
FIELD_COLUMNS = ("timestamp", "id", "key", "type", "headers")  # all except the value

VersionedHead = tuple[Head, str]  # a head and its version


@dataclass(frozen=True, slots=True)
class Occurrence:
    """An event that has an id, with amendments applied."""

    id: str
    partition: int
    offset: int
    time_ms: int
    row: pa.RecordBatch  # in the stored columns that were requested, including time and id
    applied: int = 0  # it contains amendments up to this sequence
    amendment: Amendment | None = None  # an update that it does not contain


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Each id's events, newest first, and the heads that this is valid for."""

    events: Mapping[str, tuple[Occurrence, ...]]
    heads: Mapping[int, VersionedHead]


@dataclass(frozen=True, slots=True)
class _WantedIds:
    """Ids, the halves of their hashes that indexes keep, and the columns to return."""

    ids: Sequence[str]
    halves: Halves
    columns: Sequence[str] | None  # None: all


class Lookup:
    """Finds the events of one topic, in one incarnation. Thread-safe."""

    def __init__(
        self,
        context: Context,
        topic: Topic,
        pool: Executor | None = None,
        bytes_max: int = _BYTES_MAX,
    ) -> None:
        self._context = context
        self._topic = topic
        self._pool = pool
        room = bytes_max // topic.partitions
        self._known = [PartitionIds(context, topic, p, pool, room) for p in range(topic.partitions)]

    @property
    def topic(self) -> Topic:
        """Returns the topic as it was when this was created."""
        return self._topic

    @property
    def bytes(self) -> int:
        """Returns how much memory it uses."""
        return sum(known.bytes for known in self._known)

    def get(self, event_id: str) -> Event:
        """Returns the newest event that has this id. Raises ``NotFoundError``."""

        def read() -> Event | None:
            found = self.find([event_id], columns=None).events.get(event_id)
            if not found:
                raise NotFoundError(
                    f"topic `{self._topic.name}`: has no event with id `{event_id[:200]}`: "
                    "check the id; it may have been deleted or trimmed",
                    topic=self._topic.name,
                )
            try:
                return self.event(found[0])
            except NotFoundError:
                return None  # its new value was compiled or replaced since

        return read_stable(self._context, read, self._restless())

    def find(
        self,
        ids: Sequence[str],
        *,
        partitions: Sequence[int] | None = None,
        columns: Sequence[str] | None = _ID_COLUMNS,
    ) -> LookupResult:
        """Returns all events that have one of these ids, with these columns; None for all columns.

        Raises ``InvalidError`` for an invalid id.
        """
        for each in ids:
            check_id(each)
        unique = list(dict.fromkeys(ids))
        hashes = hash_ids(text_array(unique))
        wanted = _WantedIds(unique, (hashes >> np.uint64(32)).astype(np.uint32), columns)
        numbers = range(self._topic.partitions) if partitions is None else partitions
        heads: dict[int, VersionedHead] = {}
        events: dict[str, list[Occurrence]] = {}
        for partition, first in zip(numbers, self._heads(numbers), strict=True):
            found, heads[partition] = self._look(partition, first, wanted)
            for event in found:
                events.setdefault(event.id, []).append(event)
        in_order = {each: _newest_first(events[each]) for each in unique if each in events}
        return LookupResult(in_order, heads)

    def _heads(self, partitions: Sequence[int]) -> Iterator[VersionedHead]:
        """Yields the current heads, read in parallel if possible."""

        def read(partition: int) -> VersionedHead:
            return read_head(self._context, self._topic, partition)

        if self._pool is None or len(partitions) == 1:
            return map(read, partitions)
        return iter(list(self._pool.map(read, partitions)))

    def _look(
        self, partition: int, first: VersionedHead, wanted: _WantedIds
    ) -> tuple[Sequence[Occurrence], VersionedHead]:
        """Returns the events of one partition, and the head that this is valid for."""
        seen, is_first = first, True

        def read() -> tuple[Sequence[Occurrence], VersionedHead] | None:
            nonlocal seen, is_first
            head, lost = seen[0], None
            try:
                live = self._live(partition, head, wanted)
                if live is not None:
                    return live, seen
            except (NotFoundError, MovedError) as exc:
                lost = exc
            seen = read_head(self._context, self._topic, partition)
            is_same = (head.compiled, head.start) == (seen[0].compiled, seen[0].start)
            if lost is not None and is_same:
                if not is_first:
                    raise CorruptError(
                        f"partition `{self._topic.name}/{partition}`: a part of it is gone "
                        f"({lost}): keep what is there, and run `tidelog verify`"
                    ) from lost
                self._known[partition].forget()
            is_first = False
            return None

        return read_stable(self._context, read, self._restless())

    def _live(self, partition: int, head: Head, wanted: _WantedIds) -> Sequence[Occurrence] | None:
        """Returns the events that are not deleted, as they are now; None if rows were swapped
        meanwhile.

        An amendment's row is deleted only after a swap or a trim. So if there was no swap and no
        trim until after it was read, it was there to be seen.
        """
        known, places = self._known[partition].candidates(head, wanted.halves)
        hits = list(
            self._hits(partition, head, known, _by_place(places, wanted.ids), wanted.columns)
        )
        first, last = head.amended or (0, -1)
        asked = {
            hit.offset
            for hit in hits
            if first <= hit.offset <= last and hit.applied < head.amendments
        }
        if not asked:
            return hits
        rows = self._amendments(partition, head, sorted(asked))
        live = []
        for hit in hits:
            row = rows.get(hit.offset)
            if row is None or row.sequence <= hit.applied:
                live.append(hit)
            elif row.kind == "update":
                live.append(replace(hit, amendment=row))
        settled = is_settled(self._context, self._topic, partition, known, min(asked))
        return live if settled else None

    def _amendments(
        self, partition: int, head: Head, offsets: Sequence[int]
    ) -> Mapping[int, Amendment]:
        """Returns the amendments of some events; reads a few one by one, many in pages."""
        found: dict[int, Amendment] = {}
        if len(offsets) <= _GETS_MAX:
            for offset in offsets:
                row = amendment_of(self._context, self._topic, partition, offset)
                if row is not None:
                    found[offset] = row
            return found
        at, end = offsets[0], offsets[-1] + 1
        while at < end:
            page = pending(self._context, self._topic, partition, head, at, end)
            known = page.end or end
            some = offsets[bisect_left(offsets, at) : bisect_left(offsets, known)]
            found |= {offset: row for offset in some if (row := page.get(offset)) is not None}
            at = known
        return found

    def _hits(
        self,
        partition: int,
        head: Head,
        known: Head,
        places: Mapping[EventBlock, Sequence[str]],
        columns: Sequence[str] | None,
    ) -> Iterator[Occurrence]:
        """Yields the hits in runs and journals, without amendments."""
        for place, ids in places.items():
            try:
                run = read_row(self._context, self._topic, partition, known, place.base)
            except MovedError:
                if place.end <= head.start:
                    continue  # it was trimmed
                raise
            if place.object not in ("", run.object):
                raise MovedError(f"journal `{place.object}`: was replaced: look again")
            applied = 0 if run.journal is None else run.journal.applied
            for offsets, batch in self._block(partition, run, place.block, columns):
                for row in _rows_with(batch.column("id"), ids):
                    if offsets[row] >= head.start:
                        yield _occurrence(
                            partition, int(offsets[row]), batch.slice(row, 1), applied
                        )

    def _block(
        self, partition: int, run: Run, block: int, columns: Sequence[str] | None
    ) -> Iterator[tuple[Sequence[int], pa.RecordBatch]]:
        """Yields the events of a block, and their offsets."""
        what = describe_run(self._topic.name, partition, run)
        store = self._context.store
        if run.journal is None:

            def read(_: bool) -> Iterator[pa.RecordBatch]:
                data = store.get(run.object, run.byte_start, run.byte_end)
                return read_piece(data, run.crc, run.count, what, columns)

            base = run.base
            for batch in reread(store, run.object, read):
                yield range(base, base + batch.num_rows), batch
                base += batch.num_rows
            return
        names = JOURNAL_SCHEMA.names if columns is None else ["offset", *columns]

        def read_block(_: bool) -> pa.RecordBatch:
            return self._journal_block(run, what, block, names)

        batch = reread(store, run.object, read_block)
        offsets: Any = numbers_of(batch.column("offset"))  # read as a sequence of integers
        yield offsets, batch.drop_columns(["offset"])

    def _journal_block(self, run: Run, what: str, block: int, names: list[str]) -> pa.RecordBatch:
        store = self._context.store
        file = JournalFile(lambda start, end: store.get(run.object, start, end), run, what)
        if block >= len(file.groups):
            raise CorruptError(f"{what}: its id index names row group {block}: keep the object")
        return file.read(file.groups[block], names)

    def event(self, found: Occurrence) -> Event:
        """Returns the event.

        Raises ``NotFoundError`` if its new value is missing from the store.
        """
        (event,) = events_of(found.row, self._topic.name, found.partition, found.offset)
        row = found.amendment
        if row is None:
            return event
        return msgspec.structs.replace(event, value=new_value(self._context.store, row))

    def _restless(self) -> UnavailableError:
        return UnavailableError(
            f"topic `{self._topic.name}`: changes faster than it can be looked at: try again"
        )


class Lookups:
    """The lookups of a home's topics; drops the least recently used when memory is short.

    Thread-safe.
    """

    def __init__(
        self, context: Context, pool: Executor | None = None, bytes_max: int = _BYTES_MAX
    ) -> None:
        self._context = context
        self._pool = pool
        self._bytes_max = bytes_max
        self._held: dict[str, Lookup] = {}  # by incarnation, most recently used last
        self._lock = threading.Lock()

    def of(self, topic: Topic) -> Lookup:
        """Returns the lookup of a topic."""
        with self._lock:
            found = self._held.pop(topic.incarnation, None)
            if found is None:
                found = Lookup(self._context, topic, self._pool, self._bytes_max)
            self._held[topic.incarnation] = found
            while len(self._held) > 1 and self._bytes() > self._bytes_max:
                del self._held[next(iter(self._held))]
            return found

    def _bytes(self) -> int:
        return sum(each.bytes for each in self._held.values())


def check_id(event_id: str) -> None:
    """Raises ``InvalidError`` for a string that cannot be an event's id."""
    if not isinstance(event_id, str):
        raise InvalidError(f"id: is {type(event_id).__name__}: give text")
    check_event(Event(None, id=event_id), EVENT_BYTES_CEILING)


def can_be_id(event_id: str) -> bool:
    """Returns whether an event of a topic can have this id.

    Dead letters of archives have others.
    """
    try:
        check_id(event_id)
    except InvalidError:
        return False
    return True


def amendment_of(context: Context, topic: Topic, partition: int, offset: int) -> Amendment | None:
    """Returns the amendment of an event, or None."""
    where = layout.topic_partition(topic.incarnation, partition)
    name = layout.amend_row(offset)
    row = context.catalog.get(where, name)
    what = f"row `{name}` of `{topic.name}/{partition}`"
    return None if row is None else decode_row(row.value, Amendment, what)


def _by_place(
    places: Sequence[tuple[int, EventBlock]], ids: Sequence[str]
) -> dict[EventBlock, Sequence[str]]:
    """Returns which ids to look for in which block."""
    found: dict[EventBlock, dict[str, None]] = {}
    for number, place in places:
        found.setdefault(place, {})[ids[number]] = None
    return {place: list(some) for place, some in found.items()}


def _rows_with(column: pa.Array, ids: Sequence[str]) -> list[int]:
    """Returns the rows of a column that have one of some ids."""
    if len(ids) == 1:
        mask = pc.equal(column, text_array(ids)[0])
    else:
        mask = pc.is_in(column, text_array(ids))
    rows: list[int] = numbers_of(pc.indices_nonzero(mask)).tolist()
    return rows


def _occurrence(partition: int, offset: int, row: pa.RecordBatch, applied: int) -> Occurrence:
    time_ms = row.column("timestamp").cast(pa.int64())[0].as_py()
    return Occurrence(row.column("id")[0].as_py(), partition, offset, time_ms, row, applied)


def _newest_first(found: Sequence[Occurrence]) -> tuple[Occurrence, ...]:
    """Sorts by offset in each partition, and partitions by the time of their newest."""
    last: dict[int, Occurrence] = {}
    for each in found:
        if each.partition not in last or each.offset > last[each.partition].offset:
            last[each.partition] = each

    def order(each: Occurrence) -> tuple[int, int, int]:
        return last[each.partition].time_ms, each.partition, each.offset

    return tuple(sorted(found, key=order, reverse=True))


Keyed = tuple[str | None, int, int]
"""The id, the offset and the time of an event."""

_LOSSES_MAX = 5  # consecutive objects that were deleted while they were read


def with_key(
    context: Context,
    topic: Topic,
    partition: int,
    key: bytes,
    bounds: tuple[int, int],
    progress: Callable[[int], None],
) -> Iterator[Keyed]:
    """Yields the events of ``[start, end)`` that have this key.

    Calls ``progress`` with the bytes of each run. Raises ``NotFoundError`` if the topic is deleted,
    and ``CorruptError`` if an object that rows name is missing.
    """
    at, end = bounds
    losses = 0
    while at < end:
        head, _ = read_head(context, topic, partition)
        at = max(at, head.start)
        amendments = pending(context, topic, partition, head, at, end)
        until = end if amendments.end is None else min(end, amendments.end)
        runs: list[Run] = []
        try:
            runs = Reader(context, topic, partition).runs(at) if at < end else []
            for run in runs:
                if run.base >= until:
                    break
                what = describe_run(topic.name, partition, run)
                selection = RunSelection(at, until, ("id", "key", "timestamp"))
                for rows in read_run(context.store, run, what, selection, amendments):
                    yield from _matches(rows, key, f"{topic.name}/{partition}")
                    at, losses = rows.end, 0
                progress(run.byte_end - run.byte_start)
        except NotFoundError as exc:
            losses += 1
            now, _ = read_head(context, topic, partition)
            if at >= now.start and (losses > _LOSSES_MAX or not may_have_gone(head, now)):
                raise lost_object(topic.name, partition, runs, exc) from exc


def _matches(rows: EventRows, key: bytes, name: str) -> Iterator[Keyed]:
    batch = rows.batch
    matching = pc.indices_nonzero(pc.equal(batch.column("key"), bytes_array([key])[0]))
    numbers = numbers_of(matching)
    if len(numbers):
        found = batch.take(matching)
        times = found.column("timestamp").cast(pa.int64()).to_pylist()
        try:
            ids = found.column("id").to_pylist()
        except UnicodeDecodeError as exc:
            raise CorruptError(
                f"partition `{name}`, offsets {rows.base} to {rows.end}: an id is not valid UTF-8: "
                "run `tidelog verify`, which names its offset"
            ) from exc
        yield from zip(ids, rows.offsets[numbers].tolist(), times, strict=True)
