"""Runs of a pipeline: where its tasks run, what its caller may say about it, and what it did."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypedDict

from tidelog.context import Context
from tidelog.errors import TidelogError
from tidelog.pipeline.base import CycleReport, LocalWorkers, Pipeline, Workers
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.policy import FilePolicy

__all__ = ["RunOptions", "RunResult", "driver_options", "open_workers", "run_pipeline"]

_THREADS = 2  # of tasks in this process


class RunOptions(TypedDict, total=False):
    """How a pipeline runs, beside ``follow`` and ``spark``."""

    rate: float | None  # read at most this many events a second; default: no limit
    spark_conf: Mapping[str, str]  # settings of Spark
    accept_loss: bool  # go on where a source has lost events, and record it
    take_over: bool  # from a driver that runs, without waiting for its end
    flush_on_stop: bool  # write what waits before ending
    shard: tuple[int, int]  # (M, N): drive share M of N of the source partitions; default (0, 1)
    stop: threading.Event  # set it, and the run ends after its cycle
    on_look: Callable[[int], None]  # gets the number of events that wait
    on_cycle: Callable[[CycleReport], None]  # gets what a cycle has committed
    on_outage: Callable[[TidelogError, float], None]  # the source is away; seconds until a retry
    on_error: Callable[[TidelogError], None]  # a table could not be brought up to date; retried
    on_promote: Callable[[int], None]  # another generation is live now, and the run goes on with it


@dataclass(slots=True)
class RunResult:
    """What a run did."""

    events: int = 0  # read from the source
    files: int = 0  # written, where the target is an archive
    dead: int = 0  # events that the target does not accept
    dropped: int = 0  # by the transform
    left_out: int = 0  # as they were erased from the target before
    generation: int | None = None  # of an archive that was filled

    def add(self, report: CycleReport) -> None:
        """Counts what one cycle has committed, except events: the driver counts these."""
        for manifest in report.committed.values():
            self.files += len(manifest.files)
            self.dead += manifest.dead
            self.dropped += manifest.dropped
            self.left_out += manifest.left_out


def open_workers(name: str, spark: str | None, conf: Mapping[str, str] | None = None) -> Workers:
    """Returns what runs tasks: Spark where a master is given, else threads of this process."""
    if spark is None:
        return LocalWorkers(_THREADS)
    from tidelog.spark.workers import SparkWorkers, open_spark

    return SparkWorkers(open_spark(spark, name, conf))


def driver_options(
    options: RunOptions, *, follow: bool = False, policy: FilePolicy | None = None, start: str = ""
) -> DriverOptions:
    """Returns how a driver runs."""
    shard, shards = options.get("shard", (0, 1))
    how = DriverOptions(
        follow=follow,
        policy=policy or FilePolicy(),
        accept_loss=options.get("accept_loss", False),
        shard=shard,
        shards=shards,
        start=start,
        take_over=options.get("take_over", False),
        flush_on_stop=options.get("flush_on_stop", False),
    )
    how.stop = options.get("stop", how.stop)
    how.on_look = options.get("on_look", how.on_look)
    how.on_cycle = options.get("on_cycle", how.on_cycle)
    how.on_outage = options.get("on_outage", how.on_outage)
    return how


def run_pipeline(
    context: Context, pipeline: Pipeline, how: DriverOptions, result: RunResult | None = None
) -> RunResult:
    """Drive a pipeline until it is drained or told to stop; returns what was done, in ``result``.

    ``FencedError`` when another driver has taken it over.
    """
    done = RunResult() if result is None else result
    told = how.on_cycle

    def on_cycle(report: CycleReport) -> None:
        done.add(report)
        told(report)

    how.on_cycle = on_cycle
    done.events += Driver(context, pipeline, how).run()
    return done
