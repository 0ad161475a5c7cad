"""A pipeline's rows and manifest: how far it has come, what it will do, what it did."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from tidelog.errors import InvalidError
from tidelog.model import limits
from tidelog.model.decoding import Persisted, open_json
from tidelog.model.partition_rows import Piece

__all__ = [
    "Aside",
    "Begin",
    "BeginReason",
    "Commit",
    "DriverFailure",
    "ErasedEvents",
    "FileEntry",
    "Gap",
    "GapReason",
    "Intent",
    "ListedPartition",
    "Manifest",
    "MergedRange",
    "NamedPipeline",
    "PreviousAccount",
    "Progress",
    "SeenEnd",
    "Totals",
    "check_pipeline_name",
    "joined_gaps",
    "offsets_between",
    "read_manifest",
]


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class NamedPipeline(Persisted, frozen=True):
    """A pipeline that the registry knows by a name of its own; an archive's are the archive's."""

    name: str
    incarnation: str  # names its rows, manifests and staged files
    source: str  # URL
    sink: str  # URL
    target: str  # incarnation of what the sink writes to
    created_ms: int
    fields: dict[str, str] = msgspec.field(default_factory=dict)  # of JSON, that make an event's
    transform: str = ""  # module:function, from DataFrame to DataFrame
    state: Literal["ready", "deleting"] = "ready"
    home: str = ""  # id of the home that runs it, where its sink is outside; empty: a topic of ours


BeginReason = Literal["earliest", "latest", "retention", "explicit"]
"""Why an archive begins where it does in a source partition.

``earliest``: at the first event that there ever was. ``retention``: at the first one that the
source still held. ``latest``: at the end that was seen when the archive was created. ``explicit``:
where the source's address says.
"""

GapReason = Literal["retention", "remade", "parent", "vanished", "upstream", "transform"]
"""Why a source partition's events are missing from an archive.

``retention``: the source had deleted them before they were read, and a person accepted that.
``remade``: their topic was deleted and created again, and a person accepted that.
``parent``: a shard that was split or merged vanished before it was read to its end.
``vanished``: their file, or topic of a pattern, was removed before it was read to its end, and a
person accepted that.
``upstream``: the archive that is the source has a gap there. ``transform``: they were taken from
files of a generation or archive whose transform had dropped them.
"""


class Begin(Persisted, frozen=True):
    """Where the archive of a source partition begins, and why."""

    position: str
    reason: BeginReason
    at_ms: int = 0  # when that was decided


class Gap(Persisted, frozen=True):
    """Offsets of the source that were skipped by a decision, which is recorded.

    All offsets between the positions, except for the reason ``transform``: those are some of them.
    """

    start: str
    end: str
    reason: GapReason
    offsets: int = 0  # how many they are; 0 where positions are not offsets and cannot be counted

    @property
    def is_partial(self) -> bool:
        """Whether it is only some of the offsets between its positions; others hold events."""
        whole = offsets_between(self.start, self.end)
        return self.reason == "transform" or (whole is not None and 0 < self.offsets < whole)


class ListedPartition(Persisted, frozen=True):
    """A source partition in a pipeline's list, which it is in before it has a head."""

    partition: str
    end: str = ""  # that was seen when the pipeline was created; empty: it appeared later
    incarnation: str = ""  # of what had that end
    seen_ms: int = 0
    note: bytes = b""  # of what is before that end, where the source tracks what was read


class SeenEnd(Persisted, frozen=True):
    """The end that a driver saw of a source partition whose file may vanish before it is read."""

    partition: str
    end: str


class ErasedEvents(Persisted, frozen=True):
    """How many events erasures took out of the files of a source partition."""

    data: int = 0
    dead: int = 0


class PreviousAccount(Persisted, frozen=True):
    """What the generation before a promoted one accounted for, in one source partition."""

    generation: int
    begin: str
    end: str
    span: int  # offsets between them, or events that it numbered
    archived: int
    dead: int
    dropped: int
    erased: int
    absent: int
    gaps: tuple[Gap, ...]
    at_ms: int  # when the other one was promoted
    reason: str = ""  # of a forced promote: why it may lack something


