"""The scheduler: one seed, one interleaving; actors sleep in fake time and die as processes do."""

from __future__ import annotations

import pytest

from tidelog.errors import InternalError, InvalidError
from tidelog.testing.scheduler import Scheduler


def interleaving(seed: int) -> list[str]:
    scheduler = Scheduler(seed)

    def work() -> None:
        for step in range(5):
            scheduler.pause(f"step {step}")
            scheduler.clock.sleep(scheduler.random.random())

    for name in ("a", "b", "c"):
        scheduler.spawn(name, work)
    scheduler.run()
    return scheduler.trace


def test_one_seed_gives_one_interleaving_and_another_gives_another() -> None:
    assert interleaving(1) == interleaving(1)
    assert len({tuple(interleaving(seed)) for seed in range(20)}) == 20


def test_sleep_takes_fake_time_and_wakes_in_order() -> None:
    scheduler = Scheduler(3)
    woken: list[tuple[str, float]] = []
    began_s = scheduler.clock.monotonic_s()

    def sleeper(name: str, seconds: float) -> None:
        scheduler.clock.sleep(seconds)
        woken.append((name, round(scheduler.clock.monotonic_s() - began_s, 6)))

    scheduler.spawn("late", lambda: sleeper("late", 3_600))
    scheduler.spawn("soon", lambda: sleeper("soon", 1))
    scheduler.run()
    assert woken == [("soon", 1.0), ("late", 3_600.0)]


def test_a_killed_actor_does_nothing_more_not_even_on_its_way_out() -> None:
    scheduler = Scheduler(1)
    done: list[str] = []

    def work() -> None:
        try:
            while True:
                scheduler.pause("work")
                done.append("work")
        except Exception:  # noqa: BLE001
            done.append("handled")  # a crash is no exception that a handler could catch
        finally:
            scheduler.pause("clean up")
            done.append("clean up")

    actor = scheduler.spawn("a", work)
    for _ in range(4):
        scheduler.step()
    before = list(done)
    scheduler.kill(actor)
    scheduler.run()
    assert actor.done
    assert done == before
    assert set(done) == {"work"}


def test_a_sleeping_actor_can_be_killed_and_one_that_never_ran() -> None:
    scheduler = Scheduler(1)
    asleep = scheduler.spawn("asleep", lambda: scheduler.clock.sleep(1_000_000))
    scheduler.step()
    never = scheduler.spawn("never", lambda: pytest.fail("it was killed before it began"))
    scheduler.kill(asleep)
    scheduler.kill(never)
    scheduler.run()
    assert asleep.done
    assert never.done
    assert scheduler.clock.monotonic_s() < 1_000_000


def test_an_actors_error_comes_out_with_its_seed() -> None:
    scheduler = Scheduler(42)

    def fail() -> None:
        scheduler.pause("before")
        raise InvalidError("no good")

    scheduler.spawn("a", fail)
    with pytest.raises(InvalidError) as told:
        scheduler.run()
    assert "seed 42, actor a" in told.value.__notes__[0]


def test_invariants_run_after_each_step_and_endless_runs_end() -> None:
    scheduler = Scheduler(1)
    checks: list[int] = []

    def forever() -> None:
        while True:
            scheduler.pause("again")

    scheduler.spawn("a", forever)
    with pytest.raises(InternalError, match="seed 1"):
        scheduler.run(steps_max=50, after_step=lambda: checks.append(1))
    assert len(checks) == 50


def test_the_wall_clock_can_jump_while_the_monotonic_one_goes_on() -> None:
    scheduler = Scheduler(1)
    before_ms, before_s = scheduler.clock.now_ms(), scheduler.clock.monotonic_s()
    scheduler.time.jump(-3_600)
    assert scheduler.clock.now_ms() == before_ms - 3_600_000
    assert scheduler.clock.monotonic_s() == before_s
