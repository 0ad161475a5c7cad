"""Restores on Spark: tasks stage segments from other processes, the driver makes them runs."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from tests.pipeline.test_archive import an_archive, drive, fill
from tests.pipeline.test_restore import assert_same
from tidelog import Home
from tidelog.pipeline.driver import Driving
from tidelog.pipeline.policy import Policy
from tidelog.pipeline.restore import Restoring, restore
from tidelog.pipeline.spark import SparkWorkers

pytestmark = pytest.mark.spark


def bring(home: Home, session: SparkSession) -> int:
    how = Driving(policy=Policy(max_bytes=200_000))
    return restore(home, Restoring("daily", "topic:back"), SparkWorkers(session), how)


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
