"""Workers on a Spark cluster, with transforms.

Each job is a DataFrame, whose partitions run tasks. Without a transform, a task reads its range and
writes its files itself, so no event passes through Spark. It returns what was staged, or the error
of that range. If an executor dies, Spark runs the task again; each writer stages under its own
names, so attempts never collide. Where there are many more tasks than cores, several share a Spark
partition.

Spark's UI and event log show the pipeline and the ranges of a job, and with a transform how many
events came in and went out. Listeners get the events and bytes of each job as observed metrics with
the name ``tidelog``. The job's group is ``tidelog-<pipeline>``; cancelled, its ranges are done
again later.

**Transforms.** A user's function of DataFrames runs between a range and its files. The ranges of a
cycle become one DataFrame in event columns, with one Spark partition each. The function changes it,
and the sink's writer gets the result in the same Spark task. Rows may be dropped and changed, but
not moved: each keeps its offset, in its partition and in order. Anything else is detected, so that
an archive's ranges stay what they say they are:

1. the reading half of a task notes the offsets that it returned, in a file of that task alone
   (``spark/failures.py``)
2. the writing half gets rows, whose offsets must rise
3. at the end it looks for the note of its own task: a function that shuffles, sorts over
   partitions, caches or truncates its input has none
4. all offsets that were written must be among those that were read

Spark collects rows for the writing half, by number: to measure each row takes longer than to write
it. So the reading half counts the bytes of large rows, in whole columns. If a batch might not fit
into memory, the ranges with such rows are read again with batches that Spark measures.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import compute
from pyspark import TaskContext, cloudpickle
from pyspark.sql import DataFrame, SparkSession, functions

from tidelog.codec.event_batch import EVENT_SCHEMA, check_times
from tidelog.connectors.sink import WriterResult
from tidelog.connectors.topic.segments import check_rows
from tidelog.errors import InvalidError, TidelogError, UnavailableError, unexpected
from tidelog.model import layout
from tidelog.model.pipeline import offsets_between
from tidelog.pipeline.tasks import (
    ParallelWorkers,
    Task,
    TaskOutcome,
    TaskOutput,
    Workers,
    run_task,
    with_left_out,
)
from tidelog.spark.columns import arrow_schema, floored_times, spark_schema
from tidelog.spark.failures import cause_of, job_error, keep_modules, note_path
from tidelog.spark.session import (
    BATCH_BYTES,
    BATCH_ROWS,
    LOTS_PER_CORE,
    NOT_MEASURED,
    LiveSession,
    cores_of,
    is_alive,
    named_job,
    numbered,
)

__all__ = ["SparkWorkers"]

_WAVES = 4  # a job takes a tenth of a second until its first task starts, and cores wait
_BATCH_BYTES_MAX = 32_000_000  # per core; Spark's buffers take a few times as much

Transform = Callable[[DataFrame], DataFrame]

_SHOWN = spark_schema(EVENT_SCHEMA.names)
_STAYS = "a transform may drop and change rows, but must leave them where they are"


def load_transform(name: str) -> Transform:
    """Loads the function of ``module:function``, also from modules of the working folder."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise InvalidError(f"transform `{name}`: give module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        home = importlib.import_module(module)
        found = functools.reduce(getattr, function.split("."), home)
    except ModuleNotFoundError as exc:
        raise InvalidError(
            f"transform `{name}`: {exc}: install it, or run where the module's file is"
        ) from exc
    except AttributeError as exc:
        do = "name a function of the module"
        if module == "__main__":
            do = "run it from the script that has the function, or put that into a module"
        raise InvalidError(f"transform `{name}`: {exc}: {do}") from exc
    if not callable(found):
        raise InvalidError(f"transform `{name}`: is not a function: name one")
    _send_with_tasks(home)
    made: Transform = found
    return made


