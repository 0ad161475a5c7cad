"""Worlds of archives with fewer processes that meet more often: generations, erasures, markers.

``GenerationsWorld``: generations are built, promoted, rolled back and dropped while others append
and drive all the time, in several drivers that share the partitions. ``HolesWorld``: the same, from
a backup that lacks events in between. ``ErasureWorld``: events are deleted by id and by key soon
after they came, or after the topic was trimmed, and proofs are asked for at any moment, while
drivers stall and die more often. ``OrphansWorld``: the same from archives whose topic is deleted
meanwhile. ``MarkersWorld``: folders of minutes are finalized while events
come late and dead letters are replayed. ``CutsWorld``: what
``ArchivesWorld`` does, with ranges that are cut into several tasks.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.sim import archive_home
from tests.sim.archive_store import Generation
from tests.sim.archive_world import BY_MINUTE, BY_MINUTE_A, ArchivesWorld
from tests.sim.journal_home import KEYS, PARTITIONS
from tests.sim.journal_raw import DELETED, TRIMMED
from tests.support.cut_workers import CutWorkers
from tidelog.archive.archive import find_archive
from tidelog.archive.fill import FillSource
from tidelog.archive.generations import begin_backfill, drop_generation, promote, rollback
from tidelog.catalog.base import Change
from tidelog.context import Context
from tidelog.coordination.audit import Why
from tidelog.erasure.delete import delete_events, delete_key
from tidelog.erasure.delete_archived import erase_archived, finish_archive
from tidelog.erasure.proof_search import prove_erased, prove_erased_from_archive
from tidelog.errors import AlreadyExistsError, ConflictError, InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.topics import create_topic, delete_topic, find_topic
from tidelog.maintenance.erase import purge
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.model.event import Event
from tidelog.model.topic import Topic
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.ranges import WaitingEvents
from tidelog.pipeline.tasks import Workers
from tidelog.testing.faults import Fault, FaultyCatalog, FaultyStore

__all__ = [
    "CutsWorld",
    "ErasureWorld",
    "GenerationsWorld",
    "HolesWorld",
    "MarkersWorld",
    "OrphansWorld",
    "RemadeWorld",
]

WHY = Why("sim", "request")
RATES = archive_home.RATES | {
    Fault.LOSE_REQUEST: 0.002,
    Fault.LOSE_REPLY: 0.006,
    Fault.TRY_AGAIN: 0.002,
    Fault.CUT_OFF: 0.0003,
    Fault.CRASH_BEFORE: 0.0003,
    Fault.CRASH_AFTER: 0.0006,
}
"""Most calls shall reach their ends here, however many requests they make."""


class SlowCatalog(FaultyCatalog):
    """Answers late, so that other processes do a lot between two calls."""

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        scheduler = self.faults.scheduler
        assert scheduler is not None
        scheduler.sleep(self.faults.random.uniform(0, 1))
        super().write(partition, *changes, write_id=write_id)


class StagingStore(FaultyStore):
    """Stalls now and then before something is staged: after the source was read."""

    held: list[str]  # ids of events that wait to be staged

    def put(self, key: str, data: bytes) -> str:
        scheduler = self.faults.scheduler
        assert scheduler is not None
        if key.startswith("staging/") and self.faults.random.random() < 0.1:
            ids = sorted({found.decode() for found in re.findall(rb"id\d{4}x", data)})
            self.held += ids
            scheduler.sleep(self.faults.random.uniform(0, 20))
            del self.held[: len(ids)]
        return super().put(key, data)


class BusyWorld(ArchivesWorld):
    """A process appends to the topic and drives the archive all the time."""

    rates = RATES
    attempts = (3,)
    rounds = 8

    def spawn_all(self) -> None:
        super().spawn_all()
        self._spawn("busy", self.keep_busy)

    def keep_busy(self) -> None:
        home = self.home()
        for _ in range(self.rounds):
            home.context.clock.sleep(self.random.uniform(0, 2))
            with self.tolerating(ConflictError, NotFoundError):
                events = [self.event() for _ in range(self.random.randint(1, 3))]
                self.append(home.context, self.random.randrange(PARTITIONS), events)
            with self.tolerating(InvalidError, NotFoundError):
                self.drive_some(home, None)

    def drive_some(self, home: Home, generation: int | None) -> None:
        """Drive the archive, alone or beside others."""
        how = self.some_driver(0.3)
        self.drive(home, "day", generation, accept_loss=self.chance(0.5), **how)
        self.done.drained += 1


class CutsWorld(ArchivesWorld):
    """Ranges are cut, and their tasks run in any order; some fail, and some end early."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._workers = CutWorkers(self.random, fails=0.04, ends_early=0.15)

    @property
    def workers(self) -> Workers:
        return self._workers

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        super()._patch(patch)
        patch.setattr(WaitingEvents, "cut_events_min", lambda *_: 1)

    def check_rest(self) -> None:
        self._workers.fails = 0
        super().check_rest()


