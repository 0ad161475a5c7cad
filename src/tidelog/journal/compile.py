"""Compile: turns many runs into one journal, with amendments applied. Offsets do not change.

For one partition it takes six steps. Any process may die, repeat a step or sweep between two of
them:

1. Take the partition's ``compile`` row: owner, epoch + 1.
2. Plan: read the head, then amendments, then rows. Choose neighbors by policy, from the oldest on.
   List the journals to be built as unused.
3. Read the rows, encode journals, and upload each under the epoch.
4. Swap, in one write: put the head (``journaled``, ``compiled`` + 1), the journal and its slot
   rows. Delete the rows of journals that it replaces, list these as unused, and delete the row of
   step 2. The write expects the head and the ``compile`` row (``compile_steps``).
5. Delete the rows of runs below ``journaled``, with their slot rows; list their objects as unused.
6. Release the ``compile`` row.

| crash after | what it leaves                       | repair                                  |
|-------------|--------------------------------------|-----------------------------------------|
| 1, 2        | a silent owner                       | the next compile, after the time to     |
|             |                                      | live; at once on the same host          |
| 3           | the same; journals that no row needs | the next sweep                          |
| 4           | the journal; rows of runs that no    | the next compile, trim or sweep does    |
|             | reader uses                          | step 5                                  |
| 5, partly   | the same, fewer                      | the same                                |
| 5           | a silent owner                       | as after 1                              |
| 6           | only the journal                     | none needed                             |

A sweep deletes the runs' objects. A sweep also raises the epoch of a partition that is being
compiled. Then the swap fails, the compiler takes the row again, and the journal is copied under the
new epoch, or built again. Amendments that come after step 2 stay pending: the journal's row records
up to which sequence it contains them. Readers in the middle of old runs continue: their data is
still valid, and if an object is missing, they read the catalog again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, fields, replace

import msgspec
import numpy as np
import numpy.typing as npt

from tidelog.catalog.base import Check
from tidelog.catalog.update import read_stable
from tidelog.context import Context
from tidelog.coordination.ownership import Ownership
from tidelog.errors import CorruptError, FencedError, NotFoundError, UnavailableError
from tidelog.journal.compile_steps import (
    RUNS_AT_ONCE,
    BuiltJournals,
    Candidate,
    CompileGroup,
    CompilePolicy,
    JournalBuild,
    Pages,
    Swap,
    choose_groups,
    make_journals,
)
from tidelog.log.maintenance.obsolete_rows import remove_shadowed
from tidelog.log.run_reader import Amendments, pending
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.topic import Head, Run, Topic, decode_fields, decode_row

__all__ = [
    "CompileBounds",
    "CompilePlan",
    "CompileReport",
    "PartitionCompile",
    "PlannedGroup",
    "compile_partition",
    "compile_topic",
    "make_plan",
    "read_bounds",
    "waiting_bytes",
]

_IN_VAIN_MAX = 10  # consecutive groups that others changed during the compile

GoOn = Callable[[], bool]
"""Called between swaps; if it returns False, the next compile does the rest."""


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What was compiled."""

    partitions: int = 0  # that had something to do
    busy: int = 0  # of them, those that another process compiles
    journals: int = 0  # that were built
    runs: int = 0  # that they replaced, including journals
    events: int = 0  # in the new journals
    amendments: int = 0  # that were applied
    bytes_before: int = 0  # of what was replaced, in the store
    bytes_after: int = 0

    @property
    def is_clean(self) -> bool:
        """Returns whether no partition was left to another process."""
        return not self.busy

    def __add__(self, other: CompileReport) -> CompileReport:
        names = [field.name for field in fields(self)]
        return CompileReport(**{n: getattr(self, n) + getattr(other, n) for n in names})


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group to build journals from, as the partition was when it was planned."""

    work: JournalBuild
    head: Head
    compiled: int  # what the swap expects
    amendments: Amendments | None = None  # all of the partition, if the plan has read them


class PartitionCompile:
    """One process's compile of one partition, step by step."""

    def __init__(
        self, context: Context, topic: Topic, partition: int, policy: CompilePolicy
    ) -> None:
        self._context = context
        self._topic = topic
        self._partition = partition
        self._policy = policy
        self._bounds: CompileBounds | None = None
        self._swapped = 0  # since the plan was made
        self._journaled = 0  # the known end of journals
        where = layout.topic_partition(topic.incarnation, partition)
        what = f"the compiler of `{topic.name}/{partition}`"
        self.holding = Ownership(context, where, layout.COMPILE_ROW, what, self._guard)
        self._swap = Swap(context, topic, partition, self.holding)

    def plan(self) -> CompilePlan:
        """Step 2. What arrives after the first plan is left to the next compile."""
        head, _ = read_head(self._context, self._topic, self._partition)
        amendments = None
        if self._bounds is None:
            self._bounds, amendments = read_bounds(
                self._context, self._topic, self._partition, head
            )
        self._swapped = 0
        self._journaled = max(self._journaled, head.journaled)
        place = self._topic, self._partition
        plan = make_plan(self._context, place, head, self._policy, self._bounds)
        return replace(plan, amendments=amendments, sequence=head.amendments)

    def prepare(self, plan: CompilePlan, group: CompileGroup) -> PlannedGroup:
        """Returns the work of a group as of now; groups before it in the plan may be swapped
        already.

        Lists its journals as unused until the swap: if this process dies, they are garbage. Raises
        ``FencedError`` if another process compiles the partition by now.
        """
        head, _ = read_head(self._context, self._topic, self._partition)
        work_id = self._context.ids.new()
        epoch = self._swap.list_work(work_id)
        work = JournalBuild(
            topic=self._topic,
            partition=self._partition,
            epoch=epoch,
            id=work_id,
            group=group,
            start=head.start,
            applied=head.amendments,
            max_raw_bytes=self._policy.max_raw_bytes,
        )
        known = plan.amendments if plan.sequence == head.amendments else None
        return PlannedGroup(work, head, plan.compiled, known)

    def is_stale(self, planned: PlannedGroup) -> bool:
        """Returns whether another process has swapped since the plan was made."""
        return planned.head.compiled != planned.compiled + self._swapped

    def check_lost(self, planned: PlannedGroup, lost: NotFoundError) -> None:
        """Raises unless a change of rows explains why an object of a group is missing."""
        head, _ = read_head(self._context, self._topic, self._partition)
        before, key = planned.head, lost.context.get("key")
        same = (before.compiled, before.start, before.amendments) == (
            head.compiled,
            head.start,
            head.amendments,
        )
        if key is not None and same:
            raise CorruptError(
                f"object `{key}`: is gone, but partition `{self._topic.name}/{self._partition}` "
                "has events there: restore it from a copy, and run `tidelog verify`"
            ) from lost

    def pages(self, planned: PlannedGroup) -> Pages:
        """Returns the amendments of a group, page by page; reads none if the plan has them all."""
        end = planned.work.group.end
        if planned.amendments is not None:
            known = planned.amendments.between(planned.work.group.base, end)
            return lambda _: known

        def page(at: int) -> Amendments:
            return pending(self._context, self._topic, self._partition, planned.head, at, end)

        return page

    def swap(self, planned: PlannedGroup, made: BuiltJournals) -> CompileReport | None:
        """Step 4; returns None if rows have changed: plan again."""
        group = planned.work.group
        compiled = planned.compiled + self._swapped
        if not self._swap.run(group, made.journals, compiled, planned.head):
            return None
        self._swapped += 1
        self._journaled = max(self._journaled, group.end)
        return CompileReport(
            journals=len(made.journals),
            runs=len(group.rows),
            events=sum(run.events for run in made.journals),
            amendments=made.amendments,
            bytes_before=group.bytes,
            bytes_after=sum(run.byte_end for run in made.journals),
        )

    def clean(self) -> None:
        """Runs step 5."""
        remove_shadowed(self._context, self._topic, self._partition, self._journaled)

    def _guard(self) -> tuple[Check, ...]:
        """Returns a check that the topic exists, for a new ``compile`` row."""
        head, version = read_head(self._context, self._topic, self._partition)
        if head.closed:
            raise NotFoundError(f"topic `{self._topic.name}`: was deleted: nothing was compiled")
        return (Check("head", version),)


