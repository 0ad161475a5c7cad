"""A journal: a compiled run, as one Parquet object that any engine reads.

It contains the events of a range of offsets in order, each with its offset, in row groups that are
small enough to be fetched alone. Pages have checksums; the footer's is in the journal's row.
Between the last row group and the footer are the list of its sources and the id index, which other
readers skip. A recovery needs the sources: a segment and the journals that were built from it
contain the same events.
"""

from __future__ import annotations

import io
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import crc32c
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidelog.codec.event_batch import STORED_SCHEMA, batch_bytes, one_batch
from tidelog.codec.formats.batches import row_sizes
from tidelog.codec.segment import encode_index
from tidelog.errors import CorruptError
from tidelog.model.decoding import decode_msgpack
from tidelog.model.topic import Journal, JournalOrigin, Run

__all__ = [
    "JOURNAL_SCHEMA",
    "EncodedJournal",
    "Fetch",
    "JournalFile",
    "RowGroup",
    "encode_journal",
    "groups_expected",
    "read_sources",
]

JOURNAL_SCHEMA = pa.schema([pa.field("offset", pa.int64(), nullable=False), *STORED_SCHEMA])

_GROUP_ROWS = 65_536
_GROUP_BYTES = 4 << 20  # before compression; what a lookup of one event decodes
_MAGIC = b"PAR1"
_SOURCES = b"tidelog.sources"  # metadata: their range, their size in memory, their crc32c
_ZSTD = pa.Codec("zstd", compression_level=1)

Fetch = Callable[[int, int], bytes]
"""Returns the bytes of the object from one position to another."""


