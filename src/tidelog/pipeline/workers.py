"""Workers of this process: tasks in threads, or one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from tidelog.errors import InvalidError, unexpected
from tidelog.pipeline.base import Outcome, Task, Workers

__all__ = ["LocalWorkers", "run_task"]


class LocalWorkers:
    """Runs tasks in threads of this process; with one, in the caller's own."""

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise InvalidError(f"workers: {threads} threads: give 1 or more")
        self._threads = threads

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        if any(task.transform for task in tasks):
            raise InvalidError("pipeline: its transform needs Spark: run it with a Spark master")
        if self._threads == 1:
            for task in tasks:
                yield run_task(task)
            return
        with ThreadPoolExecutor(self._threads, "tidelog-task") as pool:
            for done in as_completed([pool.submit(run_task, task) for task in tasks]):
                yield done.result()


def run_task(task: Task) -> Outcome:
    """Return a task's outcome; any failure in it is an error of its source partition."""
    partition = task.range.partition
    try:
        return Outcome(partition, task.run())
    except Exception as exc:  # noqa: BLE001 - one source partition must not stop the others
        return Outcome(partition, error=unexpected(f"source partition `{partition.text}`", exc))


_: type[Workers] = LocalWorkers
