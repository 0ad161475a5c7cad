"""Charts of the console: series of figures over time, and their lines and bars as SVG coordinates.

A page draws what it gets: points within a view box, with labels beside them, and the same in words.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tidelog.model.event import to_iso
from tidelog.server.console.format import short

__all__ = ["BarChart", "Chart", "Series", "bar_chart", "line_chart"]

_POINTS_MAX = 240
_STEP_MS_MAX = 60_000  # beyond this the oldest points go


class Series:
    """A figure over time, in a bounded number of points: the longer, the coarser."""

    __slots__ = ("_step_ms", "times_ms", "values")

    def __init__(self) -> None:
        self.times_ms = array("q")
        self.values = array("d")
        self._step_ms = 1_000

    def add(self, time_ms: int, value: float) -> None:
        """Adds a point; one that comes soon after the last replaces it."""
        times, values = self.times_ms, self.values
        if len(times) > 1 and time_ms - times[-2] < self._step_ms:
            times[-1], values[-1] = time_ms, value
            return
        times.append(time_ms)
        values.append(value)
        if len(times) <= _POINTS_MAX:
            return
        if self._step_ms < _STEP_MS_MAX:
            self._step_ms *= 2
            del times[1:-1:2], values[1:-1:2]
        else:
            del times[0], values[0]

    @property
    def last(self) -> float | None:
        """Returns the newest value."""
        return self.values[-1] if self.values else None

    def rates(self) -> Series:
        """Returns the growth per second from point to point; a fall counts as 0."""
        found = Series()
        points = list(zip(self.times_ms, self.values, strict=True))
        for (before_ms, before), (time_ms, value) in itertools.pairwise(points):
            passed_ms = time_ms - before_ms
            if passed_ms > 0:
                found.times_ms.append(time_ms)
                found.values.append(max(0.0, value - before) * 1000 / passed_ms)
        return found

    def rate(self, over_ms: int = 10_000) -> float | None:
        """Returns the recent growth per second; None before there are two points."""
        times, values = self.times_ms, self.values
        if len(times) < 2:
            return None
        first = len(times) - 2
        while first > 0 and times[-1] - times[first] < over_ms:
            first -= 1
        passed_ms = times[-1] - times[first]
        return max(0.0, values[-1] - values[first]) * 1000 / passed_ms if passed_ms > 0 else None


@dataclass(frozen=True, slots=True)
class Chart:
    """One line with its area, for a view box of a given size."""

    line: str
    area: str
    width: int
    height: int
    highest: str
    first: str
    last: str
    says: str  # the same in words, for who does not see it

    @property
    def is_empty(self) -> bool:
        return not self.line


def line_chart(series: Series, width: int = 600, height: int = 120) -> Chart:
    """Returns the chart of a series, from 0 to its highest value."""
    times, values = series.times_ms, series.values
    if len(times) < 2 or times[-1] == times[0]:
        return Chart("", "", width, height, "", "", "", "no points yet")
    top = max(1e-9, *values)
    points = [
        f"{(time_ms - times[0]) * width / (times[-1] - times[0]):.1f},"
        f"{height - 2 - value * (height - 6) / top:.1f}"
        for time_ms, value in zip(times, values, strict=True)
    ]
    line = " ".join(points)
    area = f"0,{height} {line} {width},{height}"
    first, last = to_iso(times[0]), to_iso(times[-1])
    now, highest = _word(values[-1]), _word(max(values))
    says = f"from {first[11:19]} to {last[11:19]}: now {now}, up to {highest}"
    return Chart(line, area, width, height, highest, first, last, says)


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars over time, for a view box of a given size."""

    bars: tuple[tuple[float, float, float, float, str], ...]  # x, y, width, height, in words
    cuts: tuple[float, ...]  # x of bars that are larger than the others allow
    width: int
    height: int
    highest: str
    first: str
    last: str
    says: str


def bar_chart(counts: Sequence[tuple[int, int]], width: int = 1200, height: int = 120) -> BarChart:
    """Returns the chart of counts by the time at which each bar begins, from 0 to the highest."""
    highest = max((count for _, count in counts), default=0)
    if not highest:
        return BarChart((), (), width, height, "", "", "", "nothing yet")
    each = width / len(counts)
    # One or two large bars, such as those of a first run, would flatten all others: bars beyond 8
    # times the usual height are cut.
    usual = sorted(count for _, count in counts if count)
    high9 = usual[max(0, min((len(usual) - 1) * 9 // 10, len(usual) - 3))]
    most = 2 * high9 if len(usual) > 4 and highest > 8 * high9 else highest
    bars = tuple(
        (
            round(at * each + each * 0.08, 2),
            round(height - high, 2),
            round(each * 0.84, 2),
            round(high, 2),
            f"{count:,} from {to_iso(time_ms)}",
        )
        for at, (time_ms, count) in enumerate(counts)
        if (high := max(2.0, min(count, most) * (height - 4) / most) if count else 0.0)
    )
    cuts = tuple(round(at * each, 2) for at, (_, count) in enumerate(counts) if count > most)
    first, last = (to_iso(counts[at][0]) for at in (0, -1))
    says = f"from {first} to {last}: up to {highest:,}"
    return BarChart(bars, cuts, width, height, short(highest), first, last, says)


def _word(value: float) -> str:
    return f"{value:.2g}" if 0 < value < 10 and value % 1 else short(value)
