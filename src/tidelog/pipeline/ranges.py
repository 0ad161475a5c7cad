"""Ranges: when one is due, how it is cut into tasks, read ahead, or planned again after a failure.

**Due** is a source partition by size or age, whichever comes first. Clocks only decide how much
goes into a range, never what is in it. So every policy archives each event once. These functions
are pure, except for the time that callers pass in. A range that failed ends earlier, or is planned
again.

**Cuts.** One task reads each part of a range, and a manifest lists the files of all of them. A
range is planned once, and its plan is divided at the cuts that its intent records. Tasks run in any
order, on any machine. Their results count in the order of the source, up to the first part that
ended before its limit or failed: what comes after it would leave a hole. So a manifest always
describes one range without a hole, as if one task had read it. What later parts staged is deleted,
by the driver or by a sweep, and read again with a later range. What a sink decides about a range as
a whole, such as how many dead letters it may have, is decided about what all parts staged.

**Reading ahead.** The next range is read while the last one is copied and committed. Steps 5 to 7
of a cycle (``cycle``) become these where more of a source partition waits:

1. record, in one write: the key of the manifest into the
   ``intent``, and with it the range to read ahead. That one
   begins where the manifest ends, so nothing is guessed      → crash: the next driver commits the
                                                                decided range, forgets the other
                                                                one, and plans again
2. after that, plan what is read ahead, and look for what was
   erased. Its tasks stage files while step 3 runs            → crash: the same; a sweep deletes
                                                                what was staged
3. publish the decided range                                  → crash: the same
4. commit it, in one write: ``commit`` row, ``head`` to the
   end, and the range that is read ahead is the ``intent``    → crash: the next driver does it
5. when its tasks have ended, go to step 1 with what they
   staged; without more to read, to step 5 of the cycle       → crash: as there

What was read ahead counts only if step 4 succeeded: then its ``intent`` is there, undecided, and it
begins where the committed range ended. Otherwise what it staged is deleted. The ``intent`` names
the range from before its first event is read until it is committed, so erasures, proofs, sweeps and
seeks wait for it as for any other range (``Intent.reach``).

Nothing is read ahead if:

- a part of the range failed;
- the source cannot count what waits;
- the source tracks files by what was committed.

A cycle without more to read takes no thread and no further write; one that reads ahead saves the
write of each next ``intent``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import NamedTuple

from tidelog.clock import Ids
from tidelog.connectors.archive.reader import CarriedReader
from tidelog.connectors.sink import (
    CopyingSink,
    FileSink,
    JudgingSink,
    RecordRefusedError,
    Sink,
    WriterResult,
)
from tidelog.connectors.source import (
    ChangingReader,
    DividingReader,
    DividingSource,
    RangeReader,
    Source,
    SourcePartition,
    SourceRange,
    TimedSource,
)
from tidelog.errors import (
    CorruptError,
    InternalError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    unexpected,
)
from tidelog.model import defaults, layout
from tidelog.model.limits import RANGE_CUTS_MAX
from tidelog.model.pipeline import FileEntry, Intent, Manifest, offsets_between
from tidelog.model.times import duration_ms
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.source_state import SourceState
from tidelog.pipeline.tasks import ParallelWorkers, Task, TaskOutcome, TaskOutput

__all__ = [
    "FilePolicy",
    "FindNext",
    "NextRange",
    "RangeAhead",
    "RangeResult",
    "RangeRounds",
    "Results",
    "WaitingEvents",
    "check_plan",
    "choose_cuts",
    "discard_staged",
    "divide_reader",
    "end_before",
    "in_waves",
    "intend_next",
    "join_parts",
    "parts_of",
    "plan_tasks",
    "read_no_more",
    "run_in_thread",
    "run_ranges",
    "waves_max",
]

_FIRST_GUESS_BYTES = 500  # of an event, before any was seen
_CUT_BYTES_MIN = 32_000_000  # of a task; less is not worth its start, and makes small files


@dataclass(frozen=True, slots=True)
class FilePolicy:
    """How large and old a file may get before it is closed."""

    max_bytes: int = defaults.ARCHIVE_FILE_BYTES  # of events as received, per source partition
    max_age_ms: int = duration_ms(
        defaults.ARCHIVE_FILE_AGE
    )  # since the first waiting event was seen

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.max_age_ms < 1:
            raise InvalidError(
                f"policy: max_bytes is {self.max_bytes} and max_age {self.max_age_ms} ms: "
                "give more than 0"
            )


@dataclass
class WaitingEvents:
    """Tracks since when events wait, and how large they are."""

    policy: FilePolicy
    _since_s: dict[SourcePartition, float] = field(default_factory=dict)
    _event_bytes: float = _FIRST_GUESS_BYTES

    def is_due(self, partition: SourcePartition, waiting: int, now_s: float) -> bool:
        """Returns whether a partition with this many waiting events is due."""
        if waiting <= 0:
            self._since_s.pop(partition, None)
            return False
        since_s = self._since_s.setdefault(partition, now_s)
        if waiting * self._event_bytes >= self.policy.max_bytes:
            return True
        return (now_s - since_s) * 1000 >= self.policy.max_age_ms

    def done(self, partition: SourcePartition, events: int, size: int) -> None:
        """Learns from a committed range."""
        self._since_s.pop(partition, None)
        if events and size:
            self._event_bytes = 0.7 * self._event_bytes + 0.3 * size / events

    def events_max(self) -> int:
        """Returns how many events make a range of the target size."""
        return max(1_000, int(self.policy.max_bytes / self._event_bytes))

    def cut_events_min(self, follow: bool) -> int:
        """Returns how many events a part has at least.

        A run that follows cuts only a backlog, so that its files keep their size.
        """
        if follow:
            return self.events_max()
        return max(1_000, int(min(_CUT_BYTES_MIN, self.policy.max_bytes) / self._event_bytes))


def parts_of(
    waiting: Mapping[SourcePartition, int], tasks: int, events_min: int
) -> dict[SourcePartition, int]:
    """Returns in how many parts to read each source partition, by how many events wait there.

    All parts together are about as many as ``tasks`` that run at once; each has ``events_min``
    events or more.
    """
    total = max(1, sum(waiting.values()))
    parts = {}
    for partition, events in waiting.items():
        share = -(-tasks * events // total)
        parts[partition] = max(1, min(share, events // events_min, RANGE_CUTS_MAX))
    return parts


def waves_max(pipeline: Pipeline, at_once: Mapping[SourcePartition, int]) -> int:
    """Returns how many waves of tasks a range may have, with this number of tasks in each.

    The next job takes time to start, while no task runs. Sinks other than files send a range as a
    whole, and a rate is shared by all tasks of a job: these have one wave.
    """
    has_files, workers = isinstance(pipeline.sink, FileSink), pipeline.workers
    if not has_files or pipeline.rate is not None:
        return 1
    if not at_once or not isinstance(pipeline.source, DividingSource):
        return 1  # Spark need not start yet
    if not isinstance(workers, ParallelWorkers):
        return 1
    return max(1, workers.waves * workers.parallelism // sum(at_once.values()))


def in_waves(parts: int, events: int, events_max: int, waves_max: int, whole_files: bool) -> int:
    """Returns in how many parts to read a range, of which ``parts`` are read at once.

    A range has up to ``waves_max`` waves of such parts, as many as its ``events`` need if a part
    has ``events_max``. With ``whole_files`` no part has fewer.
    """
    waves, rest = divmod(events, parts * events_max)
    waves += bool(rest and not whole_files)
    return max(parts, min(parts * min(waves, waves_max), RANGE_CUTS_MAX))


def end_before(source: Source, range: SourceRange, error: TidelogError) -> str | None:
    """Returns where to end a range before the record that a sink refused.

    Returns None for other errors, or if nothing is before the record. If positions are times, the
    range ends before the record's time. If they are neither times nor offsets, it ends after as
    many events as precede the record, or after the batches before it if the source cannot stop
    inside a record.
    """
    if not isinstance(error, RecordRefusedError):
        return None
    offset = int(error.context["offset"])
    if offsets_between(range.start, range.limit) is not None:
        position = str(offset)
        is_between = source.before(range.start, position) and source.before(position, range.limit)
        return position if is_between else None
    if isinstance(source, TimedSource):
        limit = source.limit_before(range.limit, int(error.context["time_ms"]))
        is_between = source.before(range.start, limit) and source.before(limit, range.limit)
        return limit if is_between else None
    for events in (offset - range.ordinal, int(error.context.get("read", 0))):
        limit = source.cut(range.start, range.limit, events) if events > 0 else range.limit
        if limit != range.limit:  # a cut never exceeds the one before, so this ends
            return limit
    return None


def check_plan(source: Source, reader: RangeReader) -> None:
    """Raises ``UnavailableError`` if files of a range changed since it was planned.

    An erasure replaces files of a source archive, and a replay of its dead letters deletes some.
    That is not damage: the range is planned and read again.
    """
    now, partition = source.reader(reader.range), reader.range.partition.text
    if now != reader or (isinstance(now, ChangingReader) and now.is_changing):
        raise UnavailableError(
            f"source partition `{partition}`: its files are being changed by "
            "an erasure or a replay of dead letters: read it again",
            partition=partition,
        )


_KINDS = ("data", "dead")  # of files with events


def choose_cuts(source: Source, range: SourceRange, parts: int) -> tuple[str, ...]:
    """Returns where to cut a range into about this many parts; nowhere if its source cannot."""
    if parts < 2 or not isinstance(source, DividingSource):
        return ()
    return source.divide(range, parts)


def divide_reader(source: Source, reader: RangeReader, cuts: Sequence[str]) -> list[RangeReader]:
    """Returns readers of all parts of a range in order; the reader itself if it has none.

    A reader may end before the limit that its range was planned with: later cuts do not count.
    """
    start, limit = reader.range.start, reader.range.limit
    inside = [cut for cut in cuts if source.before(start, cut) and source.before(cut, limit)]
    if not inside or not isinstance(reader, DividingReader):
        return [reader]
    parts: list[RangeReader] = []
    for first, last in zip([start, *inside], [*inside, limit], strict=True):
        part = reader.part(first, last)
        if part is None:
            return [reader]
        parts.append(part)
    return parts


def plan_tasks(
    pipeline: Pipeline, state: SourceState, intent: Intent, ordinal: int, ids: Ids
) -> list[Task]:
    """Returns a task for each part of a range, which stages in a folder of its own.

    ``ordinal`` is that of its first event. Raises ``NotFoundError`` if the range is not there.
    """
    start = intent.lost[-1].end if intent.lost else intent.start
    wanted = SourceRange(state.partition, start, intent.limit, ordinal, intent.incarnation)
    state.reader = reader = pipeline.source.reader(wanted)
    sink = pipeline.sink
    if state.head.names and isinstance(sink, FileSink):
        sink = sink.with_suffix(state.head.names)
    transform = "" if state.carried and state.carried.as_is else pipeline.transform
    state.erased = pipeline.erased(state.partition.text)  # since the intent; later ones wait
    parts = divide_reader(pipeline.source, reader, intent.cuts)
    where = (pipeline.id, state.partition.text, state.head.epoch)
    task = Task(reader, sink, "", transform, erased=state.erased, title=pipeline.heading)
    return [
        replace(task, reader=part, staging=layout.staging(*where, ids.new()), part=number)
        for number, part in enumerate(parts)
    ]


@dataclass(frozen=True, slots=True)
class RangeResult:
    """What the tasks of one range produced together."""

    produced: TaskOutput | None = None  # up to the first part that ended early or failed
    error: TidelogError | None = None  # of that part
    unused: tuple[FileEntry, ...] = ()  # staged by parts after it

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Returns what was staged and counts."""
        return self.produced.staged.files if self.produced is not None else ()


