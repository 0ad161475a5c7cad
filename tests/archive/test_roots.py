"""Folders of archives: none contains another, and each is deleted from by its own names only."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.archive.test_archive import fill
from tests.archive.test_fill import drive, home
from tidelog import Event, Home
from tidelog.archive import archive as creating
from tidelog.archive.archive import create_archive, place_of_root
from tidelog.archive.dead_letters import dead_letters
from tidelog.archive.delete import delete_archive
from tidelog.coordination.pipeline_rows import list_archives
from tidelog.errors import InvalidError
from tidelog.home import World, create_home
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.settings import Settings

__all__ = ["home"]


def made(home: Home, name: str, url: str) -> Archive:
    store, _, root = url.rpartition("/")
    wanted = Archive(
        name=name,
        incarnation=home.context.ids.new(),
        source="topic:t",
        kind="partition",
        store=store,
        root=root,
        created_ms=0,
        formats={1: ArchiveFormat(parser="json:at")},
        dead_share_max=1.0,
    )
    return create_archive(home.context, wanted)


def files(folder: Path) -> set[Path]:
    return {each for each in folder.rglob("*") if each.is_file() and ".tidelog" not in each.parts}


def test_folder_of_a_deleted_archive_is_not_used_again(home: Home, tmp_path: Path) -> None:
    fill(home, 20)
    lake = tmp_path / "lake"
    drive(home, made(home, "one", f"file:{lake}/one"))
    delete_archive(home.context, "one")
    shutil.rmtree(lake)  # as an operator may clean up
    for folder in ("one", "one/below"):
        with pytest.raises(InvalidError, match=r"archive `one`, which was deleted.*choose another"):
            made(home, "one", f"file:{lake}/{folder}")
    assert list(list_archives(home.context)) == []
    drive(home, made(home, "one", f"file:{lake}/other"))
    there = files(lake)
    sweep_archives(home.context, grace_ms=0)
    assert files(lake) == there


def test_sweep_deletes_only_late_copies_of_a_deleted_archive(home: Home, tmp_path: Path) -> None:
    fill(home, 20)
    drive(home, made(home, "one", f"file:{tmp_path}/lake/one"))
    root = tmp_path / "lake/one"
    (root / "notes.txt").write_text("before the delete")
    delete_archive(home.context, "one")
    kept = [root / "notes.txt", root / "g1/notes.txt", root / "sub/1_0_0.parquet"]
    late = [root / "g1/t/1_0_0.parquet", root / "g1/t/_1_0_0.jsonl.meta.parquet"]
    late += [root / "g1/t/_SUCCESS", root / "_aside/m/g1/t/1_0_0.parquet"]
    for each in (*kept, *late):
        each.parent.mkdir(parents=True, exist_ok=True)
        each.write_text("x")
    sweep_archives(home.context, grace_ms=0)
    assert files(root) == {*kept, root / "_owner"}


@pytest.mark.parametrize("mark", [None, "another's"])
def test_sweep_leaves_a_folder_that_has_not_the_mark_of_the_deleted_archive(
    home: Home, tmp_path: Path, mark: str | None
) -> None:
    fill(home, 20)
    drive(home, made(home, "one", f"file:{tmp_path}/lake/one"))
    delete_archive(home.context, "one")
    root = tmp_path / "lake/one"
    shutil.rmtree(root)
    file = root / "g1/t/1_0_0.parquet"
    file.parent.mkdir(parents=True)
    file.write_text("of another home")
    if mark is not None:
        (root / "_owner").write_text(mark)
    sweep_archives(home.context, grace_ms=0)
    assert file.exists()


@pytest.mark.parametrize("second", ["c/d", "c", "c/g1/t", ""])
def test_archives_are_not_made_in_one_another(home: Home, tmp_path: Path, second: str) -> None:
    lake = tmp_path / "lake/in"
    made(home, "c", f"file://{lake}/c")
    (tmp_path / "link").symlink_to(tmp_path / "lake")
    for place in (f"file:{lake}", f"file://{lake}", f"file:{tmp_path}/link/in"):
        with pytest.raises(InvalidError, match=r"folder `c` of archive `c`: choose another folder"):
            made(home, "d", f"{place}/{second}".rstrip("/"))
    with create_home(
        Settings(str(tmp_path / "o2"), str(tmp_path / "c2.sqlite")), world=World(environ={})
    )[0] as other:
        other.create_topic("t", 1)
        with pytest.raises(InvalidError, match="choose another folder"):
            made(other, "d", f"file:{lake}/{second}".rstrip("/"))


def test_of_two_creates_at_once_in_one_another_one_is_refused(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check and the new name are one write of the registry."""
    taken = creating._refuse_used_folder

    def beside(where: Home, archive: Archive) -> None:
        taken(where, archive)
        if archive.name == "c":
            made(home, "d", f"file:{tmp_path}/lake/c/d")

    monkeypatch.setattr(creating, "_refuse_used_folder", beside)
    with pytest.raises(InvalidError, match="contains folder `d` of archive `d`"):
        made(home, "c", f"file:{tmp_path}/lake/c")
    assert [each.name for each in list_archives(home.context)] == ["d"]


@pytest.mark.parametrize("slashes", ["file:", "file://"])
def test_folder_in_the_home_is_recognised_however_it_is_written(
    home: Home, tmp_path: Path, slashes: str
) -> None:
    found = made(home, "mine", f"{slashes}{tmp_path}/o/archives/mine")
    assert (found.store, found.root, found.home) == (home.store.url, "archives/mine", "")
    for reserved in ("dead", "staging", "topics/x"):
        with pytest.raises(InvalidError, match="this home keeps other objects: leave --to out"):
            made(home, "bad", f"{slashes}{tmp_path}/o/{reserved}")


def test_dead_letters_of_two_homes_in_one_lake_are_apart(home: Home, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    home.append("t", [Event(b"rubbish of A")])
    drive(home, made(home, "daily", f"file:{lake}/A"))
    where = Settings(str(tmp_path / "o2"), str(tmp_path / "c2.sqlite"))
    with create_home(where, world=World(environ={}))[0] as other:
        other.create_topic("t", 1)
        other.append("t", [Event(b"rubbish of B")])
        archive = made(other, "daily", f"file:{lake}/B")
        drive(other, archive)
        delete_archive(home.context, "daily")
        sweep_archives(home.context, grace_ms=0)
        letters = [
            each for batch in dead_letters(other.context, archive) for each in batch["value"]
        ]
        assert [each.as_py() for each in letters] == [b"rubbish of B"]
    assert len(files(lake / "dead")) == 1


def test_places_are_the_same_however_they_are_written() -> None:
    assert place_of_root("s3://b/x", "y/z") == place_of_root("s3://b/x/", "/y/z")
    assert place_of_root("s3://b/x/y", "z") == place_of_root("s3://b", "x/y/z")
    assert place_of_root("file:/x", "y") == place_of_root("file:///x/y")
    assert place_of_root("s3://b/x", "y") != place_of_root("gs://b/x", "y")
