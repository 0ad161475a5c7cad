"""ORC: the event columns, or typed ones, in stripes.

ORC's C++ reader returns times in nanoseconds, which end in the year 2262, and fails on a batch with
a later one. So a column ``timestamp_ms`` also has the milliseconds of events: people use
``timestamp``, and our readers the number. In typed columns such a time is a misfit.

ORC has no checksum, and its C++ reader crashes on bad bytes. And a stripe is split by its size
after compression, so one may hold more than an Arrow array can. So a crc32c over the whole file and
the size of its largest row are put into the last part, the PostScript, as extra protobuf fields,
which other readers skip. The PostScript ends with the field ``magic``; one byte follows, the length
of both.

The C++ writer does not survive a sink that raises either, so errors of the sink are kept until
later (:class:`TailSink`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import crc32c
import pyarrow as pa
from pyarrow import orc

from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.codec.formats.base import ByteSink, Data, Format, file_name
from tidelog.codec.formats.batches import (
    READ_BYTES,
    CountedSink,
    Encoder,
    FileColumns,
    OpenSink,
    decoding,
    estimate,
    events_of_table,
    exactly,
    open_data,
    row_sizes,
)
from tidelog.codec.formats.schema import PREFIX
from tidelog.codec.formats.typed import ColumnarFormat
from tidelog.errors import CorruptError, InternalError
from tidelog.model.limits import BATCH_EVENTS_MAX

__all__ = [
    "OrcFormat",
    "TailSink",
    "check_tail",
    "read_all_columns",
]

STRIPE_BYTES = 32 << 20  # what the writer collects before it writes
READ_BYTES_MAX = 256 << 20  # decoded at a time, if all rows were as large as the largest
_HEADER_BYTES = 16  # more than that is a stripe


class OrcFormat(ColumnarFormat):
    """ORC files."""

    __slots__ = ()
    name: ClassVar[str] = "orc"
    extension: ClassVar[str] = ".orc"
    codecs: ClassVar[tuple[str, ...]] = ("zstd", "zlib", "snappy", "lz4", "none")
    times: ClassVar[range] = range(-(2**63) // 1000 + 1, (2**63 - 1) // 1000 + 1)  # nanoseconds

    def _encoder(self, sink: ByteSink) -> Encoder:
        return _Stripes(sink, self.columns, self.codec)

    def _read(self, data: Data) -> Iterator[pa.RecordBatch]:
        names = {**self.columns.names, "timestamp": _number_name(self.columns)}
        source = open_data(data)
        with decoding(file_name(self.name, data)):
            rows = _rows_at_once(source)
            fragment = _open_fragment(source)
            known = [name for name in names.values() if name in fragment.physical_schema.names]
            for batch in _batches(fragment, known, rows):
                yield from events_of_table(batch, names)

    def read_columns(self, data: Data) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a file in its own columns, with the types of this format's schema."""
        schema = self.columns.schema
        source, what = open_data(data), file_name(self.name, data)
        with decoding(what):
            for batch in read_all_columns(source, _rows_at_once(source)):
                missing = [name for name in schema.names if name not in batch.schema.names]
                if missing:
                    raise CorruptError(
                        f"{what}: has no column `{missing[0]}`, it has "
                        f"{', '.join(batch.schema.names)}: open it with the format and settings "
                        "that wrote it"
                    )
                columns = [batch.column(field.name).cast(field.type) for field in schema]
                yield pa.record_batch(columns, schema=schema)

    def write_columns(self, sink: ByteSink, batches: Iterable[pa.RecordBatch]) -> None:
        """Writes a file of rows that :meth:`read_columns` returned."""
        stripes = _Stripes(sink, self.columns, self.codec)
        for batch in batches:
            if batch.num_rows:
                stripes.append(batch)
        stripes.finish()


def read_all_columns(source: pa.NativeFile, rows: int) -> Iterator[pa.RecordBatch]:
    """Yields all columns of a file, ``rows`` at a time; event times come from their numbers."""
    fragment = _open_fragment(source)
    schema = fragment.physical_schema
    time, number = _time_and_number(schema)
    known = [name for name in schema.names if not number or name != time]
    for batch in _batches(fragment, known, rows):
        columns = [
            batch.column(number).cast(EVENT_SCHEMA.field("timestamp").type)
            if number and name == time
            else batch.column(name)
            for name in schema.names
        ]
        yield pa.RecordBatch.from_arrays(columns, names=schema.names)


def _open_fragment(source: pa.NativeFile) -> Any:
    """Returns a reader of a file that reads some of its columns, in batches."""
    from pyarrow.dataset import OrcFileFormat  # noqa: PLC0415 - imports pandas, where there is one

    return OrcFileFormat().make_fragment(source)


def _rows_at_once(source: pa.NativeFile) -> int:
    """Checks the whole file. Returns how many rows to read at a time."""
    rows = READ_BYTES_MAX // max(check_tail(source), 1)
    return min(max(rows, 1), BATCH_EVENTS_MAX)


def _batches(fragment: Any, names: list[str], rows: int) -> Iterator[pa.RecordBatch]:
    yield from fragment.to_batches(
        columns=names,
        batch_size=rows,
        batch_readahead=0,
        fragment_readahead=0,
        use_threads=False,
    )


def _time_and_number(schema: pa.Schema) -> tuple[str, str]:
    """Returns the columns of an event's time and its number, if the file is one of ours."""
    time, number = (
        f"{PREFIX}{name}" if f"{PREFIX}{name}" in schema.names else name
        for name in ("timestamp", "timestamp_ms")
    )
    is_ours = time in schema.names and schema.names[-1] == number  # the number is the last column
    is_ours = is_ours and pa.types.is_timestamp(schema.field(time).type)
    return (time, number) if is_ours and schema.field(number).type == pa.int64() else (time, "")


