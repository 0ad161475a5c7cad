"""What one commit of a segment to a partition writes, and what is true after it.

Step 4 of an append (``append``) as plain values: nothing here reads or writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tidelog.catalog.base import ABSENT, Change, Put
from tidelog.codec.segment import Piece, Segment
from tidelog.log.sent import recent_batches, sent_batch
from tidelog.model import layout, limits
from tidelog.model.producers import recovery_producer
from tidelog.model.run import Head, ProducerState, Run, SentBatch, encode_row
from tidelog.model.slot import slots_of

__all__ = [
    "ALL_SEQUENCES",
    "AppendPlan",
    "Committer",
    "Seen",
    "Stored",
    "Wanted",
    "claim_copy",
    "plan_append",
    "recovery_of",
]

ALL_SEQUENCES = limits.SEGMENT_EVENTS_MAX  # above the place of every event in a segment


@dataclass(frozen=True, slots=True)
class Stored:
    """A segment in the store, not yet part of anything."""

    segment: Segment
    key: str
    generation: int
    staged: str | None = None  # the key it was copied from; its bytes are there, not in memory
    is_copy: bool = False  # there may be other copies, which a recovery may find


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be committed to one partition."""

    stored: Stored
    piece: Piece
    sequences: Sequence[int] | None  # the next ones for None
    mark: bytes = b""  # kept in the producer's row with the last of the sequences


@dataclass(frozen=True, slots=True)
class Seen:
    """The rows of a partition that a commit expects."""

    head: Head
    head_version: str
    state: ProducerState
    state_version: str | None


@dataclass(frozen=True, slots=True)
class Committer:
    """Who commits, when, and under which id."""

    producer: str
    epoch: int
    slot_ms: int  # of the topic
    now_ms: int
    write_id: str


@dataclass(frozen=True, slots=True)
class AppendPlan:
    """One commit: what is expected, and what will be true after it."""

    changes: tuple[Change, ...]
    head_version: str
    head: Head
    state_version: str | None
    state: ProducerState
    batch: SentBatch
    run: Run

    @property
    def write_id(self) -> str:
        """The id of its write, which nothing else carries."""
        return self.batch.write


def plan_append(wanted: Wanted, seen: Seen, by: Committer, also: Sequence[Change]) -> AppendPlan:
    """Returns what one commit writes: the events, and what is ``also`` to become true."""
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


def recovery_of(stored: Stored, partition: int) -> str:
    """The producer by which a recovery appends the events of a segment to a partition."""
    return recovery_producer(layout.segment_origin(stored.key)[0], partition)


def claim_copy(stored: Stored, partition: int, now_ms: int) -> list[Put]:
    """The change by which one copy of a segment excludes all others, and a recovery."""
    if not stored.is_copy:
        return []
    row = layout.producer_row(recovery_of(stored, partition))
    return [Put(row, encode_row(ProducerState(0, ALL_SEQUENCES, (), now_ms)), expect=ABSENT)]
