"""Erasures reach every generation, also while one is filled from the live one's files."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.archive.test_archive import an_archive, payload
from tests.archive.test_fill import backfill, drive, home, listed, trim
from tests.sim.archive_many import HoledBackup
from tests.support.waiting import until
from tidelog import Event, Home
from tidelog.archive import generations
from tidelog.archive import read as archive_files
from tidelog.archive.generations import drop_generation, promote, rollback
from tidelog.archive.read import is_changing
from tidelog.connectors import by_url
from tidelog.connectors.by_url import open_source
from tidelog.connectors.source import Source
from tidelog.context import Context
from tidelog.coordination.audit import Why
from tidelog.coordination.commits import read_manifests
from tidelog.coordination.pipeline_rows import counting_files
from tidelog.erasure import rewrite as erase
from tidelog.erasure.delete import delete_events
from tidelog.errors import UnavailableError
from tidelog.maintenance.erase import purge
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.pipeline.tasks import Task, TaskOutcome, run_task

__all__ = ["home"]


def test_a_kept_generation_is_erased_from_and_swept(home: Home) -> None:
    home.append("t", [Event(payload(n), id=f"id-{n}") for n in range(20)])
    drive(home, an_archive(home, "daily", parser="json:at"))
    backfill(home)
    promoted = promote(home.context, "daily")
    home.delete("t", ["id-7"], why="asked")
    purge(home.context, home.topic("t"), grace_ms=0)
    assert 7 not in listed(home, promoted, 1)
    assert 7 not in listed(home, promoted, 2)
    sweep_archives(home.context, grace_ms=-1)
    assert sum(listed(home, promoted, 1).values()) == 19, "a sweep does not remove it"


def test_events_that_were_erased_before_a_fill_stay_counted(home: Home) -> None:
    home.append("t", [Event(payload(n), id=f"id-{n}") for n in range(20)])
    drive(home, an_archive(home, "daily", parser="json:at"))
    home.delete("t", ["id-7"], why="asked")
    purge(home.context, home.topic("t"), grace_ms=0)
    trim(home, 20)
    backfill(home)
    promoted = promote(home.context, "daily")
    (manifest,) = read_manifests(home.context, promoted.pipeline(), "t/0")
    assert (manifest.read, manifest.deleted) == (19, 1)


def test_erased_event_that_the_backup_lacks_is_accounted_as_erased(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.append("t", [Event(payload(n), id=f"id-{n}") for n in range(20)])
    drive(home, an_archive(home, "daily", parser="json:at"))
    home.delete("t", ["id-7"], why="asked")
    purge(home.context, home.topic("t"), grace_ms=0)

    def open_backup(url: str, **how: Any) -> Source:
        held = HoledBackup(how["open_context"], "daily")  # without 1, 4, 7 and so on
        return held if url == held.url else open_source(url, **how)

    monkeypatch.setattr(by_url, "open_source", open_backup)
    backfill(home, written_as=ArchiveFormat(parser="json:at", source="holed:daily"))
    promoted = promote(home.context, "daily")
    (manifest,) = read_manifests(home.context, promoted.pipeline(), "t/0")
    assert (manifest.read, manifest.deleted, manifest.absent) == (19, 1, 0)


def test_erased_event_stays_counted_where_a_fill_ends_inside_a_commit(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive_holed(home, monkeypatch)
    home.archives.get("daily").erase(ids=["id-2"], why="asked", prove=False)
    trim(home, 10)  # the source's events begin inside the only commit
    backfill(home)
    promoted = promote(home.context, "daily")
    found = list(read_manifests(home.context, promoted.pipeline(), "t/0"))
    assert [(each.deleted, each.absent) for each in found] == [(1, 3), (0, 4)]


def drive_holed(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Archive a backup, where offsets 1, 4, 7 and so on were never there."""
    home.append("t", [Event(payload(n), id=f"id-{n}") for n in range(20)])

    def open_holed(url: str, **how: Any) -> Source:
        held = HoledBackup(how["open_context"], "own")
        return held if url == held.url else open_source(url, **how)

    monkeypatch.setattr(by_url, "open_source", open_holed)
    drive(home, an_archive(home, "daily", "holed:own", parser="json:at"))


