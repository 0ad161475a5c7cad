"""Verifying a topic: every layer is read and held against the others.

It changes nothing, runs beside producers, trims and sweeps, and collects what it finds instead of
raising: an *error* is damage that a person must look at, a *note* is not. What looks like damage
is read once more before it is told, as it may have been trimmed meanwhile.

The layers: the objects of the topic are listed; then, for each partition, the head, the rows of
producers, the run rows, which must tile from the start to the next offset, the bytes of each run
with their checksum, count and times, and the slot rows, which must be those of the runs; last, the
objects that no run names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.catalog.base import Row
from tidelog.codec.segment import read_piece
from tidelog.errors import CorruptError, InvalidError, NotFoundError
from tidelog.log.base import Log
from tidelog.log.topics import find_topic
from tidelog.model import layout, limits
from tidelog.model.run import Head, ProducerState, Run, decode_row
from tidelog.model.slot import slots_of
from tidelog.model.topic import Topic
from tidelog.store.base import check_key

__all__ = ["Finding", "Severity", "VerifyReport", "verify_topic"]

Severity = Literal["error", "note"]

S = TypeVar("S", bound=msgspec.Struct)

_FINDINGS_MAX = 1_000  # kept of each severity; all are counted
_AHEAD = 16  # runs that are read at once where there is a pool


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be, or that a person may want to know."""

    severity: Severity
    where: str
    what: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was read, and what was found. Runs, events and bytes are those that can be read."""

    topic: str
    partitions: int
    runs: int
    events: int
    bytes: int
    objects: int
    orphans: int  # objects that no run names, or names yet
    orphan_bytes: int
    errors: int
    notes: int
    findings: tuple[Finding, ...]  # the first ones of each severity


@dataclass
class _Tally:
    """The report in the making."""

    log: Log
    topic: Topic
    sizes: dict[str, int]  # of the topic's objects
    progress: Callable[[int], None] | None
    named: set[str] = field(default_factory=set)  # objects
    floor: int = 0  # the highest of all heads
    runs: int = 0
    events: int = 0
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    counts: dict[Severity, int] = field(default_factory=lambda: {"error": 0, "note": 0})

    def add(self, severity: Severity, where: str, what: str) -> None:
        self.counts[severity] += 1
        if self.counts[severity] <= _FINDINGS_MAX:
            self.findings.append(Finding(severity, where, what))


def verify_topic(
    log: Log,
    topic: Topic,
    pool: Executor | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Read everything that belongs to a topic; what was found.

    ``progress`` is called after each run with the bytes that were read. ``NotFoundError`` when the
    topic is deleted, ``UnavailableError`` as usual.
    """
    listed = log.store.list(f"topics/{topic.incarnation}/")  # before the rows that name them
    tally = _Tally(log, topic, {info.key: info.size for info in listed}, progress)
    for partition in range(topic.partitions):
        _PartitionCheck(tally, partition, pool).run()
    _check_registry(tally)
    staged = layout.sinks(topic.incarnation, "")[:-1]  # named by manifests, not by runs
    orphans = {
        key: size
        for key, size in tally.sizes.items()
        if key not in tally.named and not key.startswith(staged)
    }
    for key, size in orphans.items():
        tally.add("note", f"object `{key}`", f"no run names it, {size} bytes: a sweep decides")
    return VerifyReport(
        topic=topic.name,
        partitions=topic.partitions,
        runs=tally.runs,
        events=tally.events,
        bytes=tally.bytes,
        objects=len(tally.sizes),
        orphans=len(orphans),
        orphan_bytes=sum(orphans.values()),
        errors=tally.counts["error"],
        notes=tally.counts["note"],
        findings=tuple(tally.findings),
    )


def _check_registry(tally: _Tally) -> None:
    """The topic is still there, and no head has a floor that its producers could never reach."""
    name = tally.topic.name
    try:
        now = find_topic(tally.log, name)
    except CorruptError as exc:
        tally.add("error", f"registry row of `{name}`", str(exc))
        return
    if now.incarnation != tally.topic.incarnation:
        raise NotFoundError(f"topic `{name}`: was deleted and made again: verify it again")
    if tally.floor > now.generation:
        tally.add(
            "error",
            f"registry row of `{name}`",
            f"generation {now.generation}, but a head has floor {tally.floor}: nothing can be "
            "appended there",
        )


