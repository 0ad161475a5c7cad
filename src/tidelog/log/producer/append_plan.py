"""Plans one commit of a segment to a partition, and staged segments, which are committed later.

**The plan.** This is step 4 of an append (``append``) as plain values: nothing here reads or
writes.

A producer's row records which sequences got which offsets. A sequence alone does not prove that a
retry sends the same event: a process with the same name may send other input. So the row of a named
producer also keeps a mark of its last sequence, and a retry of that sequence with another mark is
refused.

**Staged segments.** Any process puts them into the store, and a driver appends each to a topic,
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
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.catalog.base import ABSENT, Change, Put
from tidelog.codec.event_batch import batch_bytes
from tidelog.codec.segment import Segment
from tidelog.context import Context
from tidelog.errors import NotFoundError
from tidelog.log.maintenance.unused_objects import origin_of, read_unused
from tidelog.model import layout, limits
from tidelog.model.decoding import Persisted, open_json, seal_json
from tidelog.model.limits import SEGMENT_EVENTS_MAX
from tidelog.model.topic import (
    Head,
    Piece,
    ProducerState,
    Run,
    SentBatch,
    Topic,
    decode_row,
    encode_row,
    recovery_producer,
    slots_of,
)
from tidelog.store.base import ObjectInfo, Store, put_fresh
from tidelog.store.wrappers import reread

__all__ = [
    "ALL_SEQUENCES",
    "AppendPlan",
    "Collector",
    "Committer",
    "ExpectedRows",
    "Located",
    "PartitionWrite",
    "StagedSegment",
    "StoredSegment",
    "Witness",
    "claim_copy",
    "event_mark",
    "is_claimed",
    "is_witness_obsolete",
    "list_witnesses",
    "lost_partition",
    "plan_append",
    "put_witness",
    "recent_batches",
    "recovery_of",
    "sent_batch",
    "staged_origin",
]

ALL_SEQUENCES = limits.SEGMENT_EVENTS_MAX  # above the index of every event in a segment


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment in the store that is not part of a topic yet."""

    segment: Segment
    key: str
    generation: int
    staged: str | None = None  # the key it was copied from; its bytes are there, not in memory
    is_copy: bool = False  # other copies may exist, which a recovery may find


@dataclass(frozen=True, slots=True)
class PartitionWrite:
    """What to commit to one partition."""

    stored: StoredSegment
    piece: Piece
    sequences: Sequence[int] | None  # None: the next ones
    mark: bytes = b""  # stored in the producer's row with the last sequence


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The rows of a partition that a commit expects."""

    head: Head
    head_version: str
    state: ProducerState
    state_version: str | None


@dataclass(frozen=True, slots=True)
class Committer:
    """The producer that commits, the time, and the id of the write."""

    producer: str
    epoch: int
    slot_ms: int  # from the topic
    now_ms: int
    write_id: str


@dataclass(frozen=True, slots=True)
class AppendPlan:
    """One commit: what it expects, and what will be true after it."""

    changes: tuple[Change, ...]
    head_version: str
    head: Head
    state_version: str | None
    state: ProducerState
    batch: SentBatch
    run: Run

    @property
    def write_id(self) -> str:
        """Returns the id of its write, which is unique."""
        return self.batch.write


def plan_append(
    wanted: PartitionWrite, seen: ExpectedRows, by: Committer, also: Sequence[Change]
) -> AppendPlan:
    """Returns the plan that commits the events, together with the changes in ``also``."""
    piece, head = wanted.piece, seen.head
    batch = sent_batch(head.next, piece.count, wanted.sequences, seen.state.last + 1, by.write_id)
    run = Run(
        base=head.next,
        count=piece.count,
        object=wanted.stored.key,
        byte_start=piece.byte_start,
        byte_end=piece.byte_end,
        crc=piece.crc,
        first_ms=piece.first_ms,
        last_ms=piece.last_ms,
        raw_bytes=piece.raw_bytes,
        committed_ms=by.now_ms,
        ids_start=piece.byte_end if piece.ids_end else 0,
        ids_end=piece.ids_end,
    )
    new_head = msgspec.structs.replace(
        head, next=run.end, last_base=run.base, last_object=run.object
    )
    new_state = ProducerState(
        by.epoch,
        batch.sequences()[-1],
        recent_batches(seen.state.recent, batch),
        by.now_ms,
        mark=wanted.mark,
    )
    level, starts = slots_of(piece.first_ms, piece.last_ms, by.slot_ms)
    slots = [
        Put(layout.slot_row(level, start, run.base, by.write_id), str(run.end).encode())
        for start in starts
    ]
    changes: list[Change] = [
        Put("head", encode_row(new_head), expect=seen.head_version),
        Put(layout.run_row(run.base), encode_row(run), expect=ABSENT),
        Put(
            layout.producer_row(by.producer),
            encode_row(new_state),
            expect=seen.state_version or ABSENT,
        ),
        *slots,
        *also,
    ]
    return AppendPlan(
        tuple(changes), seen.head_version, new_head, seen.state_version, new_state, batch, run
    )


def recovery_of(stored: StoredSegment, partition: int) -> str:
    """Returns the producer name that a recovery uses for a segment's events in a partition."""
    return recovery_producer(layout.segment_origin(stored.key)[0], partition)


def claim_copy(stored: StoredSegment, partition: int, now_ms: int) -> list[Put]:
    """Returns the change by which one copy of a segment excludes other copies and a recovery."""
    if not stored.is_copy:
        return []
    row = layout.producer_row(recovery_of(stored, partition))
    return [Put(row, encode_row(ProducerState(0, ALL_SEQUENCES, (), now_ms)), expect=ABSENT)]


_MARK_BYTES = 16  # of an event's digest


def event_mark(value: bytes | None, key: bytes | None, id: str | None, type: str | None) -> bytes:
    """Returns the default mark of an event: a digest of what identifies it.

    Times and headers are left out, since a process that retries an event may give it new ones.
    """
    parts = msgspec.msgpack.encode((value, key, id, type))
    return hashlib.sha256(parts).digest()[:_MARK_BYTES]


def sent_batch(
    base: int, count: int, given: Sequence[int] | None, following: int, write_id: str
) -> SentBatch:
    """Returns what a commit records: the given or the following sequences, and its id."""
    if given is None or isinstance(given, range):
        first = following if given is None else given.start
        return SentBatch(first, base, count, (), write_id)
    steps = tuple(after - before for before, after in pairwise(given))
    if all(step == 1 for step in steps):
        steps = ()
    return SentBatch(given[0], base, count, steps, write_id)


def recent_batches(batches: tuple[SentBatch, ...], new: SentBatch) -> tuple[SentBatch, ...]:
    """Returns the newest batches, as many as fit into a producer's row."""
    kept = list(reversed(_small(new)))
    room = limits.PRODUCER_ROW_BYTES - _row_bytes(kept)
    for batch in reversed(batches):
        room -= _row_bytes([batch])
        if len(kept) >= limits.PRODUCER_RECENT or room < 0:
            break
        kept.append(batch)
    return tuple(reversed(kept))


def _small(batch: SentBatch) -> list[SentBatch]:
    """Returns the batch; for one too large for a row, only its first and last sequence."""
    if _row_bytes([batch]) <= limits.PRODUCER_ROW_BYTES:
        return [batch]
    last = batch.first + sum(batch.steps)
    ends = [(batch.first, batch.base), (last, batch.base + batch.count - 1)]
    return [SentBatch(sequence, offset, 1, (), batch.write) for sequence, offset in ends]


def _row_bytes(batches: list[SentBatch]) -> int:
    return len(msgspec.msgpack.encode(batches))


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
