"""What a machine and a home need in order to work, checked one by one.

A check never raises: what is wrong becomes a result that says what to do.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal
from urllib.parse import unquote, urlsplit

from tidelog.api.spark_workers import find_java
from tidelog.backends import World, open_context, probe_store, real_world
from tidelog.context import Context
from tidelog.coordination.trusted_time import store_now_ms
from tidelog.errors import TidelogError
from tidelog.log.maintenance.incarnations import inspect_home
from tidelog.model import layout
from tidelog.settings import DEFAULT_FOLDER, load_settings

__all__ = ["HealthCheck", "ResponseTimes", "diagnose", "response_times"]

_FILES_MIN = 1024  # open files; the server and Spark need more than a shell's usual 256
_FREE_MIN = 1 << 30  # bytes of a local store's disk
_SKEW_MAX_MS = 5_000
_EXTRAS = {
    "aws": ("boto3", "S3 tables, DynamoDB and Kinesis"),
    "formats": ("fastavro", "Avro and Protobuf"),
    "kafka": ("confluent_kafka", "Kafka"),
    "scylla": ("cassandra", "Scylla and Cassandra"),
    "serve": ("uvicorn", "the server and the console"),
    "tables": ("deltalake", "Delta and Iceberg tables"),
}

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One thing that was checked."""

    name: str
    state: State
    found: str
    do: str = ""  # what to do about it; empty if it is healthy


def diagnose(
    home: str | os.PathLike[str] | None = None, *, world: World | None = None
) -> list[HealthCheck]:
    """Returns what was checked of this machine and of a home, which is not created.

    >>> [check.name for check in tidelog.diagnose() if check.state == "problem"]
    []
    """
    world = world or real_world()
    return [*_machine(world), *_home(None if home is None else os.fspath(home), world)]


@dataclass(frozen=True, slots=True)
class ResponseTimes:
    """How long a small read takes, from the store and from the catalog."""

    catalog_ms: float
    store_ms: float | None  # None: it failed
    store_error: TidelogError | None


def response_times(context: Context) -> ResponseTimes:
    """Returns how fast a home's store and catalog respond; raises what the catalog raises."""
    now_s = context.clock.monotonic_s
    began_s, store_ms, error = now_s(), None, None
    try:
        context.store.head(layout.HOME_OBJECT)
        store_ms = (now_s() - began_s) * 1000
    except TidelogError as exc:
        error = exc
    began_s = now_s()
    context.catalog.get(layout.HOME_PARTITION, layout.HOME_ROW)
    return ResponseTimes((now_s() - began_s) * 1000, store_ms, error)


def _home(text: str | None, world: World) -> Iterator[HealthCheck]:
    """Yields what is checked of a home, or why it cannot be opened."""
    try:
        settings = load_settings(text, world.environ, world.folder)
        if settings.is_default and not (world.folder / DEFAULT_FOLDER).exists():
            if os.access(world.folder, os.W_OK):
                said = f"none yet: ./{DEFAULT_FOLDER} is created on first use"
                yield HealthCheck("home", "ok", said)
            else:
                said = f"none yet, and `{world.folder}` is not writable"
                do = "change the folder's rights, or choose another with --home"
                yield HealthCheck("home", "problem", said, do)
            return
        context = open_context(text, world=world)
    except TidelogError as exc:
        said, _, do = exc.message.rpartition(": ")
        yield HealthCheck("home", "problem", said or exc.message, do if said else "")
        return
    try:
        yield HealthCheck("home", "ok", context.home_id)
        yield from _parts(context)
    finally:
        context.catalog.close()


def _machine(world: World) -> Iterator[HealthCheck]:
    """Yields what is checked without a home: Python, Java, limits, and the extras."""
    version = ".".join(map(str, sys.version_info[:3]))
    is_known = (3, 11) <= sys.version_info < (3, 14)
    do = "" if is_known else "use Python 3.11, 3.12 or 3.13, which are tested"
    yield HealthCheck("python", "ok" if is_known else "warning", version, do)
    java = find_java(world.environ)
    do = (
        "" if java else "install Java 17 for Spark; without it, pipelines run in the process itself"
    )
    yield HealthCheck("java", "ok" if java else "warning", java or "not found", do)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _FILES_MIN
    do = f"raise it: ulimit -n {_FILES_MIN}" if few else ""
    yield HealthCheck("open files", "warning" if few else "ok", f"limit {soft}", do)
    missing = {extra: what for extra, (module, what) in _EXTRAS.items() if not find_spec(module)}
    do = "; ".join(f"pip install 'tidelog[{extra}]' for {what}" for extra, what in missing.items())
    installed = ", ".join(extra for extra in _EXTRAS if extra not in missing) or "none"
    yield HealthCheck("extras", "ok", installed, do)


def _parts(context: Context) -> Iterator[HealthCheck]:
    """Yields what is checked of an open home: store, catalog, clock, disk and identity."""
    yield _checked("store", context.store.url, lambda: probe_store(context.store, context.ids))
    problems: list[str] = []
    yield _checked("catalog", context.catalog.url, lambda: problems.extend(inspect_home(context)))
    for problem in problems:
        yield HealthCheck("catalog", "problem", problem, "run `tidelog verify`")
    yield _clock(context)
    yield from _disk(context.store.url)
    copy_of = context.identity.copy_of
    if copy_of:
        do = "run `tidelog home adopt`, or with --moved if the original is gone"
        yield HealthCheck("identity", "warning", f"is a copy of the home at {copy_of}", do)


def _checked(name: str, what: str, look: Callable[[], object]) -> HealthCheck:
    try:
        look()
    except TidelogError as exc:
        return HealthCheck(
            name, "problem", exc.message, "fix the address, the rights or the credentials"
        )
    return HealthCheck(name, "ok", what)


def _clock(context: Context) -> HealthCheck:
    """Compares the machine's clock with the store's."""
    try:
        before_ms = context.clock.now_ms()
        there_ms = store_now_ms(context)
        after_ms = context.clock.now_ms()
    except TidelogError as exc:
        return HealthCheck("clock", "warning", f"the store's time is unknown: {exc.message}")
    skew_ms = max(before_ms - there_ms, there_ms - after_ms, 0)
    found = f"{skew_ms / 1000:.1f} s from the store's"
    if skew_ms > _SKEW_MAX_MS:
        return HealthCheck("clock", "problem", found, "synchronize the clock, such as by NTP")
    return HealthCheck("clock", "ok", found)


def _disk(store_url: str) -> Iterator[HealthCheck]:
    address = urlsplit(store_url)
    if address.scheme != "file":
        return
    free = shutil.disk_usage(unquote(address.path)).free
    state: State = "ok" if free >= _FREE_MIN else "warning"
    do = "" if state == "ok" else "make room, or `tidelog trim` and `tidelog sweep`"
    yield HealthCheck("disk", state, f"{free / (1 << 30):.1f} GiB free", do)
