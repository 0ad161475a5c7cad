"""``python -m bench [SUITE…]``: run benchmark suites and print their tables."""

from __future__ import annotations

import sys

from bench import (
    archive,
    console,
    ground,
    journal,
    log,
    maintenance,
    playback,
    scylla,
    serve,
    spark,
    startup,
)
from bench.measure import show
from bench.rates import show_rates

SUITES = {
    "startup": lambda: show_rates("startup", startup.run()),
    "ground": lambda: show("ground", ground.run()),
    "log": lambda: show_rates("log", log.run()),
    "serve": lambda: show_rates("serve", serve.run()),
    "console": lambda: show_rates("console", console.run()),
    "spark": lambda: show_rates("spark", spark.run()),
    "scylla": lambda: show_rates("scylla", scylla.run()),
    "archive": lambda: show_rates("archive", archive.run()),
    "journal": lambda: show_rates("journal", journal.run()),
    "maintenance": lambda: show_rates("maintenance", maintenance.run()),
    "playback": lambda: show_rates("playback", playback.run()),
}


def main(names: list[str]) -> int:
    """Run the named suites, or all."""
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        print(f"unknown suite {unknown[0]}: give {', '.join(SUITES)}", file=sys.stderr)
        return 2
    for name in names or SUITES:
        SUITES[name]()
    return 0


if __name__ == "__main__":  # not in the processes that a suite starts
    sys.exit(main(sys.argv[1:]))
