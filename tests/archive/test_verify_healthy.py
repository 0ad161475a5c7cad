"""``archive verify --source`` reports no healthy archive, and still sees what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.archive.test_archive import fill
from tests.archive.test_fill import drive, home, trim
from tests.support.archive_look import an_archive
from tidelog import Event, Home
from tidelog.archive.generations import begin_backfill, promote
from tidelog.archive.verify import verify_archive, verify_generations
from tidelog.archive.verify_checks import ArchiveVerifyOptions, SourceCheck
from tidelog.coordination.audit import Why
from tidelog.coordination.commits import read_manifests
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.erasure.delete import delete_events
from tidelog.errors import NotFoundError
from tidelog.maintenance.erase import purge
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.model.pipeline import Gap, Manifest
from tidelog.store.local import LocalStore
from tidelog.testing.scheduler import Crash

__all__ = ["home"]


def problems(home: Home, name: str = "daily", generation: int | None = None) -> list[str]:
    how = ArchiveVerifyOptions(generation, deep=True, source=True)
    report = verify_archive(home.context, home.archives.get(name).info, how)
    return [f"{each.where}: {each.what}" for each in report.problems]


def built(home: Home, name: str = "daily") -> Archive:
    archive, generation = begin_backfill(home.context, name, ArchiveFormat())
    drive(home, archive, generation)
    return promote(home.context, name)


def with_gap(home: Home) -> Archive:
    """An archive with a gap from 5 to 8."""
    fill(home, 5)
    archive = an_archive(home)
    drive(home, archive)
    fill(home, 7, first=5)
    trim(home, 8)
    drive(home, archive, accept_loss=True)
    return archive


def test_chain_over_a_gap_is_healthy(home: Home) -> None:
    with_gap(home)
    drive(home, an_archive(home, "copy", "archive:daily"))
    assert problems(home, "copy") == []


def test_range_with_a_gap_that_was_filled_is_healthy(home: Home) -> None:
    with_gap(home)
    built(home)
    assert problems(home) == []


def test_chain_is_healthy_after_its_source_was_built_again_without_erased_events(
    home: Home,
) -> None:
    home.append("t", [Event(b"x", id=f"e{n}") for n in range(6)])
    drive(home, an_archive(home))
    drive(home, an_archive(home, "copy", "archive:daily"))
    delete_events(home.context, home.amender("t", Why("asked", "me")), ["e3"])
    purge(home.context, home.topic("t"), grace_ms=0)
    built(home)
    assert problems(home, "copy") == []


@pytest.mark.parametrize("more", [0, 4])
def test_partition_that_ended_as_was_accepted_is_healthy(home: Home, more: int) -> None:
    fill(home, 5)
    archive = an_archive(home)
    drive(home, archive)
    home.delete_topic("t")
    home.create_topic("t", 1)
    fill(home, 3 + more)
    assert any("it is another" in each for each in problems(home))
    drive(home, archive, accept_loss=True)
    assert problems(home) == []


def test_deletes_from_a_topic_that_was_created_again_since_are_healthy(home: Home) -> None:
    home.append("t", [Event(b"x", id=f"e{n}") for n in range(6)])
    home.delete("t", ["e1", "e2"])
    archive = an_archive(home)
    drive(home, archive)
    home.delete_topic("t")
    home.create_topic("t", 1)
    fill(home, 9)
    drive(home, archive, accept_loss=True)
    assert problems(home) == []


def test_kept_generation_of_a_partition_that_ended_is_healthy(home: Home) -> None:
    fill(home, 5)
    drive(home, an_archive(home))
    archive = built(home)
    home.delete_topic("t")
    home.create_topic("t", 1)
    fill(home, 3)
    assert all(
        any("it is another" in each for each in problems(home, generation=n)) for n in (1, 2)
    )
    drive(home, archive, accept_loss=True)
    assert problems(home, generation=1) == problems(home, generation=2) == []


def test_generation_that_was_built_from_a_shorter_backup_is_healthy(home: Home) -> None:
    fill(home, 5)
    drive(home, an_archive(home, "backup"))
    fill(home, 5, first=5)
    archive = an_archive(home)
    drive(home, archive)
    trim(home, 10)
    for generation in (2, 3):
        source = "archive:backup" if generation == 2 else ""
        archive, _ = begin_backfill(home.context, "daily", ArchiveFormat(source=source))
        drive(home, archive, generation)
        assert problems(home, generation=generation) == []
        archive = promote(home.context, "daily")
        fill(home, 5)
        drive(home, archive)
        assert [problems(home, generation=n) for n in archive.formats] == [[]] * generation


@pytest.fixture
def range_of_topic(home: Home) -> Manifest:
    """A range of 10 events of a topic from which nothing was deleted."""
    fill(home, 10)
    archive = an_archive(home)
    drive(home, archive)
    (manifest,) = read_manifests(home.context, archive.pipeline(), "t/0")
    return manifest


def found(home: Home, manifest: Manifest, **changes: object) -> list[str]:
    changed = msgspec.structs.replace(manifest, **changes)
    check = SourceCheck(home.context, home.archives.get("daily").info, 1)
    return [each.what for each in check.count(changed)]


def test_event_too_few_or_too_many_is_a_problem(home: Home, range_of_topic: Manifest) -> None:
    assert found(home, range_of_topic) == []
    assert found(home, range_of_topic, read=9) == ["9 events were read, the source has 10 there"]
    assert "11 events were read" in found(home, range_of_topic, read=11)[0]
    gaps = (Gap("2", "4", "retention", 2), Gap("6", "7", "retention", 1))
    assert found(home, range_of_topic, read=7, lost=gaps) == []
    assert found(home, range_of_topic, read=6, lost=gaps) != []
    assert found(home, range_of_topic, read=8, lost=gaps) != []


def test_source_that_grew_while_it_was_verified_is_the_same(home: Home) -> None:
    fill(home, 10)
    archive = an_archive(home)
    drive(home, archive)
    check = SourceCheck(home.context, home.archives.get("daily").info, 1)
    fill(home, 5)
    drive(home, archive)
    head = read_progress(home.context, archive.pipeline(), "t/0")
    assert head is not None
    assert head.position == "15"
    assert list(check.ends("t/0", head)) == []
    ahead = msgspec.structs.replace(head, position="16")
    assert [each.kind for each in check.ends("t/0", ahead)] == ["source"]


def test_range_that_was_carried_over_is_not_compared(home: Home, range_of_topic: Manifest) -> None:
    assert found(home, range_of_topic, read=9, filled=1, as_is=True) == []


@pytest.mark.parametrize("deletes_all", [False, True])
def test_files_that_are_being_deleted_are_not_missing(home: Home, deletes_all: bool) -> None:
    fill(home, 5)
    drive(home, an_archive(home))
    built(home)
    archive = home.archives.get("daily")
    before = archive.info

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "delete", deletes_then_dies(LocalStore.delete))
        with pytest.raises(Crash):
            archive.delete(files=True) if deletes_all else archive.drop(1)
    if not deletes_all:
        report = verify_generations(home.context, before, ArchiveVerifyOptions(deep=True))
        assert (report.problems, report.others) == ([], [])
    with pytest.raises(NotFoundError, match="is being removed"):
        verify_archive(home.context, before, ArchiveVerifyOptions(1, deep=True))


def deletes_then_dies(delete: Callable[..., None]) -> Callable[..., None]:
    def call(*given: Any) -> None:
        delete(*given)
        raise Crash

    return call