class Totals(Persisted, frozen=True):
    """What a source partition's commits come to, so that nobody has to read them all."""

    commits: int = 0
    files: int = 0
    bytes: int = 0
    dead: int = 0
    lost: int = 0  # gaps
    left_out: int = 0  # events that were erased from the target before they came there
    dropped: int = 0  # events that the transform dropped
    deleted: int = 0  # offsets whose events were deleted from the source before they were read
    absent: int = 0  # offsets that never held an event for readers
    skipped: int = 0  # offsets in gaps
    filled: int = 0  # events that were read from another generation's files
    committed_ms: int = 0  # when the last commit was made
    dead_ms: int = 0  # when the last one with dead letters was
    lost_ms: int = 0  # when the last one with a gap was
    event_ms: int = -1  # the greatest event time of the last range that held any
    path_ms: int = -1  # the parser's time of the last event that has one

    def plus(self, manifest: Manifest, now_ms: int) -> Totals:
        """With one more range, committed now."""
        placed = [file for file in manifest.files if file.path_ms >= 0]
        return Totals(
            commits=self.commits + 1,
            files=self.files + len(manifest.files),
            bytes=self.bytes + sum(file.size for file in manifest.files),
            dead=self.dead + manifest.dead,
            lost=self.lost + len(manifest.lost),
            left_out=self.left_out + manifest.left_out,
            dropped=self.dropped + manifest.dropped,
            deleted=self.deleted + manifest.deleted,
            absent=self.absent + manifest.absent,
            skipped=self.skipped + sum(gap.offsets for gap in manifest.lost),
            filled=self.filled + (manifest.read if manifest.filled else 0),
            committed_ms=now_ms,
            dead_ms=now_ms if manifest.dead else self.dead_ms,
            lost_ms=now_ms if manifest.lost else self.lost_ms,
            event_ms=max((file.last_ms for file in manifest.files), default=self.event_ms),
            path_ms=max(placed, key=lambda file: file.last_offset).path_ms
            if placed
            else self.path_ms,
        )


class Progress(Persisted, frozen=True):
    """The ``head`` of a source partition: every write there expects it."""

    position: str  # where reading goes on
    ordinal: int  # how many events were committed so far; numbers what has no offset of its own
    epoch: int  # of the driver that works on it
    closed: bool = False  # its generation is retired; nobody adopts it again
    frozen: str = ""  # id of the promote that has frozen it, until a driver may adopt it again
    incarnation: str = ""  # of what the source reads; empty: not known
    totals: Totals = Totals()
    looked: int = 0  # epoch of the last driver that looked for forgotten ranges
    names: str = ""  # a further part of its files' names, since ranges were set aside
    begin: Begin | None = None  # where it began, and why
    gaps: tuple[Gap, ...] = ()  # every one since then, in order
    note: bytes = b""  # of its last range, where the source knows by it again what was read
    ended: Literal["", "remade"] = ""  # why no range is read any more, as a person decided

    def is_of(self, incarnation: str) -> bool:
        """Whether it may have read this incarnation of its source; one that is not known may be."""
        return not self.incarnation or not incarnation or self.incarnation == incarnation

    def will_read(self, incarnation: str) -> bool:
        """Whether a driver may ever read this incarnation of its source.

        Not after it has retired or ended, nor where ranges of another incarnation are committed: a
        person can only accept that it ends then. Without any it begins again.
        """
        if self.closed or self.ended:
            return False
        return self.is_of(incarnation) or not self.totals.commits


class DriverFailure(Persisted, frozen=True):
    """Why a driver cannot read a source partition, or its source at all; for display."""

    partition: str  # of the source; empty: the source as a whole
    kind: str  # of the error
    message: str
    since_ms: int  # when it failed first
    at_ms: int  # when it failed last
    attempts: int


class Intent(Persisted, frozen=True):
    """A range that is about to be done; with a manifest, its contents are decided."""

    start: str  # the committed position
    limit: str
    lost: tuple[Gap, ...] = ()  # at its beginning, accepted by a person
    manifest: str = ""  # key of the manifest, once it is recorded
    began_ms: int = 0  # when it was put
    incarnation: str = ""  # of the source partition that it was planned for; read no other


class FileEntry(Persisted, frozen=True):
    """One file: where it is staged, where it belongs, and how to know it."""

    staged: str
    target: str
    size: int
    crc: int  # crc32c of all its bytes
    events: int
    first_offset: int
    last_offset: int
    first_ms: int
    last_ms: int
    kind: str = "data"  # or "dead", or "sidecar", or "segment"
    pieces: tuple[Piece, ...] = ()  # of a segment: what is where in it
    path_ms: int = -1  # the parser's time of its last event; -1: its path was made of none
    erased: int = 0  # events that were in it, and were erased
    named: int = 0  # parts of its folder, after the topic's, that values of its events have filled


