"""A pump of an archive whose gaps are filled after the pump has passed them.

A person moves the archive's position past events. Others build generations of the topic, which have
these events, promote them, and roll back. Two processes pump the archive into a topic meanwhile.
In the end the topic has every event of the live generation from where the pump began, and none
twice. ``FoldersWorld``: the archive is made of a folder of files, of which some are missing, and
generations are built of the topic, which has their events.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tests.sim.archive_store import Generation
from tests.sim.journal_raw import Gone
from tests.sim.moves_world import MovesDone, MovesWorld
from tidelog.connectors.source import SourcePartition
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.log.topics import find_topic
from tidelog.model.archive import ArchiveFormat
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pipeline import CycleReport
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.registry import find_pipeline

__all__ = ["FoldersWorld", "LateDone", "LateWorld"]


@dataclass
class LateDone(MovesDone):
    """What has happened here too."""

    late: int = 0  # events that the pump went back for


class LateWorld(MovesWorld):
    """One seed's world."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.done: LateDone = LateDone()
        self.moves = {"seek"}
        self.kinds = {"build", "replay"}
        self.reached: dict[SourcePartition, int] = {}  # by the pump

    def fill(self) -> None:
        super().fill()
        self.truth.targets.add(self.create("pumped").incarnation)

    def spawn_all(self) -> None:
        super().spawn_all()
        self._spawn("pump-1", self.pump)
        self._spawn("pump-2", self.pump)

    def pump(self) -> None:
        home = self.home()
        for _ in range(6):
            home.context.clock.sleep(self.random.uniform(0, 10))
            with self.tolerating(InvalidError, NotFoundError):
                self.pump_once(home)

    def pump_once(self, home: Home, take_over: bool = False) -> None:
        wanted = PumpOptions("archive:day", "pumped", "p", partition="same")
        pipeline = open_pump(home.context, wanted, self.workers)
        how = DriverOptions(stop=self.stop(), take_over=take_over)
        how.on_cycle = self.note
        Driver(home.context, pipeline, how).run()
        self.done.pumped += 1

    def note(self, report: CycleReport) -> None:
        for partition, manifest in report.committed.items():
            if int(manifest.end) <= self.reached.get(partition, 0):
                self.done.late += manifest.read
            else:
                self.reached[partition] = int(manifest.end)

    def check_archive(self, home: Home, live: Generation) -> None:
        super().check_archive(home, live)
        if live.archive == "day":
            self.pump_once(home, take_over=True)
            self.check_pumped(live)

    def check_pumped(self, live: Generation) -> None:
        target = find_topic(self.quiet, "pumped").incarnation
        copies: dict[str, int] = {}
        for place, raw in self.truth.events.items():
            if place[0] == target:
                assert raw.id is not None
                copies[raw.id] = copies.get(raw.id, 0) + 1
        twice = {each: count for each, count in copies.items() if count > 1}
        assert not twice, f"the pump has doubled {twice}"
        pipeline = find_pipeline(self.quiet, "p").incarnation
        for event_id, stored in self.accountant.counting(live).items():
            place = self.accountant.source_of(stored)
            head = read_progress(self.quiet, pipeline, f"t/{place[1]}")
            assert head is not None
            assert head.begin is not None
            is_before = place[2] < int(head.begin.position)
            is_gone = is_before or isinstance(self.truth.now(place), Gone)
            assert is_gone or event_id in copies, f"the pump has passed {event_id}"


class FoldersWorld(LateWorld):
    """The same, of an archive whose folder lacks files."""

    source = "folder:t"

    def format_of(self, of: ArchiveFormat) -> ArchiveFormat:
        """Most generations are built of what has all events."""
        return msgspec.structs.replace(of, source=self.random.choice(["topic:t", "topic:t", ""]))
