"""The product's threads as actors: what blocks yields, and one seed gives one interleaving."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tidelog.errors import InternalError
from tidelog.log.producer import flush_queue, producer
from tidelog.testing.faults import Host, Process
from tidelog.testing.scheduler import Scheduler
from tidelog.testing.threads import SimulatedThreads, simulated

Run = Callable[[SimulatedThreads, Scheduler], object]


def in_process(seed: int, run: Run) -> Scheduler:
    """Run one process to its end; ``run`` gets the threads that modules would see."""
    scheduler = Scheduler(seed)
    with simulated(scheduler, 0.3) as threads:
        Host(scheduler, "a").start("main", lambda _: (run(threads, scheduler), None)[1])
        scheduler.run()
    return scheduler


def test_names_are_replaced_while_simulated_and_restored_after() -> None:
    def names() -> list[object]:
        found = [vars(module) for module in (producer, flush_queue)]
        return [
            each[name] for each in found for name in ("threading", "Pool", "wait") if name in each
        ]

    before = names()
    with simulated(Scheduler(1)) as threads:
        assert vars(producer)["threading"] is threads
        assert vars(flush_queue)["Pool"] == threads.pool
        assert not any(old is new for old, new in zip(before, names(), strict=True))
    assert names() == before


def test_lock_keeps_others_out_over_a_step() -> None:
    inside: list[str] = []

    def run(threads: SimulatedThreads, scheduler: Scheduler) -> None:
        lock = threads.RLock()

        def work(name: str) -> None:
            for _ in range(5):
                with lock, lock:
                    inside.append(f"{name} in")
                    scheduler.pause("work")
                    inside.append(f"{name} out")

        workers = [threads.Thread(work, args=(name,)) for name in "abc"]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    in_process(3, run)
    assert len(inside) == 30
    for entered, left in zip(inside[::2], inside[1::2], strict=True):
        assert (entered[0], entered[2:], left[2:]) == (left[0], "in", "out")


def test_condition_and_event_wait_for_others_or_for_their_timeout() -> None:
    seen: list[object] = []

    def run(threads: SimulatedThreads, scheduler: Scheduler) -> None:
        state, done = threads.Condition(), threads.Event()
        items: list[int] = []

        def take() -> None:
            with state:
                seen.append(state.wait_for(lambda: bool(items), 60))
            done.set()

        threads.Thread(take).start()
        scheduler.sleep(5)
        seen.append(done.wait(5))
        with state:
            items.append(1)
            state.notify_all()
        seen.append(done.wait())
        with state:
            seen.append(state.wait_for(lambda: False, 1))

    in_process(1, run)
    assert seen == [False, True, True, False]


def test_pool_runs_at_most_its_workers_and_hands_back_results_and_errors() -> None:
    running, most = [0], [0]
    results: list[int] = []

    def run(threads: SimulatedThreads, scheduler: Scheduler) -> None:
        def work(number: int) -> int:
            running[0] += 1
            most[0] = max(most[0], running[0])
            scheduler.sleep(1)
            running[0] -= 1
            return 10 // number

        with threads.pool(2) as pool:
            results.extend(pool.map(work, [1, 2, 5]))
            failing = pool.submit(work, 0)
            with pytest.raises(ZeroDivisionError):
                failing.result()

    in_process(1, run)
    assert results == [10, 5, 2]
    assert most[0] == 2


def test_killed_process_ends_all_its_threads_and_its_host_knows() -> None:
    scheduler = Scheduler(5)
    host, other = Host(scheduler, "a"), Host(scheduler, "b")
    ticks: list[str] = []

    def tick(name: str) -> None:
        while True:
            scheduler.sleep(1)
            ticks.append(name)

    with simulated(scheduler) as threads:

        def run(process: Process) -> None:
            threads.Thread(tick, args=(process.name,)).start()
            tick(process.name)

        victim = host.start("victim", run)

        def watch(process: Process) -> None:
            scheduler.sleep(10)
            mark = victim.processes.mark()
            assert not process.processes.is_dead(mark)
            victim.kill()
            ticks.clear()
            assert process.processes.is_dead(mark) == (process.host is host)
            scheduler.sleep(10)

        host.start("watcher", watch)
        scheduler.run()
        assert ticks == []
        assert victim.crashed
        second = host.start("victim", run)

        def watch_from_elsewhere(process: Process) -> None:
            second.kill()
            assert not process.processes.is_dead(second.processes.mark())

        other.start("watcher", watch_from_elsewhere)
        scheduler.run()


def test_process_that_ends_takes_its_threads_along() -> None:
    def run(threads: SimulatedThreads, scheduler: Scheduler) -> None:
        threads.Thread(lambda: threads.Event().wait(), daemon=True).start()
        scheduler.sleep(1)

    in_process(1, run)


def test_waiting_for_ever_is_a_deadlock_that_is_reported() -> None:
    with pytest.raises(InternalError, match=r"deadlock.*main: event"):
        in_process(1, lambda threads, _: threads.Event().wait())


def test_one_seed_gives_one_interleaving_of_threads() -> None:
    def run(threads: SimulatedThreads, scheduler: Scheduler) -> None:
        with threads.pool(3) as pool:
            list(pool.map(lambda n: scheduler.sleep(n % 3), range(20)))

    assert in_process(7, run).trace == in_process(7, run).trace
    assert in_process(7, run).trace != in_process(8, run).trace
