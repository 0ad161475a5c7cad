"""Tasks: ranges of a source to read and to stage, and the workers that run them.

``LocalWorkers`` runs tasks in threads of this process, or one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.clock import Clock, SystemClock
from tidelog.concurrency import Pool
from tidelog.connectors.sink import RecordRefusedError, Sink, WriterResult
from tidelog.connectors.source import (
    Chunk,
    RangeReader,
    SourcePartition,
    SourceRange,
)
from tidelog.errors import (
    InvalidError,
    TidelogError,
    unexpected,
)
from tidelog.log.ledger import NOTHING_ERASED, ErasedIds
from tidelog.model.pipeline import (
    Gap,
)

__all__ = [
    "NO_ERASED_ROWS",
    "ErasedRows",
    "LocalWorkers",
    "ParallelWorkers",
    "Task",
    "TaskOutcome",
    "TaskOutput",
    "Workers",
    "run_task",
    "with_left_out",
]


@dataclass(frozen=True, slots=True)
class TaskOutput:
    """What a task made of its range, in staging."""

    end: str  # the position that was reached
    read: int
    staged: WriterResult
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


def with_left_out(staged: WriterResult, events: int) -> WriterResult:
    """Returns what was staged, with this many more events counted as erased."""
    return replace(staged, left_out=staged.left_out + events) if events else staged


@dataclass(frozen=True)
class Task:
    """A range to process, or a part of it, with everything needed to do it anywhere; picklable."""

    reader: RangeReader
    sink: Sink
    staging: str
    transform: str = ""  # module:function, from DataFrame to DataFrame; needs Spark
    rate: float | None = None  # most events per second to read
    erased: ErasedRows = NO_ERASED_ROWS  # erased before the intent; never written
    part: int = 0  # which part of its range it reads, counted from 0
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
    part: int = 0  # that of the task


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
        return TaskOutcome(partition, task.run(), part=task.part)
    except Exception as exc:  # noqa: BLE001 - one source partition must not stop the others
        error = unexpected(f"source partition `{partition.text}`", exc)
        return TaskOutcome(partition, error=error, part=task.part)


_: type[Workers] = LocalWorkers
