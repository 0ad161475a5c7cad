"""How times become folders: what a user may choose, checked when it is chosen."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from tidelog.codec.parsers.names import path_problem
from tidelog.errors import InvalidError
from tidelog.model.address import nearest

__all__ = ["LayoutSettings"]

_GRANULARITIES_MS = {"day": 86_400_000, "hour": 3_600_000, "minute": 60_000}
_DIRECTIVES = set("YymdHMjGVu%")  # numbers alone: the names of months depend on the machine
_SAMPLE = datetime(2026, 11, 15, 10, 30, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class LayoutSettings:
    """How times become folders. Plain values that pickle."""

    granularity: str = "day"  # day, hour or minute: how fine the folders are
    date_format: str = "dt=%Y-%m-%d"  # names as Hive reads them; a / makes two folders
    hour_format: str = "hr=%H"
    minute_format: str = "min=%M"
    time_zone: str = "UTC"  # whose clocks the names tell; two hours share one when they go back

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
        for name in ("date_format", "hour_format", "minute_format"):
            _check_format(name, getattr(self, name))

    @property
    def unit_ms(self) -> int:
        """How long the finest folder lasts."""
        return _GRANULARITIES_MS[self.granularity]

    @property
    def path_format(self) -> str:
        """The formats that this granularity has, one folder below the other."""
        every = (self.date_format, self.hour_format, self.minute_format)
        return "/".join(every[: list(_GRANULARITIES_MS).index(self.granularity) + 1])


def _check_format(name: str, text: str) -> None:
    unknown = [each for each in re.findall(r"%(.?)", text, re.DOTALL) if each not in _DIRECTIVES]
    if unknown:
        raise InvalidError(
            f"setting {name}: has `%{unknown[0]}`: it takes %{' %'.join(sorted(_DIRECTIVES))}"
        )
    problem = path_problem(_SAMPLE.strftime(text))
    if problem:
        raise InvalidError(f"setting {name}: `{text}` {problem}: give plain names")