class GenerationsWorld(BusyWorld):
    """Generations that change while they are driven."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.kinds = {"build", self.random.choice(["trim", "erase", "replay", "chain"])}
        self.is_followed = seed % 4 == 1

    def _context(self, faulty: bool = True) -> Context:
        """Promotes are slow: most of what goes wrong does so between their steps."""
        context = super()._context(faulty)
        if faulty and self.process.name == "build":
            return replace(context, catalog=SlowCatalog(self.rows, self.faults, self.process.clock))
        return context

    def spawn_all(self) -> None:
        super().spawn_all()
        self._spawn("backfill", self.backfill)
        if self.is_followed:
            self._spawn("follow", self.follow)
            self._spawn("rush", self.rush)

    def follow(self) -> None:
        """Keep a driver of the live generation at work, also while another one is promoted."""
        home = self.home()
        for _ in range(self.rounds):
            home.context.clock.sleep(self.random.uniform(0, 1))
            with self.tolerating(InvalidError, NotFoundError):
                self.drive(home, "day", **self.follower(40, 1))

    def rush(self) -> None:
        """Append events while a generation is being promoted."""
        home = self.home()
        for _ in range(150):
            home.context.clock.sleep(0.4)
            with self.tolerating(ConflictError, NotFoundError):
                if find_archive(self.quiet, "day").promotion is not None:
                    number = self.random.randrange(PARTITIONS)
                    self.append(home.context, number, [self.event()])

    def backfill(self) -> None:
        """Drive the generation that is being built, while it may be dropped or promoted."""
        home = self.home()
        for _ in range(self.rounds):
            home.context.clock.sleep(self.random.uniform(0, 3))
            with self.tolerating(InvalidError, NotFoundError):
                building = find_archive(home.context, "day").building
                if building is not None:
                    self.drive_some(home, building)

    def change_generation(self, home: Home) -> None:
        archive = find_archive(home.context, "day")
        if archive.building is not None and self.chance(0.6):
            promote(home.context, "day")
            self.done.promoted += 1
            return
        if archive.building is None and self.chance(0.6):
            super().change_generation(home)
            return
        written_as = archive.formats.get(archive.building or 0, BY_MINUTE)
        _, number = begin_backfill(home.context, "day", written_as)
        self.done.backfills += 1
        home.context.clock.sleep(self.random.uniform(0, 4))
        drop_generation(home.context, "day", number, force=True)
        self.done.dropped += 1


class HolesWorld(GenerationsWorld):
    """Generations that are built from a backup which lacks events."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.kinds = {"build", self.random.choice(["trim", "erase", "replay", "build"])}
        self.is_followed = False
        self.builders: set[str] = set()  # drivers that were opened for a backfill
        self.epochs: tuple[int, dict[str, int]] = (0, {})  # of heads when a generation went live
        self.seen: tuple[int, ...] = ()

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        super()._patch(patch)
        begin = Cycle.__init__

        def noting(
            cycle: Cycle, context: Context, pipeline: Pipeline, owner: str, *how: Any
        ) -> None:
            begin(cycle, context, pipeline, owner, *how)
            if isinstance(pipeline.source, FillSource):
                self.builders.add(owner)

        patch.setattr(Cycle, "__init__", noting)

    def check(self) -> None:
        super().check()
        (live,) = (each for each in self.folders.live() if each.archive == "day")
        seen = (live.number, *self.folders.changes(live))
        if seen != self.seen:
            self.seen = seen
            self.check_owners(live)

    def check_owners(self, live: Generation) -> None:
        """A driver that was opened for a backfill takes no head after the promote."""
        found = {
            each: self.folders.source_rows(live, each) for each in self.folders.partitions(live)
        }
        heads = {partition: rows.head for partition, rows in found.items() if rows is not None}
        if self.epochs[0] != live.number:
            self.epochs = live.number, {each: head["epoch"] for each, head in heads.items()}
        for partition, head in heads.items():
            is_later = head["epoch"] > self.epochs[1].get(partition, 0)
            assert not is_later or head["owner"] not in self.builders, (
                f"{live.folder} {partition}: a driver of the backfill took it after the promote"
            )

    def wait_opened(self, home: Home, generation: int | None) -> None:
        """Some drivers of a backfill begin after its generation was promoted, and driven on."""
        if generation is not None and self.process.name == "backfill" and self.chance(0.4):
            home.context.clock.sleep(self.random.uniform(0, 20))

    def change_generation(self, home: Home) -> None:
        archive = find_archive(home.context, "day")
        others = archive.in_state("kept")
        if archive.building is not None:
            self.drive_some(home, archive.building)
            promote(home.context, "day")
            self.done.promoted += 1
            if self.chance(0.3):
                rollback(home.context, "day", generation=archive.generation)
                self.done.rolled_back += 1
        elif others and self.chance(0.4):
            if self.chance(0.5):
                drop_generation(home.context, "day", self.random.choice(others))
                self.done.dropped += 1
            else:
                rollback(home.context, "day", generation=self.random.choice(others))
                self.done.rolled_back += 1
        else:
            source = self.random.choice(["holed:day", "holed:day", ""])
            begin_backfill(home.context, "day", msgspec.structs.replace(BY_MINUTE, source=source))
            self.done.backfills += 1


