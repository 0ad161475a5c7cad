"""The folder of an archive outside is gone: nothing else fails, and the archive can be ended."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.archive.test_archive import fill
from tests.archive.test_fill import backfill, drive, home
from tests.archive.test_roots import files, made
from tests.faults.test_fill_deaths import deaths, dies
from tidelog import Event, Home
from tidelog.archive.archive import create_archive, open_pipeline, removed_archives
from tidelog.archive.delete import delete_archive, delete_lost, end_archive
from tidelog.archive.generations import begin_backfill
from tidelog.archive.status import Limits, read_status, troubles
from tidelog.coordination.pipeline_rows import list_archives
from tidelog.errors import FencedError, InvalidError, NotFoundError
from tidelog.maintenance.erase import purge
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.tasks import LocalWorkers

__all__ = ["home"]


def lake_of(home: Home, folder: Path) -> Path:
    home.append("t", [Event(b'{"at": 1794700800}', id="gone")])
    fill(home, 20)
    drive(home, made(home, "one", f"file:{folder}/lake/one"))
    return folder / "lake"


def made_from(home: Home, name: str, source: str) -> Archive:
    return Archive(
        name=name,
        incarnation=home.context.ids.new(),
        source=source,
        kind="partition",
        store=home.store.url,
        root=f"archives/{name}",
        created_ms=0,
        formats={1: ArchiveFormat(parser="json:at")},
    )


def is_erased(home: Home) -> bool:
    home.delete("t", ids=["gone"], why="test")
    purge(home.context, home.topic("t"), grace_ms=0)
    return home.prove_erased("t", ids=["gone"]).is_erased


def test_deleted_archive_whose_folder_is_gone_is_done(home: Home, tmp_path: Path) -> None:
    lake = lake_of(home, tmp_path)
    delete_archive(home.context, "one")
    shutil.rmtree(lake)
    sweep_archives(home.context, grace_ms=0)
    assert is_erased(home)
    sweep_archives(home.context, grace_ms=0)


@pytest.mark.parametrize("end", [end_archive, delete_archive])
def test_archive_whose_folder_is_lost_is_not_ended_half(
    home: Home, tmp_path: Path, end: object
) -> None:
    shutil.rmtree(lake_of(home, tmp_path))
    with pytest.raises(InvalidError, match="`tidelog archive delete one --lost-files`"):
        end(home.context, "one")  # type: ignore[operator]
    found = home.archives.get("one").info
    assert found.ended is None
    (line,) = troubles(read_status(home.context, found), Limits())
    assert "its `one/_owner` is not there" in line
    assert "`tidelog archive delete one --lost-files`" in line


def test_archive_whose_files_are_lost_can_be_deleted(home: Home, tmp_path: Path) -> None:
    lake = lake_of(home, tmp_path)
    pipeline = open_pipeline(home.context, home.archives.get("one").info, LocalWorkers())
    with pytest.raises(InvalidError, match=r"still holds `one/.*without --lost-files"):
        delete_lost(home.context, "one")
    shutil.copytree(lake / "one", tmp_path / "copy")
    (lake / "one/_owner").unlink()
    with pytest.raises(InvalidError, match=r"put `one/_owner` back with .* move that folder away"):
        delete_lost(home.context, "one")
    shutil.rmtree(lake)
    copy = create_archive(home.context, made_from(home, "copy", "archive:one"))
    with pytest.raises(InvalidError, match=r"`tidelog archive delete copy --delete-files`$"):
        delete_lost(home.context, "one")
    delete_archive(home.context, copy.name)
    delete_lost(home.context, "one")
    assert list(list_archives(home.context)) == []
    with pytest.raises(NotFoundError):
        delete_lost(home.context, "one")
    fill(home, 5, first=20)
    with pytest.raises(FencedError):
        Driver(home.context, pipeline, DriverOptions(take_over=True)).run()
    sweep_archives(home.context, grace_ms=0)
    assert is_erased(home)
    home.delete_topic("t")
    shutil.copytree(tmp_path / "copy", lake / "one")  # the disk comes back
    sweep_archives(home.context, grace_ms=0)
    assert files(lake) == {lake / "one/_owner"}


@pytest.mark.parametrize("call", deaths(60))
def test_delete_as_lost_that_dies_after_any_call_is_finished_by_a_sweep(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    shutil.rmtree(lake_of(home, tmp_path))
    dies(home, monkeypatch, call, lambda: delete_lost(home.context, "one"))
    found = [each for each in list_archives(home.context) if each.name == "one"]
    if found and found[0].ended is None:
        delete_lost(home.context, "one")
    sweep_archives(home.context, grace_ms=0)
    assert list(list_archives(home.context)) == []
    assert [each.name for each in removed_archives(home.context)] == ["one"]


def test_removal_whose_folder_is_lost_on_the_way_is_finished_as_lost(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lake_of(home, tmp_path)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tidelog.archive.delete._remove_files", die)
        with pytest.raises(KeyboardInterrupt):
            delete_archive(home.context, "one")
    shutil.rmtree(lake)
    with pytest.raises(InvalidError, match="--lost-files"):
        sweep_archives(home.context, grace_ms=0)
    delete_lost(home.context, "one")
    sweep_archives(home.context, grace_ms=0)
    assert list(list_archives(home.context)) == []


def test_archive_in_the_home_is_not_deleted_as_lost(home: Home) -> None:
    made(home, "one", f"{home.store.url}/archives/one")
    with pytest.raises(InvalidError, match="in the home: delete it with --delete-files"):
        delete_lost(home.context, "one")


def test_backfill_from_an_archive_that_was_made_from_it_is_refused(home: Home) -> None:
    """Neither of the two could be deleted before the other."""
    fill(home, 20)
    daily = made(home, "daily", f"{home.store.url}/archives/daily")
    drive(home, daily)
    above = "daily"
    for name in ("weekly", "monthly"):
        wanted = made_from(home, name, f"archive:{above}")
        drive(home, create_archive(home.context, wanted))
        above = name
        with pytest.raises(InvalidError, match=f"archive:{name}` was itself made from it, by arch"):
            begin_backfill(
                home.context, "daily", ArchiveFormat(parser="json:at", source=f"archive:{name}")
            )
    backfill(home, "monthly", ArchiveFormat(parser="json:at", source="archive:daily"))
    for name in ("monthly", "weekly", "daily"):
        delete_archive(home.context, name)