def compile_topic(
    context: Context,
    topic: Topic,
    policy: CompilePolicy,
    pool: Executor | None = None,
    go_on: GoOn = _always,
    on_swap: Callable[[CompileReport], None] = lambda _: None,
) -> CompileReport:
    """Compiles all partitions of a topic, one after another; with a ``pool`` it fetches ahead.

    Idempotent, and safe at any time. Raises ``NotFoundError`` if the topic was deleted.
    """
    total = CompileReport()
    for partition in range(topic.partitions):
        if not go_on():
            break
        for done in compile_partition(context, topic, partition, policy, pool, go_on):
            on_swap(done)
            total += done
    return total


def waiting_bytes(context: Context, topic: Topic, policy: CompilePolicy) -> int:
    """Returns the bytes in the store that a compile would replace, without later merges."""
    plans = (
        PartitionCompile(context, topic, each, policy).plan() for each in range(topic.partitions)
    )
    return sum(group.bytes for plan in plans for group in plan.groups)


def compile_partition(
    context: Context,
    topic: Topic,
    partition: int,
    policy: CompilePolicy,
    pool: Executor | None = None,
    go_on: GoOn = _always,
) -> Iterator[CompileReport]:
    """Yields what each swap did, right after it; nothing if there is nothing to do."""
    compiling = PartitionCompile(context, topic, partition, policy)
    plan = compiling.plan()
    if not plan.groups:
        compiling.clean()
        return
    if not compiling.holding.take():
        yield CompileReport(partitions=1, busy=1)
        return
    try:
        with compiling.holding.beating():
            yield CompileReport(partitions=1)
            yield from _swaps(context, compiling, plan, pool, go_on)
    except FencedError:
        yield CompileReport(busy=1)
    finally:
        compiling.holding.release()


