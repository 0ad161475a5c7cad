"""P1 to P3 and P7 in bad worlds: many seeds, and every planted bug is caught."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.sim.__main__ import WORLDS
from tests.sim.planted import BUGS, SEEDS_MAX, notices, seeds_needed
from tests.support.rounds import rounds
from tests.test_docs import table_after
from tidelog.testing.faults import Fault

SEEDS = {
    "protocols": 40,
    "clients": 60,
    "lossy": 20,
    "denied": 20,
    "signals": 20,
    "topics": 40,
    "members": 20,
    "rollback": 40,
}
LISTS = [
    w for w in SEEDS if w not in ("lossy", "denied", "signals", "members")
]  # those are smaller


@pytest.mark.parametrize("block", rounds(4, every=4))
@pytest.mark.parametrize("world", SEEDS)
def test_nothing_acknowledged_is_lost_doubled_or_out_of_order(world: str, block: int) -> None:
    for seed in range(block, SEEDS[world], 4):
        WORLDS[world](seed).run()


@pytest.mark.parametrize("world", SEEDS)
def test_one_seed_runs_the_same_twice(world: str) -> None:
    first, second = WORLDS[world](4711), WORLDS[world](4711)
    assert first.run() == second.run()
    assert first.scheduler.trace == second.scheduler.trace
    assert first.acknowledged() == second.acknowledged()


@pytest.mark.parametrize("world", LISTS)
def test_every_kind_of_fault_happens(world: str) -> None:
    counts: Counter[Fault] = Counter()
    for seed in range(1_000, 1_008):
        counts += WORLDS[world](seed).run()
    assert all(counts[fault] for fault in Fault if fault is not Fault.DENY)


def test_credentials_expire_after_lost_replies() -> None:
    counts: Counter[Fault] = Counter()
    for seed in range(1_000, 1_004):
        counts += WORLDS["denied"](seed).run()
    assert counts[Fault.DENY]
    assert counts[Fault.LOSE_REPLY]


def documented_bugs() -> list[tuple[str, ...]]:
    return table_after("docs/guarantees.md", "### Bugs planted into the log")


def test_document_lists_the_planted_bugs() -> None:
    rows = documented_bugs()
    assert [row[0] for row in rows] == list(BUGS)
    assert [row[1] for row in rows] == [bug.breaks for bug in BUGS.values()]
    assert all(1 <= int(row[2]) <= SEEDS_MAX for row in rows)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_caught(bug: str, stale_seed: Callable[[str], None]) -> None:
    """By the seed that the document names, which saves time, or by any other."""
    seeds = {row[0]: int(row[2]) for row in documented_bugs()}
    if not notices(BUGS[bug], seeds[bug] - 1):
        stale_seed(bug)
        assert seeds_needed(BUGS[bug]) is not None, f"no seed notices: {bug}"
