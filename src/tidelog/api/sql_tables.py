"""Topics and archives as tables for DuckDB, which reads only what a query needs of them.

DuckDB passes the columns and filters of each scan to ``dataset.scanner``, so a table is an Arrow
dataset with a ``scanner`` of its own. A run of a topic, a row group of a journal and a file of an
archive each state between which offsets and times their events are. What a filter rules out is not
read; Arrow decides that. Filters are then applied to the rows that were read, so a statement that
is too wide costs time and never a row.

A topic is read up to the ends that it had when a query first scanned it, with the updates and
deletes of that moment. Events come batch by batch: nothing keeps a whole topic in memory.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow import fs

from tidelog.archive.read import ArchiveFiles, is_changing
from tidelog.codec.event_batch import EVENT_SCHEMA, STORED_SCHEMA
from tidelog.codec.journal_file import RowGroup
from tidelog.concurrency import Pool
from tidelog.connectors.by_url import store_at
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import counting_files, read_partitions
from tidelog.errors import CorruptError, InvalidError, NotFoundError, UnavailableError
from tidelog.log.partition_reader import Reader
from tidelog.log.run_reader import Amendments, EventRows, RunSelection, describe_run, read_run
from tidelog.log.run_reader import fetch_run as fetch_bytes
from tidelog.log.topics import read_head
from tidelog.model.archive import Archive
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.model.topic import Head, Run, Topic
from tidelog.store.fetch import fetch_ahead

__all__ = ["ArchiveTable", "EventTable", "Scans", "TopicTable", "Unreadable", "as_dataset"]

T = TypeVar("T")

_AHEAD = 3  # runs to fetch in advance
_AT_ONCE = 8  # heads to read in parallel
_TIME = pa.timestamp("us", "UTC")  # what DuckDB compares with, so that it passes filters on


@dataclass(slots=True)
class Scans:
    """What the scans of one query share: how the first one failed, and whether to stop."""

    failure: BaseException | None = None
    is_stopped: bool = False

    def stop(self) -> None:
        """Ends scans that still run at their next batch."""
        self.is_stopped = True


@dataclass(frozen=True, slots=True)
class _Scan:
    """What DuckDB needs of a scanner of Arrow's."""

    reader: pa.RecordBatchReader

    def to_reader(self) -> pa.RecordBatchReader:
        return self.reader


class _Dataset(ds.InMemoryDataset):  # type: ignore[misc]  # Arrow has no types
    """A table as a dataset; DuckDB calls ``scanner`` for each scan, with columns and filter."""

    table: EventTable
    scans: Scans

    def scanner(
        self, columns: list[str] | None = None, filter: pc.Expression | None = None, **_: Any
    ) -> _Scan:
        wanted = self.table.schema
        if columns is not None:
            wanted = pa.schema([wanted.field(name) for name in columns])
        return _Scan(pa.RecordBatchReader.from_batches(wanted, self._batches(wanted.names, filter)))

    def _batches(
        self, columns: list[str], filter: pc.Expression | None
    ) -> Iterator[pa.RecordBatch]:
        try:
            needed = _needed(self.table.schema, columns, filter)
            for batch in self.table.batches(needed, filter):
                if self.scans.is_stopped:
                    return
                found = batch if filter is None else batch.filter(filter)
                if found.num_rows:
                    yield found.select(columns)
        except GeneratorExit:
            raise  # DuckDB needs no more
        except BaseException as exc:
            self.scans.failure = self.scans.failure or exc
            raise


def as_dataset(table: EventTable, scans: Scans) -> ds.Dataset:
    """Returns a table that DuckDB can scan."""
    made = _Dataset(table.schema.empty_table())
    made.table, made.scans = table, scans
    return made


def _needed(schema: pa.Schema, columns: Sequence[str], filter: pc.Expression | None) -> pa.Schema:
    """Returns the columns to read for a scan; an expression of Arrow does not list its own."""
    position = ("topic", "partition", "offset", "timestamp")
    columns = columns or schema.names[:1]  # a batch without any would not know its rows
    for more in ((), position, (*position, "id", "key", "type")):
        chosen = pa.schema([each for each in schema if each.name in (*columns, *more)])
        if filter is None:
            return chosen
        with contextlib.suppress(pa.ArrowException, KeyError):
            chosen.empty_table().filter(filter)
            return chosen
    return schema


class EventTable(ABC):
    """A topic or an archive as a table."""

    schema: pa.Schema

    @abstractmethod
    def batches(self, wanted: pa.Schema, filter: pc.Expression | None) -> Iterator[pa.RecordBatch]:
        """Yields rows with the wanted columns: at least those that the filter accepts."""


