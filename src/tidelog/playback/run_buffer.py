"""Loads runs for a playback, filters and sorts them, and buffers them.

A run is read once, however many windows it is part of, and kept until its last event is out. One
that waits long may be moved into a file without a name, which vanishes with the process.

``Loader`` loads runs, journals and their row groups, with amendments applied. It needs only the
store, so tasks use it too. It caches the footers of journals while their row groups are played.
"""

from __future__ import annotations

import mmap
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.codec.event_batch import EVENT_SCHEMA, STORED_SCHEMA, batch_bytes, one_batch
from tidelog.codec.journal_file import JournalFile, RowGroup
from tidelog.log.reader.amendments import Amendments, apply
from tidelog.log.reader.amendments import EventRows as Stored
from tidelog.log.reader.run_reader import Cut, describe_run, read_run
from tidelog.model.playback import Cursor
from tidelog.playback.run_queue import FoundRun
from tidelog.store.base import Store

__all__ = [
    "BufferedRun",
    "EventFilter",
    "Loader",
    "RunSlice",
    "TimedRows",
    "joined",
    "kept_rows",
]

_SCHEMA = STORED_SCHEMA.append(pa.field("offset", pa.int64(), nullable=False))


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which events of a partition are wanted: times, offsets, and those after a cursor."""

    partition: int
    start_ms: int
    end_ms: int
    start: int
    end: int
    after: Cursor | None = None

    def mask(
        self, times: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Returns which events of a run, at these offsets, are wanted."""
        wanted = (offsets >= self.start) & (offsets < self.end)
        wanted &= (times >= self.start_ms) & (times < self.end_ms)
        if self.after is not None and self.partition <= self.after.partition:
            out = times == self.after.time_ms
            if self.partition == self.after.partition:
                out &= offsets <= self.after.offset
            wanted &= ~out
        return wanted


@dataclass(frozen=True, slots=True)
class TimedRows:
    """Events of one run by time, then by offset."""

    batch: pa.RecordBatch  # in stored columns, with offsets
    times: npt.NDArray[np.int64]
    bytes: int


@dataclass(frozen=True, slots=True)
class RunSlice:
    """Consecutive events of a run, by time."""

    partition: int
    base: int  # of the run
    batch: pa.RecordBatch
    times: npt.NDArray[np.int64]


class BufferedRun:
    """One run; ``load`` returns its events. With a pool it can be fetched in advance."""

    def __init__(self, found: FoundRun, load: Callable[[], TimedRows]) -> None:
        self.found = found
        self._load = load
        self._coming: Future[TimedRows] | None = None
        self._rows: TimedRows | None = None
        self._at = 0
        self._aside = False
        self.is_done = False  # all its events are out

    def fetch(self, pool: Executor | None) -> None:
        """Starts to fetch it, unless that has begun."""
        if pool is not None and self._coming is None and self._rows is None:
            self._coming = pool.submit(self._load)

    def cancel(self) -> None:
        """Cancels the fetch."""
        if self._coming is not None:
            self._coming.cancel()

    @property
    def next_ms(self) -> int:
        """Returns the time of its next event; before it is loaded, a lower bound."""
        return self.found.first_ms if self._rows is None else int(self._rows.times[self._at])

    @property
    def bytes(self) -> int:
        """Returns how much memory it uses now."""
        return 0 if self._rows is None or self._aside else self._rows.bytes

    def bytes_before(self, time_ms: int) -> int:
        """Returns the size of its next events before a time."""
        return batch_bytes(self._get_rows().batch.slice(self._at, self._before(time_ms)))

    def take(self, time_ms: int) -> RunSlice | None:
        """Returns its next events before a time, and moves on."""
        rows, first = self._get_rows(), self._at
        self._at += self._before(time_ms)
        if self._at == len(rows.times):
            self.is_done, self._rows = True, None
        if self._at == first:
            return None
        part, times = rows.batch.slice(first, self._at - first), rows.times[first : self._at]
        return RunSlice(self.found.partition, self.found.base, part, times)

    def put_aside(self) -> None:
        """Moves what is left into a file, and reads it from there later."""
        left = self._get_rows().batch.slice(self._at)
        with tempfile.TemporaryFile(prefix="tidelog-playback-") as file:
            with pa.ipc.new_file(file, _SCHEMA) as writer:
                writer.write_batch(left)
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        batch = pa.ipc.open_file(pa.py_buffer(mapped)).get_batch(0)
        self._rows, self._at, self._aside = (
            TimedRows(batch, _times(batch), batch_bytes(left)),
            0,
            True,
        )

    def _before(self, time_ms: int) -> int:
        return int(np.searchsorted(self._get_rows().times, time_ms)) - self._at

    def _get_rows(self) -> TimedRows:
        if self._rows is None:
            self._rows = self._load() if self._coming is None else self._coming.result()
            self._coming = None
        return self._rows


