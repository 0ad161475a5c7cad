"""The rows of a topic's partition, its head, its runs and its producers; and what a run is of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tidelog.errors import CorruptError

__all__ = ["Head", "Piece", "ProducerState", "Run", "SentBatch", "decode_row", "encode_row"]

S = TypeVar("S", bound=msgspec.Struct)


class Head(msgspec.Struct, frozen=True):
    """The one row that every commit to a partition expects."""

    next: int = 0  # the offset that the next event gets
    start: int = 0  # the first offset that can be read
    floor: int = 0  # segments of a generation below this are no longer accepted
    amendments: int = 0  # how many updates and deletes wait to be compiled in
    closed: bool = False  # the topic is being deleted


@dataclass(frozen=True, slots=True)
class Piece:
    """One partition's part of a segment."""

    partition: int
    count: int
    byte_start: int
    byte_end: int
    crc: int
    first_ms: int
    last_ms: int
    raw_bytes: int


class Run(msgspec.Struct, frozen=True):
    """Where a contiguous stretch of events is."""

    base: int  # offset of its first event
    count: int
    object: str  # key in the store
    byte_start: int
    byte_end: int
    crc: int  # crc32c of those bytes
    first_ms: int  # least and greatest event time
    last_ms: int
    raw_bytes: int  # before compression
    committed_ms: int

    @property
    def end(self) -> int:
        """The offset after its last event."""
        return self.base + self.count


class SentBatch(msgspec.Struct, frozen=True, array_like=True):
    """Which sequences of a producer got which offsets, in one commit."""

    first: int  # sequence of its first event
    base: int  # offset of that event
    count: int
    steps: tuple[int, ...] = ()  # from each sequence to the next; empty: 1 each

    def sequences(self) -> list[int]:
        """All its sequences, in order."""
        if not self.steps:
            return list(range(self.first, self.first + self.count))
        found = [self.first]
        for step in self.steps:
            found.append(found[-1] + step)
        return found


class ProducerState(msgspec.Struct, frozen=True):
    """What a producer last did in this partition; only it writes this row."""

    epoch: int
    last: int = -1  # its highest sequence here
    recent: tuple[SentBatch, ...] = ()
    seen_ms: int = 0  # so that a sweep can tell an unnamed producer that is long gone

    def offsets(self) -> dict[int, int]:
        """The offsets of all sequences that are recent enough to be known."""
        return {
            sequence: batch.base + index
            for batch in self.recent
            for index, sequence in enumerate(batch.sequences())
        }

    def offset_of(self, sequence: int) -> int | None:
        """The offset that a sequence got, if it is recent enough to be known."""
        for batch in reversed(self.recent):
            if batch.first <= sequence:
                if not batch.steps:
                    index = sequence - batch.first
                    return batch.base + index if index < batch.count else None
                found = batch.sequences()
                return batch.base + found.index(sequence) if sequence in found else None
        return None


def encode_row(value: msgspec.Struct) -> bytes:
    """A row's value, as MessagePack."""
    return msgspec.msgpack.encode(value)


def decode_row(data: bytes, kind: type[S], what: str) -> S:
    """A row's value; fields that a newer version added are ignored."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as exc:
        raise CorruptError(f"{what}: {exc}: keep it, and restore the catalog from a copy") from exc
