"""Jobs: what a page starts and takes longer than a request, such as playbacks and backfills.

:class:`JobRunner` runs a few at once, in threads of this process, and keeps their progress in the
home (``coordination.jobs``). A server that stops releases its jobs, and the next one resumes them.
One that dies is noticed after the time to live of a lease. A person can stop a job from any server.

:class:`JobPages` shows them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidelog.context import Context
from tidelog.coordination.jobs import JobRecord, JobState, change_jobs, find_job, read_jobs
from tidelog.errors import (
    ConflictError,
    FencedError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    contained,
)
from tidelog.home import Home
from tidelog.server.console.format import url
from tidelog.server.console.session import Answer, Redirect, ShownPage, Visit
from tidelog.server.http.errors import BusyError, shape

__all__ = ["WHOLE", "Job", "JobPages", "JobRunner", "Work", "check_incarnation"]

_RUNNING_MAX = 4
_KEPT_MAX = 50  # in memory, with results that only this process has
_STOP_S = 10.0  # in which all should have stopped
_BUSY_S = 2.0  # between two writes of progress
_IDLE_S = 15.0  # between two looks for jobs whose server ended
WHOLE = frozenset(("promote", "rollback", "drop", "finalize", "register"))  # cannot be stopped
_RESUMED = "resumed after its server ended"
_PLAIN_ERRORS = (ConflictError, FencedError, NotFoundError, UnavailableError)  # quote no value


@dataclass(slots=True)
class Job:
    """One piece of work."""

    id: str
    kind: str
    what: str
    args: Mapping[str, str]
    began_ms: int
    state: JobState = "running"
    says: str = ""
    percent: int | None = None  # None: not known
    ended_ms: int | None = None
    who: str = ""
    result: Any = None  # what its own page shows; only in the process that ran it
    figures: dict[str, str] = field(default_factory=dict)  # the same, as other servers see it
    stop: threading.Event = field(default_factory=threading.Event)  # looked at by the work
    is_cancelled: bool = False  # by a person, and not by a server that stops
    is_own: bool = True  # runs, or ran, in this process
    beat: int = 0
    is_saved: bool = False  # its end is in the home
    after: Callable[[], None] | None = None  # tidies up once its end is in the home
    hides: bool = False  # its last words may quote an event, and are not stored
    thread: threading.Thread | None = None

    @property
    def link(self) -> str:
        """Returns the page that the job belongs to."""
        if self.kind in ("erasure", "proof"):
            return url("/console/proofs", self.id)
        if "archive" in self.args:
            return url("/console/archives", self.args["archive"])
        return url("/console/topics", self.args["topic"]) if "topic" in self.args else ""

    @property
    def can_stop(self) -> bool:
        """Returns whether it checks ``stop``; other jobs are short, and run to their end."""
        return self.kind not in WHOLE

    def tell(self, says: str, percent: float | None = None) -> None:
        """Reports how far the job is; the percentage never falls."""
        self.says = says
        if percent is not None:
            self.percent = max(self.percent or 0, min(99, max(0, int(percent))))


Work = Callable[[Job], str]
"""Does it, looks at ``stop`` now and then, and returns what is to be said in the end."""

Resume = Callable[[Mapping[str, str], str], Work]
"""Returns the work of a job from its arguments, and who started it."""


class JobRunner:
    """Runs jobs of this server, and resumes those of servers that ended."""

    def __init__(self, context: Context, report: Callable[[TidelogError], object]) -> None:
        self._context = context
        self._report = report  # of what no job can tell
        self._owner = context.ids.new()
        self._kinds: dict[str, Resume] = {}
        self._jobs: list[Job] = []
        self._seen: dict[str, tuple[int, float]] = {}  # beats of others' jobs, and since when
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tidelog-jobs", daemon=True)

    def register(self, kind: str, resume: Resume) -> None:
        """Registers how jobs of a kind are begun, and resumed after a restart."""
        self._kinds[kind] = resume

    def open(self) -> None:
        """Starts resuming jobs that wait, and storing progress in the home."""
        self._thread.start()

    def all(self) -> list[Job]:
        """Returns all jobs of the home, newest first; without the catalog those of this server."""
        own = {job.id: job for job in self.own()}
        try:
            records = read_jobs(self._context)
        except TidelogError:
            return list(own.values())
        found = [own.get(each.id) or _of_record(each) for each in reversed(records)]
        known = {each.id for each in records}
        return [*(job for job in own.values() if job.id not in known), *found]

    def own(self) -> list[Job]:
        """Returns the jobs of this process, newest first."""
        with self._lock:
            return list(reversed(self._jobs))

    def start(
        self,
        kind: str,
        what: str,
        args: Mapping[str, str],
        who: str = "",
        work: Work | None = None,
    ) -> Job:
        """Begins a job. Raises ``BusyError`` if too many run.

        ``work`` is for a job that has to know more than may be stored.
        """
        context = self._context
        job = Job(context.ids.new()[:12], kind, what, dict(args), context.clock.now_ms(), who=who)
        work = work or self._kinds[kind](args, who)
        self._check_room()
        record = self._record(job)
        change_jobs(context, lambda jobs: (*(each for each in jobs if each != record), record))
        self._run_in_thread(job, work)
        return job

    def find(self, job_id: str) -> Job:
        """Returns the job with an id. Raises ``NotFoundError``."""
        for job in self.own():
            if job.id == job_id:
                return job
        return _of_record(find_job(self._context, job_id))

    def close(self) -> None:
        """Stops all jobs, waits for them a little, and leaves them to the next server."""
        self._closing.set()
        self._wake.set()
        for job in self.own():
            job.stop.set()
        now_s = self._context.clock.monotonic_s
        until_s = now_s() + _STOP_S
        for thread in [*(job.thread for job in self.own()), self._thread]:
            if thread is not None and thread.is_alive():
                thread.join(max(0.0, until_s - now_s()))

    def stop(self, job_id: str) -> None:
        """Stops a job of this process at once; other processes read the request from the home."""
        for job in self.own():
            if job.id == job_id:
                job.is_cancelled = True
                job.stop.set()

    def forget(self, job_id: str) -> None:
        """Forgets a job of this process that has ended."""
        with self._lock:
            self._jobs = [job for job in self._jobs if job.id != job_id or job.state == "running"]

    def _check_room(self) -> None:
        if sum(job.state == "running" for job in self.own()) >= _RUNNING_MAX:
            raise BusyError(f"console: {_RUNNING_MAX} jobs run already: wait for one to end")

    def _run_in_thread(self, job: Job, work: Work) -> None:
        with self._lock:
            self._jobs = [*self._jobs, job][-_KEPT_MAX:]
        job.thread = threading.Thread(
            target=self._run, args=(job, work), name="tidelog-job", daemon=True
        )
        try:
            job.thread.start()
        except RuntimeError as exc:  # the system has no more threads
            with self._lock:
                self._jobs = [each for each in self._jobs if each is not job]
            self._save([job], release=True)
            raise BusyError(
                f"job `{job.id}`: no thread could be started: it begins later, once one can"
            ) from exc
        self._wake.set()

    def _run(self, job: Job, work: Work) -> None:
        state: JobState = "done"
        try:
            job.says = work(job)
            if job.is_cancelled and job.can_stop:
                state = "stopped"
            elif self._closing.is_set() and job.stop.is_set() and job.can_stop:
                self._save([job], release=True)
                return
            else:
                job.percent = 100
        except TidelogError as exc:
            job.says, state = shape(exc)["error"]["message"], "failed"
            job.hides = not isinstance(exc, _PLAIN_ERRORS)
        except Exception as exc:  # noqa: BLE001 - a bug of ours is shown, and nothing else
            job.says, state, job.hides = f"{type(exc).__name__}: {exc}", "failed", True
        job.ended_ms = self._context.clock.now_ms()
        job.state = state
        self._save([job])

    # Keeping them in the home.

    def _watch(self) -> None:
        while not self._closing.is_set():
            running = [job for job in self.own() if job.state == "running" or not job.is_saved]
            for job in running:
                job.beat += 1
            with contained("jobs", self._report):
                self._save(running)
            with contained("jobs", self._report):
                self._resume_orphans()
            self._wake.wait(_BUSY_S if running else _IDLE_S)
            self._wake.clear()

    def _save(self, jobs: list[Job], *, release: bool = False) -> None:
        """Writes the state of jobs; a job that another server has taken is stopped here."""
        if not jobs:
            return
        mine = {job.id: job for job in jobs}

        def edit(found: tuple[JobRecord, ...]) -> tuple[JobRecord, ...]:
            return tuple(self._edited(each, mine.get(each.id), release) for each in found)

        ended = [job for job in jobs if job.state != "running"]
        try:
            change_jobs(self._context, edit)
            for job in ended:
                job.is_saved = True
                if job.after is not None:
                    job.after()
        except TidelogError:
            return  # the next write has it; at worst the next server repeats the job
        except Exception:
            if not self._closing.is_set():
                raise

    def _edited(self, record: JobRecord, job: Job | None, release: bool) -> JobRecord:
        if job is None:
            return record
        if record.owner != self._owner:
            job.stop.set()
            return record
        if record.stop and not job.is_cancelled:
            job.is_cancelled = True
            job.stop.set()
        fresh = self._record(job)
        owner = "" if release else fresh.owner
        return msgspec.structs.replace(fresh, stop=record.stop or job.is_cancelled, owner=owner)

    def _record(self, job: Job) -> JobRecord:
        says = "it failed: start it again to see why" if job.hides else job.says
        return JobRecord(
            id=job.id,
            kind=job.kind,
            what=job.what,
            args=dict(job.args),
            began_ms=job.began_ms,
            state=job.state,
            says=says,
            percent=job.percent,
            ended_ms=job.ended_ms or 0,
            who=job.who,
            owner=self._owner,
            mark=self._context.processes.mark(),
            beat=job.beat,
            result=job.figures,
        )

    def _resume_orphans(self) -> None:
        """Takes over jobs whose server ended, as far as there is room."""
        own = {job.id for job in self.own() if job.state == "running"}
        try:
            for record in read_jobs(self._context):
                if record.state != "running" or record.id in own or not self._is_orphan(record):
                    continue
                if record.kind not in self._kinds or len(own) >= _RUNNING_MAX:
                    continue
                if self._take(record):
                    own.add(record.id)
                    self._resume(record)
        except TidelogError:
            return  # looked at again later
        except Exception:
            if not self._closing.is_set():
                raise

    def _is_orphan(self, record: JobRecord) -> bool:
        if not record.owner or self._context.processes.is_dead(record.mark):
            return True
        now_s = self._context.clock.monotonic_s()
        beat, since_s = self._seen.get(record.id, (-1, 0.0))
        if beat != record.beat:
            self._seen[record.id] = (record.beat, now_s)
            return False
        silent_s = now_s - since_s
        return silent_s > _IDLE_S + self._context.log_settings.lease_ttl_ms / 1000

    def _take(self, seen: JobRecord) -> bool:
        def edit(found: tuple[JobRecord, ...]) -> tuple[JobRecord, ...] | None:
            if seen not in found:
                return None  # another server has taken it, or it goes on
            mark = self._context.processes.mark()
            taken = msgspec.structs.replace(
                seen, owner=self._owner, mark=mark, beat=seen.beat + 1, says=_RESUMED
            )
            return tuple(taken if each == seen else each for each in found)

        after = change_jobs(self._context, edit)
        return any(each.id == seen.id and each.owner == self._owner for each in after)

    def _resume(self, record: JobRecord) -> None:
        job = _of_record(record)
        job.is_own, job.says = True, _RESUMED
        if record.stop:  # asked for while no server ran it
            job.is_cancelled = True
            job.stop.set()
        try:
            work = self._kinds[record.kind](record.args, record.who)
        except (TidelogError, KeyError) as exc:
            says = str(exc)

            def work(_: Job) -> str:
                raise InvalidError(f"job `{record.id}`: cannot be resumed: {says}")

        self._run_in_thread(job, work)


class JobPages:
    """Shows jobs, stops them, and clears those that ended."""

    def __init__(self, home: Home, jobs: JobRunner) -> None:
        self._home = home
        self._jobs = jobs

    def jobs(self, visit: Visit) -> Answer:
        """``GET /console/jobs``"""
        return ShownPage("jobs.html", {"jobs": self._jobs.all()})

    def stop(self, visit: Visit) -> Answer:
        """``POST /console/jobs/stop``"""
        job_id = visit.text("job")
        self._home.jobs.stop(job_id)
        self._jobs.stop(job_id)
        return Redirect("/console/jobs")

    def forget(self, visit: Visit) -> Answer:
        """``POST /console/jobs/forget``"""
        job_id = visit.text("job")
        self._home.jobs.forget(job_id)
        self._jobs.forget(job_id)
        return Redirect("/console/jobs")


def check_incarnation(what: str, args: Mapping[str, str], now: str) -> None:
    """Raises ``NotFoundError`` if another thing has the name that a job was started for."""
    if args["incarnation"] != now:
        raise NotFoundError(f"{what}: was deleted since the job was started: start another one")


def _of_record(record: JobRecord) -> Job:
    return Job(
        id=record.id,
        kind=record.kind,
        what=record.what,
        args=record.args,
        began_ms=record.began_ms,
        state=record.state,
        says=record.says,
        percent=record.percent,
        ended_ms=record.ended_ms or None,
        who=record.who,
        figures=record.result,
        is_own=False,
        beat=record.beat,
    )
