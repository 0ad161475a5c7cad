"""An archive as the registry knows it."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from tidelog.errors import InvalidError
from tidelog.model import limits

__all__ = ["Archive", "check_archive_name"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class Archive(msgspec.Struct, frozen=True):
    """Files that a pipeline lays down, each source event once. Settings are plain values."""

    name: str
    incarnation: str
    source: str  # URL
    kind: Literal["backup", "partition"]
    store: str  # URL of the store that holds staging and the archive
    root: str  # the archive's folder in it
    created_ms: int
    parser: str = ""  # of a partition archive
    format: str = "parquet"
    codec: str = ""  # empty: the format's own
    layout: dict[str, str] = msgspec.field(default_factory=dict)
    format_settings: dict[str, Any] = msgspec.field(default_factory=dict)
    max_bytes: int = 200_000_000
    max_age_ms: int = 3_600_000
    dead_share_max: float = 0.1
    generation: int = 1  # that readers are promoted to
    state: Literal["creating", "ready"] = "creating"

    def __post_init__(self) -> None:
        if (self.kind == "partition") != bool(self.parser):
            raise InvalidError(
                f"archive `{self.name}`: kind {self.kind} and parser `{self.parser}` contradict: "
                "a partition archive has a parser, a backup has none"
            )

    @property
    def dead(self) -> str:
        """The folder of its dead letters."""
        return f"dead/{self.name}"

    @property
    def owner(self) -> str:
        """The object that says whose folder this is."""
        return f"{self.root}/_owner"


def check_archive_name(name: str) -> None:
    """Refuse a name that could not stand in a path."""
    if not _NAME.fullmatch(name) or len(name) > limits.TOPIC_NAME_MAX:
        raise InvalidError(
            f"archive name `{name[:80]}`: give 1 to {limits.TOPIC_NAME_MAX} letters, digits, `.`, "
            "`_` or `-`, beginning with a letter, a digit or `_`"
        )
