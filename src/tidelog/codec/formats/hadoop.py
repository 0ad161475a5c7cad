"""Hadoop's SequenceFile, version 6, read and written without Hadoop: records of a key and a value.

A file is a header and then either records (plain, or each value compressed) or blocks of many
records whose keys and values are compressed together. The file's sync marker, by which Hadoop
splits a file, comes before every block, and about every 100 KB between records. Keys are
``LongWritable`` or ``BytesWritable``; values are always ``BytesWritable``.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.formats.batches import binary_array, binary_data
from tidelog.codec.formats.streams import READ_BYTES, ZLIB_LEVEL, CountedSink, exactly
from tidelog.codec.sizes import runs

__all__ = [
    "BYTES",
    "LONG",
    "SequenceHeader",
    "SequenceReader",
    "SequenceWriter",
    "bytes_writables",
    "long_writables",
]

LONG = "org.apache.hadoop.io.LongWritable"
BYTES = "org.apache.hadoop.io.BytesWritable"
_CODECS = {
    "zlib": "org.apache.hadoop.io.compress.DefaultCodec",
    "gzip": "org.apache.hadoop.io.compress.GzipCodec",
}
_WINDOW_BITS = {"zlib": 15, "gzip": 31}
_MAGIC = b"SEQ\x06"
_ESCAPE = struct.pack(">i", -1)  # in place of a record's length: a sync marker follows
_SYNC_BYTES = 16
_SYNC_EVERY_BYTES = 100_000
_BLOCK_BYTES = 1_000_000  # of keys and values before compression, as in Hadoop
_RECORD_BYTES_MAX = 1 << 30  # a longer record is invalid


@dataclass(frozen=True, slots=True)
class SequenceHeader:
    """What comes before the records."""

    key_class: str
    codec: str  # zlib, gzip or none
    by_block: bool
    sync: bytes

    def encode(self) -> bytes:
        """Returns the header's bytes; its metadata is empty."""
        compressed = self.codec != "none"
        parts = [_MAGIC, _text(self.key_class), _text(BYTES)]
        parts.append(bytes([compressed, compressed and self.by_block]))
        if compressed:
            parts.append(_text(_CODECS[self.codec]))
        return b"".join([*parts, struct.pack(">i", 0), self.sync])


class SequenceWriter:
    """Writes records, with blocks and sync markers."""

    def __init__(self, sink: CountedSink, header: SequenceHeader) -> None:
        self._sink = sink
        self._header = header
        self._mark = _ESCAPE + header.sync
        sink.write(header.encode())

    def write(self, keys: pa.Array, values: pa.Array) -> None:
        """Adds records of keys and values in their writable form, none of them null."""
        header = self._header
        by_block = header.codec != "none" and header.by_block
        sizes = pc.add(pc.binary_length(keys), pc.binary_length(values)).to_numpy()
        for start, end in runs(sizes, _BLOCK_BYTES if by_block else _SYNC_EVERY_BYTES):
            some_keys = keys.slice(start, end - start)
            some_values = values.slice(start, end - start)
            if by_block:
                records = self._block(some_keys, some_values)
            else:
                records = self._records(some_keys, some_values)
            self._sink.write(self._mark)
            self._sink.write(records)

    def _records(self, keys: pa.Array, values: pa.Array) -> Any:
        codec = self._header.codec
        if codec != "none":
            packed = [_compress(each, codec) for each in values.to_pylist()]
            values = pa.array(packed, pa.binary())
        key_lengths = pc.binary_length(keys)
        lengths = np.empty((len(keys), 2), ">i4")
        lengths[:, 0] = pc.add(key_lengths, pc.binary_length(values)).to_numpy()
        lengths[:, 1] = key_lengths.to_numpy()
        heads = binary_array(np.arange(len(keys) + 1) * 8, lengths.tobytes())
        return binary_data(pc.binary_join_element_wise(heads, keys, values, b""))

    def _block(self, keys: pa.Array, values: pa.Array) -> bytes:
        parts = [_vint(len(keys))]
        for column in (keys, values):
            for data in (_vints(pc.binary_length(column).to_numpy()), binary_data(column)):
                packed = _compress(data, self._header.codec)
                parts += [_vint(len(packed)), packed]
        return b"".join(parts)


