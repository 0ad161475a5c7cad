"""An archive of an archive, built of what is ahead of its source.

Archive `chain` reads archive `day`, which reads the topic. Generations of `chain` are built of the
topic, or of `day`, and promoted: so `chain` is often ahead of `day`, and its drivers, of which half
accept losses, wait for it. Updates are carried into archives meanwhile. In the end `chain` has
every event of the topic, has not ended anywhere, and has no gap.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tests.sim.archive_store import Generation
from tests.sim.archive_world import BY_DAY, BY_MINUTE
from tests.sim.moves_world import MovesDone, MovesWorld
from tidelog.archive.archive import find_archive
from tidelog.archive.generations import begin_backfill, drop_generation, promote
from tidelog.home import Home

__all__ = ["ChainsWorld"]


@dataclass
class ChainsDone(MovesDone):
    """What has happened here too."""

    ahead: int = 0  # promotes after which the chain was ahead of its source


class ChainsWorld(MovesWorld):
    """One seed's world."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.done: ChainsDone = ChainsDone()
        self.moves = {"update"} if seed % 2 else set()
        self.kinds = {"build", "chain"}

    def change_generation(self, home: Home) -> None:
        archive = find_archive(home.context, "chain")
        kept = archive.in_state("kept")
        if kept and self.chance(0.2):
            drop_generation(home.context, "chain", self.random.choice(kept))
            self.done.dropped += 1
            return
        source = self.random.choice(["topic:t", "topic:t", ""])
        other = self.random.choice([BY_DAY, BY_MINUTE])
        written_as = msgspec.structs.replace(other, source=source)
        if archive.building is not None:
            written_as = archive.formats[archive.building]
        _, number = begin_backfill(home.context, "chain", written_as)
        self.done.backfills += 1
        self.drive(home, "chain", number, accept_loss=self.chance(0.5))
        promote(home.context, "chain")
        self.done.promoted += 1
        ahead = (self.position("chain", each) > self.position("day", each) for each in ("0", "1"))
        self.done.ahead += any(ahead)

    def position(self, archive: str, number: str) -> int:
        """How far the live generation of an archive has read a partition."""
        (live,) = (each for each in self.folders.live() if each.archive == archive)
        rows = self.folders.source_rows(live, f"t/{number}")
        return int(rows.head["position"] or 0) if rows else 0

    def check_rest(self) -> None:
        self.scheduler.time.advance(300)
        home = self.home(self.quiet)
        building = find_archive(home.context, "chain").building
        if building is not None:
            drop_generation(home.context, "chain", building, force=True)
        super().check_rest()

    def check_archive(self, home: Home, live: Generation) -> None:
        super().check_archive(home, live)
        for partition in self.folders.partitions(live):
            rows = self.folders.source_rows(live, partition)
            assert rows is not None
            assert not rows.head["ended"], f"{live.folder} {partition} has ended"
