"""Restores on Spark: tasks stage segments from other processes, the driver makes them runs."""

from __future__ import annotations

from collections import Counter

import pytest
from pyspark.sql import SparkSession

from tests.archive.test_archive import an_archive, drive, fill, listed
from tests.archive.test_restore import assert_same
from tidelog import Home
from tidelog.archive.archive import open_pipeline
from tidelog.archive.restore import RestoreOptions, restore
from tidelog.coordination.commits import read_manifests
from tidelog.pipeline import ranges
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.ranges import FilePolicy
from tidelog.spark.workers import SparkWorkers

pytestmark = pytest.mark.spark


def bring(home: Home, session: SparkSession) -> int:
    how = DriverOptions(policy=FilePolicy(max_bytes=200_000))
    return restore(home.context, RestoreOptions("daily", "topic:back"), SparkWorkers(session), how)


def prepare(home: Home) -> None:
    home.create_topic("t", 3)
    home.create_topic("back", 3)
    fill(home, 5_000)
    drive(home, an_archive(home, "daily", parser="json:at"))


def test_an_archive_comes_back(home: Home, local_spark: SparkSession) -> None:
    prepare(home)
    assert bring(home, local_spark) == 5_000
    assert bring(home, local_spark) == 0
    assert_same(home)


def test_range_of_one_partition_is_cut_into_tasks(
    home: Home, local_spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "_CUT_BYTES_MIN", 100_000)
    home.create_topic("t", 1)
    fill(home, 5_000)
    archive = an_archive(home, "raw")
    workers = SparkWorkers(local_spark)
    assert workers.parallelism > 1
    pipeline = open_pipeline(home.context, archive, workers)
    how = DriverOptions(policy=FilePolicy(max_bytes=1_500_000))
    assert Driver(home.context, pipeline, how).run() == 5_000
    (manifest,) = read_manifests(home.context, archive.pipeline(), "t/0")
    assert [file.first_offset for file in manifest.files] == [0, 2_500]
    assert listed(home, archive) == Counter(range(5_000))
