"""Run many seeds of the simulated worlds, and count.

``python -m tests.sim [SEEDS [FIRST [WORLD]]]`` runs the seeds of every world, or of the one that is
named, and prints figures. ``python -m tests.sim planted [archives|journals|log]...`` puts a seed
that catches each planted bug into ``docs/guarantees.md``: tests try that one first.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.sim import archive_planted, journal_planted
from tests.sim import planted as log_planted
from tests.sim.archive_world import ArchivesWorld
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
from tests.sim.base import SimWorld
from tests.sim.chains_world import ChainsWorld
from tests.sim.clients import ClientsWorld, DeniedWorld, LossyWorld
from tests.sim.clients_worlds import KeysWorld, ReadersWorld
from tests.sim.copies_world import CopiesWorld
from tests.sim.journal_world import JournalWorld
from tests.sim.journal_worlds import AbsentWorld, AmendWorld, CopyWorld, LotsWorld, SweptWorld
from tests.sim.late_world import FoldersWorld, LateWorld
from tests.sim.lifecycle import LifecycleWorld
from tests.sim.moves_world import MovesWorld
from tests.sim.outside_world import OutsideWorld
from tests.sim.planted import SEEDS_MAX
from tests.sim.playback_world import PlaybackWorld
from tests.sim.rebalance import RebalanceWorld
from tests.sim.recorded_world import RecordedWorld
from tests.sim.recreate_world import RecreateWorld
from tests.sim.restored_world import RestoredWorld
from tests.sim.returns_world import ReturnsWorld
from tests.sim.rollback_world import RollbackWorld
from tests.sim.rotated_chains_world import RotatedChainsWorld
from tests.sim.rotation_world import RotationWorld
from tests.sim.signals_world import SignalsWorld
from tests.sim.staged_world import StagedWorld
from tests.sim.tasks_world import TasksWorld
from tests.sim.transforms_world import TransformsWorld
from tests.sim.world import World
from tests.test_docs import ROOT
from tidelog.testing.faults import Fault

WORLDS: dict[str, type[SimWorld]] = {
    "protocols": World,
    "clients": ClientsWorld,
    "journals": JournalWorld,
    "amend": AmendWorld,
    "swept": SweptWorld,
    "lots": LotsWorld,
    "copy": CopyWorld,
    "absent": AbsentWorld,
    "playback": PlaybackWorld,
    "recreate": RecreateWorld,
    "lossy": LossyWorld,
    "readers": ReadersWorld,
    "keys": KeysWorld,
    "signals": SignalsWorld,
    "denied": DeniedWorld,
    "members": RebalanceWorld,
    "topics": LifecycleWorld,
    "rollback": RollbackWorld,
    "archives": ArchivesWorld,
    "generations": GenerationsWorld,
    "holes": HolesWorld,
    "erasures": ErasureWorld,
    "orphans": OrphansWorld,
    "remade": RemadeWorld,
    "markers": MarkersWorld,
    "staged": StagedWorld,
    "cuts": CutsWorld,
    "moves": MovesWorld,
    "chains": ChainsWorld,
    "late": LateWorld,
    "folders": FoldersWorld,
    "tasks": TasksWorld,
    "copies": CopiesWorld,
    "backups": BackupsWorld,
    "transforms": TransformsWorld,
    "returns": ReturnsWorld,
    "outside": OutsideWorld,
    "arrivals": ArrivalsWorld,
    "recorded": RecordedWorld,
    "rotation": RotationWorld,
    "rotated_chains": RotatedChainsWorld,
    "restored": RestoredWorld,
}
PLANTED: dict[str, tuple[str, Mapping[str, Any], Callable[[Any, int], bool]]] = {
    "archives": ("### Bugs planted into archives", archive_planted.BUGS, archive_planted.notices),
    "journals": (
        "### Bugs planted into journals, copies and playback",
        journal_planted.BUGS,
        journal_planted.notices,
    ),
    "log": ("### Bugs planted into the log", log_planted.BUGS, log_planted.notices),
}
COLLECT_SEEDS = 8


def main(seeds: int = 2_000, first: int = 0, only: str | None = None) -> int:
    """Run the seeds of each world; the number of worlds in which one failed."""
    reports = {
        name: run(name, world, range(first, first + seeds))
        for name, world in WORLDS.items()
        if only in (None, name)
    }
    print(json.dumps(reports, indent=1))
    return sum(bool(report["failed seeds"]) for report in reports.values())


def run(name: str, make: type[SimWorld], seeds: range) -> dict[str, object]:
    """Run one world; what went wrong in it, by kind, and which seeds failed."""
    gc.freeze()  # modules; what a world leaves is collected after some of them
    gc.set_threshold(1_000_000)
    began_s = time.monotonic()
    faults: Counter[Fault] = Counter()
    acknowledged = restarts = steps = 0
    failed: dict[int, str] = {}
    for seed in seeds:
        world = make(seed)
        try:
            world.run()
        except Exception as exc:  # noqa: BLE001 - counted, and printed with its seed
            failed[seed] = f"{type(exc).__name__}: {exc}"[:300]
            print(f"{name} seed {seed}: {failed[seed]}", file=sys.stderr)
        faults += world.faults.counts
        acknowledged += world.acknowledged()
        restarts += world.restarts
        steps += len(world.scheduler.trace)
        del world
        if seed % COLLECT_SEEDS == 0:
            gc.collect()
    gc.unfreeze()
    return {
        "seeds": len(seeds),
        "steps": steps,
        "acknowledged events": acknowledged,
        "restarts": restarts,
        "violations": len(failed),
        "seconds": round(time.monotonic() - began_s, 1),
        "faults": {fault.value: faults[fault] for fault in Fault if fault is not Fault.NONE},
        "failed seeds": failed,
    }


def planted(parts: Sequence[str]) -> int:
    """Put a seed that catches each planted bug into the document; how many are not caught.

    A seed that the document names stays as long as it catches its bug.
    """
    document = ROOT / "docs/guarantees.md"
    text, missed = document.read_text(), 0
    for heading, bugs, notices in map(PLANTED.__getitem__, parts):
        head, table = text.split(heading, 1)
        for name, bug in bugs.items():
            row = re.search(rf"^\| {re.escape(name)} \|.* (\d+) \|$", table, re.M)
            if row is None:
                raise ValueError(f"{document.name} has no row for the bug: {name}")
            seeds = (int(row[1]) - 1, *range(SEEDS_MAX))
            caught = next((seed + 1 for seed in seeds if notices(bug, seed)), None)
            print(f"{name}: {caught or 'not caught'}", flush=True)
            missed += caught is None
            table = f"{table[: row.start(1)]}{caught or row[1]}{table[row.end(1) :]}"
        text = head + heading + table
        document.write_text(text)
    return missed


if __name__ == "__main__":
    if sys.argv[1:2] == ["planted"]:
        sys.exit(planted(sys.argv[2:] or list(PLANTED)))
    numbers = [int(text) for text in sys.argv[1:3]]
    sys.exit(main(*numbers, *sys.argv[3:4]))  # type: ignore[arg-type]