class SequenceReader:
    """Reads records from start to end. Bad bytes raise what ``decoding`` expects."""

    def __init__(self, file: pa.NativeFile) -> None:
        self._file = file
        self.header = self._read_header()

    def records(self) -> Iterator[tuple[pa.Array, pa.Array]]:
        """Yields keys and values, both as their writables' bytes, some at a time."""
        if self.header.codec != "none" and self.header.by_block:
            return self._blocks()
        return self._single_records()

    def _read_header(self) -> SequenceHeader:
        file = self._file
        if exactly(file, 4) != _MAGIC:
            raise ValueError("it does not begin as a SequenceFile of version 6 does")
        key_class, value_class = self._text(), self._text()
        if key_class not in (LONG, BYTES) or value_class != BYTES:
            raise ValueError(f"it has keys of {key_class} and values of {value_class}")
        compressed, by_block = exactly(file, 2)
        codec = "none"
        if compressed:
            name = self._text()
            known = {each: short for short, each in _CODECS.items()}
            if name not in known:
                raise ValueError(f"it is compressed by {name}, which is not read here")
            codec = known[name]
        (words,) = struct.unpack(">i", exactly(file, 4))
        for _ in range(2 * words):
            self._text()
        return SequenceHeader(key_class, codec, bool(by_block), exactly(file, _SYNC_BYTES))

    def _blocks(self) -> Iterator[tuple[pa.Array, pa.Array]]:
        while escape := self._file.read(4):
            if escape != _ESCAPE or exactly(self._file, _SYNC_BYTES) != self.header.sync:
                raise ValueError("it has no sync marker before a block")
            count = self._vint()
            keys = self._column(count)
            yield keys, self._column(count)

    def _column(self, count: int) -> pa.Array:
        lengths = _decode_vints(_decompress(self._pack(), self.header.codec))
        data = _decompress(self._pack(), self.header.codec)
        if len(lengths) != count or int(lengths.sum()) != len(data) or (lengths < 0).any():
            raise ValueError(f"a block of {count} records does not add up")
        return binary_array(np.concatenate([[0], np.cumsum(lengths)]), data)

    def _pack(self) -> bytes:
        size = self._vint()
        if not 0 <= size <= _RECORD_BYTES_MAX:
            raise ValueError(f"a block's part has {size} bytes")
        return exactly(self._file, size)

    def _single_records(self) -> Iterator[tuple[pa.Array, pa.Array]]:
        rest, codec = b"", self.header.codec
        while chunk := self._file.read(READ_BYTES):
            window = rest + chunk
            keys, values, end = _parse_records(window, self.header.sync)
            rest = window[end:]
            if keys:
                if codec != "none":
                    values = [_decompress(each, codec) for each in values]
                yield pa.array(keys, pa.binary()), pa.array(values, pa.binary())
        if rest:
            raise EOFError("its last record is cut off")

    def _text(self) -> str:
        return exactly(self._file, self._vint()).decode()

    def _vint(self) -> int:
        first = exactly(self._file, 1)
        return int(_decode_vints(first + exactly(self._file, _vint_rest(first[0])))[0])


def long_writables(numbers: pa.Array) -> pa.Array:
    """Returns integers as eight bytes each, big-endian."""
    data = numbers.to_numpy().astype(">i8").tobytes()
    return binary_array(np.arange(len(numbers) + 1) * 8, data)


def bytes_writables(values: pa.Array) -> pa.Array:
    """Returns bytes with their length in front."""
    lengths = pc.binary_length(values).to_numpy().astype(">i4").tobytes()
    heads = binary_array(np.arange(len(values) + 1) * 4, lengths)
    return pc.binary_join_element_wise(heads, values, b"")


def _parse_records(window: bytes, sync: bytes) -> tuple[list[bytes], list[bytes], int]:
    """Returns the whole records of a window, and where the first incomplete one begins."""
    keys: list[bytes] = []
    values: list[bytes] = []
    unpack = struct.Struct(">ii").unpack_from
    position, size = 0, len(window)
    while position + 8 <= size:
        length, key_length = unpack(window, position)
        if length == -1:
            if position + 4 + _SYNC_BYTES > size:
                break
            if window[position + 4 : position + 4 + _SYNC_BYTES] != sync:
                raise ValueError("it has another sync marker than its own")
            position += 4 + _SYNC_BYTES
            continue
        if not 0 <= key_length <= length <= _RECORD_BYTES_MAX:
            raise ValueError(f"it has a record of {length} bytes with a key of {key_length}")
        start = position + 8
        if start + length > size:
            break
        keys.append(window[start : start + key_length])
        values.append(window[start + key_length : start + length])
        position = start + length
    return keys, values, position


def _compress(data: Any, codec: str) -> bytes:
    compressor = zlib.compressobj(ZLIB_LEVEL, zlib.DEFLATED, _WINDOW_BITS[codec])
    return compressor.compress(data) + compressor.flush()


def _decompress(data: bytes, codec: str) -> bytes:
    return zlib.decompress(data, _WINDOW_BITS[codec])


def _text(text: str) -> bytes:
    return _vint(len(text.encode())) + text.encode()


def _vint(number: int) -> bytes:
    """Returns a number that is not negative, as in Hadoop's WritableUtils."""
    if number <= 127:
        return bytes([number])
    digits = number.to_bytes((number.bit_length() + 7) // 8, "big")
    return bytes([0x90 - len(digits)]) + digits  # -112 minus the number of bytes


def _vints(numbers: Any) -> bytes:
    known = {int(number): _vint(int(number)) for number in np.unique(numbers)}
    return b"".join(map(known.__getitem__, numbers.tolist()))


def _vint_rest(first: int) -> int:
    """Returns how many bytes follow the first one."""
    signed = first - 256 if first > 127 else first
    if signed >= -112:
        return 0
    return -112 - signed if signed >= -120 else -120 - signed


def _decode_vints(data: bytes) -> Any:
    numbers = []
    position = 0
    while position < len(data):
        first = data[position]
        rest = _vint_rest(first)
        position += 1
        if rest:
            digits = data[position : position + rest]
            if len(digits) != rest:
                raise EOFError("a number is cut off")
            number = int.from_bytes(digits, "big")
            numbers.append(~number if first < 0x88 else number)
        else:
            numbers.append(first - 256 if first > 127 else first)
        position += rest
    return np.array(numbers, np.int64)
