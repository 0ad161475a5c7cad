"""A pipeline's rows and manifest: its progress, what it is about to do, and what it did."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from tidelog.errors import InvalidError
from tidelog.model import limits
from tidelog.model.decoding import Persisted, open_json
from tidelog.model.topic import Piece

__all__ = [
    "RENAMED",
    "Aside",
    "Begin",
    "BeginReason",
    "Commit",
    "DriverFailure",
    "ErasedEvents",
    "FileCounts",
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
    "by_cause",
    "check_pipeline_name",
    "joined_gaps",
    "joined_names",
    "offsets_between",
    "read_manifest",
    "same_in",
    "without_name",
]


RENAMED = ("id", "key", "time")
"""What identifies events and shows that they are new, and a pipeline may change in its copies."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class NamedPipeline(Persisted, frozen=True):
    """A pipeline with a name of its own in the registry; an archive's pipelines have none."""

    name: str
    incarnation: str  # the name of its rows, manifests and staged files
    source: str  # URL
    sink: str  # URL
    target: str  # incarnation of what the sink writes to
    created_ms: int
    # Paths in JSON of an event's own fields.
    fields: dict[str, str] = msgspec.field(default_factory=dict)
    transform: str = ""  # module:function, from DataFrame to DataFrame
    state: Literal["ready", "deleting"] = "ready"
    home: str = ""  # id of the home that runs it, if its sink is outside; empty: our topic

    @property
    def renames(self) -> frozenset[str]:
        """Returns what copies may have other ones of than their originals: ids, keys, times."""
        return frozenset(RENAMED) if self.transform else frozenset(RENAMED) & self.fields.keys()


BeginReason = Literal["earliest", "latest", "retention", "explicit"]
"""Why an archive begins where it does in a source partition.

``earliest``: at the first event that ever existed. ``retention``: at the first one that the source
still had. ``latest``: at the end when the archive was created. ``explicit``: where the source's
address, or a seek before the first run, says.
"""

GapReason = Literal[
    "retention", "remade", "parent", "vanished", "upstream", "transform", "seek", "files"
]
"""Why a source partition's events are missing from an archive.

``retention``: the source had deleted them before they were read, and a person accepted that.
``remade``: their topic was deleted and created again, and a person accepted that. ``parent``: a
shard that was split or merged vanished before it was read to its end. ``vanished``: their file, or
topic of a pattern, was removed before it was read to its end, and a person accepted that.
``upstream``: the archive that is the source has a gap there. ``transform``: they were read from
files of a generation or archive whose transform had dropped them. ``seek``: a person moved the
position past them. ``files``: no file of the folder that was read has them. They may never have
been there, as markers of transactions, or a file may be missing: a folder does not show which.
"""


class Begin(Persisted, frozen=True):
    """Where the archive of a source partition begins, and why."""

    position: str
    reason: BeginReason
    at_ms: int = 0  # when that was decided


class Gap(Persisted, frozen=True):
    """Offsets of the source that were skipped by a recorded decision, or that a folder lacks.

    All offsets between the positions, except for the reason ``transform``, where it is some of
    them, and for ``files`` if they are too many to list.
    """

    start: str
    end: str
    reason: GapReason
    offsets: int = 0  # how many; 0 if positions are not offsets and cannot be counted

    @property
    def is_partial(self) -> bool:
        """Returns whether it covers only some of the offsets between its positions."""
        whole = offsets_between(self.start, self.end)
        return self.reason == "transform" or (whole is not None and 0 < self.offsets < whole)

    @property
    def is_scattered(self) -> bool:
        """Returns whether it is what a folder lacks here and there between its positions."""
        return self.reason == "files" and self.is_partial

    @property
    def is_loss(self) -> bool:
        """Returns whether events are known to be lost.

        What a folder lacks may never have been, and a transform drops events on purpose.
        """
        return self.reason not in ("files", "transform")


class ListedPartition(Persisted, frozen=True):
    """A source partition in a pipeline's list, which may not have a head yet."""

    partition: str
    end: str = ""  # when the pipeline was created; empty: it appeared later
    incarnation: str = ""  # of what had that end
    seen_ms: int = 0
    note: bytes = b""  # of what is before that end, if the source tracks what was read
    first: str = ""  # its first position at that time


class SeenEnd(Persisted, frozen=True):
    """The last known end of a source partition, in case its file vanishes before it is read."""

    partition: str
    end: str


