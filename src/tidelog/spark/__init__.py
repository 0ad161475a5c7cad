"""The Spark data source `tidelog`: batch and streaming, reading and writing, in Arrow.

This room promises that a read returns each event of its range once, and that a write stores each
row once under task retries and replayed micro-batches. The driver plans from the catalog and
commits to it. Executors need only the store, so a home on SQLite works with remote executors.

``source`` is the class that Spark loads, ``options`` parses its options, and ``columns`` maps
events to Spark's types and applies its filters. ``plan``, ``source`` and ``stream`` read; ``write``
writes and commits. ``session`` opens and replaces Spark sessions, ``failures`` words their errors.
``workers`` runs the tasks of pipelines, ``session`` those of maintenance, and ``playback`` those of
playbacks. It must not know the command line.
"""

from __future__ import annotations

from tidelog.spark.source import TidelogDataSource, register

__all__ = ["TidelogDataSource", "register"]