@dataclass(frozen=True, slots=True)
class EncodedJournal:
    """Bytes to store, and what its row says about them."""

    data: bytes
    crc: int  # crc32c of all of them
    first_ms: int  # earliest and latest event time; 0 without events
    last_ms: int
    raw_bytes: int
    ids_start: int
    ids_end: int
    journal: Journal

    def run(self, base: int, count: int, key: str, committed_ms: int) -> Run:
        """Returns its row, for the offsets that it covers."""
        return Run(
            base=base,
            count=count,
            object=key,
            byte_start=0,
            byte_end=len(self.data),
            crc=self.crc,
            first_ms=self.first_ms,
            last_ms=self.last_ms,
            raw_bytes=self.raw_bytes,
            committed_ms=committed_ms,
            ids_start=self.ids_start,
            ids_end=self.ids_end,
            journal=self.journal,
        )


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group: its offsets, its times, and its range of bytes."""

    number: int
    first: int  # offset
    last: int
    first_ms: int
    last_ms: int
    rows: int
    byte_start: int
    byte_end: int


def encode_journal(
    tables: Iterable[pa.Table], applied: int, sources: Callable[[], Sequence[JournalOrigin]] = tuple
) -> EncodedJournal:
    """Packs tables in journal columns with ascending offsets; amendments are already applied.

    Calls ``sources`` after all tables were read.
    """
    sink = pa.BufferOutputStream()
    writer = pq.ParquetWriter(
        sink,
        JOURNAL_SCHEMA,
        compression="zstd",
        compression_level=1,
        use_dictionary=["key", "type"],
        write_statistics=["offset", "timestamp"],
        write_page_checksum=True,
    )
    ids: list[pa.ChunkedArray] = []
    times: list[tuple[int, int]] = []
    events = raw_bytes = 0
    with writer:
        for group in _groups(tables):
            writer.write_table(group, row_group_size=group.num_rows)
            ids.append(group.column("id"))
            found = pc.min_max(group.column("timestamp").cast(pa.int64())).as_py()
            times.append((found["min"], found["max"]))
            events += group.num_rows
            raw_bytes += batch_bytes(group)
        if found_sources := sources():
            packed = msgspec.msgpack.encode(found_sources)
            where = f"{sink.tell()} {len(packed)} {crc32c.crc32c(packed)}"
            sink.write(_ZSTD.compress(packed))
            writer.add_key_value_metadata({_SOURCES.decode(): f"{where} {sink.tell()}"})
        ids_start = sink.tell()
        sink.write(encode_index(ids))
        ids_end = sink.tell()
    data = sink.getvalue().to_pybytes()
    has_ids = ids_end > ids_start
    return EncodedJournal(
        data=data,
        crc=crc32c.crc32c(data),
        first_ms=min((first for first, _ in times), default=0),
        last_ms=max((last for _, last in times), default=0),
        raw_bytes=raw_bytes,
        ids_start=ids_start if has_ids else 0,
        ids_end=ids_end if has_ids else 0,
        journal=Journal(ids_end, crc32c.crc32c(memoryview(data)[ids_end:]), events, applied),
    )


def groups_expected(events: int, raw_bytes: int) -> int:
    """Returns about how many row groups a journal of this size has, at least one."""
    return 1 + max(events // _GROUP_ROWS, raw_bytes // _GROUP_BYTES)


def read_sources(fetch: Fetch, size: int, what: str) -> list[JournalOrigin]:
    """Returns the sources of a journal of this size, in order; empty if it has no list.

    Raises ``CorruptError``, and what ``fetch`` raises.
    """
    try:
        footer = size - 8 - int.from_bytes(fetch(size - 8, size)[:4], "little")
        meta = pq.read_metadata(pa.BufferReader(_MAGIC + fetch(max(0, footer), size)))
        found = (meta.metadata or {}).get(_SOURCES)
        if found is None:
            return []
        start, packed_size, crc, end = (int(each) for each in found.split())
        packed = _ZSTD.decompress(fetch(start, end), packed_size, asbytes=True)
        if crc32c.crc32c(packed) != crc:
            raise ValueError("their checksum does not match")
        return decode_msgpack(packed, list[JournalOrigin])
    except (pa.ArrowInvalid, OSError, EOFError, ValueError, msgspec.MsgspecError) as exc:
        raise CorruptError(f"{what}: its sources do not decode ({exc}): keep the object") from exc


class JournalFile:
    """Reads a journal piece by piece, and checks each. Raises ``CorruptError``.

    Passes on what ``fetch`` raises.
    """

    def __init__(self, fetch: Fetch, run: Run, what: str) -> None:
        if run.journal is None:
            raise CorruptError(f"{what}: its row is not that of a journal: keep it, and run verify")
        self._fetch = fetch
        self._what = what
        self._size = run.byte_end
        footer = fetch(run.journal.footer, run.byte_end)
        if crc32c.crc32c(footer) != run.journal.footer_crc:
            raise CorruptError(
                f"{what}: the footer does not fit its checksum: keep the object, and restore it "
                "from a copy"
            )
        self._meta = self._read_footer(footer)
        if self._meta.num_rows != run.journal.events:
            raise CorruptError(
                f"{what}: holds {self._meta.num_rows} events, its row says "
                f"{run.journal.events}: keep both"
            )
        self.groups = tuple(self._group(number) for number in range(self._meta.num_row_groups))

    def groups_of(self, start: int, end: int) -> Sequence[RowGroup]:
        """Returns the row groups that hold offsets of ``[start, end)``."""
        first = bisect_left(self.groups, start, key=lambda group: group.last)
        last = bisect_left(self.groups, end, key=lambda group: group.first)
        return self.groups[first:last]

    def read(self, group: RowGroup, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Returns the events of a row group in journal columns, or only some columns of them."""
        names = list(columns or JOURNAL_SCHEMA.names)
        return self._decoded(group.number, names, self._parts(group, names))

    def _decoded(
        self, number: int, names: Sequence[str], parts: Sequence[tuple[int, bytes]]
    ) -> pa.RecordBatch:
        file = pa.PythonFile(_Parts(self._size, parts), mode="r")
        try:
            parquet = pq.ParquetFile(
                file, metadata=self._meta, page_checksum_verification=True, pre_buffer=False
            )
            table = parquet.read_row_group(number, columns=list(names), use_threads=False)
        except (pa.ArrowInvalid, OSError, EOFError) as exc:
            raise CorruptError(f"{self._what}: does not decode ({exc}): keep the object") from exc
        schema = pa.schema([field for field in JOURNAL_SCHEMA if field.name in names])
        return one_batch(table.select(schema.names).cast(schema))

    def _parts(self, group: RowGroup, names: Sequence[str]) -> list[tuple[int, bytes]]:
        """Returns the bytes that are needed: the whole group, or the columns one by one."""
        if len(names) > len(JOURNAL_SCHEMA.names) // 2:
            return [(group.byte_start, self._fetch(group.byte_start, group.byte_end))]
        ranges = [each for name, *each in self._columns(group.number) if name in names]
        return [(start, self._fetch(start, end)) for start, end in ranges]

    def _columns(self, number: int) -> Iterator[tuple[str, int, int]]:
        """Yields the name and range of each column chunk."""
        rows = self._meta.row_group(number)
        for index in range(rows.num_columns):
            chunk = rows.column(index)
            start = chunk.data_page_offset
            if chunk.dictionary_page_offset is not None:
                start = min(start, chunk.dictionary_page_offset)
            name = chunk.path_in_schema.partition(".")[0]
            yield name, start, start + chunk.total_compressed_size

    def _group(self, number: int) -> RowGroup:
        rows = self._meta.row_group(number)
        places = list(self._columns(number))
        offsets, times = (rows.column(index).statistics for index in range(2))
        if offsets is None or times is None or not (offsets.has_min_max and times.has_min_max):
            raise CorruptError(
                f"{self._what}: a row group has no range of offsets or times: keep the object"
            )
        return RowGroup(
            number=number,
            first=offsets.min,
            last=offsets.max,
            first_ms=times.min_raw,
            last_ms=times.max_raw,
            rows=rows.num_rows,
            byte_start=min(start for _, start, _ in places),
            byte_end=max(end for *_, end in places),
        )

    def _read_footer(self, footer: bytes) -> pq.FileMetaData:
        try:
            return pq.read_metadata(pa.BufferReader(_MAGIC + footer))  # a file without any pages
        except (pa.ArrowInvalid, OSError, EOFError) as exc:
            raise CorruptError(f"{self._what}: its footer does not decode ({exc})") from exc


