"""Hadoop SequenceFiles with Secor's records: the key has the offset, the value is the value.

The key is the offset in eight bytes (``LongWritable``), or a MessagePack map (``BytesWritable``): 1
the offset, 3 the timestamp in milliseconds, 2 the event's key if it has one. A null value is an
empty record. What does not fit into Secor's records is in the sidecar.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.codec.formats.base import (
    ByteSink,
    Data,
    FileWriter,
    Format,
    FormatSettings,
    check_batch,
    check_settings,
    choose_codec,
    choose_setting,
    file_name,
)
from tidelog.codec.formats.batches import (
    PIECE_BYTES,
    PendingBatches,
    binary_data,
    sync_marker,
    without_heads,
)
from tidelog.codec.formats.hadoop import (
    BYTES,
    LONG,
    SequenceHeader,
    SequenceReader,
    SequenceWriter,
    bytes_writables,
    long_writables,
)
from tidelog.codec.formats.sidecar import Sidecar, SidecarWriter, check_sidecar, sidecar_name
from tidelog.codec.formats.streams import CountedSink, decoding, open_data
from tidelog.codec.sizes import slices
from tidelog.errors import CorruptError, InvalidError
from tidelog.model.limits import BATCH_EVENTS_MAX

__all__ = ["SequenceFormat", "open_sequence"]

_OFFSET, _KEY, _TIMESTAMP = 1, 2, 3
_WAIT_BYTES = 1 << 20  # so that blocks are worth compressing
_pack = msgspec.msgpack.Encoder().encode


def open_sequence(codec: str | None, settings: FormatSettings) -> SequenceFormat:
    """Returns the format; checks its settings."""
    check_settings("sequence", settings, "key", "compression")
    codec = choose_codec("sequence", codec, "zlib", "gzip", "none")
    key = choose_setting("sequence", "key", settings.key, "offset", "msgpack")
    compression = choose_setting("sequence", "compression", settings.compression, "block", "record")
    if codec == "none" and settings.compression is not None:
        raise InvalidError(
            f"format `sequence`: codec `none` and compression `{compression}` contradict: "
            "choose a codec, or leave compression out"
        )
    return SequenceFormat(codec, key, by_block=compression == "block")


@dataclass(frozen=True, slots=True)
class SequenceFormat:
    """SequenceFiles and their sidecars."""

    codec: str
    key: str
    by_block: bool
    name: ClassVar[str] = "sequence"
    extension: ClassVar[str] = ".seq"

    @property
    def key_class(self) -> str:
        """Returns Hadoop's name for the class of the keys."""
        return LONG if self.key == "offset" else BYTES

    def sidecar_name(self, name: str) -> str | None:
        """Returns a name beside the data file."""
        return sidecar_name(name)

    def writer(self, sink: ByteSink, sidecar: ByteSink | None = None) -> FileWriter:
        """Starts a file and its sidecar."""
        beside: ByteSink = check_sidecar(self.name, sidecar)
        return _SequenceWriter(self, sink, beside)

    def read(self, data: Data, sidecar: Data | None = None) -> Iterator[pa.RecordBatch]:
        """Yields the events of both files."""
        beside: Data = check_sidecar(self.name, sidecar)
        return self._read(data, beside)

    def _read(self, data: Data, sidecar: Data) -> Iterator[pa.RecordBatch]:
        what = file_name(self.name, data)
        rows_of = Sidecar(sidecar, what)
        file = open_data(data)
        with decoding(what):
            reader = SequenceReader(file)
            if reader.header.key_class != self.key_class:
                raise CorruptError(
                    f"{what}: has keys of {reader.header.key_class}, expected {self.key_class}: "
                    "open it with the settings that wrote it"
                )
            records = _Records(reader.records())
            for rows in rows_of.rows():
                keys, writables = records.take(rows.num_rows)
                values = without_heads(writables, 4)
                if len(keys) == rows.num_rows and not (
                    keys.equals(self.keys_of(rows)) and writables.equals(bytes_writables(values))
                ):
                    raise CorruptError(f"{what}: its records are not its sidecar's: keep both")
                yield rows_of.join(rows, values, binary_data(values))
            rows_of.check_end(len(records.take(1)[0]))

    def keys_of(self, batch: pa.RecordBatch) -> pa.Array:
        """Returns the keys of events, in writable form."""
        if self.key == "offset":
            return long_writables(batch.column("offset"))
        packed = [
            _pack({_OFFSET: offset, _TIMESTAMP: time})
            if key is None
            else _pack({_OFFSET: offset, _TIMESTAMP: time, _KEY: key})
            for offset, time, key in zip(
                batch.column("offset").to_pylist(),
                batch.column("timestamp").cast(pa.int64()).to_pylist(),
                batch.column("key").to_pylist(),
                strict=True,
            )
        ]
        return bytes_writables(pa.array(packed, pa.binary()))


