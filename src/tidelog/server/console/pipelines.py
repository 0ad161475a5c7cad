"""Archives, pumps and keepers as they were seen last: in a thread of its own, as some are slow.

A source that hangs holds up this thread alone; pages show what was known before, and since when.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tidelog.archive.archive import list_archives
from tidelog.archive.status import ArchiveStatus, Limits, WaitingTimes, read_status, troubles
from tidelog.connectors.source import Bounds, SourcePartition
from tidelog.coordination.pipeline_rows import read_partitions, read_progress
from tidelog.coordination.supervisors import Keeper, Keepers
from tidelog.errors import TidelogError
from tidelog.home import Home
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.model.partition_rows import decode_row
from tidelog.model.pipeline import Intent, NamedPipeline, Totals
from tidelog.pipeline.endpoints import source_at
from tidelog.pipeline.failures import read_failures
from tidelog.pipeline.registry import list_pipelines
from tidelog.pipeline.source_partitions import track
from tidelog.server.http.errors import shape

__all__ = [
    "ArchiveSeen",
    "Pipelines",
    "PipelinesSeen",
    "PumpPartition",
    "PumpSeen",
    "see_archive",
    "see_pump",
]

_BUSY_S = 5.0
_IDLE_S = 60.0
_FIRST_S = 0.5  # in which most have been seen once, after a start


@dataclass(frozen=True, slots=True)
class ArchiveSeen:
    """One archive; without a status where it could not be read."""

    archive: Archive
    status: ArchiveStatus | None
    troubles: tuple[str, ...]

    @property
    def dead(self) -> int:
        return sum(each.dead for each in self.status.partitions) if self.status else 0

    @property
    def events(self) -> int:
        return sum(each.events for each in self.status.partitions) if self.status else 0

    @property
    def intents(self) -> int:
        return sum(each.stuck for each in self.status.partitions) if self.status else 0


@dataclass(frozen=True, slots=True)
class PumpPartition:
    """How far a pump has come in one source partition."""

    partition: str
    position: str
    end: str | None
    lag: int | None
    events: int
    totals: Totals
    intent_ms: int | None


@dataclass(frozen=True, slots=True)
class PumpSeen:
    """One pump, or another pipeline with a name of its own."""

    named: NamedPipeline
    partitions: tuple[PumpPartition, ...]
    error: str
    read_ms: int

    @property
    def lag(self) -> int | None:
        known = [each.lag for each in self.partitions if each.lag is not None]
        return sum(known) if known else None

    @property
    def events(self) -> int:
        return sum(each.events for each in self.partitions)


@dataclass(frozen=True, slots=True)
class PipelinesSeen:
    """All of them, how the store does, and what `tidelog up` keeps running."""

    read_ms: int = 0
    archives: tuple[ArchiveSeen, ...] = ()
    pumps: tuple[PumpSeen, ...] = ()
    store_ms: float | None = None  # how long a small read took
    catalog_ms: float | None = None
    store_error: str = ""
    keepers: tuple[Keeper, ...] = ()


class Pipelines:
    """Looks at them again and again. Start it, and stop it."""

    def __init__(self, home: Home, is_busy: Callable[[], bool]) -> None:
        self.seen = PipelinesSeen()
        self._home = home
        self._is_busy = is_busy
        self._waiting = WaitingTimes()
        self._keepers = Keepers(home.context)
        self._first = threading.Event()  # they were seen once
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tidelog-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def look(self) -> PipelinesSeen:
        """What was seen last; where that is old, they are looked at soon."""
        self._first.wait(_FIRST_S)
        if self._home.context.clock.now_ms() - self.seen.read_ms > 1000 * _BUSY_S:
            self._wake.set()
        return self.seen

    def wake(self) -> None:
        """Look soon, as somebody has changed something or looks again."""
        self._wake.set()

    def stop(self) -> None:
        """Look no more; a source that hangs is not waited for."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.seen = self._look()
            except TidelogError:
                pass  # the sampler tells that the catalog cannot be read
            except Exception:  # noqa: BLE001 - a source that is broken in its own way
                if self._stop.is_set():
                    return  # the home is closed
            self._first.set()
            self._wake.wait(_BUSY_S if self._is_busy() else _IDLE_S)
            self._wake.clear()

    def _look(self) -> PipelinesSeen:
        home, clock = self._home, self._home.context.clock
        store_ms, store_error = None, ""
        try:
            began_s = clock.monotonic_s()
            home.store.head(layout.HOME_OBJECT)
            store_ms = (clock.monotonic_s() - began_s) * 1000
        except TidelogError as exc:
            store_error = shape(exc)["error"]["message"]
        began_s = clock.monotonic_s()
        home.catalog.get(layout.HOME_PARTITION, layout.HOME_ROW)
        catalog_ms = (clock.monotonic_s() - began_s) * 1000
        archives = [each for each in list_archives(home.context) if each.state == "ready"]
        pumps = [each for each in list_pipelines(home.context) if each.state == "ready"]
        return PipelinesSeen(
            clock.now_ms(),
            tuple(see_archive(home, each, self._waiting) for each in archives),
            tuple(see_pump(home, each) for each in pumps),
            store_ms,
            catalog_ms,
            store_error,
            tuple(self._keepers.list()),
        )


def see_archive(home: Home, archive: Archive, waiting: WaitingTimes | None = None) -> ArchiveSeen:
    """How an archive does now."""
    try:
        status = read_status(home.context, archive, waiting=waiting)
    except TidelogError as exc:
        return ArchiveSeen(archive, None, (f"archive `{archive.name}`: {exc}",))
    return ArchiveSeen(archive, status, tuple(troubles(status, Limits())))


def see_pump(home: Home, named: NamedPipeline) -> PumpSeen:
    """How a pump does now; a source that cannot be reached leaves what the rows say."""
    context, error = home.context, ""
    bounds: dict[SourcePartition, Bounds] = {}
    source = None
    try:
        source = source_at(home.context, named.source)
        track(context, named.incarnation, source)
        bounds = source.bounds(source.partitions())
    except TidelogError as exc:
        error = f"its source cannot be reached: {exc}"
    failures = read_failures(context, named.incarnation)
    if not error and failures:
        name, failure = next(iter(failures.items()))
        error = f"{name or 'its source'}: {failure.message}"
    found = []
    for name in sorted(
        {each.text for each in bounds} | set(read_partitions(context, named.incarnation))
    ):
        partition = SourcePartition.named(name)
        progress = read_progress(context, named.incarnation, name)
        held = bounds.get(partition)
        position = progress.position if progress else (held.first if held else "")
        row = context.catalog.get(layout.pipeline_partition(named.incarnation, name), "intent")
        intent = decode_row(row.value, Intent, f"intent of `{name}`") if row else None
        lag = source.count(position, held.end) if source and held else None
        found.append(
            PumpPartition(
                name,
                position,
                held.end if held else None,
                lag,
                progress.ordinal if progress else 0,
                progress.totals if progress else Totals(),
                intent.began_ms if intent else None,
            )
        )
    return PumpSeen(named, tuple(found), error, context.clock.now_ms())
