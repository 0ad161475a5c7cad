"""Rows of keepers: who runs, who has gone silent, and who is forgotten."""

from __future__ import annotations

import random

import msgspec

from tidelog.catalog.memory import MemoryCatalog
from tidelog.log.base import Log
from tidelog.log.keepers import BEAT_MS, Keeper, Keepers, Part, put_keeper, remove_keeper
from tidelog.model import layout
from tidelog.store.memory import MemoryStore
from tidelog.testing.clock import FakeClock, seeded_ids


def a_log() -> tuple[Log, FakeClock]:
    clock = FakeClock()
    source = random.Random(1)
    return Log(MemoryStore(clock), MemoryCatalog(), clock, seeded_ids(1), source), clock


def a_keeper(log: Log, name: str, *parts: Part) -> Keeper:
    now_ms = log.clock.now_ms()
    return Keeper(name, "host", 7, "", now_ms, now_ms, "http://127.0.0.1:8480", parts)


def rows(log: Log) -> list[str]:
    return [row.row for row in log.catalog.scan(layout.KEEPERS)]


def test_a_keeper_is_listed_while_it_beats_and_gone_when_it_ends() -> None:
    log, clock = a_log()
    keepers = Keepers(log)
    part = Part("archive daily", "failed", 5, restarts=2, error="why", events=3, waiting=4)
    first = a_keeper(log, "a", part)
    put_keeper(log, first)
    clock.sleep(1)
    put_keeper(log, a_keeper(log, "b"))
    assert [each.id for each in keepers.list()] == ["a", "b"]
    assert keepers.list()[0].parts == (part,)
    clock.sleep(4 * BEAT_MS / 1000)
    assert keepers.list() == []
    put_keeper(log, msgspec.structs.replace(first, beat_ms=clock.now_ms()))
    assert [each.id for each in keepers.list()] == ["a"]
    remove_keeper(log, "a")
    remove_keeper(log, "a")
    assert keepers.list() == []


def test_a_row_that_was_left_behind_is_removed_after_a_day() -> None:
    log, clock = a_log()
    keepers = Keepers(log)
    put_keeper(log, a_keeper(log, "a"))
    assert len(keepers.list()) == 1
    clock.sleep(23 * 3_600)
    assert keepers.list() == []
    assert rows(log) == [layout.keeper_row("a")]
    clock.sleep(2 * 3_600)
    assert keepers.list() == []
    assert rows(log) == []


def test_keeper_whose_clock_is_wrong_is_judged_by_its_beats() -> None:
    log, clock = a_log()
    keepers = Keepers(log)
    for wrong_ms in (3_600_000, -3_600_000, -72 * 3_600_000):
        keeper = a_keeper(log, "a")
        for _ in range(5):
            beat_ms = clock.now_ms() + wrong_ms
            put_keeper(log, msgspec.structs.replace(keeper, beat_ms=beat_ms))
            assert [each.id for each in keepers.list()] == ["a"]
            clock.sleep(BEAT_MS / 1000)
        clock.sleep(3 * BEAT_MS / 1000)
        assert keepers.list() == [], "it is silent, whatever its row says"
        assert rows(log) == [layout.keeper_row("a")]
