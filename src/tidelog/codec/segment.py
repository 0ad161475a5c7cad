"""A segment: one Arrow IPC file with the batches of several partitions, one after another.

Any Arrow reader can open it. A run's row has the byte range of its partition and its crc32c, so a
reader fetches and checks only that range. Offsets are not in it: they are assigned at commit. A
partition whose events have ids is followed by an empty batch that carries their index. Between the
end of the batches and Arrow's footer, where Arrow readers do not look, is what the appender knew
about each partition when it uploaded the segment. So a segment that no row names can prove that the
catalog has lost commits.

**The id index** of a run has four bytes for each id, beside the run in its object. An id is hashed
to 64 bits, of which the upper half is kept, sorted, block by block. A block is a row group of a
journal, or a whole piece of a segment. A lookup that finds an id's half in a block reads that
block's ids to be certain; one in some thousands of these reads is a false positive.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import crc32c
import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.event_batch import STORED_SCHEMA, batch_bytes
from tidelog.errors import CorruptError, InternalError
from tidelog.model.decoding import decode_json
from tidelog.model.limits import BATCH_EVENTS_MAX
from tidelog.model.topic import AppenderView, Piece

__all__ = [
    "SCHEMA_RANGE",
    "IdIndex",
    "Segment",
    "decode_index",
    "encode_index",
    "encode_segment",
    "encode_staged",
    "hash_ids",
    "read_index",
    "read_known",
    "read_piece",
]

_SEED = np.uint64(0x9E3779B97F4A7C15)
_WORD = np.uint64(0xD6E8FEB86659FD93)
_LAST = np.uint64(0xCA5A826395121157)
_U32 = np.dtype("<u4")
_LENGTHS_AT_ONCE = 16 << 20  # bytes of ids that are hashed together


@dataclass(frozen=True, slots=True)
class IdIndex:
    """The halves of hashes, sorted, of each block."""

    blocks: tuple[npt.NDArray[np.uint32], ...]


def hash_ids(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    """Returns the hashes of a text column's values, without nulls."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    hashes = [_hash_chunk(chunk.drop_null()) for chunk in chunks]
    return np.concatenate(hashes) if hashes else np.zeros(0, np.uint64)


def encode_index(blocks: Sequence[pa.Array | pa.ChunkedArray]) -> bytes:
    """Returns the index of blocks, given as id columns; empty if no event has an id."""
    halves = [np.sort((hash_ids(ids) >> np.uint64(32)).astype(_U32)) for ids in blocks]
    if not any(len(each) for each in halves):
        return b""
    counts = np.array([len(halves), *map(len, halves)], _U32)
    data = b"".join([counts.tobytes(), *(each.tobytes() for each in halves)])
    return data + crc32c.crc32c(data).to_bytes(4, "little")


def decode_index(data: bytes, what: str) -> IdIndex:
    """Decodes an index. Raises ``CorruptError``."""
    body = data[:-4]
    if (
        len(data) < 12
        or len(data) % 4
        or crc32c.crc32c(body) != int.from_bytes(data[-4:], "little")
    ):
        raise CorruptError(f"{what}: its id index is damaged: keep the object, and run verify")
    words = np.frombuffer(body, _U32)
    blocks = int(words[0])
    ends = np.cumsum(words[1 : blocks + 1], dtype=np.int64)
    if blocks + 1 > len(words) or (len(ends) and blocks + 1 + int(ends[-1]) != len(words)):
        raise CorruptError(f"{what}: its id index has a wrong length: keep the object")
    return IdIndex(tuple(np.split(words[blocks + 1 :], ends[:-1])))