class _SequenceWriter:
    """Writes records to one sink and the rest to the other."""

    def __init__(self, format: SequenceFormat, sink: ByteSink, sidecar: ByteSink) -> None:
        self._pending = PendingBatches(EVENT_SCHEMA, _WAIT_BYTES, BATCH_EVENTS_MAX)
        self._format = format
        self._counted = CountedSink(sink)
        self._sidecar = SidecarWriter(sidecar)
        self._writer: SequenceWriter | None = None
        self._closed = False
        self.rows = 0

    @property
    def bytes_written(self) -> int:
        """Returns what has been written, and the little that waits."""
        return self._counted.count + self._pending.bytes

    @property
    def bytes_held(self) -> int:
        """Returns the little that waits, and what the sidecar has collected."""
        return self._pending.bytes + self._sidecar.bytes_held

    def write(self, batch: pa.RecordBatch) -> None:
        """Writes a record for every event; there are no misfits."""
        check_batch(batch)
        self.rows += batch.num_rows
        if self._pending.add(batch):
            self._write_pending()

    def flush(self) -> None:
        """Writes both."""
        self._write_pending()
        self._sidecar.flush()

    def close(self) -> None:
        """Finishes both files."""
        if not self._closed:
            self._closed = True
            self._write_pending()
            self._begun()
            self._sidecar.finish()

    def _write_pending(self) -> None:
        for batch in self._pending.take().combine_chunks().to_batches():
            for piece in slices(batch, PIECE_BYTES):
                values = pc.fill_null(piece.column("value"), b"")
                keys = self._format.keys_of(piece)
                writer = self._begun(binary_data(keys), binary_data(values))
                writer.write(keys, bytes_writables(values))
                lengths = pc.binary_length(values).to_numpy()
                self._sidecar.append(piece, binary_data(values), lengths)

    def _begun(self, *first: pa.Buffer) -> SequenceWriter:
        """Returns the writer; the sync marker in its header comes from the first events."""
        if self._writer is None:
            own = self._format
            sync = sync_marker(*first) if first else bytes(16)
            header = SequenceHeader(own.key_class, own.codec, own.by_block, sync)
            self._writer = SequenceWriter(self._counted, header)
        return self._writer


class _Records:
    """Records that come in portions of one size and are needed in another."""

    def __init__(self, portions: Iterator[tuple[pa.Array, pa.Array]]) -> None:
        self._portions = portions
        self._left: list[tuple[pa.Array, pa.Array]] = []

    def take(self, count: int) -> tuple[pa.Array, pa.Array]:
        """Returns ``count`` records, or fewer at the end."""
        taken: list[tuple[pa.Array, pa.Array]] = []
        while count:
            if self._left:
                keys, values = self._left.pop()
            else:
                portion = next(self._portions, None)
                if portion is None:
                    break
                keys, values = portion
            if len(keys) > count:
                self._left.append((keys.slice(count), values.slice(count)))
                keys, values = keys.slice(0, count), values.slice(0, count)
            taken.append((keys, values))
            count -= len(keys)
        empty = pa.array([], pa.binary())
        columns = [pa.concat_arrays([empty, *column]) for column in zip(*taken, strict=True)]
        return (columns[0], columns[1]) if columns else (empty, empty)


_: type[Format] = SequenceFormat