class ErasedEvents(Persisted, frozen=True):
    """How many events erasures removed from the files of a source partition."""

    data: int = 0
    dead: int = 0
    updated: int = 0  # events that got another value there


class PreviousAccount(Persisted, frozen=True):
    """The account of the generation before a promoted one, in one source partition."""

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


class FileCounts(NamedTuple):
    """How many files of an archive there are, by kind, in the words that people read everywhere.

    >>> str(tidelog.FileCounts(data=14, dead=2, aside=1))
    '14 data files, 2 of dead letters, 1 set aside'
    """

    data: int = 0
    dead: int = 0  # files of dead letters
    sidecars: int = 0  # beside data files of formats that have no room for all columns
    aside: int = 0  # of ranges that a restored catalog did not know

    @classmethod
    def of(cls, files: Iterable[FileEntry]) -> FileCounts:
        """Counts files by kind."""
        kinds = Counter(file.kind for file in files)
        return cls(kinds["data"], kinds["dead"], kinds["sidecar"])

    def __str__(self) -> str:
        parts = [f"{self.data:,} data file{'' if self.data == 1 else 's'}"]
        if self.dead:
            parts.append(f"{self.dead:,} of dead letters")
        if self.sidecars:
            parts.append(f"{self.sidecars:,} sidecar{'' if self.sidecars == 1 else 's'}")
        if self.aside:
            parts.append(f"{self.aside:,} set aside")
        return ", ".join(parts)


class Totals(Persisted, frozen=True):
    """The totals of a source partition's commits, so that they need not all be read."""

    commits: int = 0
    files: int = 0
    bytes: int = 0
    dead: int = 0
    lost: int = 0  # gaps, except what a folder lacks and what a transform dropped
    left_out: int = 0  # events that were erased from the target before they arrived
    dropped: int = 0  # events that the transform dropped
    deleted: int = 0  # offsets whose events were deleted from the source before they were read
    absent: int = 0  # offsets that never held an event for readers
    skipped: int = 0  # offsets in gaps
    filled: int = 0  # events that were read from another generation's files
    committed_ms: int = 0  # when the last commit was made
    dead_ms: int = 0  # when the last one with dead letters was
    lost_ms: int = 0  # when the last one with such a gap was
    event_ms: int = -1  # the latest event time of the last range that had any
    path_ms: int = -1  # the parser's time of the last event with one that is not in the future

    def plus(self, manifest: Manifest, now_ms: int) -> Totals:
        """Returns the totals with one more range, committed now.

        A time that is in the future does not say when its event arrived.
        """
        placed = [file for file in manifest.files if file.path_ms >= 0]
        told = [file for file in placed if file.path_ms <= now_ms + limits.CLOCK_AHEAD_MS]
        before_ms = max(0, self.path_ms) if placed else self.path_ms
        return Totals(
            commits=self.commits + 1,
            files=self.files + len(manifest.files),
            bytes=self.bytes + sum(file.size for file in manifest.files),
            dead=self.dead + manifest.dead,
            lost=self.lost + sum(gap.is_loss for gap in manifest.lost),
            left_out=self.left_out + manifest.left_out,
            dropped=self.dropped + manifest.dropped,
            deleted=self.deleted + manifest.deleted,
            absent=self.absent + manifest.absent,
            skipped=self.skipped + sum(gap.offsets for gap in manifest.lost),
            filled=self.filled + (manifest.read if manifest.filled else 0),
            committed_ms=now_ms,
            dead_ms=now_ms if manifest.dead else self.dead_ms,
            lost_ms=now_ms if any(gap.is_loss for gap in manifest.lost) else self.lost_ms,
            event_ms=max((file.last_ms for file in manifest.files), default=self.event_ms),
            path_ms=max(told, key=lambda file: file.last_offset).path_ms if told else before_ms,
        )


