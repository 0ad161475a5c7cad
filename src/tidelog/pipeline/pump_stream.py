"""Pumps and streams: copy any source into a topic, or pass it to a Python handler.

**Pumps** copy each event once. A pump is a named pipeline. By default its name follows from source
and topic, so a pump that was killed resumes. Processes that run one with the same name share its
source partitions.

The status of a pump has the progress, lag and failures of each source partition.

**Streams** call a handler without a topic in between, at least once for each event. A stream is a
named pipeline whose tasks call the handler. Its cycle (``cycle``) is that of every pipeline, and no
range has files: step 4 delivers events, step 7 commits the position after the last handled one. So
a crash before step 7 delivers the range again, and one after it does not. A handler that fails ends
its range before the event that it failed on, where the source can resume inside of a batch;
elsewhere the batch comes again. In the same places a range ends after a second, so a crash repeats
about that much of a slow handler's work.

Drivers share the source partitions of a stream. One that stalls may lose a partition without
noticing, so it reads the ``head`` before it delivers anything after a second: another epoch there
ends the range.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from tidelog.codec.event_batch import events_of
from tidelog.codec.fields import FieldPaths
from tidelog.concurrency import Pool
from tidelog.connectors.archive.source import ArchiveSource
from tidelog.connectors.by_url import refuse_archive_folder, sink_at, source_at
from tidelog.connectors.sink import RangeWriter, TargetSink, Written
from tidelog.connectors.source import Bounds, Chunk, DividingReader, Source, SourcePartition
from tidelog.connectors.topic.segments import EventLimit
from tidelog.connectors.topic.sink import FieldedSink, TopicSink
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import read_intent, read_partitions, read_progress
from tidelog.errors import (
    FencedError,
    InternalError,
    InvalidError,
    TidelogError,
    UnavailableError,
    unexpected,
)
from tidelog.log.consumer.handler import HandlerOptions, HandlerStopped, KnownSince, try_handler
from tidelog.model import layout
from tidelog.model.address import parse_address
from tidelog.model.event import Event
from tidelog.model.pipeline import Manifest, NamedPipeline, Totals
from tidelog.pipeline.base import (
    CycleReport,
    LocalWorkers,
    Pipeline,
    Task,
    TaskOutcome,
    TaskOutput,
    Workers,
)
from tidelog.pipeline.failures import read_failures
from tidelog.pipeline.registry import check_behind, check_loop, check_reach, ensure_pipeline
from tidelog.pipeline.source_partitions import track

__all__ = [
    "HandlerFailed",
    "HandlerWorkers",
    "PumpOptions",
    "PumpPartition",
    "PumpStatus",
    "is_pump",
    "is_restore",
    "is_stream",
    "open_pump",
    "open_stream",
    "pump_options",
    "read_pump_status",
    "refuse_moving_start",
    "stream_pipeline",
]

_RESTORE = "restore."  # how names of restores begin


@dataclass(frozen=True, slots=True)
class PumpOptions:
    """What to pump, and how."""

    source: str  # URL
    topic: str
    name: str | None = None
    fields: FieldPaths = field(default_factory=FieldPaths)
    transform: str = ""  # module:function, from DataFrame to DataFrame
    partition: str = "key"  # or same: the number of the source partition


def open_pump(
    context: Context,
    wanted: PumpOptions,
    workers: Workers,
    record: Callable[[str], None] = lambda name: None,
) -> Pipeline:
    """Opens the pipeline of a pump, and creates it if it is new.

    ``record`` is called with its name before a new one is created. Raises ``NotFoundError`` if
    source or topic does not exist. Raises ``InvalidError`` if a pump of that name has other
    settings, if its topic was created again, or if it would add to another topic than the pumps it
    follows.
    """
    refuse_moving_start(wanted.source, f"pump `{wanted.source}`")
    refuse_archive_folder(context, wanted.source, f"pump into `{wanted.topic}`")
    source = source_at(context, wanted.source)
    target = f"topic:{wanted.topic}?partition={wanted.partition}"
    sink: TargetSink = sink_at(context, target, source=source.url)
    if wanted.fields.given():
        most = context.log_settings.event_bytes_max
        limit = EventLimit(most)
        if isinstance(sink, TopicSink):
            limit, sink = sink.limit, sink.with_limit(replace(sink.limit, own=True))
        sink = FieldedSink(sink, wanted.fields, most, limit)
    sink.check([each.text for each in source.partitions()])
    check_behind(context, source, sink)
    check_loop(context, source.url, sink.url)
    made = _pump_record(context, wanted, source.url, sink)
    named = ensure_pipeline(context, made, lambda: record(made.name))
    for setting in ("source", "sink", "fields", "transform"):
        before, now = getattr(named, setting), getattr(made, setting)
        if before != now:
            raise InvalidError(
                f"pump `{named.name}`: was begun with {setting} {before or 'none'}, not "
                f"{now or 'none'}: continue so, or give it another --name"
            )
    if named.target != sink.incarnation:
        raise InvalidError(
            f"pump `{named.name}`: its topic `{wanted.topic}` was deleted and made again since it "
            "began: give it another --name to pump everything again"
        )
    return Pipeline(
        named.name,
        named.incarnation,
        source,
        sink,
        workers,
        wanted.transform,
        goes_back=isinstance(source, ArchiveSource),
    )


def is_restore(named: NamedPipeline) -> bool:
    """Returns whether a pipeline is a restore of an archive, which ends by itself."""
    return named.name.startswith(_RESTORE) and named.source.startswith("archive:")


def is_pump(named: NamedPipeline) -> bool:
    """Returns whether a pipeline is a pump that can run."""
    inside = parse_address(named.sink).scheme == "topic"
    return named.state == "ready" and inside and not is_restore(named)


def pump_options(named: NamedPipeline) -> PumpOptions:
    """Returns what a pump was created with."""
    sink = parse_address(named.sink)
    return PumpOptions(
        named.source,
        sink.path.strip("/"),
        named.name,
        FieldPaths(**named.fields),
        named.transform,
        sink.options.get("partition", "key"),
    )


def refuse_moving_start(source: str, what: str) -> None:
    """Raises for a relative start: a pump is found by its source, which must not change."""
    start = parse_address(source).options.get("start", "")
    if start in ("newest", "now") or start.startswith("-"):
        raise InvalidError(
            f"{what}: start `{start}` is another time at each run: give the time "
            "itself, or leave it out and give the start `latest`"
        )


def _pump_record(
    context: Context, wanted: PumpOptions, source: str, sink: TargetSink
) -> NamedPipeline:
    mark = hashlib.sha256(source.encode()).hexdigest()[:16]
    fields = {name: path for name, path in dataclasses.asdict(wanted.fields).items() if path}
    return NamedPipeline(
        name=wanted.name or f"pump.{wanted.topic}.{mark}",
        incarnation=context.ids.new(),
        source=source,
        sink=sink.url,
        target=sink.incarnation,
        created_ms=context.clock.now_ms(),
        fields=fields,
        transform=wanted.transform,
    )


@dataclass(frozen=True, slots=True)
class PumpPartition:
    """The progress of a pump in one source partition."""

    partition: str
    position: str
    end: str | None  # None: the source does not say, or was not read
    lag: int | None  # waiting events, if the source can count them
    events: int  # read so far
    totals: Totals
    intent_ms: int | None  # since when a range is in progress
    has_begun: bool = True
    error: str = ""  # why its driver cannot read it; empty: no known failure
    has_ended: bool = False  # by a person's decision, since its source was made again


@dataclass(frozen=True, slots=True)
class PumpStatus:
    """The status of a pump, or of another named pipeline."""

    named: NamedPipeline
    partitions: tuple[PumpPartition, ...]
    error: str  # why its source or its driver fails; empty: no known failure
    read_ms: int

    @property
    def lag(self) -> int | None:
        """Returns how many events wait in total, if the source can count them."""
        known = [each.lag for each in self.partitions if each.lag is not None]
        return sum(known) if known else None

    @property
    def events(self) -> int:
        """Returns how many events were read."""
        return sum(each.events for each in self.partitions)

    @property
    def left_out(self) -> int:
        """Returns how many events were skipped because they were erased from the target."""
        return sum(each.totals.left_out for each in self.partitions)

    @property
    def last_commit_ms(self) -> int | None:
        """When something was last committed; None: never."""
        return max((each.totals.committed_ms for each in self.partitions), default=0) or None


def read_pump_status(context: Context, named: NamedPipeline, *, source: bool = True) -> PumpStatus:
    """Returns how a pump does now; without ``source`` what its rows say, and no source is asked.

    A source that cannot be reached leaves what the rows say too, and is the ``error``.
    """
    error = ""
    opened: Source | None = None
    bounds: Mapping[SourcePartition, Bounds] = {}
    if source:
        try:
            opened = source_at(context, named.source)
            track(context, named.incarnation, opened)
            bounds = opened.bounds(opened.partitions())
        except TidelogError as exc:
            error = f"its source cannot be reached: {exc}"
    failures = read_failures(context, named.incarnation)
    if not error and failures:
        name, failure = next(iter(failures.items()))
        error = f"{name or 'its source'}: {failure.message}"
    known = {each.text for each in bounds} | set(read_partitions(context, named.incarnation))
    known |= failures.keys() - {""}
    found = tuple(
        replace(
            _partition(context, named, each, opened, bounds),
            error=failures[each].message if each in failures else "",
        )
        for each in sorted(known)
    )
    return PumpStatus(named, found, error, context.clock.now_ms())


def _partition(
    context: Context,
    named: NamedPipeline,
    name: str,
    source: Source | None,
    bounds: Mapping[SourcePartition, Bounds],
) -> PumpPartition:
    progress = read_progress(context, named.incarnation, name)
    held = bounds.get(SourcePartition.named(name))
    position = progress.position if progress else (held.first if held else "")
    intent = read_intent(context, named.incarnation, name)
    return PumpPartition(
        name,
        position,
        held.end if held else None,
        source.count(position, held.end) if source and held else None,
        progress.ordinal if progress else 0,
        progress.totals if progress else Totals(),
        intent.began_ms if intent else None,
        progress is not None,
        has_ended=bool(progress and progress.ended),
    )


_SINK = "handler:"
_OWNER_S = 1.0  # between two looks at who has a source partition
_RANGE_S = 1.0  # after which a range ends, so that its position is committed


class HandlerFailed(BaseException):
    """Ends a driver whose handler failed for good, after the events before it are committed."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class HandlerSink:
    """The sink of a stream: its workers deliver events, so there is nothing to stage or publish."""

    url = _SINK
    incarnation = ""

    def check(self, partitions: Sequence[str]) -> None:
        """Accepts events of every partition."""

    def writer(self, partition: str, staging: str) -> RangeWriter:
        raise InternalError(f"stream: source partition `{partition}` has no handler: use run")

    def publish(self, manifest: Manifest) -> int | None:
        """Does nothing: the handler has the events."""

    def discard(self, manifest: Manifest) -> None:
        """Does nothing: nothing is staged."""


