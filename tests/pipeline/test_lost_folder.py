"""The folder of an archive outside is gone: nothing else fails, and the archive can be ended."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.pipeline.test_archive import fill
from tests.pipeline.test_fill import backfill, drive, home
from tests.pipeline.test_fill_deaths import deaths, dies
from tests.pipeline.test_roots import files, made
from tidelog import Event, Home
from tidelog.errors import FencedError, InvalidError, NotFoundError
from tidelog.model.archive import Archive, Making
from tidelog.pipeline.archive import create_archive, find_archive, list_archives, open_pipeline
from tidelog.pipeline.driver import Driver, Driving
from tidelog.pipeline.ending import delete_archive, delete_lost, end_archive
from tidelog.pipeline.erasure import carry_out
from tidelog.pipeline.generations import begin_backfill
from tidelog.pipeline.health import Limits, troubles
from tidelog.pipeline.proof import prove_erased
from tidelog.pipeline.roots import removed_archives
from tidelog.pipeline.status import read_status
from tidelog.pipeline.sweep import sweep_archives
from tidelog.pipeline.workers import LocalWorkers

__all__ = ["home"]


def lake_of(home: Home, folder: Path) -> Path:
    home.append("t", [Event(b'{"at": 1794700800}', id="gone")])
    fill(home, 20)
    drive(home, made(home, "one", f"file:{folder}/lake/one"))
    return folder / "lake"


def made_from(home: Home, name: str, source: str) -> Archive:
    return Archive(
        name=name,
        incarnation=home.log.ids.new(),
        source=source,
        kind="partition",
        store=home.store.url,
        root=f"archives/{name}",
        created_ms=0,
        makings={1: Making(parser="json:at")},
    )


def is_erased(home: Home) -> bool:
    home.delete("t", ids=["gone"], why="test")
    carry_out(home, home.topic("t"), grace_ms=0)
    return prove_erased(home, home.topic("t"), ids=["gone"]).is_erased


def test_deleted_archive_whose_folder_is_gone_is_done(home: Home, tmp_path: Path) -> None:
    lake = lake_of(home, tmp_path)
    delete_archive(home, "one")
    shutil.rmtree(lake)
    sweep_archives(home, grace_ms=0)
    assert is_erased(home)
    sweep_archives(home, grace_ms=0)


@pytest.mark.parametrize("end", [end_archive, delete_archive])
def test_archive_whose_folder_is_lost_is_not_ended_half(
    home: Home, tmp_path: Path, end: object
) -> None:
    shutil.rmtree(lake_of(home, tmp_path))
    with pytest.raises(InvalidError, match="`tidelog archive delete one --lost-files`"):
        end(home, "one")  # type: ignore[operator]
    found = find_archive(home, "one")
    assert found.ended is None
    (line,) = troubles(read_status(home, found), Limits())
    assert "its `one/_owner` is not there" in line
    assert "`tidelog archive delete one --lost-files`" in line


def test_archive_whose_files_are_lost_can_be_deleted(home: Home, tmp_path: Path) -> None:
    lake = lake_of(home, tmp_path)
    pipeline = open_pipeline(home, find_archive(home, "one"), LocalWorkers())
    with pytest.raises(InvalidError, match=r"still holds `one/.*without --lost-files"):
        delete_lost(home, "one")
    shutil.copytree(lake / "one", tmp_path / "copy")
    (lake / "one/_owner").unlink()
    with pytest.raises(InvalidError, match=r"put `one/_owner` back with .* move that folder away"):
        delete_lost(home, "one")
    shutil.rmtree(lake)
    copy = create_archive(home, made_from(home, "copy", "archive:one"))
    with pytest.raises(InvalidError, match=r"`tidelog archive delete copy --delete-files`$"):
        delete_lost(home, "one")
    delete_archive(home, copy.name)
    delete_lost(home, "one")
    assert list(list_archives(home)) == []
    with pytest.raises(NotFoundError):
        delete_lost(home, "one")
    fill(home, 5, first=20)
    with pytest.raises(FencedError):
        Driver(home.log, pipeline, Driving(take_over=True)).run()
    sweep_archives(home, grace_ms=0)
    assert is_erased(home)
    home.delete_topic("t")
    shutil.copytree(tmp_path / "copy", lake / "one")  # the disk comes back
    sweep_archives(home, grace_ms=0)
    assert files(lake) == {lake / "one/_owner"}


@pytest.mark.parametrize("call", deaths(60))
def test_delete_as_lost_that_dies_after_any_call_is_finished_by_a_sweep(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    shutil.rmtree(lake_of(home, tmp_path))
    dies(home, monkeypatch, call, lambda: delete_lost(home, "one"))
    found = [each for each in list_archives(home) if each.name == "one"]
    if found and found[0].ended is None:
        delete_lost(home, "one")
    sweep_archives(home, grace_ms=0)
    assert list(list_archives(home)) == []
    assert [each.name for each in removed_archives(home)] == ["one"]


def test_removal_whose_folder_is_lost_on_the_way_is_finished_as_lost(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lake_of(home, tmp_path)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tidelog.pipeline.ending._remove_files", die)
        with pytest.raises(KeyboardInterrupt):
            delete_archive(home, "one")
    shutil.rmtree(lake)
    with pytest.raises(InvalidError, match="--lost-files"):
        sweep_archives(home, grace_ms=0)
    delete_lost(home, "one")
    sweep_archives(home, grace_ms=0)
    assert list(list_archives(home)) == []


def test_archive_in_the_home_is_not_deleted_as_lost(home: Home) -> None:
    made(home, "one", f"{home.store.url}/archives/one")
    with pytest.raises(InvalidError, match="in the home: delete it with --delete-files"):
        delete_lost(home, "one")


def test_backfill_from_an_archive_that_was_made_from_it_is_refused(home: Home) -> None:
    """Neither of the two could be deleted before the other."""
    fill(home, 20)
    daily = made(home, "daily", f"{home.store.url}/archives/daily")
    drive(home, daily)
    above = "daily"
    for name in ("weekly", "monthly"):
        wanted = made_from(home, name, f"archive:{above}")
        drive(home, create_archive(home, wanted))
        above = name
        with pytest.raises(InvalidError, match=f"archive:{name}` was itself made from it, by arch"):
            begin_backfill(home, "daily", Making(parser="json:at", source=f"archive:{name}"))
    backfill(home, "monthly", Making(parser="json:at", source="archive:daily"))
    for name in ("monthly", "weekly", "daily"):
        delete_archive(home, name)
