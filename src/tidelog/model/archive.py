"""An archive as the registry stores it, and the rows of its date folders.

**The account** of a source partition says what happened to every offset. Each offset between
``begin`` and ``end`` is one of these, and they add up to ``span``:

- *archived*: its event is in a data file
- *dead*: its event is a dead letter
- *dropped*: the transform left its event out
- *erased*: its event was deleted, before it was read or from the files
- *absent*: it never held an event for readers (compaction, transaction markers)
- in a *gap*: skipped by a decision that is recorded with its reason

If a source's positions are not offsets (Kinesis, Scylla, and files read by row), the pipeline
numbers the events that it reads. Then ``is_numbered`` is true, ``span`` counts what was read, and
nothing is absent. A gap there has positions, but no count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tidelog.errors import InvalidError, NotFoundError
from tidelog.model import defaults, limits
from tidelog.model.address import address_below
from tidelog.model.decoding import Persisted
from tidelog.model.event import to_iso
from tidelog.model.pipeline import Begin, Gap, Progress, offsets_between
from tidelog.model.times import duration_ms

__all__ = [
    "Account",
    "Archive",
    "ArchiveEnd",
    "ArchiveFormat",
    "CountedFiles",
    "DateFolder",
    "ForcedPromote",
    "GenerationState",
    "Promotion",
    "RedoPart",
    "Start",
    "State",
    "Success",
    "account_of",
    "check_archive_name",
    "encode_success",
    "numbered",
]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class RedoPart(Persisted, frozen=True):
    """Which part of an archive a generation writes again; the rest of it is copied.

    All given conditions must hold: a date and, of topics and partitions, one of either.
    """

    dates: tuple[str, ...] = ()  # days of its folders, as 2026-11-15; empty: all
    topics: tuple[str, ...] = ()  # of the source
    partitions: tuple[str, ...] = ()  # of the source, as orders/0

    def has_partition(self, partition: str) -> bool:
        """Returns whether anything of a source partition may belong to it."""
        if not self.topics and not self.partitions:
            return True
        return partition in self.partitions or partition.rpartition("/")[0] in self.topics


class ArchiveFormat(Persisted, frozen=True):
    """How the files of one generation are written, as plain values."""

    parser: str = ""  # of a partition archive
    transform: str = ""  # module:function, from DataFrame to DataFrame
    format: str = "parquet"
    codec: str = ""  # empty: the format's default
    layout: dict[str, str] = msgspec.field(default_factory=dict)
    format_settings: dict[str, Any] = msgspec.field(default_factory=dict)
    source: str = ""  # of a backfill; empty: the archive's own
    start: Literal["", "earliest"] = ""  # of a backfill; empty: where the live one begins
    redo: RedoPart | None = None  # until it is promoted: what it writes again, and no more


GenerationState = Literal["building", "live", "kept", "removing"]
"""The state of a generation: being filled by a backfill, read, formerly read, or being deleted.

