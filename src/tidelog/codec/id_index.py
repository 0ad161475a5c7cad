"""The id index of a run: four bytes for each id, stored beside the run in its object.

An id is hashed to 64 bits, of which the upper half is kept, sorted, block by block. A block is a
row group of a journal, or a whole piece of a segment. A lookup that finds an id's half in a block
reads that block's ids to be certain; one in some thousands of these reads is a false positive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.errors import CorruptError

__all__ = ["IdIndex", "decode_index", "encode_index", "hash_ids"]

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
