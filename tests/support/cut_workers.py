"""Workers that run the cuts of ranges in any order, and let some fail or end early."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tidelog.connectors.source import Chunk, DividingReader, RangeReader, SourceRange
from tidelog.errors import UnavailableError
from tidelog.model.pipeline import offsets_between
from tidelog.pipeline.tasks import Task, TaskOutcome, run_task

__all__ = ["CutWorkers"]


@dataclass
class CutWorkers:
    """Runs tasks in random order; each fails, or ends early, with a chance."""

    random: random.Random
    parallelism: int = 3
    waves: int = 1
    fails: float = 0.0
    ends_early: float = 0.0
    tasks: int = 0  # run so far
    cuts: int = 0  # of these, after the first one of a range
    failed: int = 0
    ended_early: int = 0

    def run(self, tasks: Sequence[Task]) -> Iterator[TaskOutcome]:
        order = list(tasks)
        self.random.shuffle(order)
        for task in order:
            yield self._run(task)

    def _run(self, task: Task) -> TaskOutcome:
        self.tasks += 1
        self.cuts += task.part > 0
        if self.random.random() < self.fails:
            self.failed += 1
            run_task(task)  # what it has staged is lost with its machine
            partition = task.range.partition
            return TaskOutcome(partition, error=UnavailableError("executor lost"), part=task.part)
        if self.random.random() < self.ends_early:
            early = _EarlyEnd(task.reader)
            done = run_task(replace(task, reader=early))
            self.ended_early += early.has_ended
            return done
        return run_task(task)


@dataclass
class _EarlyEnd:
    """A reader that ends in the middle of its range, as a source may that has no more to give."""

    reader: RangeReader
    has_ended: bool = False

    @property
    def range(self) -> SourceRange:
        return self.reader.range

    def read(self) -> Iterator[Chunk]:
        start, limit = self.range.start, self.range.limit
        shorter: RangeReader | None = None
        if isinstance(self.reader, DividingReader) and (offsets_between(start, limit) or 0) > 1:
            shorter = self.reader.part(start, str((int(start) + int(limit)) // 2))
        self.has_ended = shorter is not None
        yield from (shorter or self.reader).read()
