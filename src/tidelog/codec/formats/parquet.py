"""Parquet: event columns, or typed ones, and the sidecars of files that cannot hold a whole event.

**Files** have row groups with statistics and page checksums. Any Parquet reader can read them;
``timestamp`` is in milliseconds UTC. Only columns with few different values get a dictionary, and
positions and times are stored as differences. That is faster and smaller than the defaults for
events that rarely repeat.

**A sidecar** is a Parquet file beside a data file. It has one row for each record of the data file,
in the same order: every event column except the value, and ``length``, the bytes of the record in
the data file. ``value`` is there only if the record is not the value byte for byte, and ``is_null``
if there is no value at all. Its footer has a checksum over all records, so that two files that do
not belong together are noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import crc32c
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.codec.formats.base import ByteSink, Data, Format, file_name
from tidelog.codec.formats.batches import (
    PIECE_BYTES,
    CountedSink,
    PendingBatches,
    decoding,
    estimate,
    events_of_table,
    open_data,
    runs,
    slices,
)
from tidelog.codec.formats.typed import ColumnarFormat
from tidelog.errors import CorruptError, InvalidError
from tidelog.model.limits import BATCH_EVENTS_MAX

__all__ = [
    "SIDECAR_SCHEMA",
    "ParquetFormat",
    "RowGroups",
    "Sidecar",
    "SidecarWriter",
    "TableReader",
    "check_sidecar",
    "last_value",
    "sidecar_name",
]


ROW_GROUP_BYTES = 128 << 20  # before compression; the limit of a writer's memory
ROW_GROUP_ROWS = 131_072  # so that the file grows by steps of a few tens of MiB
_LEVELS = {"zstd": 1, "gzip": 3}
_REPEATED = ("topic", "partition", "type")  # worth a dictionary
_RISING = ("offset", "timestamp")
_SEARCHED = ("topic", "partition", "offset", "timestamp")


class ParquetFormat(ColumnarFormat):
    """Parquet files."""

    __slots__ = ()
    name: ClassVar[str] = "parquet"
    extension: ClassVar[str] = ".parquet"
    codecs: ClassVar[tuple[str, ...]] = ("zstd", "snappy", "gzip", "lz4", "none")

    def _encoder(self, sink: ByteSink) -> RowGroups:
        return RowGroups(sink, self.columns.schema, self.codec, self.columns.names)

    def _read(self, data: Data) -> Iterator[pa.RecordBatch]:
        names = self.columns.names
        what = file_name(self.name, data)
        for table in TableReader(data, what).tables(names.values()):
            with decoding(what):
                yield from events_of_table(table, names)


class RowGroups:
    """Collects batches into row groups and writes them; sidecars use it too."""

    def __init__(
        self, sink: ByteSink, schema: pa.Schema, codec: str, names: Mapping[str, str]
    ) -> None:
        self._sink = CountedSink(sink)
        self._writer = pq.ParquetWriter(self._sink, schema, **_options(schema, codec, names))
        self._pending = PendingBatches(schema, ROW_GROUP_BYTES, ROW_GROUP_ROWS)
        self._codec = codec
        self._flushed_bytes = 0

    @property
    def bytes_written(self) -> int:
        """Returns what is written, plus what is pending, at the ratio so far."""
        return estimate(self._sink.count, self._flushed_bytes, self._pending.bytes, self._codec)

    @property
    def bytes_held(self) -> int:
        """Returns the size of the next row group by now."""
        return self._pending.bytes

    def append(self, batch: pa.RecordBatch, held_bytes: int | None = None) -> None:
        """Adds a batch; ``held_bytes`` stay in memory with it, if more than itself."""
        whole = batch.nbytes  # slow to compute
        for piece in [batch] if whole <= ROW_GROUP_BYTES else slices(batch, ROW_GROUP_BYTES):
            size = whole if piece is batch else piece.nbytes
            if not self._pending.has_room(size):
                self.flush()
            if self._pending.add(piece, size if held_bytes is None else held_bytes):
                self.flush()

    def finish(self, metadata: Mapping[str, str] | None = None) -> None:
        """Writes what is left and the footer, with extra metadata in it."""
        self.flush()
        if metadata:
            self._writer.add_key_value_metadata(dict(metadata))
        self._writer.close()

    def flush(self) -> None:
        """Ends the row group."""
        if self._pending.rows:
            self._flushed_bytes += self._pending.bytes
            rows = self._pending.rows
            self._writer.write_table(self._pending.take(), row_group_size=rows)


def last_value(data: Data, what: str, column: str) -> int | None:
    """Returns the greatest value of an integer column, from the footer; None if it has none."""
    with decoding(what):
        meta = pq.ParquetFile(open_data(data)).metadata
        names = [meta.schema.column(number).path for number in range(meta.num_columns)]
        if column not in names:
            return None
        place, found = names.index(column), []
        for group in range(meta.num_row_groups):
            stats = meta.row_group(group).column(place).statistics
            if stats is None or not stats.has_min_max or not isinstance(stats.max, int):
                return None
            found.append(stats.max)
    return max(found, default=None)


class TableReader:
    """Reads a Parquet file row group by row group. Raises ``CorruptError`` for bad bytes."""

    def __init__(self, data: Data, what: str) -> None:
        self._what = what
        source = open_data(data)
        with decoding(what):
            self._file = pq.ParquetFile(source, page_checksum_verification=True)
            self.metadata: dict[bytes, bytes] = self._file.metadata.metadata or {}

    def tables(self, names: Iterable[str]) -> Iterator[pa.Table]:
        """Yields at least one table, with those of the named columns that exist."""
        with decoding(self._what):
            known = [name for name in names if name in self._file.schema_arrow.names]
            if self._file.num_row_groups == 0:
                yield self._file.schema_arrow.empty_table().select(known)
            for index in range(self._file.num_row_groups):
                yield self._file.read_row_group(index, columns=known, use_threads=False)


def _options(schema: pa.Schema, codec: str, names: Mapping[str, str]) -> dict[str, Any]:
    known = {event: name for event, name in names.items() if name in schema.names}
    own = set(known.values())
    typed = [leaf for field in schema if field.name not in own for leaf in _leaves(field)]
    dictionary = [known[name] for name in _REPEATED if name in known]
    dictionary += [path for path, kind in typed if pa.types.is_string(kind)]
    searched = [known[name] for name in _SEARCHED if name in known]
    return {
        "compression": codec,
        "compression_level": _LEVELS.get(codec),
        "use_dictionary": dictionary,
        "column_encoding": {
            known[name]: "DELTA_BINARY_PACKED" for name in _RISING if name in known
        },
        "write_statistics": searched + [path for path, _ in typed],
        "write_page_checksum": True,
    }


def _leaves(field: pa.Field, path: str = "") -> Iterator[tuple[str, pa.DataType]]:
    """Yields the columns in which Parquet stores a field, by their paths."""
    here = f"{path}{field.name}"
    kind = field.type
    if pa.types.is_struct(kind):
        for child in kind:
            yield from _leaves(child, f"{here}.")
    elif pa.types.is_map(kind):
        yield from _leaves(kind.key_field.with_name("key"), f"{here}.key_value.")
        yield from _leaves(kind.item_field.with_name("value"), f"{here}.key_value.")
    elif pa.types.is_list(kind):
        yield from _leaves(kind.value_field.with_name("element"), f"{here}.list.")
    else:
        yield here, kind


_: type[Format] = ParquetFormat


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
