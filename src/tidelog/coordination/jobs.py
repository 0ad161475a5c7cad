"""What runs for a home: jobs that people start in consoles, and keepers (``tidelog up``).

**Jobs** outlive the server that runs them. All jobs are in one row, which every change replaces by
the version that was read. A server that runs a job keeps writing its progress. When it stops, or
dies, another server of the home resumes the job: every kind of job can be killed and run again.
Safety does not depend on the row, since what jobs do has its own leases and heads.

    1. start: a running job with an owner            → resumed once the owner is seen to be dead
    2. heartbeat: progress and a higher ``beat``     → the same
    3. release: a running job without an owner       → resumed by the next server
    4. end: done, stopped or failed                  → listed until newer jobs push it out

A record has no ids or keys of events that are being erased.

**Keepers** are the running ``tidelog up`` processes, with the state of their parts. A keeper keeps
writing one row under an id of its own, and removes it when it ends. So any server of the home can
show which keepers run what. A keeper is considered dead when its row does not change for three
heartbeats by the watcher's own monotonic clock (:class:`Keepers`), since the wall clocks of hosts
may differ. Safety does not depend on these rows: leases and heads decide who may work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Literal

import msgspec

from tidelog.catalog.base import Delete, Put, Row
from tidelog.catalog.update import Decision, Rows, update
from tidelog.context import Context
from tidelog.errors import ConflictError, InvalidError, NotFoundError, UnknownOutcomeError
from tidelog.model import layout
from tidelog.model.decoding import Persisted
from tidelog.model.topic import decode_row, encode_row

__all__ = [
    "BEAT_MS",
    "JOBS_KEPT_MAX",
    "JobRecord",
    "JobState",
    "Jobs",
    "Keeper",
    "Keepers",
    "SupervisedPart",
    "change_jobs",
    "find_job",
    "put_keeper",
    "read_jobs",
    "remove_keeper",
]


class Jobs:
    """The jobs that people started in consoles of the home: ``home.jobs``.

    A job runs in a server, and the next server resumes it if that one stops or dies.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def list(self) -> list[JobRecord]:
        """Returns the jobs that run, and those that ended recently, the newest first.

        >>> home.jobs.list()
        []
        """
        return list(reversed(read_jobs(self._context)))

    def stop(self, job_id: str) -> None:
        """Asks a job to stop; its server does so within seconds. Raises ``NotFoundError``.

        >>> home.jobs.stop("4f1c")
        Traceback (most recent call last):
        tidelog.errors.NotFoundError: job `4f1c`: not found: it may have ended long ago
        """
        find_job(self._context, job_id)

        def edit(jobs: tuple[JobRecord, ...]) -> tuple[JobRecord, ...]:
            return tuple(
                msgspec.structs.replace(job, stop=True) if job.id == job_id else job for job in jobs
            )

        change_jobs(self._context, edit)

    def forget(self, job_id: str) -> None:
        """Removes a job that ended from the list.

        Raises ``NotFoundError``, and ``InvalidError`` while it runs.

        >>> home.jobs.forget("4f1c")
        Traceback (most recent call last):
        tidelog.errors.NotFoundError: job `4f1c`: not found: it may have ended long ago
        """
        if find_job(self._context, job_id).state == "running":
            raise InvalidError(f"job `{job_id}`: runs: stop it first")

        def edit(jobs: tuple[JobRecord, ...]) -> tuple[JobRecord, ...]:
            return tuple(job for job in jobs if job.id != job_id or job.state == "running")

        change_jobs(self._context, edit)


JOBS_KEPT_MAX = 40  # those that ended are dropped beyond this, the oldest first
_TEXT_MAX = 1_000  # characters of each text

JobState = Literal["running", "done", "stopped", "failed"]


class JobRecord(Persisted, frozen=True):
    """One job, as every server of the home sees it."""

    id: str
    kind: str  # playback, replay, erasure, backfill, …
    what: str  # the same in words
    args: dict[str, str]  # what is needed to resume it
    began_ms: int
    state: JobState = "running"
    says: str = ""  # how far it is, its result, or why it failed
    percent: int | None = None  # None: not known
    ended_ms: int = 0
    who: str = ""  # that started it
    owner: str = ""  # the server that runs it; empty: it waits for one
    mark: str = ""  # of that server's process
    beat: int = 0
    stop: bool = False  # a person asked it to stop
    result: dict[str, str] = msgspec.field(default_factory=dict)  # figures for its own page


class JobList(Persisted, frozen=True):
    """The row of all jobs, the oldest first."""

    jobs: tuple[JobRecord, ...] = ()


Edit = Callable[[tuple[JobRecord, ...]], tuple[JobRecord, ...] | None]


def read_jobs(context: Context) -> tuple[JobRecord, ...]:
    """Returns all jobs, the oldest first."""
    return _decoded(context.catalog.get(layout.JOBS, layout.JOB_LIST))