class Manifest(Persisted, frozen=True):
    """What a range produced: decided once, published and committed from this alone."""

    pipeline: str  # incarnation
    partition: str  # of the source
    start: str
    end: str  # the end that was reached; the next range starts here
    ordinal: int  # of its first event
    read: int  # events read from the source
    written: int
    dropped: int = 0  # by the user's transform
    dead: int = 0  # that no parser took
    files: tuple[FileEntry, ...] = ()
    lost: tuple[Gap, ...] = ()
    note: bytes = b""  # what the source wants to find again
    erased: tuple[int, ...] = ()  # offsets whose events were taken out of the files
    left_out: int = 0  # events that were not written, since they were erased from the target
    ranges: tuple[Manifest, ...] = ()  # of a merged one: those of its ranges, which have all files
    deleted: int = 0  # offsets whose events were deleted from the source before they were read
    absent: int = 0  # offsets that never held an event for readers: compaction, transaction markers
    filled: int = 0  # generation whose files its events were read from; 0: they are the source's
    as_is: bool = False  # those hold what a transform returned, and no other one got it
    incarnation: str = ""  # of the source partition that its events were read of; empty: not known
    completed: int = 0  # generation whose files had what the source lacked in it; 0: none was asked

    @property
    def parts(self) -> tuple[Manifest, ...]:
        """The manifests of its ranges: itself, unless it is a merged one."""
        return self.ranges or (self,)


class MergedRange(Persisted, frozen=True, array_like=True):
    """A range in the row of a merged commit."""

    start: str
    end: str
    events: int
    files: int
    dead: int
    committed_ms: int
    left_out: int


class Commit(Persisted, frozen=True):
    """A range that is done, or neighbouring ones that were merged into one row."""

    manifest: str
    start: str
    end: str
    events: int
    files: int
    dead: int
    committed_ms: int
    rewrite: str = ""  # key of the manifest that an erasure replaces this one by; "": none goes on
    left_out: int = 0  # events that were erased from the target before they came there
    ranges: tuple[MergedRange, ...] = ()  # of a merged one, whose other fields are of all
    replaced: tuple[str, ...] = ()  # manifests that the merged one replaces; to be deleted
    merged_ms: int = 0  # since when it replaces them

    @property
    def parts(self) -> tuple[Commit, ...]:
        """Its ranges, each as if it had a row of its own."""
        if not self.ranges:
            return (self,)
        return tuple(
            Commit(
                manifest=self.manifest,
                start=each.start,
                end=each.end,
                events=each.events,
                files=each.files,
                dead=each.dead,
                committed_ms=each.committed_ms,
                rewrite=self.rewrite,
                left_out=each.left_out,
            )
            for each in self.ranges
        )


class Aside(Persisted, frozen=True):
    """A range that a restored catalog had forgotten, and whose files were set aside."""

    partition: str  # of the source
    start: str
    end: str
    events: int
    files: tuple[str, ...]  # where they are now
    at_ms: int
    incarnation: str = ""  # of the source partition that its events were read of; empty: not known


def offsets_between(start: str, end: str) -> int | None:
    """Returns how many offsets lie between two positions; None where positions are not offsets."""
    if not all(text.isascii() and text.isdecimal() for text in (start, end)):
        return None
    return int(end) - int(start)


def joined_gaps(gaps: tuple[Gap, ...], more: tuple[Gap, ...]) -> tuple[Gap, ...]:
    """Returns gaps in order, with neighbours of one reason as one."""
    joined = list(gaps)
    for gap in more:
        last = joined[-1] if joined else None
        if last is not None and (last.end, last.reason) == (gap.start, gap.reason):
            offsets = last.offsets + gap.offsets
            joined[-1] = Gap(last.start, gap.end, gap.reason, offsets)
        else:
            joined.append(gap)
    return tuple(joined)


class ReplacedFile(Persisted, frozen=True, array_like=True):
    """One file that an erasure changes."""

    key: str
    size: int  # as it was
    crc: int
    data: bytes  # as it shall be


class AsideErasure(Persisted, frozen=True):
    """What an erasure makes of a file that was set aside, and of its sidecar."""

    parts: tuple[ReplacedFile, ...]


def read_manifest(data: bytes, key: str) -> Manifest:
    """A manifest from its bytes. ``CorruptError``."""
    return open_json(data, Manifest, f"manifest `{key}`")


def check_pipeline_name(name: str) -> None:
    """Refuse a name that could not stand in a row or on a command line."""
    if not _NAME.fullmatch(name) or len(name) > limits.PIPELINE_NAME_MAX:
        raise InvalidError(
            f"pipeline name `{name[:80]}`: give 1 to {limits.PIPELINE_NAME_MAX} letters, digits, "
            "`.`, `_` or `-`, beginning with a letter, a digit or `_`"
        )
