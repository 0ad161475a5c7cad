"""A Spark standalone cluster out of the pyspark package: one master and its workers.

Each is a process of its own, so that a test can kill a worker and see what a job makes of it.
"""

import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers import probe
from tests.servers.base import HOST, ServerError, environment, free_port, workspace
from tests.servers.fetch import Package, cache_folder, run_fetch
from tests.servers.java import LEAN
from tests.servers.process import Launch, Process
from tests.servers.tools import JAVA, find, require

NAME = "spark"
TOOLS = (JAVA,)

WORKERS = 2
# Each application takes one core and one executor's memory of each worker, so that a second driver
# can run beside the first: a test of two writers, or a session that another test holds open.
APPLICATIONS_AT_ONCE = 2
EXECUTOR_MEMORY_MB = 1_024
DAEMON_HEAP_MB = 256
STOP_SECONDS_MAX = 1.0  # a worker would wait for executors that the same signal has reached
ROOT = Path(__file__).resolve().parents[2]
LOGGING = Path(__file__).with_name("log4j2.properties").resolve()
CLASSES = "classes.jsa"

# What a session does first, so that the classes that it needs are loaded.
WARM_UP = """import sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
table = spark.range(1_000).selectExpr("id", "cast(id AS string) AS text", "id % 7 AS part")
table.repartition(2).mapInArrow(lambda rows: rows, table.schema).write.parquet(sys.argv[1])
assert spark.read.parquet(sys.argv[1]).groupBy("part").count().count() == 7
spark.stop()
"""


def java_options() -> str:
    """What every Java of Spark is started with; drivers have it by SPARK_SUBMIT_OPTS.

    Half of its start is loading classes, which Java need not do again with an archive of them: see
    ``PACKAGE``. An archive that does not fit is passed over by Java itself.
    """
    archive = cache_folder() / PACKAGE.name / CLASSES
    shared = (f"-XX:SharedArchiveFile={archive}", "-Xlog:disable") if archive.exists() else ()
    return " ".join((*LEAN, *shared))


def variables() -> dict[str, str]:
    """The environment in which programs of tests start Spark."""
    return {"SPARK_SUBMIT_OPTS": java_options(), "SPARK_LAUNCHER_OPTS": " ".join(LEAN)}


@dataclass(frozen=True)
class SparkCluster:
    """A running cluster whose workers have all registered."""

    master_url: str
    master: Process
    workers: tuple[Process, ...]

    @property
    def address(self) -> str:
        return self.master_url

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The process ids of the workers, for a test that kills one."""
        return tuple(worker.pid for worker in self.workers)

    def settings(self) -> dict[str, str]:
        """What a session needs here: one executor on each worker, and only the loopback.

        To be given before the process has a session: the driver's Java options come with its start.
        """
        return {
            "spark.master": self.master_url,
            "spark.driver.host": HOST,
            "spark.driver.bindAddress": HOST,
            "spark.executor.extraJavaOptions": _daemon_options(),
            "spark.cores.max": str(len(self.workers)),
            "spark.executor.cores": "1",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",  # both, before a task runs
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
            "spark.executor.memory": f"{EXECUTOR_MEMORY_MB}m",
            "spark.pyspark.python": sys.executable,
            "spark.sql.shuffle.partitions": str(len(self.workers)),
            "spark.ui.enabled": "false",
        }


@contextmanager
def running(workers: int = WORKERS) -> Iterator[SparkCluster]:
    """A cluster of one's own."""
    require(NAME, TOOLS)
    port, ui_port = free_port(), free_port()
    url = f"spark://{HOST}:{port}"
    with workspace(NAME) as folder, ExitStack() as stack:
        master = Process(_master(folder, port, ui_port))
        members = tuple(Process(_worker(folder, n, url, ui_port)) for n in range(workers))
        for process in (master, *members):
            stack.callback(process.stop)
        # A worker that finds no master waits five seconds and more before it asks again.
        master.start()
        for worker in members:
            worker.spawn()
        for worker in members:
            worker.wait_until_it_answers()
        yield SparkCluster(url, master, members)


