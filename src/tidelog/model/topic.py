"""A topic as the registry stores it, and the rows of its partitions.

A partition has a head, runs and journals, amendments and producers. Runs are found by the slots of
time that they are in.

**Names of producers.** A producer's row decides which events count as stored, so two writers that
share a name by accident lose events. So each kind of writer has its own prefix, which no other name
begins with:

- ``~<id>``: without a name; a sweep deletes the row when it is old
- ``~once-<hash>``: a request with an idempotency key, or a recovery of one object's events
- ``:pipeline:<pipeline>:<source partition>``, ``:playback:<name>``, ``:sink:<name>``: kept for good
- anything else: a name that a user gave
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal, TypeVar

import msgspec

from tidelog.errors import CorruptError, InternalError, InvalidError
from tidelog.model import defaults, layout, limits
from tidelog.model.decoding import Persisted, decode_msgpack, pack_stored, remedy
from tidelog.model.event import check_utf8, check_whole
from tidelog.model.limits import TIMESTAMP_MS_END
from tidelog.model.times import duration_ms

__all__ = [
    "UNNAMED",
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
    "Topic",
    "UnusedObjects",
    "check_producer_name",
    "check_topic_name",
    "decode_fields",
    "decode_row",
    "encode_row",
    "journal_slots",
    "level_count",
    "once_producer",
    "partition_for",
    "pipeline_of",
    "pipeline_producer",
    "playback_producer",
    "recovery_id",
    "recovery_producer",
    "sink_producer",
    "slots_of",
    "unnamed_producer",
    "writer_name",
    "writer_words",
]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class Topic(Persisted, frozen=True):
    """A named log of events in partitions, in one incarnation."""

    name: str
    incarnation: str
    partitions: int
    created_ms: int
    slot_ms: int = duration_ms(defaults.TOPIC_SLOT)  # resolution of the time index
    generation: int = 0  # the segment generation: of new segments; raised by sweeps
    state: Literal["creating", "ready", "deleting"] = "creating"
    notify: tuple[str, ...] = ()  # where notifications go
    max_latency_ms: int = defaults.NOTIFY_LATENCY_MS  # between two notifications of a partition
    home: str = ""  # that created it, and alone sends its notifications; empty: unknown

    def check_partition(self, partition: int) -> None:
        """Raises ``InvalidError`` for a partition that does not exist."""
        if not 0 <= check_whole(f"topic `{self.name}`: partition", partition) < self.partitions:
            raise InvalidError(
                f"topic `{self.name}`: has no partition {partition}: {self.partitions_hint()}"
            )

    def partitions_hint(self) -> str:
        """Returns what an error says about the partitions that exist."""
        return "it has only 0" if self.partitions == 1 else f"give 0 to {self.partitions - 1}"


def check_topic_name(name: str) -> None:
    """Raises ``InvalidError`` for a name that is unsafe in a path, a URL or a shell."""
    if not isinstance(name, str):
        raise InvalidError(f"topic name: is {type(name).__name__}: give text")
    if not _NAME.fullmatch(name) or len(name) > limits.TOPIC_NAME_MAX:
        raise InvalidError(
            f"topic name `{name[:80]}`: give 1 to {limits.TOPIC_NAME_MAX} letters, digits, "
            "`.`, `_` or `-`, beginning with a letter, a digit or `_`"
        )


def partition_for(key: bytes, partitions: int) -> int:
    """Returns ``int(sha256(key)) mod partitions``, which never changes."""
    return int.from_bytes(hashlib.sha256(key).digest(), "big") % partitions


S = TypeVar("S", bound=Persisted)
P = TypeVar("P", bound=msgspec.Struct)


class Head(Persisted, frozen=True):
    """The row that every commit to a partition expects."""

    next: int = 0  # the offset of the next event
    start: int = 0  # the first readable offset
    floor: int = 0  # a lower segment generation is refused
    closed: bool = False  # the topic is being deleted
    journaled: int = 0  # journals hold lower offsets, runs the others
    compiled: int = 0  # counts the swaps of journals
    amendments: int = 0  # the sequence of the newest amendment
    amended: tuple[int, int] | None = None  # covers all offsets with an amendment row
    copied: bool = False  # pumps, restores or playbacks may copy events into it
    erasures: int = 0  # how often the ledger has grown, for such copies
    last_base: int = -1  # of the newest committed run; -1: none
    last_object: str = ""  # that holds or held it


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
    ids_end: int = 0  # its id index is from ``byte_end`` to here; 0: none


class AppenderView(Persisted, frozen=True, array_like=True):
    """What an appender knew about a partition when it uploaded a segment, which carries it."""

    partition: int = 0
    count: int = 0  # events of the segment for it
    next: int = 0  # the head's, or an earlier one; 0 also if unknown
    base: int = -1  # of the last run before that ``next``; -1: none
    object: str = ""  # that held this run
    writer: str = ""  # the appender's producer name; empty if its row is not kept for good


class JournalOrigin(Persisted, frozen=True, array_like=True):
    """The segment that a range of a journal's offsets came from; the journal carries it.

    Events of the range that the journal lacks were deleted.
    """

    base: int  # the first offset of the range
    count: int
    origin: str  # the id that all copies of the segment share
    place: int  # of the first event, among those of the segment for the partition

    def between(self, start: int, end: int) -> JournalOrigin | None:
        """Returns the part in ``[start, end)``; None if empty."""
        first, last = max(self.base, start), min(self.base + self.count, end)
        if first >= last:
            return None
        return JournalOrigin(first, last - first, self.origin, self.place + first - self.base)


class UnusedObjects(Persisted, frozen=True):
    """Objects that a partition no longer needs, since a write removed their last mention."""

    objects: tuple[str, ...]


class Strays(Persisted, frozen=True):
    """Objects that a sweep has found to be strays: the week counts from here."""

    at_ms: int  # the latest of all times known then
    objects: tuple[str, ...]
    kept_ms: int = 0  # how much of the week sweeps have seen pass, if the store has no clock
    seen_ms: int = 0  # when the last of these sweeps was; 0: at ``at_ms``


class LossAccepted(Persisted, frozen=True):
    """A person has accepted that objects which no row names may contain lost events."""

    at_ms: int
    until_ms: int  # for objects that the store dates up to here


class Journal(Persisted, frozen=True, array_like=True):
    """The extra fields of a journal, which is a Parquet object with explicit offsets."""

    footer: int  # where the footer begins; it ends with the object
    footer_crc: int  # crc32c of the footer; pages have their own checksums
    events: int  # fewer than offsets if some were erased
    applied: int  # it contains amendments up to this sequence
    start: int = 0  # built without lower offsets, which were trimmed


class Run(Persisted, frozen=True):
    """Where a contiguous range of offsets is stored: in a segment, or in a journal."""

    base: int  # its first offset
    count: int  # of offsets; in a segment each has an event
    object: str  # key in the store
    byte_start: int
    byte_end: int
    crc: int  # crc32c of those bytes
    first_ms: int  # earliest and latest event time
    last_ms: int
    raw_bytes: int  # before compression
    committed_ms: int
    ids_start: int = 0  # its id index in the object; none if both are 0
    ids_end: int = 0
    journal: Journal | None = None  # None: a piece of a segment

    @property
    def end(self) -> int:
        """Returns the offset after its last."""
        return self.base + self.count

    def trimmed(self, start: int) -> range:
        """Returns the offsets below a start whose events its object still contains."""
        without = self.base if self.journal is None else max(self.base, self.journal.start)
        return range(without, max(without, min(start, self.end)))

    @property
    def events(self) -> int:
        """Returns how many events it contains."""
        return self.count if self.journal is None else self.journal.events


class Amendment(Persisted, frozen=True):
    """What happened to the event at an offset: a new value, or a delete."""

    sequence: int  # in its partition; the highest counts
    kind: Literal["update", "delete"]
    at_ms: int
    value: bytes | None = None  # of an update, if small; None is a value too
    object: str | None = None  # of an update with a value in the store
    audit: str = ""  # the record with author and reason
    crc: int = 0  # crc32c of a value in the store


class LedgerEntry(Persisted, frozen=True):
    """A row of the ledger: what was erased under an id or a key, which it stores as a hash."""

    at_ms: int  # when it was entered
    until_ms: int  # events up to this time; a later one is a new event


class HeldRow(Persisted, frozen=True):
    """A row that one process holds at a time: a partition's compiler, or the scribe."""

    owner: str  # empty: none
    epoch: int  # grows with each owner
    beat: int = 0
    mark: str = ""  # of the owner's process
    beat_ms: int = 0  # when it was written, for people; takeovers ignore it


