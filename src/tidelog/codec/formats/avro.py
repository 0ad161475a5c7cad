"""Avro container files of records named ``tidelog.Event``: the event columns, or typed ones.

``timestamp`` is a long with the logical type timestamp-millis. Batches are encoded column by column
here, since record by record is twenty times slower. Files with any schema and codec can be read.

**Reading.** fastavro decodes records, but its own reader of files lacks the codecs that need other
packages (snappy, zstandard), although Arrow has these. So blocks are unpacked here.

**Writing.** Every column becomes an array of its encoded cells, and a record is its cells joined.
So the cost is a few passes over each column, and no Python object for each event.
"""

from __future__ import annotations

import bz2
import io
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.codec.formats.base import ByteSink, Data, Format, FormatSettings, file_name
from tidelog.codec.formats.batches import (
    ZLIB_LEVEL,
    CountedSink,
    Encoder,
    PendingBatches,
    binary_array,
    binary_data,
    decoding,
    exactly,
    open_data,
    slices,
    sync_marker,
)
from tidelog.codec.formats.typed import ColumnarFormat
from tidelog.errors import CorruptError, InvalidError
from tidelog.model.limits import BATCH_EVENTS_MAX

__all__ = ["AvroContainer", "AvroFormat", "check_installed"]

MAGIC = b"Obj\x01"
_BLOCK_BYTES_MAX = 1 << 30  # a longer one is invalid
_parse_json = msgspec.json.Decoder().decode


def check_installed() -> None:
    """Raises ``InvalidError`` if fastavro is missing."""
    try:
        import fastavro  # noqa: F401, PLC0415 - an extra, and slow to load
    except ImportError as exc:
        raise InvalidError("avro reader is not installed: pip install 'tidelog[formats]'") from exc


class AvroContainer:
    """An open file: its schema and codec, and its records. Raises ``ValueError`` for bad bytes."""

    def __init__(self, file: pa.NativeFile) -> None:
        check_installed()
        self._file = file
        self.words = _read_header(file)
        self._sync = exactly(file, 16)
        self.schema: Any = _parse_json(self.words["avro.schema"])
        self.codec = self.words.get("avro.codec", b"null").decode()

    @property
    def fields(self) -> list[str]:
        """Returns the names of a record's fields; empty if the file does not hold records."""
        found = self.schema.get("fields", ()) if isinstance(self.schema, dict) else ()
        return [field["name"] for field in found]

    def records(self, plain: bool = False) -> Iterator[list[Any]]:
        """Yields the records of each block; with ``plain``, times and dates as numbers."""
        import fastavro  # noqa: PLC0415 - `check_installed` was called

        schema = _without_times(self.schema) if plain else self.schema
        # The records of a block are an array's items: its count before them and a zero after.
        try:
            array = fastavro.parse_schema({"type": "array", "items": schema})
        except fastavro.schema.SchemaParseException as exc:
            raise ValueError(f"its schema is wrong: {exc}") from exc
        for count, block in self._blocks():
            source = io.BytesIO(zigzag(count) + block + zigzag(0) if count else zigzag(0) + block)
            found: Any = fastavro.schemaless_reader(source, array, None)
            if source.read(1) or len(found) != count:
                raise ValueError(f"a block of {count} records does not add up")
            yield found

    def _blocks(self) -> Iterator[tuple[int, bytes]]:
        file = self._file
        while first := file.read(1):
            count, size = _read_long(file, first), _read_long(file)
            if not 0 <= size <= _BLOCK_BYTES_MAX or count < 0:
                raise ValueError(f"a block has {count} records in {size} bytes")
            block = _unpack(exactly(file, size), self.codec)
            if exactly(file, 16) != self._sync:
                raise ValueError("a block does not end with the file's sync marker")
            yield count, block


def _without_times(schema: Any) -> Any:
    """Returns a schema with times as numbers: faster to read, and exact."""
    if isinstance(schema, list):
        return [_without_times(each) for each in schema]
    if isinstance(schema, dict):
        is_time = schema.get("logicalType") != "decimal"
        return {
            name: _without_times(each)
            for name, each in schema.items()
            if not (name == "logicalType" and is_time)
        }
    return schema


