"""The steps of a compile: choosing the rows that become a journal, building journals, and the swap.

**Choose.** Pure: rows in, groups out. Runs are grouped from the oldest on, as many as fit into one
journal. The last group waits until it has enough events or bytes, or is old enough. Journals are
rewritten when amendments wait for them, when several small neighbors make a better one, or, if the
policy says so, when the partition's start lies inside one: the new one leaves out the trimmed
events. A merge never rewrites a journal for less than its own size, so an event is rewritten only a
few times, however small the first journals were.

**Build** (step 3) needs only the store. It reads rows as a stream from the partition's start on,
with amendments applied, and encodes them as they come. So a journal never contains events that were
trimmed before it was built. Memory holds a row group and the bytes of one journal. A group becomes
one journal, or several if updates have made it much larger.

**Swap.** Journals replace the rows that they were built from, in one write. It expects the head as
it was just read, and the row of the compiler. It lists the objects of journals that it replaces as
unused. If the head has moved, the swap reads it again and repeats the write with the same journals:
producers, trims and amendments may come in between. Another swap may not: if ``compiled`` has
changed, the compiler plans again. Each row that is replaced must still reach above the start, so a
trim before the swap never means the row that the swap puts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import msgspec
import pyarrow as pa

from tidelog.catalog.base import Change, Delete, Put
from tidelog.catalog.update import Decision, Rows, attempts, update
from tidelog.clock import Ids
from tidelog.codec.event_batch import batch_bytes
from tidelog.codec.journal_file import JOURNAL_SCHEMA, Fetch, encode_journal, read_sources
from tidelog.context import Context
from tidelog.coordination.ownership import Ownership
from tidelog.errors import (
    ConflictError,
    FencedError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.run_reader import (
    Amendments,
    EventRows,
    RunSelection,
    are_pending,
    describe_run,
    fetch_run,
    read_run,
)
from tidelog.log.topics import open_head, read_head
from tidelog.log.unused_objects import list_unused, origin_of
from tidelog.model import layout
from tidelog.model.topic import (
    Head,
    JournalOrigin,
    Run,
    Topic,
    decode_row,
    encode_row,
    journal_slots,
)
from tidelog.store.base import Store, put_fresh
from tidelog.store.fetch import fetch_ahead

__all__ = [
    "JOURNALS_AT_ONCE",
    "RUNS_AT_ONCE",
    "BuiltJournals",
    "Candidate",
    "CompileGroup",
    "CompilePolicy",
    "JournalBuild",
    "Pages",
    "Swap",
    "choose_groups",
    "make_journals",
]

JOURNALS_AT_ONCE = 6  # per swap: each has up to three rows, and a write has a limit
RUNS_AT_ONCE = 10_000  # rows of one group, which are held in memory
_MERGE_MIN = 4  # neighbors that make a merge worthwhile
_NEVER = 1 << 62  # events or bytes
_SMALL = 4  # a journal is small if this many fit into one


@dataclass(frozen=True, slots=True)
class CompilePolicy:
    """When something is compiled, and how large journals get."""

    min_events: int = 10_000  # that wait in runs
    min_bytes: int = 8 << 20  # the same, in the store
    older_than_ms: int | None = 3_600_000  # fewer are compiled if the oldest waits this long
    min_amendments: int = 1_000  # that wait for one journal
    amended_before_ms: int | None = 86_400_000  # fewer are applied if one waits this long
    min_trimmed: int | None = None  # offsets below the start in one journal; None: they stay
    max_events: int = 1_000_000  # of one journal
    max_bytes: int = 32 << 20  # of one journal, in the store: what one amendment rewrites
    max_raw_bytes: int = 512 << 20  # of one journal, before compression

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value < (0 if name.endswith("_ms") else 1):
                raise InvalidError(f"compile: {name} is {value}: give more than that")

    @classmethod
    def everything(cls) -> CompilePolicy:
        """Returns a policy that compiles all runs, every amendment, and every trimmed event."""
        return cls(min_events=1, min_amendments=1, min_trimmed=1)

    @classmethod
    def trimmed(cls) -> CompilePolicy:
        """Returns a policy that removes trimmed events, and compiles what fills a journal."""
        return cls(
            min_events=_NEVER,
            min_bytes=_NEVER,
            older_than_ms=None,
            min_amendments=_NEVER,
            amended_before_ms=None,
            min_trimmed=1,
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run or a journal, and the amendments that wait for it."""

    run: Run
    amendments: int = 0
    amended_ms: int | None = None  # when the oldest of them was made
    trimmed: int = 0  # offsets below the partition's start whose events it still contains


