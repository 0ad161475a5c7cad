# ruff: noqa: PLC0415 - Spark takes a second to import
"""Where pipelines and maintenance do their work, in this process or on Spark, and what Spark needs.

Spark needs Java, and Spark Connect needs grpc instead. Without it, or without pyspark, everything
here that asks for Spark raises ``InvalidError`` with one line that says what to do.

**The environment** is an archive of Tidelog and what it needs, for executors that have only Python
and Spark. Spark unpacks the archive beside each executor (``spark.archives``), and Python finds it
by its path. It has the packages of this Python as they are installed, so the executors' Python must
be of the same version on the same kind of machine. Spark itself is left out: executors have it.

The driver plans reads of the format ``tidelog`` with the executors' Python too, on its own machine.
That Python gets the driver's packages by ``PYTHONPATH``.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import os
import platform
import re
import shutil
import sys
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidelog.concurrency import TaskRunner
from tidelog.context import Context
from tidelog.errors import AlreadyExistsError, InvalidError, TidelogError
from tidelog.pipeline.tasks import LocalWorkers, Task, TaskOutcome, Workers

if TYPE_CHECKING:
    from tidelog.spark.workers import SparkWorkers

__all__ = [
    "FOLDER",
    "LateWorkers",
    "PackedEnvironment",
    "find_java",
    "missing_for_spark",
    "open_late",
    "open_session",
    "open_workers",
    "pack_environment",
    "spark_tasks",
    "with_tasks",
]


_THREADS = 2  # of tasks in this process
_MASTERS = ("local", "spark:", "yarn", "k8s:", "sc:")
_OWN_SPARK = ("SPARK_HOME", "SPARK_CONF_DIR")  # a Spark that may find its Java by its own settings


def find_java(environ: Mapping[str, str]) -> str | None:
    """Returns the path of the Java that Spark starts."""
    home = environ.get("JAVA_HOME", "")
    folders = [f"{home}/bin"] * bool(home) + [environ.get("PATH", "")]
    return shutil.which("java", path=os.pathsep.join(folders))


def missing_for_spark(environ: Mapping[str, str], master: str = "") -> str:
    """Returns what Spark needs and this machine lacks, and what to do; empty if nothing."""
    if find_spec("pyspark") is None:
        return "pyspark is not installed: pip install 'pyspark>=4.2,<4.3'"
    if master.startswith("sc:"):
        missing = [each for each in ("grpc", "grpc_status") if find_spec(each) is None]
        return "grpc is not installed: pip install 'tidelog[connect]'" if missing else ""
    if find_java(environ) is None and not any(environ.get(name) for name in _OWN_SPARK):
        return "Java is not installed: install Java 17, or set JAVA_HOME"
    return ""


def open_session(master: str, name: str, conf: Mapping[str, str] | None = None) -> Any:
    """Opens a session of Spark, or returns the existing one.

    Raises ``InvalidError`` for what cannot work, and ``UnavailableError`` if it may work later.
    """
    missing = missing_for_spark(os.environ, master)  # noqa: TID251 - Spark reads it there
    if missing:
        raise InvalidError(f"Spark: {missing}; or work without Spark")
    if not master.startswith(_MASTERS):  # Java would print a page about it first
        raise InvalidError(
            f"Spark master `{master}`: is unknown: give local[*], spark://host:7077, yarn, "
            "k8s://… or sc://host:15002"
        )
    from tidelog.spark.failures import start_error
    from tidelog.spark.session import open_spark

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

    @property
    def waves(self) -> int:
        return self._workers().waves

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
    from tidelog.spark.session import SparkTasks

    return SparkTasks(functools.partial(open_session, spark, name, conf))


_: type[Workers] = LateWorkers


FOLDER = "tidelog-env"
"""Where executors find it: the name after ``#`` in ``spark.archives``."""

_OWN = ("tidelog", "pyspark_tidelog")  # packed as they are imported, installed or not
_NOT_NEEDED = ("pyspark", "py4j")
_EXTRAS = ("aws", "formats", "kafka", "scylla")  # packed if installed: tasks use them
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?([^;]*)(?:;(.*))?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


@dataclass(frozen=True, slots=True)
class PackedEnvironment:
    """An archive for executors, and the settings with which Spark uses it."""

    file: Path
    bytes: int
    packages: tuple[str, ...]
    python: str  # the version that executors must have
    settings: dict[str, str]
    driver_path: str  # what PYTHONPATH is to be for the driver


def pack_environment(file: Path) -> PackedEnvironment:
    """Writes the archive. Raises ``AlreadyExistsError`` if there is such a file."""
    if not file.name.endswith((".tar.gz", ".tgz")):
        raise InvalidError(f"`{file}`: Spark unpacks by the name: give one that ends with .tar.gz")
    if file.exists():
        raise AlreadyExistsError(f"`{file}`: exists: choose another name, or delete it")
    packages = _closure("tidelog", _EXTRAS)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        # Level 1: packages are mostly machine code, and more effort saves little.
        with gzip.open(part, "wb", 1) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
            for path, name in _files(packages):
                tar.add(path, name, recursive=False)
        part.rename(file)
    finally:
        part.unlink(missing_ok=True)
    version = ".".join(platform.python_version_tuple()[:2])
    place = f"./{FOLDER}"
    settings = {
        "spark.archives": f"{file.absolute()}#{FOLDER}",
        "spark.executorEnv.PYTHONPATH": place,
    }
    names = tuple(sorted(packages))
    roots = os.pathsep.join(_roots(packages))
    return PackedEnvironment(file, file.stat().st_size, names, version, settings, roots)


def _roots(packages: dict[str, Distribution]) -> list[str]:
    """Returns the folders from which this Python imports the packages."""
    own = [_folder(module).parent for module in _OWN]
    others = [Path(str(package.locate_file(""))) for package in packages.values()]
    return [str(path) for path in dict.fromkeys([*own, *others])]


def _folder(module: str) -> Path:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise InvalidError(f"module `{module}`: is not installed for {sys.executable}")
    return Path(spec.origin).parent


def _closure(name: str, extras: Iterable[str]) -> dict[str, Distribution]:
    """Returns a package and all that it needs, as far as they are installed."""
    found: dict[str, Distribution] = {}
    todo = [(name, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        name, wanted = todo.pop()
        name = re.sub(r"[-_.]+", "-", name).lower()
        if name in _NOT_NEEDED or (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        with suppress(PackageNotFoundError):
            found[name] = distribution(name)
            todo += _requirements(found[name], wanted)
    return found


def _requirements(
    package: Distribution, wanted: frozenset[str]
) -> Iterator[tuple[str, frozenset[str]]]:
    for text in package.requires or ():
        parsed = _REQUIREMENT.match(text)
        if parsed is None:
            continue
        name, extras, _, marker = parsed.groups()
        only = _EXTRA.search(marker or "")
        if only is None or only[1] in wanted:
            yield (
                name,
                frozenset(each.strip() for each in (extras or "").split(",") if each.strip()),
            )


def _files(packages: dict[str, Distribution]) -> Iterator[tuple[Path, str]]:
    """Yields each file to pack, and its name in the archive."""
    for module in _OWN:
        root = _folder(module)
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path, f"{module}/{path.relative_to(root).as_posix()}"
    for name, package in packages.items():
        for entry in package.files or ():
            path = Path(str(package.locate_file(entry)))
            is_own = name == "tidelog" and not entry.parts[0].endswith(".dist-info")
            if is_own or ".." in entry.parts or "__pycache__" in entry.parts:
                continue
            if path.is_file():
                yield path, entry.as_posix()
