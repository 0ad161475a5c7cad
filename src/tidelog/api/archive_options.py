"""Options of runs of archives: what each kind of run takes beside its own arguments."""

from __future__ import annotations

import os

from tidelog.api.pipelines import RunOptions
from tidelog.archive.archive import FormatOptions

__all__ = [
    "ArchiveRunOptions",
    "BackfillOptions",
    "DeadLetterOptions",
    "RecordedRunOptions",
    "RedoOptions",
]


class ArchiveRunOptions(RunOptions, total=False):
    """How an archive runs, beside ``follow`` and ``spark``."""

    metrics_file: str | os.PathLike[str] | None  # kept up to date with Prometheus metrics
    statsd: str | None  # HOST:PORT of a server that gets the metrics, as gauges
    kafka_group: str | None  # a consumer group whose offsets follow the positions
    who: str  # for the audit; default: the run leaves no record


class RecordedRunOptions(RunOptions, total=False):
    """How a run goes that leaves a record in the home's audit, such as a restore."""

    who: str  # default: user@host


class BackfillOptions(FormatOptions, RecordedRunOptions, total=False):
    """How a backfill writes files, and how it runs."""


class RedoOptions(RecordedRunOptions, total=False):
    """What a redo changes, and how it runs. Without a value: as the archive does."""

    parser: str | None
    transform: str | None


class DeadLetterOptions(RecordedRunOptions, total=False):
    """How dead letters are tried again. Without a value: as the archive does."""

    generation: int | None
    parser: str
    granularity: str | None
    time_zone: str | None
