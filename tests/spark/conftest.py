"""A home in a folder for each test, and what Spark does with its topics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from tidelog import Home
from tidelog.home import create_home
from tidelog.settings import load_settings

Read = Callable[..., DataFrame]
Save = Callable[..., None]
Stream = Callable[..., StreamingQuery]

STREAM_SECONDS_MAX = 120


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
