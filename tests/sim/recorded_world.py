"""Copies that only the home's audit has a record of, and ids that a copy had before.

Besides the pumps and restores of ``copies``, a handler fails on events of ``t`` and moves them to
``letters``. An id is tried out in ``restored`` and deleted there, before ``t`` gets an event with
it, which may be restored and is deleted from ``t`` alone. In every third world reasons of deletes
quote the ids, and some of these deletes die. In the end more time has passed than
records of the audit are kept, and a sweep has forgotten old ones: a clean proof must be true of
every byte all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.sim.copies_world import CopiesDone, CopiesWorld
from tests.sim.journal_home import PARTITIONS
from tidelog.coordination.audit import (
    ACTIONS_KEPT_MS,
    DeadLetterRecorder,
    forget_actions,
    record_action,
)
from tidelog.errors import ConflictError, InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.log.consumer.handler import dead_letter_to
from tidelog.maintenance.erase import purge
from tidelog.model.event import Event
from tidelog.model.topic import Topic

__all__ = ["RecordedWorld"]


@dataclass
class RecordedDone(CopiesDone):
    """What has happened here too."""

    letters: int = 0
    tried: int = 0
    forgotten: int = 0  # records of the audit


class RecordedWorld(CopiesWorld):
    """One seed's world."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.done: RecordedDone = RecordedDone()
        self.returns = False
        self.quotes = seed % 3 == 1
        self.spared: set[str] = set()  # topics that are not erased from yet

    def fill(self) -> None:
        super().fill()
        self.create("letters")

    def spawn_all(self) -> None:
        super().spawn_all()
        self._spawn("fail", self.fail)
        self._spawn("try", self.try_out)

    def fail(self) -> None:
        """Handle events, and fail on some of them."""
        home = self.home()
        record = DeadLetterRecorder(home.context, "topic:t", "letters", "consumer `c`")

        def append(topic: str, events: Sequence[Event]) -> None:
            number = self.random.randrange(PARTITIONS)
            self.append_to(home.context, topic, number, events)

        move = dead_letter_to(append, "letters", "c", record)
        for _ in range(3):
            home.context.clock.sleep(self.random.uniform(0, 12))
            with self.tolerating(NotFoundError, InvalidError, ConflictError):
                events = list(home.read("t"))
                failed = self.random.sample(events, min(3, len(events)))
                move(failed, ValueError("refused"))
                self.done.letters += len(failed)

    def try_out(self) -> None:
        """Delete events from a copy, and then give their ids to events of the topic."""
        home = self.home()
        for _ in range(3):
            home.context.clock.sleep(self.random.uniform(0, 8))
            with self.tolerating(NotFoundError, InvalidError, ConflictError):
                self.try_id(home)

    def try_id(self, home: Home) -> None:
        event, number = self.event(), self.random.randrange(PARTITIONS)
        ids = [event.id or ""]
        copy = home.topic("restored")
        self.truth.targets.add(copy.incarnation)
        self.append_to(home.context, "restored", number, [event])
        home.delete("restored", ids, why="a trial")
        purge(home.context, copy, 0)
        home.context.clock.sleep(1)
        self.append(home.context, number, [event])
        self.done.tried += 1
        if self.chance(0.5):
            self.drive(home, "day", accept_loss=True, take_over=True)
            self.copy_to(home, "restored")
        self.accountant.asked.update(ids)
        home.delete("t", ids, why="request")
        self.prove(home, ids)

    def reason(self, ids: Sequence[str]) -> str:
        return f"request for {' and '.join(ids)}" if self.quotes else super().reason(ids)

    def check_rest(self) -> None:
        """Prove after the sweep has forgotten what it may forget."""
        home = self.home(self.quiet)
        record_action(home.context, "login", "before")
        self.scheduler.time.advance(ACTIONS_KEPT_MS / 1000 + 86_400)
        record_action(home.context, "login", "after")
        self.done.forgotten += forget_actions(home.context)
        super().check_rest()

    def erase_everywhere(self, home: Home, gone: list[str]) -> None:
        """At first everywhere else: then only the audit says that something is left."""
        for spared in ({"letters"}, set[str]()):
            self.spared = spared
            with self.home(self.quiet) as own:  # which ends the threads that copies begin
                super().erase_everywhere(own, gone)
            self.prove(home, gone)

    def topics(self, home: Home) -> list[Topic]:
        return [each for each in super().topics(home) if each.name not in self.spared]
