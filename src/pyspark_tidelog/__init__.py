"""Spark looks for packages named ``pyspark_*``, and so finds the data source ``tidelog``."""

from __future__ import annotations

from tidelog.spark import TidelogDataSource as DefaultSource

__all__ = ["DefaultSource"]
