"""One window of a playback by Spark: what a task is told, and what it does, wherever it runs.

It needs nothing but the store. The events of its window come out by time, into an outlet of the
task's own; or, for a topic, into segments that the driver appends.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tidelog.clock import RandomIds
from tidelog.errors import NotFoundError, TidelogError, unexpected
from tidelog.model.limits import BATCH_EVENTS_MAX
from tidelog.model.playback import Cursor, TimeRange
from tidelog.model.topic import Topic
from tidelog.playback.ahead import Found
from tidelog.playback.held import Rows, Wanted
from tidelog.playback.load import Loader
from tidelog.playback.outlet_file import WholeFile
from tidelog.playback.outlet_topic import places_in
from tidelog.playback.outlets import Lot, Outlet, Setting, lots_of, open_outlet
from tidelog.playback.pace import SlotCount, SlotCounter
from tidelog.playback.run import opened
from tidelog.playback.windows import Bounds, Windows
from tidelog.sinks.base import Written
from tidelog.sinks.segments import SegmentWriter, Target
from tidelog.store.base import Store
from tidelog.store.here import open_store_here

__all__ = ["PlayedWindow", "Staging", "WindowTask", "run_window"]

_READERS = 4  # runs that a task fetches at once
_BOUNDS = Bounds(window_bytes=16 << 20, ahead_bytes=32 << 20, held_bytes=64 << 20)  # of each task


@dataclass(frozen=True)
class Staging:
    """How segments are staged for a topic; plain values."""

    topic: Topic
    keep_partition: bool
    folder: str


@dataclass(frozen=True)
class WindowTask:
    """A window to play, with all that is needed to do it anywhere; picklable."""

    topic: str
    slot_ms: int
    times: TimeRange
    runs: tuple[Found, ...]  # by the time of their first event
    bounds: dict[int, tuple[int, int]]  # of partitions, as they were pinned
    store: str  # URL
    sink: str  # URL of an outlet, or the path of a file
    id: str  # of the playback and the window
    is_file: bool = False
    staging: Staging | None = None


@dataclass(frozen=True)
class PlayedWindow:
    """What came of a task."""

    times: TimeRange
    slots: tuple[SlotCount, ...] = ()
    last: Cursor | None = None
    staged: Written | None = None
    error: TidelogError | None = None

    @property
    def events(self) -> int:
        return sum(slot.events for slot in self.slots)


def run_window(task: WindowTask) -> PlayedWindow:
    """Play one window; what a person can mend becomes its error."""
    store = open_store_here(task.store)
    counter = SlotCounter(task.slot_ms, task.times.start_ms, task.times.end_ms)
    slots: list[SlotCount] = []
    last: Cursor | None = None
    outlet: Outlet | None = None
    try:
        with opened(lambda: _open(task, store)) as outlet, ThreadPoolExecutor(_READERS) as pool:
            for lot in _lots(task, store, outlet, pool):
                outlet.put(lot)
                slots += counter.add(lot.batch)
                last = lot.last
    except Exception as exc:  # noqa: BLE001 - one window must not stop the others
        return PlayedWindow(task.times, error=unexpected("playback window", exc))
    slots += counter.rest()
    staged = outlet.staged if isinstance(outlet, _StagingOutlet) else None
    return PlayedWindow(task.times, tuple(slots), last, staged)


def _lots(task: WindowTask, store: Store, outlet: Outlet, pool: Executor) -> Iterator[Lot]:
    load = functools.partial(_load, task, Loader(store, task.topic))
    ahead = _Planned(task.runs)
    windows = Windows(task.topic, ahead, load, task.times.end_ms, _BOUNDS, pool)
    number = 0
    try:
        for batch in windows.batches():
            for part in lots_of(batch, outlet):
                lot = Lot(number, part)
                yield lot
                number = lot.end
    finally:
        windows.stop()


def _load(task: WindowTask, loader: Loader, found: Found) -> Rows:
    start, end = task.bounds[found.partition]
    wanted = Wanted(found.partition, task.times.start_ms, task.times.end_ms, start, end)
    try:
        return loader.load(found, wanted, found.amendments)
    except NotFoundError as exc:
        raise NotFoundError(
            f"object `{exc.context.get('key', found.run.object)}`: is gone: events of offsets "
            f"{found.run.base} to {found.run.end} of `{task.topic}/{found.partition}` were trimmed "
            "or compiled while they were played, or it is lost: play again, or run `tidelog verify`"
        ) from exc


def _open(task: WindowTask, store: Store) -> Outlet:
    if task.is_file:
        return WholeFile(Path(task.sink), RandomIds().new(), replaces=True)
    if task.staging is not None:
        return _StagingOutlet(task.staging, task.sink, store)
    environ = os.environ  # noqa: TID251 - a worker's world comes in here
    return open_outlet(task.sink, Setting(environ, task.id))


class _Planned:
    """The runs of a task, as a playback takes them."""

    def __init__(self, runs: tuple[Found, ...]) -> None:
        self._left = deque(runs)

    def peek(self) -> Found | None:
        return self._left[0] if self._left else None

    def take(self) -> Found:
        return self._left.popleft()


class _StagingOutlet:
    """Segments in staging, for a topic."""

    lot_events = BATCH_EVENTS_MAX
    lot_bytes = None

    def __init__(self, staging: Staging, url: str, store: Store) -> None:
        place = functools.partial(places_in, staging.topic, staging.keep_partition)
        target = Target(url)
        self._writer = SegmentWriter(store, staging.folder, target, place)
        self.staged: Written | None = None

    def put(self, lot: Lot) -> None:
        self._writer.write(lot.batch)

    def reached(self) -> int:
        return 0

    def close(self, failed: bool = False) -> None:
        if not failed:
            self.staged = self._writer.close()


_: type[Outlet] = _StagingOutlet
