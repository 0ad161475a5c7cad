"""Erasures from archives whose files tasks search, stage and replace (``concurrency.TaskRunner``).

Four processes delete events and carry that into archives at once, while two drivers write the same
folders. Two of them have a task runner as Spark is one: tasks come in any order, wait, run twice,
end late, fail after they have done their work, and reach the store through faults.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from tests.sim.archive_world import ArchivesWorld, Done
from tests.sim.archive_worlds import RATES
from tidelog.concurrency import TaskRunner
from tidelog.coordination.commits import load_manifest, read_commit_rows
from tidelog.erasure import event_search, rewrite_range
from tidelog.erasure.rewrite_range import RangeRewrite
from tidelog.errors import ConflictError, InvalidError, NotFoundError, TidelogError
from tidelog.home import Home
from tidelog.journal import compile_tasks
from tidelog.log.topics import find_topic
from tidelog.pipeline.ranges import WaitingEvents
from tidelog.testing.faults import FaultyStore
from tidelog.testing.scheduler import Scheduler

__all__ = ["TasksDone", "TasksWorld"]

_LATE = 0.4  # of tasks that wait before they begin
_SLOW = 0.8  # of tasks that stage files, whose results come late
_LOST = 0.1  # whose result is lost
_TWICE = 0.1
_LOOKS = 150  # of a task that waits for others
_NEAR = 16  # events that most erasures choose from


@dataclass
class TasksDone(Done):
    """What has happened here too."""

    searched: int = 0
    staged: int = 0
    replaced: int = 0


@dataclass
class SimTasks:
    """Runs tasks in the process of their caller."""

    scheduler: Scheduler
    random: Random
    done: TasksDone
    is_overtaken: Callable[[Any], bool]  # whether others have erased from a range, and begin again
    late: list[Any]  # ranges that wait for that
    parallelism: int = 2

    def run(
        self,
        title: str,
        function: Callable[[Any], Any],
        items: Iterable[Any],
        size: Callable[[Any], int],
    ) -> Iterator[tuple[Any, Any]]:
        waiting = list(items)
        self.random.shuffle(waiting)
        found = []
        for item in waiting:
            if self.random.random() < _LATE:
                self.scheduler.sleep(self.random.uniform(0, 8))
            try:
                for _ in range(2 if self.random.random() < _TWICE else 1):
                    outcome = function(pickle.loads(pickle.dumps(item)))
            except TidelogError:
                continue
            self._count(function)
            if self.random.random() >= _LOST:
                found.append((item, outcome))
        for item, outcome in found:
            if function is rewrite_range.stage_here and self.random.random() < _SLOW:
                self._wait(item)
            yield item, outcome

    def _wait(self, item: Any) -> None:
        """Come late: others erase more meanwhile. In every second case, just as they begin."""
        if self.random.random() < 0.5:
            self.scheduler.sleep(self.random.uniform(5, 20))
            return
        self.late.append(item)
        try:
            for _ in range(_LOOKS):
                if self.is_overtaken(item):
                    return
                self.scheduler.sleep(0.2)
        finally:
            self.late[:] = [each for each in self.late if each is not item]

    def _count(self, function: Callable[[Any], Any]) -> None:
        self.done.searched += function is rewrite_range.holds_here
        self.done.staged += function is rewrite_range.stage_here
        self.done.replaced += function is rewrite_range.replace_here


_: type[TaskRunner] = SimTasks


class SlowStaging(FaultyStore):
    """Is slow to store what is staged, so that others do a lot before it is decided."""

    def put(self, key: str, data: bytes) -> str:
        scheduler = self.faults.scheduler
        assert scheduler is not None
        if key.startswith("staging/"):
            scheduler.sleep(self.faults.random.uniform(0, 4))
        return super().put(key, data)


class TasksWorld(ArchivesWorld):
    """One seed's world."""

    rates = RATES
    attempts = (3,)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.done: TasksDone = TasksDone()
        self.kinds = {"erase", self.random.choice(["trim", "replay", "chain"])}
        self._faulty_store = SlowStaging
        self.late: list[RangeRewrite] = []  # staged by tasks that wait for other erasures

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        super()._patch(patch)
        for module in (rewrite_range, event_search, compile_tasks):
            patch.setattr(module, "shared_store", lambda _: self.store_here())
        patch.setattr(WaitingEvents, "events_max", lambda _: self.random.choice([7, 16]))

    def spawn_all(self) -> None:
        super().spawn_all()
        self._spawn("erase-2", self.erase)
        self._spawn("quick-1", self.erase_quickly)
        self._spawn("quick-2", self.erase_quickly)

    def some_ids(self, count: int) -> list[str]:
        """Ids of events near each other, so that erasures meet in a range; new ones, if any."""
        near = self.late_ids() or sorted(self.truth.by_id)[:_NEAR]
        known = [each for each in near if each not in self.accountant.asked]
        if len(known) < count or self.chance(0.2):
            known = sorted(self.truth.by_id)
        return self.random.sample(known, min(count, len(known)))

    def late_ids(self) -> list[str]:
        """Ids of events in a range that a task has staged, and that waits for other erasures."""
        spans = [
            (manifest.partition, range(file.first_offset, file.last_offset + 1))
            for work in self.late
            for manifest in work.ranges
            for file in manifest.files
        ]
        return [
            event_id
            for event_id, places in sorted(self.truth.by_id.items())
            if any(f"t/{n}" == name and at in span for _, n, at in places for name, span in spans)
        ]

    def erase(self) -> None:
        """Delete some events, and let tasks carry that into archives."""
        home = self.home()
        tasks = SimTasks(self.scheduler, self.random, self.done, self.is_overtaken, self.late)
        home.context = replace(home.context, tasks=tasks)
        for _ in range(4):
            home.context.clock.sleep(self.random.uniform(0, 10))
            self.erase_some(home, self.random.choice([1, 2]))

    def is_overtaken(self, work: RangeRewrite) -> bool:
        """Whether a range has lost events since a task staged it, and is about to lose more."""
        first = work.ranges[0]
        for row in read_commit_rows(self.quiet, first.pipeline, first.partition):
            found = row.committed
            if row.holds(first.start) and found.rewrite not in ("", found.manifest):
                return load_manifest(self.quiet.store, found.manifest).each_range != work.ranges
        return False

    def erase_quickly(self) -> None:
        """Delete an event, and carry that into archives without tasks."""
        home = self.home()
        for _ in range(6):
            home.context.clock.sleep(self.random.uniform(0, 6))
            for _ in range(self.random.choice([0, 30])):
                if not self.late:
                    home.context.clock.sleep(1)
            self.erase_some(home, 1)

    def erase_some(self, home: Home, count: int) -> None:
        ids = self.some_ids(count)
        with self.tolerating(NotFoundError, InvalidError, ConflictError):
            self.accountant.asked.update(ids)
            home.delete("t", ids, why="request")
            self.done.erased += 1
        with self.tolerating(NotFoundError, InvalidError, ConflictError):
            find_topic(home.context, "t")
            self.prove(home, ids)
