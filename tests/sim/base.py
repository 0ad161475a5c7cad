"""What all simulated worlds share: hosts, processes that are restarted, faulty substrates, checks.

A world starts processes on hosts whose wall clocks differ and jump. Requests and replies are lost,
delayed and doubled; calls stall; processes freeze and die, and are started again. Invariants are
checked on the bare substrates whenever something was written there.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from tests.sim.audit import AuditedCatalog
from tests.sim.decoding import decoding_once
from tidelog import errors
from tidelog.context import Context
from tidelog.errors import (
    FencedError,
    InternalError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.maintenance.sweep import SweepReport
from tidelog.model.times import Backoff
from tidelog.settings import LogSettings
from tidelog.store.memory import MemoryStore
from tidelog.store.wrappers import RetryingStore
from tidelog.testing.faults import Fault, Faults, FaultyCatalog, FaultyStore, Host, Process
from tidelog.testing.scheduler import Scheduler, seeded_ids
from tidelog.testing.threads import simulated

RATES = {
    Fault.LOSE_REQUEST: 0.02,
    Fault.LOSE_REPLY: 0.04,
    Fault.DUPLICATE: 0.03,
    Fault.DELAY: 0.10,
    Fault.STALL: 0.01,
    Fault.FREEZE: 0.004,
    Fault.TRY_AGAIN: 0.02,
    Fault.CUT_OFF: 0.004,
    Fault.CRASH_BEFORE: 0.004,
    Fault.CRASH_AFTER: 0.004,
    Fault.STALE_LIST: 0.2,
}
ACCEPTED = (UnavailableError, UnknownOutcomeError, FencedError)
"""Errors that a bad world explains. Any other that leaves an actor is a violation."""


class CountingStore(MemoryStore):
    """Counts deletions, so that the invariants are checked only when something has changed."""

    deletes = 0

    def delete(self, keys: Iterable[str]) -> None:
        self.deletes += 1
        super().delete(keys)

    def bare(self) -> dict[str, bytes]:
        """All objects, without a copy."""
        return {key: data for key, (data, _) in self._objects.items()}

    def holds(self, key: str) -> bool:
        return key in self._objects

    def data(self, key: str) -> bytes:
        return self._objects[key][0]

    def etag(self, key: str) -> str:
        """Changes whenever an object does."""
        return self._objects[key][1].etag


class SimWorld:
    """One seed's world. A subclass starts its processes and checks its invariants."""

    rates = RATES
    accepted: tuple[type[TidelogError], ...] = ACCEPTED
    restarts_max = 12  # of all processes together
    steps_max = 60_000
    hosts_count = 3
    jump_rate = 0.002  # of a host's clock, at each step
    preempt = 0.1
    attempts: Sequence[int] = (1, 3)  # with one, calls fail as if all tries had failed

    def __init__(
        self,
        seed: int,
        catalog: type[AuditedCatalog] = AuditedCatalog,
        faulty: type[FaultyCatalog] = FaultyCatalog,
        faulty_store: type[FaultyStore] = FaultyStore,
    ) -> None:
        self.scheduler = Scheduler(seed)
        self.random = self.scheduler.random
        self.faults = Faults(self.random, self.rates, self.scheduler, page_rows=3)
        self.rows = catalog()
        self.objects = CountingStore(self.scheduler.clock)
        self.hosts = [Host.seeded(self.scheduler, f"h{n}") for n in range(self.hosts_count)]
        self.restarts = 0
        self.violations: list[Exception] = []  # that the product has contained
        self._faulty = faulty
        self._faulty_store = faulty_store
        self._checked_at = (-1, -1)
        self._kills = 0
        self._ids = seeded_ids(seed)
        self._quiet = self._context(faulty=False)
        self._running: list[tuple[Callable[[], None], Process]] = []

    def run(self) -> Counter[Fault]:
        """Until all processes have finished; then what must hold in the end."""
        with self.simulation():
            self.run_processes()
            self.faults.heal()
            self.check_end()
        return self.faults.counts

    @contextlib.contextmanager
    def simulation(self) -> Iterator[None]:
        """While this world runs: simulates threads, and notices what the product contains."""
        with (
            decoding_once(),
            _noticing(self.violations),
            simulated(self.scheduler, self.preempt) as self.threads,
        ):
            yield
            self._raise_violations()

    def run_processes(self) -> None:
        """Start the processes of this world, and run them until all have finished."""
        self.spawn_all()
        self.scheduler.run(self.steps_max, self._after_step)

    def spawn_all(self) -> None:
        """Start the processes of this world."""
        raise NotImplementedError

    def check(self) -> None:
        """What must hold after every step that has changed something."""
        raise NotImplementedError

    def check_end(self) -> None:
        """What must hold when all have finished. The world has no faults any more."""
        raise NotImplementedError

    def acknowledged(self) -> int:
        """How many events were acknowledged."""
        return 0

    # For actors.

    @property
    def process(self) -> Process:
        """The process of the actor that runs now."""
        current = self.scheduler.current
        assert current is not None
        assert isinstance(current.group, Process)
        return current.group

    def settings(self) -> LogSettings:
        return LogSettings(lease_ttl_ms=3_000)

    def _context(self, faulty: bool = True) -> Context:
        """What the current process works with; outside, or without faults, a log in peace."""
        chance = random.Random(self.random.getrandbits(64))
        if not faulty:
            clock = self.scheduler.clock
            return Context(self.objects, self.rows, clock, self._ids, chance, self.settings())
        process = self.process
        attempts = self.random.choice(self.attempts)
        store = RetryingStore(
            self._faulty_store(self.objects, self.faults),
            clock=process.clock,
            random=chance,
            backoff=Backoff(attempts=attempts),
        )
        return Context(
            store,
            self._faulty(self.rows, self.faults, process.clock, attempts),
            process.clock,
            self._ids,
            chance,
            self.settings(),
            processes=process.processes,
            commits_at_once=self.random.choice([1, 2]),
        )

    def _spawn(self, name: str, run: Callable[[], None], host: Host | None = None) -> None:
        """Start a process; one that dies is started again, on another host perhaps."""

        def live(_: Process) -> None:
            try:
                run()
            except TidelogError as exc:
                if not isinstance(exc, self.accepted):
                    raise

        process = (host or self.random.choice(self.hosts)).start(name, live)
        self._running.append((run, process))

    def chance(self, rate: float) -> bool:
        return self.random.random() < rate

    # Inside.

    def _raise_violations(self) -> None:
        for error in self.violations:
            raise error

    def _after_step(self) -> None:
        self._raise_violations()
        self._restart_the_dead()
        if self.random.random() < self.jump_rate:
            scale_s = self.random.choice([60, 3_600, 86_400, 30 * 86_400])
            self.random.choice(self.hosts).jump(self.random.uniform(-scale_s, scale_s))
        seen = (self.rows.writes, self.objects.deletes)
        if seen != self._checked_at:
            self._checked_at = seen
            self.check()

    def _restart_the_dead(self) -> None:
        if self._kills == self.scheduler.kills:
            return
        self._kills = self.scheduler.kills
        for run, process in list(self._running):
            if process.killed:
                self._running.remove((run, process))
            if process.crashed and self.restarts < self.restarts_max:
                self.restarts += 1
                self._spawn(process.name, run)


