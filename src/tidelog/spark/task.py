"""Runs on executors: opens the store, and reads and writes objects, without a catalog.

A batch read checks the catalog before that, if its machine can reach it (``source.refreshed``).
What is read is checked like by every reader: the bytes against their checksums, the events against
their count. Only the needed row groups and columns of a journal are fetched. Credentials come from
the executor's own environment.
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
from tidelog.codec.event_batch import STORED_SCHEMA, joined_batches
from tidelog.errors import CorruptError, NotFoundError
from tidelog.log.reader.run_reader import Cut, EventRows, describe_run, fetch_run, in_turn, read_run
from tidelog.pool import Pool
from tidelog.settings import Settings
from tidelog.spark.columns import BatchPosition, shown
from tidelog.spark.plan import EventTimes, OffsetSlice, ReadTask
from tidelog.store import Store, open_store_here

__all__ = ["Workshop", "open_workshop", "read_task"]

_AHEAD = 3  # objects to prefetch
_ROWS_MIN = 4_000  # of a batch for Spark; batches of small runs are joined
_BYTES_MIN = 16 << 20  # large values make a batch of fewer rows


@dataclass(frozen=True)
class Workshop:
    """What a task works with."""

    store: Store
    clock: Clock
    ids: Ids


def open_workshop(settings: Settings) -> Workshop:
    """Opens the store of the settings, with this machine's clock and environment."""
    store = open_store_here(settings.store, settings.backoff())
    return Workshop(store, SystemClock(), RandomIds())


def read_task(task: ReadTask, wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yields the events of a task in Spark's columns."""
    store = open_workshop(task.settings).store
    return joined_batches(_batches(store, task, wanted), _ROWS_MIN, _BYTES_MIN)


@functools.cache
def _keep_modules() -> None:
    """Once per process: excludes modules from the garbage collection after each Spark task."""
    gc.freeze()


def _batches(store: Store, task: ReadTask, wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
    # Times are always decoded: they count the rows, and a filter may need them.
    columns = [name for name in STORED_SCHEMA.names if name in ("timestamp", *wanted.names)]
    with Pool(_AHEAD, "tidelog-fetch") as pool:
        for piece, data in in_turn(pool, partial(_fetch, store, task), task.slices, _AHEAD):
            place, is_within = (
                BatchPosition(task.topic, piece.partition),
                task.times.hold(piece.run),
            )
            cut = Cut(piece.start, piece.end, columns, pool, None if is_within else task.times.miss)
            for rows in _rows(store, task, piece, cut, data):
                found = shown(rows, place, wanted)
                yield found if is_within else found.filter(_within(rows.batch, task.times))
    _keep_modules()


def _fetch(store: Store, task: ReadTask, piece: OffsetSlice) -> bytes | None:
    """Fetches all of a segment's piece; nothing of a journal, which others may read too."""
    if piece.run.journal is not None and not piece.is_whole:
        return None
    try:
        return fetch_run(store, piece.run)
    except NotFoundError as exc:
        raise _gone(task, piece) from exc


def _rows(
    store: Store, task: ReadTask, piece: OffsetSlice, cut: Cut, data: bytes | None
) -> Iterator[EventRows]:
    what = describe_run(task.topic, piece.partition, piece.run)
    try:
        yield from read_run(store, piece.run, what, cut, piece.amendments, data)
    except NotFoundError as exc:
        raise _gone(task, piece) from exc


def _gone(task: ReadTask, piece: OffsetSlice) -> CorruptError:
    return CorruptError(
        f"{describe_run(task.topic, piece.partition, piece.run)}: is gone: if the topic was "
        "trimmed, compiled or deleted after this read was planned, read again; if not, restore it "
        "from a copy, and run `tidelog verify`"
    )


def _within(batch: pa.RecordBatch, times: EventTimes) -> pa.Array:
    """Returns which events are within the times."""
    moments = batch.column("timestamp").cast(pa.int64())
    mask = pa.repeat(pa.scalar(True), batch.num_rows)
    if times.start_ms is not None:
        mask = pc.and_(mask, pc.greater_equal(moments, times.start_ms))
    if times.end_ms is not None:
        mask = pc.and_(mask, pc.less(moments, times.end_ms))
    return mask
