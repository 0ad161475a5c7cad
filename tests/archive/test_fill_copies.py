"""Generations that are built of a copy which is older than updates that archives have."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.archive_look import a_home
from tidelog import ArchiveHandle, Event, Home, ToOffsets

EVENTS = 10
UPDATED, DEAD = 5, 4  # offsets; the second one is a dead letter


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path / "home") as made:
        made.create_topic("t")
        yield made


def value(number: int, text: str = "") -> bytes:
    at = 1_794_744_000_000 + number
    return (
        json.dumps({"at": at, "s": text}).encode()
        if number % 4
        else b"bad %d %s"
        % (
            number,
            text.encode(),
        )
    )


def append(home: Home, start: int, end: int) -> None:
    home.append("t", [Event(value(each), id=f"e{each}") for each in range(start, end)])


def copy_files(home: Home, archive: ArchiveHandle, to: Path) -> str:
    folder = Path(home.store.url.removeprefix("file://")) / archive.info.folder()
    shutil.copytree(folder, to, dirs_exist_ok=True)
    return f"file:{to}"


def update(home: Home) -> None:
    for number in (UPDATED, DEAD):
        home.update("t", f"e{number}", value(number, "NEW"))
    home.update_archives("t", [f"e{UPDATED}", f"e{DEAD}"])


def values(archive: ArchiveHandle) -> dict[int, bytes]:
    """The values of all events, with dead letters."""
    batches = [*archive.read(), *archive.dead_letters()]
    found = [
        pair
        for batch in batches
        for pair in zip(
            batch.column("offset").to_pylist(), batch.column("value").to_pylist(), strict=True
        )
    ]
    assert len(found) == len(dict(found))
    return dict(found)


def expected(end: int = EVENTS) -> dict[int, bytes]:
    return {each: value(each, "NEW" if each in (UPDATED, DEAD) else "") for each in range(end)}


@pytest.mark.parametrize("is_built_again", [False, True])
def test_update_is_not_undone_by_an_older_copy(
    home: Home, tmp_path: Path, is_built_again: bool
) -> None:
    """Also if the update came with a generation of the topic, whose files no update changed."""
    raw = home.archives.create("raw", source="topic:t")
    day = home.archives.create("day", source="topic:t", parser="json:at", dead_share=1.0)
    append(home, 0, EVENTS)
    raw.run()
    day.run()
    copy = copy_files(home, raw, tmp_path / "copy")
    update(home)
    if is_built_again:
        day.backfill()
        day.promote()
    home.trim("t", ToOffsets({0: EVENTS}))
    day.backfill(source=copy)
    day.promote()
    assert values(day) == expected()
    assert day.verify(deep=True, source=True).problems == []


def test_update_is_not_undone_by_an_archive_of_an_older_copy(home: Home, tmp_path: Path) -> None:
    day = home.archives.create("day", source="topic:t", parser="json:at", dead_share=1.0)
    raw = home.archives.create("raw", source="topic:t")
    append(home, 0, EVENTS)
    day.run()
    raw.run()
    old = home.archives.create("old", source=copy_files(home, raw, tmp_path / "copy"))
    old.run()
    update(home)
    day.backfill(source="archive:old")
    day.promote()
    assert values(day) == expected()


def test_copy_fills_what_the_live_generation_lacks(home: Home, tmp_path: Path) -> None:
    raw = home.archives.create("raw", source="topic:t")
    append(home, 0, EVENTS)
    day = home.archives.create("day", source="topic:t", parser="json:at", dead_share=1.0)
    day.run()
    append(home, EVENTS, 16)
    raw.run()
    copy = copy_files(home, raw, tmp_path / "copy")
    day.seek("latest")
    append(home, 16, 20)
    day.run()
    update(home)
    home.trim("t", ToOffsets({0: 16}), past_readers=True)
    assert set(values(day)) == {*range(EVENTS), *range(16, 20)}
    day.backfill(source=copy)
    day.promote()
    assert values(day) == expected(20)
