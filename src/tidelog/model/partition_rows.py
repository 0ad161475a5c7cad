"""The rows of a topic's partition: its head, its runs and journals, amendments and producers."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from tidelog.errors import CorruptError
from tidelog.model.decoding import Persisted, decode_msgpack, remedy

__all__ = [
    "Amendment",
    "AppenderView",
    "Head",
    "HeldRow",
    "Journal",
    "JournalOrigin",
    "LedgerEntry",
    "LossAccepted",
    "Piece",
    "ProducerState",
    "Run",
    "SentBatch",
    "Strays",
    "UnusedObjects",
    "decode_fields",
    "decode_row",
    "encode_row",
]

S = TypeVar("S", bound=Persisted)
P = TypeVar("P", bound=msgspec.Struct)


class Head(Persisted, frozen=True):
    """The one row that every commit to a partition expects."""

    next: int = 0  # the offset that the next event gets
    start: int = 0  # the first offset that can be read
    floor: int = 0  # segments of a generation below this are no longer accepted
    closed: bool = False  # the topic is being deleted
    journaled: int = 0  # journals hold what is below this offset, runs what follows
    compiled: int = 0  # how often journals took the place of others; grows with each swap
    amendments: int = 0  # the sequence of the newest amendment
    amended: tuple[int, int] | None = None  # first and last offset with an amendment row, or more
    copied: bool = False  # pumps, restores or playbacks may copy events into it
    erasures: int = 0  # how often such copies were told that the ledger has grown
    last_base: int = -1  # of the newest run that was committed; -1 for none
    last_object: str = ""  # that holds it, or held it


class Piece(Persisted, frozen=True):
    """One partition's part of a segment."""

    partition: int
    count: int
    byte_start: int
    byte_end: int
    crc: int
    first_ms: int
    last_ms: int
    raw_bytes: int
    ids_end: int = 0  # its id index stands from ``byte_end`` to here; 0: it has none


class AppenderView(Persisted, frozen=True, array_like=True):
    """What an appender knew of a partition when it uploaded a segment; a segment carries it."""

    partition: int = 0
    count: int = 0  # events that the segment has for it
    next: int = 0  # the head's, or an earlier one; 0 also where nothing was known
    base: int = -1  # of the last run before that ``next``; -1 for none
    object: str = ""  # that held this run
    writer: str = ""  # the appender's producer name; none where its row is not kept for good


class JournalOrigin(Persisted, frozen=True, array_like=True):
    """From which segment a stretch of a journal's offsets came; the journal carries it.

    What the journal does not hold of the stretch was deleted.
    """

    base: int  # the first offset of the stretch
    count: int
    origin: str  # the id that all copies of the segment share
    place: int  # of the first event among those that the segment has for the partition

    def between(self, start: int, end: int) -> JournalOrigin | None:
        """The part that is in ``[start, end)``; None for nothing."""
        first, last = max(self.base, start), min(self.base + self.count, end)
        if first >= last:
            return None
        return JournalOrigin(first, last - first, self.origin, self.place + first - self.base)


class UnusedObjects(Persisted, frozen=True):
    """Objects that a partition no longer needs, since one write removed their last mention."""

    objects: tuple[str, ...]


class Strays(Persisted, frozen=True):
    """Objects that a sweep has found to be strays: from then on a week counts."""

    at_ms: int  # when, by the latest of all times that were known
    objects: tuple[str, ...]
    kept_ms: int = 0  # how much of the week sweeps have seen pass, where the store has no clock
    seen_ms: int = 0  # when the last of these sweeps was; 0: at ``at_ms``


class LossAccepted(Persisted, frozen=True):
    """A person has accepted that objects which no row names may hold lost events."""

    at_ms: int
    until_ms: int  # it holds for objects that the store dates up to here


class Journal(Persisted, frozen=True, array_like=True):
    """What a compiled run has beside: it is a whole Parquet object, with explicit offsets."""

    footer: int  # where the footer begins; it ends with the object
    footer_crc: int  # crc32c of those bytes; the pages have checksums of their own
    events: int  # that it holds: fewer than offsets where some were erased
    applied: int  # amendments up to this sequence are in it
    start: int = 0  # it was made without the events below this offset, which were trimmed