class SentBatch(Persisted, frozen=True, array_like=True):
    """Which sequences of a producer got which offsets, in one commit."""

    first: int  # sequence of its first event
    base: int  # offset of that event
    count: int
    steps: tuple[int, ...] = ()  # from each sequence to the next; empty: 1 each
    write: str = ""  # the id of the write that stored it, which proves ownership

    def sequences(self) -> list[int]:
        """Returns all its sequences, in order."""
        if not self.steps:
            return list(range(self.first, self.first + self.count))
        found = [self.first]
        for step in self.steps:
            found.append(found[-1] + step)
        return found


class ProducerState(Persisted, frozen=True):
    """What a producer last did in this partition; only processes with its name write this row."""

    epoch: int
    last: int = -1  # its highest sequence here
    recent: tuple[SentBatch, ...] = ()
    seen_ms: int = 0  # by the producer's clock; a sweep checks only old ones
    silent_ms: int = 0  # when a sweep first found an unnamed one silent; a commit resets it
    mark: bytes = b""  # given by a named one with ``last``, so that other input is recognized

    def offsets(self) -> dict[int, int]:
        """Returns the offsets of all sequences that are recent enough."""
        return {
            sequence: batch.base + index
            for batch in self.recent
            for index, sequence in enumerate(batch.sequences())
        }

    def has_write(self, write_id: str) -> bool:
        """Returns whether this write stored one of its recent batches."""
        return any(batch.write == write_id for batch in self.recent)

    def offset_of(self, sequence: int) -> int | None:
        """Returns the offset of a sequence, if it is recent enough."""
        for batch in reversed(self.recent):
            if batch.first <= sequence:
                if not batch.steps:
                    index = sequence - batch.first
                    return batch.base + index if index < batch.count else None
                found = batch.sequences()
                return batch.base + found.index(sequence) if sequence in found else None
        return None