def _swaps(
    context: Context,
    compiling: PartitionCompile,
    plan: CompilePlan,
    pool: Executor | None,
    go_on: GoOn,
) -> Iterator[CompileReport]:
    in_vain = 0
    while plan.groups and go_on():
        for group in plan.groups:
            if not go_on():
                break
            done = _compile_group(context, compiling, compiling.prepare(plan, group), pool)
            if done is None:
                in_vain += 1
                break
            in_vain = 0
            yield done
        compiling.clean()
        if plan.is_whole and not in_vain:
            return
        if in_vain > _IN_VAIN_MAX:
            raise UnavailableError("compile: others keep changing the same rows: compile again")
        plan = compiling.plan()


def _compile_group(
    context: Context, compiling: PartitionCompile, planned: PlannedGroup, pool: Executor | None
) -> CompileReport | None:
    if compiling.is_stale(planned):  # the previous compiler has done it
        return None
    try:
        made = make_journals(
            context.store, context.ids, planned.work, compiling.pages(planned), pool
        )
    except NotFoundError as exc:
        compiling.check_lost(planned, exc)
        return None
    return compiling.swap(planned, made)


_RUNS_MAX = 4 * RUNS_AT_ONCE  # rows of runs that are planned together

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CompilePlan:
    """Groups to compile; valid while the head has the same ``compiled``."""

    compiled: int
    groups: tuple[CompileGroup, ...]
    is_whole: bool = False  # one group holds all rows: afterwards nothing is left to do
    amendments: Amendments | None = None  # all of them, if they were few and just read
    sequence: int = 0  # of the newest of these


class _AmendmentFields(msgspec.Struct, frozen=True):
    """The fields of an amendment's row that a plan needs."""

    sequence: int
    at_ms: int


