"""Reads a range of a change log, window by window, with as many changes as fit into memory.

A window is read completely, with one statement for each vnode and several in parallel. Its width
adapts: a day of silence is one window, and a window that is too full is dropped and made narrower.
No change of a window is returned before all of it is read, and before the schema it was read with
is confirmed as current.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import msgspec
import pyarrow as pa

from tidelog.catalog.update import rounds
from tidelog.clock import Clock
from tidelog.codec.event_batch import batch_of, with_position
from tidelog.connectors.scylla.changes import Changes, RowLayout, is_present, read_layout, text_of
from tidelog.connectors.scylla.session import WIDTH_MS_MAX, ScyllaOptions, ScyllaSession
from tidelog.connectors.scylla.streams import ChangePosition, Streams
from tidelog.connectors.scylla.types import to_json
from tidelog.connectors.source import Chunk, SourceRange
from tidelog.coordination.commits import load_manifest
from tidelog.errors import InvalidError, NotFoundError, UnavailableError
from tidelog.store import open_store_here

__all__ = [
    "ChangeRead",
    "ChangeReadPlan",
    "CommittedRange",
    "Generation",
    "first_times",
    "refresh_ms",
]

_WINDOW_ROWS = 40_000  # more are not kept in memory, unless they are of one millisecond
_CHUNK_EVENTS = 20_000
_AT_ONCE = 8  # statements in parallel
_STEP = 8  # factor by which windows grow and shrink
_SCHEMA_TRIES = 5
_REFRESH_MS = 600_000  # how often the position of a quiet log is committed again
_IDENTITY_BYTES = 36  # stream, time, number in its batch
_length = struct.Struct(">I")


class Generation(msgspec.Struct, frozen=True):
    """Part of a generation, with the streams of one group."""

    start_ms: int  # of the generation
    end_ms: int | None  # when the next one begins, if known
    streams: Streams


class CommittedRange(msgspec.Struct, frozen=True):
    """A range that another pipeline committed. Its manifest notes the changes."""

    start_ms: int
    end_ms: int
    manifest: str  # key


@dataclass(frozen=True, slots=True)
class ChangeReadPlan:
    """A range, with everything needed to read it. Pickles."""

    range: SourceRange
    generations: tuple[Generation, ...]
    ttl_ms: int
    before: tuple[CommittedRange, ...] = ()
    store: str = ""  # that has those manifests
    limit_ms: int | None = None  # stop here, before the end of the range
    reaches_back: bool = True  # to changes of a generation that was announced too late

    @property
    def limit(self) -> ChangePosition:
        """Returns where the range ends at the latest."""
        limit = ChangePosition.parse(self.range.limit)
        if self.limit_ms is not None and self.limit_ms < limit.time_ms:
            return replace(limit, time_ms=self.limit_ms)
        return limit

    @property
    def start(self) -> ChangePosition:
        """Returns where to begin: earlier than the range if a generation was announced too late.

        Nothing in its streams is read yet. Readers that note their changes leave it to the sweep
        after them, which finds notes by the times of their ranges.
        """
        start = ChangePosition.parse(self.range.start).plain
        if not self.reaches_back:
            return start
        later = [each.start_ms for each in self.generations if each.start_ms > start.generation_ms]
        return replace(start, time_ms=min([start.time_ms, *later]))

    def generation(self, time_ms: int) -> Generation:
        """Returns the generation with the changes of a time."""
        begun = [each for each in self.generations if each.start_ms <= time_ms]
        return begun[-1] if begun else self.generations[0]


def refresh_ms(ttl_ms: int) -> int:
    """Returns how much silence passes without a commit."""
    return min(_REFRESH_MS, ttl_ms // 10) if ttl_ms else _REFRESH_MS


class ChangeRead:
    """Reads one range, once."""

    def __init__(
        self, session: ScyllaSession, way: ScyllaOptions, plan: ChangeReadPlan, clock: Clock
    ) -> None:
        self._session = session
        self._way = way
        self._plan = plan
        self._clock = clock
        self._start, self._limit = plan.start, plan.limit
        self._known = _KnownChanges(plan)
        self._rows = 0  # rows read, including those without an event
        self._events = 0

    def chunks(self) -> Iterator[Chunk]:
        """Yields the events. The position of the last chunk is the end that was reached."""
        self._check_held()
        at, waiting = self._start.time_ms, self._changes(self._start.time_ms)
        widest = self._way.window_ms or WIDTH_MS_MAX
        width = min(max(1, self._limit.time_ms - at), self._session.width_ms, widest)
        while at < self._limit.time_ms and not self._is_enough(len(waiting)):
            generation = self._plan.generation(at)
            end = min(filter(None, (at + width, generation.end_ms, self._limit.time_ms)))
            found = self._window(generation, at, end)
            if found is None:
                width = max(1, (end - at) // _STEP)
                continue
            changes, rows = found
            self._rows += rows
            waiting.extend(changes)
            at = end
            if rows < _WINDOW_ROWS // _STEP:
                width = min(width * _STEP, widest)
            if self._way.window_ms is None:
                self._session.width_ms = width
            if len(waiting) >= _CHUNK_EVENTS:
                yield self._chunk(waiting, self._place(at))
                waiting = self._changes(min(at, self._limit.time_ms))
        yield self._chunk(waiting, self._place(at))

    def is_empty(self) -> bool:
        """Returns whether there is no change, by looking for the first one."""
        for generation in self._plan.generations:
            start = max(generation.start_ms, self._start.time_ms)
            end = min(filter(None, (generation.end_ms, self._limit.time_ms)))
            if start < end and any(first_times(self._session, generation.streams, start, end)):
                return False
        return True

    # Windows.

    def _window(self, generation: Generation, start: int, end: int) -> tuple[Changes, int] | None:
        """Returns the changes of a window and the number of rows; None if there are too many."""
        changing = UnavailableError(
            f"change log of `{self._session.place.label}`: its schema keeps changing: try again"
        )
        for _ in rounds(_SCHEMA_TRIES, changing):
            layout = self._layout()
            try:
                found = self._read_window(layout, generation, start, end)
            except InvalidError:
                if is_present(self._session, layout):
                    raise
                self._session.layout = None
                continue
            if found is None or not found[1] or is_present(self._session, layout):
                if found is not None:
                    self._name(layout, found[0])
                return found
            self._session.layout = None  # the schema changed in between: read again
        raise changing

    def _read_window(
        self, layout: RowLayout, generation: Generation, start: int, end: int
    ) -> tuple[Changes, int] | None:
        rows = 0
        changes = Changes(
            layout, self._way, generation.start_ms, self._known.of(start, end), self._clock.now_ms()
        )
        for page in self._pages(layout, generation, start, end):
            rows += len(page)
            if rows > _WINDOW_ROWS and end - start > 1:
                return None
            changes.add(page)
        changes.end()
        return changes, rows

    def _pages(
        self, layout: RowLayout, generation: Generation, start: int, end: int
    ) -> Iterator[list[tuple[bytes | None, ...]]]:
        """Yields all rows of a window, stream by stream."""
        return _pages_of_streams(self._session, layout.statement, generation.streams, start, end)

    def _layout(self) -> RowLayout:
        layout: RowLayout | None = self._session.layout  # other threads may reset it
        if layout is None:
            layout = self._session.layout = read_layout(self._session)
        self._check_columns(layout)
        return layout

    def _check_columns(self, layout: RowLayout) -> None:
        way = self._way
        names = {*layout.schema.key, *(name for name, _ in layout.schema.values)}
        for option in ("type_column", "key_column", "key_lookup"):
            wanted = getattr(way, option)
            if wanted is not None and wanted not in names:
                raise InvalidError(
                    f"change log of `{self._session.place.label}`: {option} is `{wanted}`, and "
                    f"the table has no such column: give one of {', '.join(sorted(names))}"
                )

    def _name(self, layout: RowLayout, changes: Changes) -> None:
        """Reads what the log lacks from the base table: the columns that name events."""
        if not changes.unnamed:
            return
        place, wanted = self._session.place, self._way.key_lookup
        where = " AND ".join(f'"{name}" = ?' for name in layout.schema.key)
        statement = self._session.prepare_bytes(
            f'SELECT "{wanted}", "{layout.schema.key[-1]}" '  # noqa: S608 - a static one alone is refused
            f'FROM "{place.keyspace}"."{place.table}" WHERE {where}'
        )
        kind = to_json(statement.result_metadata[0][3])
        distinct = list({values for _, values in changes.unnamed})
        found: dict[tuple[bytes, ...], bytes] = {}
        for first in range(0, len(distinct), 64):
            asked = [(each, self._session.pages(statement, each)) for each in distinct[first:][:64]]
            for values, pages in asked:
                for ((value, _),) in pages:
                    if value is not None:
                        found[values] = text_of(kind(value)).encode()
        for index, values in changes.unnamed:
            if values in found:
                event = changes.events[index]
                changes.events[index] = (*event[:2], found[values], *event[3:])
        changes.unnamed.clear()

    # Chunks.

    def _changes(self, time_ms: int) -> Changes:
        return Changes(self._layout(), self._way, self._plan.generation(time_ms).start_ms)

    def _is_enough(self, waiting: int) -> bool:
        wanted = self._limit.events
        return wanted is not None and self._events + waiting >= wanted

    def _place(self, time_ms: int) -> str:
        """Returns the current position; in silence it is the start, except now and then."""
        quiet_ms = time_ms - self._start.time_ms
        generation_ms = self._plan.generation(time_ms).start_ms
        whole = time_ms >= ChangePosition.parse(self._plan.range.limit).time_ms
        same = whole and generation_ms == self._start.generation_ms
        if not self._rows and same and quiet_ms < refresh_ms(self._plan.ttl_ms):
            return self._plan.range.start
        return ChangePosition(generation_ms, time_ms).text

    def _chunk(self, changes: Changes, position: str) -> Chunk:
        partition = self._plan.range.partition
        base = self._plan.range.ordinal + self._events
        self._events += len(changes)
        *columns, identities = changes.columns()
        stored: pa.RecordBatch = batch_of(columns)
        batch = with_position(stored, partition.topic, int(partition.name), base)
        note = b""
        if self._way.remembers and identities:
            packed = zlib.compress(b"".join(identities), 1)
            note = _length.pack(len(packed)) + packed
        return Chunk(batch, position, note)

    def _check_held(self) -> None:
        """Raises ``NotFoundError`` if changes after the start may have expired."""
        held_ms = self._clock.now_ms() - self._plan.ttl_ms
        if self._plan.ttl_ms and self._start.time_ms < held_ms:
            raise NotFoundError(
                f"change log of `{self._session.place.label}`: was read up to "
                f"{self._start.time_ms} ms, and what was changed before {held_ms} ms is gone, "
                f"after the log's time to live of {self._plan.ttl_ms // 1000} s: continue from "
                "there if that loss is acceptable",
                lost_from=self._start.text,
                first=held_ms,
            )


def first_times(session: ScyllaSession, streams: Streams, start: int, end: int) -> Iterator[bytes]:
    """Yields the time of the first change in a window, for each stream that has one."""
    place = session.place
    statement = session.known(
        f'SELECT "cdc$time" FROM "{place.keyspace}"."{place.log_table}" '  # noqa: S608 - checked
        'WHERE "cdc$stream_id" IN ? AND "cdc$time" >= minTimeuuid(?) '
        'AND "cdc$time" < minTimeuuid(?) PER PARTITION LIMIT 1'
    )
    for page in _pages_of_streams(session, statement, streams, start, end):
        for (time,) in page:
            if time is not None:
                yield time


def _pages_of_streams(
    session: ScyllaSession, statement: Any, streams: Streams, start: int, end: int
) -> Iterator[list[tuple[bytes | None, ...]]]:
    """Yields the pages of a statement for groups of streams, with a few in parallel."""
    todo = iter(streams)
    under_way: deque[Any] = deque()
    while True:
        for some in islice(todo, _AT_ONCE - len(under_way)):
            under_way.append(session.pages(statement, (list(some), start, end), next(iter(some))))
        if not under_way:
            return
        yield from under_way.popleft()


class _KnownChanges:
    """The changes that other pipelines committed, range by range."""

    def __init__(self, plan: ChangeReadPlan) -> None:
        self._plan = plan
        self._loaded: dict[str, frozenset[bytes]] = {}

    def of(self, start: int, end: int) -> frozenset[bytes]:
        """Returns the changes of a window, and possibly some more."""
        wanted = [each for each in self._plan.before if each.start_ms < end and each.end_ms > start]
        if not wanted:
            return frozenset()
        store = open_store_here(self._plan.store)
        kept = {}
        for each in wanted:
            kept[each.manifest] = self._loaded.get(each.manifest) or _identities(
                load_manifest(store, each.manifest).note
            )
        self._loaded = kept
        return frozenset().union(*kept.values())


def _identities(note: bytes) -> frozenset[bytes]:
    found: list[bytes] = []
    at = 0
    while at < len(note):
        size = _length.unpack_from(note, at)[0]
        found += _split(zlib.decompress(note[at + 4 : at + 4 + size]))
        at += 4 + size
    return frozenset(found)


def _split(data: bytes) -> Sequence[bytes]:
    return [data[at : at + _IDENTITY_BYTES] for at in range(0, len(data), _IDENTITY_BYTES)]
