"""Cuts of a range: one task reads each part, and a manifest lists the files of all of them.

A range is planned once, and its plan is divided at the cuts that its intent records. Tasks run in
any order, on any machine. Their results count in the order of the source, up to the first cut that
ended before its limit or failed: what comes after it would leave a hole. So a manifest always
describes one range without a hole, as if one task had read it. What later cuts staged is deleted,
by the driver or by a sweep, and read again with a later range. What a sink decides about a range as
a whole, such as how many dead letters it may have, is decided about what all cuts staged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tidelog.clock import Ids
from tidelog.connectors.sink import AsideSink, CopyingSink, JudgingSink, Sink, Written
from tidelog.connectors.source import (
    DividingReader,
    DividingSource,
    RangeReader,
    Source,
    SourcePartition,
    SourceRange,
)
from tidelog.errors import (
    CorruptError,
    InternalError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    unexpected,
)
from tidelog.model import layout
from tidelog.model.pipeline import FileEntry, Intent, Manifest
from tidelog.pipeline.base import Pipeline, Task, TaskOutcome, TaskOutput, Track
from tidelog.pipeline.carried_ranges import CarriedReader
from tidelog.pipeline.policy import check_plan

__all__ = [
    "RangeResult",
    "choose_cuts",
    "discard_staged",
    "divide_reader",
    "join_cuts",
    "plan_tasks",
    "run_ranges",
]

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
    pipeline: Pipeline, track: Track, intent: Intent, ordinal: int, ids: Ids
) -> list[Task]:
    """Returns a task for each cut of a range, which stages in a folder of its own.

    ``ordinal`` is that of its first event. Raises ``NotFoundError`` if the range is not there.
    """
    start = intent.lost[-1].end if intent.lost else intent.start
    wanted = SourceRange(track.partition, start, intent.limit, ordinal, intent.incarnation)
    track.reader = reader = pipeline.source.reader(wanted)
    sink = pipeline.sink
    if track.head.names and isinstance(sink, AsideSink):
        sink = sink.named(track.head.names)
    transform = "" if track.carried and track.carried.as_is else pipeline.transform
    erased = pipeline.erased(track.partition.text)  # since the intent; later ones wait
    parts = divide_reader(pipeline.source, reader, intent.cuts)
    where = (pipeline.id, track.partition.text, track.head.epoch)
    task = Task(reader, sink, "", transform, erased=erased, title=pipeline.heading)
    return [
        replace(task, reader=part, staging=layout.staging(*where, ids.new()), cut=number)
        for number, part in enumerate(parts)
    ]


@dataclass(frozen=True, slots=True)
class RangeResult:
    """What the tasks of one range produced together."""

    produced: TaskOutput | None = None  # up to the first cut that ended early or failed
    error: TidelogError | None = None  # of that cut
    unused: tuple[FileEntry, ...] = ()  # staged by cuts after it

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Returns what was staged and counts."""
        return self.produced.staged.files if self.produced is not None else ()


def join_cuts(tasks: Sequence[Task], outcomes: Sequence[TaskOutcome]) -> RangeResult:
    """Returns the result of a range from the outcomes of all its cuts, both in order."""
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
    """Returns the output of neighboring cuts as that of one task."""
    first = next((each.staged for each in counted if each.staged.dead), Written())
    staged = Written(
        tuple(file for each in counted for file in each.staged.files),
        sum(each.staged.written for each in counted),
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
        written=made.staged.written + events["data"],
        dead=made.staged.dead + events["dead"],
    )
    return replace(
        result, produced=replace(made, read=made.read + sum(events.values()), staged=staged)
    )


def run_ranges(
    pipeline: Pipeline, tasks: Sequence[Task], drivers: int = 1
) -> Iterator[tuple[SourcePartition, RangeResult]]:
    """Runs tasks. Yields the result of each range when its last cut has ended.

    ``drivers`` is how many share the rate of the pipeline.
    """
    ranges: dict[SourcePartition, list[Task]] = {}
    for task in sorted(tasks, key=lambda each: each.cut):
        ranges.setdefault(task.range.partition, []).append(task)
    found: dict[SourcePartition, dict[int, TaskOutcome]] = {each: {} for each in ranges}
    for outcome in _outcomes(pipeline, tasks, drivers):
        done, wanted = found[outcome.partition], ranges[outcome.partition]
        if outcome.cut in done or outcome.cut >= len(wanted):
            raise InternalError(
                f"source partition `{outcome.partition.text}`: cut {outcome.cut} of {len(wanted)} "
                "has two outcomes, or was not planned"
            )
        done[outcome.cut] = outcome
        if len(done) == len(wanted):
            outcomes = [done[number] for number in range(len(wanted))]
            result = _judged(pipeline.sink, outcome.partition, join_cuts(wanted, outcomes))
            yield outcome.partition, _with_copies(pipeline, wanted[0], result)


def _outcomes(pipeline: Pipeline, tasks: Sequence[Task], drivers: int) -> Iterator[TaskOutcome]:
    """Yields outcomes. If the workers as a whole fail, each remaining task has that error."""
    left = {(task.range.partition, task.cut) for task in tasks}
    if pipeline.rate is not None:
        rate = pipeline.rate / len(tasks) / drivers
        tasks = [replace(task, rate=rate) for task in tasks]
    try:
        for transform in dict.fromkeys(task.transform for task in tasks):
            alike = [task for task in tasks if task.transform == transform]
            for outcome in pipeline.workers.run(alike):
                left.discard((outcome.partition, outcome.cut))
                yield outcome
    except UnavailableError as exc:
        for partition, cut in sorted(left):
            yield TaskOutcome(partition, error=exc, cut=cut)
    except TidelogError:
        raise  # the workers or the transform are unusable
    except Exception as exc:  # noqa: BLE001 - what is done of the others stays done
        for partition, cut in sorted(left):
            yield TaskOutcome(partition, error=unexpected("workers", exc), cut=cut)
