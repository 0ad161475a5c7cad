"""A user's transform that keeps all rows."""

from __future__ import annotations

from pyspark.sql import DataFrame


def kept(events: DataFrame) -> DataFrame:
    """What has a value, as every event of the benchmark has."""
    return events.where("value IS NOT NULL")
