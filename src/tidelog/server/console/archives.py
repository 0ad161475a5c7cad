"""Pages of archives and pumps: how far, what waits, files as a tree, dead letters, their replay.

:class:`Pipelines` looks at archives, pumps and keepers in a thread of its own, as some are slow. A
source that hangs holds up this thread alone; pages show what was known before, and since when.

:class:`Jobs` runs what takes longer than a request, such as playbacks and replays. A few run at
once, in threads of this process; those that ended are remembered for a while. When the server
stops, it asks them to stop too: what they do can be killed and done again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from tidelog.api.archives import ArchiveHandle
from tidelog.api.doctor import response_times
from tidelog.archive.status import ArchiveStatus, Limits, WaitingTimes, troubles
from tidelog.context import Context
from tidelog.coordination.keepers import Keeper, Keepers
from tidelog.errors import InvalidError, NotFoundError, TidelogError
from tidelog.home import Home
from tidelog.model.archive import Archive
from tidelog.public import PumpStatus
from tidelog.server.console.format import url
from tidelog.server.console.session import Answer, Redirect, Shown, Visit
from tidelog.server.http.errors import BusyError, shape

__all__ = ["ArchivePages", "Job", "Jobs", "Pipelines", "PipelinesSeen"]

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
        """Look soon, because something has changed or a page was opened."""
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
        times = response_times(home.context)
        error = times.store_error
        archives = [each for each in home.archives.list() if each.info.state == "ready"]
        pumps = [each for each in home.pumps.list(restores=True) if each.info.state == "ready"]
        return PipelinesSeen(
            clock.now_ms(),
            tuple(see_archive(each, self._waiting) for each in archives),
            tuple(each.status() for each in pumps),
            times.store_ms,
            times.catalog_ms,
            "" if error is None else shape(error)["error"]["message"],
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


_LETTERS_MAX = 50  # dead letters on one page
_LETTERS_READ_MAX = 20_000  # whose reasons are counted
_READ_S = 0.3
_PARSERS = ("json", "iso8601", "date", "regex", "delimited", "timestamp", "offset")


class ArchivePages:
    """What is shown of archives and pumps."""

    def __init__(self, home: Home, pipelines: Pipelines, jobs: Jobs) -> None:
        self._home = home
        self._pipelines = pipelines
        self._jobs = jobs

    def archives(self, visit: Visit) -> Answer:
        """``GET /console/archives``"""
        return Shown("archives.html", {"seen": self._pipelines.look()})

    def archive(self, visit: Visit) -> Answer:
        """``GET /console/archives/{name}``"""
        archive = self._home.archives.get(visit.path["name"])
        return Shown("archive.html", {"archive": archive.reload(), "seen": self._seen(archive)})

    def pump(self, visit: Visit) -> Answer:
        """``GET /console/pumps/{name}``"""
        pump = self._home.pumps.get(visit.path["name"])
        known = [each for each in self._pipelines.look().pumps if each.named == pump.info]
        seen = known[0] if known else pump.status()
        return Shown("pump.html", {"named": pump.info, "seen": seen})

    def files(self, visit: Visit) -> Answer:
        """``GET /console/archives/{name}/files``"""
        archive = self._home.archives.get(visit.path["name"])
        under = visit.text("under").strip("/")
        page = archive.folder(under, after=visit.text("after"))
        parts = under.split("/") if under else []
        values = {
            "archive": archive.info,
            "under": under,
            "entries": page.entries,
            "more": page.following,
            "path": [(part, "/".join(parts[: at + 1])) for at, part in enumerate(parts)],
            "prefix": page.prefix,
        }
        return Shown("files.html", values)

    def dead(self, visit: Visit) -> Answer:
        """``GET /console/archives/{name}/dead``"""
        handle = self._home.archives.get(visit.path["name"])
        archive = handle.reload()
        wanted = visit.text("reason")
        reasons: Counter[str] = Counter()
        letters: list[dict[str, Any]] = []
        clock = self._home.context.clock
        until_s = clock.monotonic_s() + _READ_S
        is_whole = True
        for batch in handle.dead_letters():
            texts = batch.column("error").to_pylist()
            reasons.update(text.partition(": ")[0] for text in texts)
            if len(letters) < _LETTERS_MAX:
                found = (each for each in _letters(batch) if wanted in each["reason"])
                letters += [each for each, _ in zip(found, range(_LETTERS_MAX), strict=False)]
            if reasons.total() >= _LETTERS_READ_MAX or clock.monotonic_s() > until_s:
                is_whole = False
                break
        values = {
            "archive": archive,
            "reasons": reasons.most_common(20),
            "letters": letters[:_LETTERS_MAX],
            "total": reasons.total(),
            "is_whole": is_whole,
            "reason": wanted,
            "parsers": _PARSERS,
            "parser": archive.making().parser,
        }
        return Shown("dead.html", values)

    def replay(self, visit: Visit) -> Answer:
        """``POST /console/archives/{name}/replay``"""
        archive = self._home.archives.get(visit.path["name"])
        archive.reload()
        parser = visit.text("parser")
        if parser and parser.partition(":")[0] not in _PARSERS:
            raise InvalidError(
                f"parser `{parser[:80]}`: from here it may be {', '.join(_PARSERS)}: use "
                "`tidelog archive dead --replay` for one of your own"
            )

        def work(job: Job) -> str:
            done = archive.replay(parser=parser, stop=job.stop)
            self._pipelines.wake()
            return (
                f"{done.tried:,} dead letters tried, {done.replayed:,} are in the archive now, "
                f"{done.dead:,} stay dead"
            )

        what = f"replay of the dead letters of {archive.name}"
        self._jobs.start(what, url("/console/archives", archive.name), work)
        return Redirect("/console/jobs")

    def jobs(self, visit: Visit) -> Answer:
        """``GET /console/jobs``"""
        return Shown("jobs.html", {"jobs": self._jobs.all()})

    def stop(self, visit: Visit) -> Answer:
        """``POST /console/jobs/stop``"""
        self._jobs.stop(visit.text("job"))
        return Redirect("/console/jobs")

    def _seen(self, archive: ArchiveHandle) -> ArchiveSeen:
        """As it was seen last; one that is new, or that was changed, is looked at now."""
        for each in self._pipelines.look().archives:
            if each.archive == archive.info:
                return each
        return see_archive(archive)


def _letters(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    times = batch.column("timestamp").cast(pa.int64()).to_pylist()
    some = batch.slice(0, 10 * _LETTERS_MAX)
    return [
        {**row, "reason": row["error"], "time_ms": time_ms}
        for row, time_ms in zip(some.to_pylist(), times, strict=False)
    ]
