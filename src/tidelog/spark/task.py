"""An executor's part: it opens the store, and reads and writes objects. No catalog is opened here.

What it reads is checked as every reader checks it: the bytes against the run's checksum, the events
against its count. Credentials come from the executor's own environment.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.clock import Clock, Ids, RandomIds, SystemClock
from tidelog.codec.events import STORED_SCHEMA
from tidelog.codec.segment import read_piece
from tidelog.errors import CorruptError, NotFoundError
from tidelog.settings import Settings
from tidelog.spark.columns import Place, shown
from tidelog.spark.plan import Slice, Task, Times
from tidelog.store import Store
from tidelog.store.ahead import fetched_ahead
from tidelog.store.here import open_store_here

__all__ = ["Workshop", "open_workshop", "read_task"]

_ROWS_MIN = 4_000  # of a batch for Spark; the batches of small runs are joined


@dataclass(frozen=True)
class Workshop:
    """What a task works with."""

    store: Store
    clock: Clock
    ids: Ids


def open_workshop(settings: Settings) -> Workshop:
    """The store that the settings name, with this machine's clock and environment."""
    store = open_store_here(settings.store, settings.backoff())
    return Workshop(store, SystemClock(), RandomIds())


def read_task(task: Task, wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The events of a task, as Spark wants them."""
    store = open_workshop(task.settings).store
    return _joined(_batches(store, task, wanted))


@functools.cache
def _keep_modules() -> None:
    """Once for each process: Spark collects garbage after each task, and may leave these out."""
    gc.freeze()


def _batches(store: Store, task: Task, wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
    # Times are always decoded: they count the rows, and a filter may need them.
    columns = [name for name in STORED_SCHEMA.names if name in ("timestamp", *wanted.names)]
    for piece, data in fetched_ahead(task.slices, partial(_read, store, task)):
        run, at = piece.run, piece.run.base
        for batch in read_piece(data, run.crc, run.count, _what(task, piece), columns):
            start, end = max(piece.start, at), min(piece.end, at + batch.num_rows)
            if start < end:
                part = batch.slice(start - at, end - start)
                rows = shown(part, Place(task.topic, piece.partition, start), wanted)
                mask = None if task.times.hold(run) else _within(part, task.times)
                yield rows if mask is None else rows.filter(mask)
            at += batch.num_rows
    _keep_modules()


def _read(store: Store, task: Task, piece: Slice) -> bytes:
    run = piece.run
    try:
        return store.get(run.object, run.byte_start, run.byte_end)
    except NotFoundError as exc:
        raise CorruptError(
            f"{_what(task, piece)}: is gone: if the topic was trimmed after this read was planned, "
            "read again; if not, restore it from a copy, and run `tidelog verify`"
        ) from exc


def _what(task: Task, piece: Slice) -> str:
    run = piece.run
    return (
        f"object `{run.object}`, bytes {run.byte_start} to {run.byte_end}, partition "
        f"`{task.topic}/{piece.partition}`, offsets {run.base} to {run.end}"
    )


def _within(batch: pa.RecordBatch, times: Times) -> pa.Array:
    """Which events lie in the times."""
    moments = batch.column("timestamp").cast(pa.int64())
    mask = pa.repeat(pa.scalar(True), batch.num_rows)
    if times.start_ms is not None:
        mask = pc.and_(mask, pc.greater_equal(moments, times.start_ms))
    if times.end_ms is not None:
        mask = pc.and_(mask, pc.less(moments, times.end_ms))
    return mask


def _joined(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Batches of a size that is worth sending, without empty ones."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if batch.num_rows:
            waiting.append(batch)
            rows += batch.num_rows
        if rows >= _ROWS_MIN:
            yield _one(waiting)
            waiting, rows = [], 0
    if waiting:
        yield _one(waiting)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
