"""Smaller worlds of journals, each with a few processes that get into each other's way."""

from __future__ import annotations

from tests.sim.journal_world import JournalWorld

__all__ = ["AbsentWorld", "AmendWorld", "CopyWorld"]


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
