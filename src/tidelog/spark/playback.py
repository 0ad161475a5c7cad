"""Plays back with Spark: each task plays a window, and order across slots does not matter.

The driver finds the runs of each window, and a task plays it. A window consists of whole slots, so
a task reports each of its slots completely. For a topic, tasks stage segments, and the driver
appends those of the windows in order, once each; if the driver is killed, a sweep deletes them.
Files of a task are renamed to their place when it is done. Kafka stores how far a window got, so a
repeated task repeats nothing there; in other places it may repeat what it had put.

A task needs only the store: its plan has the runs and their amendments. The events of its window
come out by time, into the task's own sink or, for a topic, into segments that the driver appends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from tidelog.catalog.update import read_stable
from tidelog.clock import RandomIds
from tidelog.concurrency import Pool
from tidelog.connectors.by_url import sink_at
from tidelog.connectors.files.playback_sink import WholeFile
from tidelog.connectors.sink import (
    Lot,
    PlaybackSink,
    SinkContext,
    TargetSink,
    WriterResult,
    check_playback_sink,
    lots_of,
    open_playback_sink,
)
from tidelog.connectors.topic.segments import SegmentTarget, SegmentWriter, keeps_partition
from tidelog.connectors.topic.sink import places_in, target_of
from tidelog.context import Context
from tidelog.errors import (
    AlreadyExistsError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    unexpected,
)
from tidelog.model import layout
from tidelog.model.event import to_iso
from tidelog.model.limits import BATCH_EVENTS_MAX
from tidelog.model.pipeline import Manifest
from tidelog.model.playback import Cursor, Pin, TimeRange
from tidelog.model.topic import Topic
from tidelog.playback.merge import READERS, BufferBounds, EventFilter, Loader, TimedRows, Windows
from tidelog.playback.play import PlaybackOptions, PlaybackResult, SlotCount, SlotCounter, opened
from tidelog.playback.run_queue import FoundRun, RunQueue, SwapGuard, SwappedError
from tidelog.spark.failures import job_error, keep_modules
from tidelog.spark.session import cores_of, named_job, numbered
from tidelog.store import open_store_here
from tidelog.store.base import Store

__all__ = [
    "PlayedWindow",
    "Window",
    "WindowStaging",
    "WindowTask",
    "plan_windows",
    "planned_runs",
    "play_parallel",
    "run_window",
]

# A range, and the runs that overlap it by first time.
Window = tuple[TimeRange, tuple[FoundRun, ...]]

_TASK_BYTES = 64 << 20  # of events per task; a slot with more is still one task
_TASK_BYTES_MIN = 4 << 20
_OUTCOMES = "number bigint, outcome binary"
_TASKS_EACH = 4  # per core at once, so that none waits long for the slowest


def play_parallel(
    context: Context, session: SparkSession, topic: Topic, pin: Pin, sink: str, how: PlaybackOptions
) -> PlaybackResult:
    """Plays everything, or until stopped, which is checked after some tasks per core.

    Raises ``InvalidError`` for a sink that tasks cannot write to.
    """
    cores = cores_of(session)
    target = _Target(context, sink)
    with Pool(READERS, "tidelog-playback") as pool:
        windows = plan_windows(context, topic, pin, cores, pool)
    tasks = [target.aimed(_task(context, topic, pin, window)) for window in windows]
    played = PlaybackResult()
    span = context.spans.span("tidelog.playback", topic=topic.name, windows=len(tasks))
    with span, contextlib.closing(target):
        for first in range(0, len(tasks), cores * _TASKS_EACH):
            if how.stopped():
                break
            with _say_played(played):
                for window in _run(session, tasks[first : first + cores * _TASKS_EACH]):
                    played.left_out += target.publish(window, played.events)
                    played.events += window.events
                    played.slots += len(window.slots)
                    played.last = window.last or played.last
                    for slot in window.slots:
                        how.on_slot(slot)
    played.finished = not how.stopped()
    return played


@contextlib.contextmanager
def _say_played(played: PlaybackResult) -> Iterator[None]:
    """Adds to an error which events are in the target already, so that they are not repeated."""
    try:
        yield
    except TidelogError as exc:
        if played.last is None:
            raise
        rest = to_iso(played.last.time_ms + 1)
        raise type(exc)(
            f"{exc}; {played.events} events before {rest} were already played: play the rest by "
            f"starting at {rest}",
            **exc.context,
        ) from exc


def plan_windows(
    context: Context, topic: Topic, pin: Pin, cores: int, pool: Executor | None = None
) -> list[Window]:
    """Returns windows of whole slots, except at the ends of the range; skips empty ones."""
    found = planned_runs(context, topic, pin, pool)
    total = sum(each.raw_bytes for each in found)
    task_bytes = max(_TASK_BYTES_MIN, min(_TASK_BYTES, total // (cores * _TASKS_EACH)))
    cuts = [pin.range.start_ms]
    held = 0
    for each in found:
        slot = each.first_ms // topic.slot_ms * topic.slot_ms
        if held + each.raw_bytes > task_bytes and slot > cuts[-1]:
            cuts.append(slot)
            held = 0
        held += each.raw_bytes
    return list(_windows(found, [*cuts, pin.range.end_ms]))


def _windows(found: list[FoundRun], cuts: list[int]) -> Iterator[Window]:
    waiting = list(reversed(found))
    begun: list[FoundRun] = []
    for start_ms, end_ms in pairwise(cuts):
        begun = [each for each in begun if each.last_ms >= start_ms]
        while waiting and waiting[-1].first_ms < end_ms:
            begun.append(waiting.pop())
        runs = sorted(replace(each, first_ms=max(each.first_ms, start_ms)) for each in begun)
        if runs:
            yield TimeRange(start_ms, end_ms), tuple(runs)


def _task(context: Context, topic: Topic, pin: Pin, window: Window) -> WindowTask:
    times, runs = window
    partitions = {each.partition for each in runs}
    return WindowTask(
        topic=topic.name,
        slot_ms=topic.slot_ms,
        times=times,
        runs=runs,
        bounds={p: (pin.starts[p], pin.ends[p]) for p in partitions},
        store=context.store.url,
        sink="",
        id="",
    )


def _run(session: SparkSession, tasks: Sequence[WindowTask]) -> list[PlayedWindow]:
    """Runs all tasks. Returns results in the order of their windows; raises the first error."""
    blobs = [pickle.dumps(task) for task in tasks]
    try:
        rows = numbered(session, len(blobs)).mapInArrow(
            functools.partial(_run_windows, blobs), _OUTCOMES
        )
        with named_job(session, "tidelog-playback", f"playback of {tasks[0].topic}"):
            found = {row["number"]: row["outcome"] for row in rows.collect()}
        done = [pickle.loads(found[number]) for number in range(len(blobs))]  # noqa: S301 - ours
    except Exception as exc:
        raise job_error(exc, "play again") from exc
    for window in done:
        if window.error is not None:
            raise window.error
    return done


def _run_windows(
    blobs: Sequence[bytes], numbers: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Runs in a Spark task."""
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            played = pickle.dumps(run_window(pickle.loads(blobs[number])))  # noqa: S301 - ours
            columns = [pa.array([number], pa.int64()), pa.array([played], pa.binary())]
            yield pa.record_batch(columns, ["number", "outcome"])
    keep_modules()