def find_job(context: Context, job_id: str) -> JobRecord:
    """Returns a job. Raises ``NotFoundError``."""
    for job in read_jobs(context):
        if job.id == job_id:
            return job
    raise NotFoundError(f"job `{job_id[:40]}`: not found: it may have ended long ago")


def change_jobs(context: Context, edit: Edit) -> tuple[JobRecord, ...]:
    """Replaces the jobs by what ``edit`` returns for them; None leaves them. Returns them.

    ``edit`` is called again if another server was faster, or a reply was lost.
    """

    def decide(rows: Rows) -> Decision[tuple[JobRecord, ...]]:
        before = _decoded(rows[layout.JOB_LIST])
        after = edit(before)
        if after is None or after == before:
            return Decision(before)
        after = tuple(map(_short, _recent(after)))
        return Decision(after, [rows.put(layout.JOB_LIST, encode_row(JobList(after)))])

    return update(context, layout.JOBS, [layout.JOB_LIST], decide, "jobs")


def _decoded(row: Row | None) -> tuple[JobRecord, ...]:
    return () if row is None else decode_row(row.value, JobList, "jobs").jobs


def _recent(jobs: tuple[JobRecord, ...]) -> tuple[JobRecord, ...]:
    """Returns the jobs without the oldest of those that ended, if there are too many."""
    ended = [job.id for job in jobs if job.state != "running"]
    dropped = set(ended[: max(0, len(jobs) - JOBS_KEPT_MAX)])
    return tuple(job for job in jobs if job.id not in dropped)


def _short(job: JobRecord) -> JobRecord:
    if len(job.what) <= _TEXT_MAX and len(job.says) <= _TEXT_MAX:
        return job
    return msgspec.structs.replace(job, what=job.what[:_TEXT_MAX], says=job.says[:_TEXT_MAX])


BEAT_MS = 10_000  # between two writes of an unchanged row
_SILENT_MS = 3 * BEAT_MS  # after which a keeper is considered dead
_FORGOTTEN_MS = 24 * 3_600_000  # after which its row is removed


class SupervisedPart(Persisted, frozen=True):
    """Something that a keeper runs: a process, or an archive or a pump in one."""

    name: str  # serve, follow, archive daily
    state: str  # starting, running, standing by, failed, stopped
    since_ms: int  # when it entered this state
    pid: int = 0  # of a process
    restarts: int = 0
    error: str = ""  # the last one; empty while healthy
    events: int | None = None  # that it has processed since it started
    waiting: int | None = None  # events that wait for it


class Keeper(Persisted, frozen=True):
    """One running ``tidelog up``."""

    id: str
    host: str
    pid: int
    mark: str  # of its process
    started_ms: int
    beat_ms: int
    url: str = ""  # of its server
    parts: tuple[SupervisedPart, ...] = ()


def put_keeper(context: Context, keeper: Keeper) -> None:
    """Writes a keeper's row, with the state of its parts."""
    change = Put(layout.keeper_row(keeper.id), encode_row(keeper))
    with contextlib.suppress(ConflictError, UnknownOutcomeError):  # the next heartbeat repeats it
        context.catalog.write(layout.KEEPERS, change, write_id=context.ids.new())


def remove_keeper(context: Context, keeper_id: str) -> None:
    """Removes the row of a keeper that ends."""
    with contextlib.suppress(ConflictError, UnknownOutcomeError):
        context.catalog.write(
            layout.KEEPERS, Delete(layout.keeper_row(keeper_id)), write_id=context.ids.new()
        )


class Keepers:
    """Watches the keepers of a home, for a process that looks repeatedly."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._seen: dict[str, tuple[str, float]] = {}  # row → its version, and since when

    def list(self) -> list[Keeper]:
        """Returns the running keepers, oldest first. Removes rows that did not change for a day.

        One that is seen for the first time counts as running, unless its process is known to have
        ended.
        """
        clock, context = self._context.clock, self._context
        # Taken before the rows are read: a slow scan must not count as silence.
        began_s = clock.monotonic_s()
        found: list[Keeper] = []
        seen: dict[str, tuple[str, float]] = {}
        for row in context.catalog.scan(layout.KEEPERS, layout.keeper_row(""), "keeper0"):
            keeper = decode_row(row.value, Keeper, f"keeper row `{row.row}`")
            version, since_s = self._seen.get(row.row, ("", 0.0))
            seen[row.row] = (row.version, since_s if version == row.version else began_s)
            silent_ms = (began_s - seen[row.row][1]) * 1000
            if silent_ms > _FORGOTTEN_MS:
                remove_keeper(context, keeper.id)
            elif silent_ms <= _SILENT_MS and not context.processes.is_dead(keeper.mark):
                found.append(keeper)
        self._seen = seen
        return sorted(found, key=lambda keeper: (keeper.started_ms, keeper.id))