class ErasureWorld(BusyWorld):
    """Events that are deleted while they are archived, and proofs at any moment."""

    rates = RATES | {Fault.STALL: 0.006, Fault.LOSE_REQUEST: 0.001, Fault.LOSE_REPLY: 0.003}

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.held: list[str] = []
        self._faulty_store = type("Staging", (StagingStore,), {"held": self.held})
        self.kinds = {"erase", self.random.choice(["build", "trim", "replay", "chain", "trim"])}
        self.wanted: set[str] = set()  # ids whose delete has returned

    def erase(self) -> None:
        home = self.home()
        for _ in range(3):
            home.context.clock.sleep(self.random.uniform(0, 8))
            for _ in range(self.random.choice([0, 8])):
                if not self.held:
                    home.context.clock.sleep(1)
            ids: list[str] = []
            with self.tolerating(NotFoundError, InvalidError, ConflictError):
                ids = self.delete(home)
                self.wanted.update(ids)
                self.done.erased += 1
            for _ in range(4):
                home.context.clock.sleep(self.random.uniform(0, 4))
                with self.tolerating(NotFoundError, InvalidError, ConflictError):
                    self.prove(home, ids)

    def delete(self, home: Home) -> list[str]:
        """Delete new events, some, or all of one key; the ids that are gone then."""
        chance = self.random.random()
        if chance < 0.2:
            key = f"k{self.random.randrange(KEYS)}".encode()
            ids = self.ids_of(key)
            self.accountant.asked.update(ids)
            delete_key(home.context, home.amender("t", WHY), key)
            self.accountant.asked.update(self.ids_of(key))
            return ids
        newest = sorted(self.truth.by_id.keys() & set(self.held)) or sorted(self.truth.by_id)[-3:]
        ids = [self.random.choice(newest)] if chance < 0.7 else self.some_ids(2)
        self.accountant.asked.update(ids)
        delete_events(home.context, home.amender("t", WHY), ids)
        return ids

    def ids_of(self, key: bytes) -> list[str]:
        """Ids of events of the topic with a key."""
        own = self.topic.incarnation
        events = self.truth.events.items()
        return [raw.id for place, raw in events if raw.key == key and place[0] == own and raw.id]

    def prove(self, home: Home, ids: list[str]) -> None:
        """A proof that is clean must be true, whatever was carried out before it."""
        topic = find_topic(home.context, "t")
        if self.chance(0.6):
            purge(home.context, topic, 0)
        proof = prove_erased(home.context, topic, ids) if ids else None
        if proof is not None and proof.is_erased and proof.known:
            gone = [each for each in ids if self.is_gone(each, topic)]
            self.erasures.prove(gone)
            self.done.proven += len(gone)

    def is_gone(self, event_id: str, topic: Topic) -> bool:
        """Whether it was deleted from the topic; or from its archives, after it was trimmed."""
        if super().is_gone(event_id, topic):
            return True
        places = self.truth.by_id.get(event_id, [])
        return event_id in self.wanted and all(
            place[0] == topic.incarnation
            and any(state in (DELETED, TRIMMED) for _, state in self.truth.history[place])
            for place in places
        )


