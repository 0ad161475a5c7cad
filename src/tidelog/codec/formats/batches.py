"""Splits batches by the sizes of their rows, and opens byte streams that count or compress.

Batches are never split by an average, since one row may be very large. The same batch is always
split at the same rows.

The caller owns its sinks: closing a stream of this module leaves them open.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.event_batch import EVENT_SCHEMA, whole_ms
from tidelog.codec.formats.base import ByteSink, Data, check_batch
from tidelog.errors import CorruptError, InvalidError, NotFoundError, UnavailableError
from tidelog.model.limits import BATCH_EVENTS_MAX

__all__ = [
    "PIECE_BYTES",
    "READ_BYTES",
    "ZLIB_LEVEL",
    "ColumnWriter",
    "CountedSink",
    "Encoder",
    "FileColumns",
    "OpenSink",
    "PendingBatches",
    "PlainColumns",
    "binary_array",
    "binary_data",
    "check_restorable",
    "decoding",
    "estimate",
    "events_of_table",
    "exactly",
    "fitting_rows",
    "open_data",
    "open_text",
    "row_sizes",
    "runs",
    "slices",
    "sync_marker",
    "text_sink",
    "without_heads",
]


def row_sizes(batch: pa.RecordBatch | pa.Table) -> Any:
    """Returns the approximate size of each row; never too low for bytes and text."""
    sizes = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        start = 0
        for chunk in chunks:
            sizes[start : start + len(chunk)] += _sizes(chunk)
            start += len(chunk)
    return sizes


def runs(sizes: Any, bytes_max: int, rows_max: int | None = None) -> Iterator[tuple[int, int]]:
    """Yields rows ``[start, end)`` of at most ``bytes_max`` together, at least one row."""
    ends = np.cumsum(sizes, dtype=np.int64)
    start, count = 0, len(ends)
    while start < count:
        before = int(ends[start - 1]) if start else 0
        end = max(int(np.searchsorted(ends, before + bytes_max, side="right")), start + 1)
        if rows_max is not None:
            end = min(end, start + rows_max)
        yield start, end
        start = end


def slices(
    batch: pa.RecordBatch, bytes_max: int, rows_max: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yields the batch in slices of at most ``bytes_max``, except single rows; without a copy."""
    if batch.nbytes <= bytes_max and (rows_max is None or batch.num_rows <= rows_max):
        if batch.num_rows:
            yield batch
        return
    for start, end in runs(row_sizes(batch), bytes_max, rows_max):
        yield batch.slice(start, end - start)


def fitting_rows(batch: pa.RecordBatch | pa.Table, bytes_max: int) -> int:
    """Returns how many of the first rows have at most ``bytes_max`` together, at least one."""
    if batch.nbytes <= bytes_max:
        return int(batch.num_rows)
    ends = np.cumsum(row_sizes(batch), dtype=np.int64)
    return max(1, int(np.searchsorted(ends, bytes_max, side="right")))


def _sizes(array: pa.Array) -> Any:
    kind = array.type
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        return pc.fill_null(pc.binary_length(array), 0).to_numpy().astype(np.int64)
    if pa.types.is_struct(kind):
        return sum((_sizes(array.field(index)) for index in range(kind.num_fields)), np.int64(0))
    if len(array) == 0 or not (pa.types.is_list(kind) or pa.types.is_map(kind)):
        return np.full(len(array), 8, np.int64)
    offsets = array.offsets.to_numpy()
    inside = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    ends = np.concatenate([[0], np.cumsum(_sizes(inside), dtype=np.int64)])
    return np.diff(ends[offsets - offsets[0]])


PIECE_BYTES = 16 << 20  # of values handled at a time, far below the 2 GiB of an Arrow array


class FileColumns(Protocol):
    """The columns of a file, and how a batch gets into them."""

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of the file."""
        ...

    @property
    def names(self) -> Mapping[str, str]:
        """Returns the name of each event column in the file; a missing one is not stored."""
        ...

    def fit(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
        """Returns the rows that fit, in the file's columns, and the misfits in event columns."""
        ...