def kept_rows(parts: Sequence[Stored], wanted: EventFilter) -> TimedRows:
    """Returns the wanted events of consecutive rows."""
    batches = [part.batch for part in parts]
    offsets = np.concatenate([part.offsets for part in parts] or [np.zeros(0, np.int64)])
    table = pa.Table.from_batches(batches, STORED_SCHEMA)
    batch = one_batch(table.append_column(_SCHEMA.field("offset"), pa.array(offsets)))
    times = _times(batch)
    mask = wanted.mask(times, offsets)
    if not mask.all():
        batch, times = batch.filter(pa.array(mask)), times[mask]
    if not _is_sorted(times):
        order = np.argsort(times, kind="stable")
        batch, times = batch.take(pa.array(order)), times[order]
    return TimedRows(batch, times, batch_bytes(batch))


def joined(topic: str, slices: list[RunSlice]) -> pa.RecordBatch:
    """Joins slices in event columns, by time; ties by partition and offset."""
    ordered = sorted(slices, key=lambda each: (each.partition, each.base))
    batch = one_batch([each.batch for each in ordered], _SCHEMA)
    places = np.repeat(
        np.array([each.partition for each in ordered], np.int32),
        [each.batch.num_rows for each in ordered],
    )
    times = np.concatenate([each.times for each in ordered])
    if not _is_sorted(times):
        # Runs come by partition and offset, so ties do too.
        order = np.argsort(times, kind="stable")
        batch, places = batch.take(pa.array(order)), places[order]
    name = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(batch.num_rows, np.int8)), pa.array([topic])
    ).dictionary_decode()
    front = [name, pa.array(places), batch.column("offset")]
    return pa.record_batch([*front, *batch.columns[:-1]], schema=EVENT_SCHEMA)


def _is_sorted(times: npt.NDArray[np.int64]) -> bool:
    return not bool((times[1:] < times[:-1]).any())


def _times(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    times: npt.NDArray[np.int64] = batch.column("timestamp").cast(pa.int64()).to_numpy()
    return times


_FOOTERS = 64  # of journals that are played at once


class Loader:
    """Loads events of one topic from the store. Safe to share among threads.

    Raises ``NotFoundError`` if an object is missing.
    """

    def __init__(self, store: Store, topic: str) -> None:
        self._store = store
        self._topic = topic
        self._files: OrderedDict[str, JournalFile] = OrderedDict()
        self._lock = threading.Lock()

    def groups(self, found: FoundRun) -> Sequence[RowGroup]:
        """Returns the row groups of a journal."""
        return self._file(found).groups

    def load(self, found: FoundRun, wanted: EventFilter, amendments: Amendments) -> TimedRows:
        """Returns the wanted events of a run."""
        return kept_rows(list(self._parts(found, wanted, amendments)), wanted)

    def _parts(
        self, found: FoundRun, wanted: EventFilter, amendments: Amendments
    ) -> Iterator[Stored]:
        if found.group is None:
            what = describe_run(self._topic, found.partition, found.run)
            cut = Cut(wanted.start, wanted.end)
            yield from read_run(self._store, found.run, what, cut, amendments)
            return
        batch = self._file(found).read(found.group)
        places = batch.column("offset").to_numpy()
        rows = Stored(found.base, found.end, batch.drop_columns(["offset"]), places)
        yield from apply(rows, amendments.of_run(found.run), self._store)

    def _file(self, found: FoundRun) -> JournalFile:
        key = found.run.object
        with self._lock:
            file = self._files.get(key)
            if file is not None:
                self._files.move_to_end(key)
                return file
        what = describe_run(self._topic, found.partition, found.run)
        file = JournalFile(partial(self._store.get, key), found.run, what)
        with self._lock:
            self._files[key] = file
            if len(self._files) > _FOOTERS:
                self._files.popitem(last=False)
        return file
