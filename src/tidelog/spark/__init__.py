"""The Spark data source ``tidelog``: batch and streaming, reading and writing, in Arrow.

It promises that a read gives each event of its range once, and that a write stores each row once
under task retries and replayed micro-batches. The driver plans from the catalog and commits to it;
executors touch the store alone, so that a home on SQLite works with executors elsewhere.

``source`` is what Spark is given, ``options`` what a user may say, ``columns`` how events look to
Spark. ``plan`` and ``task`` read, ``batch`` and ``stream`` show that to Spark; ``stage`` and
``commit`` write, ``write`` shows that to Spark. It must not know pipelines or the command line.
"""

from __future__ import annotations

from tidelog.spark.source import TidelogDataSource, register

__all__ = ["TidelogDataSource", "register"]
