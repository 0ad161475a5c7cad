# ruff: noqa: PLC0415 - Spark takes a second to import
"""Where pipelines and maintenance do their work: in this process, or on Spark.

Spark needs Java. Without it, or without pyspark, everything here that asks for Spark raises
``InvalidError`` with one line that says what to do.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tidelog.context import Context
from tidelog.errors import InvalidError, TidelogError
from tidelog.pipeline.base import LocalWorkers, Task, TaskOutcome, Workers
from tidelog.tasks import TaskRunner

if TYPE_CHECKING:
    from tidelog.spark.workers import SparkWorkers

__all__ = [
    "LateWorkers",
    "find_java",
    "missing_for_spark",
    "open_late",
    "open_session",
    "open_workers",
    "spark_tasks",
    "with_tasks",
]

_THREADS = 2  # of tasks in this process
_OWN_SPARK = ("SPARK_HOME", "SPARK_CONF_DIR")  # a Spark that may find its Java by its own settings


def find_java(environ: Mapping[str, str]) -> str | None:
    """Returns the path of the Java that Spark starts."""
    home = environ.get("JAVA_HOME", "")
    folders = [f"{home}/bin"] * bool(home) + [environ.get("PATH", "")]
    return shutil.which("java", path=os.pathsep.join(folders))


def missing_for_spark(environ: Mapping[str, str]) -> str:
    """Returns what Spark needs and this machine lacks, and what to do; empty if nothing."""
    if find_spec("pyspark") is None:
        return "pyspark is not installed: pip install 'pyspark>=4.2,<4.3'"
    if find_java(environ) is None and not any(environ.get(name) for name in _OWN_SPARK):
        return "Java is not installed: install Java 17, or set JAVA_HOME"
    return ""


def open_session(master: str, name: str, conf: Mapping[str, str] | None = None) -> Any:
    """Opens a session of Spark, or returns the existing one.

    Raises ``InvalidError`` for what cannot work, and ``UnavailableError`` if it may work later.
    """
    missing = missing_for_spark(os.environ)  # noqa: TID251 - Spark reads it there
    if missing:
        raise InvalidError(f"Spark: {missing}; or work without Spark")
    from tidelog.spark.failures import start_error
    from tidelog.spark.workers import open_spark

    try:
        return open_spark(master, name, conf)
    except TidelogError:
        raise
    except Exception as exc:
        raise start_error(exc) from exc


def open_workers(name: str, spark: str | None, conf: Mapping[str, str] | None = None) -> Workers:
    """Returns what runs tasks: Spark where a master is given, else threads of this process."""
    return LocalWorkers(_THREADS) if spark is None else _on_spark(name, spark, conf)


def open_late(name: str, spark: str | None, conf: Mapping[str, str] | None = None) -> Workers:
    """Returns the same, but starts Spark with the first tasks. Several pipelines may share it."""
    if spark is None:
        return LocalWorkers(_THREADS)
    return LateWorkers(functools.partial(_on_spark, name, spark, conf))


def _on_spark(name: str, spark: str, conf: Mapping[str, str] | None) -> SparkWorkers:
    reopen = functools.partial(open_session, spark, name, conf)
    session = reopen()
    from tidelog.spark.workers import SparkWorkers

    return SparkWorkers(session, reopen)


class LateWorkers:
    """Spark's workers, opened with the first tasks: a session takes seconds and much memory."""

    def __init__(self, open: Callable[[], SparkWorkers]) -> None:
        self._open = open
        self._opened: SparkWorkers | None = None
        self._lock = threading.Lock()

    @property
    def parallelism(self) -> int:
        return self._workers().parallelism

    def run(self, tasks: Sequence[Task]) -> Iterator[TaskOutcome]:
        return self._workers().run(tasks)

    def _workers(self) -> SparkWorkers:
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            return self._opened


def with_tasks(
    context: Context, name: str, spark: str | None, conf: Mapping[str, str] | None = None
) -> Context:
    """Returns a context whose heavy work is done ahead by Spark tasks, where a master is given."""
    if spark is None:
        return context
    return dataclasses.replace(context, tasks=spark_tasks(name, spark, conf))


def spark_tasks(name: str, spark: str, conf: Mapping[str, str] | None = None) -> TaskRunner:
    """Returns what runs heavy work on a Spark master; its session starts with the first work."""
    from tidelog.spark.tasks import SparkTasks

    return SparkTasks(functools.partial(open_session, spark, name, conf))


_: type[Workers] = LateWorkers
