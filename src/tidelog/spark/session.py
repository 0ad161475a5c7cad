"""Spark sessions: opened on any master or Spark Connect, replaced when they die, and their tasks.

A session of a master lives in a Java process of its own. If that ends (out of memory, killed), or
if its cluster ends the application, every later call fails. ``replace_session`` forgets such a
session and opens another one, so a driver that follows continues without a restart.

A session of Spark Connect (``sc://``) lives in a server. This process needs no Java, and has no
``SparkContext``: jobs get a tag instead of a group, and no description. A server that ended is
connected to again.

``SparkTasks`` runs the tasks of maintenance on a session, as ``concurrency`` describes. Items go
out in waves, since callers list them as they read rows. A wave is one job: a DataFrame whose
partitions are groups of items of about the same size. If an executor dies, Spark runs its group
again; if the session's Java process ends, the wave runs again in a new one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pyarrow as pa
import pyspark.core.context as spark_context
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import DataFrame, SparkSession, functions

from tidelog.concurrency import TaskRunner
from tidelog.errors import (
    InternalError,
    InvalidError,
    TidelogError,
    UnavailableError,
    unexpected,
)
from tidelog.spark.failures import cause_of, job_error, keep_modules

__all__ = [
    "BATCH_BYTES",
    "BATCH_ROWS",
    "LOTS_PER_CORE",
    "NOT_MEASURED",
    "LiveSession",
    "SparkTasks",
    "cores_of",
    "is_alive",
    "named_job",
    "numbered",
    "open_spark",
]

BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
BATCH_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
NOT_MEASURED = str(2**31 - 1)  # as Spark has it
LOTS_PER_CORE = 4  # Spark tasks; more of them only cost time, fewer leave cores without work

_LOGGING = Path(__file__).with_name("log4j2.properties")
_REPLACING = threading.Lock()
_OPENING = threading.Lock()
_OWN: weakref.WeakSet[SparkSession] = weakref.WeakSet()  # sessions that were opened here
_OF_QUERIES = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",  # of reads of the format `tidelog`
    BATCH_ROWS: "20000",
    BATCH_BYTES: NOT_MEASURED,
}
_OF_A_PROCESS = {
    "spark.ui.showConsoleProgress": "false",
    "spark.python.worker.reuse": "true",
    # A worker's few threads need no heap each: with eight per core it uses 130 MB more.
    "spark.executorEnv.MALLOC_ARENA_MAX": "2",
}
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_LOG_LEVEL = "spark.log.level"  # Spark's own setting: if it is given, Spark logs as it says
_QUIET_LOG = f"-Dlog4j2.configurationFile=file:{_LOGGING}"
# Java prints this line before any code of Spark runs, and has no option to leave it out.
_INCUBATOR = b"WARNING: Using incubator modules:"
_OF_THIS_MACHINE = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
}
_CONNECT_RETRIES = 5  # with growing waits, about 17 s in total; Spark's own take ten minutes
_COUNTED = 4_096  # rows, which Spark spreads over all cores


def open_spark(master: str, name: str, conf: Mapping[str, str] | None = None) -> SparkSession:
    """Opens a session for pipelines on any master, or returns the one that it opened before.

    A process has one master. If it has a session of its own, such as a notebook, the new one runs
    on the same master. It has the other's functions and views, and separate settings.

    Raises ``InvalidError`` for Spark Connect beside a session of a master in this process.
    """
    if master.startswith("sc:"):
        return _connect(master, conf or {})
    environ = os.environ  # noqa: TID251 - Spark reads it there
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {**_OF_A_PROCESS, **_OF_QUERIES}
    if master.startswith("local"):
        environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings |= _OF_THIS_MACHINE
    settings |= conf or {}
    settings[_JAVA_OPTIONS] = f"{_QUIET_LOG} {settings.get(_JAVA_OPTIONS, '')}".strip()
    with _OPENING:
        users = SparkSession._instantiatedSession
        if users is not None and users not in _OWN and _can_run(users.sparkContext):
            return _beside(users, settings)
        builder = SparkSession.builder.master(master).appName(f"tidelog {name}")
        for key, value in settings.items():
            builder = builder.config(key, value)
        if SparkContext._gateway is None and _LOG_LEVEL not in settings:
            _start_java({**settings, "spark.master": master})
        with _keeping_interrupts():
            session: SparkSession = builder.getOrCreate()
        _OWN.add(session)
    return session


def _start_java(settings: Mapping[str, str]) -> None:
    """Starts Spark's Java process, and leaves the first line of it out: a warning for developers.

    A thread copies everything else that the process writes to standard error.
    """
    source, target = os.pipe()
    threading.Thread(target=_copy_errors, args=(source,), name="spark-errors", daemon=True).start()
    try:
        conf = SparkConf().setAll(list(settings.items()))
        gateway = launch_gateway(conf, {"stderr": target})  # type: ignore[no-untyped-call]
    finally:
        os.close(target)
    SparkContext._ensure_initialized(gateway=gateway)


def _copy_errors(source: int) -> None:
    with open(source, "rb") as lines, open(2, "wb", buffering=0, closefd=False) as errors:
        for line in lines:
            if not line.startswith(_INCUBATOR):
                with contextlib.suppress(OSError):  # closed, or its reader has ended
                    errors.write(line)


def _beside(users: SparkSession, settings: Mapping[str, str]) -> SparkSession:
    """Returns a copy of a session of the process, with those settings that can still be changed."""
    java: Any = users._jsparkSession
    return SparkSession(users.sparkContext, java.cloneSession(), dict(settings))


@contextlib.contextmanager
def _keeping_interrupts() -> Iterator[None]:
    """Keeps Spark from replacing this process's own handler of Ctrl-C while a session starts.

    Where Python's own is in place, Spark's is welcome: it cancels the jobs and raises the same.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        yield
        return
    names: dict[str, Any] = vars(spark_context)
    names["signal"] = SimpleNamespace(SIGINT=signal.SIGINT, signal=lambda *_: None)
    try:
        yield
    finally:
        names["signal"] = signal