class Run(Persisted, frozen=True):
    """Where a contiguous stretch of offsets is: in a segment, or in a journal of its own."""

    base: int  # its first offset
    count: int  # of offsets; in a segment each has its event
    object: str  # key in the store
    byte_start: int
    byte_end: int
    crc: int  # crc32c of those bytes
    first_ms: int  # least and greatest event time
    last_ms: int
    raw_bytes: int  # before compression
    committed_ms: int
    ids_start: int = 0  # bytes of the object that hold its id index; none where both are 0
    ids_end: int = 0
    journal: Journal | None = None  # None: a piece of a segment

    @property
    def end(self) -> int:
        """The offset after its last."""
        return self.base + self.count

    def trimmed(self, start: int) -> range:
        """The offsets below a start whose events are still in its object."""
        without = self.base if self.journal is None else max(self.base, self.journal.start)
        return range(without, max(without, min(start, self.end)))

    @property
    def events(self) -> int:
        """How many events it holds."""
        return self.count if self.journal is None else self.journal.events


class Amendment(Persisted, frozen=True):
    """What became of the event at an offset: another value, or nothing."""

    sequence: int  # in its partition; the higher one counts
    kind: Literal["update", "delete"]
    at_ms: int
    value: bytes | None = None  # of an update, where it is small; None is a value too
    object: str | None = None  # of an update whose value stands in the store
    audit: str = ""  # the record that says who and why


class LedgerEntry(Persisted, frozen=True):
    """A row of the ledger: what was erased under an id or a key, of which it keeps the hash."""

    at_ms: int  # when it was entered
    until_ms: int  # events up to this time; a later one is a new event


class HeldRow(Persisted, frozen=True):
    """A row that one process holds at a time: a partition's compiler, a shard, the scribe."""

    owner: str  # empty: nobody
    epoch: int  # grows with each owner
    beat: int = 0
    mark: str = ""  # of the owner's process
    beat_ms: int = 0  # when it was written, for people; no takeover rests on it


class SentBatch(Persisted, frozen=True, array_like=True):
    """Which sequences of a producer got which offsets, in one commit."""

    first: int  # sequence of its first event
    base: int  # offset of that event
    count: int
    steps: tuple[int, ...] = ()  # from each sequence to the next; empty: 1 each
    write: str = ""  # the id of the write that stored it, which proves whose it is

    def sequences(self) -> list[int]:
        """All its sequences, in order."""
        if not self.steps:
            return list(range(self.first, self.first + self.count))
        found = [self.first]
        for step in self.steps:
            found.append(found[-1] + step)
        return found


class ProducerState(Persisted, frozen=True):
    """What a producer last did in this partition; only processes under its name write this row."""

    epoch: int
    last: int = -1  # its highest sequence here
    recent: tuple[SentBatch, ...] = ()
    seen_ms: int = 0  # by the producer's clock, so that a sweep looks closer at old ones only
    silent_ms: int = 0  # when a sweep first found an unnamed one silent; a commit resets it
    mark: bytes = b""  # what a named one gave with ``last``, so that another input is recognized

    def offsets(self) -> dict[int, int]:
        """The offsets of all sequences that are recent enough to be known."""
        return {
            sequence: batch.base + index
            for batch in self.recent
            for index, sequence in enumerate(batch.sequences())
        }

    def has_write(self, write_id: str) -> bool:
        """Whether one of its recent batches was stored by this write."""
        return any(batch.write == write_id for batch in self.recent)

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


def encode_row(value: Persisted) -> bytes:
    """A row's value, as MessagePack."""
    return msgspec.msgpack.encode(value)


def decode_row(data: bytes, kind: type[S], what: str) -> S:
    """A row's value. ``CorruptError``, also for fields that this version does not know."""
    return decode_fields(data, kind, what)


def decode_fields(data: bytes, kind: type[P], what: str) -> P:
    """Some fields of a row, for code that reads them and never writes the row."""
    try:
        return decode_msgpack(data, kind)
    except msgspec.MsgspecError as exc:
        advice = remedy(exc, "keep it, and restore the catalog from a copy")
        raise CorruptError(f"{what}: {exc}: {advice}") from exc
