"""Reading a partition: runs from the catalog, bytes from the store, checked and in order.

The rows of a partition tile: whoever meets a gap between them, a page that went stale, or an object
that a sweep has removed, reads the catalog again from where it stands. Offsets below the start have
been trimmed, and that is told, never passed over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import pyarrow as pa

from tidelog.codec.events import events_of, with_position
from tidelog.codec.segment import read_piece
from tidelog.errors import CorruptError, NotFoundError
from tidelog.log.base import Log
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.event import Event
from tidelog.model.run import Run, decode_row
from tidelog.model.topic import Topic

__all__ = ["Reader", "Stretch", "find_offset"]

_RUNS_AT_ONCE = 200  # run rows read in one scan
_AHEAD = 4  # objects fetched before they are asked for
_REREADS = 5  # of a catalog that shows a gap, before it is called damaged


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some consecutive events of a partition, as Arrow, and where they begin."""

    topic: str
    partition: int
    base: int
    batch: pa.RecordBatch

    @property
    def end(self) -> int:
        """The offset after the last of them."""
        return self.base + int(self.batch.num_rows)

    def events(self) -> Iterator[Event]:
        """Each of them."""
        return events_of(self.batch, self.topic, self.partition, self.base)

    def arrow(self) -> pa.RecordBatch:
        """All of them, in event columns."""
        return with_position(self.batch, self.topic, self.partition, self.base)

    def slice(self, start: int, end: int) -> Stretch:
        """Those of ``[start, end)``, as far as they are here."""
        first = max(0, start - self.base)
        rows = max(0, min(end, self.end) - self.base - first)
        part = self.batch.slice(first, rows)
        return Stretch(self.topic, self.partition, self.base + first, part)


class Reader:
    """Reads one partition of one topic; with a pool it fetches ahead, without it has no threads."""

    def __init__(
        self, log: Log, topic: Topic, partition: int, pool: Executor | None = None
    ) -> None:
        topic.check_partition(partition)
        self._log = log
        self._topic = topic
        self._partition = partition
        self._pool = pool
        self._where = layout.topic_partition(topic.incarnation, partition)

    def stretches(self, start: int, end: int | None = None) -> Iterator[Stretch]:
        """The events of ``[start, end)`` that are there now, or up to the end that is there now."""
        at = start
        while end is None or at < end:
            runs = self.runs(at)
            if not runs:
                return
            if end is not None:
                runs = [run for run in runs if run.base < end]
            before = at
            for stretch in self._fetch(runs):
                part = stretch.slice(at, stretch.end if end is None else end)
                at = part.end
                if part.batch.num_rows:
                    yield part
            if at == before:
                return

    def runs(self, offset: int) -> list[Run]:
        """The runs that hold ``offset`` and what follows, without a gap; none at the end.

        ``NotFoundError`` for an offset that was trimmed.
        """
        for attempt in range(_REREADS):
            rows = self._scan_runs(offset)
            if rows and rows[0].base == offset:
                return _contiguous(rows)
            holder = self._holder(offset)
            if holder is not None:
                return _contiguous([holder, *rows])
            head, _ = read_head(self._log, self._topic, self._partition)
            if offset < head.start:
                raise self._trimmed(offset, head.start)
            if offset >= head.next:
                return []
            self._log.clock.sleep(0.01 * 2**attempt)
        raise CorruptError(
            f"partition `{self._topic.name}/{self._partition}`: no run holds offset {offset}, but "
            f"it runs from {head.start} to {head.next}: keep the catalog, and run `tidelog verify`"
        )

    def check_start(self, offset: int) -> None:
        """Refuse an offset that was trimmed."""
        head, _ = read_head(self._log, self._topic, self._partition)
        if offset < head.start:
            raise self._trimmed(offset, head.start)

    def _scan_runs(self, offset: int) -> list[Run]:
        rows = self._log.catalog.scan(self._where, layout.run_row(offset), "run0", _RUNS_AT_ONCE)
        return [self._decode(row.value) for row in rows]

    def _holder(self, offset: int) -> Run | None:
        """The run that begins before an offset and ends after it."""
        rows = self._log.catalog.scan(self._where, "run/", layout.run_row(offset), 1, reverse=True)
        for row in rows:
            run = self._decode(row.value)
            return run if run.end > offset else None
        return None

    def _decode(self, value: bytes) -> Run:
        return decode_row(value, Run, f"a run of `{self._topic.name}/{self._partition}`")

    def _fetch(self, runs: list[Run]) -> Iterator[Stretch]:
        if self._pool is None:
            for run in runs:
                yield from self._stretches_of(run, self._read(run))
            return
        waiting: deque[tuple[Run, Future[bytes]]] = deque()
        todo = deque(runs)
        while todo or waiting:
            while todo and len(waiting) < _AHEAD:
                run = todo.popleft()
                waiting.append((run, self._pool.submit(self._read, run)))
            run, coming = waiting.popleft()
            yield from self._stretches_of(run, coming.result())

    def _read(self, run: Run) -> bytes:
        try:
            return self._log.store.get(run.object, run.byte_start, run.byte_end)
        except NotFoundError as exc:
            head, _ = read_head(self._log, self._topic, self._partition)
            if run.end <= head.start:
                raise self._trimmed(run.base, head.start) from exc
            raise CorruptError(
                f"object `{run.object}`: is gone, but partition "
                f"`{self._topic.name}/{self._partition}` has its offsets {run.base} to {run.end} "
                "there: restore it from a copy, and run `tidelog verify`"
            ) from exc

    def _stretches_of(self, run: Run, data: bytes) -> Iterator[Stretch]:
        what = (
            f"object `{run.object}`, bytes {run.byte_start} to {run.byte_end}, partition "
            f"`{self._topic.name}/{self._partition}`, offsets {run.base} to {run.end}"
        )
        base = run.base
        for batch in read_piece(data, run.crc, run.count, what):
            yield Stretch(self._topic.name, self._partition, base, batch)
            base += batch.num_rows

    def _trimmed(self, offset: int, start: int) -> NotFoundError:
        return NotFoundError(
            f"partition `{self._topic.name}/{self._partition}`: offset {offset} was trimmed, the "
            f"first is {start}: go on from {start}",
            offset=offset,
            start=start,
        )


def find_offset(log: Log, topic: Topic, partition: int, timestamp_ms: int) -> int:
    """The first offset from which on a reader sees every event of that time or later.

    Events before it are all older; some after it may be older too, where times are out of order.
    """
    where = layout.topic_partition(topic.incarnation, partition)
    head, _ = read_head(log, topic, partition)
    what = f"a run of `{topic.name}/{partition}`"
    reader = Reader(log, topic, partition)
    for row in log.catalog.scan(where, "run/", "run0"):
        run = decode_row(row.value, Run, what)
        if run.last_ms < timestamp_ms or run.end <= head.start:
            continue
        for stretch in reader.stretches(max(run.base, head.start), run.end):
            times = stretch.batch.column("timestamp").cast(pa.int64()).to_numpy()
            found = (times >= timestamp_ms).nonzero()[0]
            if len(found):
                return stretch.base + int(found[0])
    return head.next


def _contiguous(runs: list[Run]) -> list[Run]:
    """The runs up to the first gap; what follows is read again from there."""
    for index in range(1, len(runs)):
        if runs[index].base != runs[index - 1].end:
            return runs[:index]
    return runs