@dataclass(frozen=True, slots=True)
class CompileGroup:
    """Neighboring rows, journals before runs, that one swap replaces."""

    rows: tuple[Run, ...]

    @property
    def base(self) -> int:
        """Returns the first offset that it covers."""
        return self.rows[0].base

    @property
    def end(self) -> int:
        """Returns the offset after its last."""
        return self.rows[-1].end

    @property
    def journals(self) -> tuple[Run, ...]:
        """Returns those of its rows that are journals."""
        return tuple(row for row in self.rows if row.journal is not None)

    @property
    def bytes(self) -> int:
        """Returns the size of its rows in the store."""
        return sum(row.byte_end - row.byte_start for row in self.rows)


@dataclass(frozen=True, slots=True)
class _Neighbours:
    """Neighbors that stay together."""

    candidates: tuple[Candidate, ...]

    @property
    def events(self) -> int:
        return sum(each.run.events for each in self.candidates)

    @property
    def bytes(self) -> int:
        return sum(each.run.byte_end - each.run.byte_start for each in self.candidates)

    @property
    def raw_bytes(self) -> int:
        return sum(each.run.raw_bytes for each in self.candidates)


def choose_groups(
    journals: Sequence[Candidate], runs: Sequence[Candidate], policy: CompilePolicy, now_ms: int
) -> list[CompileGroup]:
    """Returns what to compile now, from the oldest on; no row is in two groups.

    ``runs`` may be the first of many, and all of them follow the journals.
    """
    ready = _ready(list(_fill_groups(runs, policy)), policy, now_ms)
    parts = [_Neighbours((each,)) for each in journals] + ready[:1]
    groups = [*_merge_groups(parts, len(journals), policy, now_ms), *ready[1:]]
    return [CompileGroup(tuple(each.run for each in part.candidates)) for part in groups]


def _fill_groups(runs: Sequence[Candidate], policy: CompilePolicy) -> Iterator[_Neighbours]:
    """Yields runs in groups that each fill a journal; the last one may be small."""
    waiting: list[Candidate] = []
    events = size = raw = 0
    for each in runs:
        run = each.run
        run_bytes = run.byte_end - run.byte_start
        is_full = (
            events + run.events > policy.max_events
            or size + run_bytes > policy.max_bytes
            or raw + run.raw_bytes > policy.max_raw_bytes
            or len(waiting) >= RUNS_AT_ONCE
        )
        if waiting and is_full:
            yield _Neighbours(tuple(waiting))
            waiting, events, size, raw = [], 0, 0, 0
        waiting.append(each)
        events, size, raw = events + run.events, size + run_bytes, raw + run.raw_bytes
    if waiting:
        yield _Neighbours(tuple(waiting))


def _ready(parts: list[_Neighbours], policy: CompilePolicy, now_ms: int) -> list[_Neighbours]:
    """Returns all except the last, which waits until it is worth a journal."""
    if not parts:
        return []
    last = parts[-1]
    oldest_ms = min(each.run.committed_ms for each in last.candidates)
    is_due = (
        last.events >= policy.min_events
        or last.bytes >= policy.min_bytes
        or _is_over(policy.older_than_ms, oldest_ms, now_ms)
        or _is_amended(last, policy, now_ms)
    )
    return parts if is_due else parts[:-1]


def _is_amended(part: _Neighbours, policy: CompilePolicy, now_ms: int) -> bool:
    if sum(each.amendments for each in part.candidates) >= policy.min_amendments:
        return True
    times = [each.amended_ms for each in part.candidates if each.amended_ms is not None]
    return bool(times) and _is_over(policy.amended_before_ms, min(times), now_ms)


def _is_over(wait_ms: int | None, since_ms: int, now_ms: int) -> bool:
    """Returns whether a wait is over; also one that a clock which was far ahead has begun.

    Otherwise a delete by a machine whose clock is a year ahead would be carried out in a year.
    """
    return wait_ms is not None and abs(now_ms - since_ms) >= wait_ms