class _PartitionCheck:
    """One partition: its rows are scanned once, and runs are read as they come."""

    def __init__(self, tally: _Tally, partition: int, pool: Executor | None) -> None:
        self._tally = tally
        self._log = tally.log
        self._topic = tally.topic
        self._name = f"`{tally.topic.name}/{partition}`"
        self._where = layout.topic_partition(tally.topic.incarnation, partition)
        self._pool = pool
        self._head: Head | None = None
        self._at: int | None = None  # the end of the runs so far
        self._gaps: list[tuple[int, int]] = []
        self._trimmed = 0  # runs below the start
        self._slots: dict[str, tuple[Run, bool, bool]] = {}  # run, whether live, whether seen
        self._dangling: list[Row] = []
        self._reading: deque[tuple[Run, Future[str | None]]] = deque()

    def run(self) -> None:
        self._head = self._read_head()
        for row in self._log.catalog.scan(self._where):
            kind = row.row.partition("/")[0]
            if kind == "producer":
                self._decode(row, ProducerState)
            elif kind == "run":
                self._check_run(row)
            elif kind == "slot":
                self._check_slot(row)
            elif kind not in layout.TOPIC_ROW_KINDS:
                what = "is of an unknown kind: a newer version wrote it; sweeps leave this topic"
                self._tally.add("note", self._row(row.row), what)
        while self._reading:
            self._finish_reading()
        self._check_ends(self._read_head() if self._head is not None else None)
        self._check_slots_left()

    def _read_head(self) -> Head | None:
        row = self._log.catalog.get(self._where, "head")
        if row is None:
            self._error(self._row("head"), "is missing: nothing can be appended or read")
            return None
        head = self._decode(row, Head)
        if head is None:
            return None
        self._tally.floor = max(self._tally.floor, head.floor)
        if 0 <= head.start <= head.next:
            return head
        self._error(self._row("head"), f"starts at {head.start}, but its next is {head.next}")
        return None

    def _check_run(self, row: Row) -> None:
        run = self._decode(row, Run)
        if run is None:
            return
        problem = _problem_of_row(row.row, run)
        if problem is not None:
            self._error(self._row(row.row), problem)
            return
        live = self._head is None or run.end > self._head.start
        for prefix in _slot_prefixes(run, self._topic):
            self._slots[prefix] = (run, live, False)
        self._tally.named.add(run.object)
        if not live:
            self._trimmed += 1
            return
        self._check_tile(run)
        self._tally.runs += 1
        self._tally.events += run.count
        self._tally.bytes += run.byte_end - run.byte_start
        self._start_reading(run)

    def _check_tile(self, run: Run) -> None:
        expected = self._at
        if expected is None:  # the first run may begin before the start
            expected = run.base if self._head is None else min(run.base, self._head.start)
        if run.base > expected:
            self._gaps.append((expected, run.base))
        elif run.base < expected:
            end = min(expected, run.end)
            self._error(self._run(run), f"offsets {run.base} to {end} are in an earlier run too")
        self._at = max(expected, run.end)

    def _start_reading(self, run: Run) -> None:
        if self._pool is None:
            done: Future[str | None] = Future()
            done.set_result(_problem_of_object(self._tally, run))
        else:
            done = self._pool.submit(_problem_of_object, self._tally, run)
        self._reading.append((run, done))
        if self._pool is None or len(self._reading) == _AHEAD:
            self._finish_reading()

    def _finish_reading(self) -> None:
        run, done = self._reading.popleft()
        problem = done.result()
        if problem and self._is_there(run):
            self._error(self._run(run), problem)
        if self._tally.progress is not None:
            self._tally.progress(run.byte_end - run.byte_start)

    def _check_ends(self, now: Head | None) -> None:
        """What the head says, held against the runs; ``now`` is the head after the scan."""
        if self._head is not None and now is not None:
            at = self._head.start if self._at is None else self._at
            if at < self._head.next:
                self._gaps.append((at, self._head.next))
            if at > now.next:
                self._error(self._row("head"), f"next is {now.next}, but runs reach to {at}")
        start = now.start if now is not None else 0
        self._gaps = [(max(first, start), end) for first, end in self._gaps if end > start]
        for first, end in self._gaps:
            self._error(f"partition {self._name}", f"no run holds offsets {first} to {end}")
        if self._trimmed:
            what = f"{self._trimmed} trimmed runs still have rows: the next trim or sweep ends that"
            self._tally.add("note", f"partition {self._name}", what)

    def _check_slot(self, row: Row) -> None:
        prefix = row.row[: row.row.rindex("/") + 1]
        run, live, seen = self._slots.get(prefix, (None, False, False))
        if run is None:
            self._dangling.append(row)
        elif seen:
            self._error(self._row(row.row), f"is the second one for the run at {run.base}")
        else:
            self._slots[prefix] = (run, live, True)
            if row.value != str(run.end).encode():
                self._error(self._row(row.row), f"says {row.value!r}, the run ends at {run.end}")

    def _check_slots_left(self) -> None:
        for prefix, (run, live, seen) in self._slots.items():
            if live and not seen and self._is_there(run):
                self._error(self._row(prefix), f"is missing: the run at {run.base} needs it")
        for row in self._dangling:
            if self._is_dangling(row):
                self._error(self._row(row.row), "names no run: nothing is found by it")

    def _is_dangling(self, row: Row) -> bool:
        """Whether no run has this slot, also none that came after the scan."""
        try:
            base = int(row.row.split("/")[3])
        except (IndexError, ValueError):
            return True
        if any(first <= base < end for first, end in self._gaps):
            return False  # its run is missing, which is told already
        found = self._log.catalog.get(self._where, layout.run_row(base))
        if found is not None:
            try:
                run = decode_row(found.value, Run, "")
            except CorruptError:
                return False  # the run's row is damaged, which is told already
            if _problem_of_row(found.row, run) is not None:
                return False
            if row.row.startswith(tuple(_slot_prefixes(run, self._topic))):
                return False
        return self._log.catalog.get(self._where, row.row) is not None

    def _is_there(self, run: Run) -> bool:
        """Whether the run still has its row; if not, it was trimmed since it was scanned."""
        return self._log.catalog.get(self._where, layout.run_row(run.base)) is not None

    def _decode(self, row: Row, kind: type[S]) -> S | None:
        try:
            return decode_row(row.value, kind, "value")
        except CorruptError as exc:
            self._error(self._row(row.row), str(exc))
            return None

    def _error(self, where: str, what: str) -> None:
        self._tally.add("error", where, what)

    def _row(self, row: str) -> str:
        return f"partition {self._name}, row `{row}`"

    def _run(self, run: Run) -> str:
        return f"partition {self._name}, offsets {run.base} to {run.end}"


