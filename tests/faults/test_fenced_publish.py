"""A driver that stalls while it finishes a range, and that another one has replaced, is fenced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.archive.test_archive import an_archive, payload
from tests.archive.test_fill import drive
from tidelog import Event, Home
from tidelog.archive.generations import begin_backfill, drop_generation, promote
from tidelog.connectors.archive import sink as files
from tidelog.connectors.archive.staging import publish_files
from tidelog.errors import FencedError
from tidelog.home import World, create_home
from tidelog.maintenance.erase import purge
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.model.archive import Archive
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.pipeline.cycle import Cycle
from tidelog.settings import Settings
from tidelog.testing.scheduler import Crash


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A home whose heartbeats are too rare to tell a driver that others have stopped it."""
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=60_000)
    with create_home(settings, world=World(environ={}))[0] as made:
        made.create_topic("t", 1)
        yield made


def overtake(home: Home, archive: Archive) -> None:
    """Another driver commits the range, and an erasure then rewrites its files."""
    drive(home, archive, take_over=True)
    home.delete("t", ["id-3"], why="asked")
    purge(home.context, home.topic("t"), grace_ms=0)
    sweep_archives(home.context, grace_ms=-1)


def drop(home: Home, archive: Archive) -> None:
    """Another generation is promoted, and this one dropped."""
    drive(home, archive, take_over=True)
    built, generation = begin_backfill(home.context, "daily", archive.format_of())
    drive(home, built, generation)
    promote(home.context, "daily")
    drop_generation(home.context, "daily", 1)


def ends_without_a_commit(
    meanwhile: Callable[[Home, Archive], None],
) -> AbstractContextManager[Any]:
    """One that lost its partition goes on without it; one whose generation is gone is fenced."""
    return pytest.raises(FencedError) if meanwhile is drop else nullcontext()


@pytest.fixture
def archive(home: Home) -> Archive:
    home.append("t", [Event(payload(n), id=f"id-{n}") for n in range(20)])
    return an_archive(home, "daily", parser="json:at")


@pytest.mark.parametrize("meanwhile", [overtake, drop])
def test_driver_that_stalled_before_it_published_is_fenced(
    home: Home,
    archive: Archive,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[[Home, Archive], None],
) -> None:
    stalled = False

    def stalling(store: Any, entries: Sequence[FileEntry], at_once: int = 1) -> None:
        nonlocal stalled
        if not stalled:
            stalled = True
            meanwhile(home, archive)
        publish_files(store, entries, at_once=at_once)

    monkeypatch.setattr(files, "publish_files", stalling)
    with ends_without_a_commit(meanwhile):
        assert drive(home, archive) == 0
    assert stalled


@pytest.mark.parametrize("meanwhile", [overtake, drop])
def test_driver_that_stalled_before_it_read_a_manifest_is_fenced(
    home: Home,
    archive: Archive,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[[Home, Archive], None],
) -> None:
    def dying(*_: object, **__: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:  # leaves a range that is decided
        patch.setattr(files, "publish_files", dying)
        with pytest.raises(Crash):
            drive(home, archive)
    read, stalled = Cycle._manifest, False

    def stalling(self: Cycle, key: str) -> Manifest:
        nonlocal stalled
        if not stalled:
            stalled = True
            meanwhile(home, archive)
        return read(self, key)

    monkeypatch.setattr(Cycle, "_manifest", stalling)
    with ends_without_a_commit(meanwhile):
        assert drive(home, archive, take_over=True) == 0
    assert stalled
    assert home.archives.get("daily").info.name == "daily"