@dataclass(frozen=True, slots=True, eq=False)
class CompileBounds:
    """How far a compile goes. It leaves later events and amendments to the next one, so that it
    ends.

    Holds the offset that was next when it began, and the amendments of that time, in order.
    """

    next: int
    offsets: _Numbers
    sequences: _Numbers
    times_ms: _Numbers

    def of(self, run: Run, start: int) -> Candidate:
        """Returns a row with its pending amendments, and with how much of it was trimmed."""
        trimmed = len(run.trimmed(start))
        first, last = np.searchsorted(self.offsets, (run.base, run.end)).tolist()
        if first == last:
            return Candidate(run, trimmed=trimmed)
        applied = 0 if run.journal is None else run.journal.applied
        new = self.sequences[first:last] > applied
        times_ms = self.times_ms[first:last][new]
        amended_ms = int(times_ms.min()) if len(times_ms) else None
        return Candidate(run, len(times_ms), amended_ms, trimmed)


def make_plan(
    context: Context,
    place: tuple[Topic, int],
    head: Head,
    policy: CompilePolicy,
    bounds: CompileBounds,
) -> CompilePlan:
    """Step 2 of a compile, for a partition's head. Raises ``NotFoundError`` for a deleted topic."""
    topic, partition = place

    def read() -> CompilePlan | None:
        nonlocal head
        if head.closed:
            raise NotFoundError(f"topic `{topic.name}`: was deleted: nothing was compiled")
        rows = _read_rows(context, topic, partition, head)
        if _tile(rows, head):
            living = [run for run in rows if run.end > head.start and run.base < bounds.next]
            candidates = [bounds.of(run, head.start) for run in living]
            journals = [each for each in candidates if each.run.journal is not None]
            runs = candidates[len(journals) :]
            groups = choose_groups(journals, runs, policy, context.clock.now_ms())
            is_whole = len(groups) == 1 and len(groups[0].rows) == len(living)
            return CompilePlan(head.compiled, tuple(groups), is_whole)
        head, _ = read_head(context, topic, partition)
        return None

    lost = CorruptError(
        f"partition `{topic.name}/{partition}`: its rows do not follow one another: keep the "
        "catalog, and run `tidelog verify`"
    )
    return read_stable(context, read, lost)


def read_bounds(
    context: Context, topic: Topic, partition: int, head: Head
) -> tuple[CompileBounds, Amendments | None]:
    """Returns what there is as of a head; the amendments too, if they are few."""
    page = pending(context, topic, partition, head, 0)
    rows = page.offsets.tolist(), page.rows
    found = [(at, row.sequence, row.at_ms) for at, row in zip(*rows, strict=True)]
    if page.end is not None and head.amended is not None:
        where = layout.topic_partition(topic.incarnation, partition)
        first, end = layout.amend_row(page.end), layout.amend_row(head.amended[1] + 1)
        for row in context.catalog.scan(where, first, end):
            fields = decode_fields(
                row.value, _AmendmentFields, f"row `{row.row}` of `{topic.name}/{partition}`"
            )
            found.append((layout.amend_offset(row.row), fields.sequence, fields.at_ms))
    columns = np.array(found, np.int64).reshape(-1, 3)
    columns = columns[columns[:, 1] <= head.amendments]
    bounds = CompileBounds(head.next, columns[:, 0], columns[:, 1], columns[:, 2])
    return bounds, page if page.end is None else None


def _read_rows(context: Context, topic: Topic, partition: int, head: Head) -> list[Run]:
    """Returns all journals, and the first of the runs behind them."""
    where = layout.topic_partition(topic.incarnation, partition)
    first_run = layout.run_row(head.journaled)
    rows = [
        *context.catalog.scan(where, "journal/", "journal0"),
        *context.catalog.scan(where, first_run, layout.run_row(head.next), _RUNS_MAX),
    ]
    what = f"a row of `{topic.name}/{partition}`"
    return [decode_row(row.value, Run, what) for row in rows]


def _tile(rows: list[Run], head: Head) -> bool:
    """Returns whether rows are contiguous around the end of journals, as far as they were read."""
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
