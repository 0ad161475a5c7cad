"""Which sequences of a producer got which offsets, and the mark of the last, as its row keeps them.

A sequence alone does not prove that a repeat brings the same event: under one name a process may
send another input. So the row of a named producer also keeps a mark of its last sequence, and a
repeat of that sequence with another mark is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from tidelog.model import limits
from tidelog.model.run import SentBatch

__all__ = ["event_mark", "recent_batches", "sent_batch"]

_MARK_BYTES = 16  # of the digest of an event


def event_mark(value: bytes | None, key: bytes | None, id: str | None, type: str | None) -> bytes:
    """The mark of an event whose sender gives none: a digest of what identifies it.

    Times and headers are left out: a process that repeats an event may give it new ones.
    """
    parts = msgspec.msgpack.encode((value, key, id, type))
    return hashlib.sha256(parts).digest()[:_MARK_BYTES]


def sent_batch(
    base: int, count: int, given: Sequence[int] | None, following: int, write_id: str
) -> SentBatch:
    """What a commit notes: the sequences that were given, or those that follow, and its id."""
    if given is None or isinstance(given, range):
        first = following if given is None else given.start
        return SentBatch(first, base, count, (), write_id)
    steps = tuple(after - before for before, after in pairwise(given))
    if all(step == 1 for step in steps):
        steps = ()
    return SentBatch(given[0], base, count, steps, write_id)


def recent_batches(batches: tuple[SentBatch, ...], new: SentBatch) -> tuple[SentBatch, ...]:
    """The newest batches, as many as a producer's row can hold."""
    kept = list(reversed(_small(new)))
    room = limits.PRODUCER_ROW_BYTES - _row_bytes(kept)
    for batch in reversed(batches):
        room -= _row_bytes([batch])
        if len(kept) >= limits.PRODUCER_RECENT or room < 0:
            break
        kept.append(batch)
    return tuple(reversed(kept))


def _small(batch: SentBatch) -> list[SentBatch]:
    """The batch; of one too large for a row only its first and its last sequence."""
    if _row_bytes([batch]) <= limits.PRODUCER_ROW_BYTES:
        return [batch]
    last = batch.first + sum(batch.steps)
    ends = [(batch.first, batch.base), (last, batch.base + batch.count - 1)]
    return [SentBatch(sequence, offset, 1, (), batch.write) for sequence, offset in ends]


def _row_bytes(batches: list[SentBatch]) -> int:
    return len(msgspec.msgpack.encode(batches))