class Unreadable(EventTable):
    """A name that cannot be read, or that may mean several tables: raises ``InvalidError``."""

    schema = EVENT_SCHEMA

    def __init__(self, message: str) -> None:
        self._message = message

    def batches(self, wanted: pa.Schema, filter: pc.Expression | None) -> Iterator[pa.RecordBatch]:
        raise InvalidError(self._message)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Between which offsets and times the events of a piece are; ends are included."""

    first: int
    last: int
    first_ms: int
    last_ms: int

    def expression(self, offset: str = "offset", timestamp: str = "timestamp") -> pc.Expression:
        """Returns the same as a statement about every row."""
        at, when = ds.field(offset), ds.field(timestamp)
        least, most = (pa.scalar(ms * 1_000, _TIME) for ms in (self.first_ms, self.last_ms))
        return (
            (at >= pa.scalar(self.first, pa.int64()))
            & (at <= pa.scalar(self.last, pa.int64()))
            & (when >= least)
            & (when <= most)
        )


_NO_FILES = fs.LocalFileSystem()
_NO_FORMAT = ds.IpcFileFormat()


def _possible(
    schema: pa.Schema,
    filter: pc.Expression | None,
    found: Sequence[tuple[T, pc.Expression]],
) -> list[T]:
    """Returns the items of which a row may pass the filter, by what is true of all their rows.

    Arrow compares the statements with the filter as it does for partitions of a dataset. The
    fragments are never opened. What Arrow cannot compare stays.
    """
    if filter is None:
        return [item for item, _ in found]
    try:
        fragments = [
            _NO_FORMAT.make_fragment(str(number), _NO_FILES, partition_expression=statement)
            for number, (_, statement) in enumerate(found)
        ]
        everything = ds.FileSystemDataset(fragments, schema, _NO_FORMAT, _NO_FILES)
        numbers = sorted(int(each.path) for each in everything.get_fragments(filter))
    except pa.ArrowException:
        return [item for item, _ in found]
    return [found[number][0] for number in numbers]


# Topics.

_TOPIC_SCHEMA = EVENT_SCHEMA.set(
    EVENT_SCHEMA.get_field_index("timestamp"), pa.field("timestamp", _TIME, nullable=False)
)


@dataclass(frozen=True, slots=True)
class _RunPiece:
    """Offsets ``[start, end)`` of a run, and the amendments that it does not contain."""

    run: Run
    start: int
    end: int
    amendments: Amendments

    @property
    def bounds(self) -> _Bounds:
        return _Bounds(self.start, self.end - 1, self.run.first_ms, self.run.last_ms)


@dataclass
class TopicTable(EventTable):
    """A topic. Its ends are those of the first scan, and its runs are listed once."""

    context: Context
    topic: Topic
    schema: pa.Schema = _TOPIC_SCHEMA
    _heads: list[Head] | None = None
    _pieces: dict[int, list[_RunPiece]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def batches(self, wanted: pa.Schema, filter: pc.Expression | None) -> Iterator[pa.RecordBatch]:
        self._read_heads()
        partitions = [(number, self._statement(number)) for number in range(self.topic.partitions)]
        for partition in _possible(self.schema, filter, partitions):
            yield from self._of_partition(partition, wanted, filter)

    def _statement(self, partition: int, bounds: _Bounds | None = None) -> pc.Expression:
        here = (ds.field("topic") == pa.scalar(self.topic.name)) & (
            ds.field("partition") == pa.scalar(partition, pa.int32())
        )
        return here if bounds is None else here & bounds.expression()

    def _read_heads(self) -> list[Head]:
        with self._lock:
            if self._heads is None:
                with Pool(_AT_ONCE) as pool:
                    numbers = range(self.topic.partitions)
                    found = pool.map(lambda n: read_head(self.context, self.topic, n)[0], numbers)
                    self._heads = list(found)
            return self._heads

    def _of_partition(
        self, partition: int, wanted: pa.Schema, filter: pc.Expression | None
    ) -> Iterator[pa.RecordBatch]:
        planned = self._plan(partition)
        pieces = _possible(
            self.schema,
            filter,
            [(each, self._statement(partition, each.bounds)) for each in planned],
        )

        def skip(group: RowGroup) -> bool:
            bounds = _Bounds(group.first, group.last, group.first_ms, group.last_ms)
            return not _possible(self.schema, filter, [(group, self._statement(partition, bounds))])

        with Pool(_AHEAD, "tidelog-fetch") as pool:
            for piece, data in fetch_ahead(pool, self._fetch, pieces, _AHEAD):
                selection = RunSelection(
                    piece.start,
                    piece.end,
                    [name for name in STORED_SCHEMA.names if name in wanted.names] or ["timestamp"],
                    pool,
                    None if filter is None else skip,
                )
                for rows in self._rows(partition, piece, selection, data):
                    yield _shown(rows, self.topic.name, partition, wanted)

    def _plan(self, partition: int) -> list[_RunPiece]:
        with self._lock:
            if partition not in self._pieces:
                self._pieces[partition] = self._read_plan(partition)
            return self._pieces[partition]

    def _read_plan(self, partition: int) -> list[_RunPiece]:
        head = (self._heads or [])[partition]
        at = head.start
        while at < head.next:
            try:
                plan = Reader(self.context, self.topic, partition).plan(at, head.next)
            except NotFoundError as exc:
                at = _start_after(exc)
                continue
            pieces = []
            for run in plan.runs:
                end = min(run.end, head.next)
                pieces.append(_RunPiece(run, max(at, run.base), end, plan.amendments.of_run(run)))
                at = end
            return pieces
        return []

    def _fetch(self, piece: _RunPiece) -> bytes | None:
        try:
            return fetch_bytes(self.context.store, piece.run)
        except NotFoundError:
            return None  # reading it finds out why

    def _rows(
        self, partition: int, piece: _RunPiece, selection: RunSelection, data: bytes | None
    ) -> Iterator[EventRows]:
        """Yields the rows of a piece; by the catalog, if its object was compiled or trimmed."""
        at, end = piece.start, piece.end
        what = describe_run(self.topic.name, partition, piece.run)
        try:
            store = self.context.store
            for rows in read_run(store, piece.run, what, selection, piece.amendments, data):
                at = rows.end
                yield rows
        except NotFoundError:
            while at < end:
                try:
                    for found in Reader(self.context, self.topic, partition).read(at, end):
                        at = found.end
                        yield found.rows
                    return
                except NotFoundError as exc:
                    at = _start_after(exc)


def _start_after(error: NotFoundError) -> int:
    """Returns where a partition begins after a trim. Raises the error if that was not the cause."""
    if "start" not in error.context:
        raise error
    return int(error.context["start"])


def _shown(rows: EventRows, topic: str, partition: int, wanted: pa.Schema) -> pa.RecordBatch:
    """Returns stored rows in the wanted columns."""
    count = rows.batch.num_rows
    arrays = []
    for each in wanted:
        if each.name == "topic":
            array = pa.repeat(pa.scalar(topic), count)
        elif each.name == "partition":
            array = pa.array(np.full(count, partition, np.int32))
        elif each.name == "offset":
            array = pa.array(rows.offsets)
        else:
            array = rows.batch.column(each.name)
            array = array if array.type == each.type else array.cast(each.type)
        arrays.append(array)
    return pa.record_batch(arrays, schema=wanted)


# Archives.


@dataclass(frozen=True, slots=True)
class _FilePiece:
    partition: str  # of the source
    manifest: Manifest
    file: FileEntry


class ArchiveTable(EventTable):
    """The live generation of an archive: its data files, in event columns and typed ones."""

    def __init__(self, context: Context, archive: Archive) -> None:
        self._context = context
        self._archive = archive
        self._files = ArchiveFiles(store_at(context, archive.store), archive.format_of())
        self._pieces: list[_FilePiece] | None = None
        self._lock = threading.Lock()
        columns = self._files.schema
        self.schema = pa.schema(
            [
                each.with_type(_TIME) if each.name == self._files.names["timestamp"] else each
                for each in columns
            ]
        )

    def batches(self, wanted: pa.Schema, filter: pc.Expression | None) -> Iterator[pa.RecordBatch]:
        found = [(each, self._statement(each)) for each in self._plan()]
        for piece in _possible(self.schema, filter, found):
            for batch in self._read(piece):
                arrays = [batch.column(each.name).cast(each.type) for each in wanted]
                yield pa.record_batch(arrays, schema=wanted)

    def _plan(self) -> list[_FilePiece]:
        with self._lock:
            if self._pieces is None:
                pipeline = self._archive.pipeline()
                self._pieces = [
                    _FilePiece(partition, manifest, file)
                    for partition in read_partitions(self._context, pipeline)
                    for manifest, file in counting_files(self._context, pipeline, partition)
                    if file.kind == "data"
                ]
            return self._pieces

    def _statement(self, piece: _FilePiece) -> pc.Expression:
        file, names = piece.file, self._files.names
        bounds = _Bounds(file.first_offset, file.last_offset, file.first_ms, file.last_ms)
        found = bounds.expression(names["offset"], names["timestamp"])
        number = piece.partition.rpartition("/")[2]
        if self._archive.source.startswith(("topic:", "kafka:")) and number.isdecimal():
            here = ds.field(names["partition"]) == pa.scalar(int(number), pa.int32())
            found = found & here
        return found

    def _read(self, piece: _FilePiece) -> Iterator[pa.RecordBatch]:
        """Yields a file; if an erasure has rewritten it since it was listed, as it is now."""
        try:
            # Nothing comes before the whole file is checked.
            yield from self._files.rows(piece.manifest, piece.file)
        except CorruptError:
            archive, live = self._archive, self._archive.generation
            if not is_changing(self._context, archive, live, piece.partition, piece.file):
                raise
            yield from self._read_changed(piece)

    def _read_changed(self, piece: _FilePiece) -> Iterator[pa.RecordBatch]:
        files = counting_files(self._context, self._archive.pipeline(), piece.partition)
        for manifest, file in files:
            if file.target == piece.file.target and file != piece.file:
                yield from self._files.rows(manifest, file)
                return
        raise UnavailableError(
            f"archive `{self._archive.name}`: file `{piece.file.target}` is changed while the "
            "query runs: run it again"
        )
