"""Positions in a Kinesis shard, which are not numbers: Kinesis does not say where a shard ends.

A *place* is where reading resumes::

    oldest           at the oldest record that Kinesis still has
    at:<ms>          at the first record that arrived at this time or later
    after:<sequence> after a record
    end              after the last record of a closed shard

``@<ms>`` after a place means that all records which arrived before that time are read. With the
retention of the stream this shows whether records may be lost: Kinesis itself silently begins at
its oldest record if asked for a deleted one. ``^<ms>`` after the first place of a shard means that
records from before that time are deleted.

A *limit* is ``until:<ms>``, the time up to which to read, or ``end``. ``,<n>`` after it ends a
range after about n events. The end of an open shard is the current time.
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
    """Where reading resumes."""

    kind: Literal["oldest", "at", "after", "end"]
    value: int = 0  # a time or a sequence number
    seen_ms: int | None = None  # everything that arrived before this is read
    held_ms: int | None = None  # everything that arrived before this is deleted

    @property
    def text(self) -> str:
        name = f"{self.kind}:{self.value}" if self.kind in ("at", "after") else self.kind
        if self.held_ms is not None:
            return f"{name}^{self.held_ms}"
        return name if self.seen_ms is None else f"{name}@{self.seen_ms}"

    @property
    def order(self) -> tuple[int, int]:
        """Returns a key that rises along a shard. Times and sequence numbers do not compare."""
        return _ORDER.index(self.kind), self.value

    def seen(self, time_ms: int) -> ShardPosition:
        """Returns the same place, with everything that arrived before a time read."""
        return replace(self, seen_ms=max(0, time_ms), held_ms=None)

    @classmethod
    def parse(cls, text: str) -> ShardPosition:
        """Parses a place.

        A limit becomes the place of its time, where a reader of "newest" begins.
        """
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
        """Returns the same limit, but after at most this many events."""
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
    """Returns whether a position is strictly before another of the same shard, if known.

    A place is before a time unless everything that arrived before that time is read. It is before
    the first place of its shard if records after it may be deleted.
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