def _is_cut(part: _Neighbours, policy: CompilePolicy) -> bool:
    """Returns whether enough of it was trimmed to rewrite it; else its bytes stay for long."""
    trimmed = sum(each.trimmed for each in part.candidates)
    return policy.min_trimmed is not None and trimmed >= policy.min_trimmed


def _merge_groups(
    parts: list[_Neighbours], journals: int, policy: CompilePolicy, now_ms: int
) -> Iterator[_Neighbours]:
    """Yields journals to rewrite, alone or with neighbors, and everything after them."""
    at = 0
    while at < len(parts):
        window = _window(parts[at:], policy)
        if len(window) >= _MERGE_MIN and _is_worth(window):
            yield _Neighbours(tuple(each for part in window for each in part.candidates))
            at += len(window)
            continue
        if at >= journals or _is_amended(parts[at], policy, now_ms) or _is_cut(parts[at], policy):
            yield parts[at]
        at += 1


def _window(parts: list[_Neighbours], policy: CompilePolicy) -> list[_Neighbours]:
    """Returns the first small neighbors that fit into one journal together."""
    window: list[_Neighbours] = []
    events = size = raw = rows = 0
    for part in parts[:JOURNALS_AT_ONCE]:
        events, size, raw = events + part.events, size + part.bytes, raw + part.raw_bytes
        rows += len(part.candidates)
        is_small = (
            part.events * _SMALL <= policy.max_events
            and part.bytes * _SMALL <= policy.max_bytes
            and part.raw_bytes * _SMALL <= policy.max_raw_bytes
        )
        fits = (
            events <= policy.max_events
            and size <= policy.max_bytes
            and raw <= policy.max_raw_bytes
            and rows <= RUNS_AT_ONCE
        )
        if not (is_small and fits):
            break
        window.append(part)
    return window


def _is_worth(window: Sequence[_Neighbours]) -> bool:
    sizes = [part.bytes for part in window]
    return 2 * max(sizes) <= sum(sizes)


_AHEAD = 8  # objects fetched in advance

Pages = Callable[[int], Amendments]
"""Returns the amendments from an offset on, or the first of them up to a limit."""


@dataclass(frozen=True, slots=True)
class JournalBuild:
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
class BuiltJournals:
    """Journals in the store that no row names yet."""

    journals: tuple[Run, ...]
    amendments: int  # that were applied


def make_journals(
    store: Store, ids: Ids, work: JournalBuild, pages: Pages, pool: Executor | None = None
) -> BuiltJournals:
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
    return BuiltJournals(tuple(journals), reading.amendments)


class _GroupReader:
    """Reads the events of a group in journal columns, split where a journal is full."""

    def __init__(
        self, store: Store, work: JournalBuild, pages: Pages, pool: Executor | None
    ) -> None:
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
        fetched = fetch_ahead(self._pool, lambda run: fetch_run(self._store, run), living, _AHEAD)
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
                selection = RunSelection(at, end, None, self._pool)
                yield from read_run(self._store, run, what, selection, new, data)
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


