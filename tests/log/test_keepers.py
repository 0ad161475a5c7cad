"""Rows of keepers: who runs, who has gone silent, and who is forgotten."""

from __future__ import annotations

import random

import msgspec

from tidelog.catalog.memory import MemoryCatalog
from tidelog.log.base import Log
from tidelog.log.keepers import BEAT_MS, Keeper, Part, list_keepers, put_keeper, remove_keeper
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
    part = Part("archive daily", "failed", 5, restarts=2, error="why", events=3, waiting=4)
    first = a_keeper(log, "a", part)
    put_keeper(log, first)
    clock.sleep(1)
    put_keeper(log, a_keeper(log, "b"))
    assert [each.id for each in list_keepers(log)] == ["a", "b"]
    assert list_keepers(log)[0].parts == (part,)
    clock.sleep(4 * BEAT_MS / 1000)
    assert list_keepers(log) == []
    put_keeper(log, msgspec.structs.replace(first, beat_ms=clock.now_ms()))
    assert [each.id for each in list_keepers(log)] == ["a"]
    remove_keeper(log, "a")
    remove_keeper(log, "a")
    assert list_keepers(log) == []


def test_a_row_that_was_left_behind_is_removed_after_a_day() -> None:
    log, clock = a_log()
    put_keeper(log, a_keeper(log, "a"))
    clock.sleep(23 * 3_600)
    assert list_keepers(log) == []
    assert rows(log) == [layout.keeper_row("a")]
    clock.sleep(2 * 3_600)
    assert list_keepers(log) == []
    assert rows(log) == []
