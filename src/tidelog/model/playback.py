"""The types of a playback: its range, what is fixed when it begins, and the rows of a named one."""

from __future__ import annotations

import re
from bisect import bisect_right
from datetime import datetime

from tidelog.errors import InvalidError
from tidelog.model import limits
from tidelog.model.decoding import Persisted
from tidelog.model.event import check_timestamp, to_iso
from tidelog.model.times import moment_ms

__all__ = [
    "Cursor",
    "Floors",
    "Pin",
    "PlaybackPin",
    "PlaybackState",
    "Time",
    "TimeRange",
    "check_playback_name",
    "time_range",
    "whole_range",
]

Time = str | int | datetime | None
"""ISO 8601 or relative text, milliseconds, an aware datetime, or None for the default.

The start can be ``earliest`` and the end ``latest``: the first and the newest event.
"""

_DEFAULT_MS = 15 * 60 * 1000
_LAST_END = re.compile(r"10000-01-01(T00:00(:00(\.0+)?)?(Z|\+00:00)?)?")  # see `to_iso`
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class TimeRange(Persisted, frozen=True):
    """Times of ``[start, end)``."""

    start_ms: int
    end_ms: int


class Cursor(Persisted, frozen=True, order=True, array_like=True):
    """An event's place in a playback: ordered by time, then partition and offset."""

    time_ms: int
    partition: int
    offset: int


class Floors(Persisted, frozen=True, array_like=True):
    """The lowest offset of a partition that a playback still needs, by its progress."""

    until_ms: tuple[int, ...] = ()  # ascending; the runs of an entry are needed up to its time
    least: tuple[int, ...] = ()  # the lowest offset of the runs of that entry and later ones

    def needed(self, time_ms: int) -> int | None:
        """Returns the lowest offset that events of this time or later may have; None if none."""
        at = bisect_right(self.until_ms, time_ms)
        return self.least[at] if at < len(self.least) else None


class Pin(Persisted, frozen=True):
    """What a playback plays, fixed when it begins: later events are not included."""

    incarnation: str  # of the topic
    range: TimeRange
    starts: tuple[int, ...]  # the first offset of each partition
    ends: tuple[int, ...]
    floors: tuple[Floors, ...]


class PlaybackPin(Persisted, frozen=True):
    """The ``pin`` row of a named playback; written once."""

    topic: str
    sink: str  # URL
    target: str  # incarnation of the topic that it plays into; empty for other sinks
    asked: tuple[str, str, str]  # start, end and as-of as given
    pin: Pin
    began_ms: int
    generation: int = 1  # counts the playbacks of its name, including this one
    home: str = ""  # that plays it, if its sink is outside; empty: inside, or none


class PlaybackState(Persisted, frozen=True):
    """The ``state`` row of a named playback: its lease and its progress."""

    owner: str = ""
    epoch: int = 0
    beat: int = 0
    mark: str = ""  # of the owner's process
    cursor: Cursor | None = None  # the last event known to be sent
    number: int = 0  # of the first event after it
    until: Cursor | None = None  # the last event of the lot in progress
    until_number: int = 0  # of the first event after that lot
    reached: int = 0  # the length of a file at the cursor
    finished_ms: int = 0  # when everything was sent
    generation: int = 1  # of the pin that it belongs to; without one, of the next


def time_range(start: Time, end: Time, now_ms: int) -> TimeRange:
    """Returns ``[start, end)``; by default the last 15 minutes. Raises ``InvalidError``."""
    is_last = isinstance(end, str) and (end == "latest" or _LAST_END.fullmatch(end))
    if end == limits.TIMESTAMP_MS_END or is_last:
        # No event has that time, but it is a valid end: the only one after the last millisecond.
        end_ms = limits.TIMESTAMP_MS_END
    else:
        end_ms = now_ms if end is None else _time_ms(end, now_ms)
    if start == "earliest":
        start = 0
    start_ms = max(0, end_ms - _DEFAULT_MS) if start is None else _time_ms(start, now_ms)
    if start_ms > end_ms:
        raise InvalidError(
            f"range from {_as_text(start, start_ms)} to {_as_text(end, end_ms)}: runs backwards: "
            "give a start before the end"
        )
    return TimeRange(start_ms, end_ms)


def whole_range(start: Time, end: Time, now_ms: int) -> TimeRange:
    """Returns the same, by default all times."""
    last = limits.TIMESTAMP_MS_END if end is None else end
    return time_range(0 if start is None else start, last, now_ms)


def check_playback_name(name: str) -> None:
    """Raises ``InvalidError`` for a name that cannot be part of a row or a command line."""
    if not _NAME.fullmatch(name) or len(name) > limits.PLAYBACK_NAME_MAX:
        raise InvalidError(
            f"playback name `{name[:80]}`: give 1 to {limits.PLAYBACK_NAME_MAX} letters, digits, "
            "`.`, `_` or `-`, beginning with a letter, a digit or `_`"
        )


def _as_text(given: Time, time_ms: int) -> str:
    """Returns a time as typed, or else in ISO 8601."""
    if isinstance(given, str):
        return f"`{given}`"
    return "the end" if time_ms == limits.TIMESTAMP_MS_END else to_iso(time_ms)


def _time_ms(time: str | int | datetime, now_ms: int) -> int:
    return moment_ms(time, now_ms) if isinstance(time, str) else check_timestamp(time)