def _hash_chunk(column: pa.Array) -> npt.NDArray[np.uint64]:
    """Returns hashes; handles ids of one length at a time, as rows of 8-byte words."""
    hashes = np.zeros(len(column), np.uint64)
    if not len(column):
        return hashes
    column = column.cast(pa.large_binary())
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    octets = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    lengths = np.diff(ends)
    for length in np.unique(lengths).tolist():
        rows = np.nonzero(lengths == length)[0]
        step = max(1, _LENGTHS_AT_ONCE // max(1, length))
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            hashes[part] = _hash_rows(octets, ends[part], length)
    return hashes


def _hash_rows(
    octets: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], length: int
) -> npt.NDArray[np.uint64]:
    words = -(-length // 8)
    padded = np.zeros((len(starts), words * 8), np.uint8)
    if length:
        is_dense = int(starts[-1] - starts[0]) == length * (len(starts) - 1)
        if is_dense:
            dense = octets[int(starts[0]) : int(starts[-1]) + length]
            padded[:, :length] = dense.reshape(len(starts), length)
        else:
            padded[:, :length] = np.lib.stride_tricks.sliding_window_view(octets, length)[starts]
    matrix = padded.view("<u8")
    hashes = np.full(len(starts), _SEED ^ np.uint64(length), np.uint64)
    for column in range(words):
        hashes = (hashes ^ matrix[:, column]) * _WORD
        hashes ^= hashes >> np.uint64(32)
    hashes *= _LAST
    return hashes ^ (hashes >> np.uint64(29))


_MAGIC_BYTES = 8  # "ARROW1" and padding, before the schema
_SCHEMA = STORED_SCHEMA.serialize().to_pybytes()
_FIRST_BATCH = _MAGIC_BYTES + len(_SCHEMA)
SCHEMA_RANGE = (_MAGIC_BYTES, _FIRST_BATCH)  # in front of a piece, it makes an Arrow stream
_ZSTD = pa.Codec("zstd", compression_level=1)
_OPTIONS = pa.ipc.IpcWriteOptions(compression=_ZSTD)
_SMALL_OPTIONS = pa.ipc.IpcWriteOptions(compression=_ZSTD, use_threads=False)
_SMALL_BYTES = 256 << 10  # smaller ones are compressed faster without threads
_THREADS_BYTES = 1 << 20  # a smaller piece is decoded faster by one thread
_NO_EVENTS = pa.record_batch(
    [pa.nulls(0, field.type) for field in STORED_SCHEMA], schema=STORED_SCHEMA
)
_IDS = b"tidelog.ids"  # metadata of a batch; as base64, since other readers may want text
_END = struct.Struct("<i6s")  # of an Arrow file: the size of its footer, and "ARROW1"
_KNOWN = struct.Struct("<II")  # size and crc32c of the JSON before it


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes to store, and the range of each piece."""

    data: bytes
    pieces: tuple[Piece, ...]


def encode_segment(
    parts: Sequence[tuple[int, pa.Table]], known: Mapping[int, AppenderView]
) -> Segment:
    """Packs the events of each partition; every part has at least one.

    ``known`` is what the appender knows about each partition: it can prove lost commits
    (``log.maintenance.lost_commits``).
    """
    if any(partition not in known for partition, _ in parts):
        raise InternalError("a segment was to hold a partition of which its appender knows nothing")
    return _encode(parts, known)


def encode_staged(parts: Sequence[tuple[int, pa.Table]], writer: str = "") -> Segment:
    """Packs a segment that others commit, or send elsewhere, so nothing is known yet.

    A driver records in a witness what is committed of it (``log.producer.staged``). ``writer``
    is the producer that will commit it, if its row is kept for good.
    """
    return _encode(parts, {partition: AppenderView(writer=writer) for partition, _ in parts})


def _encode(parts: Sequence[tuple[int, pa.Table]], known: Mapping[int, AppenderView]) -> Segment:
    sink = pa.BufferOutputStream()
    ends: list[tuple[int, int]] = []  # of each piece, and of its index
    is_small = sum(table.nbytes for _, table in parts) < _SMALL_BYTES
    options = _SMALL_OPTIONS if is_small else _OPTIONS
    with pa.ipc.new_file(sink, STORED_SCHEMA, options=options) as file_writer:
        for _, table in parts:
            if table.num_rows == 0:
                raise InternalError("a segment was to hold a partition without events")
            for batch in table.combine_chunks().to_batches(max_chunksize=BATCH_EVENTS_MAX):
                file_writer.write_batch(_without_neighbors(batch))
            end = sink.tell()
            index = encode_index([table.column("id")])
            if index:
                marked = {_IDS: base64.b64encode(index)}
                file_writer.write_batch(_NO_EVENTS, custom_metadata=marked)
            ends.append((end, sink.tell()))
    file = memoryview(sink.getvalue())
    footer = len(file) - _END.size - _END.unpack(file[-_END.size :])[0]
    data = b"".join((file[:footer], _encode_known(parts, known), file[footer:]))
    view = memoryview(data)
    pieces = []
    starts = [_FIRST_BATCH, *(end for _, end in ends)]
    for (partition, table), start, (end, ids_end) in zip(parts, starts, ends, strict=False):
        times = pc.min_max(table.column("timestamp").cast(pa.int64())).as_py()
        pieces.append(
            Piece(
                partition=partition,
                count=table.num_rows,
                byte_start=start,
                byte_end=end,
                crc=crc32c.crc32c(view[start:end]),
                first_ms=times["min"],
                last_ms=times["max"],
                raw_bytes=batch_bytes(table),
                ids_end=ids_end if ids_end > end else 0,
            )
        )
    return Segment(data, tuple(pieces))


def _without_neighbors(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns a copy whose buffers hold only its own events.

    Arrow pads what it writes of a slice with the bytes that follow it in memory. They may be of an
    event that is deleted later, which no search of rows would find in the object.
    """
    return pa.concat_batches([batch, _NO_EVENTS])


def read_piece(
    data: bytes, crc: int, count: int, what: str, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yields the batches of one partition's byte range; checks its checksum before it returns.

    With ``columns``, only these are decoded and returned, in the order of the stored columns.
    """
    found = crc32c.crc32c(data)
    if found != crc:
        raise CorruptError(
            f"{what}: expected crc32c {crc:08x}, found {found:08x}: "
            "keep the object, and restore it from a copy"
        )
    return _batches(data, count, what, columns)


def _batches(
    data: bytes, count: int, what: str, columns: Sequence[str] | None
) -> Iterator[pa.RecordBatch]:
    fields = [] if columns is None else [STORED_SCHEMA.get_field_index(name) for name in columns]
    options = pa.ipc.IpcReadOptions(
        included_fields=fields,  # none means all
        use_threads=len(data) > _THREADS_BYTES,
    )
    rows = 0
    try:
        # With a schema in front, the messages of a piece are an Arrow stream.
        for batch in pa.ipc.open_stream(pa.BufferReader(_SCHEMA + data), options=options):
            rows += batch.num_rows
            yield batch
    except (pa.ArrowInvalid, OSError, EOFError) as exc:
        raise CorruptError(f"{what}: does not decode ({exc}): keep the object") from exc
    if rows != count:
        raise CorruptError(f"{what}: holds {rows} events, its row says {count}: keep both")


def read_index(data: bytes, what: str) -> IdIndex:
    """Decodes the id index behind a piece. Raises ``CorruptError``."""
    try:
        stream = pa.ipc.open_stream(pa.BufferReader(_SCHEMA + data))
        found = stream.read_next_batch_with_custom_metadata().custom_metadata
        encoded = base64.b64decode(found[_IDS], validate=True)
    except StopIteration as exc:  # no batch: the object is cut
        raise CorruptError(f"{what}: its id index is missing: keep the object") from exc
    except (pa.ArrowInvalid, OSError, EOFError, KeyError, TypeError, ValueError) as exc:
        raise CorruptError(f"{what}: its id index does not decode ({exc}): keep it") from exc
    return decode_index(encoded, what)


def read_known(tail: bytes, what: str) -> list[AppenderView]:
    """Returns what an appender knew, from the end of a segment. Raises ``CorruptError``."""
    try:
        footer = len(tail) - _END.size - _END.unpack_from(tail, len(tail) - _END.size)[0]
        size, crc = _KNOWN.unpack_from(tail, footer - _KNOWN.size)
        first = footer - _KNOWN.size - size
        if first < 0 or crc32c.crc32c(tail[first : first + size]) != crc:
            raise ValueError("its checksum does not match")
        return decode_json(tail[first : first + size], list[AppenderView])
    except (struct.error, ValueError, msgspec.MsgspecError) as exc:
        raise CorruptError(f"{what}: what its appender knew does not decode ({exc})") from exc


def _encode_known(
    parts: Sequence[tuple[int, pa.Table]], known: Mapping[int, AppenderView]
) -> bytes:
    """Returns a block of a multiple of 8 bytes; it ends with size and crc32c of its JSON."""
    text = msgspec.json.encode(
        [
            msgspec.structs.replace(known[partition], partition=partition, count=table.num_rows)
            for partition, table in parts
        ]
    )
    text += b" " * (-len(text) % 8)
    return text + _KNOWN.pack(len(text), crc32c.crc32c(text))