def join_parts(tasks: Sequence[Task], outcomes: Sequence[TaskOutcome]) -> RangeResult:
    """Returns the result of a range from the outcomes of all its parts, both in order."""
    counted: list[TaskOutput] = []
    error: TidelogError | None = None
    for task, outcome in zip(tasks, outcomes, strict=True):
        if outcome.produced is None:
            error = outcome.error
            break
        counted.append(outcome.produced)
        if outcome.produced.end != task.range.limit:
            break
    later = [outcome.produced for outcome in outcomes[len(counted) :] if outcome.produced]
    unused = tuple(file for each in later for file in each.staged.files)
    return RangeResult(_joined(counted) if counted else None, error, unused)


def _joined(counted: Sequence[TaskOutput]) -> TaskOutput:
    """Returns the output of neighboring parts as that of one task."""
    first = next((each.staged for each in counted if each.staged.dead), WriterResult())
    staged = WriterResult(
        tuple(file for each in counted for file in each.staged.files),
        sum(each.staged.events for each in counted),
        sum(each.staged.dead for each in counted),
        sum(each.staged.left_out for each in counted),
        first.first_dead,
        first.why_dead,
    )
    note = b"".join(each.note for each in counted)
    return TaskOutput(counted[-1].end, sum(each.read for each in counted), staged, note)


