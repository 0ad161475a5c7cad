"""Pumps as Python code uses them: ``home.pumps``, and a handle for each pump.

Runs of a pipeline: where its tasks run, what its caller may say about it, and what it did.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

from tidelog.archive.metrics import pipelines_text
from tidelog.codec.fields import FieldPaths
from tidelog.connectors.by_url import open_source
from tidelog.connectors.source import RowSource
from tidelog.context import Context
from tidelog.errors import InvalidError, TidelogError
from tidelog.model.archive import Start
from tidelog.model.event import Event
from tidelog.model.pipeline import NamedPipeline
from tidelog.model.times import duration_ms
from tidelog.pipeline.base import CycleReport, LocalWorkers, Pipeline, Workers
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.policy import FilePolicy
from tidelog.pipeline.pump import (
    PumpOptions,
    PumpStatus,
    is_restore,
    open_pump,
    pump_options,
    read_pump_status,
)
from tidelog.pipeline.registry import delete_pipeline, find_pipeline, list_pipelines

__all__ = [
    "PumpFields",
    "PumpHandle",
    "PumpRunOptions",
    "Pumps",
    "RunOptions",
    "RunResult",
    "driver_options",
    "open_workers",
    "run_pipeline",
]

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

    reopen = functools.partial(open_spark, spark, name, conf)
    return SparkWorkers(reopen(), reopen)


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


class PumpFields(TypedDict, total=False):
    """The JSON fields that events get their parts from, as paths such as ``meta.id``."""

    key_field: str
    id_field: str
    type_field: str
    time_field: str


class PumpRunOptions(RunOptions, total=False):
    """How a pump runs."""

    start: Start  # of a new pump: earliest (default), or latest, the ends that it sees first
    max_bytes: int  # write to the topic when this much waits; default 64 MB
    max_age: str | int  # or when an event has waited this long, while following; default 1s


class Pumps:
    """The pumps of a home: ``home.pumps``."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def create(
        self,
        name: str | None = None,
        *,
        source: str,
        topic: str,
        transform: str = "",
        partition: Literal["key", "same"] = "key",
        **fields: Unpack[PumpFields],
    ) -> PumpHandle:
        """Return a pump from a source into a topic, created if it is new.

        Its name follows from source and topic unless one is given. The topic must exist.
        ``partition`` chooses partitions by key, or keeps the source's numbers. Raises
        ``InvalidError`` if the pump exists with other settings.

        >>> _ = home.create_topic("copies")
        >>> home.pumps.create("copy", source="topic:orders", topic="copies").run().events
        3
        """
        paths = FieldPaths(
            fields.get("key_field", ""),
            fields.get("id_field", ""),
            fields.get("type_field", ""),
            fields.get("time_field", ""),
        )
        wanted = PumpOptions(source, topic, name, paths, transform, partition)
        opened = open_pump(self._context, wanted, LocalWorkers())
        return PumpHandle(self._context, find_pipeline(self._context, opened.name), opened)

    def get(self, name: str) -> PumpHandle:
        """Return the handle of a pump. Raises ``NotFoundError``.

        >>> _ = home.create_topic("copies")
        >>> _ = home.pumps.create("copy", source="topic:orders", topic="copies")
        >>> home.pumps.get("copy").info.source
        'topic:orders'
        """
        return PumpHandle(self._context, find_pipeline(self._context, name))

    def metrics(self) -> str:
        """Return Prometheus metrics of all pumps and restores.

        >>> isinstance(home.pumps.metrics(), str)
        True
        """
        return pipelines_text(self._context)

    def list(self, *, restores: bool = False) -> list[PumpHandle]:
        """Return the handles of all pumps, by name; with ``restores`` those of restores too.

        >>> home.pumps.list()
        []
        """
        found = [PumpHandle(self._context, each) for each in list_pipelines(self._context)]
        return [each for each in found if restores or not each.is_restore]