class _Parts(io.RawIOBase):
    """A file of which only some parts are here; reading elsewhere is an error."""

    def __init__(self, size: int, parts: Sequence[tuple[int, bytes]]) -> None:
        self._size = size
        self._all = sorted(parts)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._size, self._at + size)
        for start, data in self._all:
            if start <= self._at and end <= start + len(data):
                found = data[self._at - start : end - start]
                self._at = end
                return found
        raise OSError(f"bytes {self._at} to {end} were not fetched")


def _groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yields tables of the size of a row group, by the sizes of rows; one row may be larger."""
    waiting: list[pa.Table] = []
    rows = size = 0
    for table in tables:
        ends = np.concatenate([[0], np.cumsum(row_sizes(table), dtype=np.int64)])
        start = 0
        while start < table.num_rows:
            fits = np.searchsorted(ends, ends[start] + _GROUP_BYTES - size, side="right") - 1
            end = min(max(int(fits), start if waiting else start + 1), start + _GROUP_ROWS - rows)
            if end > start:
                waiting.append(table.slice(start, end - start))
                rows, size = rows + end - start, size + int(ends[end] - ends[start])
                start = end
            if start < table.num_rows:
                yield pa.concat_tables(waiting)
                waiting, rows, size = [], 0, 0
    if waiting:
        yield pa.concat_tables(waiting)