class _Stripes:
    """Writes batches; ORC collects them into stripes."""

    def __init__(self, sink: ByteSink, columns: FileColumns, codec: str) -> None:
        self._sink = CountedSink(sink)
        self._timestamp = columns.names["timestamp"]
        number = pa.field(_number_name(columns), pa.int64(), nullable=False)
        self._schema = columns.schema.append(number)
        self._tail = TailSink(self._sink)
        self._writer = orc.ORCWriter(
            self._tail,
            compression="uncompressed" if codec == "none" else codec,
            stripe_size=STRIPE_BYTES,
            # Otherwise lz4 does not compress.
            compression_strategy="compression" if codec == "lz4" else "speed",
        )
        self._codec = codec
        self._given_bytes = self._flushed_bytes = 0
        self._rows = 0

    @property
    def bytes_written(self) -> int:
        """Returns what is written, plus what ORC has collected, at the ratio so far."""
        return estimate(self._sink.count, self._flushed_bytes, self.bytes_held, self._codec)

    @property
    def bytes_held(self) -> int:
        """Returns what ORC has collected for a stripe, which it alone decides to end."""
        return self._given_bytes - self._flushed_bytes

    def append(self, batch: pa.RecordBatch) -> None:
        before = self._sink.count
        numbers = batch.column(self._timestamp).cast(pa.int64())
        whole = pa.record_batch([*batch.columns, numbers], schema=self._schema)
        self._tail.largest = max(self._tail.largest, int(row_sizes(batch).max()))
        self._writer.write(pa.Table.from_batches([whole]))
        self._tail.check()
        self._given_bytes += batch.nbytes
        self._rows += batch.num_rows
        if self._sink.count > before + _HEADER_BYTES:
            self._flushed_bytes = self._given_bytes

    def flush(self) -> None: ...

    def finish(self) -> None:
        if not self._rows:  # a file without rows must still have its columns
            self._writer.write(self._schema.empty_table())
        self._writer.close()
        self._tail.finish()
        self._flushed_bytes = self._given_bytes


def _number_name(columns: FileColumns) -> str:
    taken = {name.lower() for name in columns.schema.names}
    return f"{PREFIX}timestamp_ms" if "timestamp_ms" in taken else "timestamp_ms"


_: type[Format] = OrcFormat


_MAGIC = bytes.fromhex("82f40303") + b"ORC"  # field 8000, text
_LARGEST = bytes.fromhex("f5f303")  # field 7998, four bytes, the lowest first
_CHECKSUM = bytes.fromhex("fdf303")  # field 7999, likewise
_OWN_BYTES = len(_LARGEST) + 4 + len(_CHECKSUM) + 4
_TAIL_BYTES = 1 + 255  # the longest PostScript and its length
_END_BYTES = _OWN_BYTES + len(_MAGIC) + 1


class TailSink(OpenSink):
    """Holds the last bytes back until the file is finished, and then inserts the checksum."""

    def __init__(self, sink: CountedSink) -> None:
        self._sink = sink
        self._held = b""
        self.largest = 0  # bytes of a row, set by the writer of the rows
        self._failure: Exception | None = None
        self._checksum = 0

    def write(self, data: Any, /) -> int:
        """Passes on everything except the last bytes; never raises."""
        if self._failure is None:
            whole = self._held + bytes(data)
            try:
                self._give(whole[:-_TAIL_BYTES])
            except Exception as exc:  # noqa: BLE001 - kept for check
                self._failure = exc
            self._held = whole[-_TAIL_BYTES:]
        return len(data)

    def check(self) -> None:
        """Raises what the sink raised."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Writes the last bytes, with the checksum in them."""
        self.check()
        body, end = self._held[: -len(_MAGIC) - 1], self._held[-len(_MAGIC) - 1 :]
        length = end[-1] + _OWN_BYTES
        if end[:-1] != _MAGIC or length > 255:
            raise InternalError(f"orc: a file ends with {end.hex()}, expected its magic")
        self._give(body + _LARGEST + self.largest.to_bytes(4, "little"))
        end = _MAGIC + bytes([length])
        checksum = crc32c.crc32c(end, self._checksum)
        self._sink.write(_CHECKSUM + checksum.to_bytes(4, "little") + end)

    def _give(self, data: bytes) -> None:
        if data:
            self._checksum = crc32c.crc32c(data, self._checksum)
            self._sink.write(data)


def check_tail(file: pa.NativeFile) -> int:
    """Reads the whole file once; returns the size of its largest row.

    Raises ``ValueError`` or ``EOFError`` unless every byte is as it was written.
    """
    left = file.size() - _END_BYTES
    if left <= 0:
        raise EOFError("it is too short")
    file.seek(0)
    found = 0
    while left:
        chunk = exactly(file, min(left, READ_BYTES))
        found = crc32c.crc32c(chunk, found)
        left -= len(chunk)
    end = exactly(file, _END_BYTES)
    largest, expected = end[3:7], int.from_bytes(end[10:14], "little")
    if (end[:3], end[7:10], end[14:-1]) != (_LARGEST, _CHECKSUM, _MAGIC):
        raise ValueError("it has no checksum at its end, so it is cut off or was not written here")
    found = crc32c.crc32c(end[14:], crc32c.crc32c(end[:7], found))
    if found != expected:
        raise ValueError(f"expected crc32c {expected:08x}, found {found:08x}")
    file.seek(0)
    return int.from_bytes(largest, "little")
