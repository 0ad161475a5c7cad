"""P1, P2, P5, P5a and P6 in a bad world: many seeds, and every planted bug is caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim.__main__ import WORLDS as ALL_WORLDS
from tests.sim.journal_home import HomeWorld
from tests.sim.journal_planted import BUGS, notices, seeds_until_caught
from tests.sim.journal_world import JournalWorld, Tally
from tests.sim.journal_worlds import AbsentWorld, AmendWorld, CopyWorld, LotsWorld, SweptWorld
from tests.sim.playback_world import PlaybackWorld
from tests.sim.recreate_world import RecreateWorld
from tests.support.rounds import rounds
from tests.test_docs import table_after

WORLDS: dict[type[JournalWorld], int] = {  # and how many seeds of each
    JournalWorld: 4,
    AmendWorld: 12,
    SweptWorld: 12,
    LotsWorld: 6,
    CopyWorld: 10,
    AbsentWorld: 10,
    PlaybackWorld: 6,
    RecreateWorld: 12,
}
BUG_SEEDS = 200


@pytest.mark.parametrize("block", rounds(2, every=2))
@pytest.mark.parametrize("world", WORLDS)
def test_nothing_is_lost_undone_doubled_or_left_behind(
    world: type[JournalWorld], block: int
) -> None:
    for seed in range(block, WORLDS[world], 2):
        world(seed).run()


@pytest.mark.parametrize("world", [AmendWorld, CopyWorld, PlaybackWorld])
def test_one_seed_runs_the_same_twice(world: type[JournalWorld]) -> None:
    first, second = world(4711), world(4711)
    assert first.run() == second.run()
    assert first.scheduler.trace == second.scheduler.trace
    assert first.truth.history == second.truth.history


def test_every_process_gets_something_done() -> None:
    worlds: list[HomeWorld] = []
    tally = Tally()
    for make in (JournalWorld, AbsentWorld, CopyWorld):
        for seed in range(1_000, 1_004):
            world = make(seed)
            world.run()
            worlds.append(world)
            for name, value in vars(world.tally).items():
                setattr(tally, name, getattr(tally, name) + value)
    assert all(value > 4 for value in vars(tally).values()), tally
    assert sum(world.restarts for world in worlds) > 4


def documented_bugs() -> list[tuple[str, ...]]:
    return table_after("docs/guarantees.md", "### Bugs planted into journals, copies and playback")


def test_document_lists_the_planted_bugs() -> None:
    rows = documented_bugs()
    names = {world: name for name, world in ALL_WORLDS.items()}
    assert [row[0] for row in rows] == list(BUGS)
    assert [row[1].strip("`") for row in rows] == [names[bug.world] for bug in BUGS.values()]
    assert all(1 <= int(row[2]) <= BUG_SEEDS for row in rows)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_caught(bug: str, stale_seed: Callable[[str], None]) -> None:
    """By the seed that the document names, which saves time, or by any other."""
    seeds = {row[0]: int(row[2]) for row in documented_bugs()}
    if not notices(BUGS[bug], seeds[bug] - 1):
        stale_seed(bug)
        assert seeds_until_caught(BUGS[bug], BUG_SEEDS), f"no seed notices: {bug}"
