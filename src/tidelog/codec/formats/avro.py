"""Avro container files of records named ``tidelog.Event``: the event columns, or typed ones.

``timestamp`` is a long with the logical type timestamp-millis. Batches are encoded column by column
(``avro_encoding``), since record by record is twenty times slower; reading back needs fastavro.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

import msgspec
import pyarrow as pa

from tidelog.codec.events import EVENT_SCHEMA
from tidelog.codec.formats.avro_encoding import avro_schema, encode_records, zigzag
from tidelog.codec.formats.base import Data, Format, FormatSettings, Sink, file_name
from tidelog.codec.formats.batches import Encoder, Pending, binary_data, sync_marker
from tidelog.codec.formats.columnar import ColumnarFormat
from tidelog.codec.formats.streams import (
    ZLIB_LEVEL,
    CountedSink,
    decoding,
    exactly,
    open_data,
)
from tidelog.codec.sizes import slices
from tidelog.errors import CorruptError, InvalidError
from tidelog.model.limits import BATCH_EVENTS_MAX

try:
    import fastavro
except ImportError:  # pragma: no cover
    fastavro = None  # type: ignore[assignment]

__all__ = ["AvroFormat"]

BLOCK_BYTES = 1 << 20  # before compression; a reader decodes a block at a time
_BLOCK_BYTES_MAX = 1 << 30  # a longer one is nonsense
_MAGIC = b"Obj\x01"
_AVRO_NAMES = {"deflate": "deflate", "snappy": "snappy", "zstd": "zstandard", "none": "null"}


class AvroFormat(ColumnarFormat):
    """Avro files."""

    __slots__ = ()
    name: ClassVar[str] = "avro"
    extension: ClassVar[str] = ".avro"
    codecs: ClassVar[tuple[str, ...]] = ("deflate", "snappy", "zstd", "none")

    @classmethod
    def opened(cls, codec: str | None, settings: FormatSettings) -> Self:
        """The format with its settings checked, also that Avro takes the names of a schema."""
        made = super().opened(codec, settings)
        avro_schema(made.columns.schema)
        return made

    def read(self, data: Data, sidecar: Data | None = None) -> Iterator[pa.RecordBatch]:
        """The events of a file, block by block."""
        if fastavro is None:
            raise InvalidError("avro reader is not installed: pip install 'tidelog[formats]'")
        return super().read(data, sidecar)

    def _encoder(self, sink: Sink) -> Encoder:
        return _Blocks(sink, self.columns.schema, self.codec)

    def _read(self, data: Data) -> Iterator[pa.RecordBatch]:
        what = file_name(self.name, data)
        file = open_data(data)
        with decoding(what):
            words = _read_header(file)
            sync = exactly(file, 16)
            decode = _decoder(words, what, self.columns.names)
            codec = words.get("avro.codec", b"null").decode()
            while first := file.read(1):
                count, size = _read_long(file, first), _read_long(file)
                if not 0 <= size <= _BLOCK_BYTES_MAX or count < 0:
                    raise ValueError(f"a block has {count} records in {size} bytes")
                block = _unpack(exactly(file, size), codec)
                if exactly(file, 16) != sync:
                    raise ValueError("a block does not end with the file's sync marker")
                yield decode(count, block)


class _Blocks:
    """Writes one block after another."""

    def __init__(self, sink: Sink, schema: pa.Schema, codec: str) -> None:
        self._sink = CountedSink(sink)
        self._schema = schema
        self._codec = codec
        self._pending = Pending(schema, BLOCK_BYTES, BATCH_EVENTS_MAX)
        self._sync = b""

    @property
    def bytes_written(self) -> int:
        """What has been written, and the little that waits."""
        return self._sink.count + self._pending.bytes

    @property
    def bytes_held(self) -> int:
        return self._pending.bytes

    def append(self, batch: pa.RecordBatch) -> None:
        if self._pending.add(batch):
            self.flush()

    def finish(self) -> None:
        self.flush()
        self._begin(None)

    def flush(self) -> None:
        for batch in self._pending.take().combine_chunks().to_batches():
            for piece in slices(batch, BLOCK_BYTES):
                self._begin(piece)
                packed = _pack(binary_data(encode_records(piece)), self._codec)
                self._sink.write(zigzag(piece.num_rows) + zigzag(len(packed)))
                self._sink.write(packed)
                self._sink.write(self._sync)

    def _begin(self, first: pa.RecordBatch | None) -> None:
        """The header, whose sync marker comes from the first events."""
        if self._sync:
            return
        self._sync = bytes(16) if first is None else sync_marker(first)
        words = {
            b"avro.schema": msgspec.json.encode(avro_schema(self._schema)),
            b"avro.codec": _AVRO_NAMES[self._codec].encode(),
        }
        pairs = [zigzag(len(part)) + part for pair in words.items() for part in pair]
        self._sink.write(b"".join([_MAGIC, zigzag(len(words)), *pairs, zigzag(0), self._sync]))


Decode = Callable[[int, bytes], pa.RecordBatch]

_parse_json = msgspec.json.Decoder().decode


def _decoder(words: Mapping[str, bytes], what: str, names: Mapping[str, str]) -> Decode:
    """What makes events of the records of a block, by the schema that the file has itself."""
    schema = _without_logical_types(_parse_json(words["avro.schema"]))
    known = [field["name"] for field in schema["fields"]]
    missing = [name for name in names.values() if name not in known]
    if missing:
        raise CorruptError(
            f"{what}: has no field `{missing[0]}`, it has {', '.join(known)}: "
            "open it with the format and settings that wrote it"
        )
    # The records of a block are an array's items: its count before them and a zero after.
    try:
        array = fastavro.parse_schema({"type": "array", "items": schema})
    except fastavro.schema.SchemaParseException as exc:
        raise ValueError(f"its schema is wrong: {exc}") from exc

    def decode(count: int, block: bytes) -> pa.RecordBatch:
        source = io.BytesIO(zigzag(count) + block + zigzag(0) if count else zigzag(0) + block)
        records: Any = fastavro.schemaless_reader(source, array, None)
        if source.read(1) or len(records) != count:
            raise ValueError(f"a block of {count} records does not add up")
        arrays = [
            pa.array([record[names[field.name]] for record in records], field.type)
            for field in EVENT_SCHEMA
        ]
        return pa.record_batch(arrays, schema=EVENT_SCHEMA)

    return decode


def _without_logical_types(schema: Any) -> Any:
    """Times as numbers: faster to read, and exact."""
    if isinstance(schema, list):
        return [_without_logical_types(each) for each in schema]
    if isinstance(schema, dict):
        return {
            name: _without_logical_types(each)
            for name, each in schema.items()
            if name != "logicalType"
        }
    return schema


def _read_header(file: pa.NativeFile) -> dict[str, bytes]:
    if exactly(file, 4) != _MAGIC:
        raise ValueError("it does not begin as an Avro container does")
    words: dict[str, bytes] = {}
    while count := _read_long(file):
        if count < 0:
            count = -count
            _read_long(file)  # the bytes of this part of the map
        for _ in range(count):
            name = _read_bytes(file).decode()
            words[name] = _read_bytes(file)
    return words


def _read_bytes(file: pa.NativeFile) -> bytes:
    size = _read_long(file)
    if not 0 <= size <= _BLOCK_BYTES_MAX:
        raise ValueError(f"a word of its header has {size} bytes")
    return exactly(file, size)


def _read_long(file: pa.NativeFile, first: bytes = b"") -> int:
    """A number in zigzag digits of seven bits, the lowest first."""
    number, shift = 0, 0
    digit = first or exactly(file, 1)
    while digit[0] & 0x80:
        number |= (digit[0] & 0x7F) << shift
        shift += 7
        if shift > 63:
            raise ValueError("a number has too many digits")
        digit = exactly(file, 1)
    number |= digit[0] << shift
    return (number >> 1) ^ -(number & 1)


def _pack(data: Any, codec: str) -> bytes:
    if codec == "deflate":
        deflate = zlib.compressobj(ZLIB_LEVEL, zlib.DEFLATED, -15)
        return deflate.compress(data) + deflate.flush()
    if codec == "snappy":
        packed: bytes = pa.Codec("snappy").compress(data, asbytes=True)
        return packed + zlib.crc32(data).to_bytes(4, "big")
    if codec == "zstd":
        frame: bytes = pa.Codec("zstd", compression_level=1).compress(data, asbytes=True)
        return frame
    return bytes(data)


def _unpack(data: bytes, codec: str) -> bytes:
    if codec == "deflate":
        return zlib.decompress(data, -15)
    if codec == "snappy":
        size = _snappy_size(data)
        block: bytes = pa.Codec("snappy").decompress(data[:-4], size, asbytes=True)
        if zlib.crc32(block).to_bytes(4, "big") != data[-4:]:
            raise ValueError("a block's checksum is wrong")
        return block
    if codec == "zstandard":
        frame: bytes = pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()
        return frame
    if codec != "null":
        raise ValueError(f"it is compressed by `{codec}`, which is not read here")
    return data


def _snappy_size(data: bytes) -> int:
    """How long a block will be: it begins with that, in digits of seven bits."""
    size = 0
    for index, digit in enumerate(data[:5]):
        size |= (digit & 0x7F) << (7 * index)
        if digit < 0x80 and size <= _BLOCK_BYTES_MAX:
            return size
    raise ValueError("a block's length is nonsense")


_: type[Format] = AvroFormat