def _send_with_tasks(module: ModuleType) -> None:
    """Has Spark send a module's functions to executors, unless they have it installed too."""
    installed = ("site-packages", "dist-packages")
    file = getattr(module, "__file__", None)
    if file is not None and not any(each in Path(file).parts for each in installed):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]


def transformed(session: SparkSession, name: str, tasks: Sequence[Task]) -> list[TaskOutcome]:
    """Runs all tasks in one Spark job. Raises ``InvalidError`` if a transform breaks the rules.

    Those with large rows are run again in a second one, and every later job measures its batches.
    """
    is_measured = session.conf.get(BATCH_BYTES) != NOT_MEASURED
    rows_max = int(session.conf.get(BATCH_ROWS) or 0)
    small = None if is_measured else _BATCH_BYTES_MAX // rows_max if rows_max > 0 else 0
    blobs = [pickle.dumps(task) for task in tasks]
    events = numbered(session, len(blobs)).mapInArrow(
        functools.partial(_read, blobs, small), _SHOWN
    )
    result = _apply(name, events)
    found = _collect(result.mapInArrow(functools.partial(_write, blobs), _OUTCOMES))
    for each in found:
        if isinstance(each, TidelogError):
            raise each
    if len(found) != len(tasks):
        raise InvalidError(f"transform `{name}`: has made fewer Spark partitions: {_STAYS}")
    large = [tasks[each.number] for each in found if isinstance(each, _LargeRows)]
    if large:
        session.conf.set(BATCH_BYTES, str(_BATCH_BYTES_MAX))
        again = transformed(session, name, large)
        found = [each for each in found if not isinstance(each, _LargeRows)] + again
    return found


def _apply(name: str, events: DataFrame) -> DataFrame:
    try:
        result: Any = load_transform(name)(events)
    except TidelogError:
        raise
    except (Exception, SystemExit) as exc:  # an exit would end a thread without a word
        if not is_alive(events.sparkSession):
            raise
        cause = f"{type(exc).__name__}: {cause_of(exc)}"
        raise InvalidError(f"transform `{name}`: raised {cause}: fix it") from exc
    if not isinstance(result, DataFrame):
        raise InvalidError(
            f"transform `{name}`: gave {type(result).__name__}: return the DataFrame"
        )
    wanted = {field.name: field.dataType.simpleString() for field in _SHOWN.fields}
    given = {field.name: field.dataType.simpleString() for field in result.schema.fields}
    for column in wanted.keys() | given.keys():
        if given.get(column) != wanted.get(column) or len(result.columns) != len(given):
            raise InvalidError(
                f"transform `{name}`: column `{column}` is {given.get(column, 'missing')}: events "
                f"have {', '.join(f'{each} {kind}' for each, kind in wanted.items())}, and no more"
            )
    return result.select(*EVENT_SCHEMA.names)


Offsets = npt.NDArray[np.int64]


class _Note(NamedTuple):
    """What a reading half has returned."""

    end: str
    offsets: _OffsetRuns
    mark: bytes  # for the source to read later
    left_out: int  # events skipped because they were erased


class _OffsetRuns(NamedTuple):
    """Rising offsets as ranges without holes: most often a single one."""

    starts: Offsets
    ends: Offsets  # exclusive

    @classmethod
    def of(cls, offsets: Offsets) -> _OffsetRuns:
        is_new = np.diff(offsets) != 1
        some = np.full(min(1, len(offsets)), True)
        starts = offsets[np.concatenate([some, is_new])]
        return cls(starts, offsets[np.concatenate([is_new, some])] + 1)

    @classmethod
    def joined(cls, runs: Sequence[_OffsetRuns]) -> _OffsetRuns:
        none = np.empty(0, np.int64)
        return cls(
            np.concatenate([none, *(each.starts for each in runs)]),
            np.concatenate([none, *(each.ends for each in runs)]),
        )

    @property
    def total(self) -> int:
        return int((self.ends - self.starts).sum())

    def missing(self, offsets: Offsets) -> Offsets:
        """Returns those of rising offsets that are not in it."""
        places = np.searchsorted(self.starts, offsets, "right")
        ends = np.concatenate([np.zeros(1, np.int64), self.ends])
        return offsets[offsets >= ends[places]]


