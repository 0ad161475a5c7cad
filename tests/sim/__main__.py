"""``python -m tests.sim [SEEDS [FIRST]]``: run many seeds of the log's simulation, and count."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

from tests.sim.world import World
from tidelog.testing.faults import Fault


def main(seeds: int, first: int) -> int:
    """Run the seeds; print what went wrong in them, by kind, and stop at the first that fails."""
    began_s = time.monotonic()
    faults: Counter[Fault] = Counter()
    acknowledged = restarts = steps = 0
    for seed in range(first, first + seeds):
        world = World(seed)
        try:
            faults += world.run()
        except BaseException:
            print(f"seed {seed} failed: python -m tests.sim 1 {seed}", file=sys.stderr)
            raise
        acknowledged += len(world.book.acknowledged)
        restarts += world.restarts
        steps += len(world.scheduler.trace)
    report = {
        "seeds": seeds,
        "steps": steps,
        "acknowledged events": acknowledged,
        "restarts": restarts,
        "violations": 0,
        "seconds": round(time.monotonic() - began_s, 1),
        "faults": {fault.value: faults[fault] for fault in Fault if fault is not Fault.NONE},
    }
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:]]
    sys.exit(main(*(numbers + [2_000, 0][len(numbers) :])))
