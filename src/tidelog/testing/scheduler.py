"""Run several actors in one thread, switching between them as a seed says.

An actor is plain synchronous code. It gives way where it meets the world: at each call of a
faulty store or catalog, and when it sleeps. The scheduler then picks, by its seed, who goes on;
when all sleep, time jumps to the first who wakes. One seed always gives one interleaving.

An actor may be killed, as a process would be: at its next step a :class:`Crash` is raised in it,
and whatever it tries on the way out fails the same way. Code under test must not hold a lock
across a call to the world: another actor that wants it would block the one thread for ever.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import greenlet

from tidelog.clock import Clock
from tidelog.errors import InternalError
from tidelog.testing.clock import FakeClock

__all__ = ["Actor", "Crash", "Scheduler"]


class Crash(BaseException):
    """Ends an actor as SIGKILL ends a process. Not an ``Exception``, so no handler stops it."""


@dataclass(eq=False)
class Actor:
    """One line of execution."""

    name: str
    thread: greenlet.greenlet
    wakes_at_s: float = 0.0
    killed: bool = False
    error: Exception | None = None
    steps: int = field(default=0)

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
        self._time = FakeClock()
        self._actors: list[Actor] = []
        self._current: Actor | None = None
        self._main = greenlet.getcurrent()

    @property
    def current(self) -> Actor | None:
        """The actor that runs now, or None outside of them."""
        return self._current

    @property
    def time(self) -> FakeClock:
        """The fake time, to advance or jump from outside."""
        return self._time

    def spawn(self, name: str, run: Callable[[], None]) -> Actor:
        """Add an actor that will call ``run``. Its first step comes when the seed says."""
        actor = Actor(name, greenlet.greenlet(lambda: self._live(run)))
        self._actors.append(actor)
        return actor

    def kill(self, actor: Actor) -> None:
        """Let the actor die at its next step."""
        actor.killed = True
        actor.wakes_at_s = 0.0

    def was_killed(self, actor: Actor) -> bool:
        """Whether it ended by a crash, its own or by :meth:`kill`."""
        return actor.done and actor.killed

    def pause(self, label: str) -> None:
        """Give way. Called by whatever stands for the world; a no-op outside an actor."""
        self._wait(label, 0.0)

    def sleep(self, seconds: float) -> None:
        """Give way for a stretch of fake time."""
        if self._current is None:
            self._time.sleep(seconds)
        else:
            self._wait(f"sleep {seconds:.3f}", max(0.0, seconds))

    def step(self) -> Actor | None:
        """Let one actor take one step; None when all are done."""
        living = [actor for actor in self._actors if not actor.done]
        if not living:
            return None
        now_s = self._time.monotonic_s()
        ready = [actor for actor in living if actor.wakes_at_s <= now_s]
        if not ready:
            first = min(living, key=lambda actor: actor.wakes_at_s)
            self._time.advance(first.wakes_at_s - now_s)
            ready = [first]
        actor = self.random.choice(ready)
        actor.steps += 1
        self._current = actor
        try:
            actor.thread.switch()
        finally:
            self._current = None
        if actor.error is not None:
            raise actor.error
        return actor

    def run(self, steps_max: int = 100_000, after_step: Callable[[], None] | None = None) -> int:
        """Step until all actors are done; the number of steps taken.

        ``after_step`` is where a simulation checks its invariants.
        """
        for taken in range(steps_max):
            if self.step() is None:
                return taken
            if after_step is not None:
                after_step()
        raise InternalError(
            f"seed {self.seed}: actors still run after {steps_max} steps: "
            f"{[actor.name for actor in self._actors if not actor.done]}"
        )

    def _live(self, run: Callable[[], None]) -> None:
        actor = self._current
        if actor is None:
            raise InternalError("an actor was started outside its scheduler")
        try:
            self._die_if_killed(actor)
            run()
            self.trace.append(f"{actor.name}: end")
        except Crash:
            actor.killed = True
            self.trace.append(f"{actor.name}: killed")
        except Exception as exc:  # noqa: BLE001 - raised again by step()
            exc.add_note(f"seed {self.seed}, actor {actor.name}, step {actor.steps}")
            actor.error = exc

    def _wait(self, label: str, seconds: float) -> None:
        actor = self._current
        if actor is None:
            return
        self._die_if_killed(actor)
        self.trace.append(f"{actor.name}: {label}")
        actor.wakes_at_s = self._time.monotonic_s() + seconds
        self._main.switch()
        self._die_if_killed(actor)

    def _die_if_killed(self, actor: Actor) -> None:
        if actor.killed:
            raise Crash


class _ScheduledClock:
    """The clock that actors get: reading it is free, sleeping gives way."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def now_ms(self) -> int:
        return self._scheduler.time.now_ms()

    def monotonic_s(self) -> float:
        return self._scheduler.time.monotonic_s()

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)


_: Callable[[Scheduler], Clock] = _ScheduledClock