def check_swept(report: SweepReport, *tolerated: type[TidelogError]) -> None:
    """A sweep may leave out a topic only for what a bad world explains."""
    wrong = [each for each in report.refused if not isinstance(each.error, tolerated)]
    assert not wrong, f"a sweep refuses {wrong}"


@contextlib.contextmanager
def _noticing(violations: list[Exception]) -> Iterator[None]:
    """Keep exceptions that no fault explains, also where the product only reports them.

    A loop that goes on with its other parts contains a failed check of the substrates, too.
    """
    real = errors.unexpected

    def unexpected(what: str, exc: Exception) -> TidelogError:
        found = real(what, exc)
        if isinstance(found, InternalError):
            violations.append(exc)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errors, "unexpected", unexpected)
        yield


def in_peace(world: SimWorld, name: str, run: Callable[[Context], Any], within_s: float) -> Any:
    """Run a process without faults, on a host with the right time, when all others have ended.

    It must end within this much fake time: what was left behind may delay it, not block it.
    """
    result: list[Any] = []

    def live(process: Process) -> None:
        context = world._context()
        result.append(run(context))

    host = Host(world.scheduler, "right")
    began_s = world.scheduler.time.monotonic_s()
    host.start(name, live)
    world.scheduler.run(world.steps_max, world.check)
    took_s = world.scheduler.time.monotonic_s() - began_s
    assert took_s <= within_s, f"{name} took {took_s:.0f} s, expected at most {within_s:.0f}"
    return result[0]
