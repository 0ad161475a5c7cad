"""Pumps and streams as Python code uses them: ``home.pumps`` and ``home.stream``.

``run_pipeline`` runs one, also of an archive, with ``RunOptions``, and returns a ``RunResult``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypedDict, Unpack, cast

from tidelog.api.spark_workers import open_workers
from tidelog.archive.metrics import pipelines_text
from tidelog.codec.fields import FieldPaths
from tidelog.connectors.by_url import open_source
from tidelog.connectors.source import RowSource
from tidelog.context import Context
from tidelog.coordination.audit import DeadLetterRecorder, record_action, record_deletion
from tidelog.coordination.pipeline_rows import list_pipelines
from tidelog.errors import InvalidError, TidelogError
from tidelog.log.consumer.handler import (
    Append,
    Handler,
    HandlerOptions,
    HandlerSettings,
    dead_letter_to,
)
from tidelog.model import defaults
from tidelog.model.archive import Start
from tidelog.model.event import Event
from tidelog.model.pipeline import FileCounts, NamedPipeline
from tidelog.model.times import duration_ms
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pipeline import CycleReport, Pipeline
from tidelog.pipeline.pump import (
    PumpOptions,
    PumpStatus,
    is_restore,
    open_pump,
    pump_options,
    read_pump_status,
)
from tidelog.pipeline.ranges import FilePolicy
from tidelog.pipeline.registry import delete_pipeline, find_pipeline
from tidelog.pipeline.seek import PositionMove, SeekOptions, plan_seek, seek
from tidelog.pipeline.stream import (
    HandlerFailed,
    HandlerWorkers,
    is_stream,
    open_stream,
    stream_pipeline,
)
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import check_options

__all__ = [
    "PumpFields",
    "PumpHandle",
    "PumpRunOptions",
    "Pumps",
    "RunOptions",
    "RunResult",
    "Stream",
    "StreamOptions",
    "driver_options",
    "run_pipeline",
    "shown_address",
]


class RunOptions(TypedDict, total=False):
    """How a pipeline runs, beside ``follow`` and ``spark``."""

    rate: float | None  # read at most this many events a second; default: no limit
    spark_conf: Mapping[str, str]  # settings of Spark
    accept_loss: bool  # go on where a source has lost events, and record it
    take_over: bool  # stop the drivers that run, without waiting for their end
    flush_on_stop: bool  # write what waits before ending
    stop: threading.Event  # set it, and the run ends after its cycle
    on_look: Callable[[int], None]  # gets the number of events that wait
    on_share: Callable[[int, int], None]  # gets the number of partitions that it has, and of all
    on_left: Callable[[int, int], None]  # at its end: partitions of other drivers, and all
    on_cycle: Callable[[CycleReport], None]  # gets what a cycle has committed
    on_outage: Callable[[TidelogError, float], None]  # the source is away; seconds until a retry
    on_error: Callable[[TidelogError], None]  # a table could not be brought up to date; retried
    on_promote: Callable[[int], None]  # another generation is live now, and the run goes on with it


@dataclass(slots=True)
class RunResult:
    """What a run did."""

    events: int = 0  # read from the source
    files: FileCounts = field(default_factory=FileCounts)  # written, where the target is an archive
    dead: int = 0  # events that the target does not accept
    dropped: int = 0  # by the transform
    left_out: int = 0  # as they were erased from the target before
    generation: int | None = None  # of an archive that was filled
    dead_again: int = 0  # dead letters of a backfill whose events replays put into live files

    def add(self, report: CycleReport) -> None:
        """Counts what one cycle has committed, except events: the driver counts these."""
        for manifest in report.committed.values():
            more = FileCounts.of(manifest.files)
            self.files = FileCounts(*map(sum, zip(self.files, more, strict=True)))
            self.dead += manifest.dead
            self.dropped += manifest.dropped
            self.left_out += manifest.left_out


def driver_options(
    options: RunOptions,
    *,
    follow: bool = False,
    policy: FilePolicy | None = None,
    start: str = "",
    wait: bool = False,
) -> DriverOptions:
    """Returns how a driver runs."""
    how = DriverOptions(
        follow=follow,
        policy=policy or FilePolicy(),
        accept_loss=options.get("accept_loss", False),
        start=start,
        wait=wait,
        take_over=options.get("take_over", False),
        flush_on_stop=options.get("flush_on_stop", False),
    )
    how.stop = options.get("stop", how.stop)
    how.on_look = options.get("on_look", how.on_look)
    how.on_share = options.get("on_share", how.on_share)
    how.on_left = options.get("on_left", how.on_left)
    how.on_cycle = options.get("on_cycle", how.on_cycle)
    how.on_outage = options.get("on_outage", how.on_outage)
    return how


def shown_address(url: str) -> str:
    """Returns an address as the audit keeps it: one outside the home may contain a secret."""
    scheme, _, _ = url.partition(":")
    return url if scheme in ("topic", "archive") else f"{scheme}:"


def run_pipeline(
    context: Context, pipeline: Pipeline, how: DriverOptions, result: RunResult | None = None
) -> RunResult:
    """Drives a pipeline until it is drained or stopped; returns what was done, in ``result``.

    Raises ``FencedError`` if another driver has stopped it.
    """
    done = RunResult() if result is None else result
    on_cycle_given = how.on_cycle

    def on_cycle(report: CycleReport) -> None:
        done.add(report)
        on_cycle_given(report)

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
        who: str = "",
        **fields: Unpack[PumpFields],
    ) -> PumpHandle:
        """Returns a pump from a source into a topic, created if it is new.

        Its name follows from source and topic unless one is given. The topic must exist.
        ``partition`` chooses partitions by key, or keeps the source's numbers. ``who`` is for the
        audit. Raises ``InvalidError`` if the pump exists with other settings.

        >>> _ = home.create_topic("copies")
        >>> home.pumps.create("copy", source="topic:orders", topic="copies").run().events
        3
        """
        check_options("create of a pump", fields, PumpFields, self.create)
        paths = FieldPaths(
            fields.get("key_field", ""),
            fields.get("id_field", ""),
            fields.get("type_field", ""),
            fields.get("time_field", ""),
        )
        wanted = PumpOptions(source, topic, name, paths, transform, partition)

        def record(name: str) -> None:
            record_action(self._context, "pump create", f"pump {name}", f"into topic {topic}", who)

        opened = open_pump(self._context, wanted, LocalWorkers(), record)
        return PumpHandle(self._context, find_pipeline(self._context, opened.name), opened)

    def get(self, name: str) -> PumpHandle:
        """Returns the handle of a pump. Raises ``NotFoundError``.

        >>> _ = home.create_topic("copies")
        >>> _ = home.pumps.create("copy", source="topic:orders", topic="copies")
        >>> home.pumps.get("copy").info.source
        'topic:orders'
        """
        return PumpHandle(self._context, find_pipeline(self._context, name))

    def metrics(self) -> str:
        """Returns Prometheus metrics of all pumps and restores.

        >>> isinstance(home.pumps.metrics(), str)
        True
        """
        return pipelines_text(self._context)

    def list(self, *, restores: bool = False) -> list[PumpHandle]:
        """Returns the handles of all pumps, by name; with ``restores`` restores and streams too.

        >>> home.pumps.list()
        []
        """
        found = [PumpHandle(self._context, each) for each in list_pipelines(self._context)]
        return [each for each in found if restores or not (each.is_restore or each.is_stream)]


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

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream to a handler, which only :meth:`Home.stream` runs.

        >>> _ = home.stream("topic:orders").run(len, name="n", batch=True, until_caught_up=True)
        >>> [each.is_stream for each in home.pumps.list(restores=True)]
        [True]
        """
        return is_stream(self.info)

    def run(
        self,
        *,
        follow: bool = False,
        spark: str | None = None,
        **options: Unpack[PumpRunOptions],
    ) -> RunResult:
        """Brings the source's events into the topic, each once, and returns what was done.

        With ``follow`` it goes on until ``stop`` is set. ``spark`` is a Spark master; without it
        the work is done in this process. Several processes that run the pump share the source's
        partitions; without ``follow`` it leaves them those that they have. Safe to kill, to repeat,
        and to run twice at once.

        >>> _ = home.create_topic("copies")
        >>> pump = home.pumps.create("copy", source="topic:orders", topic="copies")
        >>> pump.run().events, pump.run().events
        (3, 0)
        """
        if self.is_restore:
            raise InvalidError(f"pipeline `{self.name}`: is a restore: restore the archive again")
        if self.is_stream:
            raise InvalidError(f"pipeline `{self.name}`: is a stream: give home.stream its handler")
        check_options(f"run of pump `{self.name}`", options, PumpRunOptions, self.run)
        opened, self._opened = self._opened, None
        if opened is None:
            opened = open_pump(self._context, pump_options(self.info), LocalWorkers())
        workers = open_workers(self.name, spark, options.get("spark_conf"))
        pipeline = dataclasses.replace(opened, workers=workers, rate=options.get("rate"))
        age_ms = duration_ms(options.get("max_age", defaults.PUMP_BATCH_AGE))
        policy = FilePolicy(options.get("max_bytes", defaults.PUMP_BATCH_BYTES), age_ms)
        start = options.get("start", "earliest")
        how = driver_options(options, follow=follow, policy=policy, start=start)
        how.flush_on_stop = options.get("flush_on_stop", True)
        return run_pipeline(self._context, pipeline, how)

    def plan_seek(self, to: str | int, partition: str | None = None) -> list[PositionMove]:
        """Returns where :meth:`seek` would move, what is skipped, and what comes again.

        >>> _ = home.create_topic("copies")
        >>> pump = home.pumps.create("copy", source="topic:orders", topic="copies")
        >>> _ = pump.run()
        >>> [move.again for move in pump.plan_seek("earliest")]
        [3]
        """
        return plan_seek(self._context, self._open(), SeekOptions(str(to), partition))

    def seek(
        self,
        to: str | int,
        partition: str | None = None,
        *,
        again: bool = False,
        why: str = "",
        who: str = "",
    ) -> list[PositionMove]:
        """Moves the position of the pump, or of a stream, in its source and returns what moved.

        ``to`` is ``earliest``, ``latest``, or a position as the status shows it. Without a
        ``partition``, such as ``orders/0`` or ``0``, all positions move. Moving back brings events
        a second time: raises ``InvalidError`` unless ``again`` says so. The audit records it with
        ``why`` and ``who``.

        >>> _ = home.create_topic("copies")
        >>> pump = home.pumps.create("copy", source="topic:orders", topic="copies")
        >>> _ = pump.run()
        >>> _ = pump.seek(1, again=True)
        >>> pump.run().events
        2
        """
        wanted = SeekOptions(str(to), partition, again, why=why, who=who)
        return seek(self._context, self._open(), wanted)

    def _open(self) -> Pipeline:
        """Returns the pipeline, to change its position."""
        if self.is_restore:
            raise InvalidError(f"pipeline `{self.name}`: is a restore: restore into another topic")
        if self.is_stream:
            return stream_pipeline(self._context, self.info)
        return open_pump(self._context, pump_options(self.info), LocalWorkers())

    def fetch_row(self, event: Event) -> dict[str, object] | None:
        """Returns the row that an event is a change of, as it is now; None if it is gone.

        For events of a change log: the event's key is the row's primary key. Values are as CQL
        writes them in JSON. Raises ``InvalidError`` for other sources and keys.

        >>> _ = home.create_topic("copies")
        >>> pump = home.pumps.create("copy", source="topic:orders", topic="copies")
        >>> pump.fetch_row(next(home.read("orders")))
        Traceback (most recent call last):
        tidelog.errors.InvalidError: pump `copy`: its source `topic:orders` has no rows: ...
        """
        return _fetch_row(self._context, self.info.source, f"pump `{self.name}`", event)

    def status(self, *, source: bool = True) -> PumpStatus:
        """Returns how far the pump is, what waits, and what fails, by source partition.

        Without ``source`` the source is not asked, and what waits is not known.

        >>> _ = home.create_topic("copies")
        >>> pump = home.pumps.create("copy", source="topic:orders", topic="copies")
        >>> pump.status().lag
        3
        """
        return read_pump_status(self._context, self.info, source=source)

    def delete(self, *, dry_run: bool = False, who: str = "") -> None:
        """Deletes the pump. What it has written stays. Raises ``InvalidError`` while it runs.

        With ``dry_run`` it only does that. ``who`` is for the audit.

        >>> _ = home.create_topic("copies")
        >>> home.pumps.create("copy", source="topic:orders", topic="copies").delete()
        >>> home.pumps.list()
        []
        """
        kind = "stream" if self.is_stream else "restore" if self.is_restore else "pump"
        delete_pipeline(self._context, self.name, self.info.incarnation, dry_run=True)
        if dry_run:
            return
        record_deletion(self._context, self.info, kind, who)
        delete_pipeline(self._context, self.name, self.info.incarnation)


