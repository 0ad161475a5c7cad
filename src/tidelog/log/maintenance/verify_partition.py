"""Verifies one partition: scans its rows once, and reads runs as they come.

:class:`AmendmentCheck` checks that amendments are where the head says, with the values that they
name. :class:`SlotCheck` checks that each run and journal has its slot rows, and that there are no
others. What looks like damage is read once more before it is reported: it may have been trimmed,
compiled, amended or swept since the scan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TypeVar

from tidelog.catalog.base import Row
from tidelog.errors import CorruptError, NotFoundError
from tidelog.log.maintenance.verify_bytes import VerifyTally, problem_of_object
from tidelog.log.partition_reader import Reader
from tidelog.log.run_reader import new_value
from tidelog.model import layout, limits
from tidelog.model.decoding import Persisted
from tidelog.model.topic import (
    Amendment,
    Head,
    HeldRow,
    LossAccepted,
    ProducerState,
    Run,
    Strays,
    UnusedObjects,
    decode_row,
    journal_slots,
    slots_of,
)

__all__ = ["AmendmentCheck", "PartitionCheck", "SlotCheck"]

S = TypeVar("S", bound=Persisted)

_AHEAD = 16  # runs read in parallel with a pool


class PartitionCheck:
    """Checks one partition; the tally gets the findings."""

    def __init__(self, tally: VerifyTally, partition: int, pool: Executor | None) -> None:
        self._tally = tally
        self._context = tally.context
        self._partition = partition
        self._name = f"`{tally.topic.name}/{partition}`"
        self._where = layout.topic_partition(tally.topic.incarnation, partition)
        self._pool = pool
        self._head: Head | None = None
        self._last: Run | None = None  # the last one without a gap before it
        self._first: int | None = None  # the lowest offset of a live run or journal
        self._gaps: list[tuple[int, int]] = []
        self._trimmed = 0  # runs and journals below the start
        self._shadowed = 0  # runs that journals have replaced
        self._journaled: int | None = None  # where live journals end
        self._applied = 0  # the newest amendment that a journal contains
        self._reading: deque[tuple[Run, Future[str | None]]] = deque()
        self._amendments = AmendmentCheck(tally, partition)
        self._slots = SlotCheck(tally, partition, self.holds_now)

    def run(self) -> None:
        """Reads everything."""
        self._head = self._read_head()
        if self._head is not None:
            self._tally.nexts[self._partition] = self._head.next
            self._tally.starts[self._partition] = self._head.start
        for row in self._context.catalog.scan(self._where):
            self._check_row(row)
        now = self._read_head() if self._head is not None else None
        self._check_ends(now)
        while self._reading:
            self._finish_reading()
        if now is not None:
            self._amendments.finish(now, self._first)
        self._slots.finish(self._gaps)

    def holds_now(self, run: Run) -> bool:
        """Returns whether a run is still there; if not, it was trimmed or compiled since."""
        name = layout.run_row if run.journal is None else layout.journal_row
        row = self._context.catalog.get(self._where, name(run.base))
        if row is None:
            return False
        try:
            if decode_row(row.value, Run, "").object != run.object:
                return False
            head = self._context.catalog.get(self._where, "head")
            if run.journal is not None or head is None:
                return True
            return decode_row(head.value, Head, "").journaled <= run.base
        except CorruptError:
            return True  # already reported

    def _check_row(self, row: Row) -> None:
        kind = row.row.partition("/")[0]
        if kind in ("run", "journal"):
            self._check_run(row)
        elif kind == "slot":
            self._slots.add(row)
        elif kind == "amend":
            self._amendments.add(row)
        elif kind == "producer":
            self._decode(row, ProducerState)
        elif kind == "compile":
            self._decode(row, HeldRow)
        elif kind == "accepted":
            self._decode(row, LossAccepted)
        elif kind == "stray":
            self._decode(row, Strays)
        elif kind == "unused":
            found = self._decode(row, UnusedObjects)
            self._tally.list_unused(self._partition, () if found is None else found.objects)
        elif kind not in layout.TOPIC_ROW_KINDS:
            what = "is of an unknown kind: a newer version of tidelog wrote it: update tidelog"
            self._tally.add("note", self._row(row.row), what)

    def _read_head(self) -> Head | None:
        row = self._context.catalog.get(self._where, "head")
        if row is None:
            self._error(self._row("head"), "is missing: nothing can be appended or read")
            return None
        head = self._decode(row, Head)
        if head is None:
            return None
        self._tally.floor = max(self._tally.floor, head.floor)
        problem = _problem_of_head(head)
        if problem is None:
            return head
        self._error(self._row("head"), problem)
        return None

    def _check_run(self, row: Row) -> None:
        run = self._decode(row, Run)
        if run is None:
            return
        problem = _problem_of_row(row.row, run)
        if problem is not None:
            self._error(self._row(row.row), problem)
            return
        head = self._head
        is_live = head is None or run.end > head.start
        is_shadowed = head is not None and run.journal is None and run.base < head.journaled
        self._slots.expect(run, is_live and not is_shadowed)
        self._tally.name(self._partition, run.object)
        if is_shadowed:
            self._shadowed += 1
        elif not is_live:
            self._trimmed += 1
        else:
            self._check_tile(run)
            self._begin(run)

    def _begin(self, run: Run) -> None:
        """Counts a readable run, and reads it."""
        self._first = run.base if self._first is None else min(self._first, run.base)
        self._tally.runs += 1
        self._tally.events += run.events
        self._tally.bytes += run.byte_end - run.byte_start
        if run.journal is not None:
            self._tally.journals += 1
            self._journaled = run.end
            self._applied = max(self._applied, run.journal.applied)
        if self._pool is None or run in self._tally.healthy:
            done: Future[str | None] = Future()
            is_known = run in self._tally.healthy
            done.set_result(None if is_known else problem_of_object(self._tally, run))
        else:
            done = self._pool.submit(problem_of_object, self._tally, run)
        self._reading.append((run, done))
        if self._pool is None or len(self._reading) == _AHEAD:
            self._finish_reading()

    def _finish_reading(self) -> None:
        run, done = self._reading.popleft()
        problem = done.result()
        if problem and self.holds_now(run):
            self._error(self._run(run), problem)
        if self._tally.progress is not None and run not in self._tally.healthy:
            self._tally.progress(run.byte_end - run.byte_start)

    def _check_tile(self, run: Run) -> None:
        before = self._last
        if before is not None:
            expected = before.end
        else:  # the first one may begin before the start
            expected = run.base if self._head is None else min(run.base, self._head.start)
        if run.base > expected:
            self._gaps.append((expected, run.base))
        elif run.base < expected and before is not None:
            end = min(expected, run.end)
            if self.holds_now(before) and self.holds_now(run):
                what = f"offsets {run.base} to {end} are in an earlier run too"
                self._error(self._run(run), what)
        if before is None or run.end > before.end:
            self._last = run

    def _check_ends(self, now: Head | None) -> None:
        """Checks the head against the runs; ``now`` is the head after the scan."""
        if self._head is not None and now is not None:
            at = self._head.start if self._last is None else self._last.end
            if at < self._head.next:
                self._gaps.append((at, self._head.next))
            if at > now.next:
                self._error(self._row("head"), f"next is {now.next}, but runs reach to {at}")
            if self._applied > now.amendments:
                what = f"counts {now.amendments} amendments, but a journal has {self._applied}"
                self._error(self._row("head"), what)
            if now.compiled != self._head.compiled:
                self._gaps = [gap for gap in self._gaps if not self._is_compiled(*gap)]
            elif self._journaled not in (None, now.journaled):
                what = f"journals end at {now.journaled}, but their rows at {self._journaled}"
                self._error(self._row("head"), what)
        start = now.start if now is not None else 0
        self._gaps = [(max(first, start), end) for first, end in self._gaps if end > start]
        for first, end in self._gaps:
            self._error(f"partition {self._name}", f"no run holds offsets {first} to {end}")
        for count, how in ((self._trimmed, "trimmed"), (self._shadowed, "compiled")):
            if count:
                what = f"{count} {how} runs still have rows: the next trim or sweep ends that"
                self._tally.add("note", f"partition {self._name}", what)

    def _is_compiled(self, first: int, end: int) -> bool:
        """Returns whether journals now hold what no run held; if so, reads them instead."""
        reader = Reader(self._context, self._tally.topic, self._partition)
        found: list[Run] = []
        at = first
        try:
            while at < end and (runs := reader.runs(at)):
                found += [run for run in runs if run.base < end]
                at = found[-1].end
        except (CorruptError, NotFoundError):
            return False  # the start excludes trimmed ones
        for run in found:
            self._tally.name(self._partition, run.object)
            self._slots.expect(run, True)
            self._begin(run)
        return at >= end

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


def _problem_of_head(head: Head) -> str | None:
    if not 0 <= head.start <= head.next:
        return f"starts at {head.start}, but its next is {head.next}"
    if not 0 <= head.journaled <= head.next:
        return f"journals end at {head.journaled}, but its next is {head.next}"
    if head.amended is not None and not 0 <= head.amended[0] <= head.amended[1] < head.next:
        return f"has amendments at {head.amended[0]} to {head.amended[1]}, its next is {head.next}"
    return None


def _problem_of_row(row: str, run: Run) -> str | None:
    """Returns what makes a run or a journal impossible, regardless of other rows."""
    is_journal = row.startswith("journal/")
    if is_journal != (run.journal is not None):
        return "is not the row of a journal" if is_journal else "is the row of a journal"
    if row != (layout.journal_row if is_journal else layout.run_row)(run.base):
        return f"holds the run of offset {run.base}"
    if run.count < 1 or not 0 <= run.events <= run.count:
        return f"holds {run.events} events" + (f" of {run.count}" if is_journal else "")
    if not 0 <= run.first_ms <= run.last_ms < limits.TIMESTAMP_MS_END:
        return f"holds times {run.first_ms} to {run.last_ms}"
    return None


@dataclass(frozen=True, slots=True)
class _AmendmentKey:
    """An amendment's row, without its value."""

    offset: int
    row: str
    version: str
    sequence: int
    stored: Amendment | None  # if its value is in the store


