"""Streams: pass the events of any source to a Python handler, without a topic in between.

A stream calls its handler at least once for each event. It is a
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

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from tidelog.codec.event_batch import events_of
from tidelog.concurrency import Pool
from tidelog.connectors.archive.source import ArchiveSource
from tidelog.connectors.by_url import refuse_archive_folder, source_at
from tidelog.connectors.sink import RangeWriter, TargetSink, WriterResult
from tidelog.connectors.source import Chunk, DividingReader, SourcePartition
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.errors import (
    FencedError,
    InternalError,
    InvalidError,
    UnavailableError,
    unexpected,
)
from tidelog.log.consumer.handler import HandlerOptions, HandlerStopped, KnownSince, try_handler
from tidelog.model import layout
from tidelog.model.event import Event
from tidelog.model.pipeline import Manifest, NamedPipeline
from tidelog.pipeline.pipeline import CycleReport, Pipeline
from tidelog.pipeline.pump import refuse_moving_start
from tidelog.pipeline.registry import check_behind, check_reach, ensure_pipeline
from tidelog.pipeline.tasks import LocalWorkers, Task, TaskOutcome, TaskOutput, Workers

__all__ = ["HandlerFailed", "HandlerWorkers", "is_stream", "open_stream", "stream_pipeline"]


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

    def publish(self, manifest: Manifest) -> int:
        """Does nothing: the handler has the events."""
        return 0

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
            return TaskOutcome(partition, self._deliver(task), part=task.part)
        except Exception as exc:  # noqa: BLE001 - one source partition must not stop the others
            error = unexpected(f"source partition `{partition.text}`", exc)
            return TaskOutcome(partition, error=error, part=task.part)

    def _deliver(self, task: Task) -> TaskOutput:
        """Returns how far the handler got. A range that it did not begin ends where it starts."""
        done = TaskOutput(task.range.start, 0, WriterResult())
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
            staged = replace(staged, events=staged.events + got[0], dead=staged.dead + got[1])
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


def _until(
    task: Task, done: TaskOutput, staged: WriterResult, handled: Sequence[Event]
) -> TaskOutput:
    """Returns the output with the first events of a chunk, or without if no range can end there."""
    reader = task.reader
    if not handled or not isinstance(reader, DividingReader):
        return done
    end = str((handled[-1].offset or 0) + 1)
    if reader.part(task.range.start, end) is None:
        return done
    return replace(done, end=end, read=done.read + len(handled), staged=staged)
