"""Markers of archives made of other archives, and of folders that a replay adds files to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.archive_look import FIRST_S, a_home, an_archive, drive
from tidelog import Event, Home
from tidelog.archive.finalize import FinalizeOptions, finalize
from tidelog.model.archive import Archive

DAY_S = 86_400
BEGIN_S = FIRST_S - 60 * DAY_S
NOW = FinalizeOptions(delay_ms=0)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        yield made


def add(home: Home, days: list[int]) -> None:
    events = [Event(json.dumps({"at": BEGIN_S + day * DAY_S}).encode()) for day in days]
    home.append("t", events, partition=0)


def marked(home: Home, archive: Archive) -> int:
    found = home.store.list(f"{archive.folder()}/")
    return sum(info.key.endswith("_SUCCESS") for info in found)


def chain(home: Home) -> tuple[Archive, Archive, Archive]:
    """A backup of the topic, an archive of the backup, and one of that archive."""
    backup = an_archive(home, "backup")
    middle = an_archive(home, "middle", source="archive:backup")
    return backup, middle, an_archive(home, "last", source="archive:middle", parser="json:at")


def test_archive_caught_up_with_one_that_lags_marks_nothing_that_may_grow(home: Home) -> None:
    backup, middle, last = chain(home)
    add(home, [0] * 10)
    for archive in (backup, middle, last):
        drive(home, archive)
    add(home, [0] * 490)
    assert finalize(home.context, last, NOW).notices == []
    drive(home, backup)  # now the middle one lags
    assert finalize(home.context, last, NOW).notices == []
    drive(home, middle)
    assert finalize(home.context, last, NOW).notices == []
    assert marked(home, last) == 0
    drive(home, last)
    (notice,) = finalize(home.context, last, NOW).notices
    assert (notice.event, notice.events) == ("final", 500)
    assert marked(home, last) == 1


def test_lagging_chain_marks_days_before_its_own_last_event(home: Home) -> None:
    backup, middle, last = chain(home)
    add(home, [0, 1, 2, 3])
    for archive in (backup, middle, last):
        drive(home, archive)
    add(home, [3, 4])
    finalize(home.context, last, NOW)
    assert marked(home, last) == 3, "days 0, 1 and 2; of day 3 more may come"


def test_all_folders_of_a_chain_are_marked(home: Home) -> None:
    backup, middle, last = chain(home)
    add(home, list(range(30)))
    for archive in (backup, middle, last):
        drive(home, archive)
    finalize(home.context, last, NOW)
    assert marked(home, last) == 30


def test_chain_whose_topic_was_deleted_is_finalized_by_what_its_backup_has(home: Home) -> None:
    backup, middle, last = chain(home)
    add(home, [0, 1, 2])
    drive(home, backup)
    home.delete_topic("t")
    assert finalize(home.context, last, NOW).notices == []
    for archive in (middle, last):
        drive(home, archive)
    finalize(home.context, last, NOW)
    assert marked(home, last) == 3
    watermark_ms = home.archives.get("last").info.watermark_ms
    assert watermark_ms is not None
    assert watermark_ms > (BEGIN_S + 3 * DAY_S) * 1000


@pytest.mark.parametrize(("own", "other"), [("day", "hour"), ("hour", "day"), ("hour", "minute")])
def test_replay_with_other_folders_reopens_the_folder_that_they_are_in(
    home: Home, own: str, other: str
) -> None:
    home.create_topic("orders", 1)
    times = [1_794_571_200_000 + n for n in range(20)]
    home.append("orders", [Event(json.dumps({"at": each}).encode()) for each in times])
    home.append("orders", [Event(json.dumps({"late": each}).encode()) for each in times[:3]])
    archive = home.archives.create("o", source="topic:orders", parser="json:at", granularity=own)
    archive.run()
    archive.finalize("0s")
    archive.replay(parser="json:late", granularity=other)
    events = {(each.event, each.folder): each.events for each in archive.finalize("0s").notices}
    day = "orders/dt=2026-11-13"
    assert events["reopened", day] == events["final", day] == 23
    marks = [info.key for info in home.store.list("archives/o/") if info.key.endswith("_SUCCESS")]
    for mark in marks:
        below = home.store.list(mark.removesuffix("_SUCCESS"))
        files = [info.key for info in below if info.key.endswith(".parquet")]
        assert json.loads(home.store.get(mark))["files"] == len(files), mark
