"""Reading a partition: rows from the catalog, bytes from the store, checked and in order.

Journals hold what is below the head's ``journaled``, runs what follows; both tile. Whoever meets a
gap between them, a page that went stale, or an object that a sweep has removed, reads the catalog
again from where it stands. Offsets below the start have been trimmed, and that is told, never
passed over.

A page is read in this order: the head, the amendments that it tells of, the head again if there
were any, and the rows last. An amendment's row goes when a journal has it; so whoever does not find
the one finds the other, and never an old run that the journal has taken the place of.

How often a reader looks at a partition that has nothing new.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from tidelog.codec.event_batch import events_of, with_position
from tidelog.context import Context
from tidelog.errors import CorruptError, NotFoundError
from tidelog.log.reader.amendments import (
    NO_AMENDMENTS,
    Amendments,
    EventRows,
    Offsets,
    all_pending,
    are_pending,
    pending,
)
from tidelog.log.reader.run_reader import Cut, describe_run, fetch_run, in_turn, read_run
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.event import Event
from tidelog.model.partition_rows import Head, Run, decode_row
from tidelog.model.topic import Topic

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

_RUNS_AT_ONCE = 200  # rows read in one scan
_AHEAD = 3  # objects fetched before they are asked for
_FRESH_S = 0.1  # for which nobody looks whether another process has amended something
_REREADS = 5  # of a catalog that shows a gap, before it is called damaged


@dataclass(frozen=True, slots=True, eq=False)
class OffsetEvents:
    """All events of some consecutive offsets of a partition; none where all were erased."""

    topic: str
    partition: int
    rows: EventRows

    @property
    def base(self) -> int:
        """The first offset that it stands for."""
        return self.rows.base

    @property
    def end(self) -> int:
        """The offset after the last that it stands for."""
        return self.rows.end

    @property
    def batch(self) -> pa.RecordBatch:
        """The events in stored columns."""
        return self.rows.batch

    @property
    def offsets(self) -> Offsets:
        """The offset of each event."""
        return self.rows.offsets

    def events(self) -> Iterator[Event]:
        """Each of them."""
        return events_of(self.batch, self.topic, self.partition, self._places())

    def arrow(self) -> pa.RecordBatch:
        """All of them, in event columns."""
        return with_position(self.batch, self.topic, self.partition, self._places())

    def slice(self, start: int, end: int) -> OffsetEvents:
        """Those of ``[start, end)``, as far as they are here."""
        return OffsetEvents(self.topic, self.partition, self.rows.slice(start, end))

    def take(self, count: int, start: int | None = None) -> OffsetEvents:
        """So many of the first events, from ``start`` on; all where there are no more."""
        return OffsetEvents(self.topic, self.partition, self.rows.take(count, start))

    def _places(self) -> int | Offsets:
        return self.base if self.rows.places is None else self.rows.places


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """All that is needed to read ``[start, end)`` from the store alone."""

    runs: tuple[Run, ...]  # the last may end before ``end``, where the partition does
    amendments: Amendments


@dataclass(frozen=True, slots=True, eq=False)
class _Page:
    head: Head  # before anything else was read
    runs: Sequence[Run] = ()
    amendments: Amendments = NO_AMENDMENTS


class Reader:
    """Reads one partition of one topic; with a pool it fetches ahead.

    Without one it has threads only while the large new values of amended events are fetched.
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
        self._told = 0  # of amendments in this process, and when was that
        self._looked_s = 0.0

    def stretches(self, start: int, end: int | None = None) -> Iterator[OffsetEvents]:
        """The events of ``[start, end)`` that are there now, or up to the end that is there now.

        The stretches tile. Amendments are seen that were made before its page was read.
        """
        at, losses = start, 0
        while end is None or at < end:
            page = self._page(at, end)
            if not page.runs:
                return
            try:
                for stretch in self._read(page, at, end):
                    at, losses = stretch.end, 0
                    yield stretch
            except NotFoundError as exc:
                losses += 1
                self._check_lost(page, at, exc, losses)

    def runs(self, offset: int) -> list[Run]:
        """The journals or runs that hold ``offset`` and what follows, without a gap.

        None at the end. ``NotFoundError`` for an offset that was trimmed.
        """
        return self._look(offset)

    def amendments(self, start: int, end: int) -> Amendments:
        """All that are pending of ``[start, end)``; to be read before the runs are."""
        head, _ = read_head(self._context, self._topic, self._partition)
        return all_pending(self._context, self._topic, self._partition, head, start, end)

    def plan(self, start: int, end: int) -> ReadPlan:
        """What is needed to read ``[start, end)`` elsewhere, as it is now.

        ``NotFoundError`` where it was trimmed.
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
        """Whether an amendment was made since the last page was read.

        One that another process has just made may be told a little later.
        """
        told = self._context.wakeups.amendments(self._topic.incarnation)
        age_s = self._context.clock.monotonic_s() - self._looked_s
        if told == self._told and 0 < age_s < _FRESH_S:  # a clock that stands still tells nothing
            return False
        return self._look_at_head().amendments != self._seen

    def check_start(self, offset: int) -> None:
        """Refuse an offset that was trimmed."""
        head, _ = read_head(self._context, self._topic, self._partition)
        if offset < head.start:
            raise self._trimmed(offset, head.start)

    def _look_at_head(self) -> Head:
        """The head, and from when it is."""
        self._told = self._context.wakeups.amendments(self._topic.incarnation)
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
        """The rows of an offset and what follows; the head, if given, was read just before."""
        for attempt in range(_REREADS):
            if head is None:
                head, _ = read_head(self._context, self._topic, self._partition)
            if offset < head.start:
                raise self._trimmed(offset, head.start)
            if offset >= head.next:
                return []
            row = layout.journal_row if offset < head.journaled else layout.run_row
            runs = self._rows(row(offset))
            if not runs or runs[0].base != offset:
                runs = [*self._holder(row(offset), offset), *runs]
            if runs and runs[0].base <= offset and not _is_cut(runs, offset):
                return _contiguous(runs)
            head = None
            self._context.clock.sleep(0.01 * 2**attempt)
        raise CorruptError(
            f"partition `{self._topic.name}/{self._partition}`: no run holds offset {offset}, but "
            "it lies between its start and its end: keep the catalog, and run `tidelog verify`"
        )

    def _rows(self, first: str) -> list[Run]:
        last = first.partition("/")[0] + "0"
        rows = self._context.catalog.scan(self._where, first, last, _RUNS_AT_ONCE)
        return [self._decode(row.value) for row in rows]

    def _holder(self, last: str, offset: int) -> list[Run]:
        """The run or journal that begins before an offset and ends after it, if there is one."""
        first = last.partition("/")[0] + "/"
        rows = self._context.catalog.scan(self._where, first, last, 1, reverse=True)
        return [run for run in (self._decode(row.value) for row in rows) if run.end > offset]

    def _decode(self, value: bytes) -> Run:
        return decode_row(value, Run, f"a run of `{self._topic.name}/{self._partition}`")

    def _read(self, page: _Page, start: int, end: int | None) -> Iterator[OffsetEvents]:
        """The events of a page, as far as its amendments are known."""
        name, number, store = self._topic.name, self._partition, self._context.store
        known = page.amendments.end
        end = known if end is None or (known is not None and known < end) else end
        cut = Cut(start, end, pool=self._pool)
        runs = [run for run in page.runs if end is None or run.base < end]
        for run, data in in_turn(self._pool, partial(fetch_run, store), runs, _AHEAD):
            what = describe_run(name, number, run)
            for rows in read_run(store, run, what, cut, page.amendments, data):
                yield OffsetEvents(name, number, rows)

    def _check_lost(self, page: _Page, at: int, error: NotFoundError, losses: int) -> None:
        """Whether an object could go, since the catalog has changed; raises if not."""
        head, _ = read_head(self._context, self._topic, self._partition)
        if at < head.start:
            raise self._trimmed(at, head.start) from error
        if may_have_gone(page.head, head) and losses < _REREADS:
            return
        raise lost_object(self._topic.name, self._partition, page.runs, error) from error

    def _trimmed(self, offset: int, start: int) -> NotFoundError:
        return NotFoundError(
            f"partition `{self._topic.name}/{self._partition}`: offset {offset} was trimmed, the "
            f"first is {start}: go on from {start}",
            offset=offset,
            start=start,
        )


def may_have_gone(before: Head, now: Head) -> bool:
    """Whether a compile or an amendment since can explain that an object is not there any more."""
    return (now.compiled, now.amendments) != (before.compiled, before.amendments)


def lost_object(
    topic: str, partition: int, runs: Iterable[Run], error: NotFoundError
) -> CorruptError:
    """What to raise where rows name an object that is missing, and nothing explains that."""
    key = error.context.get("key")
    where = next((f" {run.base} to {run.end}" for run in runs if run.object == key), "")
    return CorruptError(
        f"object `{key}`: is gone, but partition `{topic}/{partition}` has its offsets{where} "
        "there: restore it from a copy, and run `tidelog verify`"
    )


def _is_cut(runs: Sequence[Run], offset: int) -> bool:
    """Whether events from an offset on were trimmed, and a compile has left them out since."""
    return any(run.journal and run.journal.start > max(run.base, offset) for run in runs)


def find_offset(context: Context, topic: Topic, partition: int, timestamp_ms: int) -> int:
    """The first offset from which on a reader sees every event of that time or later.

    Events before it are all older; some after it may be older too, where times are out of order.
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
            at = exc.context["start"]  # a trim came by
    return head.next


