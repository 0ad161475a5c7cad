"""Reads Avro container files of any schema and codec: the one reader of them that we have.

fastavro decodes records, but its own reader of files lacks the codecs that need other packages
(snappy, zstandard), though Arrow brings these. So blocks are unpacked here.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa

from tidelog.codec.formats.avro_encoding import zigzag
from tidelog.codec.formats.streams import ZLIB_LEVEL, exactly
from tidelog.errors import InvalidError

try:
    import fastavro
except ImportError:  # pragma: no cover
    fastavro = None  # type: ignore[assignment]

__all__ = ["MAGIC", "AvroContainer", "check_installed", "pack"]

MAGIC = b"Obj\x01"
_BLOCK_BYTES_MAX = 1 << 30  # a longer one is nonsense
_parse_json = msgspec.json.Decoder().decode


def check_installed() -> None:
    """Raise ``InvalidError`` where fastavro is missing."""
    if fastavro is None:
        raise InvalidError("avro reader is not installed: pip install 'tidelog[formats]'")


class AvroContainer:
    """An open file: its schema and codec, and its records. ``ValueError`` for bad bytes."""

    def __init__(self, file: pa.NativeFile) -> None:
        check_installed()
        self._file = file
        self.words = _read_header(file)
        self._sync = exactly(file, 16)
        self.schema: Any = _parse_json(self.words["avro.schema"])
        self.codec = self.words.get("avro.codec", b"null").decode()

    @property
    def fields(self) -> list[str]:
        """The names of a record's fields; none where the file is of something else."""
        found = self.schema.get("fields", ()) if isinstance(self.schema, dict) else ()
        return [field["name"] for field in found]

    def records(self, plain: bool = False) -> Iterator[list[Any]]:
        """Yields the records of each block; with ``plain``, times and dates as numbers."""
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
    """Times as numbers: faster to read, and exact."""
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
    """How long a block will be: it begins with that, in digits of seven bits."""
    size = 0
    for index, digit in enumerate(data[:5]):
        size |= (digit & 0x7F) << (7 * index)
        if digit < 0x80 and size <= _BLOCK_BYTES_MAX:
            return size
    raise ValueError("a block's length is nonsense")
