"""Follows all archives and pumps of a home in one process.

One thread drives each of them, so many archives need one process, and one Spark session if Spark is
used. New ones are found within seconds; deleted ones, and those of an old generation, are dropped.
One that fails is retried, after waits that double up to a minute, and does not affect the others.
While its source cannot be reached, its driver waits. Several followers of the same home share the
source partitions, pipeline by pipeline; one without any partition of a pipeline is a standby there.
Another thread repairs notifications that a dead process left unsent.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tidelog.archive.archive import find_archive, open_pipeline
from tidelog.archive.tables import register_archive
from tidelog.context import Context
from tidelog.coordination.jobs import SupervisedPart
from tidelog.coordination.pipeline_rows import list_archives, list_pipelines
from tidelog.errors import FencedError, NotFoundError, TidelogError, contained, unexpected
from tidelog.log.notifier import repair
from tidelog.log.notify_targets import open_target
from tidelog.log.topics import list_topics
from tidelog.model import defaults
from tidelog.model.archive import Archive
from tidelog.model.pipeline import NamedPipeline
from tidelog.model.times import duration_ms
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pipeline import CycleReport, Pipeline
from tidelog.pipeline.pump import is_pump, open_pump, pump_options
from tidelog.pipeline.ranges import FilePolicy
from tidelog.pipeline.tasks import Workers

__all__ = ["Follower"]

_LOOK_S = 2.0  # between looks for new archives and pumps
_REPAIR_S = 10.0  # between rounds of notifications
_WAIT_MAX_S = 60.0  # before one that fails is retried
_REPORT_S = 5.0  # between reports of an unchanged state
_PUMP_POLICY = FilePolicy(defaults.PUMP_BATCH_BYTES, duration_ms(defaults.PUMP_BATCH_AGE))

_Key = tuple[str, ...]


@dataclass(eq=False)
class _FollowedPipeline:
    """One archive or pump."""

    name: str
    open: Callable[[], tuple[Pipeline, FilePolicy]]
    after: Callable[[], None]
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    part: SupervisedPart | None = None
    reported_s: float = 0.0
    has: int = 0  # source partitions
    listed: int = 0  # by the source
    events: int = 0
    failures: int = 0  # in a row
    dead_share: float = 1.0  # a larger share of dead letters is shown as a warning
    warning: str = ""  # about its last events

    @property
    def state(self) -> str:
        """Returns whether it has source partitions, or other drivers have them all."""
        return "standing by" if self.listed and not self.has else "running"


class Follower:
    """Follows a home until ``stop`` is set. May call ``report`` from any thread."""

    def __init__(
        self,
        context: Context,
        workers: Workers,
        report: Callable[[SupervisedPart], None],
        stop: threading.Event,
    ) -> None:
        self._context = context
        self._workers = workers
        self._report = report
        self._stop = stop
        self._followed: dict[_Key, _FollowedPipeline] = {}
        self._lock = threading.Lock()

    def run(self) -> None:
        """Runs until stopped; then each one finishes its current cycle."""
        repairing = threading.Thread(target=self._repair_all, name="tidelog-repair", daemon=True)
        repairing.start()
        while not self._stop.is_set():
            self._look()
            self._stop.wait(_LOOK_S)
        for each in self._followed.values():
            each.stop.set()
        for each in self._followed.values():
            if each.thread is not None:
                each.thread.join()
        repairing.join()

    def _look(self) -> None:
        """Starts new ones, and stops deleted ones."""
        try:
            wanted = {**dict(self._archives()), **dict(self._pumps())}
        except Exception as exc:  # noqa: BLE001 - those that run already go on
            self._report_part("registry", "failed", unexpected("registry", exc).message)
            return
        for key, each in wanted.items():
            if key not in self._followed:
                self._followed[key] = each
                each.thread = threading.Thread(
                    target=self._keep, args=(each,), name=f"tidelog-{each.name}", daemon=True
                )
                each.thread.start()
        for key in self._followed.keys() - wanted.keys():
            each = self._followed[key]
            each.stop.set()
            if each.thread is None or not each.thread.is_alive():
                del self._followed[key]

    def _archives(self) -> Iterator[tuple[_Key, _FollowedPipeline]]:
        for found in list_archives(self._context):
            if found.state == "ready" and found.ended is None:
                key = ("archive", found.incarnation, str(found.generation))
                yield key, self._archive(found)

    def _archive(self, found: Archive) -> _FollowedPipeline:
        context, name = self._context, found.name

        def opened() -> tuple[Pipeline, FilePolicy]:
            now = find_archive(context, name)
            policy = FilePolicy(now.max_bytes, now.max_age_ms)
            return open_pipeline(context, now, self._workers), policy

        return _FollowedPipeline(
            f"archive {name}",
            opened,
            lambda: register_archive(context, name),
            dead_share=found.dead_share_max,
        )

    def _pumps(self) -> Iterator[tuple[_Key, _FollowedPipeline]]:
        for found in list_pipelines(self._context):
            if is_pump(found):
                yield ("pump", found.incarnation), self._pump(found)

    def _pump(self, found: NamedPipeline) -> _FollowedPipeline:
        wanted = pump_options(found)
        return _FollowedPipeline(
            f"pump {found.name}",
            lambda: (open_pump(self._context, wanted, self._workers), _PUMP_POLICY),
            lambda: None,
        )

    # In the thread of one archive or pump.

    def _keep(self, each: _FollowedPipeline) -> None:
        while not each.stop.is_set():
            try:
                self._drive(each)
            except FencedError as exc:  # another driver took over, or another generation is next
                self._report_state(each, "standing by", exc.message)
                each.stop.wait(1.0)
            except TidelogError as exc:
                self._wait_after_failure(each, exc.message)
            except Exception as exc:  # noqa: BLE001 - one must not end the others
                self._wait_after_failure(each, f"{type(exc).__name__}: {exc}")
        self._report_state(each, "stopped")

    def _drive(self, each: _FollowedPipeline) -> None:
        self._report_state(each, "starting")
        pipeline, policy = each.open()

        def on_share(has: int, listed: int) -> None:
            each.has, each.listed = has, listed

        def on_look(waiting: int) -> None:
            error = each.warning
            if each.part is not None and each.failures:
                error = each.part.error
            self._report_state(each, each.state, error, waiting)

        def on_cycle(report: CycleReport) -> None:
            each.events += report.events
            errors = [str(error) for error in report.errors.values()]
            if report.committed:
                with contained(each.name, lambda error: errors.append(error.message)):
                    each.after()
                each.warning = _dead_letters(each, report)
            each.failures = each.failures + 1 if errors else 0
            self._report_state(each, each.state, errors[0] if errors else each.warning)

        def on_outage(error: TidelogError, _: float) -> None:
            each.failures += 1
            self._report_state(each, "failed", error.message)

        how = DriverOptions(
            follow=True,
            policy=policy,
            flush_on_stop=each.name.startswith("pump "),
            stop=each.stop,
            on_share=on_share,
            on_look=on_look,
            on_cycle=on_cycle,
            on_outage=on_outage,
        )
        Driver(self._context, pipeline, how).run()

    def _wait_after_failure(self, each: _FollowedPipeline, message: str) -> None:
        each.failures += 1
        self._report_state(each, "failed", message)
        each.stop.wait(min(_WAIT_MAX_S, 0.5 * 2 ** min(each.failures, 10)))

    def _report_state(
        self, each: _FollowedPipeline, state: str, error: str = "", waiting: int | None = None
    ) -> None:
        """Reports a changed state at once, and changed numbers now and then."""
        with self._lock:
            self._report_unlocked(each, state, error, waiting)

    def _report_unlocked(
        self, each: _FollowedPipeline, state: str, error: str, waiting: int | None
    ) -> None:
        clock, before = self._context.clock, each.part
        same = before is not None and (before.state, before.error) == (state, error)
        if same and clock.monotonic_s() - each.reported_s < _REPORT_S:
            return
        since_ms = before.since_ms if before is not None and before.state == state else None
        if waiting is None and before is not None:
            waiting = before.waiting
        each.part = SupervisedPart(
            name=each.name,
            state=state,
            since_ms=clock.now_ms() if since_ms is None else since_ms,
            error=error,
            events=each.events,
            waiting=waiting,
        )
        each.reported_s = clock.monotonic_s()
        self._report(each.part)

    def _report_part(self, name: str, state: str, error: str = "") -> None:
        self._report(SupervisedPart(name, state, self._context.clock.now_ms(), error=error))

    # In the thread that repairs notifications.

    def _repair_all(self) -> None:
        told = ""
        while True:
            errors = self._repair_round()
            if (now := errors[0] if errors else "healthy") != told:
                self._report_part("notifications", "running", errors[0] if errors else "")
                told = now
            if self._stop.wait(_REPAIR_S):
                self._report_part("notifications", "stopped")
                return

    def _repair_round(self) -> list[str]:
        """Repairs the notifications of all topics. Returns the errors."""
        errors: list[str] = []
        with contained("notifications", lambda error: errors.append(error.message)):
            self._repair_topics(errors)
        return errors

    def _repair_topics(self, errors: list[str]) -> None:
        context = self._context
        for topic in list_topics(context):
            if not topic.notify or topic.state != "ready" or not context.identity.owns(topic.home):
                continue
            with (
                contained(f"topic `{topic.name}`", lambda error: errors.append(error.message)),
                contextlib.suppress(NotFoundError),  # deleted in between
            ):
                targets = [open_target(url, context.environ) for url in topic.notify]
                errors.extend(str(error) for error in repair(context, topic, targets).errors)


def _dead_letters(each: _FollowedPipeline, report: CycleReport) -> str:
    """Returns a warning if too many of the last events are dead letters; else nothing."""
    dead = sum(manifest.dead for manifest in report.committed.values())
    read = sum(manifest.read for manifest in report.committed.values())
    if dead <= each.dead_share * read:
        return ""
    return (
        f"{dead} of the last {read} events became dead letters: see why with `tidelog archive dead "
        f"{each.name.removeprefix('archive ')}`"
    )
