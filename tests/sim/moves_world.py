"""An archive whose positions, values and generations a person changes while it is driven.

Beside two drivers and a producer there are some of these: who moves the archive's position to and
fro (``seek``), who carries updates into its files (``update``), who writes a part of it again and
promotes that (``redo``), who streams the topic to a handler that fails now and then (``stream``),
and who deletes events or trims the topic.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from tests.sim.archive_home import ANY_KIND, FIRST_KIND
from tests.sim.archive_store import Generation
from tests.sim.archive_world import ArchivesWorld, Done
from tests.sim.archive_worlds import RATES
from tests.sim.journal_home import PARTITIONS
from tests.sim.journal_raw import Gone
from tidelog.archive.archive import find_archive
from tidelog.archive.dead_letters import ReplayOptions, replay
from tidelog.archive.generations import begin_backfill, drop_generation, promote, rollback
from tidelog.errors import ConflictError, InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.model.archive import RedoPart
from tidelog.model.event import Event
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.testing.faults import FaultyStore

__all__ = ["MovesDone", "MovesWorld"]

MOVES = ("redo", "seek", "stream", "update")


class HandlerError(Exception):
    """A handler that fails."""


class CopyingStore(FaultyStore):
    """Stalls now and then before a redo copies a file: after its range was planned."""

    def copy(self, source: str, target: str) -> None:
        scheduler = self.faults.scheduler
        assert scheduler is not None
        is_redo = source.startswith("archives/") and target.startswith("staging/")
        if is_redo and self.faults.random.random() < 0.3:
            scheduler.sleep(self.faults.random.uniform(0, 20))
        super().copy(source, target)


@dataclass
class MovesDone(Done):
    """What has happened here too."""

    redone: int = 0
    moved: int = 0
    skipped: int = 0
    updated: int = 0
    streamed: int = 0


class MovesWorld(ArchivesWorld):
    """One seed's world."""

    rates = RATES
    attempts = (3,)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.done: MovesDone = MovesDone()
        self.moves = set(self.random.sample(MOVES, 3))
        self.kinds = {self.random.choice(["trim", "erase", "replay"])}
        self.values: dict[str, bytes] = {}  # by ids whose update was carried into archives
        self.given: set[bytes] = set()  # values of all updates
        self.handled: set[str] = set()  # ids that the handler got
        self.sought = False
        self._faulty_store = CopyingStore

    def spawn_all(self) -> None:
        super().spawn_all()
        actors = {"redo": self.redo, "seek": self.seek, "update": self.update}
        for kind in sorted(self.moves & actors.keys()):
            self._spawn(kind, actors[kind])
        if self.meets:
            self._spawn("replay-2", self.replay_often)
        if "stream" in self.moves:
            self._spawn("stream-1", self.stream)
            self._spawn("stream-2", self.stream)

    # A part of the archive again.

    def redo(self) -> None:
        home = self.home()
        for _ in range(4):
            home.context.clock.sleep(self.random.uniform(0, 10))
            with self.tolerating(InvalidError, NotFoundError):
                self.redo_once(home)

    def redo_once(self, home: Home) -> None:
        archive = find_archive(home.context, "day")
        kept, chance = archive.in_state("kept"), self.random.random()
        if archive.building is not None and chance < 0.5:
            drop_generation(home.context, "day", archive.building, force=True)
            return
        if kept and chance < 0.3:
            rollback(home.context, "day", generation=self.random.choice(kept))
            self.done.rolled_back += 1
            return
        today = datetime.fromtimestamp(self.scheduler.time.now_ms() / 1000, UTC).date()
        parts = (RedoPart(dates=(today.isoformat(),)), RedoPart(partitions=("t/0",)))
        written_as = msgspec.structs.replace(
            archive.formats[archive.building or archive.generation],
            parser=self.random.choice([FIRST_KIND, ANY_KIND]),
            redo=self.random.choice(parts),
        )
        if archive.building is not None:
            written_as = archive.formats[archive.building]
        _, number = begin_backfill(home.context, "day", written_as)
        self.drive(home, "day", number)
        self.done.redone += 1
        promote(home.context, "day")
        self.done.promoted += 1

    # Its position.

    def seek(self) -> None:
        home = self.home()
        for _ in range(4):
            home.context.clock.sleep(self.random.uniform(0, 12))
            number = self.random.randrange(PARTITIONS)
            end = self.truth.end(self.topic.incarnation, number)
            to = self.random.choice(["latest", "earliest", str(self.random.randint(0, end))])
            self.sought = True
            with self.tolerating(InvalidError, NotFoundError, ConflictError):
                for move in home.archives.get("day").seek(to, f"t/{number}", why="sim"):
                    self.done.moved += 1
                    self.done.skipped += bool(move.skipped)

    # Its values.

    @property
    def meets(self) -> bool:
        """Whether updates of dead letters meet replays of them."""
        return "update" in self.moves and "replay" in self.kinds

    def replay_often(self) -> None:
        """Replay dead letters that stay dead, so that files of replays have them."""
        home = self.home()
        for _ in range(15):
            home.context.clock.sleep(self.random.uniform(0, 4))
            with self.tolerating(NotFoundError):
                how = ReplayOptions(parser=FIRST_KIND, stop=self.stop())
                replay(home.context, find_archive(home.context, "day"), how, LocalWorkers(1))
                self.done.replays += 1

    def dead_ids(self) -> list[str]:
        """The newest ids of events that are dead letters at first."""
        events = self.truth.events
        values = {each: events[places[0]].value for each, places in self.truth.by_id.items()}
        return [each for each, value in values.items() if (value or b"").endswith(b"=b")][-3:]

    def update(self) -> None:
        home = self.home()
        for _ in range(12 if self.meets else 6):
            home.context.clock.sleep(self.random.uniform(0, 4 if self.meets else 8))
            near = self.dead_ids() if self.meets else []
            for event_id in [self.random.choice(near)] if near else self.some_ids(1):
                self.values.pop(event_id, None)  # until the next one is carried out
                with self.tolerating(InvalidError, NotFoundError, ConflictError):
                    value = self.next_value(event_id)
                    home.update("t", event_id, value, archives=True)
                    self.values[event_id] = value
                    self.done.updated += 1

    def next_value(self, event_id: str) -> bytes:
        """Another value of an event, of the same kind, some milliseconds later; none twice."""
        (place,) = self.truth.by_id[event_id]
        first, time_ms, kind = (self.truth.events[place].value or b"").decode().split("=")
        while True:
            value = f"{first}={int(time_ms) + self.random.randrange(1, 900)}={kind}".encode()
            if value not in self.given:
                self.given.add(value)
                return value

    # A stream of its source.

    def stream(self) -> None:
        home = self.home()
        for _ in range(5):
            home.context.clock.sleep(self.random.uniform(0, 10))
            with self.tolerating(InvalidError, NotFoundError):
                self.stream_once(home, 0.15)

    def stream_once(self, home: Home, fails: float) -> None:
        def handle(event: Event) -> None:
            if self.chance(fails):
                raise HandlerError
            self.handled.add(event.id or "")

        stream = home.stream("topic:t")
        try:
            self.done.streamed += stream.run(
                handle,
                name="s",
                retries=0,
                until_caught_up=True,
                accept_loss=True,
                stop=self.stop(),
            )
        except HandlerError:
            self.refused["handler"] += 1

    # In the end.

    def check_rest(self) -> None:
        self.past_readers |= self.sought
        if "stream" in self.moves:  # first: a range that it left under way is in the way of proofs
            self.stream_once(self.home(self.quiet), 0.0)
        super().check_rest()
        if "stream" in self.moves:
            self.check_handled()

    def check_archive(self, home: Home, live: Generation) -> None:
        super().check_archive(home, live)
        row = self.folders.archives()[live.archive]
        states = {**row["states"], live.number: "live"}
        for number in (each for each in row["formats"] if states.get(each) in ("live", "kept")):
            of = Generation(live.archive, live.incarnation, number)
            self.check_gaps(of)
            for event_id, stored in self.accountant.counting(of).items():
                value = self.values.get(event_id, stored.value)
                assert stored.value == value, f"{of.folder} has {stored.value!r}, not {value!r}"

    def check_gaps(self, of: Generation) -> None:
        """Without a trim past readers, a gap is one that a person has made."""
        for partition in self.folders.partitions(of):
            rows = self.folders.source_rows(of, partition)
            reasons = {gap["reason"] for gap in rows.head["gaps"]} if rows else set()
            allowed = {"seek", "retention"} if "trim" in self.kinds else {"seek"}
            allowed |= {"files"} if self.source.startswith("folder:") else set()
            assert reasons <= allowed, f"{of.folder} {partition} has gaps for {reasons}"

    def check_handled(self) -> None:
        """P3 of a stream: the handler got every event that is still there."""
        for place, raw in self.truth.events.items():
            if place[0] == self.topic.incarnation:
                is_there = not isinstance(self.truth.now(place), Gone)
                assert not is_there or raw.id in self.handled, f"no handler got {raw.id} of {place}"
