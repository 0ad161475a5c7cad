"""Jobs as Python code sees them: ``home.jobs``. People start them in consoles of servers."""

from __future__ import annotations

import msgspec

from tidelog.context import Context
from tidelog.coordination.jobs import JobRecord, change_jobs, find_job, read_jobs
from tidelog.errors import InvalidError

__all__ = ["Jobs"]


class Jobs:
    """The jobs that people started in consoles of the home: ``home.jobs``.

    A job runs in a server, and the next server resumes it if that one stops or dies.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def list(self) -> list[JobRecord]:
        """Return the jobs that run, and those that ended recently, the newest first.

        >>> home.jobs.list()
        []
        """
        return list(reversed(read_jobs(self._context)))

    def stop(self, job_id: str) -> None:
        """Ask a job to stop; its server does so within seconds. Raises ``NotFoundError``.

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
        """Remove a job that ended from the list.

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