def _read_header(file: pa.NativeFile) -> dict[str, bytes]:
    if exactly(file, 4) != MAGIC:
        raise ValueError("it does not begin as an Avro container does")
    words: dict[str, bytes] = {}
    while count := _read_long(file):
        if count < 0:
            count = -count
            _read_long(file)  # the size of this part of the map
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
    """Returns a zigzag number in groups of seven bits, the lowest first."""
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


def pack(data: Any, codec: str) -> bytes:
    """Returns a block as a codec stores it."""
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
    if codec == "bzip2":
        return bz2.decompress(data)
    if codec == "xz":
        return lzma.decompress(data)
    if codec != "null":
        raise ValueError(f"it is compressed by `{codec}`, which is not read here")
    return data


def _snappy_size(data: bytes) -> int:
    """Returns the uncompressed length of a block, which begins with it."""
    size = 0
    for index, digit in enumerate(data[:5]):
        size |= (digit & 0x7F) << (7 * index)
        if digit < 0x80 and size <= _BLOCK_BYTES_MAX:
            return size
    raise ValueError("a block's length is nonsense")


NAMESPACE = "tidelog"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PLAIN: dict[pa.DataType, Any] = {
    pa.bool_(): "boolean",
    pa.int8(): "int",
    pa.int16(): "int",
    pa.int32(): "int",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "bytes",
    pa.date32(): {"type": "int", "logicalType": "date"},
    pa.timestamp("ms", "UTC"): {"type": "long", "logicalType": "timestamp-millis"},
    pa.timestamp("us", "UTC"): {"type": "long", "logicalType": "timestamp-micros"},
}


def avro_schema(schema: pa.Schema) -> dict[str, Any]:
    """Returns the record ``tidelog.Event``. Raises ``InvalidError`` for names Avro refuses."""
    return _record("Event", schema)


def encode_records(batch: pa.RecordBatch) -> pa.Array:
    """Returns each row's record, without nulls."""
    return _join(batch.columns, batch.schema)


def zigzag(number: int) -> bytes:
    """Returns an integer as Avro encodes it: groups of seven bits, the lowest first."""
    rest = (number << 1) ^ (number >> 63)
    digits = bytearray()
    while rest > 0x7F:
        digits.append(rest & 0x7F | 0x80)
        rest >>= 7
    digits.append(rest)
    return bytes(digits)


def _record(name: str, fields: Iterable[pa.Field]) -> dict[str, Any]:
    described = []
    for field in fields:
        if not _NAME.fullmatch(field.name):
            raise InvalidError(
                f"format `avro`: field `{field.name}` is not a valid name in Avro: use letters, "
                "digits and underscores"
            )
        kind = _type(f"{name}_{field.name}", field)
        default = {"default": None} if field.nullable else {}
        described.append({"name": field.name, "type": kind, **default})
    return {"type": "record", "name": name, "namespace": NAMESPACE, "fields": described}


def _type(path: str, field: pa.Field) -> Any:
    kind = field.type
    described: Any
    if kind in _PLAIN:
        described = _PLAIN[kind]
    elif pa.types.is_decimal(kind):
        described = {
            "type": "bytes",
            "logicalType": "decimal",
            "precision": kind.precision,
            "scale": kind.scale,
        }
    elif pa.types.is_struct(kind):
        described = _record(path, kind)
    elif pa.types.is_map(kind):
        described = {"type": "map", "values": _type(f"{path}_value", kind.item_field)}
    elif pa.types.is_list(kind):
        described = {"type": "array", "items": _type(f"{path}_item", kind.value_field)}
    else:
        raise InvalidError(f"format `avro`: has no type for {kind}: choose another")
    return ["null", described] if field.nullable else described


def _cells(array: pa.Array, nullable: bool) -> pa.Array:
    """Returns the encoded cells of a column; a union with null if it may be null."""
    if len(array) == 0 or (nullable and array.null_count == len(array)):
        return _constant(b"\x00", len(array))
    cells = _values(array)
    if not nullable:
        return cells
    cells = pc.binary_join_element_wise(b"\x02", cells, b"")
    if array.null_count:
        cells = pc.if_else(array.is_valid(), cells, pa.scalar(b"\x00", pa.binary()))
    return cells


