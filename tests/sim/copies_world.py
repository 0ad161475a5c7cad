"""Copies of a topic, some of which are deleted: every proof says where events may be left.

``t`` is pumped into ``pumped``, that one into ``further``, and the archive of ``t`` is restored
into ``restored``. ``pumped`` has an archive of its own, ``far``. A process deletes the copies at
any moment and creates some of them again; what was made of them stays. In every second world ``t``
itself is deleted, and created again as what its archive holds. In every third one the pump into
``pumped`` gives its events other times, most of which are ahead for a while.

Events are deleted from ``t``, and after that from some of the copies. Proofs run at any moment: a
clean one must be true of every byte, except in archives and topics that it names as not searched.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tests.sim.archive_accounts import Accountant
from tests.sim.archive_store import Generation, Stored
from tests.sim.archive_world import BY_DAY, RAW, ArchivesWorld, Done
from tests.sim.archive_worlds import RATES, WHY
from tests.sim.journal_home import PARTITIONS
from tests.sim.journal_raw import DELETED
from tidelog.archive.archive import find_archive
from tidelog.archive.restore import RestoreOptions, restore
from tidelog.codec.fields import FieldPaths
from tidelog.connectors.sink import RangeWriter, WriterResult
from tidelog.connectors.topic.sink import FieldedSink
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import list_pipelines
from tidelog.erasure.delete_archived import erase_archived, finish_archive
from tidelog.erasure.proof import Proof
from tidelog.erasure.proof_search import prove_erased
from tidelog.errors import AlreadyExistsError, ConflictError, InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.topics import create_topic, delete_topic, find_topic, list_topics
from tidelog.maintenance.erase import purge
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.maintenance.turn import ArchiveEraser
from tidelog.model.topic import Topic
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.registry import delete_pipeline

__all__ = ["CopiesDone", "CopiesWorld"]

COPIES = ("pumped", "further", "restored")
PUMPS = {"pumped": "t", "further": "pumped"}  # each topic with its source


class CopiesAccountant(Accountant):
    """Knows events by ids and places.

    The topic that was created again has an id twice if it was filled and archived before the
    restore, which appends to it what its own archive holds.
    """

    def mark(self, stored: Stored) -> str:
        return f"{stored.id}@{stored.place[1]}/{stored.place[2]}"


@dataclass
class CopiesDone(Done):
    """What has happened here too."""

    removed: int = 0
    returned: int = 0
    listed: int = 0  # proofs that name something as not searched


class _RetimedSink(FieldedSink):
    """A sink whose events get other times, as if a field had named them."""

    def writer(self, partition: str, staging: str) -> RangeWriter:
        return _RetimedWriter(self.sink.writer(partition, staging))


@dataclass(frozen=True)
class _RetimedWriter:
    writer: RangeWriter

    def write(self, batch: pa.RecordBatch) -> None:
        column = batch.column("timestamp")
        shift_ms = pc.multiply(pc.bit_wise_and(batch.column("offset"), 7), 10_000)
        times = pc.add(column.cast(pa.int64()), shift_ms).cast(column.type)
        index = batch.schema.get_field_index("timestamp")
        self.writer.write(batch.set_column(index, batch.schema.field(index), times))

    def close(self) -> WriterResult:
        return self.writer.close()


class CopiesWorld(ArchivesWorld):
    """One seed's world."""

    accountants = CopiesAccountant

    rates = RATES
    attempts = (3,)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.done: CopiesDone = CopiesDone()
        self.kinds = {"erase"}
        self.returns = seed % 2 == 1
        self.retimes = seed % 3 == 2

    def fill(self) -> None:
        """Some events, archives of a topic and of its copy, and the copies."""
        for partition in range(PARTITIONS):
            self.append(self.quiet, partition, [self.event() for _ in range(6)])
        home = self.home(self.quiet)
        self.create_archive(home, "day", "topic:t", BY_DAY)
        for name in COPIES:
            self.create(name)
        self.create_archive(home, "far", "topic:pumped", RAW)

    def spawn_all(self) -> None:
        self._spawn("producer", self.produce)
        self._spawn("driver", self.run_drivers)
        self._spawn("sweeper", self.sweep)
        self._spawn("copy", self.copy)
        self._spawn("remove", self.remove)
        self._spawn("erase", self.erase)
        if self.returns:
            self._spawn("return", self.bring_back)

    # Copies.

    def copy(self) -> None:
        """Copy on, now and then."""
        home = self.home()
        for _ in range(8):
            home.context.clock.sleep(self.random.uniform(0, 6))
            with self.tolerating(NotFoundError, InvalidError):
                self.copy_to(home, self.random.choice(COPIES))

    def copy_to(self, home: Home, name: str) -> None:
        driving = DriverOptions(stop=self.stop(), take_over=True, accept_loss=True)
        if name in PUMPS:
            is_retimed = self.retimes and name == "pumped"
            fields = FieldPaths(time="due") if is_retimed else FieldPaths()
            wanted = PumpOptions(f"topic:{PUMPS[name]}", name, fields=fields, partition="same")
            pump = open_pump(home.context, wanted, self.workers)
            if isinstance(pump.sink, FieldedSink):
                pump = replace(pump, sink=_RetimedSink(pump.sink.sink, fields))
            Driver(home.context, pump, driving).run()
            self.done.pumped += 1
        else:
            restore(home.context, RestoreOptions("day", f"topic:{name}"), self.workers, driving)
            self.done.restored += 1

    def remove(self) -> None:
        """Delete copies; some of them are created again."""
        context = self._context()
        for _ in range(2):
            context.clock.sleep(self.random.uniform(5, 25))
            name = self.random.choice(COPIES)
            with self.tolerating(NotFoundError, ConflictError):
                self.done.removed += 1  # also if its reply is lost
                delete_topic(context, name)
            if self.chance(0.4):
                self.create_again(context, name)

    def bring_back(self) -> None:
        """Delete the topic, and restore its archive into another one with its name."""
        home = self.home()
        home.context.clock.sleep(self.random.uniform(5, 25))
        for _ in range(4):
            with self.tolerating(NotFoundError, ConflictError):
                delete_topic(home.context, "t")
                break
        self.create_again(home.context, "t")
        with self.tolerating(NotFoundError, InvalidError, ConflictError):
            self.copy_to(home, "t")
            self.done.returned += 1

    def create_again(self, context: Context, name: str) -> None:
        with self.tolerating(ConflictError, AlreadyExistsError):
            new = Topic(name, context.ids.new(), PARTITIONS, context.clock.now_ms())
            create_topic(context, new)

    # Erasures.

    def erase(self) -> None:
        """Delete events, from some of their copies too, and ask for proofs."""
        home = self.home()
        for _ in range(4):
            home.context.clock.sleep(self.random.uniform(0, 12))
            ids = self.some_ids(2)
            self.accountant.asked.update(ids)
            with self.tolerating(NotFoundError, InvalidError, ConflictError):
                home.delete("t", ids, why=self.reason(ids))
                self.done.erased += 1
            for name in self.random.sample(COPIES, self.random.randint(0, len(COPIES))):
                with self.tolerating(NotFoundError, InvalidError, ConflictError):
                    self.erase_from(home, name, ids)
            with self.tolerating(NotFoundError, InvalidError, ConflictError):
                self.prove(home, ids)

    def reason(self, ids: Sequence[str]) -> str:
        return "request"

    def erase_from(self, home: Home, name: str, ids: Sequence[str]) -> None:
        home.delete(name, ids, why=self.reason(ids))
        purge(home.context, find_topic(home.context, name), 0)

    def prove(self, home: Home, ids: list[str]) -> None:
        """A proof that is clean must be true, except for what it lists."""
        topic = find_topic(home.context, "t")
        purge(home.context, topic, 0)
        self.check_proof(prove_erased(home.context, topic, ids), topic, ids)

    def check_proof(self, proof: Proof, topic: Topic, ids: Sequence[str]) -> None:
        if not proof.is_clean:
            return
        gone = [each for each in ids if self.is_gone(each, topic)]
        unsearched = self.unsearched(proof)
        self.erasures.prove(gone, unsearched)
        self.done.proven += len(gone)
        self.done.listed += bool(unsearched)

    def is_gone(self, event_id: str, topic: Topic) -> bool:
        """Whether an event was deleted from this topic: a clean proof then covers its copies."""
        own = self.truth.by_id_in(event_id, topic.incarnation)
        return bool(own) and all(
            any(state is DELETED for _, state in self.truth.history[place]) for place in own
        )

    def unsearched(self, proof: Proof) -> list[str]:
        """Folders of what a proof names as not searched."""
        found = []
        named = [re.match(r"(archive|topic) `(\w+)`", each) for each in proof.out_of_reach]
        for kind, name in (each.groups() for each in named if each is not None):
            if kind == "archive":
                row = self.folders.archives()[name]
                found += [f"archives/{name}/", f"dead/{name}/", f"staging/{row['incarnation']}."]
            else:
                found.append(f"topics/{find_topic(self.quiet, name).incarnation}/")
                if name == "pumped" and self.retimes:  # its message names its archives too
                    row = self.folders.archives()["far"]
                    found += ["archives/far/", "dead/far/", f"staging/{row['incarnation']}."]
        return found

    # In the end.

    def check_rest(self) -> None:
        """Erase everywhere what was deleted from the topic: then a proof is clean, and true."""
        home = self.home(self.quiet)
        ArchiveEraser(home.context).turn()
        topic = next((each for each in self.topics(home) if each.name == "t"), None)
        gone = sorted(each for each in self.truth.by_id if topic and self.is_gone(each, topic))
        if topic and gone:
            if self.retimes:
                self.prove_later(home, gone)
            self.prove(home, gone)
            self.erase_everywhere(home, gone)
            proof = prove_erased(home.context, topic, gone)
            assert proof.is_erased, f"the proof finds {proof.traces[:3]}"
            self.check_proof(proof, topic, gone)
        self.accountant.check_live()
        for live in self.folders.live():
            self.check_archive(home, live)

    def prove_later(self, home: Home, gone: list[str]) -> None:
        """Prove when no event is ahead any more, and only ``pumped`` may still have it."""
        self.scheduler.time.advance(120)
        with self.home(self.quiet) as own:  # which ends the threads that deletes begin
            for topic in self.topics(home):
                if topic.name not in ("t", "pumped"):
                    self.erase_from(own, topic.name, gone)
        for each in gone:
            self.prove(home, [each])

    def erase_everywhere(self, home: Home, gone: list[str]) -> None:
        """Finish copies that are under way, and erase events from all that may hold them."""
        for name in COPIES:
            try:
                self.copy_to(home, name)
            except (InvalidError, NotFoundError):  # its source or its target was deleted
                self.forget(home, name)
        with self.home(self.quiet) as own:  # which ends the threads that deletes begin
            for topic in self.topics(home):
                own.delete(topic.name, gone, why="request")
        for name in self.names():
            with self.tolerating_removed():
                self.drive(home, name, accept_loss=True, take_over=True)
        for _ in range(2):
            self.scheduler.time.advance(86_400 * 8)  # objects that no row names stay for a week
            self.pass_notes()
            for topic in self.topics(home):
                purge(home.context, topic, 0)
            for name in self.names():
                archive = find_archive(home.context, name)
                with self.tolerating_removed():  # its topic is there
                    erase_archived(home.context, archive, WHY, gone)
                finish_archive(home.context, archive)
            sweep_home(home.context, 0)
            sweep_archives(home.context, 0)

    def topics(self, home: Home) -> list[Topic]:
        """Topics that are there; finishes deletes that died."""
        for each in list(list_topics(home.context)):
            if each.state == "deleting":
                delete_topic(home.context, each.name)
        return [each for each in list_topics(home.context) if each.state == "ready"]

    def forget(self, home: Home, name: str) -> None:
        """Delete pipelines into a topic that is there: their source is not, so they never end."""
        for pipeline in list(list_pipelines(home.context)):
            into = any(topic.incarnation == pipeline.target for topic in self.topics(home))
            if into and pipeline.sink.startswith(f"topic:{name}?"):
                delete_pipeline(home.context, pipeline.name)

    def tolerating_removed(self) -> Any:
        """Ignores refusals for a topic that is not there, or was created again."""
        return contextlib.suppress(InvalidError, NotFoundError)

    def is_remade(self) -> bool:
        return True

    def check_archive(self, home: Home, live: Generation) -> None:
        """What became of the topic of an archive has its own worlds."""
        if live.archive == "day" or not self.done.removed:
            super().check_archive(home, live)