def test_rollback_beside_an_erasure_that_died_reports_no_damage(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive_holed(home, monkeypatch)
    backfill(home)
    promote(home.context, "daily")

    die_after_a_replace(home, monkeypatch)
    with pytest.raises(UnavailableError, match="`tidelog sweep` finishes one that died"):
        rollback(home.context, "daily")
    sweep_archives(home.context, grace_ms=-1)
    assert rollback(home.context, "daily").generation == 1


def die_after_a_replace(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Erase an event, and die when its file is replaced and the row does not say so."""

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(erase.PartitionRewriter, "_count_row", die)
        home.archives.get("daily").erase(ids=["id-2"], why="asked", prove=False)


def test_file_counts_as_changing_though_its_erasure_ends_between_two_reads_of_rows(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive_holed(home, monkeypatch)
    archive = home.archives.get("daily").info
    files = counting_files(home.context, archive.pipeline(), "t/0")
    file = next(each for _, each in files if each.first_offset <= 2 <= each.last_offset)
    die_after_a_replace(home, monkeypatch)
    looked: list[str] = []
    for name in ("read_commits", "counting_files"):
        reads = getattr(archive_files, name)

        def read(*given: Any, reads: Any = reads, name: str = name) -> Any:
            found = list(reads(*given))
            if not looked:
                sweep_archives(home.context, grace_ms=-1)  # finishes the erasure
            looked.append(name)
            return iter(found)

        monkeypatch.setattr(archive_files, name, read)
    assert is_changing(home.context, archive, 1, "t/0", file)
    assert looked


def test_an_event_that_is_erased_during_a_rollback_is_in_no_generation(home: Home) -> None:
    home.append("t", [Event(payload(n), id=f"id-{n}") for n in range(20)])
    drive(home, an_archive(home, "daily", parser="json:at"))
    backfill(home)
    promote(home.context, "daily")
    home.append("t", [Event(payload(n), id=f"id-{n}") for n in range(20, 40)])
    drive(home, home.archives.get("daily").info)
    trim(home, 40)

    class Erasing:
        """Reads the range from the live files, and lets an erasure come before it is written."""

        def run(self, tasks: Sequence[Task]) -> Iterator[TaskOutcome]:
            done = [run_task(task) for task in tasks]
            home.delete("t", ["id-30"], why="asked")
            threading.Thread(target=erase).start()
            until(begun.is_set)
            yield from done

    begun = threading.Event()
    ended = threading.Event()

    def erase() -> None:
        begun.set()
        delete_archived(home, "id-30")
        ended.set()

    def delete_archived(home: Home, event: str) -> None:
        delete_events(home.context, home.amender("t", Why("asked", "me")), [event])
        purge(home.context, home.topic("t"), grace_ms=0, wait_ms=60_000)

    back = rollback(home.context, "daily", workers=Erasing())
    until(ended.is_set)
    for generation in (1, 2):
        assert 30 not in listed(home, back, generation)


def test_an_erasure_reaches_a_generation_that_began_after_it_looked(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.append("t", [Event(payload(n), id=f"id-{n}") for n in range(20)])
    drive(home, an_archive(home, "daily", parser="json:at"))
    trim(home, 20)
    delete_events(home.context, home.amender("t", Why("asked", "me")), ["id-7"])
    erasing = erase.erase_from_archive

    def late(context: Context, archive: Archive, generation: int, offsets: Any) -> Any:
        if generation == 1:
            backfill(home)  # from files that still have the event
        return erasing(context, archive, generation, offsets)

    monkeypatch.setattr(erase, "erase_from_archive", late)
    purge(home.context, home.topic("t"), grace_ms=0)
    for generation in (1, 2):
        assert listed(home, home.archives.get("daily").info, generation)[7] == 0


def test_an_erasure_takes_the_live_generation_first(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a rollback fills another one from it, after that one was looked at."""
    home.append("t", [Event(payload(n), id=f"id-{n}") for n in range(20)])
    drive(home, an_archive(home, "daily", parser="json:at"))
    backfill(home)
    promoted = promote(home.context, "daily")
    home.append("t", [Event(payload(20), id="id-20")])
    drive(home, promoted)
    trim(home, 21)
    delete_events(home.context, home.amender("t", Why("asked", "me")), ["id-20"])
    erasing = erase.erase_from_archive

    def rolled_back(context: Context, archive: Archive, generation: int, offsets: Any) -> Any:
        done = erasing(context, archive, generation, offsets)
        if generation == 1 and archive.generation == 2:
            rollback(context, "daily")
        return done

    monkeypatch.setattr(erase, "erase_from_archive", rolled_back)
    erase.erase_from_archives(home.context, home.topic("t"), {0: [20]})
    for generation in (1, 2):
        assert listed(home, promoted, generation)[20] == 0


def test_an_erasure_beside_a_drop_that_has_deleted_files_reports_no_damage(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drop deletes files before rows; the erasure finishes it."""
    home.append("t", [Event(payload(n), id=f"id-{n}") for n in range(20)])
    drive(home, an_archive(home, "daily", parser="json:at"))
    backfill(home)
    home.delete("t", ["id-7"], why="asked")
    holds = erase.PartitionRewriter._holds_some

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    def dropped(lane: Any, committed: Any, wanted: Any) -> bool:
        if lane._generation == 2 and 2 in home.archives.get("daily").info.formats:
            with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                patch.setattr(generations, "remove_work", die)
                drop_generation(home.context, "daily", 2)
        return holds(lane, committed, wanted)

    monkeypatch.setattr(erase.PartitionRewriter, "_holds_some", dropped)
    purge(home.context, home.topic("t"), grace_ms=0)
    archive = home.archives.get("daily").info
    assert list(archive.formats) == [1]
    assert 7 not in listed(home, archive, 1)
