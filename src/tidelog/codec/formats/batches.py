"""Batches on their way into a file and back: split by size, put into columns, and returned."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.event_batch import EVENT_SCHEMA, whole_ms
from tidelog.codec.formats.base import check_batch
from tidelog.codec.sizes import slices
from tidelog.errors import CorruptError, InvalidError
from tidelog.model.limits import BATCH_EVENTS_MAX

__all__ = [
    "PIECE_BYTES",
    "ColumnWriter",
    "Encoder",
    "FileColumns",
    "PendingBatches",
    "PlainColumns",
    "binary_array",
    "binary_data",
    "check_restorable",
    "estimate",
    "events_of_table",
    "sync_marker",
    "without_heads",
]

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
