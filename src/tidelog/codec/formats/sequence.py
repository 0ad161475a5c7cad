"""Hadoop SequenceFiles with Secor's records: the key has the offset, the value is the value.

The key is the offset in eight bytes (``LongWritable``), or a MessagePack map (``BytesWritable``): 1
the offset, 3 the timestamp in milliseconds, 2 the event's key if it has one. A null value is an
empty record. What does not fit into Secor's records is in the sidecar.

**Files.** SequenceFiles of version 6 are read and written without Hadoop. A file is a header and
then either records (plain, or each value compressed) or blocks of many records whose keys and
values are compressed together. The file's sync marker, by which Hadoop splits a file, comes before
every block, and about every 100 KB between records. Keys are ``LongWritable`` or ``BytesWritable``;
values are always ``BytesWritable``.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np
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
    READ_BYTES,
    ZLIB_LEVEL,
    CountedSink,
    PendingBatches,
    binary_array,
    binary_data,
    decoding,
    exactly,
    open_data,
    runs,
    slices,
    sync_marker,
    without_heads,
)
from tidelog.codec.formats.parquet import Sidecar, SidecarWriter, check_sidecar, sidecar_name
from tidelog.errors import CorruptError, InvalidError
from tidelog.model.limits import BATCH_EVENTS_MAX

__all__ = ["BYTES", "SequenceFormat", "SequenceReader", "open_sequence"]

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
