"""Staged segments, which are committed later, and witnesses of their commits.

Any process puts them into the store, and a driver appends each to a topic,
once.

Nothing of a staged segment belongs to a topic until a driver copies it to the topic's current
generation and commits its pieces. The sequences of a piece follow from what was staged. If the
producer's row of a partition shows them, the piece is already in the topic. So the same segments
can be appended again after a crash at any point, or by two drivers at once, without any fencing.

A segment of a plain append carries what its appender knew about the partitions (``AppenderView``).
A staged segment is written by a process without a catalog, which does not know the offsets. So the
driver puts a **witness** object after it commits a staged segment, and before it acknowledges it.
The witness lists the partitions that have committed the segment or a copy of it.

The witness is in the store, so restoring an old catalog does not undo it. Suppose a partition
neither names nor lists a stray that a witness says it has committed. That proves that the catalog
was restored to an earlier state, even if this is the only lost commit. The first commit of a copy
creates the producer row that a recovery would use (``append``). If that row exists, the catalog
knows the commit, however late the witness is read.

A witness counts only for a stray. A sweep deletes it when no copy of its segment is left.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.codec.event_batch import batch_bytes
from tidelog.context import Context
from tidelog.errors import NotFoundError
from tidelog.log.unused_objects import origin_of, read_unused
from tidelog.model import layout
from tidelog.model.decoding import Persisted, open_json, seal_json
from tidelog.model.limits import SEGMENT_EVENTS_MAX
from tidelog.model.topic import (
    Piece,
    Run,
    Topic,
    decode_row,
    recovery_producer,
)
from tidelog.store.base import ObjectInfo, Store, put_fresh
from tidelog.store.wrappers import reread

__all__ = [
    "Collector",
    "Located",
    "StagedSegment",
    "Witness",
    "is_claimed",
    "is_witness_obsolete",
    "list_witnesses",
    "lost_partition",
    "put_witness",
    "staged_origin",
]

# Larger than a producer's, since nothing waits for it, and fewer segments mean fewer commits.
_SEGMENT_BYTES = 32 << 20

Located = tuple[pa.Table, npt.NDArray[np.int32] | None]  # events, and their partitions if given


class StagedSegment(Persisted, frozen=True):
    """A staged segment and its pieces."""

    key: str
    pieces: tuple[Piece, ...]
    # For each partition, the events of its piece that were left out later. They keep their
    # sequences.
    left_out: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict)
    ledger: str = ""  # starts with the mark of the ledger that its writer applied

    def sequences(self, piece: Piece, first: int) -> Sequence[int]:
        """Returns the sequences of a piece's events; the piece began at ``first`` when staged."""
        out = frozenset(self.left_out.get(piece.partition, ()))
        numbers = range(first, first + piece.count + len(out))
        return [each for each in numbers if each - first not in out] if out else numbers


def staged_origin(key: str) -> str:
    """Returns the id that all copies of a staged segment have, in every process."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


class Collector:
    """Joins tables until they are large enough for a segment."""

    def __init__(self, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self._segment_bytes = segment_bytes
        self._waiting: list[Located] = []
        self._bytes = self._events = 0

    def add(self, table: pa.Table, partitions: npt.NDArray[np.int32] | None) -> Iterator[Located]:
        """Adds events, all with partitions or all without; yields what is enough for a segment."""
        for first in range(0, table.num_rows, SEGMENT_EVENTS_MAX):
            part = table.slice(first, SEGMENT_EVENTS_MAX)
            if self._events + part.num_rows > SEGMENT_EVENTS_MAX:
                yield from self.rest()
            given = None if partitions is None else partitions[first : first + SEGMENT_EVENTS_MAX]
            self._waiting.append((part, given))
            self._bytes += batch_bytes(part)
            self._events += part.num_rows
            if self._bytes >= self._segment_bytes:
                yield from self.rest()

    def rest(self) -> Iterator[Located]:
        """Yields the rest as one table."""
        if self._waiting:
            table = pa.concat_tables([table for table, _ in self._waiting]).combine_chunks()
            given = [partitions for _, partitions in self._waiting if partitions is not None]
            self._waiting, self._bytes, self._events = [], 0, 0
            yield table, np.concatenate(given) if given else None


class Witness(Persisted, frozen=True):
    """The content of a witness object."""

    partitions: tuple[int, ...]  # have committed a copy of the segment
    format: int = layout.FORMAT


def put_witness(context: Context, topic: Topic, origin: str, partitions: Sequence[int]) -> None:
    """Records that partitions have committed a segment. Raises ``UnavailableError`` on failure."""
    key = layout.witness(topic.incarnation, origin, context.ids.new())
    put_fresh(context.store, key, seal_json(Witness(tuple(partitions))))


def is_claimed(context: Context, topic: Topic, origin: str, partition: int) -> bool:
    """Returns whether a partition has the row that the commit of a copy creates."""
    where = layout.topic_partition(topic.incarnation, partition)
    row = layout.producer_row(recovery_producer(origin, partition))
    return context.catalog.get(where, row) is not None


def lost_partition(context: Context, topic: Topic, stray: ObjectInfo) -> int | None:
    """Returns a partition that committed a stray and lost the commit; None if there is none.

    Raises ``CorruptError`` for a witness that does not decode.
    """
    if "_" not in stray.key.rpartition("/")[2]:
        return None  # not a copy
    origin, _ = origin_of(stray.key)
    for partition in _partitions(context, topic, origin):
        if not 0 <= partition < topic.partitions or is_claimed(context, topic, origin, partition):
            continue
        if not _is_mentioned(context, topic, origin, partition):  # a sweep deletes the row
            return partition
    return None


def list_witnesses(context: Context, topic: Topic) -> list[ObjectInfo]:
    """Returns all witnesses of a topic. List them before its segments (``is_witness_obsolete``)."""
    return list(context.store.list(layout.witnesses(topic.incarnation)))


def is_witness_obsolete(info: ObjectInfo, origins: Collection[str]) -> bool:
    """Returns whether no copy of its segment is left; False for a name that is not ours."""
    try:
        return layout.witness_origin(info.key) not in origins
    except ValueError:
        return False


def _partitions(context: Context, topic: Topic, origin: str) -> Iterator[int]:
    for info in context.store.list(layout.witness(topic.incarnation, origin, "")):
        with contextlib.suppress(NotFoundError):  # a sweep may have deleted it in the meantime
            yield from _read_witness(context.store, info.key).partitions


def _read_witness(store: Store, key: str) -> Witness:
    return reread(store, key, lambda _: open_json(store.get(key), Witness, f"witness `{key}`"))


def _is_mentioned(context: Context, topic: Topic, origin: str, partition: int) -> bool:
    """Returns whether rows of a partition name or list a copy of a segment."""
    keys: Iterable[str] = (
        key for row in read_unused(context, topic, partition) for key in row.objects
    )
    if any(origin_of(key)[0] == origin for key in keys):
        return True
    where = layout.topic_partition(topic.incarnation, partition)
    for row in context.catalog.scan(where, "run/", "run0"):
        if origin_of(decode_row(row.value, Run, f"row `{row.row}`").object)[0] == origin:
            return True
    return False