def discard_staged(
    pipeline: Pipeline, partition: SourcePartition, files: tuple[FileEntry, ...]
) -> None:
    """Deletes what tasks staged that no manifest lists; after a crash a sweep does."""
    if files:
        with contextlib.suppress(TidelogError):
            pipeline.sink.discard(
                Manifest(pipeline.id, partition.text, "", "", 0, 0, 0, files=files)
            )


def _judged(sink: Sink, partition: SourcePartition, result: RangeResult) -> RangeResult:
    """Returns the result of a range, without any output if the sink refuses it as a whole."""
    if result.produced is None or not isinstance(sink, JudgingSink):
        return result
    try:
        sink.judge(partition.text, result.produced.staged)
    except TidelogError as exc:
        return RangeResult(error=exc, unused=(*result.produced.staged.files, *result.unused))
    return result


def _with_copies(pipeline: Pipeline, task: Task, result: RangeResult) -> RangeResult:
    """Returns the result of a range with the files that it takes over from another generation.

    These are staged by copies on the server. An erasure may rewrite a file while it is copied, so
    the range is planned again afterwards: the copies count only if nothing has changed.
    """
    reader, made, sink = task.reader, result.produced, pipeline.sink
    files = reader.carried.files if isinstance(reader, CarriedReader) else ()
    if made is None or not files or not isinstance(sink, CopyingSink):
        return result
    copies: tuple[FileEntry, ...] = ()
    try:
        try:
            copies = sink.copy(files, task.staging)
        except NotFoundError as exc:
            check_plan(pipeline.source, reader)
            raise CorruptError(f"{exc}: restore it from a copy", **exc.context) from exc
        check_plan(pipeline.source, reader)
    except TidelogError as exc:
        return RangeResult(error=exc, unused=(*made.staged.files, *copies, *result.unused))
    events = {kind: sum(each.events for each in copies if each.kind == kind) for kind in _KINDS}
    staged = replace(
        made.staged,
        files=(*copies, *made.staged.files),
        events=made.staged.events + events["data"],
        dead=made.staged.dead + events["dead"],
    )
    return replace(
        result, produced=replace(made, read=made.read + sum(events.values()), staged=staged)
    )


