"""Compile by tasks: many partitions at once, by the same steps, beside others that change them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.archive_look import a_home
from tests.support.heartbeats import beaten_between_takes
from tests.support.inline_tasks import InlineTasks
from tidelog import Event, Home
from tidelog.errors import UnavailableError
from tidelog.journal import compile_tasks as by_tasks
from tidelog.journal.compile import CompilePlan, CompileReport, PartitionCompile
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.compile_tasks import compile_by_tasks
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.settings import LogSettings

ALL = CompilePolicy.everything()
FOUR = CompilePolicy(min_events=1, min_amendments=1, max_events=40)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        yield made


def fill(home: Home, topic: str, partitions: int = 3, runs: int = 6) -> None:
    home.create_topic(topic, partitions)
    for run in range(runs):
        for partition in range(partitions):
            ids = [f"{partition}-{run}-{n}" for n in range(10)]
            events = [Event(each.encode(), each.encode(), each) for each in ids]
            home.append(topic, events, partition=partition)


def contents(home: Home, topic: str) -> list[list[Event]]:
    states = home.partitions(topic, runs=False)
    return [list(home.read(topic, state.partition, state.start)) for state in states]


def test_partitions_of_several_topics_are_compiled(home: Home) -> None:
    fill(home, "a")
    fill(home, "b", 2)
    home.update("a", "1-2-3", b"new")
    home.delete("a", "2-0-0")
    before = contents(home, "a"), contents(home, "b")
    topics = [home.topic("a"), home.topic("b")]
    swaps: list[CompileReport] = []
    report = compile_by_tasks(home.context, InlineTasks(), topics, FOUR, on_swap=swaps.append)
    assert (report.partitions, report.busy, report.runs, report.events) == (5, 0, 30, 299)
    assert (report.journals, report.amendments) == (10, 2)
    assert len(swaps) == 10
    assert (contents(home, "a"), contents(home, "b")) == before
    again = compile_by_tasks(home.context, InlineTasks(), topics, FOUR)
    assert again == CompileReport()
    home.sweep(0)
    assert (contents(home, "a"), contents(home, "b")) == before
    assert [home.verify(name).errors for name in ("a", "b")] == [0, 0]
    assert home.get("a", "1-2-3").value == b"new"


def test_others_change_rows_while_tasks_run(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each job: an append, an update, a trim and a sweep, before the driver swaps."""
    fill(home, "a")
    home.create_topic("other")
    run, rounds = by_tasks._run, 0

    def disturbed(*args: object) -> object:
        nonlocal rounds
        done = run(*args)  # type: ignore[arg-type]
        rounds += 1
        if rounds == 1:
            home.append("a", [Event(b"late", id="late")], partition=0)
            home.update("a", "0-5-5", b"new")
            home.trim("a", ToOffsets({1: 25}))
            home.sweep(0)
        return done

    monkeypatch.setattr(by_tasks, "_run", disturbed)
    report = compile_by_tasks(home.context, InlineTasks(), [home.topic("a")], ALL)
    assert (report.partitions, report.busy) == (3, 0)
    assert rounds > 1, "what was swept was made again"
    found = contents(home, "a")
    assert [len(each) for each in found] == [61, 35, 60]
    assert [event.value for event in found[0][55:56]] == [b"new"]
    home.compile("a")
    home.sweep(0)
    assert contents(home, "a") == found
    assert home.verify("a").errors == 0


def test_another_process_compiles_between_plan_and_work(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it replaced is gone by then, which is not a loss."""
    fill(home, "a", 1)
    home.compile("a")
    home.delete("a", "0-0-0")
    plan, plans = PartitionCompile.plan, 0

    def overtaken(self: PartitionCompile) -> CompilePlan:
        nonlocal plans
        planned, plans = plan(self), plans + 1
        if plans == 2:  # the first one only asks whether there is anything to do
            home.sweep(0)  # frees the partition
            assert home.compile("a").journals
            home.sweep(0)
        return planned

    monkeypatch.setattr(PartitionCompile, "plan", overtaken)
    before = contents(home, "a")
    assert compile_by_tasks(home.context, InlineTasks(), [home.topic("a")], ALL).journals == 0
    assert contents(home, "a") == before
    assert home.verify("a").errors == 0


def test_a_partition_that_another_process_compiles_is_left_to_it(
    home: Home,
) -> None:
    object.__setattr__(home.context, "log_settings", LogSettings(lease_ttl_ms=2_000))
    fill(home, "a")
    other = PartitionCompile(home.context, home.topic("a"), 1, ALL)
    assert other.holding.try_take()
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.2):
            other.holding.beat()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with beaten_between_takes():
            report = compile_by_tasks(home.context, InlineTasks(), [home.topic("a")], ALL)
    finally:
        ended.set()
        thread.join()
    assert (report.partitions, report.busy, report.journals) == (3, 1, 2)


def test_a_group_with_very_many_amendments_is_made_by_the_driver(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(home, "a", 1)
    monkeypatch.setattr(by_tasks, "_PAGES_MAX", 1)
    monkeypatch.setattr("tidelog.log.run_reader._ROWS_MAX", 5)
    home.update_many("a", {f"0-1-{n}": b"new" for n in range(10)})
    before = contents(home, "a")
    report = compile_by_tasks(home.context, InlineTasks(), [home.topic("a")], ALL)
    assert (report.amendments, report.journals) == (10, 1)
    assert contents(home, "a") == before


def test_told_to_stop_it_stops_between_jobs(home: Home) -> None:
    fill(home, "a")
    report = compile_by_tasks(home.context, InlineTasks(), [home.topic("a")], ALL, lambda: False)
    assert report == CompileReport(partitions=3)
    assert home.compile("a").journals == 3, "the rows were released"


def test_a_job_that_fails_leaves_all_as_it_was(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(home, "a", 1)
    before = contents(home, "a")

    class Broken(InlineTasks):
        def run(self, *_: Any) -> Any:
            raise UnavailableError("no such executor")

    with pytest.raises(UnavailableError, match="executor"):
        compile_by_tasks(home.context, Broken(), [home.topic("a")], ALL)
    assert contents(home, "a") == before
    assert home.compile("a").journals == 1


@pytest.mark.parametrize("how", [{"twice": True}, {"lose": True}], ids=["twice", "lossy"])
def test_tasks_that_run_twice_or_lose_results_change_nothing(
    home: Home, how: dict[str, bool]
) -> None:
    fill(home, "a")
    before = contents(home, "a")
    report = compile_by_tasks(home.context, InlineTasks(**how), [home.topic("a")], FOUR)
    assert (report.partitions, report.runs, report.journals) == (3, 18, 6)
    home.sweep(0)
    assert contents(home, "a") == before
    assert home.verify("a").errors == 0
