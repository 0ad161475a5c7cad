"""Jobs of a home: work that a person started in a console and that outlives its server.

All jobs are in one row, which every change replaces by the version that was read. A server that
runs a job keeps writing its progress. When it stops, or dies, another server of the home resumes
the job: every kind of job can be killed and run again. Safety does not depend on the row, since
what jobs do has its own leases and heads.

    1. start: a running job with an owner            → resumed once the owner is seen to be dead
    2. heartbeat: progress and a higher ``beat``     → the same
    3. release: a running job without an owner       → resumed by the next server
    4. end: done, stopped or failed                  → listed until newer jobs push it out

A record has no ids or keys of events that are being erased.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from tidelog.catalog.base import Row
from tidelog.catalog.update import Decision, Rows, update
from tidelog.context import Context
from tidelog.errors import NotFoundError
from tidelog.model import layout
from tidelog.model.decoding import Persisted
from tidelog.model.partition_rows import decode_row, encode_row

__all__ = ["JOBS_KEPT_MAX", "JobRecord", "JobState", "change_jobs", "find_job", "read_jobs"]

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
