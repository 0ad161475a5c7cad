"""Smaller worlds of journals, each with a few processes that get into each other's way."""

from __future__ import annotations

import contextlib

from tests.sim.journal_home import Desk
from tests.sim.journal_world import JournalWorld
from tidelog.journal.compile_policy import CompilePolicy

__all__ = ["AbsentWorld", "AmendWorld", "CopyWorld", "LotsWorld"]


class AmendWorld(JournalWorld):
    """Amenders whose lots overlap, while journals are made and swept."""

    prefill = 9
    copied = 0
    pause_s = 0.5
    updates = 0.8

    def spawn_all(self) -> None:
        for number in range(3):
            self._spawn(f"amender-{number}", self.amend)
        self._spawn("reader", self.read)
        self._spawn("getter", self.get)
        self._spawn("compiler-1", self.compile)
        self._spawn("compiler-2", self.compile)
        self._spawn("sweeper", self.sweep)


class LotsWorld(JournalWorld):
    """Updates of many lots in one call, beside deletes and updates of few events of the same lots.

    Journals are made all the time, so updates of many lots meet a compile between two lots.
    """

    prefill = 15
    copied = 0
    pause_s = 0.15

    def spawn_all(self) -> None:
        for number in range(2):
            self._spawn(f"updater-{number}", self.update_all)
        for number in range(3):
            self._spawn(f"deleter-{number}", self.delete_one)
        self._spawn("reader", self.read)
        self._spawn("compiler-1", self.compile)
        for number in range(2):
            self._spawn(f"changer-{number}", self.update_few)
        self._spawn("compiler-2", self.compile_often)

    def update_all(self) -> None:
        desk = Desk(self._context())
        for _ in range(3):
            desk.context.clock.sleep(self.random.uniform(0, self.pause_s))
            with contextlib.suppress(*self.may_fail):
                self.update(desk, self.some_ids(24))

    def delete_one(self) -> None:
        desk = Desk(self._context())
        for _ in range(4):
            desk.context.clock.sleep(self.random.uniform(0, self.pause_s))
            with contextlib.suppress(*self.may_fail):
                self.delete(desk, self.some_ids(1))

    def update_few(self) -> None:
        desk = Desk(self._context())
        for _ in range(6):
            desk.context.clock.sleep(self.random.uniform(0, self.pause_s))
            with contextlib.suppress(*self.may_fail):
                self.update(desk, self.some_ids(6))

    def compile_often(self) -> None:
        desk = Desk(self._context())
        policy = CompilePolicy(min_events=1, min_amendments=1, max_events=1_000)
        for _ in range(10):
            desk.context.clock.sleep(self.random.uniform(0, self.pause_s / 2))
            with contextlib.suppress(*self.may_fail):
                self.tally.compiled += desk.compile("t", policy).journals


class CopyWorld(JournalWorld):
    """Copiers bring back old events, which others delete."""

    prefill = 6
    updates = 0.0
    deleted_max = 14

    def spawn_all(self) -> None:
        for number in range(2):
            self._spawn(f"amender-{number}", self.amend)
            self._spawn(f"copier-{number}", self.copy)
        self._spawn("compiler", self.compile)
        self._spawn("sweeper", self.sweep)


class AbsentWorld(JournalWorld):
    """Events are appended if their ids are absent, and deleted."""

    prefill = 3
    updates = 0.3
    copied = 0

    def spawn_all(self) -> None:
        for number in range(3):
            self._spawn(f"absent-{number}", self.append_absent)
        self._spawn("amender", self.amend)
        self._spawn("getter", self.get)
        self._spawn("compiler", self.compile)
        self._spawn("sweeper", self.sweep)
        self._spawn("trimmer", self.trim)

    def some_ids(self, count: int) -> list[str]:
        return super().some_ids(min(count, 3))
