"""P1 to P3 in a bad world: many seeds, and every planted bug is caught."""

from __future__ import annotations

import pytest

from tests.sim.planted import BUGS
from tests.sim.world import World
from tidelog.errors import TidelogError
from tidelog.testing.faults import Fault

SEEDS = 200
BUG_SEEDS = 60


@pytest.mark.parametrize("block", range(10))
def test_nothing_acknowledged_is_lost_doubled_or_out_of_order(block: int) -> None:
    each = SEEDS // 10
    for seed in range(block * each, (block + 1) * each):
        World(seed).run()


def test_one_seed_runs_the_same_twice() -> None:
    first, second = World(4711), World(4711)
    assert first.run() == second.run()
    assert first.scheduler.trace == second.scheduler.trace
    assert first.book.acknowledged == second.book.acknowledged


def test_every_kind_of_fault_happens() -> None:
    counts = sum((World(seed).run() for seed in range(1_000, 1_010)), World(0).faults.counts)
    assert all(counts[fault] for fault in Fault)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str) -> None:
    for seed in range(BUG_SEEDS):
        try:
            World(seed, BUGS[bug]).run()
        except (AssertionError, TidelogError):
            return
    pytest.fail(f"{BUG_SEEDS} seeds did not notice: {bug}")
