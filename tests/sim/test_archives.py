"""P4, P4a and P5a in a bad world: many seeds, and every planted bug is caught."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.sim.__main__ import WORLDS
from tests.sim.archive_planted import BUGS, notices, seeds_until_caught
from tests.sim.archive_world import OTHERS, ArchivesWorld, Done
from tests.sim.archive_worlds import (
    CutsWorld,
    ErasureWorld,
    GenerationsWorld,
    HolesWorld,
    MarkersWorld,
    OrphansWorld,
    RemadeWorld,
)
from tests.sim.arrivals_world import ArrivalsWorld
from tests.sim.backups_world import BackupsWorld
from tests.sim.chains_world import ChainsWorld
from tests.sim.copies_world import CopiesWorld
from tests.sim.late_world import LateWorld
from tests.sim.moves_world import MovesWorld
from tests.sim.outside_world import OutsideWorld
from tests.sim.recorded_world import RecordedWorld
from tests.sim.restored_world import RestoredWorld
from tests.sim.returns_world import ReturnsWorld
from tests.sim.rotated_chains_world import RotatedChainsWorld
from tests.sim.rotation_world import RotationWorld
from tests.sim.staged_world import StagedDone, StagedWorld
from tests.sim.tasks_world import TasksWorld
from tests.sim.transforms_world import TransformsWorld
from tests.support.rounds import rounds
from tests.test_docs import table_after

SEEDS = 8
BUG_SEEDS = 200
FOCUSED = (
    GenerationsWorld,
    HolesWorld,
    BackupsWorld,
    ErasureWorld,
    OrphansWorld,
    RemadeWorld,
    CopiesWorld,
    MarkersWorld,
    TransformsWorld,
    ReturnsWorld,
    OutsideWorld,
    ArrivalsWorld,
    RecordedWorld,
    RestoredWorld,
)
# Seeds of these take less than a second.
SHORT = (ArchivesWorld, CutsWorld, RemadeWorld, StagedWorld)


@pytest.mark.parametrize("block", rounds(4, every=2))
def test_every_offset_is_accounted_for(block: int) -> None:
    for seed in range(block, SEEDS, 4):
        ArchivesWorld(seed).run()


@pytest.mark.parametrize("seed", rounds(4, every=4))
@pytest.mark.parametrize("world", FOCUSED, ids=lambda world: world.__name__)
def test_worlds_where_processes_meet_more_often_find_nothing(
    world: type[ArchivesWorld], seed: int
) -> None:
    world(seed).run()


def test_lines_of_rotated_files_are_archived_once() -> None:
    worlds = [RotationWorld(seed) for seed in range(6)]
    for world in worlds:
        world.run()
    assert sum(world.rotations for world in worlds) > 6


def test_chains_of_rotated_files_have_each_line_once() -> None:
    worlds = [RotatedChainsWorld(seed) for seed in range(3)]
    for world in worlds:
        world.run()
    assert sum(world.built.total() for world in worlds)


def test_batches_of_spark_are_stored_once_and_every_process_gets_something_done() -> None:
    done: Counter[str] = Counter()
    for number, seed in enumerate((*range(8), 1_013, *range(1_000, 1_064))):  # 1,013 proves
        world = StagedWorld(seed)
        world.run()
        done.update(vars(world.done))
        if number >= 8 and all(done.values()):
            break
    assert done.keys() == vars(StagedDone()).keys()
    assert all(done.values()), done


def test_ranges_that_are_cut_are_archived_once() -> None:
    done: Counter[str] = Counter()
    for seed in range(4):
        world = CutsWorld(seed)
        world.run()
        workers = vars(world.workers)
        done.update({name: workers[name] for name in ("tasks", "failed", "ended_early", "cuts")})
    assert all(done.values()), done


def test_tasks_of_erasures_that_meet_erase_everything() -> None:
    world = TasksWorld(2)
    world.run()
    assert min(world.done.searched, world.done.staged, world.done.replaced, world.done.proven)


def test_positions_values_and_parts_change_while_archives_are_driven() -> None:
    done: Counter[str] = Counter()
    for seed in (0, 1, 3):  # which have all of them
        world = MovesWorld(seed)
        world.run()
        done.update(vars(world.done))
    assert min(done[name] for name in ("redone", "moved", "skipped", "updated", "streamed")), done


def test_archives_ahead_of_their_source_wait_for_it() -> None:
    worlds = [ChainsWorld(seed) for seed in (1, 2)]
    for world in worlds:
        world.run()
    assert sum(world.done.ahead for world in worlds)


def test_pump_goes_back_for_events_in_gaps_that_are_filled() -> None:
    late = 0
    for seed in (0, 14, 25):  # the last two beside seeks and drops of the archive
        world = LateWorld(seed)
        world.run()
        late += world.done.late
    assert late


def test_one_seed_runs_the_same_twice() -> None:
    first, second = ArchivesWorld(4711), ArchivesWorld(4711)
    assert first.run() == second.run()
    assert first.scheduler.trace == second.scheduler.trace
    assert first.truth.history == second.truth.history


@pytest.mark.long
def test_every_process_gets_something_done() -> None:
    done: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for seed in range(1_000, 1_064):
        world = ArchivesWorld(seed)
        world.run()
        kinds.update(world.kinds)
        done.update(vars(world.done))
    assert kinds.keys() == set(OTHERS)
    assert done.keys() == vars(Done()).keys()
    assert all(done.values()), done


@pytest.mark.long
def test_focused_worlds_get_done_what_they_are_for() -> None:
    done = {world: Counter[str]() for world in FOCUSED}
    for world, counts in done.items():
        for seed in range(1_000, 1_010):
            made = world(seed)
            made.run()
            counts.update(vars(made.done))
    assert min(done[GenerationsWorld][name] for name in ("promoted", "dropped", "backfills"))
    assert min(done[HolesWorld][name] for name in ("promoted", "rolled_back", "backfills"))
    assert done[ErasureWorld]["proven"]
    assert done[OrphansWorld]["proven"]
    assert min(done[BackupsWorld][name] for name in ("promoted", "erased", "trims"))
    assert min(done[CopiesWorld][name] for name in ("proven", "removed", "returned", "listed"))
    assert min(done[MarkersWorld][name] for name in ("finalized", "replays"))
    assert min(done[TransformsWorld][name] for name in ("promoted", "rolled_back", "lost"))
    returned = ("returned_ids", "returned_keys", "only_archived", "promoted", "remade")
    assert min(done[ReturnsWorld][name] for name in returned)
    assert min(done[OutsideWorld][name] for name in ("promoted", "dropped", "only_archived"))
    assert min(done[ArrivalsWorld][name] for name in ("clean", "arrived", "backfills"))
    recorded = ("proven", "letters", "tried", "forgotten")
    assert min(done[RecordedWorld][name] for name in recorded)
    restored = ("restores", "put_back", "repeated", "aside", "replays_aside", "recovered")
    assert min(done[RestoredWorld][name] for name in restored)


def documented_bugs() -> list[tuple[str, ...]]:
    return table_after("docs/guarantees.md", "### Bugs planted into archives")


def test_document_lists_the_planted_bugs() -> None:
    rows = documented_bugs()
    assert [row[0] for row in rows] == list(BUGS)
    worlds = {world: f"`{name}`" for name, world in WORLDS.items()}
    assert [row[1] for row in rows] == [worlds[bug.world] for bug in BUGS.values()]
    assert [row[2] for row in rows] == [bug.breaks for bug in BUGS.values()]
    assert all(1 <= int(row[3]) <= BUG_SEEDS for row in rows)


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(name, marks=() if bug.world in SHORT else pytest.mark.long)
        for name, bug in BUGS.items()
    ],
)
def test_planted_bug_is_caught(bug: str, stale_seed: Callable[[str], None]) -> None:
    """By the seed that the document names, which saves time, or by any other."""
    seeds = {row[0]: int(row[3]) for row in documented_bugs()}
    if not notices(BUGS[bug], seeds[bug] - 1):
        stale_seed(bug)
        assert seeds_until_caught(BUGS[bug], BUG_SEEDS), f"no seed notices: {bug}"