class _Target:
    """Where tasks put events, and what the driver does with it."""

    def __init__(self, context: Context, sink: str) -> None:
        self._context = context
        self._id = context.ids.new()
        self._address = check_playback_sink(sink, named=False)
        self._folder: Path | None = None
        self._staging: WindowStaging | None = None
        self._topic: TargetSink | None = None
        if self._address.scheme == "stdout":
            raise InvalidError(
                "sink `stdout:`: tasks have no standard output of yours: leave out --parallel, or "
                "play into files"
            )
        if self._address.scheme == "file":
            self._folder = _fresh_folder(Path(self._address.path).absolute())
        if self._address.scheme == "topic":
            topic = target_of(context, self._address)
            self._topic = sink_at(context, sink)
            self._staging = WindowStaging(
                topic=topic,
                keep_partition=keeps_partition(self._address),
                folder=layout.staging(layout.playback_staging(self._id), "all", 0, "windows"),
            )

    def aimed(self, task: WindowTask) -> WindowTask:
        """Returns the task with its target."""
        window = f"{task.times.start_ms:015}"
        named = replace(task, id=f"{self._id}-{window}", sink=self._address.text)
        if self._folder is not None:
            part = self._folder / f"part-{window}{self._folder.suffix or '.jsonl'}"
            return replace(named, sink=str(part), is_file=True)
        if self._staging is not None:
            return replace(named, staging=self._staging)
        return named

    def publish(self, window: PlayedWindow, number: int) -> int:
        """Appends what a task staged, after what came before it. Returns how many were skipped."""
        if self._topic is None or window.staged is None or not window.staged.files:
            return 0
        manifest = Manifest(
            pipeline=f"~playback-{self._id}",  # a producer that sweeps may delete in time
            partition="windows",
            start=str(window.times.start_ms),
            end=str(window.times.end_ms),
            ordinal=number,
            read=window.events,
            written=window.events,
            files=window.staged.files,
        )
        with self._context.spans.span("tidelog.publish", events=window.events):
            left_out = self._topic.publish(manifest)
        self._topic.discard(manifest)
        return left_out or 0

    def close(self) -> None:
        """Deletes what attempts staged and is not needed."""
        if self._staging is not None:
            folder = layout.staging_of(layout.playback_staging(self._id))
            self._context.store.delete([info.key for info in self._context.store.list(folder)])