@dataclass(frozen=True, slots=True)
class PlainColumns:
    """The event columns themselves: everything fits."""

    @property
    def schema(self) -> pa.Schema:
        """Returns the event columns."""
        return EVENT_SCHEMA

    @property
    def names(self) -> Mapping[str, str]:
        """Returns each column under its own name."""
        return {name: name for name in EVENT_SCHEMA.names}

    def fit(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
        """Returns the batch as it is."""
        return batch, None


class Encoder(Protocol):
    """Turns batches in the file's columns into bytes."""

    @property
    def bytes_written(self) -> int: ...

    @property
    def bytes_held(self) -> int: ...

    def append(self, batch: pa.RecordBatch) -> None: ...

    def flush(self) -> None: ...

    def finish(self) -> None: ...


class ColumnWriter:
    """A file writer for formats whose file has columns."""

    def __init__(self, columns: FileColumns, encoder: Encoder) -> None:
        self._columns = columns
        self._encoder = encoder
        self._closed = False
        self.rows = 0

    @property
    def bytes_written(self) -> int:
        """Returns about the file's size by now."""
        return self._encoder.bytes_written

    @property
    def bytes_held(self) -> int:
        """Returns what the encoder has collected."""
        return self._encoder.bytes_held

    def write(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Adds what fits; returns the misfits."""
        check_batch(batch)
        fitted, misfits = self._columns.fit(batch)
        if fitted.num_rows:
            self._encoder.append(fitted)
            self.rows += fitted.num_rows
        return misfits

    def flush(self) -> None:
        """Writes what is collected."""
        self._encoder.flush()

    def close(self) -> None:
        """Finishes the file."""
        if not self._closed:
            self._closed = True
            self._encoder.finish()


def estimate(count: int, flushed_bytes: int, pending_bytes: int, codec: str) -> int:
    """Returns about the size of a file that has ``count`` bytes written and some pending."""
    if flushed_bytes:
        return count + pending_bytes * count // flushed_bytes
    return count + (pending_bytes if codec == "none" else pending_bytes // 2)


class PendingBatches:
    """Batches that wait until they are enough for a block, a row group or similar."""

    def __init__(self, schema: pa.Schema, bytes_max: int, rows_max: int) -> None:
        self._schema = schema
        self._bytes_max = bytes_max
        self._rows_max = rows_max
        self._batches: list[pa.RecordBatch] = []
        self.bytes = self.rows = 0

    def has_room(self, size: int) -> bool:
        """Returns whether this many more bytes fit within the limit; always if it is empty."""
        return not self.rows or self.bytes + size <= self._bytes_max

    def add(self, batch: pa.RecordBatch, held_bytes: int | None = None) -> bool:
        """Adds a batch that keeps ``held_bytes`` in memory; returns whether it is time to take."""
        self._batches.append(batch)
        self.rows += batch.num_rows
        self.bytes += batch.nbytes if held_bytes is None else held_bytes
        return self.bytes >= self._bytes_max or self.rows >= self._rows_max

    def take(self) -> pa.Table:
        """Returns all that waited, in order."""
        table = pa.Table.from_batches(self._batches, self._schema)
        self._batches, self.bytes, self.rows = [], 0, 0
        return table


def events_of_table(
    table: pa.Table | pa.RecordBatch, names: Mapping[str, str]
) -> Iterator[pa.RecordBatch]:
    """Yields a file's columns as batches in event columns."""
    missing = [name for name in names.values() if name not in table.schema.names]
    if missing:
        raise CorruptError(
            f"file: has no column `{missing[0]}`, it has {', '.join(table.schema.names)}: "
            "open it with the format and settings that wrote it"
        )
    columns = [table.column(names[name]) for name in EVENT_SCHEMA.names]
    columns = [
        whole_ms(column) if name == "timestamp" else column
        for name, column in zip(EVENT_SCHEMA.names, columns, strict=True)
    ]
    events = pa.table(columns, names=EVENT_SCHEMA.names).cast(EVENT_SCHEMA)
    for batch in events.to_batches(max_chunksize=BATCH_EVENTS_MAX):
        yield from slices(batch, PIECE_BYTES)


def check_restorable(format: str, columns: FileColumns) -> None:
    """Raises ``InvalidError`` for files that do not have the events' values."""
    if "value" not in columns.names:
        raise InvalidError(
            f"format `{format}`: its schema keeps typed columns without the raw value, so events "
            "cannot be restored from it: write it again without --drop-value, or read the columns"
        )


def binary_array(offsets: Any, data: Any) -> pa.Array:
    """Returns bytes split at offsets, which begin at 0, without a copy."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets, np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def binary_data(array: pa.Array) -> pa.Buffer:
    """Returns the bytes of all rows, one after another; null rows have none."""
    if len(array) == 0:
        return pa.py_buffer(b"")
    offsets = _offsets(array)
    start, end = int(offsets[0]), int(offsets[-1])
    return array.buffers()[2].slice(start, end - start) if end > start else pa.py_buffer(b"")


def without_heads(array: pa.Array, size: int) -> pa.Array:
    """Returns each row without its first bytes; the kernel needs the end of the longest."""
    longest = pc.max(pc.binary_length(array)).as_py() or 0
    return pc.binary_slice(array, size, max(longest, size))


def sync_marker(*first: Any) -> bytes:
    """Returns 16 bytes that depend on the first encoded events: same events, same file."""
    digest = hashlib.sha256()
    for part in first:
        digest.update(part)
    return digest.digest()[:16]


def _offsets(array: pa.Array) -> Any:
    whole = np.frombuffer(array.buffers()[1], np.int32)
    return whole[array.offset : array.offset + len(array) + 1]


READ_BYTES = 4 << 20  # per read, for a file that is read from start to end
ZLIB_LEVEL = 3  # twice as fast as 6, and its files are 5% larger

_DEVICE = re.compile(r"\[errno \d+\]", re.IGNORECASE)  # ORC keeps only an error's text
_BAD_BYTES = (
    pa.ArrowException,
    OSError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    MemoryError,  # of an invalid length
    RecursionError,
    struct.error,
    zlib.error,
    msgspec.MsgspecError,
)


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Turns any error of a decoder on bad bytes into ``CorruptError``, even ``InvalidError``.

    A store's error about an object, such as missing rights, is not an error of a decoder.
    """
    try:
        yield
    except NotFoundError:
        raise
    except _BAD_BYTES as exc:
        if isinstance(exc, InvalidError) and "key" in exc.context:
            raise
        if isinstance(exc, OSError) and (exc.errno is not None or _DEVICE.search(str(exc))):
            raise UnavailableError(f"{what}: cannot be read ({exc}): try again") from exc
        reason = " ".join(str(exc).split())[:200]
        raise CorruptError(
            f"{what}: does not decode ({reason or type(exc).__name__}): "
            "keep it, and restore it from a copy"
        ) from exc


def open_data(data: Data) -> pa.NativeFile:
    """Returns bytes, a path or an open file as one kind of file. Raises ``NotFoundError``."""
    if isinstance(data, bytes | bytearray | memoryview | pa.Buffer):
        return pa.BufferReader(data)
    if isinstance(data, str | os.PathLike):
        try:
            return pa.OSFile(os.fspath(data), "rb")
        except FileNotFoundError as exc:
            raise NotFoundError(f"file `{os.fspath(data)}`: is not there: give another") from exc
        except OSError as exc:
            raise UnavailableError(f"file `{os.fspath(data)}`: cannot be opened ({exc})") from exc
    if isinstance(data, pa.NativeFile):
        return data
    return pa.PythonFile(data, "r")


def exactly(stream: pa.NativeFile, size: int) -> bytes:
    """Returns exactly this many bytes. Raises ``EOFError``."""
    if not 0 <= size < 1 << 31:
        raise ValueError(f"a part of it has {size} bytes")
    data: bytes = stream.read(size)
    if len(data) != size:
        raise EOFError(f"it ends {size - len(data)} bytes too early")
    return data


class OpenSink:
    """A file for writing that stays open when a writer above closes it."""

    closed = False

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


class CountedSink(OpenSink):
    """Counts what goes to a sink, and keeps it open when a writer above closes it."""

    def __init__(self, sink: ByteSink) -> None:
        self._sink = sink
        self.count = 0

    def write(self, data: Any, /) -> int:
        """Writes everything, even if the sink accepts a part at a time."""
        left = memoryview(data).cast("B")
        size = left.nbytes
        while left:
            taken = self._sink.write(left)
            if taken is None:  # an Arrow stream accepts all, and returns nothing
                break
            left = left[taken:]
        self.count += size
        return size


class TextSink(Protocol):
    """A stream of text, compressed or not."""

    def write(self, data: Any, /) -> Any: ...

    def close(self) -> None: ...


def text_sink(sink: CountedSink, codec: str) -> TextSink:
    """Returns a sink that compresses text: as ``gzip``, as one ``zstd`` frame, or ``none``."""
    if codec == "gzip":
        return _GzipSink(sink)
    if codec == "zstd":
        zstd: TextSink = pa.CompressedOutputStream(pa.PythonFile(sink, "w"), "zstd")
        return zstd
    return sink


def open_text(data: Data, codec: str) -> pa.NativeFile:
    """Returns the text of a file, to be read from start to end."""
    file = open_data(data)
    if codec == "none":
        return file
    if file.size() == 0:
        raise EOFError("it is empty, and not even an empty file would be")
    place = file.tell()
    begin = file.read(4)
    file.seek(place)
    if not begin.startswith(_BEGINS.get(codec, (b"",))):
        raise ValueError(f"it does not begin as {codec} does: if it is text, change its extension")
    if codec == "gzip":  # Arrow refuses the zeros that some programs put after the end
        return pa.PythonFile(gzip.GzipFile(fileobj=file), mode="r")
    return pa.CompressedInputStream(file, codec)


_SKIPPED = tuple(bytes([number]) + b"\x2a\x4d\x18" for number in range(0x50, 0x60))
_BEGINS = {"gzip": (b"\x1f\x8b",), "zstd": (b"\x28\xb5\x2f\xfd", *_SKIPPED)}


class _GzipSink:
    """One gzip member without name or time, so that the same text gives the same file."""

    def __init__(self, sink: CountedSink) -> None:
        self._sink = sink
        self._compressor = zlib.compressobj(ZLIB_LEVEL, zlib.DEFLATED, 31)

    def write(self, data: Any, /) -> None:
        self._sink.write(self._compressor.compress(data))

    def close(self) -> None:
        self._sink.write(self._compressor.flush())
