"""Staged segments: put into the store by any process, made part of a topic by a driver, once.

Events are collected until they are worth a segment. Nothing of a staged segment belongs to a topic
before a driver copies it to where segments are, in the topic's present generation, and commits its
pieces under sequences that follow from what was staged. A piece whose sequences the producer's row
of its partition shows is in the topic already; so the same segments may be appended again after a
crash anywhere, or by two drivers at once, and nobody has to be fenced.

Objects that say which staged segments were committed, so that their loss proves itself.

A segment of a plain append carries what its appender knew of the partitions (``Known``). A staged
one is made before a driver knows where its events will stand, by a process that has no catalog, and
is copied as it is. So the driver puts a **witness** after the commits of a staged segment, and
before anything of them is acknowledged: which partitions have committed it, or a copy of it.

A witness is in the store, which a restored catalog does not take back. A stray that a witness says
a partition has committed, and that this partition neither names nor lists, proves that the catalog
went back, also where it is the only commit that was lost. One commit of a copy creates the row of
the producer by which a recovery would append it (``append``): where that row is there, the catalog
knows the commit, however late the witness was read.

A witness counts only for a stray, and is deleted by a sweep when no copy of its segment is left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.codec.event_batch import batch_bytes
from tidelog.context import Context
from tidelog.errors import NotFoundError
from tidelog.log.maintenance.unused import origin_of, read_unused
from tidelog.model import layout
from tidelog.model.decoding import Persisted, open_json, seal_json
from tidelog.model.limits import SEGMENT_EVENTS_MAX
from tidelog.model.partition_rows import Piece, Run, decode_row
from tidelog.model.producer_names import recovery_producer
from tidelog.model.topic import Topic
from tidelog.store.base import ObjectInfo
from tidelog.store.create import put_fresh

__all__ = [
    "Collector",
    "Located",
    "StagedSegment",
    "Witness",
    "is_claimed",
    "is_over",
    "list_witnesses",
    "lost_partition",
    "put_witness",
    "staged_origin",
]

# Larger than a producer's: nobody waits for its linger, and fewer segments are fewer commits.
_SEGMENT_BYTES = 32 << 20

Located = tuple[pa.Table, npt.NDArray[np.int32] | None]  # events, and partitions if they are given


class StagedSegment(Persisted, frozen=True):
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


class Witness(Persisted, frozen=True):
    """What an object of this kind says."""

    partitions: tuple[int, ...]  # that have committed a copy of the segment
    format: int = layout.FORMAT


def put_witness(context: Context, topic: Topic, origin: str, partitions: Sequence[int]) -> None:
    """Say that partitions have committed a segment. ``UnavailableError`` if that fails."""
    key = layout.witness(topic.incarnation, origin, context.ids.new())
    put_fresh(context.store, key, seal_json(Witness(tuple(partitions))))


def is_claimed(context: Context, topic: Topic, origin: str, partition: int) -> bool:
    """Whether a partition has the row that a commit of a copy creates."""
    where = layout.topic_partition(topic.incarnation, partition)
    row = layout.producer_row(recovery_producer(origin, partition))
    return context.catalog.get(where, row) is not None


def lost_partition(context: Context, topic: Topic, stray: ObjectInfo) -> int | None:
    """A partition that has committed a stray, and has forgotten it; None for none.

    ``CorruptError`` for a witness that does not decode.
    """
    if "_" not in stray.key.rpartition("/")[2]:
        return None  # not a copy
    origin, _ = origin_of(stray.key)
    for partition in _partitions(context, topic, origin):
        if not 0 <= partition < topic.partitions or is_claimed(context, topic, origin, partition):
            continue
        if not _is_mentioned(context, topic, origin, partition):  # that row goes after some weeks
            return partition
    return None


def list_witnesses(context: Context, topic: Topic) -> list[ObjectInfo]:
    """All witnesses of a topic: to be listed before its segments are, see :func:`is_over`."""
    return list(context.store.list(layout.witnesses(topic.incarnation)))


def is_over(info: ObjectInfo, origins: Collection[str]) -> bool:
    """Whether no object of its segment is left; a name that is not ours never is."""
    try:
        return layout.witness_origin(info.key) not in origins
    except ValueError:
        return False


def _partitions(context: Context, topic: Topic, origin: str) -> Iterator[int]:
    for info in context.store.list(layout.witness(topic.incarnation, origin, "")):
        try:
            data = context.store.get(info.key)
        except NotFoundError:
            continue  # a sweep has deleted it meanwhile
        yield from open_json(data, Witness, f"witness `{info.key}`").partitions


def _is_mentioned(context: Context, topic: Topic, origin: str, partition: int) -> bool:
    """Whether rows of a partition name or list a copy of a segment."""
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
