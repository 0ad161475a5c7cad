"""Erasures from archives whose files tasks search, stage and replace (``tasks.TaskRunner``).

Three processes delete events and carry that into archives at once, while two drivers write the
same folders. Each has a task runner as Spark is one: tasks come in any order, wait, run twice, fail
after they have done their work, and reach the store through faults.
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
from tidelog.erasure import rewrite_range, search
from tidelog.errors import ConflictError, InvalidError, NotFoundError, TidelogError
from tidelog.journal import compile_tasks
from tidelog.log.topics import find_topic
from tidelog.tasks import TaskRunner
from tidelog.testing.scheduler import Scheduler

__all__ = ["TasksDone", "TasksWorld"]

_LATE = 0.4  # of tasks that wait before they begin
_LOST = 0.1  # whose result is lost
_TWICE = 0.1


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
        yield from found

    def _count(self, function: Callable[[Any], Any]) -> None:
        self.done.searched += function is rewrite_range.holds_here
        self.done.staged += function is rewrite_range.stage_here
        self.done.replaced += function is rewrite_range.replace_here


_: type[TaskRunner] = SimTasks


class TasksWorld(ArchivesWorld):
    """One seed's world."""

    rates = RATES
    attempts = (3,)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.done: TasksDone = TasksDone()
        self.kinds = {"erase", self.random.choice(["trim", "replay", "chain"])}

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        super()._patch(patch)
        for module in (rewrite_range, search, compile_tasks):
            patch.setattr(module, "shared_store", lambda _: self.store_here())

    def spawn_all(self) -> None:
        super().spawn_all()
        self._spawn("erase-2", self.erase)
        self._spawn("erase-3", self.erase)

    def erase(self) -> None:
        """Delete some events, and let tasks carry that into archives."""
        home = self.home()
        tasks = SimTasks(self.scheduler, self.random, self.done)
        home.context = replace(home.context, tasks=tasks)
        for _ in range(4):
            home.context.clock.sleep(self.random.uniform(0, 10))
            ids = self.some_ids(self.random.choice([1, 2]))
            with self.tolerating(NotFoundError, InvalidError, ConflictError):
                self.accountant.asked.update(ids)
                home.delete("t", ids, why="request")
                self.done.erased += 1
            with self.tolerating(NotFoundError, InvalidError, ConflictError):
                find_topic(home.context, "t")
                self.prove(home, ids)
