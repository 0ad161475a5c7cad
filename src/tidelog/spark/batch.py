"""A batch read, as Spark asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from tidelog.spark.options import ReadOptions
from tidelog.spark.plan import (
    Planner,
    Task,
    check_partitions,
    open_shared,
    range_of,
    resolve_times,
)
from tidelog.spark.refresh import refreshed
from tidelog.spark.task import read_task

__all__ = ["TidelogReader"]


class TidelogReader(DataSourceReader):
    """Plans on the driver, reads on executors."""

    def __init__(self, options: ReadOptions, wanted: pa.Schema) -> None:
        self._options = options
        self._wanted = wanted

    def partitions(self) -> list[InputPartition]:
        """One for each task; the ends are those of this moment."""
        options = self._options
        with open_shared(options.home) as home:
            topic = home.topic(options.topic)
            check_partitions(topic, options.start_offsets, options.end_offsets)
            times = resolve_times(options, home.log.clock.now_ms())
            planner = Planner(home, topic)
            heads = planner.heads()
            ranges = [
                range_of(topic, partition, head, options) for partition, head in enumerate(heads)
            ]
            return list(planner.tasks(ranges, options, times, heads))

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """The events of one task. Spark makes up a partition where there is no task."""
        if not isinstance(partition, Task):
            return iter(())
        return read_task(refreshed(partition), self._wanted)