class _LargeRows(NamedTuple):
    """A reading half ended early: batches with its rows must be measured."""

    number: int  # of the task


def _read(
    blobs: Sequence[bytes], small: int | None, numbers: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Runs the reading half of a Spark task.

    Spark's batches fit into memory if no row has more than ``small`` bytes. Larger ones may have as
    many bytes in total as a batch; any number, if ``small`` is None.
    """
    wanted = arrow_schema(_SHOWN)
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            task: Task = pickle.loads(blobs[number])  # noqa: S301 - our own bytes
            note = _note_path(task)
            end, left_out = task.range.start, 0
            offsets: list[_OffsetRuns] = []
            marks: list[bytes] = []
            large = 0
            try:
                for chunk in task.chunks():
                    check_rows(chunk.batch)
                    rows = task.erased.remaining(chunk.batch)
                    left_out += chunk.batch.num_rows - rows.num_rows
                    if rows.num_rows:
                        sizes = _row_bytes(rows)
                        large += int(sizes[sizes > small].sum()) if small is not None else 0
                        if large > _BATCH_BYTES_MAX:
                            note.write_bytes(pickle.dumps(_LargeRows(number)))
                            return
                        yield from (part.cast(wanted) for part in _bounded(rows, sizes))
                        offsets.append(_OffsetRuns.of(rows.column("offset").to_numpy()))
                    end = chunk.position
                    marks.append(chunk.note)
            except Exception as exc:  # noqa: BLE001 - reported by the writing half, for its range
                what = f"source partition `{task.range.partition.text}`"
                note.write_bytes(pickle.dumps(unexpected(what, exc)))
                return
            given = _Note(end, _OffsetRuns.joined(offsets), b"".join(marks), left_out)
            note.write_bytes(pickle.dumps(given))
    keep_modules()


def _row_bytes(rows: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Returns about how many bytes each row has; headers count evenly."""
    headers = rows.column("headers").nbytes // max(1, rows.num_rows)
    lengths = [compute.binary_length(rows.column(name)) for name in ("key", "value")]
    sizes: npt.NDArray[np.int64] = sum(
        (each.fill_null(0).to_numpy().astype(np.int64) for each in lengths),
        start=np.full(rows.num_rows, headers, np.int64),
    )
    return sizes


def _bounded(rows: pa.RecordBatch, sizes: npt.NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
    """Yields rows in batches of bounded size; most often as they are."""
    numbers = np.cumsum(sizes) // _BATCH_BYTES_MAX
    borders = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), rows.num_rows]
    for first, end in pairwise(borders):
        yield rows.slice(first, end - first)


