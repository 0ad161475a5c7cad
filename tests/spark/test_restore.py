"""Restores on Spark: tasks stage segments from other processes, the driver makes them runs."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from tests.archive.test_archive import an_archive, drive, fill
from tests.archive.test_restore import assert_same
from tidelog import Home
from tidelog.archive.restore import RestoreOptions, restore
from tidelog.pipeline.driver import DriverOptions
from tidelog.pipeline.policy import FilePolicy
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
