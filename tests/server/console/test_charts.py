"""The console's charts: bounded series, lines that need two points, and bars of any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.server.console.charts import Series, bar_chart, line_chart


@given(st.lists(st.integers(1, 100_000), min_size=2, max_size=1_000))
def test_a_series_stays_small_and_keeps_its_ends(steps: list[int]) -> None:
    series, now_ms, total = Series(), 0, 0
    for step in steps:
        now_ms += step
        total += step
        series.add(now_ms, total)
    assert len(series.times_ms) == len(series.values) <= 241
    assert list(series.times_ms) == sorted(series.times_ms)
    assert (series.times_ms[-1], series.last) == (now_ms, total)
    assert all(abs(rate - 1000) < 1 for rate in series.rates().values)
    line_chart(series)


def test_a_series_of_a_day_is_coarse_and_of_a_minute_fine() -> None:
    series = Series()
    for second in range(86_400):
        series.add(second * 1000, second)
    assert len(series.times_ms) <= 241
    assert series.times_ms[-1] - series.times_ms[0] > 3 * 3_600_000
    short = Series()
    for second in range(60):
        short.add(second * 1000, second)
    assert len(short.times_ms) == 60


def test_a_chart_needs_two_points() -> None:
    series = Series()
    assert line_chart(series).is_empty
    series.add(1000, 5)
    assert line_chart(series).is_empty
    assert series.rate() is None
    series.add(3000, 9)
    assert series.rate() == 2.0
    chart = line_chart(series, 100, 50)
    assert chart.line.startswith("0.0,")
    assert chart.highest == "9"
    falling = Series()
    for at, value in ((0, 100.0), (2000, 0.0)):
        falling.add(at, value)
    assert falling.rate() == 0.0  # a topic was deleted: nothing came in


@pytest.mark.parametrize("large", [[50_000], [50_000, 13_000]])
def test_a_first_run_does_not_flatten_the_bars_after_it(large: list[int]) -> None:
    counts = [*large, 300, 280, 310, 290, 305, 295, 310]
    chart = bar_chart([(1_000 * at, count) for at, count in enumerate(counts)])
    assert len(chart.cuts) == len(large)
    assert min(high for _, _, _, high, _ in chart.bars) > chart.height / 3


def test_bars_of_one_size_are_not_cut() -> None:
    assert bar_chart([(1_000 * at, 100 + at) for at in range(20)]).cuts == ()
    assert bar_chart([(0, 9), (1_000, 100), (2_000, 0)]).cuts == (), "too few to say what is usual"