_: type[TargetSink] = HandlerSink


def is_stream(named: NamedPipeline) -> bool:
    """Returns whether a pipeline delivers to a handler, which only ``home.stream`` has."""
    return named.sink == _SINK


def open_stream(
    context: Context,
    name: str,
    source: str,
    workers: HandlerWorkers,
    record: Callable[[], None] = lambda: None,
) -> Pipeline:
    """Opens the pipeline of a stream, and creates it if it is new.

    ``record`` is called before a new one is created. Raises ``NotFoundError`` if the source does
    not exist. Raises ``InvalidError`` if the name belongs to a pump, or to a stream of another
    source or of another home.
    """
    refuse_moving_start(source, f"stream `{name}`")
    refuse_archive_folder(context, source, f"stream `{name}`")
    opened, sink = source_at(context, source), HandlerSink()
    opened.partitions()  # raises for a source that is not there
    check_behind(context, opened, sink)
    made = NamedPipeline(
        name=name,
        incarnation=context.ids.new(),
        source=opened.url,
        sink=sink.url,
        target=sink.incarnation,
        created_ms=context.clock.now_ms(),
        home=context.home_id,
    )
    named = ensure_pipeline(context, made, record)
    if (named.source, named.sink) != (made.source, made.sink):
        what = f"a stream of `{named.source}`" if is_stream(named) else "a pump"
        raise InvalidError(
            f"stream `{name}`: its name is that of {what}: choose another name, or run "
            f"`tidelog pipeline delete {name}` first"
        )
    check_reach(context, named)
    return Pipeline(
        named.name,
        named.incarnation,
        opened,
        sink,
        workers,
        title=f"stream {name}",
        goes_back=isinstance(opened, ArchiveSource),
    )


