"""The servers as fixtures, one of each for the whole run, started when a test first asks.

Say `pytest_plugins = ["tests.servers.fixtures"]` in the topmost conftest. A test must leave a
shared server as it found it: use names of its own in it, and `running()` of the server's module to
have one that may be paused or killed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, TypeVar

import pytest

from tests.servers import cassandra, dynamodb, kafka, moto, s3, spark
from tests.servers.base import ServerError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[kafka.Kafka]:
    """A Kafka broker."""
    yield from _shared(kafka.running)


@pytest.fixture(scope="session")
def dynamodb_server() -> Iterator[dynamodb.DynamoDb]:
    """A DynamoDB Local server."""
    yield from _shared(dynamodb.running)


@pytest.fixture(scope="session")
def cassandra_server() -> Iterator[cassandra.Cassandra]:
    """A Cassandra node."""
    yield from _shared(cassandra.running)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[s3.S3]:
    """An S3 server."""
    yield from _shared(s3.running)


@pytest.fixture(scope="session")
def moto_server() -> Iterator[moto.Moto]:
    """A moto server, for Kinesis and SNS."""
    yield from _shared(moto.running)


@pytest.fixture(scope="session")
def spark_cluster() -> Iterator[spark.SparkCluster]:
    """A Spark standalone cluster of two workers."""
    yield from _shared(spark.running)


@pytest.fixture(scope="session")
def local_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one Spark session of this process: two cores; a task may fail twice."""
    from pyspark.sql import SparkSession

    from tidelog.spark import register

    folder = tmp_path_factory.mktemp("spark")
    settings = {
        "spark.master": "local[2,3]",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",  # any that is free
        "spark.ui.showConsoleProgress": "false",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": folder.as_uri(),
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.compress": "false",
        "spark.log.level": "OFF",  # tests see what is raised
        # A task's environment is that of the process that started Spark's Java.
        **{f"spark.executorEnv.{name}": value for name, value in moto.KEYS.items()},
    }
    builder = SparkSession.builder.appName("tidelog-tests")
    for name, value in settings.items():
        builder = builder.config(name, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)  # else workers take the first `python3`
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")  # where the UI listens
        session = builder.getOrCreate()
        register(session)
        yield session
        session.stop()


def _shared(running: Callable[[], AbstractContextManager[T]]) -> Iterator[T]:
    """Fail, not skip, when the server cannot be had: a skipped promise looks like a kept one."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(running())
        except ServerError as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        yield server
