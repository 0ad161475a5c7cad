"""Rates of whole runs: each contender in turn, several rounds, medians and their ratios."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table

from bench.measure import RESULTS


@dataclass
class Rate:
    """One contender: how many units a second, in each round."""

    what: str
    rounds: list[float] = field(default_factory=list)
    unit: str = "events/s"
    peer: str = ""
    ratio: float | None = None
    goal: float | None = None  # the ratio is to be so high
    limit: float | None = None  # the median is to be below
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def verdict(self) -> str:
        if self.limit is not None:
            return "ok" if self.median < self.limit else "ABOVE"
        if self.goal is None or self.ratio is None:
            return ""
        return "ok" if self.ratio >= self.goal else "BELOW"


def contest(contenders: dict[str, Callable[[], float]], rounds: int = 3) -> dict[str, Rate]:
    """Run each contender once a round; the first round of each warms up and is not counted."""
    rates = {name: Rate(name) for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            per_s = run()
            if number:
                rates[name].rounds.append(per_s)
    return rates


def against(rate: Rate, peer: Rate, goal: float) -> Rate:
    """Note the ratio to a peer of the same run."""
    rate.peer, rate.goal = peer.what, goal
    rate.ratio = rate.median / peer.median
    return rate


def _goal(rate: Rate) -> str:
    if rate.limit is not None:
        return f"< {rate.limit:,g}"
    return "" if rate.goal is None else f"{rate.goal:g}"


def show_rates(suite: str, rates: list[Rate]) -> None:
    """Print the table, and write the JSON beside it."""
    table = Table(title=f"{suite} ({os.cpu_count()} cores, {platform.machine()})", box=None)
    for name in ("what", "median", "unit", "ratio", "to", "goal", "", "note"):
        table.add_column(name, justify="right" if name in ("median", "ratio", "goal") else "left")
    for rate in rates:
        table.add_row(
            rate.what,
            f"{rate.median:,.1f}" if rate.median < 1_000 else f"{rate.median:,.0f}",
            rate.unit,
            "" if rate.ratio is None else f"{rate.ratio:.2f}",
            rate.peer,
            _goal(rate),
            rate.verdict,
            rate.note,
        )
    Console(width=150).print(table)
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{suite}.json"
    rows = [asdict(rate) | {"median": rate.median, "verdict": rate.verdict} for rate in rates]
    file.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"written to bench/results/{file.name}")
