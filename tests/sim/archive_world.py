"""Archives in a bad world: drivers, generations, erasures, markers, chains, copies and sweeps.

Each seed starts two archive drivers and a producer, and some of these: a process that trims the
source, or deletes the topic and makes it again; who builds, promotes and drops generations; who
replays dead letters; who deletes events and proves it; who finalizes; who restores into a topic,
pumps into another, archives an archive, and sweeps. Calls stall, replies are lost, processes die.

An accountant that shares no code with the product's readers (``archive_accounts``) looks at the
store after every change. When all have ended, what is left is finished without faults, and every
offset of the source is accounted for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tests.sim.archive_home import ANY_KIND, FIRST_KIND, ArchivesHome
from tests.sim.archive_store import Generation
from tests.sim.base import check_swept
from tests.sim.journal_home import PARTITIONS
from tests.sim.journal_raw import DELETED, Gone
from tidelog.archive.account import read_account
from tidelog.archive.archive import find_archive
from tidelog.archive.dead_letters import ReplayOptions, replay
from tidelog.archive.finalize import FinalizeOptions, finalize
from tidelog.archive.generations import begin_backfill, drop_generation, promote, rollback
from tidelog.archive.restore import RestoreOptions, restore
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.erasure.proof import Proof
from tidelog.erasure.proof_search import prove_erased
from tidelog.errors import AlreadyExistsError, ConflictError, InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.log.topics import create_topic, delete_topic, find_topic
from tidelog.maintenance.erase import purge
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.maintenance.turn import ArchiveEraser
from tidelog.model.archive import ArchiveFormat
from tidelog.model.topic import Topic
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.tasks import LocalWorkers

__all__ = ["ArchivesWorld", "Done"]

LINES = {"mode": "events"}
BY_DAY = ArchiveFormat(parser=FIRST_KIND, format="jsonlines", codec="none", format_settings=LINES)
BY_MINUTE = ArchiveFormat(
    parser=ANY_KIND,
    format="jsonlines",
    codec="none",
    format_settings=LINES,
    layout={"granularity": "minute"},
)
BY_MINUTE_A = msgspec.structs.replace(BY_MINUTE, parser=FIRST_KIND)
RAW = ArchiveFormat(format="parquet", codec="none")
COPIES = ("pumped", "restored")  # topics
OTHERS = ("trim", "remake", "build", "replay", "erase", "finalize", "chain", "copy", "later")
SOFT = ("files", "transform")  # reasons of gaps that are no loss
LATER = ("m1", "m2")  # topics of an archive by pattern; the second one appears later


@dataclass
class Done:
    """What has happened, for tests that the world is not idle."""

    drained: int = 0
    backfills: int = 0
    promoted: int = 0
    rolled_back: int = 0
    dropped: int = 0
    trims: int = 0
    remade: int = 0
    replays: int = 0
    erased: int = 0
    proven: int = 0
    finalized: int = 0
    restored: int = 0
    pumped: int = 0
    sweeps: int = 0


class ArchivesWorld(ArchivesHome):
    """One seed's world."""

    first_formats: Sequence[ArchiveFormat] = (BY_DAY, BY_MINUTE_A)
    remade_after_s = (2, 40)
    source = "topic:t"  # of archives

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.done = Done()
        self.kinds = set(self.random.sample(OTHERS, 4))
        self.past_readers = False  # whether a loss of events was accepted
        if "remake" in self.kinds:
            self.kinds -= {"copy", "chain"}

    def fill(self) -> None:
        """Some events, and archives; one of them begins where the topic ends."""
        for partition in range(PARTITIONS):
            for _ in range(2):
                self.append(self.quiet, partition, [self.event() for _ in range(4)])
        home = self.home(self.quiet)
        written_as = self.random.choice(self.first_formats)
        self.create_archive(home, "day", self.source, written_as)
        if "chain" in self.kinds:
            self.create_archive(home, "chain", "archive:day", BY_MINUTE)
        else:
            self.create_archive(home, "raw", self.source, RAW)
        if "later" in self.kinds:
            self.accountant.latest = {f"m1/{number}": 1 for number in range(PARTITIONS)}
            self.create("m1")
            for number in range(PARTITIONS):
                self.append_to(self.quiet, "m1", number, [self.event()])
            self.create_archive(home, "many", "many:m", RAW)
        if "copy" in self.kinds:
            for name in COPIES:
                self.truth.targets.add(self.create(name).incarnation)

    def spawn_all(self) -> None:
        self._spawn("producer", self.produce)
        self._spawn("driver-1", self.run_drivers)
        self._spawn("driver-2", self.run_drivers)
        self._spawn("sweeper", self.sweep)
        actors = {
            "trim": self.trim,
            "remake": self.remake,
            "build": self.build,
            "replay": self.replay,
            "erase": self.erase,
            "finalize": self.finalize,
            "copy": self.copy,
            "later": self.appear,
        }
        for kind in sorted(self.kinds & actors.keys()):
            self._spawn(kind, actors[kind])
            if kind == "finalize":
                self._spawn("finalize-2", self.finalize)

    # The source.

    def produce(self) -> None:
        context = self._context()
        for _ in range(8):
            context.clock.sleep(self.random.uniform(0, 10))
            events = [self.event() for _ in range(self.random.randint(1, 4))]
            with self.tolerating(ConflictError, NotFoundError):
                self.append(context, self.random.randrange(PARTITIONS), events)

    def trim(self) -> None:
        """Trim to where archives have read, or past them."""
        home = self.home()
        for _ in range(4):
            home.context.clock.sleep(self.random.uniform(1, 12))
            past = self.chance(0.25)
            self.past_readers |= past
            ends = {number: self.trim_to(number, past) for number in range(PARTITIONS)}
            with self.tolerating(InvalidError, ConflictError, NotFoundError):
                home.trim("t", ToOffsets(ends), past_readers=past)
                self.done.trims += 1

    def trim_to(self, number: int, past: bool) -> int:
        """An offset that all archives have read, most of the time; any one to pass readers."""
        end = self.truth.end(self.topic.incarnation, number)
        if past or self.chance(0.3):
            return self.random.randint(0, end)
        return self.read_by_all(number)

    def read_by_all(self, number: int) -> int:
        """How far all archives have read a partition of the topic."""
        positions = [self.truth.end(self.topic.incarnation, number)]
        for live in self.folders.live():
            rows = self.folders.source_rows(live, f"t/{number}")
            if live.archive != "many":
                positions.append(int(rows.head["position"] or 0) if rows else 0)
        return min(positions)

    def remake(self) -> None:
        """Delete the topic, and make another one of its name, which may have more partitions."""
        context = self._context()
        partitions = PARTITIONS + self.random.randrange(2)
        context.clock.sleep(self.random.uniform(*self.remade_after_s))
        for _ in range(4):
            with self.tolerating(NotFoundError, ConflictError):
                delete_topic(context, "t")
                break
        for _ in range(4):
            with self.tolerating(ConflictError, AlreadyExistsError):
                create_topic(
                    context, Topic("t", context.ids.new(), partitions, context.clock.now_ms())
                )
                self.done.remade += 1
                break
        for number in range(partitions):  # the new one soon reaches beyond the old one's end
            with self.tolerating(ConflictError, NotFoundError):
                events = [self.event() for _ in range(self.random.choice([4, 30]))]
                self.append_to(context, "t", number, events)

    def appear(self) -> None:
        """Let a topic appear that an archive by pattern did not see at its creation."""
        context = self._context()
        for _ in range(4):
            context.clock.sleep(self.random.uniform(0, 10))
            with self.tolerating(ConflictError, AlreadyExistsError):
                create_topic(
                    context, Topic("m2", context.ids.new(), PARTITIONS, context.clock.now_ms())
                )
            for name in LATER:
                with self.tolerating(ConflictError, NotFoundError):
                    number = self.random.randrange(PARTITIONS)
                    self.append_to(context, name, number, [self.event() for _ in range(2)])

    # The archives.

    def run_drivers(self) -> None:
        home = self.home()
        for _ in range(6):
            home.context.clock.sleep(self.random.uniform(0, 8))
            name = self.random.choice(["day", *self.names()])
            how, accept_loss = self.some_driver(0.3), self.chance(0.5)
            with self.tolerating(InvalidError, NotFoundError):  # lost events, a retired generation
                how |= {"start": "latest"} if name == "many" else {}
                building = find_archive(home.context, name).building if self.chance(0.3) else None
                self.drive(home, name, building, accept_loss=accept_loss, **how)
                self.done.drained += 1

    def build(self) -> None:
        """Build generations, promote them, roll back to kept ones, drop others."""
        home = self.home()
        for _ in range(4):
            home.context.clock.sleep(self.random.uniform(0, 10))
            with self.tolerating(InvalidError, NotFoundError):
                self.change_generation(home)

    def change_generation(self, home: Home) -> None:
        archive = find_archive(home.context, "day")
        others, kept = (
            sorted(archive.formats.keys() - {archive.generation}),
            archive.in_state("kept"),
        )
        chance = self.random.random()
        if others and chance < 0.15:
            drop_generation(home.context, "day", self.random.choice(others))
            self.done.dropped += 1
        elif kept and archive.building is None and chance < 0.6:
            rollback(home.context, "day", generation=self.random.choice(kept))
            self.done.rolled_back += 1
        else:
            other = self.format_of(self.random.choice([BY_DAY, BY_MINUTE]))
            written_as = other if archive.building is None else archive.formats[archive.building]
            _, number = begin_backfill(home.context, "day", written_as)
            self.done.backfills += 1
            self.drive(home, "day", number, accept_loss=self.chance(0.5))
            promote(home.context, "day")
            self.done.promoted += 1
            if self.chance(0.4):
                rollback(home.context, "day", generation=archive.generation)
                self.done.rolled_back += 1

    def format_of(self, of: ArchiveFormat) -> ArchiveFormat:
        """How a generation is built."""
        return of

    def replay(self) -> None:
        home = self.home()
        for _ in range(3):
            home.context.clock.sleep(self.random.uniform(2, 15))
            with self.tolerating(NotFoundError):
                parser = self.random.choice([FIRST_KIND, ANY_KIND])
                how = ReplayOptions(parser=parser, layout=self.replay_layout(), stop=self.stop())
                replay(home.context, find_archive(home.context, "day"), how, LocalWorkers(1))
                self.done.replays += 1

    def replay_layout(self) -> dict[str, str]:
        """How a replay names folders, if not as the archive does."""
        return {}

    def finalize(self) -> None:
        home = self.home()
        for _ in range(5):
            home.context.clock.sleep(self.random.uniform(5, 30))
            with self.tolerating(NotFoundError):
                self.finalize_one(home, self.random.choice(self.names()))
                self.done.finalized += 1

    def finalize_one(self, home: Home, name: str) -> None:
        archive = find_archive(home.context, name)
        with self.markers.by(archive.name, archive.generation, self.truth.tick):
            finalize(home.context, archive, FinalizeOptions(delay_ms=self.delay_ms))

    def erase(self) -> None:
        """Delete some events, carry that into archives, and prove it."""
        home = self.home()
        for _ in range(2):
            home.context.clock.sleep(self.random.uniform(2, 20))
            ids = self.some_ids(self.random.choice([1, 3]))
            with self.tolerating(NotFoundError, InvalidError, ConflictError):
                self.accountant.asked.update(ids)
                home.delete("t", ids, why="request")
                self.done.erased += 1
            for _ in range(3):
                with self.tolerating(NotFoundError, InvalidError, ConflictError):
                    self.prove(home, ids)
                    break

    def prove(self, home: Home, ids: list[str]) -> None:
        topic = find_topic(home.context, "t")
        purge(home.context, topic, 0)
        proof = prove_erased(home.context, topic, ids)
        if proof.is_erased and proof.known:
            gone = [each for each in ids if self.is_gone(each, topic)]
            self.erasures.prove(gone)
            self.done.proven += len(gone)

    def is_gone(self, event_id: str, topic: Topic) -> bool:
        """Whether an event was deleted from this topic, and was in no other."""
        places = self.truth.by_id.get(event_id, [])
        return all(
            place[0] == topic.incarnation
            and any(state is DELETED for _, state in self.truth.history[place])
            for place in places
        )

    def copy(self) -> None:
        """Restore the archive into a topic, and pump the source into another."""
        home = self.home()
        for _ in range(3):
            home.context.clock.sleep(self.random.uniform(2, 15))
            with self.tolerating(NotFoundError, InvalidError):
                self.copy_once(home, self.chance(0.3))

    def copy_once(self, home: Home, take_over: bool, **how: Any) -> None:
        driving = DriverOptions(stop=self.stop(), take_over=take_over, accept_loss=True)
        if how.get("pump", self.chance(0.5)):
            pipeline = open_pump(
                home.context, PumpOptions("topic:t", "pumped", partition="same"), self.workers
            )
            Driver(home.context, pipeline, driving).run()
            self.done.pumped += 1
        else:
            restore(home.context, RestoreOptions("day", "topic:restored"), self.workers, driving)
            self.done.restored += 1

    def sweep(self) -> None:
        home = self.home()
        for _ in range(4):
            home.context.clock.sleep(self.random.uniform(2, 15))
            with self.tolerating(NotFoundError):
                check_swept(sweep_home(home.context, 5_000), *self.accepted)
            with self.tolerating(NotFoundError):
                sweep_archives(home.context, self.random.choice([0, 0, 5_000]))
                self.done.sweeps += 1

    # In the end.

    def check_rest(self) -> None:
        """Finish what is left without faults, then count."""
        home = self.home(self.quiet)
        ArchiveEraser(
            home.context
        ).turn()  # one that died half-way leaves files that are not as their manifests say
        for name in sorted(self.names(), key=lambda each: each == "chain"):
            self.finish(home, name)
        self.scheduler.time.advance(300)  # a promote that died has had its time
        building = find_archive(home.context, "day").building
        if building is not None:
            drop_generation(home.context, "day", building, force=True)
        for _ in range(2):  # the first one finishes erasures that died
            sweep_archives(home.context, 0)
        self.check_staged()
        self.accountant.check_live()
        for live in self.folders.live():
            self.check_archive(home, live)
        if "copy" in self.kinds:
            self.check_copies(home)
        if "erase" in self.kinds:
            self.check_erased(home)
        if "finalize" in self.kinds:
            self.check_markers(home)

    def check_staged(self) -> None:
        """No archive has a range under way, so nothing is staged for any generation."""
        archives = self.folders.archives().values()
        folders = tuple(f"staging/{archive['incarnation']}." for archive in archives)
        staged = self.bare_objects.keys_below("staging/")
        left = [key for key in staged if key.startswith(folders)]
        assert self.is_remade() or not left, f"a sweep leaves {left}"

    def finish(self, home: Home, name: str) -> None:
        with contextlib.suppress(InvalidError, NotFoundError) if self.is_remade() else _nothing():
            start = "latest" if name == "many" else "earliest"
            self.drive(home, name, accept_loss=True, take_over=True, start=start)
        replay(
            home.context,
            find_archive(home.context, name),
            ReplayOptions(stop=self.stop()),
            self.workers,
        )

    def is_remade(self) -> bool:
        """Whether the topic was deleted: then no archive of it can reach its end."""
        return "remake" in self.kinds

    def names(self) -> list[str]:
        return sorted(self.folders.archives())

    def check_archive(self, home: Home, live: Generation) -> None:
        for partition in self.folders.partitions(live):
            claim = read_account(self.quiet, live.pipeline, partition)
            self.accountant.check_account(live, partition, claim)
            rows = self.folders.source_rows(live, partition)
            if not self.is_remade():
                assert rows is not None, f"{live} has not begun {partition}"
                name, _, number = partition.rpartition("/")
                end = self.truth.end(find_topic(self.quiet, name).incarnation, int(number))
                assert int(rows.head["position"]) == end, f"{live} {partition} ends before {end}"
                gaps = [gap for gap in rows.head["gaps"] if gap["reason"] not in SOFT]
                assert self.past_readers or not gaps, f"{live} has {gaps}"
        self.accountant.check_others(live)
        self.accountant.check_one_topic(live)
        archive = find_archive(home.context, live.archive)
        found = verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True))
        assert not found.problems, f"{live}: verify finds {found.problems}"

    def check_erased(self, home: Home) -> None:
        """P5a: after the erasure was carried out, nothing is left, and the proof says so."""
        try:
            topic = find_topic(self.quiet, "t")
        except NotFoundError:
            return
        gone = sorted(
            raw.id
            for place, raw in self.truth.events.items()
            if raw.id in self.truth.by_id and self.is_gone(raw.id, topic)
        )
        if gone:
            for _ in range(2):
                self.scheduler.time.advance(86_400 * 8)  # objects that no row names stay for a week
                self.pass_notes()
                purge(home.context, topic, 0)
            if "copy" in self.kinds:
                self.erase_copies(home, topic, gone)
            proof = self.last_proof(home, topic, gone)
            assert proof.is_erased, f"the proof finds {proof.traces[:3]}"
            self.erasures.prove(gone)
            self.done.erased += 1
        for live in self.folders.live():
            self.check_archive(home, live)

    def last_proof(self, home: Home, topic: Topic, gone: list[str]) -> Proof:
        """A proof when nothing is left to do."""
        return prove_erased(home.context, topic, gone)

    def erase_copies(self, home: Home, topic: Topic, gone: list[str]) -> None:
        """Delete events from topics that they were copied into; a proof before that is true too."""
        if prove_erased(home.context, topic, gone).is_erased:
            self.erasures.prove(gone)
        with self.home(self.quiet) as own:  # which ends the threads that deletes begin
            for name in COPIES:
                own.delete(name, gone, why="request")
                purge(home.context, find_topic(home.context, name), 0)

    def check_markers(self, home: Home) -> None:
        for name in self.names():
            with contextlib.suppress(InvalidError, NotFoundError):
                self.finalize_one(home, name)
        self.markers.check_all()

    def check_copies(self, home: Home) -> None:
        """Each event of the source is in the target once, at most; all that are alive are."""
        self.copy_once(home, take_over=True, pump=True)
        self.copy_once(home, take_over=True, pump=False)
        for name in COPIES:
            target = find_topic(self.quiet, name).incarnation
            copies: dict[str, int] = {}
            for place, raw in self.truth.events.items():
                if place[0] == target:
                    assert raw.id is not None
                    copies[raw.id] = copies.get(raw.id, 0) + 1
            assert all(count == 1 for count in copies.values()), f"{name} has doubles: {copies}"
            for place, raw in self.truth.events.items():
                alive = not isinstance(self.truth.now(place), Gone)
                if place[0] == self.topic.incarnation and alive:
                    assert raw.id in copies, f"{name} lacks {raw.id}"

    def acknowledged(self) -> int:
        return len(self.truth.events)


@contextlib.contextmanager
def _nothing() -> Any:
    yield