Only conditional writes of the archive's row change it.
"""


Start = Literal["earliest", "latest"]
"""Where a pipeline begins: at the first events, or at the ends that existed at its creation."""


class Promotion(Persisted, frozen=True):
    """A promote or rollback in progress, which has frozen the heads of the live generation."""

    id: str
    generation: int  # that becomes the live one
    began_ms: int


class ArchiveEnd(Persisted, frozen=True):
    """Records that a person ended an archive: no driver adds to it, and its files stay."""

    id: str  # the id that freezes its heads
    at_ms: int
    settled: bool = False  # no range is in progress, and no driver has a head
    removing: bool = False  # its files are being deleted
    lost: bool = False  # its files were missing before: only the rows are removed


class ForcedPromote(Persisted, frozen=True):
    """Events that a person gave up by promoting a generation that lacks them."""

    old: int  # the generation that has them
    new: int
    at_ms: int
    ranges: tuple[tuple[str, str, str], ...]  # source partition, start and end
    more: int = 0  # further ranges, for which the row has no room


class Archive(Persisted, frozen=True):
    """Files that a pipeline writes, with each source event once in every generation of them."""

    name: str
    incarnation: str
    source: str  # URL
    kind: Literal["backup", "partition"]
    store: str  # URL of the store that holds staging and the archive; `home:` in the row
    root: str  # the archive's folder in it
    created_ms: int
    formats: dict[int, ArchiveFormat]  # how files are written, by generation
    max_bytes: int = defaults.ARCHIVE_FILE_BYTES
    max_age_ms: int = duration_ms(defaults.ARCHIVE_FILE_AGE)
    dead_share_max: float = defaults.DEAD_SHARE
    generation: int = 1  # the live one, which readers see
    newest: int = 1  # the highest that was ever started: numbers are not reused
    watermark_ms: int | None = None  # all earlier events are in; only finalize moves it
    tables: tuple[str, ...] = ()  # every table of its files: delta, iceberg:URI#NAME
    kept: tuple[str, ...] = ()  # those of them that drivers update
    state: Literal["creating", "ready"] = "creating"
    home: str = ""  # id of the home that an outside folder belongs to; empty: inside
    states: dict[int, GenerationState] = msgspec.field(default_factory=dict)  # of those not live
    promotion: Promotion | None = None  # in progress
    start: Start = "earliest"  # or latest: the ends at its creation; of its first generation
    forced: tuple[ForcedPromote, ...] = ()  # what live generations lack, by a person's decision
    former: dict[int, str] = msgspec.field(default_factory=dict)  # sources of dropped backfills
    had_output: bool = False  # a dropped generation held what a transform or parser made of events
    ended: ArchiveEnd | None = None
    number: int = 1  # counts archives of this name: no two share a folder

    def __post_init__(self) -> None:
        for written_as in self.formats.values():
            if (self.kind == "partition") != bool(written_as.parser):
                raise InvalidError(
                    f"archive `{self.name}`: kind {self.kind} and parser `{written_as.parser}` "
                    "contradict: a partition archive has a parser, a backup has none"
                )

    def format_of(self, generation: int | None = None) -> ArchiveFormat:
        """Returns the format of a generation, by default the live one. Raises ``NotFoundError``."""
        number = self.generation if generation is None else generation
        if number not in self.formats:
            known = ", ".join(map(str, sorted(self.formats)))
            raise NotFoundError(
                f"archive `{self.name}`: has no generation {number}: it has {known}"
            )
        return self.formats[number]

    def state_of(self, generation: int) -> GenerationState:
        """Returns the state of a generation. Raises ``NotFoundError``.

        An ended archive has no live generation and none that is being built: all are kept.
        """
        self.format_of(generation)
        if self.ended is not None:
            gone = self.ended.removing or self.states.get(generation) == "removing"
            return "removing" if gone else "kept"
        return "live" if generation == self.generation else self.states.get(generation, "kept")

    def in_state(self, *states: GenerationState) -> list[int]:
        """Returns the generations that are in one of these states, in order."""
        return [number for number in sorted(self.formats) if self.state_of(number) in states]

    @property
    def kind_text(self) -> str:
        """Returns the kind for people: ``partitioned`` or ``backup``."""
        return "partitioned" if self.kind == "partition" else self.kind

    @property
    def state_name(self) -> str:
        """Returns its state: creating, ready, ended, or removing."""
        if self.ended is None:
            return self.state
        return "removing" if self.ended.removing else "ended"

    @property
    def from_live(self) -> list[int]:
        """Returns all generations, the live one first, since another one may be filled from it."""
        return sorted(self.formats, key=lambda number: (number != self.generation, number))

    @property
    def building(self) -> int | None:
        """Returns the generation that a backfill fills, if any."""
        return next(iter(self.in_state("building")), None)

    def pipeline(self, generation: int | None = None) -> str:
        """Returns the name of a generation's rows and manifests."""
        self.format_of(generation)
        return self.any_pipeline(self.generation if generation is None else generation)

    def any_pipeline(self, generation: int) -> str:
        """Returns the same, even for a generation that was removed."""
        return f"{self.incarnation}.{generation}"

    @property
    def place(self) -> str:
        """Returns the address of its folder, as messages show it."""
        return address_below(self.store, self.root)

    def folder(self, generation: int | None = None) -> str:
        """Returns the folder of a generation's files, as readers list it."""
        return f"{self.root}/g{self.generation if generation is None else generation}"

    def folder_place(self, generation: int | None = None) -> str:
        """Returns the address of that folder, as readers and messages use it."""
        return address_below(self.store, self.folder(generation))

    @property
    def dead(self) -> str:
        """Returns the folder of its dead letters, which other archives share, so it has an
        incarnation.
        """
        return f"dead/{self.name}/{self.incarnation}"

    @property
    def owner(self) -> str:
        """Returns the key of the object that records the owner of the folder."""
        return f"{self.root}/_owner"

    @property
    def owner_content(self) -> bytes:
        """Returns the contents of that object: home and incarnation.

        Inside a home only the latter counts.
        """
        return msgspec.json.encode({"home": self.home, "archive": self.incarnation})


