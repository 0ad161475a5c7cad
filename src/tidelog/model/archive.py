"""An archive as the registry knows it.

The rows of an archive's date folders: what is in them, and whether they are final.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from tidelog.errors import InvalidError, NotFoundError
from tidelog.model import limits
from tidelog.model.decoding import Persisted
from tidelog.model.event import to_iso

__all__ = [
    "Archive",
    "ArchiveEnd",
    "ArchiveFormat",
    "CountedFiles",
    "DateFolder",
    "ForcedPromote",
    "GenerationState",
    "Promotion",
    "Start",
    "State",
    "Success",
    "check_archive_name",
    "encode_success",
    "numbered",
]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class ArchiveFormat(Persisted, frozen=True):
    """How the files of one generation are made. Settings are plain values."""

    parser: str = ""  # of a partition archive
    transform: str = ""  # module:function, from DataFrame to DataFrame
    format: str = "parquet"
    codec: str = ""  # empty: the format's own
    layout: dict[str, str] = msgspec.field(default_factory=dict)
    format_settings: dict[str, Any] = msgspec.field(default_factory=dict)
    source: str = ""  # of a backfill; empty: the archive's own
    start: Literal["", "earliest"] = ""  # of a backfill; empty: where the live one begins


GenerationState = Literal["building", "live", "kept", "removing"]
"""What a generation is: one that a backfill fills, the one that is read, one that was, or one
whose files are being deleted. Only conditional writes of the archive's row change it."""


Start = Literal["earliest", "latest"]
"""Where a pipeline begins: at the first events, or at the ends that its creation saw."""


class Promotion(Persisted, frozen=True):
    """A promote or rollback under way: it has frozen the heads of the live generation."""

    id: str
    generation: int  # that shall become the live one
    began_ms: int


class ArchiveEnd(Persisted, frozen=True):
    """That a person ended an archive: no driver adds to it, and its files stay as they are."""

    id: str  # by which its heads are frozen
    at_ms: int
    settled: bool = False  # no range is under way, and no driver has a head
    removing: bool = False  # its files are being deleted
    lost: bool = False  # its files were gone before: only what says that it is there is removed


class ForcedPromote(Persisted, frozen=True):
    """Events that a person lost by promoting a generation that lacks them."""

    old: int  # generation that has it
    new: int
    at_ms: int
    ranges: tuple[tuple[str, str, str], ...]  # source partition, start and end
    more: int = 0  # further ranges, which the row has no room for


