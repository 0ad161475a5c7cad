"""Runs several actors in one thread, and switches between them by a seed.

An actor is plain synchronous code. It yields where it meets the world: at each call of a faulty
store or catalog, when it sleeps, and when it waits for another thread. The scheduler then picks by
its seed which actor continues. When all of them sleep, time jumps to the first that wakes. One seed
always gives one interleaving.

An actor can be killed like a process: at its next step a :class:`Crash` is raised in it, and
whatever it tries on the way out fails the same way. Actors may belong to an :class:`ActorGroup`
(the threads of one process), which is killed and frozen as a whole. Code under test must not hold a
real lock across a call to the world: another actor that wants it would block the one thread
forever. :mod:`tidelog.testing.threads` replaces those locks.

An actor with an ``interrupt_rate`` is a main thread whose signal handler raises: now and then
``KeyboardInterrupt`` is raised in it where it waits or meets the world.

Its clock moves only on request, and its ids repeat from a seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import greenlet

from tidelog.clock import Clock, Ids, RandomIds
from tidelog.errors import InternalError

__all__ = ["Actor", "ActorGroup", "Crash", "FakeClock", "Scheduler", "seeded_ids"]


class FakeClock:
    """Time for tests: ``sleep`` returns at once and moves the clock by that time."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = float(now_ms)
        self._monotonic_s = 1_000.0

    def now_ms(self) -> int:
        return int(self._now_ms)

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def sleep(self, seconds: float) -> None:
        self.advance(max(0.0, seconds))

    def advance(self, seconds: float) -> None:
        """Lets time pass on both clocks."""
        self._now_ms += seconds * 1000
        self._monotonic_s += seconds

    def jump(self, seconds: float) -> None:
        """Sets the wall clock forward or back, like an operator or a bad time server."""
        self._now_ms += seconds * 1000


def seeded_ids(seed: int) -> Ids:
    """Returns ids that repeat in the same order for the same seed."""
    return RandomIds(random.Random(seed))


_is_clock: type[Clock] = FakeClock


class Crash(BaseException):
    """Ends an actor like SIGKILL ends a process. Not an ``Exception``, so no handler stops it."""


@dataclass(eq=False)
class ActorGroup:
    """Actors that live and die together: the threads of a process."""

    actors: list[Actor] = field(default_factory=list)
    killed: bool = False
    frozen_until_s: float = 0.0  # its actors take no step before this


