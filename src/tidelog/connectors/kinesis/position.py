"""Positions in a shard of Kinesis, which are no numbers: Kinesis does not tell where a shard ends.

A *place* is where reading goes on::

    oldest           at the oldest record that is held
    at:<ms>          at the first record that came in at this time or later
    after:<sequence> behind a record
    end              behind the last record of a shard that is closed

``@<ms>`` behind a place says that all records which came in before that time are read. With the
stream's retention this tells whether any may be lost: Kinesis itself begins at the oldest record
that it holds when asked for one that it no longer has, and says nothing. ``^<ms>`` stands behind
the first place of a shard: what came in before that time is no longer held.

A *limit* is ``until:<ms>``, a time up to which records are wanted, or ``end``; ``,<n>`` behind it
ends a range after about so many events. The end of a shard that is open is the present time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from tidelog.errors import InvalidError

__all__ = ["END", "RangeLimit", "ShardPosition", "is_before"]

_PLACE = re.compile(r"(?:(oldest|end)|(at|after):(\d{1,129}))(?:@(\d{1,15})|\^(\d{1,15}))?", re.A)
_LIMIT = re.compile(r"(?:end|until:(\d{1,15}))(?:,(\d{1,15}))?", re.A)
_ORDER = ("oldest", "at", "after", "end")


@dataclass(frozen=True, slots=True)
class ShardPosition:
    """Where reading goes on."""

    kind: Literal["oldest", "at", "after", "end"]
    value: int = 0  # a time, or a sequence number
    seen_ms: int | None = None  # all that came in before is read
    held_ms: int | None = None  # what came in before is no longer held

    @property
    def text(self) -> str:
        name = f"{self.kind}:{self.value}" if self.kind in ("at", "after") else self.kind
        if self.held_ms is not None:
            return f"{name}^{self.held_ms}"
        return name if self.seen_ms is None else f"{name}@{self.seen_ms}"

    @property
    def order(self) -> tuple[int, int]:
        """Rises along a shard; where a time lies among sequence numbers is not known."""
        return _ORDER.index(self.kind), self.value

    def seen(self, time_ms: int) -> ShardPosition:
        """The same place, at which all that came in before a time is read."""
        return replace(self, seen_ms=max(0, time_ms), held_ms=None)

    @classmethod
    def parse(cls, text: str) -> ShardPosition:
        """A limit stands for the place of its time, at which a reader of the newest begins."""
        match = _PLACE.fullmatch(text)
        if match is None:
            limit = RangeLimit.parse(text)
            return END if limit.until_ms is None else cls("at", limit.until_ms)
        kind: Literal["oldest", "at", "after", "end"] = match[1] or match[2]  # type: ignore[assignment]
        seen, held = (None if part is None else int(part) for part in match.group(4, 5))
        return cls(kind, int(match[3] or 0), seen, held)


END = ShardPosition("end")


@dataclass(frozen=True, slots=True)
class RangeLimit:
    """Where a range ends at the latest."""

    until_ms: int | None  # None: at the end of a closed shard
    events: int | None = None

    @property
    def text(self) -> str:
        name = "end" if self.until_ms is None else f"until:{self.until_ms}"
        return name if self.events is None else f"{name},{self.events}"

    def cut(self, events: int) -> RangeLimit:
        """The same, and after so many events at the latest."""
        return replace(self, events=events if self.events is None else min(events, self.events))

    @classmethod
    def parse(cls, text: str) -> RangeLimit:
        match = _LIMIT.fullmatch(text)
        if match is None:
            raise InvalidError(
                f"position `{text}`: is none of Kinesis: give oldest, at:<ms>, after:<sequence>, "
                "until:<ms> or end"
            )
        until, events = (None if part is None else int(part) for part in match.groups())
        return cls(until, events)


def is_before(one: str, other: str) -> bool:
    """Whether a position is strictly before another one of the same shard, as far as is known.

    A place is before a time unless all that came in before it is read; and before the first place
    of its shard if records may have come in behind it that are no longer held.
    """
    if _is_time(one):
        return _is_time(other) and _until_ms(one) < _until_ms(other)
    here = ShardPosition.parse(one)
    if _is_time(other):
        if here.kind == "end":
            return False
        known_ms = here.value if here.kind == "at" else -1
        return max(known_ms, here.seen_ms or 0) < _until_ms(other)
    there = ShardPosition.parse(other)
    if there.held_ms is not None:
        return here.kind != "end" and here.seen_ms is not None and here.seen_ms < there.held_ms
    return here.order < there.order


def _is_time(text: str) -> bool:
    return text.startswith("until:")


def _until_ms(text: str) -> int:
    return RangeLimit.parse(text).until_ms or 0
