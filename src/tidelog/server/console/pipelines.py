"""Archives, pumps and keepers as they were seen last: in a thread of its own, as some are slow.

A source that hangs holds up this thread alone; pages show what was known before, and since when.

Work that takes longer than a request: playbacks and replays that somebody started here.

A few run at once, in threads of this process; those that ended are remembered for a while. When the
server stops, they are asked to stop too: what they do can be killed and done again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tidelog.api.archives import ArchiveHandle
from tidelog.archive.status import ArchiveStatus, Limits, WaitingTimes, troubles
from tidelog.context import Context
from tidelog.coordination.supervisors import Keeper, Keepers
from tidelog.errors import NotFoundError, TidelogError
from tidelog.home import Home
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.pipeline.pump import PumpStatus
from tidelog.server.http.errors import BusyError, shape

__all__ = ["ArchiveSeen", "Job", "Jobs", "Pipelines", "PipelinesSeen", "see_archive"]

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
class PipelinesSeen:
    """All of them, how the store does, and what `tidelog up` keeps running."""

    read_ms: int = 0
    archives: tuple[ArchiveSeen, ...] = ()
    pumps: tuple[PumpStatus, ...] = ()
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
        archives = [each for each in home.archives.list() if each.info.state == "ready"]
        pumps = [each for each in home.pumps.list(restores=True) if each.info.state == "ready"]
        return PipelinesSeen(
            clock.now_ms(),
            tuple(see_archive(each, self._waiting) for each in archives),
            tuple(each.status() for each in pumps),
            store_ms,
            catalog_ms,
            store_error,
            tuple(self._keepers.list()),
        )


def see_archive(archive: ArchiveHandle, waiting: WaitingTimes | None = None) -> ArchiveSeen:
    """How an archive does now."""
    try:
        status = archive.status(waiting=waiting)
    except TidelogError as exc:
        return ArchiveSeen(archive.info, None, (f"archive `{archive.name}`: {exc}",))
    return ArchiveSeen(archive.info, status, tuple(troubles(status, Limits())))


_RUNNING_MAX = 4
_KEPT_MAX = 50
_STOP_S = 10.0  # in which all should have stopped


@dataclass(slots=True)
class Job:
    """One piece of work."""

    id: str
    what: str
    link: str  # the page that it belongs to
    began_ms: int
    state: Literal["running", "done", "stopped", "failed"] = "running"
    says: str = ""
    done: int = 0  # events so far
    ended_ms: int | None = None
    result: Any = None  # what its own page shows
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None


Work = Callable[[Job], str]
"""Does it, looks at ``stop`` now and then, and returns what is to be said in the end."""


class Jobs:
    """Those that run, and those that ended lately."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._jobs: list[Job] = []
        self._lock = threading.Lock()

    def all(self) -> list[Job]:
        """The newest first."""
        with self._lock:
            return list(reversed(self._jobs))

    def start(self, what: str, link: str, work: Work) -> Job:
        """Begin it. ``BusyError`` when too many run."""
        with self._lock:
            if sum(job.state == "running" for job in self._jobs) >= _RUNNING_MAX:
                raise BusyError(f"console: {_RUNNING_MAX} jobs run already: wait for one to end")
            job = Job(self._context.ids.new()[:12], what, link, self._context.clock.now_ms())
            self._jobs = [*self._jobs, job][-_KEPT_MAX:]
        job.thread = threading.Thread(
            target=self._run, args=(job, work), name="tidelog-job", daemon=True
        )
        job.thread.start()
        return job

    def find(self, job_id: str) -> Job:
        """The job of an id. ``NotFoundError``."""
        for job in self.all():
            if job.id == job_id:
                return job
        raise NotFoundError(f"job `{job_id[:40]}`: not found: it may have ended long ago")

    def stop(self, job_id: str) -> Job:
        """Ask a job to stop. ``NotFoundError``."""
        job = self.find(job_id)
        job.stop.set()
        return job

    def close(self) -> None:
        """Ask all to stop, and wait for them a little."""
        for job in self.all():
            job.stop.set()
        now_s = self._context.clock.monotonic_s
        until_s = now_s() + _STOP_S
        for job in self.all():
            if job.thread is not None:
                job.thread.join(max(0.0, until_s - now_s()))

    def _run(self, job: Job, work: Work) -> None:
        try:
            job.says = work(job)
            job.state = "stopped" if job.stop.is_set() else "done"
        except TidelogError as exc:
            job.says, job.state = shape(exc)["error"]["message"], "failed"
        except Exception as exc:  # noqa: BLE001 - a bug of ours is shown, and nothing else
            job.says, job.state = f"{type(exc).__name__}: {exc}", "failed"
        job.ended_ms = self._context.clock.now_ms()
