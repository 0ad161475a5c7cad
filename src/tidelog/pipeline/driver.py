"""The driver: holds a shard, looks at the source, and runs cycles until it is told to stop.

A heartbeat runs in a thread of its own while cycles run, so that a long Spark job keeps the shard.
A stop signal lets the cycle under way finish; a second one may abandon it at any point, since the
next driver finishes what is there. A driver that is told to take over raises the shard's epoch at
once: the other one fails at its next write, and what it had under way is finished here.

Any failure in one source partition stops that partition alone. A driver that
follows tries it again after waits that double, and so it does when the source cannot be reached at
all (``failures``). A range that is decided needs no source: it is committed also when its source
partition was deleted, or the source cannot be reached (``_resume``). Before the source has answered
once, a refusal that will last (a topic that does not exist, wrong credentials) ends the run: only a
source that cannot be reached is waited for.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tidelog.connectors.source import (
    Bounds,
    SourcePartition,
    SourceRange,
    Sparse,
    TrackingSource,
    VanishedError,
    Vanishing,
    bounds_apart,
)
from tidelog.context import Context
from tidelog.coordination.ownership import beating
from tidelog.coordination.pipeline_rows import read_intent, read_listed, read_partitions
from tidelog.errors import (
    FencedError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
    unexpected,
)
from tidelog.model.pipeline import Begin, ListedPartition, Progress
from tidelog.pipeline.base import FrozenError, Pipeline
from tidelog.pipeline.cycle import Cycle, CycleReport
from tidelog.pipeline.failures import PipelineFailures
from tidelog.pipeline.policy import Due, FilePolicy
from tidelog.pipeline.shard import PipelineShard, flush_version, share_of
from tidelog.pipeline.source_partitions import (
    Lineage,
    SeenEnds,
    look_at_source,
    track,
    vanished_error,
)

__all__ = ["Driver", "DriverOptions", "new_stop"]

_FOLLOW_S = 1.0  # between looks at the source while following
_ATTEMPTS = 5  # of a partition whose errors may pass, in a run that ends by itself


def new_stop() -> threading.Event:
    """An event that stops a driver; a simulation has its own in place of ``threading``."""
    return threading.Event()


@dataclass
class DriverOptions:
    """How a driver runs."""

    follow: bool = False  # go on, by policy; else drain what is there and end
    policy: FilePolicy = field(default_factory=FilePolicy)
    accept_loss: bool = False
    shard: int = 0
    shards: int = 1
    start: str = ""  # earliest, or latest: the ends that its creation saw; empty: the pipeline's
    take_over: bool = False  # from the driver that has the shard, without waiting for it
    flush_on_stop: bool = False  # lay down what waits before ending
    stop: threading.Event = field(default_factory=new_stop)
    on_look: Callable[[int], None] = lambda _: None  # with the events that wait
    on_cycle: Callable[[CycleReport], None] = lambda _: None
    on_outage: Callable[[TidelogError, float], None] = lambda *_: None  # with the wait in seconds

    def __post_init__(self) -> None:
        if not 0 <= self.shard < self.shards:
            raise InvalidError(f"shard {self.shard} of {self.shards}: give 0 to {self.shards - 1}")
        if self.start not in ("", "earliest", "latest"):
            raise InvalidError(f"start `{self.start}`: give earliest or latest")


class Driver:
    """Drives one shard of one pipeline."""

    def __init__(self, context: Context, pipeline: Pipeline, how: DriverOptions) -> None:
        self._context = context
        self._pipeline = pipeline
        self._how = how
        self._due = Due(how.policy)
        self._failures = PipelineFailures(context, pipeline.id)
        self._answered = False  # the source, in any cycle
        self._is_away = False  # the source, in the last cycle
        self._ended: dict[SourcePartition, TidelogError] = {}  # not tried again in this run
        self._heads: dict[SourcePartition, Progress] | None = None  # as they were last read
        self._seen_ends = SeenEnds(context, pipeline.id)
        self._ends: dict[SourcePartition, str] = {}  # of the source, as they were last seen
        self._before: list[SourcePartition] | None = None  # known when this driver began
        self._away: set[SourcePartition] = set()  # not in the source, and nothing is under way
        self._full: set[SourcePartition] = set()  # more may wait there, and nobody can count it
        self._flushed = flush_version(context, pipeline.id)  # requests up to here are not for us
        self._listed: dict[str, ListedPartition] | None = None  # partitions, once it is known

    def run(self) -> int:
        """Until the source is drained, or until told to stop; the number of events archived.

        Stands by while another driver has the shard. ``FencedError`` when it was taken from us.
        A run that drains does all source partitions that it can, then raises the first lasting
        error of another one. A run that follows raises what is refused at its start, and retries
        what fails later.
        """
        shard = PipelineShard(self._context, self._pipeline.id, self._how.shard, self._how.shards)
        while not shard.try_take(self._how.take_over):
            if self._how.stop.wait(0.2):
                return 0
        with self._beating(shard) as lost:
            cycle = Cycle(self._context, self._pipeline, shard.epoch, self._how.accept_loss)
            events = 0
            while not self._how.stop.is_set() and not lost.is_set():
                report = self._attempt(cycle)
                if report is None:
                    continue
                events += report.events
                if self._is_done(report):
                    break
            if self._flushes_at_end() and not lost.is_set():
                events += self._flush(cycle)
            self._keep_seen(cycle, is_last=True)
            if lost.is_set():
                with contextlib.suppress(UnavailableError):
                    self._pipeline.gate()  # says so where its archive was ended
                raise FencedError(
                    f"pipeline `{self._pipeline.name}`: another driver has taken shard "
                    f"{self._how.shard}: this one stops"
                )
            return events

    def _flush(self, cycle: Cycle) -> int:
        """Lay down all that is there now, whatever the policy says."""
        ends = self._look(cycle, {})
        events = 0
        while True:
            report = self._cycle(cycle, ends)
            events += report.events
            _raise_fenced(report)
            if report.errors or not (report.committed or report.decided):
                return events

    def _flushes_at_end(self) -> bool:
        """Whether to write what waits before ending; not while the source cannot be reached."""
        return self._how.follow and self._how.flush_on_stop and not self._is_away

    def _attempt(self, cycle: Cycle) -> CycleReport | None:
        """Run a cycle; None after a wait, when the source or the catalog cannot be reached."""
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
        """Whether a driver continues after an error of the source as a whole."""
        passes = isinstance(error, UnavailableError | UnknownOutcomeError)
        fenced = isinstance(error, FencedError)
        return self._how.follow and not fenced and (passes or self._answered)

    def _cycle(
        self, cycle: Cycle, ends: dict[SourcePartition, Bounds] | None = None
    ) -> CycleReport:
        # Before the ends: these then hold all that came before the flush.
        everything = ends is not None or not self._how.follow or self._flush_wanted()
        errors: dict[SourcePartition, TidelogError] = {}
        try:
            bounds = self._look(cycle, errors) if ends is None else dict(ends)
        except Exception as exc:
            error = unexpected(f"pipeline `{self._pipeline.name}`", exc)
            if self._resume(cycle, (), errors, error):
                self._run(cycle, {}, {}, errors)
            raise
        self._failures.remove_whole()
        if ends is None:
            failing = self._own(self._failures.partitions())
            self._failures.remove(set(failing) - bounds.keys() - errors.keys())
        self._resume(cycle, bounds, errors)
        bounds = {p: held for p, held in bounds.items() if self._is_tried(p, everything)}
        errors = {p: error for p, error in errors.items() if self._is_tried(p, everything)}
        self._adopt(cycle, bounds, errors)
        waiting, limits = self._plan(cycle, bounds, errors, everything)
        self._how.on_look(sum(waiting.values()))
        report = self._run(cycle, limits, bounds, errors)
        idle = {p for p, count in waiting.items() if not count and p not in report.errors}
        self._failures.remove(idle)
        return report

    def _run(
        self,
        cycle: Cycle,
        limits: Mapping[SourcePartition, str],
        bounds: Mapping[SourcePartition, Bounds],
        errors: Mapping[SourcePartition, TidelogError],
    ) -> CycleReport:
        """Run the cycle's steps for adopted partitions, and note what came of it."""
        events_max = self._due.events_max()
        with self._span(len(limits)):
            report = cycle.run(limits, bounds)
        for partition in report.errors.keys() - bounds.keys():
            if isinstance(report.errors[partition], NotFoundError):
                del report.errors[partition]  # it and its range were deleted: nothing waits for it
        report.errors.update(errors)
        self._full -= limits.keys()
        for partition, manifest in report.committed.items():
            size = sum(file.size for file in manifest.files)
            self._due.done(partition, manifest.read, size)
            if manifest.read >= events_max and self._is_uncounted(manifest.end, bounds, partition):
                self._full.add(partition)
        self._failures.remove(report.committed.keys())
        if not _is_fenced(report):  # else another driver reports what fails, and this one ends
            self._failures.add(report.errors.items())
        self._how.on_cycle(report)
        return report

    def _resume(
        self,
        cycle: Cycle,
        bounds: Collection[SourcePartition],
        errors: dict[SourcePartition, TidelogError],
        error: TidelogError | None = None,
    ) -> bool:
        """Adopt partitions that the source does not show now, where a range is under way.

        The next run of the cycle commits a range that is decided. It withdraws another one whose
        events are missing; while the source cannot be reached (``error``), that waits. Returns
        whether there is any. A partition is asked for once, until the source shows it again.
        """
        away = set(self._own([*self._known(), *cycle.partitions()])) - set(bounds)
        self._away &= away
        found = False
        for partition in sorted(away - self._away):
            if not self._failures.is_due(partition):
                continue
            with _kept(partition, {}, errors):
                intent = read_intent(self._context, self._pipeline.id, partition.text)
                why = errors.get(partition, error)
                if intent is None:
                    self._away.add(partition)
                elif intent.manifest or why is None or isinstance(why, NotFoundError):
                    if not cycle.adopted(partition):
                        cycle.adopt(partition, Begin("", "earliest"))  # its head is there
                    found = True
        return found

    def _known(self) -> list[SourcePartition]:
        """The partitions that the pipeline knew when this driver began."""
        if self._before is None:
            names = read_partitions(self._context, self._pipeline.id)
            self._before = [SourcePartition.named(name) for name in names]
        return self._before

    def _look(
        self, cycle: Cycle, errors: dict[SourcePartition, TidelogError]
    ) -> dict[SourcePartition, Bounds]:
        """Return what each source partition holds; one that cannot be reached is an error of it.

        Raises the error where none can be asked, since that is the source's.
        """
        self._track(cycle)
        partitions = self._partitions()
        found = bounds_apart(self._pipeline.source, partitions, errors)
        self._ends = {each: held.end for each, held in found.items()}
        self._keep_seen(cycle)
        self._find_vanished(partitions, errors)
        if self._how.accept_loss:
            self._accept_vanished(cycle, errors)
        if errors and not found:
            raise next(iter(errors.values()))
        return found

    def _keep_seen(self, cycle: Cycle, is_last: bool = False) -> None:
        """Keep ends of the source that may vanish before they are read."""
        source = self._pipeline.source
        heads = {**(self._heads or {}), **cycle.heads()}
        positions = {each: head.position for each, head in heads.items()}
        if isinstance(source, TrackingSource):
            ends = {each: source.seen()[each] for each in self._own(source.seen())}
            self._seen_ends.keep(ends, positions, is_last)
        elif isinstance(source, Vanishing) and source.may_vanish():
            self._seen_ends.keep(self._ends, positions, is_last)

    def _find_vanished(
        self, listed: Collection[SourcePartition], errors: dict[SourcePartition, TidelogError]
    ) -> None:
        """Report partitions that the source no longer lists, and had more than was read."""
        source = self._pipeline.source
        if isinstance(source, Vanishing) and source.may_vanish():
            ends = self._seen_ends.stored()
            for partition in self._own(ends.keys() - set(listed)):
                error = vanished_error(self._context, self._pipeline.id, partition, ends[partition])
                if error is not None:
                    errors[partition] = error

    def _accept_vanished(self, cycle: Cycle, errors: dict[SourcePartition, TidelogError]) -> None:
        """Record gaps where the source vanished before its end, as a person accepted."""
        for partition, error in list(errors.items()):
            if isinstance(error, VanishedError):
                with _kept(partition, {}, errors):
                    if not cycle.adopted(partition):
                        cycle.adopt(partition, Begin("", "earliest"))  # its head is there
                    cycle.accept_vanished(partition, str(error.context["end"]))
                    del errors[partition]

    def _track(self, cycle: Cycle) -> None:
        """Pass to the source what was read; heads of other drivers change beside us."""
        others = self._heads if self._how.shards == 1 else {}
        known = {each: head for each, head in (others or {}).items() if not cycle.has(each)}
        heads = None if self._heads is None else {**known, **cycle.heads()}
        self._heads = track(self._context, self._pipeline.id, self._pipeline.source, heads)

    def _is_tried(self, partition: SourcePartition, everything: bool) -> bool:
        """Whether a source partition is tried in this cycle; one that failed waits its time."""
        return partition not in self._ended and (everything or self._failures.is_due(partition))

    def _plan(
        self,
        cycle: Cycle,
        bounds: dict[SourcePartition, Bounds],
        errors: dict[SourcePartition, TidelogError],
        everything: bool,
    ) -> tuple[dict[SourcePartition, int], dict[SourcePartition, str]]:
        """Return how many events wait in each source partition, and how far to read where."""
        waiting: dict[SourcePartition, int] = {}
        limits: dict[SourcePartition, str] = {}
        now_s = self._context.clock.monotonic_s()
        for partition, held in list(bounds.items()):
            with _kept(partition, bounds, errors):
                count = waiting[partition] = self._waiting(cycle, partition, held)
                due = self._due.is_due(partition, count, now_s) or partition in self._full
                if count if everything or self._failures.is_failing(partition) else due:
                    limits[partition] = self._limit(cycle, partition, held)
        return waiting, limits

    def _span(self, partitions: int) -> contextlib.AbstractContextManager[None]:
        """Around a cycle that has something to do."""
        if not partitions:
            return contextlib.nullcontext()
        name = self._pipeline.name
        return self._context.spans.span("tidelog.pipeline", pipeline=name, partitions=partitions)

    def _adopt(
        self,
        cycle: Cycle,
        bounds: dict[SourcePartition, Bounds],
        errors: dict[SourcePartition, TidelogError],
    ) -> None:
        """Adopt all that may be begun; those that may not are taken out of ``bounds``."""
        new = [partition for partition in bounds if not cycle.adopted(partition)]
        lineage = Lineage(self._context, self._pipeline, cycle, new)
        for partition in new:
            with _kept(partition, bounds, errors):
                if lineage.is_ready(partition, self._how.accept_loss):
                    held = bounds[partition]
                    begin, note = self._begin(partition, held)
                    cycle.adopt(partition, begin, held.incarnation, note)
                else:
                    del bounds[partition]
        source = self._pipeline.source
        for partition, note in (
            source.renewed().items() if isinstance(source, TrackingSource) else ()
        ):
            if partition in bounds:
                with _kept(partition, bounds, errors):
                    cycle.renew(partition, note)

    def _begin(self, partition: SourcePartition, held: Bounds) -> tuple[Begin, bytes]:
        """Where a partition begins that has no head, and what its source knows it by.

        At its own first event, unless it was there, as it is, when the pipeline was created: only
        then does ``latest`` mean the end that it had.
        """
        now_ms = self._context.clock.now_ms()
        seen = self._seen().get(partition.text)
        was_there = seen is not None and seen.end and seen.incarnation == held.incarnation
        start = self._how.start or self._pipeline.start
        if start == "latest" and seen is not None and was_there:
            position = self._pipeline.source.cut(seen.end, seen.end, 0)
            return Begin(position, "latest", now_ms), seen.note
        note = b"" if held.begins == "earliest" else held.note  # what is there is to be read
        return Begin(held.first, held.begins, now_ms), note

    def _seen(self) -> dict[str, ListedPartition]:
        """The partitions that the pipeline's creation saw; else, those of this first look."""
        if self._listed is None:
            found = read_listed(self._context, self._pipeline.id)
            if not found and self._pipeline.lists:
                look_at_source(self._context, self._pipeline.id, self._pipeline.source)
                found = read_listed(self._context, self._pipeline.id)
            self._listed = found
        return self._listed

    def _waiting(self, cycle: Cycle, partition: SourcePartition, bounds: Bounds) -> int:
        """About how many events wait; at least 1 where something does, or an end went back."""
        position = cycle.position(partition)
        if position == bounds.end or cycle.is_ended(partition):
            return 0
        return max(1, self._pipeline.source.count(position, bounds.end) or 1)

    def _is_uncounted(
        self, position: str, bounds: Mapping[SourcePartition, Bounds], partition: SourcePartition
    ) -> bool:
        """Whether the source cannot tell how many events wait behind a position."""
        held = bounds.get(partition)
        return held is not None and self._pipeline.source.count(position, held.end) is None

    def _flush_wanted(self) -> bool:
        """Whether somebody has asked for it since the last look."""
        before, self._flushed = self._flushed, flush_version(self._context, self._pipeline.id)
        return before != self._flushed

    def _limit(self, cycle: Cycle, partition: SourcePartition, bounds: Bounds) -> str:
        """Where the next range ends: as much as the policy wants in one, or all that is there."""
        source, start = self._pipeline.source, cycle.position(partition)
        if source.before(start, bounds.first):
            start = bounds.first
        if not source.before(start, bounds.end):
            return bounds.end
        limit = source.cut(start, bounds.end, self._due.events_max())
        if isinstance(source, Sparse) and source.before(limit, bounds.end):
            return source.reach(SourceRange(partition, start, limit), bounds.end)
        return limit

    def _is_done(self, report: CycleReport) -> bool:
        """Whether to end; waits before the next cycle where nothing was done."""
        _raise_fenced(report)
        if self._how.follow:
            if not report.committed:
                self._how.stop.wait(_FOLLOW_S)
            return False
        for partition, error in report.errors.items():
            if not self._may_pass(report, partition, error):
                self._ended[partition] = error
        if report.errors.keys() - self._ended.keys():
            self._how.stop.wait(0.2)
            return False
        if report.committed or report.decided:
            return False  # one that begins again may hold events
        for error in self._ended.values():
            raise error
        return True

    def _may_pass(
        self, report: CycleReport, partition: SourcePartition, error: TidelogError
    ) -> bool:
        """Whether a run that drains tries a source partition again.

        A range that was withdrawn is planned again, from what the source holds by then: only that
        plan shows whether something is lost, and whether that was accepted.
        """
        if isinstance(error, FrozenError):
            return True
        passing = isinstance(error, UnavailableError) or partition in report.withdrawn
        return passing and self._failures.attempts(partition) < _ATTEMPTS

    def _partitions(self) -> list[SourcePartition]:
        return self._own(self._pipeline.source.partitions())

    def _own(self, partitions: Iterable[SourcePartition]) -> list[SourcePartition]:
        """Those of some source partitions that are of this driver's shard."""
        shards, shard = self._how.shards, self._how.shard
        return [each for each in partitions if share_of(each, shards) == shard]

    @contextlib.contextmanager
    def _beating(self, shard: PipelineShard) -> Iterator[threading.Event]:
        """Heartbeats while the body runs; the event is set when the shard was lost."""
        try:
            with beating(self._context, shard.beat) as lost:
                yield lost
        finally:
            shard.release()


@contextlib.contextmanager
def _kept(
    partition: SourcePartition,
    bounds: dict[SourcePartition, Bounds],
    errors: dict[SourcePartition, TidelogError],
) -> Iterator[None]:
    """Turn any exception into an error of one source partition, which is left out then."""
    try:
        yield
    except Exception as exc:  # noqa: BLE001 - one source partition must not stop the others
        errors[partition] = unexpected(f"source partition `{partition.text}`", exc)
        bounds.pop(partition, None)


def _is_fenced(report: CycleReport) -> bool:
    """Whether another driver has a source partition that was ours."""
    return any(isinstance(error, FencedError) for error in report.errors.values())


def _raise_fenced(report: CycleReport) -> None:
    """Raise the error of a source partition that another driver has."""
    for error in report.errors.values():
        if isinstance(error, FencedError):
            raise error
