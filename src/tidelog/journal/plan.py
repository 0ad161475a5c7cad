"""What of a partition is to be compiled: its rows as they are now, chosen by a policy."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from tidelog.errors import CorruptError, NotFoundError
from tidelog.journal.policy import RUNS_AT_ONCE, Candidate, Group, Policy, choose_groups
from tidelog.log.amended import Amendments, pending
from tidelog.log.base import Log
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.run import Head, Run, decode_fields, decode_row
from tidelog.model.topic import Topic

__all__ = ["Marks", "Plan", "make_plan", "read_marks"]

_RUNS_MAX = 4 * RUNS_AT_ONCE  # rows of runs that are looked at together
_REREADS = 5  # of rows that do not tile, before they are called damaged

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Plan:
    """Groups to compile, true as long as the head says ``compiled``."""

    compiled: int
    groups: tuple[Group, ...]
    is_whole: bool = False  # one group holds all rows: when it is done, nothing is left to do
    amendments: Amendments | None = None  # all of them, where they were few and were just read
    sequence: int = 0  # of the newest of these


class _Mark(msgspec.Struct, frozen=True):
    """What a plan needs of an amendment's row."""

    sequence: int
    at_ms: int


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """How far a compile goes: what comes later is left to the next one, so that it ends.

    The offset that was next when it began, and the amendments of that time, in order.
    """

    next: int
    offsets: _Numbers
    sequences: _Numbers
    times_ms: _Numbers

    def of(self, run: Run, start: int) -> Candidate:
        """A row with the amendments that are not in it yet, and with what was trimmed of it."""
        trimmed = len(run.trimmed(start))
        first, last = np.searchsorted(self.offsets, (run.base, run.end)).tolist()
        if first == last:
            return Candidate(run, trimmed=trimmed)
        applied = 0 if run.journal is None else run.journal.applied
        new = self.sequences[first:last] > applied
        times_ms = self.times_ms[first:last][new]
        amended_ms = int(times_ms.min()) if len(times_ms) else None
        return Candidate(run, len(times_ms), amended_ms, trimmed)


def make_plan(log: Log, place: tuple[Topic, int], head: Head, policy: Policy, marks: Marks) -> Plan:
    """Step 2 of compile, for a partition's head. ``NotFoundError`` when the topic was deleted."""
    topic, partition = place
    for attempt in range(_REREADS):
        if head.closed:
            raise NotFoundError(f"topic `{topic.name}`: was deleted: nothing was compiled")
        rows = _read_rows(log, topic, partition, head)
        if _tile(rows, head):
            living = [run for run in rows if run.end > head.start and run.base < marks.next]
            candidates = [marks.of(run, head.start) for run in living]
            journals = [each for each in candidates if each.run.journal is not None]
            runs = candidates[len(journals) :]
            groups = choose_groups(journals, runs, policy, log.clock.now_ms())
            is_whole = len(groups) == 1 and len(groups[0].rows) == len(living)
            return Plan(head.compiled, tuple(groups), is_whole)
        log.clock.sleep(0.01 * 2**attempt)
        head, _ = read_head(log, topic, partition)
    raise CorruptError(
        f"partition `{topic.name}/{partition}`: its rows do not follow one another: keep the "
        "catalog, and run `tidelog verify`"
    )


def read_marks(
    log: Log, topic: Topic, partition: int, head: Head
) -> tuple[Marks, Amendments | None]:
    """What is there as of a head; the amendments too, where they are few."""
    page = pending(log, topic, partition, head, 0)
    rows = page.offsets.tolist(), page.rows
    found = [(at, row.sequence, row.at_ms) for at, row in zip(*rows, strict=True)]
    if page.end is not None and head.amended is not None:
        where = layout.topic_partition(topic.incarnation, partition)
        bounds = layout.amend_row(page.end), layout.amend_row(head.amended[1] + 1)
        for row in log.catalog.scan(where, *bounds):
            mark = decode_fields(row.value, _Mark, f"row `{row.row}` of `{topic.name}/{partition}`")
            found.append((layout.amend_offset(row.row), mark.sequence, mark.at_ms))
    columns = np.array(found, np.int64).reshape(-1, 3)
    columns = columns[columns[:, 1] <= head.amendments]
    marks = Marks(head.next, columns[:, 0], columns[:, 1], columns[:, 2])
    return marks, page if page.end is None else None


def _read_rows(log: Log, topic: Topic, partition: int, head: Head) -> list[Run]:
    """All journals, and the first of the runs behind them."""
    where = layout.topic_partition(topic.incarnation, partition)
    first_run = layout.run_row(head.journaled)
    rows = [
        *log.catalog.scan(where, "journal/", "journal0"),
        *log.catalog.scan(where, first_run, layout.run_row(head.next), _RUNS_MAX),
    ]
    what = f"a row of `{topic.name}/{partition}`"
    return [decode_row(row.value, Run, what) for row in rows]


def _tile(rows: list[Run], head: Head) -> bool:
    """Whether rows follow one another from where journals end, back and forth, as far as read."""
    living = [run for run in rows if run.end > head.start]
    at = living[0].base if living else head.next
    if at > head.start and head.start < head.next:
        return False
    for run in living:
        in_journals = run.base < head.journaled
        if run.base != at or in_journals != (run.journal is not None):
            return False
        at = run.end
    return True
