"""An archive of an archive of rotated files, built of others that saw the same files.

Archives `day` and `late` read the same log files while these are rotated, so they often have other
names for one file. Archive `chain` reads `day`. Generations of `chain` are built of `late`, of the
files themselves, or of `day`, and promoted or rolled back. No line is ever twice in one archive,
and in the end each archive has every line.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from tests.sim.archive_store import Generation
from tests.sim.archive_world import RAW
from tests.sim.rotation_world import RotationWorld
from tidelog.archive.archive import find_archive
from tidelog.archive.generations import begin_backfill, drop_generation, promote, rollback
from tidelog.errors import ConflictError, InvalidError, NotFoundError
from tidelog.home import Home

__all__ = ["RotatedChainsWorld"]


class RotatedChainsWorld(RotationWorld):
    """One seed's world."""

    names = ("day", "late", "chain")

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.built: Counter[str] = Counter()  # promoted generations, by what they were built of
        self.renamed = 0  # files that `day` and `late` know by different names

    def fill(self) -> None:
        super().fill()
        home = self.home(self.quiet)
        self.create_archive(home, "chain", "archive:day", RAW)
        self.create_archive(home, "late", f"file:{self.folder}", RAW)

    def spawn_all(self) -> None:
        super().spawn_all()
        self._spawn("driver-3", self.run_drivers)
        self._spawn("builder", self.build)

    def run_drivers(self) -> None:
        home = self.home()
        for _ in range(8):
            home.context.clock.sleep(self.random.uniform(0, 8))
            with self.tolerating(InvalidError, NotFoundError, ConflictError):
                self.drive(home, self.random.choice(self.names), **self.some_driver(0.2))

    def build(self) -> None:
        home = self.home()
        for _ in range(5):
            home.context.clock.sleep(self.random.uniform(0, 12))
            with self.tolerating(InvalidError, NotFoundError, ConflictError):
                self.change_generation(home)

    def change_generation(self, home: Home) -> None:
        context = home.context
        archive = find_archive(context, "chain")
        kept = archive.in_state("kept")
        if kept and self.chance(0.3):
            if self.chance(0.5):
                rollback(context, "chain")
            else:
                drop_generation(context, "chain", self.random.choice(kept))
            return
        source = self.random.choice(["archive:late", "archive:late", f"file:{self.folder}", ""])
        written_as = msgspec.structs.replace(RAW, source=source)
        if archive.building is not None:
            written_as = archive.formats[archive.building]
        _, number = begin_backfill(context, "chain", written_as)
        self.drive(home, "chain", number)
        promote(context, "chain")
        self.built[source.partition(":")[0]] += 1

    # Checks.

    def live(self, name: str) -> Generation | None:
        """The live generation of an archive."""
        return next((each for each in self.folders.live() if each.archive == name), None)

    def archived_in(self, name: str) -> Counter[str]:
        """The lines that a reader of an archive's folder finds."""
        live = self.live(name)
        events = [] if live is None else self.folders.events(live)
        return Counter((event.value or b"").decode() for event in events)

    def check(self) -> None:
        seen = (self.bare_objects.changes, self.bare_objects.deletes)
        if seen != self._seen:
            self._seen = seen
            for name in self.names:
                twice = [line for line, count in self.archived_in(name).items() if count > 1]
                assert not twice, f"`{name}` has lines twice: {twice[:3]}"

    def check_rest(self) -> None:
        home = self.home(self.quiet)
        self.scheduler.time.advance(3_600)  # what looks as if it were still written is finished
        building = find_archive(home.context, "chain").building
        if building is not None:
            drop_generation(home.context, "chain", building, force=True)
        for name in self.names:
            self.drive(home, name, take_over=True)
            found = self.archived_in(name)
            missing = [line for line in self.lines if not found[line]]
            assert not missing, f"`{name}` never got {missing[:3]}"
            assert found == Counter(self.lines), f"`{name}` has lines that were never written"
            self.check_verified(home, name)
        self.renamed = len(self.partitions("late") - self.partitions("day"))

    def partitions(self, name: str) -> set[str]:
        """The source partitions of an archive's live generation."""
        live = self.live(name)
        assert live is not None
        return set(self.folders.partitions(live))