class RemadeWorld(ArchivesWorld):
    """The topic is deleted and created again while its first ranges are read."""

    remade_after_s = (0, 12)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.kinds = {"remake", self.random.choice(["build", "erase", "replay", "later"])}

    def spawn_all(self) -> None:
        super().spawn_all()
        self._spawn("driver-3", self.run_drivers)


class OrphansWorld(ErasureWorld):
    """Archives that outlive their topic: events are erased from them, and proofs of that."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.kinds = {"erase", "remake", self.random.choice(["build", "replay", "chain", "chain"])}

    def remake(self) -> None:
        """Delete the topic; in some worlds another one gets its name."""
        context = self._context()
        context.clock.sleep(self.random.uniform(2, 20))
        for _ in range(4):
            with self.tolerating(NotFoundError, ConflictError):
                delete_topic(context, "t")
                self.done.remade += 1
                break
        if "chain" not in self.kinds and self.chance(0.3):
            with self.tolerating(ConflictError, AlreadyExistsError):
                create_topic(
                    context, Topic("t", context.ids.new(), PARTITIONS, context.clock.now_ms())
                )

    def delete(self, home: Home) -> list[str]:
        """Erase events from all archives that may hold them, or from one; the ids.

        A proof for that one is not clean then: others of its topic hold the events.
        """
        by_key = self.done.remade and self.chance(0.3)  # no event of the key comes any more
        key = f"k{self.random.randrange(KEYS)}".encode() if by_key else None
        ids = self.some_ids(2) if key is None else self.ids_of(key)
        self.accountant.asked.update(ids)
        names = self.names() if self.chance(0.6) else [self.random.choice(self.names())]
        for name in names:
            archive = find_archive(home.context, name)
            erase_archived(home.context, archive, WHY, () if key else ids, key)
        return ids

    def prove(self, home: Home, ids: list[str]) -> None:
        """A proof that is clean must be true, whatever was carried out before it."""
        archive = find_archive(home.context, self.random.choice(self.names()))
        if not ids:
            return
        if self.chance(0.6):
            finish_archive(home.context, archive)
            sweep_home(home.context, 0)
            sweep_archives(home.context, 0)
        proof = prove_erased_from_archive(home.context, archive, ids)
        if proof.is_erased and proof.known:
            gone = [each for each in ids if self.is_orphan(each)]
            self.erasures.prove(gone)
            self.done.proven += len(gone)

    def is_orphan(self, event_id: str) -> bool:
        """Whether an event was in the deleted topic alone."""
        places = self.truth.by_id.get(event_id, [])
        return all(place[0] == self.topic.incarnation for place in places)

    def check_erased(self, home: Home) -> None:
        """What was erased while there was a topic has its own worlds; proofs hold to the end."""
        for _ in range(2):
            self.scheduler.time.advance(86_400 * 8)  # objects that no row names stay for a week
            self.pass_notes()
            sweep_home(home.context, 0)
            sweep_archives(home.context, 0)
        self.prove(home, sorted(self.wanted))


class MarkersWorld(ArchivesWorld):
    """Folders of minutes, events late or from the future, and replays into marked folders."""

    rates = RATES
    attempts = (3,)
    first_formats = (BY_MINUTE_A,)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        other = self.random.choice(["chain", "erase", "build"])
        self.kinds = {"finalize", "replay", other if seed % 4 else "chain"}
        self.ahead = 0.6 if seed % 2 else 0.0
        if self.ahead or not seed % 4:  # what waits is soon older than that
            self.delay_ms = self.markers.delay_ms = 3_000

    def spawn_all(self) -> None:
        super().spawn_all()
        if self.ahead or "chain" in self.kinds:
            self._spawn("lag", self.lag)

    def lag(self) -> None:
        """Finalize while an event of the last minute waits, though a driver has seen later ones.

        An event from the future is archived before it, or a chain has all that its archive has.
        """
        home = self.home()
        last = self.names()[0]  # the chain, if there is one
        for _ in range(2):
            self.sleep_until(home, 50_000)
            with self.tolerating(ConflictError, NotFoundError, InvalidError):
                number = self.random.randrange(PARTITIONS)
                later = [self.shifted(self.timely(), 86_400_000)] if self.ahead else []
                self.append(home.context, number, [self.timely(), *later])
                for name in dict.fromkeys(["day", last]):
                    self.drive(home, name, take_over=True)
                self.append(home.context, number, [self.timely()])
                self.sleep_until(home, self.delay_ms + 1_000)
                self.finalize_one(home, last)

    def sleep_until(self, home: Home, at_ms: int) -> None:
        """Sleep until so long after a minute began."""
        now_ms = self.scheduler.time.now_ms()
        home.context.clock.sleep((at_ms - now_ms) % 60_000 / 1000)

    def timely(self) -> Event:
        """An event of the present that every parser accepts."""
        event = super().event()
        event_id, _, _ = (event.value or b"").decode().split("=")
        now_ms = self.scheduler.time.now_ms()
        return Event(f"{event_id}={now_ms}=a".encode(), key=event.key, id=event.id)

    def shifted(self, event: Event, shift_ms: int) -> Event:
        """The same event with a time before or after the present."""
        event_id, _, kind = (event.value or b"").decode().split("=")
        time_ms = self.scheduler.time.now_ms() + shift_ms
        return Event(f"{event_id}={time_ms}={kind}".encode(), key=event.key, id=event.id)

    def replay_layout(self) -> dict[str, str]:
        """Replays may put events of a minute into the folder of its hour or day."""
        return {"granularity": self.random.choice(["day", "hour", "minute"])}

    def event(self) -> Event:
        """Some events are late by up to some minutes; in every second world some are days ahead."""
        event = super().event()
        shift_ms = -self.random.randrange(30_000, 240_000) if self.chance(0.15) else 0
        if self.ahead and not shift_ms and self.chance(self.ahead):
            shift_ms = self.random.randrange(1, 30) * 86_400_000
        return self.shifted(event, shift_ms) if shift_ms else event
