"""An archive as the registry knows it."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from tidelog.errors import InvalidError, NotFoundError
from tidelog.model import limits
from tidelog.model.decoding import Persisted

__all__ = ["Archive", "Making", "check_archive_name"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class Making(Persisted, frozen=True):
    """How the files of one generation are made. Settings are plain values."""

    parser: str = ""  # of a partition archive
    transform: str = ""  # module:function, from DataFrame to DataFrame
    format: str = "parquet"
    codec: str = ""  # empty: the format's own
    layout: dict[str, str] = msgspec.field(default_factory=dict)
    format_settings: dict[str, Any] = msgspec.field(default_factory=dict)
    source: str = ""  # of a backfill; empty: the archive's own


class Archive(Persisted, frozen=True):
    """Files that a pipeline lays down, each source event once in every generation of them."""

    name: str
    incarnation: str
    source: str  # URL
    kind: Literal["backup", "partition"]
    store: str  # URL of the store that holds staging and the archive; its row says `home:`
    root: str  # the archive's folder in it
    created_ms: int
    makings: dict[int, Making]  # by generation
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

    def __post_init__(self) -> None:
        for making in self.makings.values():
            if (self.kind == "partition") != bool(making.parser):
                raise InvalidError(
                    f"archive `{self.name}`: kind {self.kind} and parser `{making.parser}` "
                    "contradict: a partition archive has a parser, a backup has none"
                )

    def making(self, generation: int | None = None) -> Making:
        """How a generation is made, the promoted one by default. ``NotFoundError``."""
        number = self.generation if generation is None else generation
        if number not in self.makings:
            known = ", ".join(map(str, sorted(self.makings)))
            raise NotFoundError(
                f"archive `{self.name}`: has no generation {number}: it has {known}"
            )
        return self.makings[number]

    def pipeline(self, generation: int | None = None) -> str:
        """What names the rows and manifests of a generation."""
        self.making(generation)
        return f"{self.incarnation}.{self.generation if generation is None else generation}"

    def folder(self, generation: int | None = None) -> str:
        """The folder of a generation's files: what those who list it read."""
        return f"{self.root}/g{self.generation if generation is None else generation}"

    @property
    def dead(self) -> str:
        """The folder of its dead letters."""
        return f"dead/{self.name}"

    @property
    def owner(self) -> str:
        """The object that says whose folder this is."""
        return f"{self.root}/_owner"

    @property
    def mark(self) -> bytes:
        """What that object holds: home and incarnation. Inside a home only the latter counts."""
        return msgspec.json.encode({"home": self.home, "archive": self.incarnation})


def check_archive_name(name: str) -> None:
    """Refuse a name that could not stand in a path."""
    if not _NAME.fullmatch(name) or len(name) > limits.TOPIC_NAME_MAX:
        raise InvalidError(
            f"archive name `{name[:80]}`: give 1 to {limits.TOPIC_NAME_MAX} letters, digits, `.`, "
            "`_` or `-`, beginning with a letter, a digit or `_`"
        )
