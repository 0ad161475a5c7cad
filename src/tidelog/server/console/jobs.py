"""Work that takes longer than a request: playbacks and replays that somebody started here.

A few run at once, in threads of this process; those that ended are remembered for a while. When the
server stops, they are asked to stop too: what they do can be killed and done again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tidelog.context import Context
from tidelog.errors import NotFoundError, TidelogError
from tidelog.server.http.errors import BusyError, shape

__all__ = ["Job", "Jobs"]

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
