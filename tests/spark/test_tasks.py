"""Maintenance on real Spark: the same reports, tasks whose workers are killed, and mistakes."""

from __future__ import annotations

import gc
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.archive.test_archive import an_archive, fill
from tidelog import Event, Home
from tidelog.archive.archive import open_pipeline
from tidelog.errors import CorruptError, InternalError, InvalidError, UnavailableError
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.spark import session as module
from tidelog.spark.session import SparkTasks

pytestmark = pytest.mark.spark


@pytest.fixture
def tasks(local_spark: SparkSession) -> SparkTasks:
    return SparkTasks(lambda: local_spark)


def one(_: Any) -> int:
    return 1


def archived(home: Home) -> None:
    """A topic with an archive of three ranges in each partition."""
    home.create_topic("t", 2)
    archive = home.archives.create("a", source="topic:t")
    for first in (0, 100, 200):
        for partition in (0, 1):
            numbers = range(first, first + 100)
            events = [Event(b"%d" % n, id=f"{partition}-{n}") for n in numbers]
            home.append("t", events, partition=partition)
        archive.run()


def test_reports_are_the_same_with_a_master(home: Home, local_spark: SparkSession) -> None:
    """The public calls, on the session that is there: verify, erase with its proof, maintain."""
    archived(home)
    archive, master = home.archives.get("a"), {"spark": "local[2]"}
    assert home.verify("t", **master) == home.verify("t")
    plain = archive.verify(deep=True, source=True)
    assert archive.verify(deep=True, source=True, **master) == plain
    assert plain.is_clean
    gone = ["0-3", "0-150", "1-299"]
    proof = home.erase("t", ids=gone, **master)
    assert proof.is_erased
    assert proof.deleted is not None
    assert proof.deleted.events == 3
    again, alone = home.prove_erased("t", ids=gone, **master), home.prove_erased("t", ids=gone)
    assert replace(again, searched_ms=0) == replace(alone, searched_ms=0)
    accounts = archive.verify(deep=True, **master).accounts
    assert sum(each.archived for each in accounts) == plain.written - 3
    turn = home.maintain(grace=0, **master)
    assert turn is not None
    assert turn.succeeded


def test_dead_letters_are_replayed_on_spark(home: Home, local_spark: SparkSession) -> None:
    home.create_topic("t", 2)
    fill(home, 40)
    archive = an_archive(home, "a", parser="json:no.such.field")
    pipeline = open_pipeline(home.context, archive, LocalWorkers(2))
    Driver(home.context, pipeline, DriverOptions()).run()
    done = home.archives.get("a").replay(parser="timestamp", spark="local[2]")
    assert (done.tried, done.replayed, done.dead) == (40, 40, 0)
    assert home.archives.get("a").verify(deep=True).is_clean


def _dies_once(path: str) -> int:
    if not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 7


def test_wave_whose_worker_is_killed_runs_again(tasks: SparkTasks, tmp_path: Path) -> None:
    paths = [str(tmp_path / "one"), str(tmp_path / "two")]
    assert list(tasks.run("test", _dies_once, paths, one)) == [(path, 7) for path in paths]


def _frozen(_: int) -> int:
    return gc.get_freeze_count()


def test_modules_are_left_out_of_garbage_collections_between_tasks(tasks: SparkTasks) -> None:
    list(tasks.run("test", _frozen, range(8), one))
    assert any(count for _, count in tasks.run("test", _frozen, range(8), one))


def _fails(item: int) -> int:
    errors = {1: CorruptError("broken"), 2: UnavailableError("store"), 3: KeyError("a bug")}
    if item in errors:
        raise errors[item]
    return -item


def test_items_that_fail_are_left_to_the_caller(tasks: SparkTasks) -> None:
    assert list(tasks.run("test", _fails, [5, 1, 6], one)) == [(5, -5), (6, -6)]
    with pytest.raises(UnavailableError, match="store"):
        list(tasks.run("test", _fails, [5, 2], one))
    with pytest.raises(InternalError, match="KeyError"):
        list(tasks.run("test", _fails, [3], one))


def test_waves_keep_the_order_and_the_ui_names_them(
    tasks: SparkTasks, local_spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WAVE_ITEMS", 2)
    items = list(range(10, 21))
    assert list(tasks.run("verify topic t", _fails, items, one)) == [(n, -n) for n in items]
    executions: Any = local_spark._jsparkSession.sharedState().statusStore().executionsList()
    found = [executions.apply(number).description() for number in range(executions.size())]
    assert "verify topic t" in found
    assert local_spark.sparkContext.getLocalProperty("spark.job.description") is None


class _Unknown:
    """Executors cannot load it: as if a package were missing there."""

    def __reduce__(self) -> Any:
        return __import__, ("tidelog_is_not_here",)


def test_executors_that_cannot_work_are_reported_in_one_line(tasks: SparkTasks) -> None:
    with pytest.raises((InvalidError, UnavailableError), match="tidelog_is_not_here") as caught:
        list(tasks.run("test", _fails, [_Unknown()], one))  # type: ignore[list-item]
    assert "\n" not in str(caught.value)


def test_wave_whose_java_process_ended_runs_again_in_a_new_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sessions = [SimpleNamespace(alive=False), SimpleNamespace(alive=True)]
    opened = iter(sessions)
    ran: list[Any] = []

    def run_job(session: Any, function: Any, lots: int) -> dict[int, Any]:
        ran.append(session)
        if not session.alive:
            raise RuntimeError("Connection refused")
        return {0: -5}

    monkeypatch.setattr(module, "is_alive", lambda session: session.alive)
    monkeypatch.setattr(module, "replace_session", lambda reopen, ended: reopen())
    monkeypatch.setattr(module, "named_job", lambda *_: nullcontext())
    monkeypatch.setattr(module, "_lots", lambda *_: [b""])
    monkeypatch.setattr(module, "_run_job", run_job)
    monkeypatch.setattr(SparkTasks, "parallelism", 2)
    tasks = SparkTasks(lambda: next(opened))  # type: ignore[arg-type,return-value]
    assert list(tasks.run("test", _fails, [5], one)) == [(5, -5)]
    assert ran == sessions
