"""Several actors count on one row over a bad network; the smallest simulation there is.

Invariant: what the row says lies between the increments that were acknowledged and those plus the
ones whose outcome nobody could know. A planted bug shows that the simulation would notice.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.planted import OwnAttemptIsConflict
from tidelog.catalog.base import ABSENT, Catalog, Put
from tidelog.catalog.memory import MemoryCatalog
from tidelog.clock import RandomIds
from tidelog.errors import ConflictError, UnavailableError, UnknownOutcomeError
from tidelog.testing.faults import Fault, Faults, FaultyCatalog
from tidelog.testing.scheduler import Scheduler

RATES = {
    Fault.LOSE_REQUEST: 0.05,
    Fault.LOSE_REPLY: 0.1,
    Fault.DUPLICATE: 0.05,
    Fault.DELAY: 0.2,
    Fault.CRASH_AFTER: 0.005,
    Fault.CRASH_BEFORE: 0.005,
}


class Simulation:
    """Actors that each add to one counter."""

    def __init__(self, seed: int, wrap: type[FaultyCatalog] = FaultyCatalog) -> None:
        self.scheduler = Scheduler(seed)
        self.faults = Faults(self.scheduler.random, RATES, self.scheduler)
        self.rows = MemoryCatalog()
        self.catalog: Catalog = wrap(self.rows, self.faults, self.scheduler.clock)
        self.ids = RandomIds(self.scheduler.random)
        self.acknowledged = self.unsure = 0
        self.rows.write("p", Put("n", b"0", ABSENT), write_id=self.ids.new())

    def increment(self, times: int) -> None:
        for _ in range(times):
            try:
                row = self.catalog.get("p", "n")
            except UnavailableError:
                continue
            assert row is not None
            self.unsure += 1  # from here on a crash leaves it open
            change = Put("n", str(int(row.value) + 1).encode(), row.version)
            try:
                self.catalog.write("p", change, write_id=self.ids.new())
                self.unsure -= 1
                self.acknowledged += 1
            except (ConflictError, UnavailableError):
                self.unsure -= 1
            except UnknownOutcomeError:
                pass

    def check(self) -> None:
        row = self.rows.get("p", "n")
        assert row is not None
        assert self.acknowledged <= int(row.value) <= self.acknowledged + self.unsure

    def run(self) -> tuple[list[str], Counter[Fault]]:
        for number in range(4):
            self.scheduler.spawn(f"actor-{number}", lambda: self.increment(15))
        self.scheduler.run(after_step=self.check)
        return self.scheduler.trace, self.faults.counts


@pytest.mark.parametrize("seed", range(50))
def test_no_acknowledged_increment_is_lost_or_doubled(seed: int) -> None:
    Simulation(seed).run()


def test_one_seed_runs_the_same_twice() -> None:
    first, second = Simulation(11).run(), Simulation(11).run()
    assert first == second
    assert first != Simulation(12).run()


def test_the_simulation_catches_a_lost_reply_taken_for_a_conflict() -> None:
    caught = 0
    for seed in range(20):
        try:
            Simulation(seed, OwnAttemptIsConflict).run()
        except AssertionError:
            caught += 1
    assert caught > 15