@dataclass(eq=False)
class Actor:
    """One line of execution."""

    name: str
    thread: greenlet.greenlet
    group: ActorGroup
    wakes_at_s: float = 0.0
    killed: bool = False
    error: Exception | None = None
    steps: int = field(default=0)
    interrupt_rate: float = 0.0
    label: str = "not started"
    on_end: list[Callable[[], None]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return bool(self.thread.dead)


class Scheduler:
    """Interleaves actors by a seed, in fake time."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.clock: Clock = _ScheduledClock(self)
        self.trace: list[str] = []
        self.kills = 0  # groups that were killed, or have ended as a whole
        self._time = FakeClock()
        self._living: list[Actor] = []
        self._current: Actor | None = None
        self._main = greenlet.getcurrent()

    @property
    def current(self) -> Actor | None:
        """Returns the actor that runs now, or None outside of them."""
        return self._current

    @property
    def time(self) -> FakeClock:
        """Returns the fake time, to advance or jump from outside."""
        return self._time

    def spawn(self, name: str, run: Callable[[], None], group: ActorGroup | None = None) -> Actor:
        """Adds an actor that will call ``run``. The seed decides when it takes its first step."""
        # Its parent is where it switches when it ends; by default that would be its maker.
        thread = greenlet.greenlet(lambda: self._live(run), self._main)
        actor = Actor(name, thread, group or ActorGroup())
        actor.group.actors.append(actor)
        self._living.append(actor)
        return actor

    def kill(self, actor: Actor) -> None:
        """Makes the actor die at its next step."""
        actor.killed = True
        actor.wakes_at_s = 0.0

    def kill_group(self, group: ActorGroup) -> None:
        """Makes all actors of a group die before they do anything more."""
        self.kills += not group.killed
        group.killed = True
        for actor in group.actors:
            self.kill(actor)

    def crash(self) -> Crash:
        """Marks the current actor and its group as killed. Returns the exception it must raise."""
        if self._current is not None:
            self.kill_group(self._current.group)
        return Crash()

    def pause(self, label: str) -> None:
        """Yields. Called by whatever represents the world; does nothing outside an actor."""
        self._wait(label, 0.0)

    def sleep(self, seconds: float) -> None:
        """Yields for some fake time."""
        if self._current is None:
            self._time.sleep(seconds)
        else:
            self._wait(f"sleep {seconds:.3f}", max(0.0, seconds))

    def freeze(self, seconds: float) -> None:
        """Stops all actors of the current actor's group for some fake time."""
        if self._current is not None:
            self._current.group.frozen_until_s = self._time.monotonic_s() + seconds
            self.pause(f"frozen {seconds:.3f}")

    def park(self, label: str, timeout_s: float | None = None) -> None:
        """Yields until another actor calls :meth:`unpark`, or until the timeout."""
        if self._current is None:
            raise InternalError(f"{label}: would block outside an actor")
        self._wait(label, math.inf if timeout_s is None else max(0.0, timeout_s))

    def unpark(self, actor: Actor) -> None:
        """Lets a parked actor continue when the seed picks it."""
        actor.wakes_at_s = min(actor.wakes_at_s, self._time.monotonic_s())

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Raises no ``KeyboardInterrupt`` in the current actor while the body runs."""
        actor = self._current
        rate = 0.0 if actor is None else actor.interrupt_rate
        if actor is not None:
            actor.interrupt_rate = 0.0
        try:
            yield
        finally:
            if actor is not None:
                actor.interrupt_rate = rate

    def step(self) -> Actor | None:
        """Lets one actor take one step. Returns None when all are done."""
        if not self._living:
            return None
        ready = self._ready()
        actor = ready[0] if len(ready) == 1 else self.random.choice(ready)
        actor.steps += 1
        self._current = actor
        try:
            actor.thread.switch()
        finally:
            self._current = None
            if actor.done:
                self._living.remove(actor)
        if actor.error is not None:
            raise actor.error
        return actor

    def run(self, steps_max: int = 100_000, after_step: Callable[[], None] | None = None) -> int:
        """Steps until all actors are done. Returns the number of steps.

        A simulation checks its invariants in ``after_step``.
        """
        try:
            for taken in range(steps_max):
                if self.step() is None:
                    return taken
                if after_step is not None:
                    after_step()
            raise InternalError(
                f"seed {self.seed}: actors still run after {steps_max} steps: "
                f"{[f'{actor.name}: {actor.label}' for actor in self._living]}"
            )
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Kills every actor, so that none is left half-way when the world ends early."""
        for _ in range(1_000):
            for actor in list(self._living):
                self.kill_group(actor.group)
                self._current = actor
                try:
                    actor.thread.switch()
                finally:
                    self._current = None
                if actor.done:
                    self._living.remove(actor)

    def _ready(self) -> list[Actor]:
        now_s = self._time.monotonic_s()
        ready = [  # same as `_wakes_at_s`, without a call for each
            actor
            for actor in self._living
            if actor.killed or actor.wakes_at_s <= now_s >= actor.group.frozen_until_s
        ]
        if ready:
            return ready
        first = min(self._living, key=_wakes_at_s)
        wakes_at_s = _wakes_at_s(first)
        if math.isinf(wakes_at_s):
            waiting = [f"{actor.name}: {actor.label}" for actor in self._living]
            raise InternalError(f"seed {self.seed}: deadlock: {waiting}")
        self._time.advance(wakes_at_s - now_s)
        return [first]

    def _live(self, run: Callable[[], None]) -> None:
        actor = self._current
        if actor is None:
            raise InternalError("an actor was started outside its scheduler")
        try:
            self._die_if_killed(actor)
            run()
            self.trace.append(f"{actor.name}: end")
        except Crash:
            self.kill_group(actor.group)
            self.trace.append(f"{actor.name}: killed")
        except Exception as exc:  # noqa: BLE001 - raised again by step()
            if not actor.killed:  # no one observes what a killed actor raises on its way out
                exc.add_note(f"seed {self.seed}, actor {actor.name}, step {actor.steps}")
                actor.error = exc
        for call in actor.on_end:
            call()

    def _wait(self, label: str, seconds: float) -> None:
        actor = self._current
        if actor is None:
            return
        self._die_if_killed(actor)
        self.trace.append(f"{actor.name}: {label}")
        actor.label = label
        actor.wakes_at_s = self._time.monotonic_s() + seconds
        self._main.switch()
        self._die_if_killed(actor)
        if actor.interrupt_rate and self.random.random() < actor.interrupt_rate:
            raise KeyboardInterrupt

    def _die_if_killed(self, actor: Actor) -> None:
        if actor.killed:
            raise Crash


def _wakes_at_s(actor: Actor) -> float:
    """Returns when an actor may take its next step; killed ones die without waiting."""
    if actor.killed:
        return 0.0
    return max(actor.wakes_at_s, actor.group.frozen_until_s)


class _ScheduledClock:
    """The clock of actors: reading it is free, sleeping yields."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def now_ms(self) -> int:
        return self._scheduler.time.now_ms()

    def monotonic_s(self) -> float:
        return self._scheduler.time.monotonic_s()

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)


_: Callable[[Scheduler], Clock] = _ScheduledClock
