"""Playback by Spark: windows of the range as tasks, where order over slots does not matter.

The driver finds the runs of each window, and a task plays it (``playback_task``). A window is made
of whole slots, so what a task tells of a slot is all there is of it. Into a topic tasks stage
segments, and the driver appends those of the windows in their order, once each; of a driver that is
killed they are left to a sweep. Files of a task take their place when it is done. Into Kafka, which
tells how far a window came, a task that Spark runs again repeats nothing; into other places it may
repeat what it had put.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from pyspark.sql import SparkSession

from tidelog.errors import AlreadyExistsError, InvalidError, UnavailableError
from tidelog.home import Home
from tidelog.log.base import Log
from tidelog.model import layout
from tidelog.model.pipeline import Manifest
from tidelog.model.playback import Pin, TimeRange
from tidelog.model.topic import Topic
from tidelog.pipeline.places import sink_at
from tidelog.pipeline.playback_task import PlayedWindow, Staging, WindowTask, run_window
from tidelog.playback.ahead import Found
from tidelog.playback.outlet_topic import target_of
from tidelog.playback.outlets import check_outlet
from tidelog.playback.planned import planned_runs
from tidelog.playback.run import How, Played
from tidelog.playback.windows import READERS
from tidelog.sinks.base import TargetSink
from tidelog.sinks.segments import keeps_partition

__all__ = ["Window", "plan_windows", "play_parallel"]

Window = tuple[TimeRange, tuple[Found, ...]]  # and the runs that overlap it, by their first time

_TASK_BYTES = 64 << 20  # of events, for a task; a slot that holds more is one all the same
_TASK_BYTES_MIN = 4 << 20
_TASKS_EACH = 4  # for each core at once, so that none waits long for the slowest


def play_parallel(
    home: Home, session: SparkSession, topic: Topic, pin: Pin, sink: str, how: How
) -> Played:
    """Play all; or until it is stopped, which is seen after some tasks for each core.

    ``InvalidError`` for a sink that tasks cannot write to.
    """
    cores = int(session.sparkContext.defaultParallelism)
    target = _Target(home, sink)
    with ThreadPoolExecutor(READERS, "tidelog-playback") as pool:
        windows = plan_windows(home.log, topic, pin, cores, pool)
    tasks = [target.aimed(_task(home, topic, pin, window)) for window in windows]
    played = Played()
    span = home.log.spans.span("tidelog.playback", topic=topic.name, windows=len(tasks))
    with span, contextlib.closing(target):
        for first in range(0, len(tasks), cores * _TASKS_EACH):
            if how.stopped():
                break
            for window in _run(session, tasks[first : first + cores * _TASKS_EACH]):
                played.left_out += target.publish(window, played.events)
                played.events += window.events
                played.slots += len(window.slots)
                played.last = window.last or played.last
                for slot in window.slots:
                    how.on_slot(slot)
    played.finished = not how.stopped()
    return played


def plan_windows(
    log: Log, topic: Topic, pin: Pin, cores: int, pool: Executor | None = None
) -> list[Window]:
    """Windows of whole slots, but for the ends of the range; those without runs are left out."""
    found = planned_runs(log, topic, pin, pool)
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


def _windows(found: list[Found], cuts: list[int]) -> Iterator[Window]:
    waiting = list(reversed(found))
    begun: list[Found] = []
    for start_ms, end_ms in pairwise(cuts):
        begun = [each for each in begun if each.last_ms >= start_ms]
        while waiting and waiting[-1].first_ms < end_ms:
            begun.append(waiting.pop())
        runs = sorted(replace(each, first_ms=max(each.first_ms, start_ms)) for each in begun)
        if runs:
            yield TimeRange(start_ms, end_ms), tuple(runs)


def _task(home: Home, topic: Topic, pin: Pin, window: Window) -> WindowTask:
    times, runs = window
    partitions = {each.partition for each in runs}
    return WindowTask(
        topic=topic.name,
        slot_ms=topic.slot_ms,
        times=times,
        runs=runs,
        bounds={p: (pin.starts[p], pin.ends[p]) for p in partitions},
        store=home.store.url,
        sink="",
        id="",
    )


def _run(session: SparkSession, tasks: Sequence[WindowTask]) -> list[PlayedWindow]:
    """All tasks, in the order of their windows; raises the first error."""
    blobs = [pickle.dumps(task) for task in tasks]
    try:
        parallel = session.sparkContext.parallelize(blobs, len(blobs))
        done = [pickle.loads(blob) for blob in parallel.map(_run_pickled).collect()]  # noqa: S301
    except Exception as exc:
        lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
        reason = lines[0][:200] if lines else type(exc).__name__
        raise UnavailableError(f"Spark: the job failed ({reason}): play again") from exc
    for window in done:
        if window.error is not None:
            raise window.error
    return done


def _run_pickled(blob: bytes) -> bytes:
    return pickle.dumps(run_window(pickle.loads(blob)))  # noqa: S301 - our own bytes


class _Target:
    """Where tasks put events, and what the driver does with it."""

    def __init__(self, home: Home, sink: str) -> None:
        self._home = home
        self._id = home.log.ids.new()
        self._address = check_outlet(sink, named=False)
        self._folder: Path | None = None
        self._staging: Staging | None = None
        self._topic: TargetSink | None = None
        if self._address.scheme == "stdout":
            raise InvalidError(
                "sink `stdout:`: tasks have no standard output of yours: leave out --parallel, or "
                "play into files"
            )
        if self._address.scheme == "file":
            self._folder = _fresh_folder(Path(self._address.path).absolute())
        if self._address.scheme == "topic":
            topic = target_of(home.log, self._address)
            self._topic = sink_at(home, sink)
            self._staging = Staging(
                topic=topic,
                keep_partition=keeps_partition(self._address),
                folder=layout.staging(layout.playback_staging(self._id), 0, "windows"),
            )

    def aimed(self, task: WindowTask) -> WindowTask:
        """The task with where it puts its events."""
        window = f"{task.times.start_ms:015}"
        named = replace(task, id=f"{self._id}-{window}", sink=self._address.text)
        if self._folder is not None:
            part = self._folder / f"part-{window}{self._folder.suffix or '.jsonl'}"
            return replace(named, sink=str(part), is_file=True)
        if self._staging is not None:
            return replace(named, staging=self._staging)
        return named

    def publish(self, window: PlayedWindow, number: int) -> int:
        """Append what a task has staged, after what came before it; how many were left out."""
        if self._topic is None or window.staged is None or not window.staged.files:
            return 0
        manifest = Manifest(
            pipeline=f"~playback-{self._id}",  # a producer that sweeps may forget in time
            partition="windows",
            start=str(window.times.start_ms),
            end=str(window.times.end_ms),
            ordinal=number,
            read=window.events,
            written=window.events,
            files=window.staged.files,
        )
        with self._home.log.spans.span("tidelog.publish", events=window.events):
            left_out = self._topic.publish(manifest)
        self._topic.discard(manifest)
        return left_out or 0

    def close(self) -> None:
        """Remove what attempts have staged and nobody needs."""
        if self._staging is not None:
            folder = layout.staging_of(layout.playback_staging(self._id))
            self._home.store.delete([info.key for info in self._home.store.list(folder)])


def _fresh_folder(path: Path) -> Path:
    """An empty folder for the files of tasks."""
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