class Archive(Persisted, frozen=True):
    """Files that a pipeline lays down, each source event once in every generation of them."""

    name: str
    incarnation: str
    source: str  # URL
    kind: Literal["backup", "partition"]
    store: str  # URL of the store that holds staging and the archive; its row says `home:`
    root: str  # the archive's folder in it
    created_ms: int
    makings: dict[int, ArchiveFormat]  # by generation
    max_bytes: int = 200_000_000
    max_age_ms: int = 3_600_000
    dead_share_max: float = 0.1
    generation: int = 1  # that readers are promoted to
    newest: int = 1  # the highest that was ever begun: numbers are not used again
    watermark_ms: int | None = None  # all events before this are in; only finalize moves it
    tables: tuple[str, ...] = ()  # every table of its files: delta, iceberg:URI#NAME
    kept: tuple[str, ...] = ()  # those of them that drivers bring up to date
    state: Literal["creating", "ready"] = "creating"
    home: str = ""  # id of the home that an outside folder belongs to; empty: it is in the home
    states: dict[int, GenerationState] = msgspec.field(default_factory=dict)  # of those not live
    promotion: Promotion | None = None  # under way
    start: Start = "earliest"  # or latest: the ends that its creation saw; its first generation
    forced: tuple[
        ForcedPromote, ...
    ] = ()  # ranges that live generations lack, by a person's decision
    former: dict[int, str] = msgspec.field(default_factory=dict)  # sources of dropped backfills
    ended: ArchiveEnd | None = None
    number: int = 1  # of archives that had this name: no two of them share a folder

    def __post_init__(self) -> None:
        for making in self.makings.values():
            if (self.kind == "partition") != bool(making.parser):
                raise InvalidError(
                    f"archive `{self.name}`: kind {self.kind} and parser `{making.parser}` "
                    "contradict: a partition archive has a parser, a backup has none"
                )

    def making(self, generation: int | None = None) -> ArchiveFormat:
        """How a generation is made, the promoted one by default. ``NotFoundError``."""
        number = self.generation if generation is None else generation
        if number not in self.makings:
            known = ", ".join(map(str, sorted(self.makings)))
            raise NotFoundError(
                f"archive `{self.name}`: has no generation {number}: it has {known}"
            )
        return self.makings[number]

    def state_of(self, generation: int) -> GenerationState:
        """Returns what a generation is now. ``NotFoundError``.

        An ended archive has neither a live generation nor one that is built: all are kept.
        """
        self.making(generation)
        if self.ended is not None:
            gone = self.ended.removing or self.states.get(generation) == "removing"
            return "removing" if gone else "kept"
        return "live" if generation == self.generation else self.states.get(generation, "kept")

    def in_state(self, *states: GenerationState) -> list[int]:
        """Returns the generations that are in one of these states, in order."""
        return [number for number in sorted(self.makings) if self.state_of(number) in states]

    @property
    def state_name(self) -> str:
        """What it is now: creating, ready, ended, or removing."""
        if self.ended is None:
            return self.state
        return "removing" if self.ended.removing else "ended"

    @property
    def from_live(self) -> list[int]:
        """All generations, the live one first: another one may be filled from it."""
        return sorted(self.makings, key=lambda number: (number != self.generation, number))

    @property
    def building(self) -> int | None:
        """The generation that a backfill fills; there is one at most."""
        return next(iter(self.in_state("building")), None)

    def pipeline(self, generation: int | None = None) -> str:
        """What names the rows and manifests of a generation."""
        self.making(generation)
        return self.any_pipeline(self.generation if generation is None else generation)

    def any_pipeline(self, generation: int) -> str:
        """The same, also of a generation that was removed."""
        return f"{self.incarnation}.{generation}"

    def folder(self, generation: int | None = None) -> str:
        """The folder of a generation's files: what those who list it read."""
        return f"{self.root}/g{self.generation if generation is None else generation}"

    @property
    def dead(self) -> str:
        """The folder of its dead letters: beside those of other archives, so by incarnation too."""
        return f"dead/{self.name}/{self.incarnation}"

    @property
    def owner(self) -> str:
        """The object that says whose folder this is."""
        return f"{self.root}/_owner"

    @property
    def mark(self) -> bytes:
        """What that object holds: home and incarnation. Inside a home only the latter counts."""
        return msgspec.json.encode({"home": self.home, "archive": self.incarnation})


def numbered(name: str, number: int) -> str:
    """Returns what folders of an archive are called: no name of an archive has a ``~``."""
    return name if number == 1 else f"{name}~{number}"


def check_archive_name(name: str) -> None:
    """Refuse a name that could not stand in a path."""
    if not _NAME.fullmatch(name) or len(name) > limits.TOPIC_NAME_MAX:
        raise InvalidError(
            f"archive name `{name[:80]}`: give 1 to {limits.TOPIC_NAME_MAX} letters, digits, `.`, "
            "`_` or `-`, beginning with a letter, a digit or `_`"
        )


State = Literal["open", "marking", "final", "reopening", "reopened"]


class CountedFiles(Persisted, frozen=True):
    """Up to where the files of a source partition, or of its replays, are in folders' rows."""

    ordinal: int = 0  # of the first range that is not in them as a whole
    folders: int = 0  # of that range's folders, in their order, those that are


class DateFolder(Persisted, frozen=True):
    """A date folder that has files.

    Its state says what its marker must be: ``marking`` and ``final`` want it there, ``reopening``
    and ``reopened`` want it gone. The first of each pair is not yet done, or not yet told.
    """

    folder: str  # below the generation's own
    end_ms: int  # when its time is over
    length_ms: int  # about how long that is
    files: int = 0
    events: int = 0
    state: State = "open"
    watermark_ms: int = 0  # of the archive when it was last marked
    late_ms: int = 0  # when files last came after it was marked; 0: never
    marked_ms: int = 0  # when it was last marked


class Success(msgspec.Struct, frozen=True):
    """What the marker of a folder says."""

    archive: str
    folder: str
    watermark: str
    files: int
    events: int


def encode_success(archive: str, folder: DateFolder) -> bytes:
    """The marker that a folder's row asks for; it follows from the row, so verify compares both."""
    return msgspec.json.encode(
        Success(
            archive=archive,
            folder=folder.folder,
            watermark=to_iso(folder.watermark_ms),
            files=folder.files,
            events=folder.events,
        )
    )