def _first_since(reader: Reader, start: int, end: int, timestamp_ms: int) -> int | None:
    for stretch in reader.stretches(start, end):
        times = stretch.batch.column("timestamp").cast(pa.int64()).to_numpy()
        found = (times >= timestamp_ms).nonzero()[0]
        if len(found):
            return int(stretch.offsets[found[0]])
    return None


def _contiguous(runs: list[Run]) -> list[Run]:
    """The runs up to the first gap; what follows is read again from there."""
    for index in range(1, len(runs)):
        if runs[index].base != runs[index - 1].end:
            return runs[:index]
    return runs


FIRST_S = 0.02  # the wait after the first look that found nothing; it doubles from here
LAST_S = 1.0


class Pace:
    """When to look at one partition again. It outlives a single poll.

    A look is due at first, after a look that found events, and when this process has committed
    something new; else after a wait that doubles up to a second. So a quiet partition costs one
    read a second, whatever the time-outs of polls are.
    """

    def __init__(self) -> None:
        self._due_s: float | None = None  # None: at once
        self._wait_s = FIRST_S
        self._told = -1  # the newest end of this process's commits when we last looked

    def is_due(self, now_s: float, told: int) -> bool:
        """Whether to look now. ``told`` is the end of what this process has committed."""
        return self._due_s is None or now_s >= self._due_s or told > self._told

    def looked(self, told: int) -> None:
        """Note what was known to be committed when a look began."""
        self._told = max(self._told, told)

    def found(self) -> None:
        """There was something: look again at once."""
        self._due_s, self._wait_s = None, FIRST_S

    def missed(self, now_s: float) -> None:
        """There was nothing: wait longer than the last time."""
        self._due_s = now_s + self._wait_s
        self._wait_s = min(LAST_S, 2 * self._wait_s)

    def hurry(self) -> None:
        """There is something, as another read has shown: look at once."""
        self._due_s = None

    def wait_s(self, now_s: float) -> float:
        """How long until the next look is due."""
        return 0.0 if self._due_s is None else max(0.0, self._due_s - now_s)
