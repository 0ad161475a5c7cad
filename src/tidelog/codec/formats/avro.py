"""Avro container files of records named ``tidelog.Event``: the event columns, or typed ones.

``timestamp`` is a long with the logical type timestamp-millis. Batches are encoded column by column
(``avro_container``), since record by record is twenty times slower; reading back needs fastavro.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Self

import msgspec
import pyarrow as pa

from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.codec.formats.avro_container import (
    MAGIC,
    AvroContainer,
    avro_schema,
    check_installed,
    encode_records,
    pack,
    zigzag,
)
from tidelog.codec.formats.base import ByteSink, Data, Format, FormatSettings, file_name
from tidelog.codec.formats.batches import Encoder, PendingBatches, binary_data, sync_marker
from tidelog.codec.formats.streams import CountedSink, decoding, open_data
from tidelog.codec.formats.typed import ColumnarFormat
from tidelog.codec.sizes import slices
from tidelog.errors import CorruptError
from tidelog.model.limits import BATCH_EVENTS_MAX

__all__ = ["AvroFormat"]

BLOCK_BYTES = 1 << 20  # before compression; a reader decodes a block at a time
_AVRO_NAMES = {"deflate": "deflate", "snappy": "snappy", "zstd": "zstandard", "none": "null"}


class AvroFormat(ColumnarFormat):
    """Avro files."""

    __slots__ = ()
    name: ClassVar[str] = "avro"
    extension: ClassVar[str] = ".avro"
    codecs: ClassVar[tuple[str, ...]] = ("deflate", "snappy", "zstd", "none")

    @classmethod
    def opened(cls, codec: str | None, settings: FormatSettings) -> Self:
        """Returns the format; checks its settings, and that Avro allows the names of a schema."""
        made = super().opened(codec, settings)
        avro_schema(made.columns.schema)
        return made

    def read(self, data: Data, sidecar: Data | None = None) -> Iterator[pa.RecordBatch]:
        """Yields the events of a file, block by block."""
        check_installed()
        return super().read(data, sidecar)

    def _encoder(self, sink: ByteSink) -> Encoder:
        return _Blocks(sink, self.columns.schema, self.codec)

    def _read(self, data: Data) -> Iterator[pa.RecordBatch]:
        what = file_name(self.name, data)
        with decoding(what):
            container = AvroContainer(open_data(data))
            names = self.columns.names
            _check_fields(container, what, names)
            for records in container.records(plain=True):
                arrays = [
                    pa.array([record[names[field.name]] for record in records], field.type)
                    for field in EVENT_SCHEMA
                ]
                yield pa.record_batch(arrays, schema=EVENT_SCHEMA)

    def read_columns(self, data: Data) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a file in its own columns, with the types of this format's schema."""
        schema = self.columns.schema
        what = file_name(self.name, data)
        with decoding(what):
            container = AvroContainer(open_data(data))
            _check_fields(container, what, {name: name for name in schema.names})
            for records in container.records(plain=True):
                yield pa.RecordBatch.from_pylist(records, schema=schema)

    def write_columns(self, sink: ByteSink, batches: Iterable[pa.RecordBatch]) -> None:
        """Writes a file of rows that :meth:`read_columns` returned."""
        blocks = _Blocks(sink, self.columns.schema, self.codec)
        for batch in batches:
            blocks.append(batch)
        blocks.finish()


class _Blocks:
    """Writes one block after another."""

    def __init__(self, sink: ByteSink, schema: pa.Schema, codec: str) -> None:
        self._sink = CountedSink(sink)
        self._schema = schema
        self._codec = codec
        self._pending = PendingBatches(schema, BLOCK_BYTES, BATCH_EVENTS_MAX)
        self._sync = b""

    @property
    def bytes_written(self) -> int:
        """Returns what has been written, and the little that waits."""
        return self._sink.count + self._pending.bytes

    @property
    def bytes_held(self) -> int:
        return self._pending.bytes

    def append(self, batch: pa.RecordBatch) -> None:
        if self._pending.add(batch):
            self.flush()

    def finish(self) -> None:
        self.flush()
        self._begin(pa.py_buffer(b""))

    def flush(self) -> None:
        for batch in self._pending.take().combine_chunks().to_batches():
            for piece in slices(batch, BLOCK_BYTES):
                records = binary_data(encode_records(piece))
                self._begin(records)
                packed = pack(records, self._codec)
                self._sink.write(zigzag(piece.num_rows) + zigzag(len(packed)))
                self._sink.write(packed)
                self._sink.write(self._sync)

    def _begin(self, first: pa.Buffer) -> None:
        """Writes the header, whose sync marker comes from the first events."""
        if self._sync:
            return
        self._sync = sync_marker(first) if first.size else bytes(16)
        words = {
            b"avro.schema": msgspec.json.encode(avro_schema(self._schema)),
            b"avro.codec": _AVRO_NAMES[self._codec].encode(),
        }
        pairs = [zigzag(len(part)) + part for pair in words.items() for part in pair]
        self._sink.write(b"".join([MAGIC, zigzag(len(words)), *pairs, zigzag(0), self._sync]))


def _check_fields(container: AvroContainer, what: str, names: Mapping[str, str]) -> None:
    known = container.fields
    missing = [name for name in names.values() if name not in known]
    if missing:
        raise CorruptError(
            f"{what}: has no field `{missing[0]}`, it has {', '.join(known)}: "
            "open it with the format and settings that wrote it"
        )


_: type[Format] = AvroFormat
