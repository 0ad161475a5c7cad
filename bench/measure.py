"""Measuring: calls in alternating slices, their rates and latencies, and how they are shown."""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@contextmanager
def scratch() -> Iterator[str]:
    """A folder for a benchmark's data: on the disk of the checkout, as /tmp may be memory."""
    build = Path(__file__).parents[1] / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build, prefix="bench-") as folder:
        yield folder


@dataclass
class Result:
    """One line of the table."""

    what: str
    backend: str
    per_s: float
    p50_ms: float
    p99_ms: float
    calls: int
    ratio: float | None = None  # to the peer of the same run
    peer: str = ""
    goal: float | None = None

    @property
    def verdict(self) -> str:
        if self.goal is None or self.ratio is None:
            return ""
        return "ok" if self.ratio >= self.goal else "BELOW"


class Timed:
    """Calls of one kind, with how long each took."""

    def __init__(self, call: Callable[[int], object]) -> None:
        self.call = call
        self.seconds: list[float] = []

    def run_for(self, seconds: float, calls_max: int) -> None:
        """Call again and again for this long."""
        end = time.perf_counter() + seconds
        done = 0
        while done < calls_max and (now := time.perf_counter()) < end:
            self.call(len(self.seconds))
            self.seconds.append(time.perf_counter() - now)
            done += 1

    def result(self, what: str, backend: str) -> Result:
        ordered = sorted(self.seconds)
        return Result(
            what=what,
            backend=backend,
            per_s=len(ordered) / sum(ordered),
            p50_ms=statistics.median(ordered) * 1000,
            p99_ms=ordered[int(len(ordered) * 0.99)] * 1000,
            calls=len(ordered),
        )


def measure(
    what: str, backend: str, call: Callable[[int], object], *, seconds: float = 2.0
) -> Result:
    """The rate of one call."""
    timed = Timed(call)
    timed.run_for(seconds / 10, 50)
    timed.seconds.clear()
    timed.run_for(seconds, 100_000)
    return timed.result(what, backend)


def beside(
    what: str,
    backend: str,
    call: Callable[[int], object],
    peer: tuple[str, Callable[[int], object]],
    *,
    goal: float,
    slices: int = 10,
    slice_s: float = 0.3,
) -> list[Result]:
    """The rate of a call and of its peer, in alternating slices; the ratio of the two."""
    mine, theirs = Timed(call), Timed(peer[1])
    for number in range(slices + 1):
        mine.run_for(slice_s, 10_000)
        theirs.run_for(slice_s, 10_000)
        if number == 0:  # the first slice only warms up
            mine.seconds.clear()
            theirs.seconds.clear()
    result, other = mine.result(what, backend), theirs.result(what, peer[0])
    result.ratio = result.per_s / other.per_s
    result.peer = peer[0]
    result.goal = goal
    return [result, other]


def show(suite: str, results: list[Result]) -> None:
    """Print the table, and write the JSON beside it."""
    table = Table(title=f"{suite} ({os.cpu_count()} cores, {platform.machine()})", box=None)
    for name in ("what", "backend", "per s", "p50 ms", "p99 ms", "ratio", "to", "goal", ""):
        table.add_column(name, justify="left" if name in ("what", "backend", "to") else "right")
    for result in results:
        table.add_row(
            result.what,
            result.backend,
            f"{result.per_s:,.0f}",
            f"{result.p50_ms:.3f}",
            f"{result.p99_ms:.3f}",
            "" if result.ratio is None else f"{result.ratio:.2f}",
            result.peer,
            "" if result.goal is None else f"{result.goal:.2f}",
            result.verdict,
        )
    Console(width=130).print(table)
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{suite}.json"
    file.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    print(f"written to {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}")
