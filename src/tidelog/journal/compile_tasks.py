"""Compiles with tasks: many partitions at once, with one task per group of runs.

This process owns the partitions' ``compile`` rows, plans, and swaps; ``journal.compile`` has the
steps. A task gets a group with its amendments, needs only the store, and returns the rows of the
journals that it uploaded. A repeated task uploads under other names; a sweep deletes what no swap
used. A group that no task could make is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tidelog.catalog.update import rounds
from tidelog.clock import RandomIds, looks
from tidelog.concurrency import Pool, TaskRunner
from tidelog.context import Context
from tidelog.coordination.ownership import beating
from tidelog.errors import FencedError, NotFoundError, UnavailableError
from tidelog.journal.compile import CompileReport, PartitionCompile, PlannedGroup
from tidelog.journal.compile_steps import BuiltJournals, CompilePolicy, JournalBuild, make_journals
from tidelog.log.run_reader import Amendments, joined
from tidelog.model.topic import Topic
from tidelog.store import shared_store

__all__ = ["compile_by_tasks"]

_TASKS_EACH = 4  # per core at once, so that none waits long for the slowest
_PAGES_MAX = 16  # of amendments sent with a task; a group with more is compiled here
_READERS = 4  # objects that a task fetches in parallel
_LOOK_S = 0.2
_ROUNDS_MAX = 100  # in which other processes changed rows

GoOn = Callable[[], bool]
OnSwap = Callable[[CompileReport], None]


@dataclass(frozen=True)
class _CompileTask:
    """A group, with everything needed to make journals of it anywhere; pickles."""

    number: int  # of the group
    store: str  # URL
    work: JournalBuild
    amendments: Amendments


@dataclass(frozen=True)
class _Outcome:
    made: BuiltJournals | None = None  # None: an object is missing
    lost: NotFoundError | None = None


@dataclass(frozen=True)
class _Ready:
    """A group that is next."""

    compiling: PartitionCompile
    planned: PlannedGroup


def compile_by_tasks(
    context: Context,
    runner: TaskRunner,
    topics: Sequence[Topic],
    policy: CompilePolicy,
    go_on: GoOn = lambda: True,
    on_swap: OnSwap = lambda _: None,
) -> CompileReport:
    """Compiles all partitions of some topics. Calls ``go_on`` between jobs.

    Raises ``NotFoundError`` if a topic was deleted; what was swapped until then stays.
    """
    waiting = [
        compiling
        for topic in topics
        for partition in range(topic.partitions)
        if (compiling := PartitionCompile(context, topic, partition, policy)).plan().groups
    ]
    held = _take(context, waiting)
    total = CompileReport(partitions=len(waiting), busy=len(waiting) - len(held))
    if not held:
        return total
    living = list(held)
    try:
        with beating(context, lambda: _beat(living)):
            for report in _rounds(context, runner, living, go_on):
                on_swap(report)
                total += report
    finally:
        for compiling in held:
            compiling.holding.release()
    return total


def _take(context: Context, waiting: Sequence[PartitionCompile]) -> list[PartitionCompile]:
    """Returns those that no other process compiles; one silent for the time to live is dead."""
    held: list[PartitionCompile] = []
    left = list(waiting)
    for _ in looks(context.clock, context.log_settings.dead_after_s, _LOOK_S):
        taken = [compiling for compiling in left if compiling.holding.try_take()]
        held += taken
        left = [compiling for compiling in left if compiling not in taken]
        if not left:
            break
    return held


def _beat(living: list[PartitionCompile]) -> None:
    for compiling in list(living):
        try:
            compiling.holding.beat()
        except FencedError:
            continue  # its next swap finds out, and takes the row again if it may


def _rounds(
    context: Context, runner: TaskRunner, living: list[PartitionCompile], go_on: GoOn
) -> Iterator[CompileReport]:
    """Plans, lets tasks make journals, and swaps, until nothing is left to do."""
    at_once = runner.parallelism * _TASKS_EACH
    busy = UnavailableError("compile: others keep changing the same rows: compile again")
    for _ in rounds(_ROUNDS_MAX, busy):
        ready: list[_Ready] = []
        is_stale = False
        for compiling in list(living):
            plan = compiling.plan()
            if not plan.groups:
                compiling.clean()
                living.remove(compiling)
            try:
                groups = [compiling.prepare(plan, each) for each in plan.groups]
            except FencedError:
                living.remove(compiling)
                yield CompileReport(busy=1)
                continue
            if any(map(compiling.is_stale, groups)):  # another process has done it: plan again
                is_stale = True
            else:
                ready += [_Ready(compiling, each) for each in groups]
        if not ready and not is_stale:
            return
        failed: set[PartitionCompile] = set()  # later groups of these must wait for another plan
        for first in range(0, len(ready), at_once):
            if not go_on():
                return
            part = [each for each in ready[first : first + at_once] if each.compiling not in failed]
            for each, outcome in zip(part, _run(context, runner, part), strict=True):
                yield from _swap(each, outcome, living, failed)


def _swap(
    each: _Ready, outcome: _Outcome, living: list[PartitionCompile], failed: set[PartitionCompile]
) -> Iterator[CompileReport]:
    if each.compiling in failed:
        return
    if outcome.lost is not None:
        each.compiling.check_lost(each.planned, outcome.lost)  # else rows have changed: plan again
    try:
        made = outcome.made
        done = each.compiling.swap(each.planned, made) if made is not None else None
    except FencedError:
        living.remove(each.compiling)
        failed.add(each.compiling)
        yield CompileReport(busy=1)
        return
    if done is None:
        failed.add(each.compiling)
    else:
        yield done


def _run(context: Context, runner: TaskRunner, ready: Sequence[_Ready]) -> list[_Outcome]:
    """Returns what was made of each group, in order."""
    tasks = [
        _CompileTask(number, context.store.url, each.planned.work, found)
        for number, each in enumerate(ready)
        if (found := _amendments(each)) is not None
    ]
    done = {
        task.number: _Outcome(made) for task, made in runner.run("compile", _make, tasks, _size_of)
    }
    return [done.get(n) or _make_here(context, each) for n, each in enumerate(ready)]


def _amendments(each: _Ready) -> Amendments | None:
    """Returns the amendments of a group; None if there are too many to send."""
    page = each.compiling.pages(each.planned)
    found = [page(each.planned.work.group.base)]
    while (end := found[-1].end) is not None:
        if len(found) == _PAGES_MAX:
            return None
        found.append(page(end))
    return joined(found)


def _make_here(context: Context, each: _Ready) -> _Outcome:
    try:
        page = each.compiling.pages(each.planned)
        return _Outcome(make_journals(context.store, context.ids, each.planned.work, page))
    except NotFoundError as exc:
        return _Outcome(lost=exc)


def _make(task: _CompileTask) -> BuiltJournals:
    with Pool(_READERS, "tidelog-compile") as pool:
        store = shared_store(task.store)
        return make_journals(store, RandomIds(), task.work, lambda _: task.amendments, pool)


def _size_of(task: _CompileTask) -> int:
    return sum(run.byte_end - run.byte_start for run in task.work.group.rows)
