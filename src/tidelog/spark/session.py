"""Spark sessions: opened on any master or on Spark Connect, replaced when they die, and their jobs.

A session of a master lives in a Java process of its own. If that ends (out of memory, killed), or
if its cluster ends the application, every later call fails. ``replace_session`` forgets such a
session and opens another one, so a driver that follows continues without a restart.

A session of Spark Connect (``sc://``) lives in a server. This process needs no Java, and has no
``SparkContext``: jobs get a tag instead of a group, and no description. A server that ended is
connected to again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark.core.context as spark_context
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import DataFrame, SparkSession, functions

from tidelog.errors import InvalidError, UnavailableError
from tidelog.spark.failures import cause_of

__all__ = [
    "BATCH_BYTES",
    "BATCH_ROWS",
    "LOTS_PER_CORE",
    "NOT_MEASURED",
    "LiveSession",
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
_LOG_LEVEL = "spark.log.level"  # Spark's own setting; whoever gives it wants to see Spark's log
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