def _problem_of_row(row: str, run: Run) -> str | None:
    """What makes a run impossible, whatever else there is."""
    if row != layout.run_row(run.base):
        return f"holds the run of offset {run.base}"
    if run.count < 1:
        return f"holds {run.count} events"
    if not 0 <= run.first_ms <= run.last_ms < limits.TIMESTAMP_MS_END:
        return f"holds times {run.first_ms} to {run.last_ms}"
    return None


def _problem_of_object(tally: _Tally, run: Run) -> str | None:
    """The first thing that is wrong with what a run names. Runs in threads of the pool."""
    what = f"object `{run.object}`"
    if not _is_of(tally.topic, run.object):
        return f"{what}: is not of this topic"
    try:
        size = tally.sizes.get(run.object)
        if size is None:  # it was uploaded after the listing
            size = tally.log.store.head(run.object).size
        if not 0 <= run.byte_start < run.byte_end <= size:
            return f"{what}: has {size} bytes, the row says {run.byte_start} to {run.byte_end}"
        data = tally.log.store.get(run.object, run.byte_start, run.byte_end)
        return _problem_of_times(list(read_piece(data, run.crc, run.count, what)), run)
    except NotFoundError:
        return f"{what}: is missing: restore it from a copy"
    except CorruptError as exc:
        return str(exc)
    except pa.ArrowException as exc:
        return f"{what}: does not decode ({exc}): keep the object"


def _problem_of_times(batches: list[pa.RecordBatch], run: Run) -> str | None:
    times = [pc.min_max(batch.column("timestamp").cast(pa.int64())) for batch in batches]
    first_ms = min(each["min"].as_py() for each in times)
    last_ms = max(each["max"].as_py() for each in times)
    if (first_ms, last_ms) == (run.first_ms, run.last_ms):
        return None
    return (
        f"object `{run.object}`: holds times {first_ms} to {last_ms}, "
        f"the row says {run.first_ms} to {run.last_ms}"
    )


def _is_of(topic: Topic, key: str) -> bool:
    try:
        check_key(key)
    except InvalidError:
        return False
    return key.startswith(f"topics/{topic.incarnation}/")


def _slot_prefixes(run: Run, topic: Topic) -> list[str]:
    """What the keys of a run's slot rows begin with."""
    level, starts = slots_of(run.first_ms, run.last_ms, topic.slot_ms)
    return [layout.slot_row(level, start, run.base, "") for start in starts]
