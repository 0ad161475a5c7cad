"""Computes the partition of each event of a table, with vectorized code where possible."""

from __future__ import annotations

import hashlib
import heapq
import threading
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["KeylessTurns", "partitions_for", "split"]

_WORDS = 4  # 64-bit words of a sha256 digest
_AT_ONCE = 1_000  # keys; other threads can run after each batch, hashing alone blocks them


class KeylessTurns:
    """Chooses a partition for the keyless events of a flush: the one with the fewest so far.

    So partitions differ by at most one flush, whatever the sizes of flushes. Call it only for a
    flush that has keyless events, since each call counts. Thread-safe.
    """

    def __init__(self, partitions: int, first: int) -> None:
        self._lock = threading.Lock()
        self._turn = partitions
        self._heap = [(0, turn, (first + turn) % partitions) for turn in range(partitions)]

    def next(self, events: int) -> int:
        """Returns the partition for this many events."""
        with self._lock:
            had, _, partition = self._heap[0]
            self._turn += 1
            heapq.heapreplace(self._heap, (had + events, self._turn, partition))
        return partition


def partitions_for(keys: pa.ChunkedArray, partitions: int, keyless: int) -> npt.NDArray[np.int32]:
    """Returns ``int(sha256(key)) mod partitions`` for each key; ``keyless`` for a null key."""
    if partitions == 1:
        return np.zeros(len(keys), np.int32)
    if keys.null_count == len(keys):
        return np.full(len(keys), keyless, np.int32)
    listed = keys.to_pylist()
    found = np.concatenate(
        [
            _remainders(listed[first : first + _AT_ONCE], partitions)
            for first in range(0, len(listed), _AT_ONCE)
        ]
    )
    result = found.astype(np.int32)
    if keys.null_count:
        result[keys.is_null().to_numpy(zero_copy_only=False)] = keyless
    return result


def _remainders(keys: list[bytes | None], partitions: int) -> npt.NDArray[np.uint64]:
    """Returns the digests of some keys, as integers modulo the number of partitions."""
    sha256 = hashlib.sha256
    digests = b"".join([sha256(key or b"").digest() for key in keys])
    words = np.frombuffer(digests, ">u8").reshape(-1, _WORDS).astype(np.uint64)
    modulus = np.uint64(partitions)
    shift = np.uint64((1 << 64) % partitions)
    found: npt.NDArray[np.uint64] = words[:, 0] % modulus
    for word in range(1, _WORDS):  # Horner: the remainder of a number in base 2^64
        found = (found * shift + words[:, word] % modulus) % modulus
    return found


def split(
    table: pa.Table, partitions: npt.NDArray[np.int32]
) -> list[tuple[int, pa.Table, npt.NDArray[np.int64]]]:
    """Returns for each partition its events, in their order, and their row numbers."""
    first = int(partitions[0])
    if bool((partitions == first).all()):
        return [(first, table, np.arange(table.num_rows))]
    order = np.argsort(partitions, kind="stable")
    ordered = partitions[order]
    cuts = np.flatnonzero(np.diff(ordered)) + 1
    bounds = [0, *cuts.tolist(), len(order)]
    taken = table.take(pa.array(order))
    return [
        (int(ordered[start]), taken.slice(start, end - start), order[start:end])
        for start, end in pairwise(bounds)
    ]