def numbered(name: str, number: int) -> str:
    """Returns the folder name of an archive. No archive's name contains a ``~``."""
    return name if number == 1 else f"{name}~{number}"


def check_archive_name(name: str) -> None:
    """Raises ``InvalidError`` for a name that cannot be part of a path."""
    if not _NAME.fullmatch(name) or len(name) > limits.TOPIC_NAME_MAX:
        raise InvalidError(
            f"archive name `{name[:80]}`: give 1 to {limits.TOPIC_NAME_MAX} letters, digits, `.`, "
            "`_` or `-`, beginning with a letter, a digit or `_`"
        )


State = Literal["open", "marking", "final", "reopening", "reopened"]


class CountedFiles(Persisted, frozen=True):
    """How far the files of a source partition, or of its replays, are counted in folder rows."""

    ordinal: int = 0  # of the first range that is not completely counted
    folders: int = 0  # how many of that range's folders, in order, are counted


class DateFolder(Persisted, frozen=True):
    """A date folder that has files.

    Its state says whether its marker must exist: yes for ``marking`` and ``final``, no for
    ``reopening`` and ``reopened``. The first of each pair is not done yet, or not reported yet.
    """

    folder: str  # below the generation's folder
    end_ms: int  # when its time range ends
    length_ms: int  # about how long that range is
    files: int = 0
    events: int = 0
    state: State = "open"
    watermark_ms: int = 0  # of the archive when the folder was last marked
    late_ms: int = 0  # when files last arrived after it was marked; 0: never
    marked_ms: int = 0  # when it was last marked


class Success(msgspec.Struct, frozen=True):
    """The contents of a folder's marker."""

    archive: str
    folder: str
    watermark: str
    files: int
    events: int


def encode_success(archive: str, folder: DateFolder) -> bytes:
    """Returns the marker for a folder's row. It depends only on the row, so verify can compare."""
    return msgspec.json.encode(
        Success(
            archive=archive,
            folder=folder.folder,
            watermark=to_iso(folder.watermark_ms),
            files=folder.files,
            events=folder.events,
        )
    )


@dataclass(frozen=True, slots=True)
class Account:
    """What happened to the offsets of one source partition."""

    partition: str
    begin: Begin | None
    end: str
    span: int
    is_numbered: bool
    archived: int = 0
    dead: int = 0
    dropped: int = 0
    erased: int = 0
    absent: int = 0
    gaps: tuple[Gap, ...] = ()

    @property
    def skipped(self) -> int:
        """Returns how many offsets are in gaps."""
        return sum(gap.offsets for gap in self.gaps)

    @property
    def total(self) -> int:
        """Returns the sum of all parts."""
        return self.archived + self.dead + self.dropped + self.erased + self.absent + self.skipped

    @property
    def adds_up(self) -> bool:
        """Returns whether every offset is accounted for, once."""
        parts = (self.archived, self.dead, self.dropped, self.erased, self.absent, self.skipped)
        return self.total == self.span and min(parts) >= 0

    @property
    def problem(self) -> str:
        """Returns what does not add up, in words; empty if all does."""
        if self.adds_up:
            return ""
        return (
            f"{self.span} offsets, but {self.archived} archived, {self.dead} dead, "
            f"{self.dropped} dropped, {self.erased} erased, {self.absent} never there and "
            f"{self.skipped} in gaps, which is {self.total}"
        )


def account_of(partition: str, head: Progress, archived: int, dead: int) -> Account:
    """Returns the account of a head, with what its files contain now: ``archived`` and ``dead``.

    What commits wrote as events or dead letters, and the files no longer contain, was erased.
    """
    totals = head.totals
    stored = head.ordinal - totals.dropped - totals.left_out
    span, is_numbered = span_of(head)
    return Account(
        partition=partition,
        begin=head.begin,
        end=head.position,
        span=span,
        is_numbered=is_numbered,
        archived=archived,
        dead=dead,
        dropped=totals.dropped,
        erased=stored - archived - dead + totals.left_out + totals.deleted,
        absent=totals.absent,
        gaps=head.gaps,
    )


def span_of(head: Progress) -> tuple[int, bool]:
    """Returns how many offsets a head has passed since its begin, and whether they are numbered."""
    begin = head.begin.position if head.begin is not None else head.position
    offsets = offsets_between(begin, head.position)
    if offsets is None or head.begin is None:
        return head.ordinal + head.totals.deleted + head.totals.absent + head.totals.skipped, True
    return offsets, False
