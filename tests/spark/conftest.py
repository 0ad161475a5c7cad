"""One local Spark session for all tests of this folder, and a home in a folder for each test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from tests.servers.java import LEAN
from tidelog import Home
from tidelog.home import create_home
from tidelog.settings import load_settings
from tidelog.spark import register

Read = Callable[..., DataFrame]
Save = Callable[..., None]
Stream = Callable[..., StreamingQuery]

STREAM_SECONDS_MAX = 120


@pytest.fixture(scope="session")
def local_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Two cores; a task may fail twice."""
    folder = tmp_path_factory.mktemp("spark")
    settings = {
        "spark.master": "local[2,3]",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": " ".join(LEAN),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "OFF",  # tests see what is raised
    }
    builder = SparkSession.builder.appName("tidelog-tests")
    for name, value in settings.items():
        builder = builder.config(name, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)  # else workers take the first `python3`
        session = builder.getOrCreate()
        register(session)
        yield session
        session.stop()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    opened, _ = create_home(load_settings(str(tmp_path / "home"), {}, tmp_path))
    with opened:
        yield opened


@pytest.fixture
def read(local_spark: SparkSession, home: Home) -> Read:
    """Load a topic of the home."""

    def load(topic: str, **options: Any) -> DataFrame:
        return (
            local_spark.read.format("tidelog")
            .options(home=home.config, topic=topic, **options)
            .load()
        )

    return load


@pytest.fixture
def save(home: Home) -> Save:
    """Append a table to a topic of the home."""

    def append(table: DataFrame, topic: str, **options: Any) -> None:
        writer = table.write.format("tidelog").mode("append")
        writer.options(home=home.config, topic=topic, **options).save()

    return append


@pytest.fixture
def stream(local_spark: SparkSession, home: Home, tmp_path: Path) -> Stream:
    """Copy a topic into another one by a streaming query, up to what is there now."""

    def copy(source: str, target: str, checkpoint: str = "checkpoint", **options: Any) -> Any:
        named = {"sink": "copy", **{n: v for n, v in options.items() if n == "sink"}}
        reading = {n: v for n, v in options.items() if n != "sink"}
        query = (
            local_spark.readStream.format("tidelog")
            .options(home=home.config, topic=source, **reading)
            .load()
            .writeStream.format("tidelog")
            .options(home=home.config, topic=target, **named)
            .option("checkpointLocation", str(tmp_path / checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(STREAM_SECONDS_MAX)
        return query

    return copy
