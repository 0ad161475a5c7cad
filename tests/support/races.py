"""Two actors of a pipeline at once over a bad network, in simulation."""

from __future__ import annotations

from collections.abc import Callable

from tidelog.errors import CorruptError, TidelogError
from tidelog.testing.faults import Fault, Faults
from tidelog.testing.scheduler import Scheduler

RATES = {
    Fault.LOSE_REQUEST: 0.02,
    Fault.LOSE_REPLY: 0.06,
    Fault.DUPLICATE: 0.04,
    Fault.DELAY: 0.15,
    Fault.CRASH_BEFORE: 0.01,
    Fault.CRASH_AFTER: 0.01,
}


def race_two(
    seed: int, turns: int, act: Callable[[Faults, Scheduler], object], check: Callable[[], None]
) -> None:
    """Both act some times, whatever becomes of it but corruption; ``check`` after each step."""
    scheduler = Scheduler(seed)
    faults = Faults(scheduler.random, RATES, scheduler)

    def drive() -> None:
        for _ in range(turns):
            try:
                act(faults, scheduler)
            except TidelogError as exc:
                if isinstance(exc, CorruptError):
                    raise
            scheduler.clock.sleep(scheduler.random.random())

    scheduler.spawn("one", drive)
    scheduler.spawn("two", drive)
    scheduler.run(after_step=check)
