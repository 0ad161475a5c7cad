"""The data source that Spark is given; it hands each use to the module that knows it."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from tidelog.errors import InvalidError
from tidelog.spark.batch import TidelogReader
from tidelog.spark.columns import arrow_schema, spark_schema
from tidelog.spark.options import (
    BATCH_READ,
    BATCH_WRITE,
    STREAM_READ,
    STREAM_WRITE,
    read_columns,
    read_options,
    write_options,
)
from tidelog.spark.stream import TidelogStreamReader
from tidelog.spark.write import TidelogStreamWriter, TidelogWriter

__all__ = ["TidelogDataSource", "register"]


class TidelogDataSource(DataSource):
    """``spark.read.format("tidelog")``, and ``readStream``, ``write`` and ``writeStream``."""

    @classmethod
    def name(cls) -> str:
        return "tidelog"

    def schema(self) -> StructType:
        return spark_schema(read_columns(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        return TidelogReader(read_options(self.options, BATCH_READ), arrow_schema(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return TidelogStreamReader(read_options(self.options, STREAM_READ), arrow_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        _refuse_overwrite(overwrite)
        return TidelogWriter(write_options(self.options, BATCH_WRITE), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        _refuse_overwrite(overwrite)
        return TidelogStreamWriter(write_options(self.options, STREAM_WRITE), schema)


def register(spark: SparkSession) -> None:
    """Let a session know the format ``tidelog``."""
    spark.dataSource.register(TidelogDataSource)


def _refuse_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise InvalidError("write: a log is not overwritten: use mode append")
