"""Jobs of pipelines: what Spark's UI shows of them, why they failed, and sessions that end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark.core.context as spark_context
import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from tests.archive.test_archive import an_archive, fill
from tests.support.child_processes import ROOT
from tidelog import Home
from tidelog.archive.archive import open_pipeline
from tidelog.connectors.source import SourcePartition, SourceRange
from tidelog.errors import InvalidError, UnavailableError
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.tasks import Task
from tidelog.spark import session as sessions
from tidelog.spark import workers as module
from tidelog.spark.session import open_spark
from tidelog.spark.workers import SparkWorkers


def drive(home: Home, session: SparkSession, **settings: str) -> int:
    archive = an_archive(home, "a", **settings)
    pipeline = open_pipeline(home.context, archive, SparkWorkers(session))
    return Driver(home.context, pipeline, DriverOptions()).run()


@pytest.mark.spark
@pytest.mark.parametrize(
    ("transform", "said"),
    [
        ("fails_in_python", r"the job failed \(ValueError: no number\): fix it"),
        ("fails_in_partition_1", "a record that is not expected.*: fix it"),
        ("unknown_column", "raised AnalysisException: .*no_such_column.*: fix it"),
    ],
)
def test_mistake_of_a_transform_is_shown_in_one_line_and_ends_the_run(
    home: Home, local_spark: SparkSession, transform: str, said: str
) -> None:
    home.create_topic("t", 2)
    fill(home, 100)
    with pytest.raises(InvalidError, match=said) as caught:
        drive(home, local_spark, transform=f"tests.support.spark_hooks:{transform}")
    assert "\n" not in str(caught.value)


def _task(number: int, events: int) -> Task:
    wanted = SourceRange(SourcePartition("t", str(number)), "0", str(events))
    return Task(SimpleNamespace(range=wanted), None, "staging/p/1/x", title="pump b")  # type: ignore[arg-type]


def test_many_tasks_share_spark_partitions_evenly() -> None:
    tasks = [_task(number, number) for number in range(10)]
    lots = module._lots(tasks, 3)
    assert sorted(task.range.limit for lot in lots for task in lot) == [str(n) for n in range(10)]
    assert [len(lot) for lot in lots] == [4, 3, 3]
    assert [lot[0].range.limit for lot in lots] == ["9", "8", "7"]
    assert [len(lot) for lot in module._lots(tasks, 40)] == [1] * 10


def test_description_of_many_ranges_is_bounded() -> None:
    assert module._description([_task(3, 7)]) == "pump b: t/3 0 to 7"
    long = module._description([_task(number, 7) for number in range(1_000)])
    assert long.endswith("… (1000 in all)")
    assert len(long) <= 200


class Failing(SparkWorkers):
    """Workers whose jobs fail with an error of Spark."""

    def __init__(self, error: Exception, reopen: Callable[[], Any] | None = None) -> None:
        super().__init__(SimpleNamespace(alive=True), reopen)  # type: ignore[arg-type]
        self.error = error

    @property
    def parallelism(self) -> int:
        raise self.error


@pytest.fixture
def fake_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (module, sessions):
        monkeypatch.setattr(each, "is_alive", lambda session: session.alive)
    monkeypatch.setattr(sessions, "replace_session", lambda reopen, ended: reopen())
    monkeypatch.setattr(module, "named_job", lambda *_: nullcontext())


def errors_of(workers: SparkWorkers, tasks: int = 1) -> list[Exception | None]:
    return [each.error for each in workers.run([_task(n, 5) for n in range(tasks)])]


@pytest.mark.usefixtures("fake_sessions")
def test_job_that_failed_by_spark_may_pass() -> None:
    with pytest.raises(UnavailableError, match=r"the job failed \(Job aborted: lost task\)"):
        errors_of(Failing(RuntimeError("Job aborted: lost task")))
    apart = errors_of(Failing(RuntimeError("Job aborted: lost task")), 2)
    assert [type(each) for each in apart] == [UnavailableError, UnavailableError]


@pytest.mark.usefixtures("fake_sessions")
def test_cancelled_job_is_not_repeated_range_by_range() -> None:
    with pytest.raises(UnavailableError, match="was cancelled"):
        errors_of(Failing(RuntimeError("[SPARK_JOB_CANCELLED] Job 3 cancelled")), 2)


@pytest.mark.usefixtures("fake_sessions")
def test_session_that_ended_is_replaced_by_the_next_job() -> None:
    opened: list[object] = []

    def reopen() -> object:
        opened.append(SimpleNamespace(alive=True))
        return opened[-1]

    workers = Failing(ConnectionRefusedError("refused"), reopen)
    workers._live._session.alive = False  # type: ignore[attr-defined]
    with pytest.raises(UnavailableError, match="refused"):
        errors_of(workers)
    assert opened == [workers._live._session]
    lost = Failing(ConnectionRefusedError("refused"))
    lost._live._session.alive = False  # type: ignore[attr-defined]
    with pytest.raises(UnavailableError, match="its process ended: start this process again"):
        errors_of(lost)


def test_spark_connect_is_refused_beside_a_session_of_a_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", object())
    with pytest.raises(InvalidError, match="use Spark Connect in a process of its own"):
        open_spark("sc://localhost", "x")


@pytest.mark.spark
def test_session_of_the_process_keeps_its_settings(local_spark: SparkSession) -> None:
    local_spark.udf.register("twice", lambda text: text * 2)
    local_spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    before = dict(local_spark.conf.getAll)
    try:
        opened = open_spark("local[1]", "x", {sessions.BATCH_ROWS: "7"})
        assert opened.conf.get("spark.sql.session.timeZone") == "UTC"
        assert opened.conf.get(sessions.BATCH_ROWS) == "7"
        assert opened.sql("SELECT twice('a')").first() == ("aa",), "functions are there"
        assert opened.sparkContext is local_spark.sparkContext
        assert dict(local_spark.conf.getAll) == before
        assert SparkSession.getActiveSession() is local_spark
    finally:
        local_spark.conf.unset("spark.sql.session.timeZone")


@pytest.mark.parametrize("is_own", [True, False])
def test_session_leaves_the_process_its_own_handler_of_ctrl_c(is_own: bool) -> None:
    before = signal.getsignal(signal.SIGINT)
    own = [signal.SIG_IGN if is_own else signal.default_int_handler, signal.SIG_DFL]
    try:
        signal.signal(signal.SIGINT, own[0])
        with sessions._keeping_interrupts():  # as Spark does when a context starts
            spark_context.signal.signal(spark_context.signal.SIGINT, own[1])
        assert signal.getsignal(signal.SIGINT) is own[0 if is_own else 1]
        assert spark_context.signal is signal
    finally:
        signal.signal(signal.SIGINT, before)


def test_log_settings_are_packaged() -> None:
    assert sessions._LOGGING.is_file()


def test_errors_of_java_are_copied_without_its_warning(capfd: pytest.CaptureFixture[str]) -> None:
    source, target = os.pipe()
    os.write(target, b"WARNING: Using incubator modules: jdk.incubator.vector\n")
    os.write(target, "spark: ERROR Größe\nthe end, without a newline".encode())
    os.close(target)
    sessions._copy_errors(source)
    assert capfd.readouterr().err == "spark: ERROR Größe\nthe end, without a newline"


QUIET = """
import sys
from tidelog.spark.session import open_spark
conf = {"spark.driver.extraJavaOptions": "-Dof.user=1", "spark.ui.enabled": "false"}
session = open_spark("local[1]", "quiet", conf)
java = session.sparkContext._jvm.java.lang.System
assert java.getProperty("of.user") == "1"
assert session.range(3).count() == 3
java.err.println("of Java")
session.stop()
"""


@pytest.mark.spark
def test_start_of_a_session_prints_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUIET],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "of Java\n")


DIES = """
import os, signal, sys
from pathlib import Path
from pyspark import SparkContext
from tests.archive.test_archive import an_archive, fill
from tidelog.api.spark_workers import open_workers
from tidelog.archive.archive import find_archive, open_pipeline
from tidelog.home import create_home
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.settings import load_settings

def note(*_):  # the process's own handler of Ctrl-C, which a session leaves in place
    pass

signal.signal(signal.SIGINT, note)
with create_home(load_settings(sys.argv[1], {}, Path.cwd()))[0] as home:
    home.create_topic("t", 1)
    fill(home, 100)
    archive = an_archive(home, "a")
    workers = open_workers("dies", "local[1]")
    pipeline = open_pipeline(home.context, archive, workers)
    assert Driver(home.context, pipeline, DriverOptions()).run() == 100
    pid = int(SparkContext._jvm.java.lang.ProcessHandle.current().pid())
    os.kill(pid, signal.SIGKILL)
    fill(home, 50, 100)
    assert Driver(home.context, pipeline, DriverOptions()).run() == 50
    now = int(SparkContext._jvm.java.lang.ProcessHandle.current().pid())
    assert now != pid
    assert signal.getsignal(signal.SIGINT) is note
    print("went on")
"""


@pytest.mark.long
@pytest.mark.spark
def test_run_goes_on_after_its_java_process_was_killed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DIES, str(tmp_path / "home")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.stdout.endswith("went on\n"), done.stderr[-2000:]