def _fetch_row(context: Context, url: str, what: str, event: Event) -> dict[str, object] | None:
    source = open_source(
        url,
        environ=context.environ,
        open_context=lambda: contextlib.nullcontext(context),
    )
    if not isinstance(source, RowSource):
        raise InvalidError(
            f"{what}: its source `{url}` has no rows: ask a pump or a stream of a change log"
        )
    return source.fetch_row(event.key or b"")


class StreamOptions(HandlerSettings, total=False):
    """How a stream runs: the settings of a handler, and those of its source."""

    dead_letter: str  # the topic for events that the handler failed on
    start: Start  # of a new stream: earliest (default), or latest, the ends that it sees first
    accept_loss: bool  # go on where the source has lost events, and record it
    take_over: bool  # stop the processes that run the stream, without waiting for their end
    on_outage: Callable[[TidelogError, float], None]  # the source is away; seconds until a retry
    who: str  # for the audit, if the stream is new; default: user@host


class Stream:
    """A source whose events go to a Python handler, without a topic in between."""

    def __init__(self, context: Context, source: str, append: Append) -> None:
        self.source = source
        self._context = context
        self._append = append

    def __repr__(self) -> str:
        return f"Stream({self.source!r})"

    def run(self, handler: Handler, *, name: str, **options: Unpack[StreamOptions]) -> int:
        """Gives the handler each event at least once; returns how many events it handled.

        The catalog keeps the position under the ``name``, and moves it after the handler returned,
        every second where the source can resume there: a run that was killed repeats about the
        last second, or the batch that it had read. Several processes with one name share the source
        partitions. Events of a source partition come in order. Runs until ``stop`` is set, or
        with ``until_caught_up`` until everything there was handled. :class:`HandlerOptions`
        explains ``on_error``, ``retries``, ``types``, ``lag_ms`` and the others. A handler that
        fails after its ``retries`` ends the run with its error. The audit records a new stream.

        >>> home.stream("topic:orders").run(len, name="count", batch=True, until_caught_up=True)
        3
        """
        check_options(f"run of stream `{name}`", options, StreamOptions, self.run)
        letters = options.get("dead_letter")
        settings = {key: options[key] for key in HandlerSettings.__annotations__ if key in options}  # type: ignore[literal-required]
        to = None
        if letters:
            by = f"stream `{name}`"
            recorder = DeadLetterRecorder(self._context, self.source, letters, by)
            to = dead_letter_to(self._append, letters, name, recorder)
        how = HandlerOptions(dead_letter=to, **cast(HandlerSettings, settings))
        workers = HandlerWorkers(self._context, handler, how)

        def record() -> None:
            note, who = f"of {shown_address(self.source)}", options.get("who", "")
            record_action(self._context, "stream create", f"stream {name}", note, who)

        pipeline = open_stream(self._context, name, self.source, workers, record)
        driver = DriverOptions(
            follow=not how.until_caught_up,
            policy=FilePolicy(max_bytes=1),  # everything is due at once
            accept_loss=options.get("accept_loss", False),
            start=options.get("start", "earliest"),
            take_over=options.get("take_over", False),
            stop=how.stop,
            on_cycle=workers.end_after,
        )
        driver.on_outage = options.get("on_outage", driver.on_outage)
        try:
            Driver(self._context, pipeline, driver).run()
        except HandlerFailed as exc:
            raise exc.error from None
        return workers.handled

    def fetch_row(self, event: Event) -> dict[str, object] | None:
        """Returns the row that an event is a change of, as it is now; None if it is gone.

        For the change log of a table. Raises ``InvalidError`` for other sources.

        >>> home.stream("topic:orders").fetch_row(next(home.read("orders")))
        Traceback (most recent call last):
        tidelog.errors.InvalidError: stream: its source `topic:orders` has no rows: ...
        """
        return _fetch_row(self._context, self.source, "stream", event)
