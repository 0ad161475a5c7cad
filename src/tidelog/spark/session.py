"""Sessions of Spark: opens them, and replaces one whose Java process ended.

A session lives in a Java process of its own. If that ends (out of memory, killed), or if its
cluster ends the application, every later call fails. ``replace_session`` forgets such a session
and opens another one, so a driver that follows continues without a restart.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pyspark import SparkContext
from pyspark.sql import SparkSession

from tidelog.errors import InvalidError

__all__ = ["is_alive", "open_spark", "replace_session"]

_LOGGING = Path(__file__).with_name("log4j2.properties")
_REPLACING = threading.Lock()


def open_spark(master: str, name: str, conf: Mapping[str, str] | None = None) -> SparkSession:
    """Opens a session for pipelines on any master, or returns the existing one.

    Raises ``InvalidError`` for Spark Connect.
    """
    if master.startswith("sc:"):
        raise InvalidError(
            f"Spark master `{master}`: Spark Connect is not supported: give a master such as "
            "local[*], spark://host:7077, yarn or k8s://…"
        )
    environ = os.environ  # noqa: TID251 - Spark reads it there
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if master.startswith("local"):
        environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(master).appName(f"tidelog {name}")
    settings = {
        "spark.ui.showConsoleProgress": "false",
        "spark.python.worker.reuse": "true",
        # A worker's few threads need no heap each: with eight per core it uses 130 MB more.
        "spark.executorEnv.MALLOC_ARENA_MAX": "2",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile=file:{_LOGGING}",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.python.filterPushdown.enabled": "true",  # of reads of the format `tidelog`
        "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
        # A limit in bytes makes Spark measure each row, which takes longer than writing it.
        "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
    }
    if master.startswith("local"):
        settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
        settings["spark.ui.enabled"] = "false"
    for key, value in {**settings, **(conf or {})}.items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    return session


def is_alive(session: SparkSession) -> bool:
    """Returns whether a session can run jobs: its Java process responds, and it is not stopped."""
    return _can_run(session.sparkContext)


def replace_session(open_session: Callable[[], SparkSession]) -> SparkSession:
    """Returns a session that can run jobs: the current one if it can, else a new one."""
    with _REPLACING:
        context = SparkContext._active_spark_context
        if context is not None and not _can_run(context):
            _forget(context)
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
