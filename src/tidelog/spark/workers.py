"""Workers on a Spark cluster: one Spark partition per task.

Without a transform, a task reads its range and writes its files itself, so no event passes through
Spark. It returns what was staged, or the error of that range. If an executor dies, Spark runs the
task again; each writer stages under its own names, so attempts never collide.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from tidelog.errors import TidelogError, UnavailableError
from tidelog.pipeline.base import Task, TaskOutcome, Workers, run_task
from tidelog.spark.transform import transformed

__all__ = ["SparkWorkers", "open_spark"]

_LOGGING = Path(__file__).with_name("log4j2.properties")


def open_spark(master: str, name: str, conf: Mapping[str, str] | None = None) -> SparkSession:
    """Opens a session for pipelines on any master, or returns the existing one."""
    environ = os.environ  # noqa: TID251 - Spark reads it there
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if master.startswith("local"):
        environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(master).appName(f"tidelog {name}")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.python.worker.reuse": "true",
        # A worker's few threads need no heap each: with eight per core it uses 130 MB more.
        "spark.executorEnv.MALLOC_ARENA_MAX": "2",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile=file:{_LOGGING}",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
        # A limit in bytes makes Spark measure each row, which takes longer than writing it.
        "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
    }
    if master.startswith("local"):
        settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    for key, value in {**settings, **(conf or {})}.items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    return session


class SparkWorkers:
    """Runs tasks on a session's executors, with their transform if they have one."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session

    def run(self, tasks: Sequence[Task]) -> Iterator[TaskOutcome]:
        """Implements ``Workers.run``. Repeats a failed job, range by range.

        So a range on which a transform fails does not stop the others.
        """
        try:
            done = self._job(tasks)
        except UnavailableError:
            if len(tasks) == 1:
                raise
            for task in tasks:
                yield self._alone(task)
        else:
            yield from done

    def _alone(self, task: Task) -> TaskOutcome:
        try:
            return self._job([task])[0]
        except TidelogError as exc:
            return TaskOutcome(task.range.partition, error=exc)

    def _job(self, tasks: Sequence[Task]) -> list[TaskOutcome]:
        """Runs tasks in one job. Raises ``UnavailableError`` if it fails."""
        transform = tasks[0].transform  # all tasks are of one pipeline
        try:
            if transform:
                return transformed(self._session, transform, tasks)
            return self._plain(tasks)
        except TidelogError:
            raise
        except Exception as exc:
            raise UnavailableError(
                f"Spark: the job failed ({_first_line(exc)}): its ranges will be done again"
            ) from exc

    def _plain(self, tasks: Sequence[Task]) -> list[TaskOutcome]:
        blobs = [pickle.dumps(task) for task in tasks]
        parallel = self._session.sparkContext.parallelize(blobs, len(blobs))
        done = parallel.map(_run_pickled).collect()
        return [pickle.loads(blob) for blob in done]  # noqa: S301 - our own bytes


def _run_pickled(blob: bytes) -> bytes:
    return pickle.dumps(run_task(pickle.loads(blob)))  # noqa: S301 - our own bytes


def _first_line(exc: Exception) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(exc).__name__


_: type[Workers] = SparkWorkers
