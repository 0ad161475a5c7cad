"""How times become folders: the settings of a user, checked when they are set."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from tidelog.codec.parsers.names import path_problem
from tidelog.errors import InvalidError
from tidelog.model.address import nearest

__all__ = ["LayoutSettings", "layout_settings", "parts_of_events", "used_layout"]

_GRANULARITIES_MS = {"day": 86_400_000, "hour": 3_600_000, "minute": 60_000}
_DIRECTIVES = set("YymdHMjGVu%")  # only numbers: the names of months depend on the machine
_SAMPLE = datetime(2026, 11, 15, 10, 30, tzinfo=UTC)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class LayoutSettings:
    """How times become folders. Plain values that pickle."""

    granularity: str = "day"  # day, hour or minute: how fine the folders are
    date_format: str = "dt=%Y-%m-%d"  # names as Hive reads them; a / makes two folders
    hour_format: str = "hr=%H"
    minute_format: str = "min=%M"
    time_zone: str = "UTC"  # the zone of the names; two hours share one when clocks go back

    def __post_init__(self) -> None:
        if self.granularity not in _GRANULARITIES_MS:
            raise InvalidError(
                f"setting granularity: is `{self.granularity}`"
                f"{nearest(self.granularity, _GRANULARITIES_MS)}: give day, hour or minute"
            )
        try:
            ZoneInfo(self.time_zone)
        except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
            raise InvalidError(
                f"setting time_zone: `{self.time_zone}` is not known: give a name such as "
                "UTC or Europe/Berlin"
            ) from exc
        for name, needed in (("date_format", ""), ("hour_format", "%H"), ("minute_format", "%M")):
            _check_format(name, getattr(self, name), needed)
        columns = Counter(
            name.partition("=")[0] for name in self.path_format.split("/") if "=" in name
        )
        twice = [name for name, count in columns.items() if count > 1]
        if twice:
            raise InvalidError(
                f"folders `{self.path_format}`: two of them are called `{twice[0]}=`, and readers "
                "would take them for one column: give each format a name of its own"
            )

    @property
    def unit_ms(self) -> int:
        """Returns how long the finest folder lasts."""
        return _GRANULARITIES_MS[self.granularity]

    @property
    def path_format(self) -> str:
        """Returns the formats of this granularity, one folder below the other."""
        every = (self.date_format, self.hour_format, self.minute_format)
        return "/".join(every[: list(_GRANULARITIES_MS).index(self.granularity) + 1])

    def name_of(self, time_ms: int) -> str:
        """Returns the folder of a time."""
        moment = (_EPOCH + timedelta(milliseconds=time_ms)).astimezone(ZoneInfo(self.time_zone))
        shown = moment.replace(tzinfo=UTC) - _EPOCH  # by the zone's clocks
        unit = timedelta(milliseconds=self.unit_ms)
        return (_EPOCH + shown - shown % unit).strftime(self.path_format)


def parts_of_events(path: str, parser: str, settings: LayoutSettings, time_ms: int) -> int:
    """Returns how many leading parts of a folder's path are not a time or an offset.

    Values of events have filled these. ``time_ms`` is the parser's time of an event in it; -1:
    unknown.
    """
    if not path:
        return 0
    parts, name = path.split("/"), ""
    if not _makes_dates(parser):
        name = parts[-1] if parts[-1].startswith("offset=") else ""
    elif time_ms >= 0:
        try:
            name = settings.name_of(time_ms)
        except (OverflowError, ValueError):
            name = ""  # a time that no clock shows
    is_last = bool(name) and f"/{path}".endswith(f"/{name}")
    return len(parts) - (name.count("/") + 1 if is_last else 0)


def layout_settings(parser: str, given: Mapping[str, str]) -> LayoutSettings:
    """Returns the given settings, for the folders that a parser makes.

    Raises ``InvalidError`` for a setting that has no effect.
    """
    settings = LayoutSettings(**given)
    unused = sorted(given.keys() - used_layout(parser, given).keys())
    if parser and unused:  # a sink refuses those of a backup
        why = f"granularity is {settings.granularity}"
        if not _makes_dates(parser):
            why = f"parser `{parser}` makes no folders of dates"
        raise InvalidError(f"setting {unused[0]}: has no effect, as {why}: leave it out")
    return settings


def used_layout(parser: str, given: Mapping[str, str]) -> dict[str, str]:
    """Returns those of the given settings that have an effect."""
    if not _makes_dates(parser):
        return {}
    finer = {"day": ("hour_format", "minute_format"), "hour": ("minute_format",)}
    unused = finer.get(given.get("granularity", "day"), ())
    return {name: value for name, value in given.items() if name not in unused}


def _makes_dates(parser: str) -> bool:
    """Returns whether a parser, or the innermost of a split, makes names of times."""
    while parser.startswith("split:"):
        parser = parser.partition("|")[2]
    return bool(parser) and parser.partition(":")[0] != "offset"


def _check_format(name: str, text: str, needed: str) -> None:
    unknown = [each for each in re.findall(r"%(.?)", text, re.DOTALL) if each not in _DIRECTIVES]
    if unknown:
        raise InvalidError(
            f"setting {name}: has `%{unknown[0]}`: it takes %{' %'.join(sorted(_DIRECTIVES))}"
        )
    problem = path_problem(_SAMPLE.strftime(text))
    if problem:
        raise InvalidError(f"setting {name}: `{text}` {problem}: give plain names")
    if needed not in text:
        raise InvalidError(f"setting {name}: `{text}` has no {needed}: put it into the name")
