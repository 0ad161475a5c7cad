"""Simulated hosts: wall clocks that differ and jump, monotonic clocks that count right."""

from __future__ import annotations

from tidelog.testing.faults import Host, Process
from tidelog.testing.scheduler import Scheduler


def test_wall_clocks_differ_and_jump_while_monotonic_clocks_count_right() -> None:
    scheduler = Scheduler(1)
    right, ahead = Host(scheduler, "right"), Host(scheduler, "ahead", 3_600)
    assert ahead.clock.now_ms() - right.clock.now_ms() == 3_600_000
    assert ahead.clock.monotonic_s() != right.clock.monotonic_s()
    before = [host.clock.monotonic_s() for host in (right, ahead)]
    ahead.jump(-7_200)
    scheduler.time.advance(10)
    after = [host.clock.monotonic_s() for host in (right, ahead)]
    assert [round(b - a, 6) for a, b in zip(before, after, strict=True)] == [10, 10]
    assert ahead.clock.now_ms() - right.clock.now_ms() == -3_600_000


def test_seeded_clocks_are_right_or_wrong_by_up_to_a_year() -> None:
    wrong = [abs(Host.seeded(Scheduler(seed), "h").ahead_s) for seed in range(200)]
    assert min(wrong) == 0
    assert max(wrong) > 30 * 86_400
    assert max(wrong) <= 366 * 86_400
    assert sum(60 < each < 86_400 for each in wrong) > 20


def test_frozen_process_takes_no_step_while_others_go_on() -> None:
    scheduler = Scheduler(1)
    host = Host(scheduler, "h")
    steps: list[tuple[str, float]] = []

    def work(process: Process) -> None:
        if process.name == "frozen":
            scheduler.freeze(100)
        for _ in range(3):
            scheduler.sleep(1)
            steps.append((process.name, scheduler.time.monotonic_s() - 1_000))

    host.start("frozen", work)
    host.start("other", work)
    scheduler.run()
    assert max(at for name, at in steps if name == "other") < 10
    assert min(at for name, at in steps if name == "frozen") >= 100
