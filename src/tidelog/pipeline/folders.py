"""Which time a date folder stands for, told from its name and one of the times in it.

A folder is *dated* when its name is what the layout makes of the times in it, and when no later
time gets the same name again: ``dt=2026-11-15``, ``red/2026/11``, but not ``offset=10000`` nor
``hr=07`` alone. A folder of hours lies in one of days, and both are dated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from zoneinfo import ZoneInfo

from tidelog.codec.parsers import LayoutSettings

__all__ = ["DateFolders", "Span"]

_DAYS_MAX = 400  # more than a year: what does not change within it is no name of a time
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SAMPLE = datetime(2028, 1, 15)  # noqa: DTZ001 - in a month of 31 days, and a year of 366
_ZERO = datetime(1970, 1, 1)  # noqa: DTZ001 - on the zone's own clocks
_SLACK = timedelta(days=1)  # more than clocks are ever put back by
_UNITS = (timedelta(days=1), timedelta(hours=1), timedelta(minutes=1))


@dataclass(frozen=True, slots=True)
class Span:
    """A dated folder, and until when events belong in it."""

    folder: str
    end_ms: int
    length_ms: int


@dataclass(frozen=True, slots=True)
class _Level:
    """Folders of days, of hours in them, or of minutes."""

    format: str
    unit: timedelta
    parts: int  # that its name has in all


class DateFolders:
    """Reads the names that one layout makes."""

    def __init__(self, layout: LayoutSettings) -> None:
        self._zone = ZoneInfo(layout.time_zone)
        every = (layout.date_format, layout.hour_format, layout.minute_format)
        depth = 1 + ("day", "hour", "minute").index(layout.granularity)
        names = accumulate(every[:depth], lambda above, name: f"{above}/{name}")
        self._levels = [
            _Level(name, unit, name.count("/") + 1)
            for name, unit in zip(names, _UNITS, strict=False)
        ]
        self._known: dict[str, tuple[Span, ...]] = {}

    def spans(self, folder: str, time_ms: int) -> tuple[Span, ...]:
        """The dated folders that this one is or lies in; ``time_ms`` is a time of an event in it.

        Empty where the folder is not dated.
        """
        if folder not in self._known:
            self._known[folder] = tuple(self._spans(folder, time_ms))
        return self._known[folder]

    def _spans(self, folder: str, time_ms: int) -> Iterator[Span]:
        parts = folder.split("/")
        above = len(parts) - self._levels[-1].parts
        if time_ms < 0 or above < 0:
            return
        moment = (_EPOCH + timedelta(milliseconds=time_ms)).astimezone(self._zone)
        for level in self._levels:
            name = "/".join(parts[above : above + level.parts])
            span = _span(level, name, moment.replace(tzinfo=None))
            if span is None:
                return
            first, end = (self._utc_ms(local) for local in span)
            yield Span("/".join(parts[: above + level.parts]), end, end - first)

    def _utc_ms(self, local: datetime) -> int:
        """When the zone's clocks show this for the last time, or would if they did not jump."""
        both = (local.replace(tzinfo=self._zone, fold=fold) for fold in (0, 1))
        return max((moment - _EPOCH) // timedelta(milliseconds=1) for moment in both)


def _span(level: _Level, name: str, moment: datetime) -> tuple[datetime, datetime] | None:
    """The first time that has this name and the first after it that has not; None: not dated."""
    if moment.strftime(level.format) != name:
        return None
    try:
        first = moment - (moment - _ZERO) % level.unit
        while (first - level.unit).strftime(level.format) == name:
            first -= level.unit
            if moment - first > timedelta(days=_DAYS_MAX):
                return None
        end = first + level.unit
        while end.strftime(level.format) == name:
            end += level.unit
            if end - moment > timedelta(days=_DAYS_MAX):
                return None
        again = (first + timedelta(days=day) for day in range(_DAYS_MAX))
        if any(each >= end and each.strftime(level.format) == name for each in again):
            return None
    except OverflowError:
        return None  # the year 9999 has no end that a clock could tell
    return first, end
