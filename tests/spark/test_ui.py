"""What Spark's UI and its event log show of pipelines and reads: jobs, tasks, names, rows."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from pyspark.sql import SparkSession

from tests.archive.test_archive import an_archive, fill, listed
from tests.spark.conftest import Read
from tests.support import spark_hooks
from tests.support.waiting import until
from tidelog import Home
from tidelog.archive.archive import open_pipeline
from tidelog.archive.generations import begin_backfill
from tidelog.coordination.pipeline_rows import read_archive
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.ranges import WaitingEvents
from tidelog.spark import workers
from tidelog.spark.session import open_spark
from tidelog.spark.workers import SparkWorkers

pytestmark = pytest.mark.spark

Ask = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def ask(local_spark: SparkSession) -> Ask:
    """Returns what the UI's REST interface answers."""
    context = local_spark.sparkContext
    at = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}"

    def get(what: str) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{at}/{what}", timeout=30) as answer:
            found: list[dict[str, Any]] = json.load(answer)
        return found

    return get


@pytest.fixture
def filled(home: Home) -> Home:
    home.create_topic("t", 2)
    fill(home, 1_000)
    return home


def drive(home: Home, session: SparkSession, generation: int | None = None, **settings: str) -> int:
    """Drains the archive of a transform, or its generation that is being built."""
    transform = settings.get("transform", "")
    archive = an_archive(home, f"of-{transform.rpartition(':')[2] or 'all'}", **settings)
    if generation is not None:
        archive, generation = begin_backfill(home.context, archive.name, archive.format_of())
    pipeline = open_pipeline(home.context, archive, SparkWorkers(session), generation)
    return Driver(home.context, pipeline, DriverOptions()).run()


def named(found: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    return [each for each in found if each.get("description", "").startswith(text)]


def rows_of(execution: dict[str, Any], node: str) -> list[int]:
    """How many rows nodes of a plan gave, those that come last first."""
    return [
        int(metric["value"].replace(",", ""))
        for each in sorted(execution["nodes"], key=lambda each: each["nodeId"])
        for metric in each["metrics"]
        if each["nodeName"] == node and metric["name"] == "number of output rows"
    ]


def test_job_of_an_archive_names_it_with_its_ranges_and_counts_tasks(
    filled: Home, local_spark: SparkSession, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WaitingEvents, "cut_events_min", lambda *_: 200)
    assert drive(filled, local_spark) == 1_000
    (job,) = named(ask("jobs"), "archive of-all, generation 1: ")
    cuts = re.findall(r"t/(\d) (\d+) to (\d+)", job["description"])
    assert len(cuts) == 3
    assert sum(int(end) - int(start) for _, start, end in cuts) == 1_000
    assert job["jobGroup"].startswith("tidelog-")
    assert (job["status"], job["numTasks"], job["numCompletedTasks"]) == ("SUCCEEDED", 3, 3)
    assert local_spark.sparkContext.getLocalProperty("spark.job.description") is None
    (execution,) = named(ask("sql?length=1000"), "archive of-all, generation 1: ")
    assert execution["successJobIds"] == [job["jobId"]]
    assert rows_of(execution, "MapInArrow") == [3]
    assert "tidelog, [sum(events" in execution["planDescription"]  # observed metrics


def test_job_of_a_backfill_names_its_generation(
    filled: Home, local_spark: SparkSession, ask: Ask
) -> None:
    drive(filled, local_spark, generation=2)
    assert named(ask("jobs"), "archive of-all, generation 2: t/0 0 to")


def test_plan_of_a_transform_counts_rows_in_and_out(
    filled: Home, local_spark: SparkSession, ask: Ask
) -> None:
    drive(filled, local_spark, transform="tests.support.spark_hooks:even")
    (execution,) = named(ask("sql?length=1000"), "archive of-even, generation 1: ")
    assert rows_of(execution, "MapInArrow") == [2, 1_000]  # outcomes of tasks, and events
    assert rows_of(execution, "Filter") == [500]


def test_group_of_jobs_that_is_cancelled_is_done_again(
    filled: Home,
    local_spark: SparkSession,
    ask: Ask,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spark_hooks, "release", tmp_path / "release")

    def jobs(status: str) -> list[dict[str, Any]]:
        return named(ask(f"jobs?status={status}"), "archive of-held, generation 1: ")

    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(drive, filled, local_spark, transform="tests.support.spark_hooks:held")
        until(lambda: run.done() or jobs("running"), 60)
        local_spark.sparkContext.cancelJobGroup(jobs("running")[0]["jobGroup"])
        until(lambda: run.done() or jobs("failed"), 60)
        (tmp_path / "release").touch()
        assert run.result(60) == 1_000
    assert jobs("succeeded")
    assert listed(filled, read_archive(filled.context, "of-held")) == Counter(range(1_000))


def test_scan_gives_only_rows_that_pass_pushed_filters(
    filled: Home, local_spark: SparkSession, read: Read, ask: Ask
) -> None:
    wanted = len(list(filled.read("t", 1)))
    for pushed, rows in ((True, wanted), (False, 1_000)):
        name = f"read with filters, pushed: {pushed}"
        local_spark.sparkContext.setJobDescription(name)
        try:
            assert read("t", pushFilters=pushed).where("partition = 1").count() == wanted
        finally:
            local_spark.sparkContext.setJobDescription(None)  # type: ignore[arg-type]
        execution = named(ask("sql?length=1000"), name)[-1]
        scan = next(each["nodeName"] for each in execution["nodes"] if "Scan" in each["nodeName"])
        assert "tidelog" in scan
        assert rows_of(execution, scan) == [rows]


def test_event_log_has_jobs_with_their_names(filled: Home, local_spark: SparkSession) -> None:
    drive(filled, local_spark)
    folder = urlparse(local_spark.conf.get("spark.eventLog.dir")).path
    (log,) = Path(folder).glob(f"{local_spark.sparkContext.applicationId}*")
    starts = [
        json.loads(line)
        for line in log.read_text().splitlines()
        if '"Event":"SparkListenerJobStart"' in line
    ]
    ours = [
        each["Properties"]["spark.jobGroup.id"]
        for each in starts
        if each["Properties"].get("spark.job.description", "").startswith("archive of-all")
    ]
    assert ours
    assert all(each.startswith("tidelog-") for each in ours)


class Builder:
    """Notes how a session is opened."""

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}

    def master(self, _: str) -> Builder:
        return self

    appName = master  # noqa: N815 - as Spark names it

    def config(self, name: str, value: str) -> Builder:
        self.settings[name] = value
        return self

    def getOrCreate(self) -> Builder:  # noqa: N802
        return self


def test_ui_is_on_for_clusters_and_can_be_turned_on_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ui(master: str, conf: dict[str, str] | None = None) -> str | None:
        builder = Builder()
        monkeypatch.setattr(workers.SparkSession, "builder", builder)
        monkeypatch.setattr(workers.SparkSession, "_instantiatedSession", None)
        open_spark(master, "x", conf)
        return builder.settings.get("spark.ui.enabled")  # Spark's own default is true

    for master in ("spark://host:7077", "yarn", "k8s://https://host"):
        assert ui(master) is None
    assert ui("local[*]") == "false"
    assert ui("local[*]", {"spark.ui.enabled": "true"}) == "true"