def run_ranges(
    pipeline: Pipeline, tasks: Sequence[Task], drivers: int = 1
) -> Iterator[tuple[SourcePartition, RangeResult]]:
    """Runs tasks. Yields the result of each range when its last part has ended.

    ``drivers`` is how many share the rate of the pipeline.
    """
    ranges: dict[SourcePartition, list[Task]] = {}
    for task in sorted(tasks, key=lambda each: each.part):
        ranges.setdefault(task.range.partition, []).append(task)
    found: dict[SourcePartition, dict[int, TaskOutcome]] = {each: {} for each in ranges}
    for outcome in _outcomes(pipeline, tasks, drivers):
        done, wanted = found[outcome.partition], ranges[outcome.partition]
        if outcome.part in done or outcome.part >= len(wanted):
            raise InternalError(
                f"source partition `{outcome.partition.text}`: part {outcome.part} of "
                f"{len(wanted)} has two outcomes, or was not planned"
            )
        done[outcome.part] = outcome
        if len(done) == len(wanted):
            outcomes = [done[number] for number in range(len(wanted))]
            result = _judged(pipeline.sink, outcome.partition, join_parts(wanted, outcomes))
            yield outcome.partition, _with_copies(pipeline, wanted[0], result)


def _outcomes(pipeline: Pipeline, tasks: Sequence[Task], drivers: int) -> Iterator[TaskOutcome]:
    """Yields outcomes. If the workers as a whole fail, each remaining task has that error."""
    left = {(task.range.partition, task.part) for task in tasks}
    if pipeline.rate is not None:
        rate = pipeline.rate / len(tasks) / drivers
        tasks = [replace(task, rate=rate) for task in tasks]
    try:
        for transform in dict.fromkeys(task.transform for task in tasks):
            alike = [task for task in tasks if task.transform == transform]
            for outcome in pipeline.workers.run(alike):
                left.discard((outcome.partition, outcome.part))
                yield outcome
    except UnavailableError as exc:
        for partition, part in sorted(left):
            yield TaskOutcome(partition, error=exc, part=part)
    except TidelogError:
        raise  # the workers or the transform are unusable
    except Exception as exc:  # noqa: BLE001 - what is done of the others stays done
        for partition, part in sorted(left):
            yield TaskOutcome(partition, error=unexpected("workers", exc), part=part)