def _fresh_folder(path: Path) -> Path:
    """Returns an empty folder for the files of tasks."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise AlreadyExistsError(f"folder `{path}`: is not empty: choose another, or empty it")
    except OSError as exc:
        raise InvalidError(
            f"sink `file:{path}`: {exc.strerror}: tasks put their files into a folder of this "
            "name: choose another"
        ) from exc
    return path


_READERS = 4  # runs that a task fetches in parallel
_BOUNDS = BufferBounds(window_bytes=16 << 20, ahead_bytes=32 << 20, held_bytes=64 << 20)  # per task


@dataclass(frozen=True)
class WindowStaging:
    """How to stage segments for a topic; plain values."""

    topic: Topic
    keep_partition: bool
    folder: str


@dataclass(frozen=True)
class WindowTask:
    """A window to play, with everything needed to do it anywhere; picklable."""

    topic: str
    slot_ms: int
    times: TimeRange
    runs: tuple[FoundRun, ...]  # by the time of their first event
    bounds: dict[int, tuple[int, int]]  # of partitions, as pinned
    store: str  # URL
    sink: str  # URL of a sink, or the path of a file
    id: str  # of the playback and the window
    is_file: bool = False
    staging: WindowStaging | None = None


@dataclass(frozen=True)
class PlayedWindow:
    """The outcome of a task."""

    times: TimeRange
    slots: tuple[SlotCount, ...] = ()
    last: Cursor | None = None
    staged: WriterResult | None = None
    error: TidelogError | None = None

    @property
    def events(self) -> int:
        return sum(slot.events for slot in self.slots)


def run_window(task: WindowTask) -> PlayedWindow:
    """Plays one window. What a person can fix becomes its error."""
    store = open_store_here(task.store)
    counter = SlotCounter(task.slot_ms, task.times.start_ms, task.times.end_ms)
    slots: list[SlotCount] = []
    last: Cursor | None = None
    sink: PlaybackSink | None = None
    try:
        with opened(lambda: _open(task, store)) as sink, Pool(_READERS) as pool:
            for lot in _lots(task, store, sink, pool):
                sink.put(lot)
                slots += counter.add(lot.batch)
                last = lot.last
    except Exception as exc:  # noqa: BLE001 - one window must not stop the others
        return PlayedWindow(task.times, error=unexpected("playback window", exc))
    slots += counter.rest()
    staged = sink.staged if isinstance(sink, _StagingPlaybackSink) else None
    return PlayedWindow(task.times, tuple(slots), last, staged)


def _lots(task: WindowTask, store: Store, sink: PlaybackSink, pool: Executor) -> Iterator[Lot]:
    load = functools.partial(_load, task, Loader(store, task.topic))
    ahead = _PlannedRuns(task.runs)
    windows = Windows(task.topic, ahead, load, task.times.end_ms, _BOUNDS, pool)
    number = 0
    try:
        for batch in windows.batches():
            for part in lots_of(batch, sink):
                lot = Lot(number, part)
                yield lot
                number = lot.end
    finally:
        windows.stop()


def _load(task: WindowTask, loader: Loader, found: FoundRun) -> TimedRows:
    start, end = task.bounds[found.partition]
    wanted = EventFilter(found.partition, task.times.start_ms, task.times.end_ms, start, end)
    try:
        return loader.load(found, wanted, found.amendments)
    except NotFoundError as exc:
        raise NotFoundError(
            f"object `{exc.context.get('key', found.run.object)}`: is gone: events of offsets "
            f"{found.run.base} to {found.run.end} of `{task.topic}/{found.partition}` were trimmed "
            "or compiled while they were played, or it is lost: play again, or run `tidelog verify`"
        ) from exc


def _open(task: WindowTask, store: Store) -> PlaybackSink:
    if task.is_file:
        return WholeFile(Path(task.sink), RandomIds().new(), replaces=True)
    if task.staging is not None:
        return _StagingPlaybackSink(task.staging, task.sink, store)
    environ = os.environ  # noqa: TID251 - a worker reads its own environment
    return open_playback_sink(task.sink, SinkContext(environ, task.id))


class _PlannedRuns:
    """The runs of a task, as a playback expects them."""

    def __init__(self, runs: tuple[FoundRun, ...]) -> None:
        self._left = deque(runs)

    def peek(self) -> FoundRun | None:
        return self._left[0] if self._left else None

    def take(self) -> FoundRun:
        return self._left.popleft()


class _StagingPlaybackSink:
    """Stages segments for a topic."""

    lot_events = BATCH_EVENTS_MAX
    lot_bytes = None

    def __init__(self, staging: WindowStaging, url: str, store: Store) -> None:
        place = functools.partial(places_in, staging.topic, staging.keep_partition)
        target = SegmentTarget(url)
        self._writer = SegmentWriter(store, staging.folder, target, place)
        self.staged: WriterResult | None = None

    def put(self, lot: Lot) -> None:
        self._writer.write(lot.batch)

    def reached(self) -> int:
        return 0

    def close(self, failed: bool = False) -> None:
        if not failed:
            self.staged = self._writer.close()


_: type[PlaybackSink] = _StagingPlaybackSink


def planned_runs(
    context: Context, topic: Topic, pin: Pin, pool: Executor | None = None
) -> list[FoundRun]:
    """Returns the runs of what was pinned, by first time, each with its current amendments.

    Raises ``NotFoundError`` if some events were trimmed, ``UnavailableError`` if compiles keep
    changing the runs.
    """

    def read() -> list[FoundRun] | None:
        guard = SwapGuard(context, topic)
        try:
            return _find_runs(guard, pin, pool)
        except SwappedError:
            return None
        except NotFoundError:
            if not _is_swapped(guard):
                raise
            return None

    busy = UnavailableError(f"topic `{topic.name}`: is being compiled: play again")
    return read_stable(context, read, busy)


def _find_runs(guard: SwapGuard, pin: Pin, pool: Executor | None) -> list[FoundRun]:
    loader = Loader(guard.context.store, guard.topic.name)
    queue = RunQueue(guard, pin, pin.range, loader.groups, pool)
    found: list[FoundRun] = []
    while queue.peek() is not None:
        found.append(queue.take())
    amended: dict[int, FoundRun] = {}
    for partition in {each.partition for each in found}:
        amended |= _with_amendments(guard, partition, found)
    return [amended.get(number, each) for number, each in enumerate(found)]


def _with_amendments(
    guard: SwapGuard, partition: int, found: list[FoundRun]
) -> Iterator[tuple[int, FoundRun]]:
    """Yields the runs of a partition that have amendments, by number."""
    numbers = [number for number, each in enumerate(found) if each.partition == partition]
    start = min(found[number].base for number in numbers)
    end = max(found[number].end for number in numbers)
    all_of_them = guard.amendments(partition, start, end, guard.check(partition))
    for number in numbers:
        each = found[number]
        amendments = all_of_them.of_run(each.run).between(each.base, each.end)
        if len(amendments):
            yield number, replace(each, amendments=amendments)


def _is_swapped(guard: SwapGuard) -> bool:
    """Returns whether something that is missing may have been compiled."""
    try:
        for partition in range(guard.topic.partitions):
            guard.check(partition)
    except SwappedError:
        return True
    return False
