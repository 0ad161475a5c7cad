"""A fill, a promote, a rollback and a drop may die after any call: the next one finishes them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.archive.test_archive import fill
from tests.archive.test_fill import (
    BY_HOUR,
    backfill,
    drive,
    home,
    keys,
    listed,
    live,
    prepared,
    trim,
)
from tidelog import Home
from tidelog.archive import generations
from tidelog.archive.generations import begin_backfill, drop_generation, promote, rollback
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.model import limits
from tidelog.settings import LogSettings
from tidelog.testing.faults import Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash

__all__ = ["home"]


def deaths(calls: int) -> list[Any]:
    """Every call that may be the last; all but some of them in long runs only."""
    long = pytest.mark.long
    return [pytest.param(n, marks=long if n % 10 else ()) for n in range(1, calls)]


def dies(home: Home, monkeypatch: pytest.MonkeyPatch, call: int, work: Callable[[], Any]) -> bool:
    """Do some work that dies after a call; whether it did."""
    faults = Faults(crash_after_call=call)
    with monkeypatch.context() as patch:
        store = FaultyStore(home.store, faults)
        catalog = FaultyCatalog(home.catalog, faults, home.context.clock)
        settings = LogSettings(lease_ttl_ms=3_600_000)  # no beat of a thread is the call
        faulty = dataclasses.replace(
            home.context, store=store, catalog=catalog, log_settings=settings
        )
        patch.setattr(home, "context", faulty)
        patch.setattr(generations, "files_at", lambda *_: store)
        patch.setattr(limits, "PROMOTION_MS", -1)
        try:
            work()
        except Crash:
            return True
    assert faults.calls < call
    return False


@pytest.mark.parametrize("call", deaths(100))
def test_fill_that_dies_after_any_call_resumes(
    home: Home, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    prepared(home)
    built, generation = begin_backfill(home.context, "daily", BY_HOUR)
    dies(home, monkeypatch, call, lambda: drive(home, built, generation))
    assert live(home) == Counter(range(80)), "readers of the live one are served"
    drive(home, built, generation, take_over=True)
    promote(home.context, "daily")
    assert live(home) == Counter(range(80))


@pytest.mark.parametrize("call", deaths(40))
def test_a_promote_that_dies_after_any_call_is_finished_by_the_next(
    home: Home, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    prepared(home)
    backfill(home)
    dies(home, monkeypatch, call, lambda: promote(home.context, "daily"))
    assert live(home) == Counter(range(80))
    monkeypatch.setattr(limits, "PROMOTION_MS", -1)
    fill(home, 10, first=80)
    drive(home, home.archives.get("daily").info, take_over=True)
    if home.archives.get("daily").info.generation == 1:
        promote(home.context, "daily")
    assert home.archives.get("daily").info.in_state("kept") == [1]
    assert live(home) == Counter(range(90))


@pytest.mark.parametrize("call", deaths(120))
def test_a_rollback_that_dies_after_any_call_is_finished_by_the_next(
    home: Home, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    prepared(home)
    backfill(home)
    promote(home.context, "daily")
    fill(home, 40, first=80)
    drive(home, home.archives.get("daily").info)
    trim(home, 100)
    dies(home, monkeypatch, call, lambda: rollback(home.context, "daily"))
    assert live(home) == Counter(range(120))
    monkeypatch.setattr(limits, "PROMOTION_MS", -1)
    drive(home, home.archives.get("daily").info, take_over=True)
    if home.archives.get("daily").info.generation == 2:
        rollback(home.context, "daily")
    found = home.archives.get("daily").info
    assert (found.generation, found.in_state("kept")) == (1, [2])
    assert live(home) == Counter(range(120))


@pytest.mark.parametrize("call", deaths(40))
def test_a_drop_that_dies_after_any_call_is_finished_by_a_sweep(
    home: Home, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    prepared(home)
    backfill(home)
    promote(home.context, "daily")
    dies(home, monkeypatch, call, lambda: drop_generation(home.context, "daily", 1))
    found = home.archives.get("daily").info
    if 1 in found.formats and found.state_of(1) == "kept":
        assert listed(home, found, 1) == Counter(range(80)), "it is whole until a drop is decided"
        drop_generation(home.context, "daily", 1)
    sweep_archives(home.context, grace_ms=0)
    assert list(home.archives.get("daily").info.formats) == [2]
    assert keys(home, "archives/daily/g1/") == []
    assert live(home) == Counter(range(80))