class AmendmentCheck:
    """Checks the amendments of one partition."""

    def __init__(self, tally: VerifyTally, partition: int) -> None:
        self._tally = tally
        self._partition = partition
        self._name = f"`{tally.topic.name}/{partition}`"
        self._where = layout.topic_partition(tally.topic.incarnation, partition)
        self._met: list[_AmendmentKey] = []

    def add(self, row: Row) -> None:
        """Adds a scanned row."""
        try:
            amendment = decode_row(row.value, Amendment, "value")
            offset = layout.amend_offset(row.row)
        except (CorruptError, ValueError) as exc:
            self._error(row.row, str(exc))
            return
        if row.row != layout.amend_row(offset):
            self._error(row.row, f"amends offset {offset}, whose row has another name")
            return
        if amendment.object is not None:
            self._tally.name(self._partition, amendment.object)
        stored = amendment if amendment.object is not None else None
        met = _AmendmentKey(offset, row.row, row.version, amendment.sequence, stored)
        self._met.append(met)

    def finish(self, head: Head, first: int | None) -> None:
        """Reports findings after all rows were added; the head was read after them.

        ``first`` is the lowest offset of a live run or journal. Amendments from there to the start
        stay until that object is rewritten without what they delete.
        """
        trimmed = 0
        for each in self._met:
            if each.offset < head.start:
                trimmed += first is None or each.offset < first
                continue
            self._tally.amendments += 1
            problem = self._problem_of(each, head)
            if problem is not None and self._is_there(each):
                self._error(each.row, problem)
        if trimmed:
            what = f"{trimmed} amendments of trimmed events: the next trim or sweep ends that"
            self._tally.add("note", f"partition {self._name}", what)

    def _problem_of(self, each: _AmendmentKey, head: Head) -> str | None:
        first, last = head.amended or (0, -1)
        if not first <= each.offset <= last:
            return "is not where the head says that amendments are: no reader sees it"
        if not 1 <= each.sequence <= head.amendments:
            return f"has sequence {each.sequence}, the head counts {head.amendments}"
        return None if each.stored is None else self._problem_of_value(each.stored)

    def _problem_of_value(self, amendment: Amendment) -> str | None:
        key = amendment.object or ""
        if not self._tally.owns(key):
            return f"object `{key}`: is not of this topic"
        try:
            new_value(self._tally.context.store, amendment)
        except NotFoundError:
            return f"object `{key}`: is missing: restore it from a copy"
        except CorruptError as exc:
            return str(exc)
        return None

    def _is_there(self, each: _AmendmentKey) -> bool:
        """Returns whether the row is unchanged; if not, it was amended again or compiled."""
        row = self._tally.context.catalog.get(self._where, each.row)
        return row is not None and row.version == each.version

    def _error(self, row: str, what: str) -> None:
        self._tally.add("error", f"partition {self._name}, row `{row}`", what)