class Progress(Persisted, frozen=True):
    """The ``head`` of a source partition: every write there expects it."""

    position: str  # where reading resumes
    ordinal: int  # how many events were committed so far; numbers events without offsets
    epoch: int  # raised whenever a driver takes the partition
    closed: bool = False  # its generation is retired; no driver claims it again
    frozen: str = ""  # id of the promote that has frozen it, until a driver may claim it again
    incarnation: str = ""  # of what the source reads; empty: unknown
    totals: Totals = Totals()
    looked: int = 0  # epoch under which a driver last looked for forgotten ranges
    names: str = ""  # an extra part of its files' names, since ranges were set aside
    begin: Begin | None = None  # where it began, and why
    gaps: tuple[Gap, ...] = ()  # every one since then, in order
    note: bytes = b""  # of its last range, by which the source recognizes what was read
    ended: Literal["", "remade"] = ""  # why no range is read any more, by a person's decision
    owner: str = ""  # id of the driver that has it; empty: free

    def is_of(self, incarnation: str) -> bool:
        """Returns whether it may have read this incarnation of its source; True if unknown."""
        return not self.incarnation or not incarnation or self.incarnation == incarnation

    def will_read(self, incarnation: str) -> bool:
        """Returns whether a driver may ever read this incarnation of its source.

        Not after it has retired or ended, nor if ranges of another incarnation are committed: then
        a person can only accept that it ends. Without any committed range it begins again.
        """
        if self.closed or self.ended:
            return False
        return self.is_of(incarnation) or not self.totals.commits


class DriverFailure(Persisted, frozen=True):
    """Why a driver cannot read a source partition, or its whole source; for display."""

    partition: str  # of the source; empty: the whole source
    kind: str  # of the error
    message: str
    since_ms: int  # when it failed first
    at_ms: int  # when it failed last
    attempts: int
    quotes: str = "any"  # offset of the event that the message quotes; empty: it quotes none


class Intent(Persisted, frozen=True):
    """A range that is about to be done; with a manifest, its contents are decided."""

    start: str  # the committed position
    limit: str
    lost: tuple[Gap, ...] = ()  # at its beginning, accepted by a person
    manifest: str = ""  # key of the manifest, once it is recorded
    began_ms: int = 0  # when it was put
    incarnation: str = ""  # of the source partition that it was planned for; no other is read
    cuts: tuple[str, ...] = ()  # positions where it is divided, one task for each part
    ahead: Intent | None = None  # of a decided one: the range after it, which is being read

    @property
    def reach(self) -> str:
        """Returns how far events may have been read: its limit, or that of the range after it."""
        return self.limit if self.ahead is None else self.ahead.limit


class FileEntry(Persisted, frozen=True):
    """One file: where it is staged, where it belongs, and how to recognize it."""

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
    pieces: tuple[Piece, ...] = ()  # of a segment
    path_ms: int = -1  # the parser's time of its last event; -1: its path has no time
    erased: int = 0  # events that were in it, and were erased
    updated: int = 0  # events in it that got another value since
    named: int = 0  # parts of its folder, after the topic's, that values of its events have filled


class Manifest(Persisted, frozen=True):
    """What a range produced: decided once, then published and committed from this alone."""

    pipeline: str  # incarnation
    partition: str  # of the source
    start: str
    end: str  # the end that was reached; the next range starts here
    ordinal: int  # of its first event
    read: int  # events read from the source
    written: int
    dropped: int = 0  # by the user's transform
    dead: int = 0  # that no parser accepted
    files: tuple[FileEntry, ...] = ()
    lost: tuple[Gap, ...] = ()
    note: bytes = b""  # data that the source wants to read again
    erased: tuple[int, ...] = ()  # offsets whose events were removed from the files
    left_out: int = 0  # events that were not written, since they were erased from the target
    ranges: tuple[Manifest, ...] = ()  # of a merged one: those of its ranges, which have all files
    deleted: int = 0  # offsets whose events were deleted from the source before they were read
    absent: int = 0  # offsets that never held an event for readers: compaction, transaction markers
    filled: int = 0  # generation whose files its events were read from; 0: from the source
    as_is: bool = False  # those contain a transform's output, and no other transform got it
    incarnation: str = ""  # of the source partition that its events were read from; empty: unknown
    completed: int = 0  # generation whose files had what the source lacked; 0: none
    copied: int = 0  # how many of its files, the first ones, are copies of that generation's

    @property
    def each_range(self) -> tuple[Manifest, ...]:
        """Returns the manifests of its ranges: itself, unless it is a merged one."""
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
    """A range that is done, or neighboring ones that were merged into one row."""

    manifest: str
    start: str
    end: str
    events: int
    files: int
    dead: int
    committed_ms: int
    rewrite: str = ""  # key of the manifest by which an erasure replaces this one; "": none runs
    left_out: int = 0  # events that were erased from the target before they arrived
    ranges: tuple[MergedRange, ...] = ()  # of a merged one, whose other fields cover all
    replaced: tuple[str, ...] = ()  # manifests that the merged one replaces; to be deleted
    merged_ms: int = 0  # since when it replaces them

    @property
    def each_range(self) -> tuple[Commit, ...]:
        """Returns its ranges, each as if it had a row of its own."""
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
    """A range that a restored catalog had lost, and whose files were set aside."""

    partition: str  # of the source
    start: str
    end: str
    events: int
    files: tuple[str, ...]  # where they are now
    at_ms: int
    incarnation: str = ""  # of the source partition that its events were read from; empty: unknown