def _write(blobs: Sequence[bytes], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs the writing half of a Spark task, which is the same task if rows have not moved."""
    number = _context().partitionId()
    if number >= len(blobs):
        if sum(batch.num_rows for batch in batches):
            problem = InvalidError(f"transform: has made more Spark partitions: {_STAYS}")
            yield _outcome(problem)
        return
    task: Task = pickle.loads(blobs[number])  # noqa: S301 - our own bytes
    try:
        produced = _written(task, batches)
    except TidelogError as exc:
        yield _outcome(TaskOutcome(task.range.partition, error=exc, part=task.part))
        return
    finally:
        _note_path(task).unlink(missing_ok=True)
    if isinstance(produced, _LargeRows):
        yield _outcome(produced)
    else:
        yield _outcome(TaskOutcome(task.range.partition, produced, part=task.part))
    keep_modules()


def _outcome(found: TaskOutcome | TidelogError | _LargeRows) -> pa.RecordBatch:
    """Returns the row of an outcome, with how much was read and staged, for listeners."""
    produced = found.produced if isinstance(found, TaskOutcome) else None
    size = sum(file.size for file in produced.staged.files) if produced else 0
    counts = [produced.read if produced else 0, size]
    columns = [pa.array([pickle.dumps(found)], pa.binary())]
    columns += [pa.array([count], pa.int64()) for count in counts]
    return pa.record_batch(columns, ["outcome", "events", "bytes"])


def _written(task: Task, batches: Iterator[pa.RecordBatch]) -> TaskOutput | _LargeRows:
    writer = task.sink.writer(task.range.partition.text, task.staging)
    written = [np.empty(0, np.int64)]
    last = -1
    for batch in batches:
        if not batch.num_rows:
            continue
        rows = _as_events(task, batch)
        offsets = rows.column("offset").to_numpy()
        falls = np.flatnonzero(np.diff(offsets, prepend=last) <= 0)
        if len(falls):
            before = int(offsets[falls[0] - 1]) if falls[0] else last
            raise _rule_error(task, f"offsets do not rise after {before}")
        last = int(offsets[-1])
        written.append(offsets)
        writer.write(rows)
    staged: WriterResult = writer.close()
    note = _read_note(task)
    if isinstance(note, _LargeRows):
        return note
    strange = note.offsets.missing(np.concatenate(written))
    if len(strange):
        raise _rule_error(task, f"offset {int(strange[0])} is not one that was read")
    read = note.offsets.total + note.left_out
    return TaskOutput(note.end, read, with_left_out(staged, note.left_out), note.mark)


def _as_events(task: Task, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Converts Spark's rows to event columns. Raises for what is not of this range."""
    columns = []
    for field in EVENT_SCHEMA:
        column = batch.column(field.name)
        if not field.nullable and column.null_count:
            raise InvalidError(f"transform: column `{field.name}` has nulls: keep its values")
        columns.append(
            floored_times(column) if field.name == "timestamp" else column.cast(field.type)
        )
    rows = pa.record_batch(columns, schema=EVENT_SCHEMA)
    check_times(rows.column("timestamp"))
    here = task.range.partition
    for name, wanted in (("topic", here.topic), ("partition", here.name)):
        found = rows.column(name).unique().to_pylist()
        if [str(each) for each in found] != [wanted]:
            raise _rule_error(task, f"rows with {name} {found[0]} are in it")
    return rows


def _read_note(task: Task) -> _Note | _LargeRows:
    """Returns the note of this task's reading half."""
    try:
        found = pickle.loads(_note_path(task).read_bytes())  # noqa: S301 - our own bytes
    except FileNotFoundError:
        raise _rule_error(task, "it was not read to its end by the task that wrote it") from None
    if isinstance(found, TidelogError):
        raise found
    note: _Note | _LargeRows = found
    return note


def _note_path(task: Task) -> Path:
    """Returns the path of a note that is unique to this attempt of this task."""
    return note_path(f"{task.staging.replace('/', '-')}-{_context().taskAttemptId()}")


def _rule_error(task: Task, problem: str) -> InvalidError:
    return InvalidError(
        f"transform of source partition `{task.range.partition.text}`: {problem}: {_STAYS} "
        "(no shuffle, sort, cache, limit or union)"
    )


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise InvalidError("transform: runs outside of Spark: run it with a Spark master")
    return context


class SparkWorkers:
    """Runs tasks on a session's executors, with their transform if they have one."""

    def __init__(
        self, session: SparkSession, reopen: Callable[[], SparkSession] | None = None
    ) -> None:
        """``reopen`` opens another session if the Java process of this one ends."""
        self._live = LiveSession(session, reopen)

    @property
    def parallelism(self) -> int:
        return cores_of(self._live.get())

    @property
    def waves(self) -> int:
        return _WAVES

    def run(self, tasks: Sequence[Task]) -> Iterator[TaskOutcome]:
        """Implements ``Workers.run``. Repeats a failed job, range by range.

        So a range on which a transform fails does not stop the others.
        """
        try:
            done = self._job(tasks)
        except TidelogError as exc:
            if exc.context.get("job") is None:
                raise
            if len(tasks) > 1:
                for task in tasks:
                    yield self._alone(task)
            elif isinstance(exc, UnavailableError):
                raise
            else:
                yield TaskOutcome(tasks[0].range.partition, error=exc, part=tasks[0].part)
        else:
            yield from done

    def _alone(self, task: Task) -> TaskOutcome:
        try:
            return self._job([task])[0]
        except TidelogError as exc:
            return TaskOutcome(task.range.partition, error=exc, part=task.part)

    def _job(self, tasks: Sequence[Task]) -> list[TaskOutcome]:
        """Runs tasks in one job. Raises the error of the job if it fails (``job_error``)."""
        transform = tasks[0].transform  # all tasks are of one pipeline
        session = self._live.get()
        group = f"tidelog-{layout.staging_pipeline(tasks[0].staging)}"
        try:
            with named_job(session, group, _description(tasks)):
                if transform:
                    return transformed(session, transform, tasks)
                return _plain(session, tasks, self.parallelism)
        except TidelogError:
            raise
        except Exception as exc:
            if any(each in str(exc) for each in _CANCELLED):
                raise UnavailableError(
                    "Spark: the job was cancelled: its ranges will be done again"
                ) from exc
            if not is_alive(session):
                raise UnavailableError(
                    "Spark: its process or its application ended: the ranges will be done again "
                    "in a new one"
                ) from exc
            raise job_error(exc, "its ranges will be done again") from exc


_OUTCOMES = "outcome binary, events bigint, bytes bigint"
_DESCRIPTION_CHARS_MAX = 200
_CANCELLED = ("SPARK_JOB_CANCELLED", "OPERATION_CANCELED")


def _plain(session: SparkSession, tasks: Sequence[Task], parallelism: int) -> list[TaskOutcome]:
    """Runs tasks without a transform; many small ones share a Spark task."""
    blobs = [pickle.dumps(lot) for lot in _lots(tasks, parallelism * LOTS_PER_CORE)]
    rows = numbered(session, len(blobs)).mapInArrow(functools.partial(_run_lots, blobs), _OUTCOMES)
    return _collect(rows)


def _lots(tasks: Sequence[Task], count: int) -> list[list[Task]]:
    """Returns tasks in at most this many lots of about the same number of events."""
    largest = sorted(tasks, key=_size, reverse=True)
    return [largest[first::count] for first in range(min(count, len(largest)))]


def _size(task: Task) -> int:
    return offsets_between(task.range.start, task.range.limit) or 0


def _run_lots(
    blobs: Sequence[bytes], numbers: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            for task in pickle.loads(blobs[number]):  # noqa: S301 - our own bytes
                yield _outcome(run_task(task))
    keep_modules()


def _collect(rows: DataFrame) -> list[Any]:
    """Returns what tasks made. Listeners of queries observe the sums of their events and bytes."""
    sums = [functions.sum(name).alias(name) for name in ("events", "bytes")]
    found = rows.observe("tidelog", *sums).collect()
    return [pickle.loads(row["outcome"]) for row in found]  # noqa: S301 - our own bytes


def _description(tasks: Sequence[Task]) -> str:
    ranges = [
        f"{each.range.partition.text} {each.range.start} to {each.range.limit}" for each in tasks
    ]
    text = f"{tasks[0].title}: {', '.join(ranges)}"
    if len(text) > _DESCRIPTION_CHARS_MAX:
        text = f"{text[: _DESCRIPTION_CHARS_MAX - 20]}… ({len(tasks)} in all)"
    return text


_: type[Workers] = SparkWorkers
_parallel: type[ParallelWorkers] = SparkWorkers