class RangeAhead(NamedTuple):
    """A decided range, and the tasks that read ahead of it."""

    state: SourceState
    manifest: Manifest
    tasks: list[Task]


class NextRange(NamedTuple):
    """What to read after a range that is decided."""

    limit: str
    parts: int  # in about how many tasks


FindNext = Callable[[SourcePartition, str], NextRange | None]
"""Returns what to read from a position on; None to read no more in this cycle."""

Results = Iterable[tuple[SourcePartition, RangeResult]]


def read_no_more(partition: SourcePartition, start: str) -> NextRange | None:
    """Reads nothing ahead."""
    return None


def intend_next(
    source: Source, intent: Intent, manifest: Manifest, wanted: NextRange, now_ms: int
) -> Intent:
    """Returns the range to read ahead of a decided one: it begins where that one ends."""
    partition = SourcePartition.named(manifest.partition)
    whole = SourceRange(partition, manifest.end, wanted.limit)
    return Intent(
        manifest.end,
        wanted.limit,
        began_ms=now_ms,
        incarnation=intent.incarnation,
        cuts=choose_cuts(source, whole, wanted.parts),
    )


class RangeRounds:
    """Runs the tasks of one round, and those of the next one in a thread of its own."""

    def __init__(self, pipeline: Pipeline, drivers: int) -> None:
        """``drivers`` is how many share the rate of the pipeline."""
        self._pipeline = pipeline
        self._drivers = drivers
        self._ahead: Future[Results] | None = None

    def run(self, tasks: Sequence[Task]) -> Results:
        """Returns the results of tasks, as they end."""
        return run_ranges(self._pipeline, tasks, self._drivers) if tasks else ()

    def start(self, tasks: Sequence[Task]) -> None:
        """Starts the tasks of the next round, if there are any."""
        if tasks:
            self._ahead = run_in_thread(lambda: list(self.run(tasks)))

    def next_results(self) -> Results | None:
        """Returns the results of the round that was started, when all are there; None: of none."""
        ahead, self._ahead = self._ahead, None
        return None if ahead is None else ahead.result()

    def __enter__(self) -> RangeRounds:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits for tasks that still run, since they use what the caller may close.

        A second stop signal ends the process without that.
        """
        is_over = kind is None or issubclass(kind, Exception)
        if self._ahead is not None and is_over:
            wait([self._ahead])


def run_in_thread(call: Callable[[], Results]) -> Future[Results]:
    """Returns the future of a call in a thread that does not keep the process alive.

    Makes the call in this thread if no other one can be started.
    """
    done: Future[Results] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as exc:  # noqa: BLE001 - raised by the future's result
            done.set_exception(exc)

    try:
        threading.Thread(target=run, name="tidelog-ahead", daemon=True).start()
    except RuntimeError:
        run()
    return done
