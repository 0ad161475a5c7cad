"""Staged segments: put into the store by any process, made part of a topic by a driver, once.

Events are collected until they are worth a segment. Nothing of a staged segment belongs to a topic
before a driver copies it to where segments are, in the topic's present generation, and commits its
pieces under sequences that follow from what was staged. A piece whose sequences the producer's row
of its partition shows is in the topic already; so the same segments may be appended again after a
crash anywhere, or by two drivers at once, and nobody has to be fenced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.codec.events import batch_bytes
from tidelog.model.decoding import Persisted
from tidelog.model.limits import SEGMENT_EVENTS_MAX
from tidelog.model.run import Piece

__all__ = ["Collector", "Located", "Staged", "staged_origin"]

# Larger than a producer's: nobody waits for its linger, and fewer segments are fewer commits.
_SEGMENT_BYTES = 32 << 20

Located = tuple[pa.Table, npt.NDArray[np.int32] | None]  # events, and partitions if they are given


class Staged(Persisted, frozen=True):
    """A staged segment, and what is where in it."""

    key: str
    pieces: tuple[Piece, ...]
    # Of each partition, which events of its piece were left out since: these keep their sequences.
    left_out: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict)
    ledger: str = ""  # begins with the mark of the ledger by which its writer left events out

    def sequences(self, piece: Piece, first: int) -> Sequence[int]:
        """Those of a piece's events, which began at ``first`` when it was staged."""
        out = frozenset(self.left_out.get(piece.partition, ()))
        numbers = range(first, first + piece.count + len(out))
        return [each for each in numbers if each - first not in out] if out else numbers


def staged_origin(key: str) -> str:
    """The id that all copies of a staged segment have, in every process."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


class Collector:
    """Joins tables until they are worth a segment."""

    def __init__(self, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self._segment_bytes = segment_bytes
        self._waiting: list[Located] = []
        self._bytes = self._events = 0

    def add(self, table: pa.Table, places: npt.NDArray[np.int32] | None) -> Iterator[Located]:
        """Take events, all with their partitions or all without; what is enough for a segment."""
        for first in range(0, table.num_rows, SEGMENT_EVENTS_MAX):
            part = table.slice(first, SEGMENT_EVENTS_MAX)
            if self._events + part.num_rows > SEGMENT_EVENTS_MAX:
                yield from self.rest()
            given = None if places is None else places[first : first + SEGMENT_EVENTS_MAX]
            self._waiting.append((part, given))
            self._bytes += batch_bytes(part)
            self._events += part.num_rows
            if self._bytes >= self._segment_bytes:
                yield from self.rest()

    def rest(self) -> Iterator[Located]:
        """What waits, as one table."""
        if self._waiting:
            table = pa.concat_tables([table for table, _ in self._waiting]).combine_chunks()
            given = [places for _, places in self._waiting if places is not None]
            self._waiting, self._bytes, self._events = [], 0, 0
            yield table, np.concatenate(given) if given else None
