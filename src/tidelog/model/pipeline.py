"""A pipeline's rows and manifest: how far it has come, what it will do, what it did."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from tidelog.errors import InvalidError
from tidelog.model import limits
from tidelog.model.decoding import Persisted
from tidelog.model.run import Piece
from tidelog.model.sealed import open_json

__all__ = [
    "Aside",
    "Committed",
    "FileEntry",
    "Gap",
    "Intent",
    "Manifest",
    "MergedRange",
    "NamedPipeline",
    "Progress",
    "Totals",
    "check_pipeline_name",
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


class Totals(Persisted, frozen=True):
    """What a source partition's commits come to, so that nobody has to read them all."""

    commits: int = 0
    files: int = 0
    bytes: int = 0
    dead: int = 0
    lost: int = 0  # gaps that the source had
    left_out: int = 0  # events that were erased from the target before they came there
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
    incarnation: str = ""  # of what the source reads; empty: not known
    totals: Totals = Totals()
    looked: int = 0  # epoch of the last driver that looked for forgotten ranges, then committed
    names: str = ""  # a further part of its files' names, since ranges were set aside


class Gap(Persisted, frozen=True):
    """Events that the source had lost before they were read."""

    start: str
    end: str


class Intent(Persisted, frozen=True):
    """A range that is about to be done; with a manifest, its contents are decided."""

    start: str  # the committed position
    limit: str
    lost: tuple[Gap, ...] = ()  # at its beginning, accepted by a person
    manifest: str = ""  # key of the manifest, once it is recorded
    began_ms: int = 0  # when it was put


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


class Committed(Persisted, frozen=True):
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
    def parts(self) -> tuple[Committed, ...]:
        """Its ranges, each as if it had a row of its own."""
        if not self.ranges:
            return (self,)
        return tuple(
            Committed(
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