def offsets_between(start: str, end: str) -> int | None:
    """Returns how many offsets are between two positions; None if positions are not offsets."""
    if not all(text.isascii() and text.isdecimal() for text in (start, end)):
        return None
    return int(end) - int(start)


def joined_gaps(gaps: tuple[Gap, ...], more: tuple[Gap, ...]) -> tuple[Gap, ...]:
    """Returns gaps in order; joins neighbors with the same reason.

    Partial gaps with the same reason become one with the total, however far apart they are: any
    number of ranges may have one.
    """
    joined = list(gaps)
    for gap in more:
        at = _joining(joined, gap)
        if at is None:
            joined.append(gap)
            continue
        last = joined[at]
        start, end = last.start, gap.end
        if gap.is_partial and offsets_between(start, end) is not None:
            start, end = min(start, gap.start, key=int), max(last.end, end, key=int)
        joined[at] = Gap(start, end, gap.reason, last.offsets + gap.offsets)
    return tuple(joined)


def _joining(gaps: Sequence[Gap], gap: Gap) -> int | None:
    """Returns which gap of a list another one is joined with; None: it is one of its own."""
    for at in reversed(range(len(gaps))):
        is_same = gaps[at].reason == gap.reason
        if gap.is_partial and gaps[at].is_partial and is_same:
            return at
        if not (gap.is_partial or gaps[at].is_partial):
            return at if is_same and gaps[at].end == gap.start else None
    return None


class ReplacedFile(Persisted, frozen=True, array_like=True):
    """One file that an erasure changes."""

    key: str
    size: int  # before the erasure
    crc: int
    data: bytes  # after the erasure


class AsideErasure(Persisted, frozen=True):
    """What an erasure makes of a file that was set aside, and of its sidecar."""

    parts: tuple[ReplacedFile, ...]


def read_manifest(data: bytes, key: str) -> Manifest:
    """Decodes a manifest. Raises ``CorruptError``."""
    return open_json(data, Manifest, f"manifest `{key}`")


def check_pipeline_name(name: str) -> None:
    """Raises ``InvalidError`` for a name that cannot be part of a row or a command line."""
    if not _NAME.fullmatch(name) or len(name) > limits.PIPELINE_NAME_MAX:
        raise InvalidError(
            f"pipeline name `{name[:80]}`: give 1 to {limits.PIPELINE_NAME_MAX} letters, digits, "
            "`.`, `_` or `-`, beginning with a letter, a digit or `_`"
        )


_NAMES_SHOWN = 5  # source partitions that have the same problem


def by_cause(found: Iterable[tuple[str, str]]) -> list[tuple[str, str, list[str]]]:
    """Joins problems of source partitions that differ only in their names and numbers.

    Returns for each cause the first source partition that has it, its message (which need not begin
    with the name), and the other source partitions.

    >>> by_cause([("a/0", "3 events of a/0 are bad"), ("a/1", "17 events of a/1 are bad")])
    [('a/0', '3 events of a/0 are bad', ['a/1'])]
    """
    causes: dict[str, tuple[str, str, list[str]]] = {}
    for partition, message in found:
        cause = re.sub("[0-9]+", "0", message.replace(partition, ""))
        first = causes.setdefault(cause, (partition, without_name(partition, message), []))
        if first[0] != partition:
            first[2].append(partition)
    return list(causes.values())


def without_name(partition: str, message: str) -> str:
    """Returns a message of a source partition, for a line that names the partition already."""
    return message.removeprefix(f"source partition `{partition}`: ")


def same_in(partitions: Sequence[str]) -> str:
    """Returns the end of a message that holds for other source partitions too."""
    if not partitions:
        return ""
    return f" (the same in {joined_names(partitions)})"


def joined_names(names: Sequence[str]) -> str:
    """``a/0``, ``a/0 and a/1``; of many only the first ones, and how many more there are."""
    shown = [*names[:_NAMES_SHOWN]]
    if more := len(names) - len(shown):
        shown.append(f"{more} more")
    return " and ".join(part for part in (", ".join(shown[:-1]), shown[-1]) if part)
