"""Builds journals from a group of rows: step 3 of a compile. Needs only the store.

It reads rows as a stream from the partition's start on, with amendments applied, and encodes them
as they come. So a journal never contains events that were trimmed before it was built. Memory holds
a row group and the bytes of one journal. A group becomes one journal, or several if updates have
made it much larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import msgspec
import pyarrow as pa

from tidelog.clock import Ids
from tidelog.codec.event_batch import batch_bytes
from tidelog.codec.journal_file import JOURNAL_SCHEMA, Fetch, encode_journal, read_sources
from tidelog.journal.compile.policy import JOURNALS_AT_ONCE, CompileGroup
from tidelog.log.maintenance.unused import origin_of
from tidelog.log.reader.amendments import Amendments, EventRows
from tidelog.log.reader.run_reader import Cut, describe_run, fetch_run, in_turn, read_run
from tidelog.model import layout
from tidelog.model.partition_rows import JournalOrigin, Run
from tidelog.model.topic import Topic
from tidelog.store.base import Store, put_fresh

__all__ = ["Made", "Pages", "Work", "make_journals"]

_AHEAD = 8  # objects fetched in advance

Pages = Callable[[int], Amendments]
"""Returns the amendments from an offset on, or the first of them up to a limit."""


@dataclass(frozen=True, slots=True)
class Work:
    """A group, and everything needed to build journals from it anywhere. Pickles."""

    topic: Topic
    partition: int
    epoch: int
    id: str  # part of the keys of all its journals
    group: CompileGroup
    start: int  # lower offsets were trimmed
    applied: int  # amendments were read at least up to this sequence
    max_raw_bytes: int  # the size at which another journal is started


@dataclass(frozen=True, slots=True)
class Made:
    """Journals in the store that no row names yet."""

    journals: tuple[Run, ...]
    amendments: int  # that were applied


def make_journals(
    store: Store, ids: Ids, work: Work, pages: Pages, pool: Executor | None = None
) -> Made:
    """Reads, encodes and uploads. Raises ``NotFoundError`` if an object is missing: plan again."""
    reading = _GroupReader(store, work, pages, pool)
    group = work.group
    committed_ms = max(run.committed_ms for run in group.rows)
    parts_max = JOURNALS_AT_ONCE + 1 - len(group.journals)  # the limit of one swap
    journals: list[Run] = []
    base = group.base
    while base < group.end:
        is_last = len(journals) + 1 == parts_max
        part = reading.part(None if is_last else work.max_raw_bytes)
        encoded = encode_journal(part, work.applied, partial(reading.sources, base))
        end = reading.end
        key = layout.journal(
            work.topic.incarnation, work.partition, work.epoch, base, work.id, ids.new()
        )
        put_fresh(store, key, encoded.data)
        run = encoded.run(base, end - base, key, committed_ms)
        if run.journal is not None and base < work.start:
            journal = msgspec.structs.replace(run.journal, start=work.start)
            run = msgspec.structs.replace(run, journal=journal)
        journals.append(run)
        base = end
    return Made(tuple(journals), reading.amendments)


class _GroupReader:
    """Reads the events of a group in journal columns, split where a journal is full."""

    def __init__(self, store: Store, work: Work, pages: Pages, pool: Executor | None) -> None:
        self._store = store
        self._work = work
        self._pages = pages
        self._pool = pool
        self.amendments = 0
        self.end = work.group.base  # where the part that was read ends
        self._sources: list[JournalOrigin] = []
        self._rows = self._all()
        self._next = next(self._rows, None)

    def part(self, bytes_max: int | None) -> Iterator[pa.Table]:
        """Yields what follows, up to this many bytes."""
        size = 0
        while self._next is not None and (bytes_max is None or size < bytes_max):
            rows, self._next = self._next, None
            if bytes_max is not None:
                rows, self._next = _cut(rows, bytes_max - size)
            if self._next is None:
                self._next = next(self._rows, None)
            self.end = rows.end
            if rows.batch.num_rows:
                size += batch_bytes(rows.batch)
                columns = [pa.array(rows.offsets), *rows.batch.columns]
                yield pa.Table.from_arrays(columns, schema=JOURNAL_SCHEMA)
        if self._next is None:
            self.end = self._work.group.end

    def sources(self, base: int) -> list[JournalOrigin]:
        """Returns the origins of what was read from an offset on."""
        parts = (each.between(base, self.end) for each in self._sources)
        return [part for part in parts if part is not None]

    def _note_source(self, run: Run, start: int, data: bytes | None) -> None:
        if run.journal is None:
            found = [JournalOrigin(run.base, run.count, origin_of(run.object)[0], 0)]
        else:
            fetch = partial(self._store.get, run.object) if data is None else _fetch(data)
            found = read_sources(fetch, run.byte_end, f"journal `{run.object}`")
        parts = (each.between(start, run.end) for each in found)
        self._sources += [part for part in parts if part is not None]

    def _all(self) -> Iterator[EventRows]:
        work = self._work
        living = [run for run in work.group.rows if run.end > work.start]
        found: Amendments | None = None
        fetched = in_turn(self._pool, lambda run: fetch_run(self._store, run), living, _AHEAD)
        for run, data in fetched:
            what = describe_run(work.topic.name, work.partition, run)
            at = max(run.base, work.start)
            self._note_source(run, at, data)
            while at < run.end:
                if found is None or (found.end is not None and at >= found.end):
                    found = self._pages(at)
                end = run.end if found.end is None else min(run.end, found.end)
                new = found.of_run(run).between(at, end)
                self.amendments += len(new)
                cut = Cut(at, end, None, self._pool)
                yield from read_run(self._store, run, what, cut, new, data)
                at = end


def _fetch(data: bytes) -> Fetch:
    return lambda start, end: data[start:end]


def _cut(rows: EventRows, room: int) -> tuple[EventRows, EventRows | None]:
    """Returns the first events that fit, at least one, and the rest."""
    count, size = rows.batch.num_rows, batch_bytes(rows.batch)
    if size <= room or count < 2:
        return rows, None
    first = max(1, min(count - 1, count * room // size))
    return rows.numbered(0, first), rows.numbered(first, count)
