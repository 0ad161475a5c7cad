"""Positions in a change log: a generation of streams, and a time in it.

``<generation>:<time>``, both in milliseconds, padded so that their texts sort as they do. All
changes before that time are read, all from it on are not; so a position is also the end of one
window and the start of the next. Times are those of the changes.

``^<time>`` behind the first position of a group tells how far back changes are held. A position is
before such a one if changes behind it may be gone, and not merely if it is earlier.

A limit is ``until:`` and a position; ``,<n>`` behind it ends a range after the window in which
about so many changes have come. The end of a log is such a limit, which follows the clock: it is
before no position, since a clock that was set back has taken nothing away.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tidelog.errors import InvalidError

__all__ = ["Place", "is_before"]

_DIGITS = 15
_PLACE = re.compile(r"(until:)?(\d{15}):(\d{15})(?:\^(\d{15}))?(?:,(\d{1,15}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Place:
    """Where reading goes on, or where it ends."""

    generation_ms: int
    time_ms: int
    held_ms: int | None = None  # what was changed before is no longer held
    events: int | None = None  # of a limit
    is_limit: bool = False

    @property
    def text(self) -> str:
        held = "" if self.held_ms is None else f"^{self.held_ms:0{_DIGITS}}"
        events = "" if self.events is None else f",{self.events}"
        until = "until:" if self.is_limit else ""
        return f"{until}{self.generation_ms:0{_DIGITS}}:{self.time_ms:0{_DIGITS}}{held}{events}"

    @property
    def order(self) -> tuple[int, int]:
        """Rises along a change log."""
        return self.time_ms, self.generation_ms

    @property
    def plain(self) -> Place:
        """The same place, and nothing else."""
        return Place(self.generation_ms, self.time_ms)

    def held(self, held_ms: int) -> Place:
        """The same as the first one, with how far back changes are held."""
        return Place(self.generation_ms, self.time_ms, held_ms)

    def limit(self, events: int | None = None) -> Place:
        """The same as a limit, perhaps after so many events."""
        return Place(self.generation_ms, self.time_ms, events=events, is_limit=True)

    @classmethod
    def parse(cls, text: str) -> Place:
        match = _PLACE.fullmatch(text)
        if match is None:
            raise InvalidError(
                f"position `{text}`: is none of a change log: give <generation>:<time>, each in "
                f"{_DIGITS} digits of milliseconds"
            )
        held, events = (None if part is None else int(part) for part in match.group(4, 5))
        return cls(int(match[2]), int(match[3]), held, events, match[1] is not None)


def is_before(one: str, other: str) -> bool:
    """Whether a position is strictly before another one of the same log."""
    here, there = Place.parse(one), Place.parse(other)
    if there.held_ms is not None:
        return here.time_ms < there.held_ms
    if here.is_limit and not there.is_limit:
        return False
    return here.order < there.order
