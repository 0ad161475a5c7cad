"""The sidecar: a Parquet file beside a data file that has no room for a whole event.

It has one row for each record of the data file, in the same order: every event column except the
value, and ``length``, the bytes of the record in the data file. ``value`` is there only if the
record is not the value byte for byte, and ``is_null`` if there is no value at all. Its footer has a
checksum over all records, so that two files that do not belong together are noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import crc32c
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.codec.formats.base import ByteSink, Data, file_name
from tidelog.codec.formats.batches import PIECE_BYTES
from tidelog.codec.formats.parquet import RowGroups, TableReader
from tidelog.codec.sizes import runs
from tidelog.errors import CorruptError, InvalidError
from tidelog.model.limits import BATCH_EVENTS_MAX

__all__ = ["SIDECAR_SCHEMA", "Sidecar", "SidecarWriter", "check_sidecar", "sidecar_name"]

_KEPT = [field for field in EVENT_SCHEMA if field.name != "value"]
SIDECAR_SCHEMA = pa.schema(
    [
        *_KEPT,
        pa.field("length", pa.int64(), nullable=False),
        pa.field("is_null", pa.bool_(), nullable=False),
        pa.field("value", pa.binary()),
    ]
)
_CHECKSUM = "tidelog.crc32c"
_CODEC = "zstd"


def sidecar_name(name: str) -> str:
    """Returns the name of a data file's sidecar: beside it, and ignored as data."""
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}_{base}.meta.parquet"


def check_sidecar(format: str, sidecar: ByteSink | Data | None) -> Any:
    """Returns the sidecar, which must be given."""
    if sidecar is None:
        raise InvalidError(
            f"format `{format}`: keeps topic, offset, time, key and headers in a sidecar: give it "
            "with the data file"
        )
    return sidecar


class SidecarWriter:
    """Writes the rows that belong to the records of a data file."""

    def __init__(self, sink: ByteSink) -> None:
        names = {field.name: field.name for field in _KEPT}
        self._groups = RowGroups(sink, SIDECAR_SCHEMA, _CODEC, names)
        self._checksum = 0

    @property
    def bytes_held(self) -> int:
        """Returns the rows that wait, and the records that they keep in memory."""
        return self._groups.bytes_held

    def append(
        self, batch: pa.RecordBatch, records: Any, lengths: Any, kept: pa.Array | None = None
    ) -> None:
        """Adds the rows of a batch, whose records are these bytes in the data file."""
        self._checksum = crc32c.crc32c(records, self._checksum)
        value = batch.column("value")
        columns = [
            *(batch.column(field.name) for field in _KEPT),
            pa.array(lengths, pa.int64()),
            value.is_null(),
            pa.nulls(batch.num_rows, pa.binary()) if kept is None else kept,
        ]
        rows = pa.record_batch(columns, schema=SIDECAR_SCHEMA)
        self._groups.append(rows, held_bytes=batch.nbytes + rows.nbytes)

    def flush(self) -> None:
        """Writes what has been collected."""
        self._groups.flush()

    def finish(self) -> None:
        """Writes the rest, and the checksum over all records."""
        self._groups.finish({_CHECKSUM: f"{self._checksum:08x}"})


class Sidecar:
    """Reads a sidecar, and joins its rows with the records of the data file."""

    def __init__(self, data: Data, what: str) -> None:
        self._name = f"sidecar of {what}" if isinstance(data, bytes) else file_name("sidecar", data)
        self._reader = TableReader(data, self._name)
        self._what = what
        self._found = 0

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yields its rows, a limited number of them and of their records' bytes at a time."""
        for table in self._reader.tables(SIDECAR_SCHEMA.names):
            if not table.schema.equals(SIDECAR_SCHEMA):
                raise CorruptError(
                    f"{self._name}: has the columns {', '.join(table.schema.names)}, expected "
                    f"{', '.join(SIDECAR_SCHEMA.names)}: is it the sidecar?"
                )
            for batch in table.to_batches(max_chunksize=BATCH_EVENTS_MAX):
                lengths = batch.column("length").to_numpy()
                if len(lengths) and int(lengths.min()) < 0:
                    raise CorruptError(f"{self._name}: has a record of negative length: keep it")
                for start, end in runs(lengths, PIECE_BYTES):
                    yield batch.slice(start, end - start)

    def join(self, rows: pa.RecordBatch, records: pa.Array, raw: Any) -> pa.RecordBatch:
        """Returns events: each row's value is its record, or the value that the row has itself.

        ``raw`` is what the checksum covers: the stored bytes of the records.
        """
        if len(records) != rows.num_rows:
            raise CorruptError(
                f"{self._what}: ends {rows.num_rows - len(records)} records before its sidecar: "
                "keep both"
            )
        self._found = crc32c.crc32c(raw, self._found)
        kept, nothing = rows.column("value"), pa.scalar(None, pa.binary())
        value = records if kept.null_count == len(kept) else pc.coalesce(kept, records)
        if pc.any(rows.column("is_null")).as_py():
            value = pc.if_else(rows.column("is_null"), nothing, value)
        columns = {field.name: rows.column(field.name) for field in _KEPT}
        columns["value"] = value
        return pa.record_batch([columns[name] for name in EVENT_SCHEMA.names], schema=EVENT_SCHEMA)

    def check_end(self, rest: Any) -> None:
        """Raises unless all records have been joined, and the checksum is right."""
        if rest:
            raise CorruptError(f"{self._what}: continues after the end of its sidecar: keep both")
        expected = self._reader.metadata.get(_CHECKSUM.encode(), b"").decode()
        if expected != f"{self._found:08x}":
            raise CorruptError(
                f"{self._what}: expected crc32c {expected or 'in its sidecar'}, found "
                f"{self._found:08x}: keep both, and restore them from a copy"
            )
