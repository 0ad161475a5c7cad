"""The parts of a pipeline: a source, a sink, tasks, and workers that run them.

``LocalWorkers`` runs tasks in threads of this process, or one after another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.catalog.base import Catalog
from tidelog.clock import Clock, SystemClock
from tidelog.concurrency import Pool
from tidelog.connectors.archive.reader import CarriedRange, CarriedReader, CompletedReader
from tidelog.connectors.sink import RecordRefusedError, Sink, Written
from tidelog.connectors.source import (
    Chunk,
    MissingOffsets,
    RangeReader,
    Source,
    SourcePartition,
    SourceRange,
    missing_in,
)
from tidelog.context import Context
from tidelog.errors import (
    FencedError,
    InternalError,
    InvalidError,
    TidelogError,
    UnavailableError,
    unexpected,
)
from tidelog.log.ledger import NOTHING_ERASED, ErasedIds
from tidelog.model import limits
from tidelog.model.pipeline import (
    Aside,
    Commit,
    Gap,
    Intent,
    Manifest,
    Progress,
    joined_gaps,
    offsets_between,
)
from tidelog.model.topic import decode_row

__all__ = [
    "NO_ERASED_ROWS",
    "ClaimedError",
    "CycleReport",
    "ErasedRows",
    "FrozenError",
    "LocalWorkers",
    "ParallelWorkers",
    "Pipeline",
    "RangeAhead",
    "Task",
    "TaskOutcome",
    "TaskOutput",
    "Track",
    "Workers",
    "claim_error",
    "claimed_error",
    "claimed_head",
    "closed_error",
    "commit_of",
    "explained",
    "frozen",
    "head_error",
    "is_idle",
    "manifest_of",
    "missing_from",
    "run_task",
    "with_left_out",
]


@dataclass(frozen=True, slots=True)
class TaskOutput:
    """What a task made of its range, in staging."""

    end: str  # the position that was reached
    read: int
    staged: Written
    note: bytes = b""  # for the source to read later


@dataclass(frozen=True, eq=False)
class ErasedRows:
    """Events of a source partition that were erased from a pipeline's output. Pickles."""

    offsets: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    ids: ErasedIds = NOTHING_ERASED  # and keys, each up to a time
    trimmed: ErasedIds = NOTHING_ERASED  # ids and keys, each up to an offset

    def remaining(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the events that were not erased."""
        if not batch.num_rows or not (len(self.offsets) or len(self.ids) or len(self.trimmed)):
            return batch
        keep = np.isin(batch.column("offset").to_numpy(), self.offsets, invert=True)
        for not_erased in (self.ids.kept(batch), self._untrimmed(batch)):
            keep = keep if not_erased is None else keep & not_erased
        return batch if keep.all() else batch.filter(pa.array(keep))

    def _untrimmed(self, batch: pa.RecordBatch) -> npt.NDArray[np.bool_] | None:
        last = max((*self.trimmed.ids.values(), *self.trimmed.keys.values()), default=-1)
        first = batch.column("offset").to_numpy().min()
        return self.trimmed.kept(batch, by="offset") if first <= last else None

    def count_in(self, start: int, end: int, gaps: Sequence[Gap] = ()) -> int:
        """Returns how many erased offsets are between two, outside of gaps."""
        inside = self.within(start, end)
        for gap in gaps:
            if not gap.is_partial:
                inside = inside[(inside < int(gap.start)) | (inside >= int(gap.end))]
        return len(inside)

    def within(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Returns the erased offsets between two."""
        return self.offsets[(self.offsets >= start) & (self.offsets < end)]


NO_ERASED_ROWS = ErasedRows()


def with_left_out(staged: Written, events: int) -> Written:
    """Returns what was staged, with this many more events counted as erased."""
    return replace(staged, left_out=staged.left_out + events) if events else staged


@dataclass
class CycleReport:
    """What one cycle did."""

    committed: dict[SourcePartition, Manifest] = field(default_factory=dict)
    errors: dict[SourcePartition, TidelogError] = field(default_factory=dict)
    withdrawn: set[SourcePartition] = field(default_factory=set)  # by errors; to be planned again
    # Ended, or begun again, by a person's decision.
    ended: set[SourcePartition] = field(default_factory=set)
    aside: list[Aside] = field(default_factory=list)  # ranges that the catalog lost
    taken: set[SourcePartition] = field(default_factory=set)  # by another driver
    earlier: int = 0  # events of ranges before those in ``committed``

    @property
    def events(self) -> int:
        """Returns how many events of the source its ranges cover."""
        return self.earlier + sum(manifest.read for manifest in self.committed.values())

    def add(self, later: CycleReport) -> None:
        """Adds what the same cycle did after that."""
        again = self.committed.keys() & later.committed.keys()
        self.earlier += later.earlier + sum(self.committed[each].read for each in again)
        self.committed.update(later.committed)
        self.errors.update(later.errors)
        self.aside += later.aside
        self.withdrawn |= later.withdrawn
        self.ended |= later.ended
        self.taken |= later.taken


@dataclass
class Track:
    """A source partition, with its rows as last read or written."""

    partition: SourcePartition
    where: str
    head: Progress
    head_version: str
    intent: Intent | None = None
    intent_version: str = ""
    unchecked: Sequence[str] = ()  # manifests that a restored catalog may have lost
    reader: RangeReader | None = None  # of the current range
    erased: ErasedRows = NO_ERASED_ROWS  # that the current range must skip

    @property
    def goes_back(self) -> bool:
        """Returns whether the current range is in a gap before the position."""
        return self.intent is not None and self.intent.start != self.head.position

    @property
    def carried(self) -> CarriedRange | None:
        """Returns what to know if the current range comes entirely from another generation."""
        return self.reader.carried if isinstance(self.reader, CarriedReader) else None

    @property
    def completed(self) -> int:
        """Returns the generation that completes the current range; 0 if none does."""
        return self.reader.generation if isinstance(self.reader, CompletedReader) else 0

    def read_intent(self, catalog: Catalog) -> None:
        """Reads the row of the current range; there is none between two ranges."""
        row = catalog.get(self.where, "intent")
        self.intent, self.intent_version = None, ""
        if row is not None:
            self.intent = decode_row(row.value, Intent, f"intent of `{self.partition.text}`")
            self.intent_version = row.version


class RangeAhead(NamedTuple):
    """A decided range, and the tasks that read ahead of it."""

    track: Track
    manifest: Manifest
    tasks: list[Task]


def claimed_head(
    found: Progress | None, new: Progress, owner: str, track: Track | None = None
) -> Progress:
    """Returns a head with this driver as its owner, under the next epoch.

    A head that is already the driver's keeps its epoch: its rows only have to be read again.
    """
    epoch = 1 if found is None else found.epoch + 1
    if found is not None and track is not None:
        same = (found.owner, found.epoch) == (owner, track.head.epoch)
        epoch = found.epoch if same else epoch
    known = new if found is None or not found.position else found
    return msgspec.structs.replace(
        known,
        epoch=epoch,
        owner=owner,
        frozen="",
        incarnation=known.incarnation or new.incarnation,
    )


def manifest_of(
    pipeline: str, track: Track, intent: Intent, produced: TaskOutput, missing: MissingOffsets
) -> Manifest:
    """Returns what a range has produced, for its manifest."""
    carried, counted = track.carried, track.carried.counted if track.carried else None
    if counted is not None:  # events keep their numbers, also after deleted ones
        gone = counted.read - counted.dropped - produced.read
        staged = replace(produced.staged, left_out=produced.staged.left_out + gone)
        produced = replace(produced, read=counted.read, staged=staged, note=counted.note)
        missing = counted.missing
    return Manifest(
        pipeline=pipeline,
        partition=track.partition.text,
        start=intent.start,
        end=produced.end,
        ordinal=track.head.ordinal,
        read=produced.read,
        written=produced.staged.written,
        dropped=produced.read
        - produced.staged.written
        - produced.staged.dead
        - produced.staged.left_out,
        dead=produced.staged.dead,
        left_out=produced.staged.left_out,
        files=produced.staged.files,
        lost=(*intent.lost, *missing.gaps),
        note=produced.note or ((carried.note or track.head.note) if carried else b""),
        deleted=missing.deleted,
        absent=missing.absent,
        filled=carried.generation if carried else 0,
        as_is=carried is not None and carried.as_is,
        completed=track.completed,
        copied=len(carried.files) if carried else 0,
        incarnation=intent.incarnation,
    )


def missing_from(
    source: Source, track: Track, intent: Intent, produced: TaskOutput
) -> MissingOffsets:
    """Returns why a range has fewer events than offsets."""
    start = intent.lost[-1].end if intent.lost else intent.start
    reached = SourceRange(track.partition, start, produced.end, incarnation=intent.incarnation)
    missing = missing_in(source, reached, produced.read)
    if min(missing.absent, missing.deleted) < 0:
        raise InternalError(
            f"source partition `{track.partition.text}`: {produced.read} events came from "
            f"[{start}, {produced.end}), which are more than it has offsets"
        )
    if offsets_between(start, produced.end) is None:
        return missing
    missing = _with_erased(missing, reached, track.erased, produced.staged.left_out)
    return _with_few_gaps(missing, reached, track.head)


def _with_erased(
    missing: MissingOffsets, range: SourceRange, erased: ErasedRows, left_out: int
) -> MissingOffsets:
    """Returns what is missing, where no offset known to be erased counts as something else.

    A source may know only totals, or no longer know that an offset had an event. Of the erased
    offsets, ``left_out`` ones were read at most, and a transform dropped some at most.
    """
    known = erased.count_in(int(range.start), int(range.limit), missing.gaps) - left_out
    known -= sum(gap.offsets for gap in missing.gaps if gap.reason == "transform")
    known = max(0, known - missing.deleted)
    absent = max(0, missing.absent - known)
    known -= missing.absent - absent
    gaps: list[Gap] = []
    for gap in missing.gaps:
        if gap.reason != "files":
            gaps.append(gap)
        elif not gap.is_scattered:
            gaps += _pieces(gap, erased)
        elif gap.offsets > known:
            gaps.append(Gap(gap.start, gap.end, gap.reason, gap.offsets - known))
    deleted = missing.offsets - absent - sum(gap.offsets for gap in gaps)
    return MissingOffsets(absent, deleted, tuple(gaps))


def _pieces(gap: Gap, erased: ErasedRows) -> list[Gap]:
    """Returns the parts of a gap between erased offsets."""
    inside = erased.within(int(gap.start), int(gap.end)).tolist()
    edges = [int(gap.start) - 1, *sorted(set(inside)), int(gap.end)]
    return [
        Gap(str(before + 1), str(after), gap.reason, after - before - 1)
        for before, after in pairwise(edges)
        if before + 1 < after
    ]


def _with_few_gaps(missing: MissingOffsets, range: SourceRange, head: Progress) -> MissingOffsets:
    """Returns what is missing, where what files lack fits into the head: the rest is counted."""
    listed = sum(gap.reason == "files" for gap in head.gaps)
    gaps: list[Gap] = []
    others = 0
    for gap in missing.gaps:
        is_of_files = gap.reason == "files"
        is_short = gap.offsets == 1 and listed >= limits.FILE_GAPS_SHORT
        is_over = is_short or listed >= limits.FILE_GAPS_MAX
        if gap.is_scattered or not (is_of_files and is_over):
            gaps.append(gap)
            listed += is_of_files
        else:
            others += gap.offsets
    if others:
        gaps = list(joined_gaps(tuple(gaps), (Gap(range.start, range.limit, "files", others),)))
    return replace(missing, gaps=tuple(gaps))


def is_idle(intent: Intent, produced: TaskOutput) -> bool:
    """Returns whether a range was empty and ended where it began: the source knows no ends."""
    return not intent.lost and produced.end == intent.start and not produced.read


def commit_of(intent: Intent, manifest: Manifest, now_ms: int) -> Commit:
    """Returns the row of a range that is committed now."""
    return Commit(
        manifest=intent.manifest,
        start=manifest.start,
        end=manifest.end,
        events=manifest.read,
        files=len(manifest.files),
        dead=manifest.dead,
        committed_ms=now_ms,
        left_out=manifest.left_out,
    )


@dataclass(frozen=True)
class Task:
    """A range to process, or one cut of it, with everything needed to do it anywhere; picklable."""

    reader: RangeReader
    sink: Sink
    staging: str
    transform: str = ""  # module:function, from DataFrame to DataFrame; needs Spark
    rate: float | None = None  # most events per second to read
    erased: ErasedRows = NO_ERASED_ROWS  # erased before the intent; never written
    cut: int = 0  # which part of its range it reads, counted from 0
    title: str = ""  # of its pipeline, for people

    @property
    def range(self) -> SourceRange:
        return self.reader.range

    def run(self) -> TaskOutput:
        """Reads the range and stages the result, which is not visible yet."""
        writer = self.sink.writer(self.range.partition.text, self.staging)
        end, read, left_out, notes = self.range.start, 0, 0, []
        for chunk in self.chunks():
            notes.append(chunk.note)
            rows = self.erased.remaining(chunk.batch)
            if rows.num_rows:
                try:
                    writer.write(rows)
                except RecordRefusedError as exc:
                    exc.context["read"] = read
                    raise
            read += chunk.batch.num_rows
            left_out += chunk.batch.num_rows - rows.num_rows
            end = chunk.position
        return TaskOutput(end, read, with_left_out(writer.close(), left_out), b"".join(notes))

    def chunks(self, clock: Clock | None = None) -> Iterator[Chunk]:
        """Yields the range, within its rate limit."""
        clock = clock or SystemClock()
        began_s, read = clock.monotonic_s(), 0
        for chunk in self.reader.read():
            yield chunk
            read += chunk.batch.num_rows
            if self.rate is not None:
                clock.sleep(read / self.rate - (clock.monotonic_s() - began_s))


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """The outcome of a task: its output, or an error of its partition."""

    partition: SourcePartition
    produced: TaskOutput | None = None
    error: TidelogError | None = None
    cut: int = 0  # that of the task


class Workers(Protocol):
    """Runs tasks, here or on a cluster."""

    def run(self, tasks: Sequence[Task]) -> Iterator[TaskOutcome]:
        """Yields the outcome of each task as it ends. An error of one does not stop the others."""
        ...


@runtime_checkable
class ParallelWorkers(Protocol):
    """Workers that run tasks on several cores at once."""

    @property
    def parallelism(self) -> int:
        """Returns how many tasks run at once."""
        ...

    @property
    def waves(self) -> int:
        """Returns how many times as many tasks to start together, since a start takes time."""
        ...


@dataclass(frozen=True)
class Pipeline:
    """A pipeline, ready to run."""

    name: str
    id: str  # part of its rows and manifests; never reused
    source: Source
    sink: Sink
    workers: Workers
    transform: str = ""
    rate: float | None = None  # events per second over all tasks
    gate: Callable[[], None] = lambda: None  # raises if no head may be created or thawed now
    start: str = "earliest"  # or latest: where partitions begin that existed at creation
    lists: bool = True  # its first driver records the ends it sees; else the source knows
    erased: Callable[[str], ErasedRows] = lambda _: NO_ERASED_ROWS  # of a source partition, now
    title: str = ""  # for people who look at Spark's UI
    goes_back: bool = False  # for what its source, an archive, got since in gaps it has passed

    @property
    def heading(self) -> str:
        """Returns its title, or its name if it has none."""
        return self.title or self.name


class ClaimedError(FencedError):
    """Another driver has a source partition. This one may have others."""


class FrozenError(UnavailableError):
    """The head is frozen while another generation is promoted. It may resume after that."""


def claimed_error(pipeline: str, partition: str, head: Progress | None = None) -> ClaimedError:
    """Returns the error of a source partition that another driver has."""
    other = f" (epoch {head.epoch})" if head is not None else ""
    return ClaimedError(
        f"source partition `{partition}` of pipeline `{pipeline}`: another driver has it{other}",
        partition=partition,
    )


def claim_error(pipeline: str, partition: str) -> UnavailableError:
    """Returns the error of a source partition that could not be taken, for reasons that pass."""
    return UnavailableError(
        f"source partition `{partition}` of pipeline `{pipeline}`: could not be claimed, replies "
        "stay lost or others keep changing its head: try again",
        partition=partition,
    )


def closed_error(pipeline: str, partition: str) -> FencedError:
    """Returns the error of a source partition whose pipeline or generation was removed."""
    return FencedError(
        f"source partition `{partition}` of pipeline `{pipeline}`: was closed: stop this driver",
        partition=partition,
    )


def head_error(pipeline: str, track: Track, head: Progress | None) -> TidelogError:
    """Returns why a driver cannot work with a head that it finds changed; None: it is deleted."""
    partition = track.partition.text
    if head is None or head.closed:
        return closed_error(pipeline, partition)
    if head.frozen:
        return frozen(pipeline, partition)
    if (head.owner, head.epoch) != (track.head.owner, track.head.epoch):
        return claimed_error(pipeline, partition, head)
    return UnavailableError(
        f"source partition `{partition}` of pipeline `{pipeline}`: its rows were changed: they are "
        "read again",
        partition=partition,
    )


def explained(context: Context, pipeline: str, track: Track, error: TidelogError) -> TidelogError:
    """Returns the error, or that a promote or another driver has the partition, if so.

    If another driver has it, files that it published or deleted are not damage. An error that says
    by its kind that it passes, or that a person must decide, is returned as it is.
    """
    if isinstance(error, UnavailableError) or error.kind in ("lost", "remade"):
        return error
    with contextlib.suppress(TidelogError):
        row = context.catalog.get(track.where, "head")
        if row is None or row.version != track.head_version:
            head = decode_row(row.value, Progress, track.where) if row is not None else None
            return head_error(pipeline, track, head)
    # Until its rows show that, no partition counts as another driver's.
    return head_error(pipeline, track, track.head) if isinstance(error, ClaimedError) else error


def frozen(pipeline: str, partition: str) -> FrozenError:
    """Returns the error for a partition whose generation is about to be replaced."""
    return FrozenError(
        f"source partition `{partition}` of pipeline `{pipeline}`: is frozen while another "
        "generation is promoted: wait, it resumes after that",
        partition=partition,
    )


class LocalWorkers:
    """Runs tasks in threads of this process; with one thread, in the caller's."""

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise InvalidError(f"workers: {threads} threads: give 1 or more")
        self._threads = threads

    def run(self, tasks: Sequence[Task]) -> Iterator[TaskOutcome]:
        if any(task.transform for task in tasks):
            raise InvalidError("pipeline: its transform needs Spark: run it with a Spark master")
        if self._threads == 1:
            for task in tasks:
                yield run_task(task)
            return
        with Pool(self._threads, "tidelog-task") as pool:
            for done in as_completed([pool.submit(run_task, task) for task in tasks]):
                yield done.result()


def run_task(task: Task) -> TaskOutcome:
    """Returns the outcome of a task. Any failure is an error of its source partition."""
    partition = task.range.partition
    try:
        return TaskOutcome(partition, task.run(), cut=task.cut)
    except Exception as exc:  # noqa: BLE001 - one source partition must not stop the others
        error = unexpected(f"source partition `{partition.text}`", exc)
        return TaskOutcome(partition, error=error, cut=task.cut)


_: type[Workers] = LocalWorkers
