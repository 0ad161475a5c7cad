"""A catalog that was restored from an older copy: what generations lack, have besides, and say."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidelog import ArchiveHandle, Event, Home
from tidelog.archive import dead_letters
from tidelog.errors import CorruptError, InvalidError
from tidelog.home import World, create_home, open_home
from tidelog.settings import Settings

FIRST_MS = 1_794_744_000_000


class Restorable:
    """A home whose catalog can be copied and put back. Use it in a ``with``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._catalog = folder / "c.sqlite"
        settings = Settings(str(folder / "o"), str(self._catalog), lease_ttl_ms=1_000)
        self.home: Home = create_home(settings, world=World(environ={}))[0]
        self._config = self.home.config

    def __enter__(self) -> Restorable:
        return self

    def __exit__(self, *_: object) -> None:
        self.home.close()

    def save(self) -> None:
        self.home.close()
        with sqlite3.connect(self._catalog) as one, sqlite3.connect(self._folder / "copy") as two:
            one.backup(two)
        one.close()
        two.close()
        shutil.copytree(self._folder / "o", self._folder / "objects", dirs_exist_ok=True)
        self.home = open_home(self._config)

    def restore(self) -> ArchiveHandle:
        self.home.close()
        for end in ("", "-wal", "-shm"):
            Path(f"{self._catalog}{end}").unlink(missing_ok=True)
        shutil.copy(self._folder / "copy", self._catalog)
        self.home = open_home(self._config)
        return self.day

    def put_missing_back(self) -> None:
        """Restores objects that are missing since the copy; those that differ stay."""
        copy = self._folder / "objects"
        for each in copy.rglob("*"):
            target = self._folder / "o" / each.relative_to(copy)
            if each.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(each, target)

    @property
    def day(self) -> ArchiveHandle:
        return self.home.archives.get("day")

    def append(self, start: int, end: int) -> None:
        values = [
            json.dumps({"at": FIRST_MS + each}).encode() if each % 4 else b"bad %d" % each
            for each in range(start, end)
        ]
        self.home.append("t", [Event(value) for value in values])

    def markers(self) -> list[str]:
        root = self._folder / "o" / self.day.info.folder()
        return sorted(str(each.parent.relative_to(root)) for each in root.rglob("_SUCCESS"))


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Restorable]:
    with Restorable(tmp_path) as made:
        made.home.create_topic("t")
        made.home.archives.create("day", source="topic:t", parser="json:at", dead_share=1.0)
        made.append(0, 12)
        made.day.run()
        yield made


def archived_ids(day: ArchiveHandle) -> list[str]:
    return sorted(each for batch in day.read() for each in batch.column("id").to_pylist() if each)


def forget_erasures(kept: Restorable, *groups: list[str]) -> ArchiveHandle:
    """The files of the archive lack events whose deletes the catalog has lost."""
    at = json.dumps({"at": FIRST_MS}).encode()
    kept.home.append("t", [Event(at, id=each) for each in "abcd"])
    kept.day.run()
    kept.save()
    for ids in groups:
        assert kept.home.erase("t", ids=ids, why="request").is_clean
    day = kept.restore()
    kept.put_missing_back()
    assert {each.kind for each in day.verify(deep=True).problems} == {"size"}
    return day


def test_delete_that_is_repeated_accepts_the_file_that_lacks_its_events(kept: Restorable) -> None:
    day = forget_erasures(kept, ["a"], ["b"])
    traces = kept.home.erase("t", ids=["a", "b"], why="request").traces
    assert {each.object.split("/")[0] for each in traces} <= {"topics"}  # until it is recovered
    assert archived_ids(day) == ["c", "d"]
    assert day.verify(deep=True, source=True).problems == []


def test_file_that_lacks_events_of_no_delete_is_not_accepted(kept: Restorable) -> None:
    day = forget_erasures(kept, ["a"], ["b"])
    with pytest.raises(CorruptError, match="restore it from a copy"):
        kept.home.erase("t", ids=["a"], why="request")
    assert {each.kind for each in day.verify(deep=True).problems} == {"size"}
    assert kept.home.erase("t", ids=["b"], why="request").is_clean  # now all are repeated
    assert archived_ids(day) == ["c", "d"]
    assert day.verify(deep=True, source=True).problems == []


