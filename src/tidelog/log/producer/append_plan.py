"""Plans one commit of a segment to a partition.

This is step 4 of an append (``append``) as plain values: nothing here reads or
writes.

A producer's row records which sequences got which offsets. A sequence alone does not prove that a
retry sends the same event: a process with the same name may send other input. So the row of a named
producer also keeps a mark of its last sequence, and a retry of that sequence with another mark is
refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from tidelog.catalog.base import ABSENT, Change, Put
from tidelog.codec.segment import Segment
from tidelog.model import layout, limits
from tidelog.model.topic import (
    Head,
    Piece,
    ProducerState,
    Run,
    SentBatch,
    encode_row,
    recovery_producer,
    slots_of,
)

__all__ = [
    "ALL_SEQUENCES",
    "AppendPlan",
    "Committer",
    "ExpectedRows",
    "PartitionWrite",
    "StoredSegment",
    "claim_copy",
    "event_mark",
    "plan_append",
    "recent_batches",
    "recovery_of",
    "sent_batch",
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