class Swap:
    """Step 4, for the partition whose compiler row we hold."""

    def __init__(self, context: Context, topic: Topic, partition: int, holding: Ownership) -> None:
        self._context = context
        self._topic = topic
        self._partition = partition
        self._holding = holding
        self._where = layout.topic_partition(topic.incarnation, partition)

    def list_work(self, work_id: str) -> int:
        """Lists all journals that a work will build as unused; returns the epoch to build them
        under.

        The swap deletes that row. The write expects the head and the row of the compiler. A swap
        changes one and a sweep the other, so the write never lands after these have deleted what it
        puts. Raises ``FencedError`` if another compiler has the partition.
        """
        is_first = True

        def decide(rows: Rows) -> Decision[int]:
            nonlocal is_first
            if not is_first:
                self._hold_on()
            is_first = False
            epoch, check = self._holding.current()
            open_head(self._context, self._topic, self._partition, rows["head"])
            key = layout.journal(self._topic.incarnation, self._partition, epoch, 0, work_id)
            return Decision(epoch, [*list_unused(work_id, [key]), rows.check("head"), check])

        return update(self._context, self._where, ["head"], decide, self._what)

    def run(self, group: CompileGroup, made: tuple[Run, ...], compiled: int, seen: Head) -> bool:
        """Returns whether the journals replaced their rows; False: plan again, since rows have
        changed.

        Also returns False if a trim has passed amendments that the head ``seen`` before the work
        mentions: a sweep may have removed them before they were read. Raises ``FencedError`` if
        another compiler has the partition, and ``NotFoundError`` if the topic was deleted.
        """
        left: list[str] = []  # of lower epochs, under which no swap can land any more
        busy = UnavailableError(f"{self._what}: too many writers at once: compile again")
        for _ in attempts(self._context, busy):
            epoch, check = self._holding.current()
            head, version = read_head(self._context, self._topic, self._partition)
            if head.closed:
                raise NotFoundError(f"topic `{self._topic.name}`: was deleted: compile no more")
            if head.compiled != compiled:
                return self._landed(made)
            first = max(seen.start, group.base)
            is_passed = head.start > first and are_pending(seen, first, head.start)
            if is_passed or not _is_next(group, head):
                return False
            if layout.journal_place(made[0].object)[1] != epoch:
                moved = self._move(made)
                if moved is None:
                    return False
                left += [run.object for run in made]
                made = moved
                continue  # the epoch may be another one by now
            write_id = self._context.ids.new()
            changes = _changes(self._topic, group, made, (head, version))
            changes += list_unused(write_id, [*(old.object for old in group.journals), *left])
            try:
                self._context.catalog.write(self._where, *changes, check, write_id=write_id)
            except ConflictError:
                self._hold_on()
            except UnknownOutcomeError:
                pass  # the head settles it
            else:
                return True
        raise busy

    @property
    def _what(self) -> str:
        return f"compile of partition `{self._topic.name}/{self._partition}`"

    def _landed(self, made: tuple[Run, ...]) -> bool:
        """After a lost reply: returns whether it was our swap that changed ``compiled``."""
        row = self._context.catalog.get(self._where, layout.journal_row(made[0].base))
        what = f"a journal of `{self._topic.name}/{self._partition}`"
        return row is not None and decode_row(row.value, Run, what).object == made[0].object

    def _hold_on(self) -> None:
        """Takes the row again if a sweep has raised the epoch."""
        if not (self._holding.is_ours() or self._holding.try_take()):
            raise FencedError(
                f"partition `{self._topic.name}/{self._partition}`: another process compiles it: "
                "leave it to that one"
            )

    def _move(self, made: tuple[Run, ...]) -> tuple[Run, ...] | None:
        """Returns the journals under our new epoch; None if a sweep has deleted one."""
        work_id = self._context.ids.new()
        epoch = self.list_work(work_id)
        incarnation, partition = self._topic.incarnation, self._partition
        moved = []
        for run in made:
            new_id = self._context.ids.new()
            key = layout.journal(incarnation, partition, epoch, run.base, work_id, new_id)
            try:
                self._context.store.copy(run.object, key)
            except NotFoundError:
                return None
            moved.append(msgspec.structs.replace(run, object=key))
        return tuple(moved)


def _is_next(group: CompileGroup, head: Head) -> bool:
    """Returns whether no row of it was trimmed, and no readable row lies before its runs."""
    runs = [row for row in group.rows if row.journal is None]
    follows = not runs or runs[0].base <= max(head.journaled, head.start)
    return follows and group.rows[0].end > head.start


def _changes(
    topic: Topic, group: CompileGroup, made: tuple[Run, ...], at: tuple[Head, str]
) -> list[Change]:
    head, version = at
    new_head = msgspec.structs.replace(
        head, journaled=max(head.journaled, group.end), compiled=head.compiled + 1
    )
    changes: list[Change] = [Put("head", encode_row(new_head), expect=version)]
    for run in made:
        changes.append(Put(layout.journal_row(run.base), encode_row(run)))
        slots = journal_slots(run, topic.slot_ms)
        changes += [Put(row, value) for row, value in slots.items()]
    bases = {run.base for run in made}
    for old in group.journals:
        if old.base not in bases:
            changes.append(Delete(layout.journal_row(old.base)))
        changes += [Delete(row) for row in journal_slots(old, topic.slot_ms)]
    changes.append(Delete(layout.unused_row(layout.journal_work(made[0].object)[1])))
    return changes