def test_repeated_delete_removes_dead_letters_that_a_replay_replaced(
    kept: Restorable, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.home.append("t", [Event(b"bad", id=each) for each in "ab"])
    kept.day.run()
    with monkeypatch.context() as patch:
        patch.setattr(dead_letters, "remove_replaced", lambda *_: 0)  # it dies before that
        kept.day.replay(parser="timestamp")
    kept.save()
    assert kept.home.erase("t", ids=["a"], why="request").is_clean
    day = kept.restore()
    kept.put_missing_back()
    assert kept.home.erase("t", ids=["a"], why="request").is_clean
    assert archived_ids(day) == ["b"]
    assert day.verify(deep=True, source=True).problems == []


def test_delete_removes_dead_letters_that_a_replay_replaced_in_a_kept_generation(
    kept: Restorable, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.home.append("t", [Event(b"bad", id=each) for each in "ab"])
    kept.day.run()
    with monkeypatch.context() as patch:
        patch.setattr(dead_letters, "remove_replaced", lambda *_: 0)  # it dies before that
        kept.day.replay(parser="timestamp")
    kept.day.backfill(parser="timestamp")
    kept.day.promote()
    assert [*kept.home.store.list("dead/")]
    assert kept.home.erase("t", ids=["a"], why="request").is_clean
    assert not [*kept.home.store.list("dead/")]
    assert archived_ids(kept.day) == ["b"]


def forget_a_replay(kept: Restorable) -> ArchiveHandle:
    """Generation 1 is kept, and has lost dead letters to a replay that the catalog forgot."""
    kept.day.backfill(granularity="hour")
    kept.day.promote()
    kept.save()
    kept.day.rollback()
    assert kept.day.replay(parser="timestamp").replayed == 3
    return kept.restore()


def test_verify_checks_all_generations(kept: Restorable) -> None:
    day = forget_a_replay(kept)
    report = day.verify(deep=True)
    assert (report.generation, report.others) == (2, [1])
    assert [each.kind for each in report.problems] == ["missing"]
    assert report.problems[0].where.startswith("generation 1: dead/day/")
    assert (report.problem_count, report.is_clean) == (1, False)
    forgotten = [each for each in report.notes if each.kind == "forgotten"]
    assert [each.do for each in forgotten] == [
        "nothing: the next `tidelog archive dead day --replay` after a rollback to it sets it aside"
    ]
    assert day.verify(generation=2).problems == []
    assert day.verify(generation=2).others == []


def test_rollback_to_a_generation_without_its_files_is_refused(kept: Restorable) -> None:
    day = forget_a_replay(kept)
    with pytest.raises(InvalidError, match="generation 1 lacks files"):
        day.rollback()
    assert day.reload().generation == 2
    assert day.reload().in_state("kept") == [1]
    assert day.rollback(force=True).generation == 1
    with pytest.raises(InvalidError, match="the live one, lacks files"):
        day.drop(2)
    assert day.rollback().generation == 2
    day.drop(1)
    assert day.verify(deep=True).problems == []


def test_promote_of_a_generation_that_was_dropped_is_refused(kept: Restorable) -> None:
    kept.day.backfill(granularity="hour")
    kept.save()
    kept.day.drop(2)
    day = kept.restore()
    with pytest.raises(InvalidError, match="generation 2 lacks files"):
        day.promote()
    assert day.reload().generation == 1
    day.drop(2)
    assert day.verify(deep=True).problems == []


def test_verify_names_ranges_that_the_next_run_sets_aside(kept: Restorable) -> None:
    kept.save()
    kept.append(12, 20)
    kept.day.run()
    day = kept.restore()
    kept.append(12, 20)
    report = day.verify()
    assert report.problems == []
    forgotten = [each for each in report.notes if each.kind == "forgotten"]
    assert {each.do for each in forgotten} == {
        "nothing: the next `tidelog archive run day` sets it aside"
    }
    day.run()
    report = day.verify(deep=True, source=True)
    assert report.problems == []
    assert not [each for each in report.notes if each.kind == "forgotten"]


def test_markers_of_a_forgotten_generation_with_other_folders_are_deleted(kept: Restorable) -> None:
    kept.save()
    kept.day.backfill(granularity="hour")
    kept.day.promote()
    kept.day.finalize("0s")
    assert kept.markers() == ["t/dt=2026-11-15", "t/dt=2026-11-15/hr=12"]
    day = kept.restore()
    day.backfill(parser="first:json:at||timestamp")
    day.promote()
    day.finalize("0s")
    assert "t/dt=2026-11-15/hr=12" not in kept.markers()
    assert day.verify(deep=True).problems == []


def test_verify_names_a_marker_in_an_empty_folder(kept: Restorable, tmp_path: Path) -> None:
    folder = tmp_path / "o" / kept.day.info.folder() / "t" / "dt=2020-01-01"
    folder.mkdir(parents=True)
    (folder / "_SUCCESS").write_text("{}")
    (problem,) = kept.day.verify().problems
    assert (problem.kind, problem.do) == ("marker", "delete it")
