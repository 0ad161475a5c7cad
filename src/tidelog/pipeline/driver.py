"""The driver: claims its share of a source's partitions, and runs cycles until it is stopped.

Any number of drivers of a pipeline share its source partitions (``share``). A heartbeat thread runs
during cycles, so a long Spark job keeps them. A stop signal lets the current cycle finish. A second
one may abandon it at any point, because the next driver finishes what is there. A driver with
``take_over`` stops all others: they fail at their next write, and this one finishes their work.

A run that drains claims what is free. It leaves the rest to drivers that it has seen to be alive,
or waits for them (``wait``).

A failure in one source partition stops only that partition. A following driver retries it after
waits that double, and does the same if it cannot reach the source at all (``failures``). A decided
range needs no source: it is committed even if its source partition was deleted, or the source
cannot be reached (``_claim_unlisted``). Until the source has responded once, a lasting error (a
missing topic, wrong credentials) ends the run; after that the driver waits for the source.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tidelog.connectors.source import (
    Bounds,
    DividingSource,
    SourcePartition,
    SourceRange,
    SparseSource,
    TrackingSource,
    VanishedError,
    VanishingSource,
    bounds_apart,
)
from tidelog.context import Context
from tidelog.coordination.ownership import beating
from tidelog.coordination.pipeline_rows import read_intent, read_partitions
from tidelog.errors import (
    FencedError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
    raise_first,
    unexpected,
)
from tidelog.model.pipeline import Progress
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.failures import PipelineFailures, contain_errors
from tidelog.pipeline.pipeline import CycleReport, Pipeline
from tidelog.pipeline.ranges import (
    FilePolicy,
    FindNext,
    NextRange,
    WaitingEvents,
    in_waves,
    parts_of,
    read_no_more,
    waves_max,
)
from tidelog.pipeline.share import DriverMembers, DriverShare, flush_version
from tidelog.pipeline.source_partitions import (
    Beginnings,
    SeenEnds,
    TrackedPartitions,
)
from tidelog.pipeline.source_state import FrozenError
from tidelog.pipeline.tasks import ParallelWorkers

__all__ = ["Driver", "DriverOptions", "new_stop"]

_FOLLOW_S = 1.0  # between looks at the source while following
_LOOK_S = 0.2  # the same, in a run that drains and waits for something
_AHEAD_S = 15.0  # how long one cycle reads ahead; then its driver looks at the source again
_ATTEMPTS = 5  # per partition with passing errors, in a run that drains


def new_stop() -> threading.Event:
    """Returns an event that stops a driver. A simulation replaces it."""
    return threading.Event()


@dataclass
class DriverOptions:
    """How a driver runs."""

    follow: bool = False  # keep running, by policy; else drain what is there and end
    policy: FilePolicy = field(default_factory=FilePolicy)
    accept_loss: bool = False
    start: str = ""  # earliest, or latest: the ends at creation; empty: the pipeline's
    take_over: bool = False  # stop all other drivers, without waiting for them
    wait: bool = False  # a run that drains: also for partitions that other drivers have
    flush_on_stop: bool = False  # write waiting events before ending
    stop: threading.Event = field(default_factory=new_stop)
    on_look: Callable[[int], None] = lambda _: None  # with the number of waiting events
    # Gets (partitions of this driver, all partitions).
    on_share: Callable[[int, int], None] = lambda *_: None
    # At its end, gets (partitions left to other drivers, all partitions).
    on_left: Callable[[int, int], None] = lambda *_: None
    on_cycle: Callable[[CycleReport], None] = lambda _: None
    on_outage: Callable[[TidelogError, float], None] = lambda *_: None  # with the wait in seconds

    def __post_init__(self) -> None:
        if self.start not in ("", "earliest", "latest"):
            raise InvalidError(f"start `{self.start}`: give earliest or latest")


class _Plan(NamedTuple):
    """What a cycle does, by source partition."""

    waiting: Mapping[SourcePartition, int]  # how many events wait
    limits: Mapping[SourcePartition, str]  # how far to read those that are due
    parts: Mapping[SourcePartition, int]  # in how many parts, with one task each
    everything: bool = False  # all that waits is due
    at_once: Mapping[SourcePartition, int] = {}  # how many of these parts are read at once
    waves_max: int = 1  # of such parts in a range


class Driver:
    """Drives a share of one pipeline."""

    def __init__(self, context: Context, pipeline: Pipeline, how: DriverOptions) -> None:
        self._context = context
        self._pipeline = pipeline
        self._how = how
        self._due = WaitingEvents(how.policy)
        self._failures = PipelineFailures(context, pipeline.id)
        self._members = DriverMembers(context, pipeline.id, once=not how.follow)
        self._share = DriverShare(context, pipeline, self._members, self._failures)
        self._rest_done = False  # what other drivers have, as of the last cycle
        self._answered = False  # the source, in any cycle
        self._is_away = False  # the source, in the last cycle
        self._ended: dict[SourcePartition, TidelogError] = {}  # not retried in this run
        self._seen_ends = SeenEnds(context, pipeline.id)
        self._ends: dict[SourcePartition, str] = {}  # of the source, as last seen
        self._before: list[SourcePartition] | None = None  # known when this driver began
        self._away: set[SourcePartition] = set()  # not in the source, and nothing in progress
        self._full: set[SourcePartition] = set()  # more may wait there, but it cannot be counted
        self._flushed = flush_version(context, pipeline.id)  # ignore requests up to here
        self._beginnings = Beginnings(context, pipeline, how.start or pipeline.start)
        self._ahead_until_s = 0.0

    def run(self) -> int:
        """Runs until the source is drained, or until stopped.

        Returns the number of events archived.

        Raises ``FencedError`` if all drivers were stopped, or another one took over. A run that
        drains processes every source partition it can, then raises the first lasting error. A run
        that follows raises errors at its start, and retries later ones.
        """
        members = self._members
        cycle = Cycle(
            self._context, self._pipeline, members.id, self._how.accept_loss, members.may_claim
        )
        start = self._beginnings.start
        self._tracked = TrackedPartitions(self._context, self._pipeline, cycle, start)
        if self._how.take_over:
            members.take_over()
        else:
            members.join()
        with self._heartbeats(cycle) as lost:
            events = 0
            while not self._how.stop.is_set() and not lost.is_set():
                report = self._attempt(cycle)
                if report is None:
                    continue
                events += report.events
                if self._finish_or_wait(report):
                    break
            if self._flushes_at_end() and not lost.is_set():
                events += self._flush(cycle)
            self._keep_seen(cycle, is_last=True)
            if lost.is_set():
                with contextlib.suppress(UnavailableError):
                    self._pipeline.gate()  # raises if its archive was ended
                raise FencedError(
                    f"pipeline `{self._pipeline.name}`: another driver took over, or it was "
                    "removed: this one stops"
                )
            return events

    def _flush(self, cycle: Cycle) -> int:
        """Writes everything that is there now, whatever the policy."""
        ends = self._look(cycle, {})
        events = 0
        while True:
            report = self._cycle(cycle, ends)
            events += report.events
            if (fenced := _fenced(report)) is not None:
                raise fenced
            if report.errors or not (report.committed or report.ended):
                return events

    def _flushes_at_end(self) -> bool:
        """Returns whether to write waiting events before ending; not during an outage."""
        return self._how.follow and self._how.flush_on_stop and not self._is_away

    def _attempt(self, cycle: Cycle) -> CycleReport | None:
        """Runs a cycle; None after waiting for a source or catalog that cannot be reached."""
        try:
            report = self._cycle(cycle)
        except Exception as exc:
            error = unexpected(f"pipeline `{self._pipeline.name}`", exc)
            if not self._is_retried(error):
                raise
            self._is_away = True
            wait_s = self._failures.add_whole(error)
            self._how.on_outage(error, wait_s)
            self._how.stop.wait(wait_s)
            return None
        self._answered, self._is_away = True, False
        return report

    def _is_retried(self, error: TidelogError) -> bool:
        """Returns whether a driver continues after an error of the source as a whole."""
        passes = isinstance(error, UnavailableError | UnknownOutcomeError)
        fenced = isinstance(error, FencedError)
        return self._how.follow and not fenced and (passes or self._answered)

    def _cycle(
        self, cycle: Cycle, ends: dict[SourcePartition, Bounds] | None = None
    ) -> CycleReport:
        # Read this before the ends: they then include everything before the flush.
        everything = ends is not None or not self._how.follow or self._take_flush_request()
        errors: dict[SourcePartition, TidelogError] = {}
        try:
            bounds = self._look(cycle, errors) if ends is None else dict(ends)
        except Exception as exc:
            error = unexpected(f"pipeline `{self._pipeline.name}`", exc)
            if self._claim_unlisted(cycle, (), errors, error):
                self._run(cycle, _Plan({}, {}, {}), {}, errors)
            raise
        self._failures.remove_whole()
        if ends is None:
            failing = set(self._failures.partitions())
            self._failures.remove(failing - self._share.listed - errors.keys())
        self._claim_unlisted(cycle, bounds, errors)
        bounds = {p: held for p, held in bounds.items() if self._is_tried(p, everything)}
        errors = {p: error for p, error in errors.items() if self._is_tried(p, everything)}
        self._claim(cycle, bounds, errors)
        plan = self._plan(cycle, bounds, errors, everything)
        self._how.on_look(sum(plan.waiting.values()))
        report = self._run(cycle, plan, bounds, errors)
        idle = {p for p, count in plan.waiting.items() if not count and p not in report.errors}
        self._failures.remove(idle)
        return report

    def _run(
        self,
        cycle: Cycle,
        plan: _Plan,
        bounds: Mapping[SourcePartition, Bounds],
        errors: Mapping[SourcePartition, TidelogError],
    ) -> CycleReport:
        """Runs the cycle's steps for claimed partitions, and records the outcome."""
        self._full -= plan.limits.keys()
        events_max, more = self._due.events_max(), dict(errors)

        def on_round(report: CycleReport) -> None:
            self._note_round(report, bounds, events_max, more)
            more.clear()

        find_next = self._next_ranges(plan, bounds)
        with self._trace(len(plan.limits)):
            drivers = len(self._members.living)
            return cycle.run(plan.limits, bounds, plan.parts, find_next, on_round, drivers)

    def _next_ranges(self, plan: _Plan, bounds: Mapping[SourcePartition, Bounds]) -> FindNext:
        """Returns what finds ranges to read ahead, until this driver has other things to do."""
        source, now_s = self._pipeline.source, self._context.clock.monotonic_s
        self._ahead_until_s = now_s() + _AHEAD_S

        def find_next(partition: SourcePartition, start: str) -> NextRange | None:
            held = bounds.get(partition)
            if held is None or self._how.stop.is_set() or now_s() > self._ahead_until_s:
                return None
            waiting = source.count(start, held.end) or 0
            if waiting < (1 if plan.everything else self._due.events_max()):
                return None
            with contextlib.suppress(UnavailableError):
                if self._find_members():
                    self._ahead_until_s = now_s()
            most = waiting // self._due.cut_events_min(self._how.follow)
            parts = max(1, min(plan.at_once.get(partition, 1), most))
            parts = self._in_waves(parts, waiting, plan.waves_max, plan.everything)
            return NextRange(self._limit(partition, start, held, parts), parts)

        return read_no_more if isinstance(source, TrackingSource) else find_next

    def _note_round(
        self,
        report: CycleReport,
        bounds: Mapping[SourcePartition, Bounds],
        events_max: int,
        errors: Mapping[SourcePartition, TidelogError],
    ) -> None:
        """Learns from what was done, and reports it with other errors."""
        for partition in report.errors.keys() - bounds.keys():
            if isinstance(report.errors[partition], NotFoundError):
                del report.errors[partition]  # it was deleted with its range: nothing waits for it
        report.errors.update(errors)
        for partition, manifest in report.committed.items():
            size = sum(file.size for file in manifest.files)
            self._due.done(partition, manifest.read, size)
            held, count = bounds.get(partition), self._pipeline.source.count
            if held and manifest.read >= events_max and count(manifest.end, held.end) is None:
                self._full.add(partition)
        for partition in report.claimed_elsewhere:
            self._failures.released(partition)
        self._failures.remove(report.committed.keys())
        if _fenced(report) is None:  # else the pipeline was removed, and this driver ends
            self._failures.add(report.errors.items())
        self._how.on_cycle(report)

    def _claim_unlisted(
        self,
        cycle: Cycle,
        bounds: Collection[SourcePartition],
        errors: dict[SourcePartition, TidelogError],
        error: TidelogError | None = None,
    ) -> bool:
        """Claims partitions that the source does not list now, if a range is in progress.

        The next run of the cycle commits a decided range. It withdraws one whose events are
        missing; while the source cannot be reached (``error``), that waits. Returns whether there
        is any. Looks at a partition once, until the source lists it again.
        """
        listed = set() if error is not None else self._share.listed - errors.keys()
        known = {*self._known(), *cycle.partitions()}
        known -= set(bounds)
        away = {each for each in known if cycle.has_claimed(each) or each not in listed}
        self._away &= away
        found = False
        for partition in sorted(away - self._away):
            if not self._failures.is_due(partition):
                continue
            with contain_errors(partition, {}, errors):
                intent = read_intent(self._context, self._pipeline.id, partition.text)
                why = errors.get(partition, error)
                if intent is None:
                    self._away.add(partition)
                elif intent.manifest or why is None or isinstance(why, NotFoundError):
                    if not cycle.is_ready(partition):
                        cycle.claim_known(partition)
                    found = True
        return found

    def _known(self) -> list[SourcePartition]:
        """Returns the partitions that the pipeline knew when this driver began."""
        if self._before is None:
            names = read_partitions(self._context, self._pipeline.id)
            self._before = [SourcePartition.named(name) for name in names]
        return self._before

    def _look(
        self, cycle: Cycle, errors: dict[SourcePartition, TidelogError]
    ) -> dict[SourcePartition, Bounds]:
        """Returns what each source partition holds. Adds one that fails to ``errors``.

        Raises if all of them fail, because that is an error of the source.
        """
        self._find_members()
        own, partitions = self._list(cycle, errors)
        if self._tracked.claim_known(own, errors):
            own, partitions = self._list(cycle, errors)
        self._how.on_share(len(own), len(partitions))
        found = bounds_apart(self._pipeline.source, own, errors)
        self._tracked.note(partitions, found)
        self._ends = {each: held.end for each, held in found.items()}
        self._tracked.renew(found)
        self._keep_seen(cycle)
        self._find_vanished(partitions, errors)
        if self._how.accept_loss:
            self._accept_vanished(cycle, errors)
        if errors and not found:
            raise_first(errors.values())
        return found

    def _find_members(self) -> bool:
        """Returns whether drivers came or left; what one left behind may be new to this one."""
        has_changed = self._members.look()
        if has_changed:
            self._before, self._away = None, set()
        return has_changed

    def _keep_seen(self, cycle: Cycle, is_last: bool = False) -> None:
        """Stores ends of the source that may vanish before they are read."""
        source = self._pipeline.source
        heads = {**(self._tracked.heads or {}), **cycle.heads()}
        positions = {each: head.position for each, head in heads.items()}
        if isinstance(source, TrackingSource):
            seen = source.seen()
            ends = {each: seen[each] for each in seen if not self._is_theirs(heads.get(each))}
            self._seen_ends.keep(ends, positions, is_last)
        elif isinstance(source, VanishingSource) and source.may_vanish():
            self._seen_ends.keep(self._ends, positions, is_last)

    def _find_vanished(
        self, listed: Collection[SourcePartition], errors: dict[SourcePartition, TidelogError]
    ) -> None:
        """Reports partitions that the source no longer lists, and that had more than was read."""
        source = self._pipeline.source
        if isinstance(source, VanishingSource) and source.may_vanish():
            ends = self._beginnings.with_listed(self._seen_ends.stored())
            for partition in ends.keys() - set(listed):
                if self._share.is_theirs(partition):
                    continue
                error = self._beginnings.vanished_error(partition, ends[partition])
                if error is not None:
                    errors[partition] = error

    def _accept_vanished(self, cycle: Cycle, errors: dict[SourcePartition, TidelogError]) -> None:
        """Records gaps where the source vanished before its end, as a person accepted."""
        for partition, error in list(errors.items()):
            if isinstance(error, VanishedError):
                with contain_errors(partition, {}, errors):
                    if not cycle.is_ready(partition):
                        cycle.claim(partition, *self._beginnings.find_vanished(partition))
                    cycle.accept_vanished(partition, str(error.context["end"]))
                    del errors[partition]

    def _list(
        self, cycle: Cycle, errors: dict[SourcePartition, TidelogError]
    ) -> tuple[list[SourcePartition], list[SourcePartition]]:
        """Returns which source partitions this driver has or should claim, and which there are."""
        self._tracked.pass_on(self._members.is_alone())
        listed = list(self._pipeline.source.partitions())
        return self._share.look(cycle, listed, self._how.accept_loss, errors), listed

    def _is_tried(self, partition: SourcePartition, everything: bool) -> bool:
        """Returns whether to try a source partition in this cycle; one that failed waits."""
        return partition not in self._ended and (everything or self._failures.is_due(partition))

    def _plan(
        self,
        cycle: Cycle,
        bounds: dict[SourcePartition, Bounds],
        errors: dict[SourcePartition, TidelogError],
        everything: bool,
    ) -> _Plan:
        """Returns how many events wait in each source partition, how far to read, and how."""
        waiting: dict[SourcePartition, int] = {}
        due: dict[SourcePartition, int] = {}
        limits: dict[SourcePartition, str] = {}
        now_s = self._context.clock.monotonic_s()
        for partition, held in list(bounds.items()):
            with contain_errors(partition, bounds, errors):
                count = waiting[partition] = self._count_waiting(cycle, partition, held)
                is_due = self._due.is_due(partition, count, now_s) or partition in self._full
                if count if everything or self._failures.is_failing(partition) else is_due:
                    due[partition] = count
        at_once = self._parts(due)
        waves = waves_max(self._pipeline, at_once)
        parts = {
            each: self._in_waves(at_once[each], count, waves, everything)
            for each, count in due.items()
        }
        for partition in due:
            with contain_errors(partition, bounds, errors):
                at, held = cycle.left_to_read(partition, bounds[partition])
                limits[partition] = self._limit(partition, at, held, parts[partition])
        return _Plan(waiting, limits, parts, everything, at_once, waves)

    def _parts(self, due: Mapping[SourcePartition, int]) -> dict[SourcePartition, int]:
        """Returns in how many parts to read each source partition with this many events."""
        workers, source = self._pipeline.workers, self._pipeline.source
        if not due or not isinstance(source, DividingSource):  # then Spark need not start yet
            return dict.fromkeys(due, 1)
        tasks = workers.parallelism if isinstance(workers, ParallelWorkers) else 1
        return parts_of(due, tasks, self._due.cut_events_min(self._how.follow))

    def _in_waves(self, at_once: int, events: int, waves_max: int, everything: bool) -> int:
        """Returns in how many parts to read this number of events of a source partition."""
        if waves_max == 1:
            return at_once
        return in_waves(at_once, events, self._due.events_max(), waves_max, not everything)

    def _trace(self, partitions: int) -> contextlib.AbstractContextManager[None]:
        """Returns the trace span of a cycle that has work."""
        name, span = self._pipeline.name, self._context.spans.span
        work = span("tidelog.pipeline", pipeline=name, partitions=partitions)
        return work if partitions else contextlib.nullcontext()

    def _claim(
        self,
        cycle: Cycle,
        bounds: dict[SourcePartition, Bounds],
        errors: dict[SourcePartition, TidelogError],
    ) -> None:
        """Claims all partitions that may begin, and removes the others from ``bounds``."""
        new = [partition for partition in bounds if not cycle.is_ready(partition)]
        if new and not self._members.is_alone():
            self._failures.claimed()
        for partition in new:
            with contain_errors(partition, bounds, errors):
                held = bounds[partition]
                begin = self._beginnings.find(partition, held)
                cycle.claim(partition, *begin, self._tracked.list_new)
            if partition not in bounds and partition not in errors:
                self._share.lost(partition)

    def _count_waiting(self, cycle: Cycle, partition: SourcePartition, bounds: Bounds) -> int:
        """Returns about how many events wait; at least 1 if any do, or if an end went back."""
        source, (start, held) = self._pipeline.source, cycle.left_to_read(partition, bounds)
        if start == held.end or cycle.is_ended(partition):
            return 0
        if held.may_be_behind and not source.before(start, held.end):
            return 0
        return max(1, source.count(start, held.end) or 1)

    def _take_flush_request(self) -> bool:
        """Returns whether a flush was requested since the last look, and forgets the request."""
        before, self._flushed = self._flushed, flush_version(self._context, self._pipeline.id)
        return before != self._flushed

    def _limit(self, partition: SourcePartition, start: str, bounds: Bounds, parts: int) -> str:
        """Returns where a range ends: at the policy's size for each part, or at the end."""
        source = self._pipeline.source
        if source.before(start, bounds.first):
            start = bounds.first
        if not source.before(start, bounds.end):
            return bounds.end
        limit = source.cut(start, bounds.end, parts * self._due.events_max())
        if isinstance(source, SparseSource) and source.before(limit, bounds.end):
            return source.reach(SourceRange(partition, start, limit), bounds.end)
        return limit

    def _finish_or_wait(self, report: CycleReport) -> bool:
        """Returns whether to end, or raises why. Waits if there was nothing to do."""
        if (fenced := _fenced(report)) is not None:
            raise fenced
        if self._how.follow:
            if not report.committed:
                self._how.stop.wait(_FOLLOW_S)
            return False
        for partition, error in report.errors.items():
            if not self._may_pass(report, partition, error):
                self._ended[partition] = error
        if report.errors.keys() - self._ended.keys():
            self._how.stop.wait(_LOOK_S)
            return False
        if report.committed or report.ended or report.claimed_elsewhere:
            return False  # a partition that begins again may hold events
        raise_first(self._ended.values())
        return self._leaves_rest()

    def _leaves_rest(self) -> bool:
        """Returns whether a run that drains ends now, and leaves other drivers their partitions.

        Ends only if the other drivers are alive; a dead driver's partitions are claimed first. With
        ``wait``, ends only after a look that found the others finished.
        """
        left = len(self._share.theirs)
        if self._how.wait:
            before, self._rest_done = self._rest_done, self._share.is_rest_done()
            is_over = not left or (before and self._rest_done)
        else:
            is_over = self._share.is_rest_alive()
        if not is_over:
            self._how.stop.wait(_LOOK_S)
        elif left:
            self._how.on_left(left, len(self._share.listed))
        return is_over

    def _may_pass(
        self, report: CycleReport, partition: SourcePartition, error: TidelogError
    ) -> bool:
        """Returns whether a run that drains retries a source partition.

        A withdrawn range is planned again, from what the source holds then. Only that plan shows
        whether something is lost, and whether that was accepted.
        """
        if isinstance(error, FrozenError):
            return True
        passing = isinstance(error, UnavailableError) or partition in report.withdrawn
        return passing and self._failures.attempts(partition) < _ATTEMPTS

    def _is_theirs(self, head: Progress | None) -> bool:
        """Returns whether a head that was read says that another living driver has it."""
        members = self._members
        return head is not None and head.owner != members.id and head.owner in members.living

    @contextlib.contextmanager
    def _heartbeats(self, cycle: Cycle) -> Iterator[threading.Event]:
        """Sends heartbeats while the body runs. Sets the event if all drivers must stop."""
        with beating(self._context, self._members.beat) as lost:
            try:
                yield lost
            finally:
                self._share.leave(cycle)


def _fenced(report: CycleReport) -> FencedError | None:
    """Returns the error of a source partition that was closed, or whose generation was replaced."""
    found = (error for error in report.errors.values() if isinstance(error, FencedError))
    return next(found, None)
