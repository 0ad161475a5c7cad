"""Rows of keepers: who runs, who has gone silent, and who is forgotten."""

from __future__ import annotations

import random

import msgspec

from tidelog.catalog.memory import MemoryCatalog
from tidelog.context import Context
from tidelog.coordination.jobs import (
    BEAT_MS,
    Keeper,
    Keepers,
    SupervisedPart,
    put_keeper,
    remove_keeper,
)
from tidelog.model import layout
from tidelog.store.memory import MemoryStore
from tidelog.testing.scheduler import FakeClock, seeded_ids


def a_log() -> tuple[Context, FakeClock]:
    clock = FakeClock()
    source = random.Random(1)
    return Context(MemoryStore(clock), MemoryCatalog(), clock, seeded_ids(1), source), clock


def a_keeper(context: Context, name: str, *parts: SupervisedPart) -> Keeper:
    now_ms = context.clock.now_ms()
    return Keeper(name, "host", 7, "", now_ms, now_ms, "http://127.0.0.1:8480", parts)


def rows(context: Context) -> list[str]:
    return [row.row for row in context.catalog.scan(layout.KEEPERS)]


def test_a_keeper_is_listed_while_it_beats_and_gone_when_it_ends() -> None:
    context, clock = a_log()
    keepers = Keepers(context)
    part = SupervisedPart(
        "archive daily", "failed", 5, restarts=2, error="why", events=3, waiting=4
    )
    first = a_keeper(context, "a", part)
    put_keeper(context, first)
    clock.sleep(1)
    put_keeper(context, a_keeper(context, "b"))
    assert [each.id for each in keepers.list()] == ["a", "b"]
    assert keepers.list()[0].parts == (part,)
    clock.sleep(4 * BEAT_MS / 1000)
    assert keepers.list() == []
    put_keeper(context, msgspec.structs.replace(first, beat_ms=clock.now_ms()))
    assert [each.id for each in keepers.list()] == ["a"]
    remove_keeper(context, "a")
    remove_keeper(context, "a")
    assert keepers.list() == []


def test_a_row_that_was_left_behind_is_removed_after_a_day() -> None:
    context, clock = a_log()
    keepers = Keepers(context)
    put_keeper(context, a_keeper(context, "a"))
    assert len(keepers.list()) == 1
    clock.sleep(23 * 3_600)
    assert keepers.list() == []
    assert rows(context) == [layout.keeper_row("a")]
    clock.sleep(2 * 3_600)
    assert keepers.list() == []
    assert rows(context) == []


def test_keeper_whose_clock_is_wrong_is_judged_by_its_beats() -> None:
    context, clock = a_log()
    keepers = Keepers(context)
    for wrong_ms in (3_600_000, -3_600_000, -72 * 3_600_000):
        keeper = a_keeper(context, "a")
        for _ in range(5):
            beat_ms = clock.now_ms() + wrong_ms
            put_keeper(context, msgspec.structs.replace(keeper, beat_ms=beat_ms))
            assert [each.id for each in keepers.list()] == ["a"]
            clock.sleep(BEAT_MS / 1000)
        clock.sleep(3 * BEAT_MS / 1000)
        assert keepers.list() == [], "it is silent, whatever its row says"
        assert rows(context) == [layout.keeper_row("a")]