def _connect(url: str, conf: Mapping[str, str]) -> SparkSession:
    if SparkContext._active_spark_context is not None:
        raise InvalidError(
            f"Spark master `{url}`: this process has a session of another master: use Spark "
            "Connect in a process of its own"
        )
    session: Any = SparkSession.builder.remote(url).getOrCreate()
    from pyspark.sql.connect.client.retries import DefaultPolicy  # noqa: PLC0415 - needs grpc

    session.client.set_retry_policies([DefaultPolicy(max_retries=_CONNECT_RETRIES)])
    for key, value in {**_OF_QUERIES, **conf}.items():
        session.conf.set(key, value)
    made: SparkSession = session
    return made


def _has_context(session: SparkSession) -> bool:
    """Returns whether a session is of a master, not of Spark Connect."""
    return isinstance(session, SparkSession)


def is_alive(session: SparkSession) -> bool:
    """Returns whether a session can run jobs: its process responds, and it is not stopped."""
    if _has_context(session):
        return _can_run(session.sparkContext)
    try:
        return not session.is_stopped and bool(session.version)  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - whatever a server that is gone makes of it
        return False


def cores_of(session: SparkSession) -> int:
    """Returns how many tasks the session runs at once."""
    if _has_context(session):
        return int(session.sparkContext.defaultParallelism)
    return _counted_cores(session)


@functools.lru_cache(maxsize=4)
def _counted_cores(session: SparkSession) -> int:
    """Counts Spark's own partitions of a range, since Spark Connect does not tell the number."""
    numbers = session.range(_COUNTED).select(functions.spark_partition_id().alias("n"))
    return max(1, numbers.distinct().count())


def numbered(session: SparkSession, count: int) -> DataFrame:
    """Returns a DataFrame of the numbers below ``count``, one in each Spark partition."""
    return session.range(0, count, 1, count)


class LiveSession:
    """A session, which is replaced if its process ends. Opened when it is first needed."""

    def __init__(
        self, session: SparkSession | None, reopen: Callable[[], SparkSession] | None = None
    ) -> None:
        """``reopen`` opens a session; without it, one that ended stays ended."""
        self._session = session
        self._reopen = reopen

    def get(self) -> SparkSession:
        """Returns the session, or a new one. Raises ``UnavailableError`` if there is none."""
        if self._session is not None and is_alive(self._session):
            return self._session
        if self._reopen is None:
            raise UnavailableError("Spark: its process ended: start this process again")
        try:
            self._session = replace_session(self._reopen, self._session)
        except Exception as exc:
            if self._session is None:
                raise
            raise UnavailableError(
                f"Spark: its process ended, and no other one could be started ({cause_of(exc)}): "
                "tried again later"
            ) from exc
        return self._session


def replace_session(
    open_session: Callable[[], SparkSession], ended: SparkSession | None = None
) -> SparkSession:
    """Returns a session that can run jobs: the current one if it can, else a new one."""
    with _REPLACING:
        context = SparkContext._active_spark_context
        if context is not None and not _can_run(context):
            _forget(context)
        if ended is not None and not _has_context(ended):
            with contextlib.suppress(Exception):
                ended.stop()  # else pyspark returns it again
        return open_session()


def _can_run(context: SparkContext) -> bool:
    java: Any = context._jsc
    try:
        return java is not None and not java.sc().isStopped()
    except Exception:  # noqa: BLE001 - whatever the bridge to a dead process raises
        return False


