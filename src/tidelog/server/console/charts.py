"""Lines on a page: points of a series as the coordinates of an SVG, and the labels beside it."""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass

from tidelog.server.console.showing import clock_time, short

__all__ = ["Chart", "Series", "line_chart"]

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
        """One more point; one that comes soon after the last takes its place."""
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
        """The newest value."""
        return self.values[-1] if self.values else None

    def rates(self) -> Series:
        """How much it grew each second, from point to point; what falls counts as 0."""
        found = Series()
        points = list(zip(self.times_ms, self.values, strict=True))
        for (before_ms, before), (time_ms, value) in itertools.pairwise(points):
            passed_ms = time_ms - before_ms
            if passed_ms > 0:
                found.times_ms.append(time_ms)
                found.values.append(max(0.0, value - before) * 1000 / passed_ms)
        return found

    def rate(self, over_ms: int = 10_000) -> float | None:
        """How much it grew each second, lately; None before two points are there."""
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
    """The chart of a series, from 0 to its highest value."""
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
    first, last = clock_time(times[0]), clock_time(times[-1])
    says = f"from {first} to {last}: now {_word(values[-1])}, at most {_word(max(values))}"
    return Chart(line, area, width, height, _word(max(values)), first, last, says)


def _word(value: float) -> str:
    return f"{value:.2g}" if 0 < value < 10 and value % 1 else short(value)