def _master(folder: Path, port: int, ui_port: int) -> Launch:
    return Launch(
        name="spark-master",
        command=[
            *(_spark_class(), "org.apache.spark.deploy.master.Master"),
            *("--host", HOST, "--port", str(port), "--webui-port", str(ui_port)),
        ],
        environment=_environment(folder),
        folder=folder,
        answers=lambda: _status(ui_port) is not None,
        stop_seconds_max=STOP_SECONDS_MAX,
    )


def _worker(folder: Path, number: int, master_url: str, master_ui_port: int) -> Launch:
    port = free_port()
    memory_mb = APPLICATIONS_AT_ONCE * EXECUTOR_MEMORY_MB
    return Launch(
        name=f"spark-worker-{number}",
        command=[
            *(_spark_class(), "org.apache.spark.deploy.worker.Worker"),
            *("--host", HOST, "--port", str(port), "--webui-port", "0"),
            *("--cores", str(APPLICATIONS_AT_ONCE), "--memory", f"{memory_mb}m"),
            *("--work-dir", str(folder / f"worker-{number}"), master_url),
        ],
        environment=_environment(folder),
        folder=folder,
        answers=lambda: port in _registered_ports(master_ui_port),
        stop_seconds_max=STOP_SECONDS_MAX,
    )


def _environment(folder: Path) -> dict[str, str]:
    # Executors inherit it, so that they import what the tests import.
    python_path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return environment(
        {
            "SPARK_HOME": str(_home()),
            "SPARK_LOCAL_DIRS": str(folder / "local"),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_PUBLIC_DNS": HOST,
            "SPARK_DAEMON_MEMORY": f"{DAEMON_HEAP_MB}m",
            "SPARK_LAUNCHER_OPTS": " ".join(LEAN),
            # The master would also take jobs over HTTP, on a port that we did not choose.
            "SPARK_DAEMON_JAVA_OPTS": f"{_daemon_options()} -Dspark.master.rest.enabled=false",
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(python_path),
        },
        without=("SPARK_", "PYSPARK_"),
    )


def _daemon_options() -> str:
    """Not by a folder of settings, which would be on the class path: see ``java_options``."""
    return f"{java_options()} -Dlog4j2.configurationFile=file:{LOGGING}"


def _spark_class() -> str:
    return str(_home() / "bin" / "spark-class")


def _home() -> Path:
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise ServerError(f"{NAME}: pyspark is not installed: install the project's dependencies")
    return Path(found.origin).parent


def _status(ui_port: int) -> dict[str, object] | None:
    status, body = probe.http(ui_port, "/json/")
    if status != 200:
        return None
    answer: dict[str, object] = json.loads(body)
    return answer


def _registered_ports(ui_port: int) -> set[int]:
    """The ports of the workers that the master counts as alive."""
    workers = (_status(ui_port) or {}).get("workers", [])
    if not isinstance(workers, list):
        raise ValueError(f"master's status: `workers` is a {type(workers).__name__}, not a list")
    return {int(worker["port"]) for worker in workers if worker["state"] == "ALIVE"}


def _archive_classes(folder: Path) -> None:
    """Let a session load its classes, and its Java write them down when it ends."""
    with workspace(NAME) as scratch:
        (scratch / "warm_up.py").write_text(WARM_UP)
        options = (*LEAN, "-Xlog:disable", f"-XX:ArchiveClassesAtExit={folder / CLASSES}")
        run_fetch(
            NAME,
            [
                *(str(_home() / "bin" / "spark-submit"), "--master", "local[2]"),
                *(str(scratch / "warm_up.py"), str(scratch / "table")),
            ],
            {**variables(), "SPARK_SUBMIT_OPTS": " ".join(options)}
            | {"SPARK_LOCAL_IP": HOST, "PYSPARK_PYTHON": sys.executable},
        )


def _recipe() -> str:
    """What an archive of classes depends on: this Java, and these jars in this place."""
    java, jars = Path(find(JAVA) or os.devnull).resolve(), _home() / "jars"
    files = [java, *sorted(jars.glob("*.jar"))]
    return "\n".join([WARM_UP, *(f"{file} {file.stat().st_mtime_ns}" for file in files)])


# Spark itself is a dependency of the project; the cache keeps the classes that a session loads.
PACKAGE = Package(
    server=NAME,
    version=importlib.metadata.version("pyspark"),
    recipe=_recipe(),
    tools=TOOLS,
    fill=_archive_classes,
)
