"""Reads a partition: rows from the catalog and bytes from the store, checked and in order.

Journals hold the offsets below the head's ``journaled``, runs the offsets after it. Together they
cover every offset once. A reader that finds a gap between them, a stale page, or an object that a
sweep has deleted, reads the catalog again from its position. An offset below the start was trimmed:
the reader raises ``NotFoundError`` and never skips it silently.

The reader reads a page in this order:

1. the head
2. the pending amendments, if the head says that there are any
3. the head again, if step 2 read any
4. the rows of journals or runs

A compile deletes an amendment's row only after a journal contains it. So a reader that misses the
row finds the journal, and never an old run that the journal has replaced.

:class:`Pace` decides how often a reader polls a partition that has nothing new.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from tidelog.catalog.update import read_stable
from tidelog.codec.event_batch import events_of, with_position
from tidelog.codec.numbers import numbers_of
from tidelog.context import Context
from tidelog.errors import CorruptError, NotFoundError
from tidelog.log.run_reader import (
    NO_AMENDMENTS,
    Amendments,
    EventRows,
    Offsets,
    RunSelection,
    all_pending,
    are_pending,
    describe_run,
    fetch_run,
    pending,
    read_run,
)
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.event import Event
from tidelog.model.topic import Head, Run, Topic, decode_row
from tidelog.store.fetch import fetch_ahead

__all__ = [
    "FIRST_S",
    "LAST_S",
    "OffsetEvents",
    "Pace",
    "ReadPlan",
    "Reader",
    "find_offset",
    "lost_object",
    "may_have_gone",
]

_RUNS_AT_ONCE = 200  # rows per scan
_AHEAD = 3  # objects fetched in advance
_FRESH_S = 0.1  # how long a reader may miss an amendment of another process
_REREADS = 5  # attempts on a catalog with a gap, before it counts as damaged


@dataclass(frozen=True, slots=True, eq=False)
class OffsetEvents:
    """The events of consecutive offsets of a partition; empty if all were erased."""

    topic: str
    partition: int
    rows: EventRows

    @property
    def base(self) -> int:
        """Returns the first offset that it covers."""
        return self.rows.base

    @property
    def end(self) -> int:
        """Returns the offset after the last one that it covers."""
        return self.rows.end

    @property
    def batch(self) -> pa.RecordBatch:
        """Returns the events in stored columns."""
        return self.rows.batch

    @property
    def offsets(self) -> Offsets:
        """Returns the offset of each event."""
        return self.rows.offsets

    def events(self) -> Iterator[Event]:
        """Yields each event."""
        return events_of(self.batch, self.topic, self.partition, self._places())

    def arrow(self) -> pa.RecordBatch:
        """Returns the events in event columns."""
        return with_position(self.batch, self.topic, self.partition, self._places())

    def slice(self, start: int, end: int) -> OffsetEvents:
        """Returns the events in ``[start, end)`` that are here."""
        return OffsetEvents(self.topic, self.partition, self.rows.slice(start, end))

    def take(self, count: int, start: int | None = None) -> OffsetEvents:
        """Returns the first ``count`` events from ``start`` on; all if there are fewer."""
        return OffsetEvents(self.topic, self.partition, self.rows.take(count, start))

    def _places(self) -> int | Offsets:
        return self.base if self.rows.sparse is None else self.rows.sparse


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """Everything needed to read ``[start, end)`` from the store alone."""

    runs: tuple[Run, ...]  # the last may end before ``end`` if the partition does
    amendments: Amendments


@dataclass(frozen=True, slots=True, eq=False)
class _Page:
    head: Head  # read before anything else
    runs: Sequence[Run] = ()
    amendments: Amendments = NO_AMENDMENTS


class Reader:
    """Reads one partition of one topic; with a pool, it fetches ahead.

    Without a pool it uses threads only to fetch the large new values of amended events.
    """

    def __init__(
        self, context: Context, topic: Topic, partition: int, pool: Executor | None = None
    ) -> None:
        topic.check_partition(partition)
        self._context = context
        self._topic = topic
        self._partition = partition
        self._pool = pool
        self._where = layout.topic_partition(topic.incarnation, partition)
        self._seen = -1  # the newest amendment when a page was last read
        self._amendments_known = 0  # this process's amendments at the last read of the head
        self._looked_s = 0.0

    def read(self, start: int, end: int | None = None) -> Iterator[OffsetEvents]:
        """Yields the current events of ``[start, end)``, or up to the current end, in consecutive
        parts.

        Includes amendments that were made before the part's page was read.
        """
        at, losses = start, 0
        while end is None or at < end:
            page = self._page(at, end)
            if not page.runs:
                return
            try:
                for part in self._read(page, at, end):
                    at, losses = part.end, 0
                    yield part
            except NotFoundError as exc:
                losses += 1
                self._check_lost(page, at, exc, losses)

    def runs(self, offset: int) -> list[Run]:
        """Returns the journals or runs that hold ``offset`` and the following ones, without a gap.

        Empty at the end of the partition. Raises ``NotFoundError`` for an offset that was trimmed.
        """
        return self._look(offset)

    def amendments(self, start: int, end: int) -> Amendments:
        """Returns all pending amendments of ``[start, end)``; read them before the runs."""
        head, _ = read_head(self._context, self._topic, self._partition)
        return all_pending(self._context, self._topic, self._partition, head, start, end)

    def plan(self, start: int, end: int) -> ReadPlan:
        """Returns what another process needs to read ``[start, end)`` as it is now.

        Raises ``NotFoundError`` for offsets that were trimmed.
        """
        amendments = self.amendments(start, end)
        runs: list[Run] = []
        while (at := runs[-1].end if runs else start) < end:
            more = [run for run in self.runs(at) if run.base < end]
            if not more:
                break
            runs += more
        return ReadPlan(tuple(runs), amendments)

    def is_amended(self) -> bool:
        """Returns whether an amendment was made since the last page was read.

        An amendment of another process may show up a little later.
        """
        made = self._context.wakeups.amendments(self._topic.incarnation)
        age_s = self._context.clock.monotonic_s() - self._looked_s
        if made == self._amendments_known and 0 < age_s < _FRESH_S:  # a frozen clock proves nothing
            return False
        return self._look_at_head().amendments != self._seen

    def check_start(self, offset: int) -> None:
        """Raises ``NotFoundError`` for an offset that was trimmed."""
        head, _ = read_head(self._context, self._topic, self._partition)
        if offset < head.start:
            raise self._trimmed_error(offset, head.start)

    def _look_at_head(self) -> Head:
        """Returns the head, and notes when it was read."""
        self._amendments_known = self._context.wakeups.amendments(self._topic.incarnation)
        self._looked_s = self._context.clock.monotonic_s()
        return read_head(self._context, self._topic, self._partition)[0]

    def _page(self, offset: int, end: int | None) -> _Page:
        head = self._look_at_head()
        self._seen = head.amendments
        if not are_pending(head, offset, end):
            return _Page(head, self._look(offset, head))
        found = pending(self._context, self._topic, self._partition, head, offset, end)
        return _Page(head, self._look(offset), found)

    def _look(self, offset: int, head: Head | None = None) -> list[Run]:
        """Returns the rows from an offset on; ``head``, if given, was read just before."""

        def read() -> list[Run] | None:
            nonlocal head
            if head is None:
                head, _ = read_head(self._context, self._topic, self._partition)
            if offset < head.start:
                raise self._trimmed_error(offset, head.start)
            if offset >= head.next:
                return []
            row = layout.journal_row if offset < head.journaled else layout.run_row
            runs = self._rows(row(offset))
            if not runs or runs[0].base != offset:
                runs = [*self._holder(row(offset), offset), *runs]
            if runs and runs[0].base <= offset and not _is_cut(runs, offset):
                return _contiguous(runs)
            head = None
            return None

        lost = CorruptError(
            f"partition `{self._topic.name}/{self._partition}`: no run holds offset {offset}, but "
            "it lies between its start and its end: keep the catalog, and run `tidelog verify`"
        )
        return read_stable(self._context, read, lost)

    def _rows(self, first: str) -> list[Run]:
        last = first.partition("/")[0] + "0"
        rows = self._context.catalog.scan(self._where, first, last, _RUNS_AT_ONCE)
        return [self._decode(row.value) for row in rows]

    def _holder(self, last: str, offset: int) -> list[Run]:
        """Returns the run or journal that begins before an offset and ends after it, if any."""
        first = last.partition("/")[0] + "/"
        rows = self._context.catalog.scan(self._where, first, last, 1, reverse=True)
        return [run for run in (self._decode(row.value) for row in rows) if run.end > offset]

    def _decode(self, value: bytes) -> Run:
        return decode_row(value, Run, f"a run of `{self._topic.name}/{self._partition}`")

    def _read(self, page: _Page, start: int, end: int | None) -> Iterator[OffsetEvents]:
        """Yields the events of a page, up to where its amendments are known."""
        name, number, store = self._topic.name, self._partition, self._context.store
        known = page.amendments.end
        end = known if end is None or (known is not None and known < end) else end
        selection = RunSelection(start, end, pool=self._pool)
        runs = [run for run in page.runs if end is None or run.base < end]
        for run, data in fetch_ahead(self._pool, partial(fetch_run, store), runs, _AHEAD):
            what = describe_run(name, number, run)
            for rows in read_run(store, run, what, selection, page.amendments, data):
                yield OffsetEvents(name, number, rows)

    def _check_lost(self, page: _Page, at: int, error: NotFoundError, losses: int) -> None:
        """Raises unless a change of the catalog explains why an object is missing."""
        head, _ = read_head(self._context, self._topic, self._partition)
        if at < head.start:
            raise self._trimmed_error(at, head.start) from error
        if may_have_gone(page.head, head) and losses < _REREADS:
            return
        raise lost_object(self._topic.name, self._partition, page.runs, error) from error

    def _trimmed_error(self, offset: int, start: int) -> NotFoundError:
        return NotFoundError(
            f"partition `{self._topic.name}/{self._partition}`: offset {offset} was trimmed, the "
            f"first is {start}: continue from {start}",
            offset=offset,
            start=start,
        )


def may_have_gone(before: Head, now: Head) -> bool:
    """Returns whether a compile or an amendment can explain why an object is missing."""
    return (now.compiled, now.amendments) != (before.compiled, before.amendments)


def lost_object(
    topic: str, partition: int, runs: Iterable[Run], error: NotFoundError
) -> CorruptError:
    """Returns the error for a missing object that rows name, when nothing explains it."""
    key = error.context.get("key")
    where = next((f" {run.base} to {run.end}" for run in runs if run.object == key), "")
    return CorruptError(
        f"object `{key}`: is gone, but partition `{topic}/{partition}` has its offsets{where} "
        "there: restore it from a copy, and run `tidelog verify`"
    )


def _is_cut(runs: Sequence[Run], offset: int) -> bool:
    """Returns whether events from an offset on were trimmed, and then dropped by a compile."""
    return any(run.journal and run.journal.start > max(run.base, offset) for run in runs)


def find_offset(context: Context, topic: Topic, partition: int, timestamp_ms: int) -> int:
    """Returns the first offset from which on a reader sees every event of that time or later.

    All events before it are older. Some after it may be older too, if times are out of order.
    """
    head, _ = read_head(context, topic, partition)
    reader = Reader(context, topic, partition)
    at = head.start
    while at < head.next:
        try:
            runs = reader.runs(at)
            if not runs:
                break
            for run in runs:
                if run.last_ms >= timestamp_ms:
                    found = _first_since(reader, at, run.end, timestamp_ms)
                    if found is not None:
                        return found
                at = run.end
        except NotFoundError as exc:
            if "start" not in exc.context:
                raise
            at = exc.context["start"]  # it was trimmed in the meantime
    return head.next


def _first_since(reader: Reader, start: int, end: int, timestamp_ms: int) -> int | None:
    for part in reader.read(start, end):
        times = numbers_of(part.batch.column("timestamp").cast(pa.int64()))
        found = (times >= timestamp_ms).nonzero()[0]
        if len(found):
            return int(part.offsets[found[0]])
    return None


def _contiguous(runs: list[Run]) -> list[Run]:
    """Returns the runs up to the first gap; the caller reads again from there."""
    for index in range(1, len(runs)):
        if runs[index].base != runs[index - 1].end:
            return runs[:index]
    return runs


FIRST_S = 0.02  # the wait after the first poll that finds nothing; it doubles from here
LAST_S = 1.0


class Pace:
    """Decides when to poll one partition again. It outlives a single ``poll`` call.

    A poll is due at first, after one that found events, and when this process has committed
    something new. Otherwise it is due after a wait that doubles up to a second. So a quiet
    partition costs one read a second, whatever the timeouts of ``poll`` are.
    """

    def __init__(self) -> None:
        self._due_s: float | None = None  # None: now
        self._wait_s = FIRST_S
        self._committed = -1  # the newest end of this process's commits at the last poll

    def is_due(self, now_s: float, committed: int) -> bool:
        """Returns whether to poll now. ``committed`` is the end of its own commits."""
        return self._due_s is None or now_s >= self._due_s or committed > self._committed

    def looked(self, committed: int) -> None:
        """Notes which commits were known when a poll started."""
        self._committed = max(self._committed, committed)

    def found(self) -> None:
        """Notes that a poll found events: the next one is due now."""
        self._due_s, self._wait_s = None, FIRST_S

    def missed(self, now_s: float) -> None:
        """Notes that a poll found nothing: the next wait is longer."""
        self._due_s = now_s + self._wait_s
        self._wait_s = min(LAST_S, 2 * self._wait_s)

    def hurry(self) -> None:
        """Makes a poll due now, since another read has found events."""
        self._due_s = None

    def wait_s(self, now_s: float) -> float:
        """Returns the seconds until the next poll is due."""
        return 0.0 if self._due_s is None else max(0.0, self._due_s - now_s)