def stream_pipeline(context: Context, named: NamedPipeline) -> Pipeline:
    """Returns the pipeline of a stream without its handler, to change its position."""
    check_reach(context, named)
    source = source_at(context, named.source)
    return Pipeline(named.name, named.incarnation, source, HandlerSink(), LocalWorkers())


@dataclass
class HandlerWorkers:
    """Calls a handler with the events of tasks, in this process."""

    context: Context
    handler: Callable[[Any], object]
    how: HandlerOptions
    handled: int = 0
    failure: BaseException | None = None  # of the handler, after its last attempt
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _looked_s: dict[SourcePartition, float] = field(default_factory=dict)
    _seen: dict[SourcePartition, KnownSince] = field(default_factory=dict)

    def run(self, tasks: Sequence[Task]) -> Iterator[TaskOutcome]:
        if self.how.workers == 1:
            for task in tasks:
                yield self._outcome(task)
            return
        with Pool(self.how.workers, "tidelog-handler") as pool:
            for done in as_completed([pool.submit(self._outcome, task) for task in tasks]):
                yield done.result()

    def end_after(self, report: CycleReport) -> None:
        """Raises ``HandlerFailed`` after the cycle in which the handler failed."""
        if self.failure is not None:
            raise HandlerFailed(self.failure)

    def _outcome(self, task: Task) -> TaskOutcome:
        partition = task.range.partition
        try:
            return TaskOutcome(partition, self._deliver(task), cut=task.cut)
        except Exception as exc:  # noqa: BLE001 - one source partition must not stop the others
            error = unexpected(f"source partition `{partition.text}`", exc)
            return TaskOutcome(partition, error=error, cut=task.cut)

    def _deliver(self, task: Task) -> TaskOutput:
        """Returns how far the handler got. A range that it did not begin ends where it starts."""
        done = TaskOutput(task.range.start, 0, Written())
        if self._is_over():
            return done
        self._check_owner(task, always=True)
        end_s = self.context.clock.monotonic_s() + _RANGE_S
        try:
            for chunk in task.chunks(self.context.clock):
                done, is_whole = self._deliver_chunk(task, chunk, done, end_s)
                if not is_whole or self.context.clock.monotonic_s() >= end_s:
                    break
        except UnavailableError:
            if not done.read:
                raise
        return done

    def _deliver_chunk(
        self, task: Task, chunk: Chunk, done: TaskOutput, end_s: float
    ) -> tuple[TaskOutput, bool]:
        """Returns the output with a chunk, and whether all of it was delivered."""
        events = _events(chunk.batch, task.range.partition.topic)
        seen = KnownSince(self.context.clock, self.how.lag_ms / 1000)
        self._seen.setdefault(task.range.partition, seen).note(events)
        size = self.how.max_events if self.how.batch else 1
        staged, read = done.staged, 0
        for first in range(0, len(events), size):
            unit = events[first : first + size]
            got = self._deliver_unit(task, unit)
            if got is None:
                return _until(task, done, staged, events[:read]), False
            staged = replace(staged, written=staged.written + got[0], dead=staged.dead + got[1])
            read += len(unit)
            if read < len(events) and self.context.clock.monotonic_s() >= end_s:
                until = _until(task, done, staged, events[:read])
                if until is not done:
                    return until, False
        note = done.note + chunk.note
        return TaskOutput(chunk.position, done.read + read, staged, note), True

    def _deliver_unit(self, task: Task, unit: Sequence[Event]) -> tuple[int, int] | None:
        """Returns how many events the handler got, and how many became dead letters.

        None if the run ends before these events.
        """
        wanted = [event for event in unit if self.how.wants(event)]
        if not self._wait_until_old(task, wanted) or self._is_over():
            return None
        if not wanted:
            return 0, 0
        self._check_owner(task)
        dead = 0
        try:
            error = try_handler(self.handler, self.how, wanted, self.context.random)
            if error is not None and self.how.dead_letter is not None:
                self.how.dead_letter(wanted, error)
                error, dead = None, len(wanted)
        except HandlerStopped:
            return None
        except BaseException as exc:  # noqa: BLE001 - raised when what is done is committed
            error = exc
            self.failure = exc
            return None
        if error is not None and self.how.on_error != "skip":
            self.failure = error
            return None
        count = 0 if error is not None or dead else len(wanted)
        with self._lock:
            self.handled += count
        return count, dead

    def _wait_until_old(self, task: Task, events: Sequence[Event]) -> bool:
        """Waits until events are as old as ``lag_ms`` says; returns False if stopped meanwhile."""
        if self.how.lag_ms and events:
            seen = self._seen[task.range.partition]
            times = [event.timestamp for event in events]
            newest = max((at for at in times if isinstance(at, int)), default=0)
            while (left_ms := newest + self.how.lag_ms - self.context.clock.now_ms()) > 0:
                if seen.is_enough(events[-1]):  # it is dated ahead
                    break
                if self.how.stop.wait(min(left_ms, self.how.lag_ms, 1_000) / 1000):
                    return False
        return True

    def _is_over(self) -> bool:
        return self.failure is not None or self.how.stop.is_set()

    def _check_owner(self, task: Task, *, always: bool = False) -> None:
        """Raises ``FencedError`` if another driver has the source partition, once a second."""
        partition, now_s = task.range.partition, self.context.clock.monotonic_s()
        if not always and now_s - self._looked_s.get(partition, 0.0) < _OWNER_S:
            return
        pipeline = layout.staging_pipeline(task.staging)
        head = read_progress(self.context, pipeline, partition.text)
        if head is None or head.closed or head.epoch != layout.staged_epoch(task.staging):
            raise FencedError(
                f"source partition `{partition.text}`: another process has it now: "
                "this one delivers nothing more",
                partition=partition.text,
            )
        self._looked_s[partition] = now_s


_workers: type[Workers] = HandlerWorkers


def _events(batch: pa.RecordBatch, topic: str) -> list[Event]:
    """Returns the events of a source's batch, with the places that the source gave them."""
    if not batch.num_rows:
        return []
    partition = batch.column("partition")[0].as_py()
    return list(events_of(batch, topic, partition, batch.column("offset").to_numpy()))


def _until(task: Task, done: TaskOutput, staged: Written, handled: Sequence[Event]) -> TaskOutput:
    """Returns the output with the first events of a chunk, or without if no range can end there."""
    reader = task.reader
    if not handled or not isinstance(reader, DividingReader):
        return done
    end = str((handled[-1].offset or 0) + 1)
    if reader.part(task.range.start, end) is None:
        return done
    return replace(done, end=end, read=done.read + len(handled), staged=staged)