class PumpHandle:
    """One pump: run it, look at it, delete it."""

    def __init__(
        self, context: Context, info: NamedPipeline, opened: Pipeline | None = None
    ) -> None:
        self.name = info.name
        self.info = info  # its settings, when they were read
        self._context = context
        self._opened = opened  # by its creation; for the first run

    def __repr__(self) -> str:
        return f"PumpHandle({self.name!r})"

    @property
    def is_restore(self) -> bool:
        """Whether it is the restore of an archive, which only a restore runs.

        >>> _ = home.create_topic("again")
        >>> _ = home.archives.get("daily").restore(to="topic:again")
        >>> [each.is_restore for each in home.pumps.list(restores=True)]
        [True]
        """
        return is_restore(self.info)

    def run(
        self,
        *,
        follow: bool = False,
        spark: str | None = None,
        **options: Unpack[PumpRunOptions],
    ) -> RunResult:
        """Bring the source's events into the topic, each once, and return what was done.

        With ``follow`` it goes on until ``stop`` is set. ``spark`` is a Spark master; without it
        the work is done in this process. Another process that runs the pump is waited for. Safe to
        kill, to repeat, and to run twice at once.

        >>> _ = home.create_topic("copies")
        >>> pump = home.pumps.create("copy", source="topic:orders", topic="copies")
        >>> pump.run().events, pump.run().events
        (3, 0)
        """
        if self.is_restore:
            raise InvalidError(f"pipeline `{self.name}`: is a restore: restore the archive again")
        opened, self._opened = self._opened, None
        if opened is None:
            opened = open_pump(self._context, pump_options(self.info), LocalWorkers())
        workers = open_workers(self.name, spark, options.get("spark_conf"))
        pipeline = dataclasses.replace(opened, workers=workers, rate=options.get("rate"))
        age_ms = duration_ms(options.get("max_age", "1s"))
        policy = FilePolicy(options.get("max_bytes", 64_000_000), age_ms)
        start = options.get("start", "earliest")
        how = driver_options(options, follow=follow, policy=policy, start=start)
        how.flush_on_stop = options.get("flush_on_stop", True)
        return run_pipeline(self._context, pipeline, how)

    def fetch_row(self, event: Event) -> dict[str, Any] | None:
        """Return the row that an event is a change of, as it is now; None if it is gone.

        For events of a change log: the event's key is the row's primary key. Values are as CQL
        writes them in JSON. Raises ``InvalidError`` for other sources and keys.

        >>> _ = home.create_topic("copies")
        >>> pump = home.pumps.create("copy", source="topic:orders", topic="copies")
        >>> pump.fetch_row(next(home.read("orders")))
        Traceback (most recent call last):
        tidelog.errors.InvalidError: pump `copy`: its source `topic:orders` has no rows: ...
        """
        context = self._context
        source = open_source(
            self.info.source,
            environ=context.environ,
            open_context=lambda: contextlib.nullcontext(context),
        )
        if not isinstance(source, RowSource):
            raise InvalidError(
                f"pump `{self.name}`: its source `{self.info.source}` has no rows: "
                "ask a pump of a change log"
            )
        return source.fetch_row(event.key or b"")

    def status(self, *, source: bool = True) -> PumpStatus:
        """Return how far the pump is, what waits, and what fails, by source partition.

        Without ``source`` the source is not asked, and what waits is not known.

        >>> _ = home.create_topic("copies")
        >>> pump = home.pumps.create("copy", source="topic:orders", topic="copies")
        >>> pump.status().lag
        3
        """
        return read_pump_status(self._context, self.info, source=source)

    def delete(self) -> None:
        """Delete the pump. What it has written stays. Raises ``InvalidError`` while it runs.

        >>> _ = home.create_topic("copies")
        >>> home.pumps.create("copy", source="topic:orders", topic="copies").delete()
        >>> home.pumps.list()
        []
        """
        delete_pipeline(self._context, self.name, self.info.incarnation)