def _values(array: pa.Array) -> pa.Array:
    """Returns the encoded cells where they are not null, and anything where they are."""
    kind = array.type
    if pa.types.is_struct(kind):
        return _join([array.field(index) for index in range(kind.num_fields)], kind)
    if pa.types.is_map(kind):
        pairs = [pa.field("key", pa.string(), nullable=False), kind.item_field]
        return _repeated(array, _join(_inside(array, array.keys, array.items), pairs))
    if pa.types.is_list(kind):
        (items,) = _inside(array, array.values)
        return _repeated(array, _cells(items, kind.value_field.nullable))
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _sized(pc.fill_null(array.cast(pa.binary()), b""))
    return _numbers(array)


def _numbers(array: pa.Array) -> pa.Array:
    kind = array.type
    if pa.types.is_decimal(kind):
        return _sized(pa.array(map(_decimal, array.to_pylist()), pa.binary()))
    if pa.types.is_floating(kind):
        size = kind.bit_width // 8
        numbers = pc.fill_null(array, 0.0).to_numpy().astype(f"<f{size}")
        return binary_array(np.arange(len(array) + 1) * size, numbers.tobytes())
    if pa.types.is_boolean(kind):
        flags = pc.fill_null(array, False).cast(pa.uint8()).to_numpy()
        return binary_array(np.arange(len(array) + 1), flags.tobytes())
    whole = array.cast(pa.int32()) if pa.types.is_date32(kind) else array
    return _zigzags(pc.fill_null(whole.cast(pa.int64()), 0).to_numpy())


def _join(columns: Iterable[pa.Array], fields: Iterable[pa.Field]) -> pa.Array:
    cells = [_cells(column, field.nullable) for column, field in zip(columns, fields, strict=True)]
    return pc.binary_join_element_wise(*cells, b"") if len(cells) > 1 else cells[0]


def _inside(array: pa.Array, *columns: pa.Array) -> list[pa.Array]:
    """Returns the items of a list array between its first and last offset."""
    start, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
    return [column.slice(start, end - start) for column in columns]


def _repeated(array: pa.Array, items: pa.Array) -> pa.Array:
    """Returns encoded lists: the count and the items, if there are any, and a zero."""
    offsets = array.offsets.to_numpy()
    offsets = offsets - offsets[0]
    ends = np.concatenate([[0], np.cumsum(pc.binary_length(items).to_numpy(), dtype=np.int64)])
    bodies = binary_array(ends[offsets], binary_data(items))
    counts = np.diff(offsets)
    full = pc.binary_join_element_wise(_zigzags(counts), bodies, b"\x00", b"")
    return pc.if_else(pa.array(counts > 0), full, pa.scalar(b"\x00", pa.binary()))


def _sized(values: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(_zigzags(pc.binary_length(values).to_numpy()), values, b"")


def _zigzags(numbers: Any) -> pa.Array:
    """Encodes many numbers at once: ten groups for each, and then only those that count."""
    wide = numbers.astype(np.int64)
    rest = ((wide << 1) ^ (wide >> 63)).view(np.uint64)
    digits = np.zeros((len(wide), 10), np.uint8)
    counts = np.ones(len(wide), np.int64)
    for index in range(10):
        digits[:, index] = rest & np.uint64(0x7F)
        rest = rest >> np.uint64(7)
        more = rest > 0
        if not more.any():
            break
        digits[:, index] |= more.astype(np.uint8) << 7
        counts += more
    used = np.arange(10) < counts[:, None]
    return binary_array(np.concatenate([[0], np.cumsum(counts)]), digits[used].tobytes())


def _constant(cell: bytes, count: int) -> pa.Array:
    return binary_array(np.arange(count + 1) * len(cell), cell * count)


def _decimal(value: Any) -> bytes:
    """Returns the digits of a decimal as an integer, in two's complement, big-endian."""
    if value is None:
        return b""
    sign, digits, _ = value.as_tuple()
    number = int("".join(map(str, digits)) or "0") * (-1 if sign else 1)
    return number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True)


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
