"""What an erasure would delete: the plan has the same numbers as the erasure after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tidelog
from tidelog import ErasurePlan, Event, Home, ToOffsets
from tidelog.errors import InvalidError


@pytest.fixture
def home(tmp_path: object) -> Iterator[Home]:
    with tidelog.create_home(f"{tmp_path}/home")[0] as made:
        made.create_topic("t", partitions=2)
        yield made


def fill(home: Home, names: str) -> None:
    """Appends an event for each name, with this key and id, by turns to both partitions."""
    for number, name in enumerate(names):
        event = Event(b"{}", key=name.encode(), id=name)
        home.append("t", [event], partition=number % 2)


def test_plan_of_a_topic_counts_what_the_erasure_deletes(home: Home) -> None:
    raw = home.archives.create("raw", source="topic:t")
    fill(home, "aabac")
    raw.run()
    chained = home.archives.create("chained", source="archive:raw")
    chained.run()
    fill(home, "aa")
    wanted: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"key": b"a"}, ()),
        ({"ids": ["a", "unknown"]}, ("unknown",)),
    ]
    for given, missing in wanted:
        plan = home.plan_erase("t", **given)
        held = {"chained": 3, "raw": 3}
        assert plan == ErasurePlan({"t/0": 2, "t/1": 3}, held, missing=missing)
        assert plan.events == 5
    assert home.plan_erase("t", key=b"x") == ErasurePlan()
    assert home.delete("t", key=b"a").events == 5
    assert home.plan_erase("t", key=b"a").events == 0, "they are deleted"


def test_plan_of_a_topic_counts_what_only_archives_hold(home: Home) -> None:
    raw = home.archives.create("raw", source="topic:t")
    fill(home, "aabac")
    raw.run()
    home.trim("t", ToOffsets({0: 2, 1: 2}))
    assert home.plan_erase("t", key=b"a") == ErasurePlan({"t/0": 1, "t/1": 2}, {"raw": 3}, 3)
    done = home.delete("t", key=b"a")
    assert (done.events, done.archived) == (0, 3)


def test_plan_of_an_archive_counts_its_copies(home: Home) -> None:
    raw = home.archives.create("raw", source="topic:t")
    fill(home, "aabac")
    raw.run()
    home.archives.create("chained", source="archive:raw").run()
    home.delete_topic("t")
    plan = raw.plan_erase(key=b"a")
    assert plan == ErasurePlan({"t/0": 1, "t/1": 2}, {"chained": 3, "raw": 3})
    assert raw.erase(key=b"a", prove=False).events == 3
    assert raw.plan_erase(ids=["a"]) == ErasurePlan(missing=("a",))


def test_plan_needs_ids_or_a_key(home: Home) -> None:
    with pytest.raises(InvalidError, match="give ids, or one key"):
        home.plan_erase("t")
