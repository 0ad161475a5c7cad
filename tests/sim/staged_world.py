"""Writes of Spark in a bad world: tasks stage segments, drivers commit them, without Spark itself.

Two drivers run one query, as after a restart that left the old driver alive: each takes the next
batch of the checkpoint, lets tasks stage its rows, some of them twice, and commits. A third process
writes batches by name and number, and repeats them. Another one stages and dies. Meanwhile events
are deleted and proofs are asked for, the topic is compiled and swept.

Each event of a batch is in the topic at most once at every moment, and once in the end, unless it
was deleted. A batch whose commit has returned is there as a whole. A proof that is clean is true,
also about what killed writes have staged, and a sweep leaves nothing of them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass

import pyarrow as pa
import pytest

from tests.sim import archive_home
from tests.sim.archive_home import ArchivesHome
from tests.sim.base import check_swept
from tests.sim.journal_raw import DELETED, Gone
from tidelog.codec.event_batch import Contents
from tidelog.erasure.proof_search import prove_erased
from tidelog.errors import ConflictError, InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.topics import find_topic
from tidelog.maintenance.erase import purge
from tidelog.model import layout
from tidelog.model.event import Event
from tidelog.model.topic import Topic
from tidelog.spark import write as staging
from tidelog.spark.plan import ExecutorContext
from tidelog.spark.write import Batch, SparkSink, WriteStaging
from tidelog.testing.faults import Fault, Process

__all__ = ["StagedDone", "StagedWorld"]

QUERY = "query-1"
DAY_S = 86_400
TASKS = 2


@dataclass
class StagedDone:
    """What has happened, for tests that the world is not idle."""

    batches: int = 0
    repeats: int = 0
    killed: int = 0
    erased: int = 0
    proven: int = 0
    swept: int = 0


class StagedWorld(ArchivesHome):
    """One seed's world."""

    rates = archive_home.RATES | {Fault.CRASH_BEFORE: 0.004, Fault.CRASH_AFTER: 0.006}
    attempts = (3,)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.done = StagedDone()
        self.batches: dict[tuple[str, int], list[list[Event]]] = {}  # by sink: rows by task
        self.checkpoint = -1  # the last batch that a driver has noted as done
        self.stored: set[tuple[str, int]] = set()  # batches whose commit has returned

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        super()._patch(patch)
        patch.setattr(staging, "open_executor", lambda _: self.executor())

    def executor(self) -> ExecutorContext:
        """What a task works with; it runs in the process of its driver."""
        current = self.scheduler.current
        inside = current is not None and isinstance(current.group, Process)
        context = self._context() if inside else self.quiet
        return ExecutorContext(context.store, context.clock, context.ids)

    def fill(self) -> None:
        self.append(self.quiet, 0, [self.event() for _ in range(3)])

    def spawn_all(self) -> None:
        self._spawn("driver-1", self.run_query)
        self._spawn("driver-2", self.run_query)
        self._spawn("writer", self.write_batches)
        self._spawn("killed", self.stage_only)
        self._spawn("erase", self.erase)
        self._spawn("sweep", self.sweep)

    # Writers.

    def run_query(self) -> None:
        """A driver of the query: the next batch of the checkpoint, again and again."""
        home = self.home()
        for _ in range(5):
            home.context.clock.sleep(self.random.uniform(0, 4))
            number = self.checkpoint + 1
            with self.tolerating(InvalidError, NotFoundError):  # the other one is ahead
                self.write(home, "stream", QUERY, number)
                self.checkpoint = max(self.checkpoint, number)

    def write_batches(self) -> None:
        """Batch writes under numbers; some are repeated, as a job is that was started again."""
        home = self.home()
        for number in range(4):
            home.context.clock.sleep(self.random.uniform(0, 5))
            for _ in range(self.random.choice([1, 1, 2])):
                with self.tolerating(InvalidError, NotFoundError):
                    self.write(home, "job", "", number)

    def write(self, home: Home, sink: str, query: str, number: int) -> None:
        """Stage all rows of a batch, and commit it."""
        topic = find_topic(home.context, "t")
        how = WriteStaging(home.settings, topic, sink, use_partition=False)
        messages = []
        for index, rows in enumerate(self.rows_of(sink, number)):
            if self.chance(0.2):  # an attempt that Spark does not count
                staging.stage(how, number, index, [_batch(rows)])
            messages.append(staging.stage(how, number, index, [_batch(rows)]))
        segments = tuple(each for found, _ in messages for each in found)
        contents = functools.reduce(Contents.plus, (each for _, each in messages))
        self.done.repeats += (sink, number) in self.stored
        SparkSink(home.context, topic, sink).commit(Batch(query, number, segments, contents))
        self.stored.add((sink, number))
        self.done.batches += 1
        self.check_batch(sink, number)

    def rows_of(self, sink: str, number: int) -> list[list[Event]]:
        """The rows of each task, which are the same whenever the batch is computed."""
        if (sink, number) not in self.batches:
            made = [[self.event() for _ in range(self.random.randint(1, 3))] for _ in range(TASKS)]
            self.batches[sink, number] = made
        return self.batches[sink, number]

    def stage_only(self) -> None:
        """Tasks of a write that is killed before it commits, perhaps after the first one."""
        home = self.home()
        for number in range(self.random.choice([1, 2])):
            home.context.clock.sleep(self.random.uniform(0, 6))
            with self.tolerating(NotFoundError):
                topic = find_topic(home.context, "t")
                known = sorted(self.truth.by_id)
                rows = [self.event(), *self.copies(known[-2:])]  # a job that writes them again
                how = WriteStaging(home.settings, topic, "killed", use_partition=False)
                # The first task gets a slice: the buffers in memory hold the other rows too.
                some = _batch(rows) if number else _batch(rows).slice(0, 1)
                staging.stage(how, number, 0, [some])
                self.done.killed += 1

    def copies(self, ids: list[str]) -> list[Event]:
        """Events that are in the topic, as a job has read them."""
        found = [(each, self.truth.by_id[each][0]) for each in ids]
        raws = [(each, self.truth.events[place]) for each, place in found]
        return [Event(raw.value, key=raw.key, id=each) for each, raw in raws]

    # Erasure and sweeps.

    def erase(self) -> None:
        home = self.home()
        for _ in range(2):
            home.context.clock.sleep(self.random.uniform(0, 8))
            ids = sorted(self.truth.by_id)[-2:]
            with self.tolerating(NotFoundError, InvalidError, ConflictError):
                home.delete("t", ids, why="request")
                self.done.erased += 1
            for _ in range(2):
                home.context.clock.sleep(self.random.uniform(0, 4))
                with self.tolerating(NotFoundError, InvalidError, ConflictError):
                    self.prove(home, ids)

    def prove(self, home: Home, ids: list[str]) -> None:
        topic = find_topic(home.context, "t")
        if self.chance(0.7):
            purge(home.context, topic, 0)
        before = self.staged_by_killed(topic)
        proof = prove_erased(home.context, topic, ids)
        gone = [each for each in ids if self.is_deleted(each)]
        if proof.is_erased and proof.known and gone == ids:
            self.check_traces(ids, self.staged_by_killed(topic) - before)
            self.done.proven += len(ids)

    def staged_by_killed(self, topic: Topic) -> set[str]:
        return set(self.bare_objects.keys_below(layout.sinks(topic.incarnation, "killed")))

    def check_traces(self, ids: list[str], staged: Collection[str] = ()) -> None:
        """A clean proof is true at this moment, except for what a job staged during its search.

        A job that has read the rows before the delete may write them again at any time.
        """
        known = len(self.erasures.proven)
        self.erasures.prove(ids, sorted(staged))
        del self.erasures.proven[known:]

    def is_deleted(self, event_id: str) -> bool:
        places = self.truth.by_id.get(event_id, [])
        return all(self.truth.now(place) is DELETED for place in places)

    def sweep(self) -> None:
        """Sweeps, and days that pass between two of them now and then."""
        home = self.home()
        for _ in range(4):
            home.context.clock.sleep(self.random.uniform(0, 8))
            if self.chance(0.3):
                self.scheduler.time.advance(DAY_S * self.random.uniform(0.4, 2))
            with self.tolerating(NotFoundError):
                check_swept(sweep_home(home.context, 5_000), *self.accepted)
                self.done.swept += 1

    # What must hold.

    def check(self) -> None:
        self.rows.touched.clear()
        own = self.topic.incarnation
        for event_id in self.truth.touched:
            places = [place for place in self.truth.by_id[event_id] if place[0] == own]
            assert len(places) <= 1, f"{event_id} is at {places}"
        self.truth.touched.clear()

    def check_batch(self, sink: str, number: int) -> None:
        """Each event of a batch that was committed is there once, or was deleted."""
        for event in (each for rows in self.batches[sink, number] for each in rows):
            places = self.truth.by_id.get(event.id or "", [])
            assert len(places) == 1, f"batch {number} of {sink}: {event.id} is at {places}"

    def check_rest(self) -> None:
        home = self.home(self.quiet)
        self.scheduler.time.advance(60)  # leases end
        for sink, number in sorted(self.batches):
            last = max(each for name, each in self.batches if name == sink)
            if number == last:  # the only one that may not be stored
                self.write(home, sink, QUERY if sink == "stream" else "", number)
        for sink, number in sorted(self.stored):
            self.check_batch(sink, number)
        gone = [each for each in sorted(self.truth.by_id) if self.is_deleted(each)]
        for _ in range(2):
            self.scheduler.time.advance(DAY_S * 8)  # strays are kept for a week
            self.pass_notes()
            purge(home.context, self.topic, 0)
        left = self.bare_objects.keys_below(layout.sinks(self.topic.incarnation, "")[:-1])
        assert not left, f"staged segments are left: {left[:3]}"
        if gone:
            proof = prove_erased(home.context, find_topic(self.quiet, "t"), gone)
            assert proof.is_erased, f"the proof finds {proof.traces[:3]}"
            self.check_traces(gone)

    def acknowledged(self) -> int:
        return sum(not isinstance(self.truth.now(place), Gone) for place in self.truth.events)


def _batch(events: list[Event]) -> pa.RecordBatch:
    """Rows as Spark gives them to a task."""
    return pa.record_batch(
        {
            "id": pa.array([each.id for each in events], pa.string()),
            "key": pa.array([each.key for each in events], pa.binary()),
            "value": pa.array([each.value for each in events], pa.binary()),
        }
    )