def _forget(context: SparkContext) -> None:
    """Lets pyspark open another session, in another Java process if this one does not respond."""
    bridge: Any = SparkContext._jvm
    try:
        bridge.java.lang.System.nanoTime()
    except Exception:  # noqa: BLE001 - whatever the bridge to a dead process raises
        SparkContext._gateway = SparkContext._jvm = None
    SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = SparkSession._activeSession = None
    context._jsc = None  # what still uses it fails at once


@contextlib.contextmanager
def named_job(session: SparkSession, group: str, description: str) -> Iterator[None]:
    """Describes jobs in Spark's UI, and gives them a group, by which they can be cancelled.

    With Spark Connect the group is a tag, and there is no description.
    """
    if not _has_context(session):
        session.addTag(group)
        try:
            yield
        finally:
            session.removeTag(group)
        return
    named = {"spark.jobGroup.id": group, "spark.job.description": description}
    for name, text in named.items():
        session.sparkContext.setLocalProperty(name, text)
    try:
        yield
    finally:
        if is_alive(session):
            for name in named:
                session.sparkContext.setLocalProperty(name, None)  # type: ignore[arg-type]


T = TypeVar("T")
R = TypeVar("R")

_WAVE_BYTES = 256 << 20  # per core; a wave then takes seconds, and its start a fraction of one
_WAVE_ITEMS = 1_000  # per core; the items of a wave are in memory
_SESSIONS = 3  # in which a wave is tried
_OUTCOMES = ["number", "outcome"]


class SparkTasks:
    """Runs items on a session's executors; opens the session when the first items come."""

    def __init__(self, open_session: Callable[[], SparkSession]) -> None:
        self._live = LiveSession(None, open_session)

    @property
    def parallelism(self) -> int:
        return cores_of(self._live.get())

    def run(
        self, title: str, function: Callable[[T], R], items: Iterable[T], size: Callable[[T], int]
    ) -> Iterator[tuple[T, R]]:
        """Implements ``TaskRunner.run``."""
        wave: list[T] = []
        total = 0
        cores = 0
        for item in items:
            cores = cores or self.parallelism
            wave.append(item)
            total += size(item)
            if total >= _WAVE_BYTES * cores or len(wave) >= _WAVE_ITEMS * cores:
                yield from self._run_wave(title, function, wave, size)
                wave, total = [], 0
        if wave:
            yield from self._run_wave(title, function, wave, size)

    def _run_wave(
        self, title: str, function: Callable[[T], R], wave: Sequence[T], size: Callable[[T], int]
    ) -> Iterator[tuple[T, R]]:
        done = self._outcomes(title, function, wave, size)
        for number, item in enumerate(wave):
            outcome = done[number]
            if isinstance(outcome, UnavailableError | InternalError):
                raise outcome
            if not isinstance(outcome, TidelogError):
                yield item, outcome

    def _outcomes(
        self, title: str, function: Callable[[T], R], wave: Sequence[T], size: Callable[[T], int]
    ) -> dict[int, Any]:
        """Returns what the function returned or raised for each item, by number."""
        for left in reversed(range(_SESSIONS)):
            session = self._live.get()
            try:
                lots = _lots(wave, size, session)
                with named_job(session, f"tidelog-{title.partition(' ')[0]}", title):
                    return _run_job(
                        session, functools.partial(_run_lots, function, lots), len(lots)
                    )
            except Exception as exc:
                if left and not is_alive(session):
                    continue
                raise job_error(exc, "run the command again", runs_user_code=False) from exc
        raise InternalError("Spark: a wave ended without an outcome: report it")


def _lots(wave: Sequence[T], size: Callable[[T], int], session: SparkSession) -> list[bytes]:
    """Returns numbered items in pickled lots of about the same size."""
    count = cores_of(session) * LOTS_PER_CORE
    largest = sorted(enumerate(wave), key=lambda each: size(each[1]), reverse=True)
    return [pickle.dumps(largest[first::count]) for first in range(min(count, len(largest)))]


def _run_job(session: SparkSession, function: Any, lots: int) -> dict[int, Any]:
    columns = "number bigint, outcome binary"
    rows = numbered(session, lots).mapInArrow(function, columns).collect()
    return {row["number"]: pickle.loads(row["outcome"]) for row in rows}  # noqa: S301 - our own


def _run_lots(
    function: Callable[[Any], Any], lots: Sequence[bytes], numbers: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Runs in a Spark task."""
    for batch in numbers:
        for lot in batch.column(0).to_pylist():
            for number, item in pickle.loads(lots[lot]):  # noqa: S301 - our own bytes
                try:
                    outcome = function(item)
                except Exception as exc:  # noqa: BLE001 - one item must not stop the others
                    outcome = unexpected("Spark task", exc)
                yield pa.record_batch(
                    [
                        pa.array([number], pa.int64()),
                        pa.array([pickle.dumps(outcome)], pa.binary()),
                    ],
                    ["number", "outcome"],
                )
    keep_modules()


_: type[TaskRunner] = SparkTasks