def encode_row(value: Persisted) -> bytes:
    """Returns a row's value, as MessagePack. Raises ``InvalidError`` for a wrong type."""
    return pack_stored(value)


def decode_row(data: bytes, kind: type[S], what: str) -> S:
    """Decodes a row's value. Raises ``CorruptError``, also for unknown fields."""
    return decode_fields(data, kind, what)


def decode_fields(data: bytes, kind: type[P], what: str) -> P:
    """Decodes some fields of a row, for code that never writes the row."""
    try:
        return decode_msgpack(data, kind)
    except msgspec.MsgspecError as exc:
        advice = remedy(exc, "keep it, and restore the catalog from a copy")
        raise CorruptError(f"{what}: {exc}: {advice}") from exc


UNNAMED = "~"
_OWN = ":"


def check_producer_name(name: str) -> None:
    """Raises ``InvalidError`` for a user's name that is invalid or reserved for Tidelog."""
    check_utf8("producer name", name)
    if not 1 <= len(name) <= limits.PRODUCER_NAME_MAX or name.startswith((UNNAMED, _OWN)):
        raise InvalidError(
            f"producer name `{name[:80]}`: give 1 to {limits.PRODUCER_NAME_MAX} characters, "
            f"the first not `{UNNAMED}` or `{_OWN}`"
        )


def unnamed_producer(fresh_id: str) -> str:
    """Returns the name of a producer without a user's name."""
    return f"{UNNAMED}{fresh_id}"


def once_producer(digest: str) -> str:
    """Returns the name for a request with an idempotency key that has this hash."""
    return f"{UNNAMED}once-{digest}"


def recovery_id(origin: str, partition: int) -> str:
    """Returns the id of segments with an object's events for a partition, in a recovery."""
    return hashlib.sha256(f"{origin}/{partition}".encode()).hexdigest()[:32]


def recovery_producer(origin: str, partition: int) -> str:
    """Returns the name for a recovery of these events; the commit of a copy creates its row too."""
    return once_producer(recovery_id(origin, partition))


def pipeline_producer(pipeline: str, source_partition: str) -> str:
    """Returns the name for a pipeline's source partition.

    A pipeline that runs once has a name that begins with ``~``. A pipeline's name contains no
    ``:``, so the two parts are unambiguous.
    """
    name = f"{pipeline}:{source_partition}"
    return name if pipeline.startswith(UNNAMED) else f"{_OWN}pipeline:{name}"


def playback_producer(name: str) -> str:
    """Returns the name for one generation of a named playback."""
    return f"{_OWN}playback:{name}"


def sink_producer(name: str) -> str:
    """Returns the name for a named sink of a Spark writer."""
    return f"{_OWN}sink:{name}"


def writer_name(producer: str) -> str:
    """Returns the producer name in a segment: that of a writer that resumes, otherwise empty."""
    return "" if producer.startswith(UNNAMED) else producer


def pipeline_of(writer: str) -> str | None:
    """Returns the pipeline of a writer; None for another kind of writer."""
    own = f"{_OWN}pipeline:"
    return writer.removeprefix(own).partition(":")[0] if writer.startswith(own) else None


def writer_words(writer: str) -> str:
    """Returns a named writer in words: its kind, and the name that a user knows."""
    if not writer.startswith(_OWN):
        return f"producer `{writer}`"
    kind, _, name = writer.removeprefix(_OWN).partition(":")
    return f"Spark sink `{name}`" if kind == "sink" else f"{kind} `{name}`"


def slots_of(first_ms: int, last_ms: int, resolution_ms: int) -> tuple[int, list[int]]:
    """Returns the level of a range of times (inclusive), and the starts of its one or two slots."""
    if not 0 <= first_ms <= last_ms:
        raise InternalError(f"slots of a range that runs backwards: {first_ms} to {last_ms}")
    level, width = 0, resolution_ms
    while last_ms // width - first_ms // width > 1:
        level, width = level + 1, width * 2
    starts = range(first_ms // width, last_ms // width + 1)
    return level, [index * width for index in starts]


def journal_slots(run: Run, resolution_ms: int) -> dict[str, bytes]:
    """Returns the slot rows of a journal, and their value; none for one without events.

    Their names contain the id of its object, so that they are known without a read.
    """
    if not run.events:
        return {}
    journal_id = run.object.rpartition("_")[2].removesuffix(".parquet")
    level, starts = slots_of(run.first_ms, run.last_ms, resolution_ms)
    rows = (layout.slot_row(level, start, run.base, journal_id) for start in starts)
    return dict.fromkeys(rows, f"{run.end}j".encode())


def level_count(resolution_ms: int) -> int:
    """Returns how many levels there are: the last one holds all time in one slot."""
    level = 0
    while resolution_ms << level < TIMESTAMP_MS_END:
        level += 1
    return level + 1