class SlotCheck:
    """Checks the slot rows of one partition; ``holds_now`` returns whether a run is still there."""

    def __init__(
        self, tally: VerifyTally, partition: int, holds_now: Callable[[Run], bool]
    ) -> None:
        self._tally = tally
        self._slot_ms = tally.topic.slot_ms
        self._catalog = tally.context.catalog
        self._name = f"`{tally.topic.name}/{partition}`"
        self._where = layout.topic_partition(tally.topic.incarnation, partition)
        self._holds_now = holds_now
        self._wanted: dict[str, tuple[Run, bool, bool]] = {}  # run, whether live, whether seen
        self._dangling: list[Row] = []

    def expect(self, run: Run, is_live: bool) -> None:
        """Adds a run; one that is not live may or may not have slot rows."""
        for name in _names(run, self._slot_ms):
            self._wanted[name] = (run, is_live, False)

    def add(self, row: Row) -> None:
        """Adds a scanned slot row."""
        is_journal = row.value.endswith(b"j")
        name = row.row if is_journal else row.row[: row.row.rindex("/") + 1]
        run, is_live, seen = self._wanted.get(name, (None, False, False))
        if run is None:
            self._dangling.append(row)
        elif seen:
            self._error(row.row, f"is the second one for the run at {run.base}")
        else:
            self._wanted[name] = (run, is_live, True)
            if row.value != f"{run.end}{'j' if is_journal else ''}".encode():
                self._error(row.row, f"says {row.value!r}, the run ends at {run.end}")

    def finish(self, gaps: Sequence[tuple[int, int]]) -> None:
        """Reports findings after all rows were added; ``gaps`` are offsets without runs."""
        for name, (run, is_live, seen) in self._wanted.items():
            if is_live and not seen and not self._is_there(name, run) and self._holds_now(run):
                self._error(name, f"is missing: the run at {run.base} needs it")
        for row in self._dangling:
            if self._is_dangling(row, gaps):
                self._error(row.row, "names no run: nothing is found by it")

    def _is_there(self, name: str, run: Run) -> bool:
        """Returns whether a journal's slot row is there after all, since it may be new."""
        return run.journal is not None and self._catalog.get(self._where, name) is not None

    def _is_dangling(self, row: Row, gaps: Sequence[tuple[int, int]]) -> bool:
        """Returns whether no run has this slot, not even one that came after the scan."""
        try:
            base = int(row.row.split("/")[3])
        except (IndexError, ValueError):
            return True
        if any(first <= base < end for first, end in gaps):
            return False  # its run is missing, which is already reported
        is_journal = row.value.endswith(b"j")
        name = (layout.journal_row if is_journal else layout.run_row)(base)
        found = self._catalog.get(self._where, name)
        if found is not None:
            try:
                run = decode_row(found.value, Run, "")
            except CorruptError:
                return False  # the run's row is damaged, which is already reported
            if run.base != base or not 0 <= run.first_ms <= run.last_ms:
                return False  # already reported
            names = _names(run, self._slot_ms)
            if row.row in names if is_journal else row.row.startswith(tuple(names)):
                return False
        return self._catalog.get(self._where, row.row) is not None

    def _error(self, row: str, what: str) -> None:
        self._tally.add("error", f"partition {self._name}, row `{row}`", what)


def _names(run: Run, slot_ms: int) -> list[str]:
    """Returns the keys of a journal's slot rows; for a run, their prefixes."""
    if run.journal is not None:
        return list(journal_slots(run, slot_ms))
    level, starts = slots_of(run.first_ms, run.last_ms, slot_ms)
    return [layout.slot_row(level, start, run.base, "") for start in starts]
