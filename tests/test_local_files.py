"""Files and folders that root creates in a home belong to the owner of their folder."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidelog.local_files import create_file, create_folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_root_gives_away_what_it_creates_and_nothing_that_a_link_leads_to(tmp_path: Path) -> None:
    """The owner of a folder may have put a link there that leads to a file of root's."""
    folder, secret = tmp_path / "folder", tmp_path / "secret"
    folder.mkdir()
    secret.touch()
    os.chown(folder, 65534, 65534)
    (folder / "link").symlink_to(secret)
    (folder / "dangling").symlink_to(tmp_path / "missing")
    (folder / "linked").symlink_to(tmp_path)
    for name in ("new", "new", "link", "dangling"):
        os.close(create_file(folder / name, os.O_RDWR, folder))
    create_folder(folder / "made")
    create_folder(folder / "linked")
    mine = [path for path in (folder / "new", folder / "made") if path.stat().st_uid == 65534]
    assert len(mine) == 2
    kept = (secret, tmp_path / "missing", tmp_path)
    assert [path.stat().st_uid for path in kept] == [0, 0, 0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_what_root_creates_has_its_owner_before_others_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a second thread creates its files in the new folder for root."""
    os.chown(tmp_path, 65534, 65534)
    file, folder = tmp_path / "file", tmp_path / "folder"
    found: list[bool] = []

    def give(created: int, *owner: int) -> None:
        found.extend(path.exists() for path in (file, folder))
        fchown(created, *owner)

    fchown = os.fchown
    monkeypatch.setattr(os, "fchown", give)
    os.close(create_file(file, os.O_RDWR, tmp_path))
    file.unlink()
    create_folder(folder)
    assert found == [False] * 4
    assert {path.stat().st_uid for path in tmp_path.iterdir()} == {65534}
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_file_and_folder_that_appear_meanwhile_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(tmp_path, 65534, 65534)
    file = tmp_path / "file"

    def give(created: int, *owner: int) -> None:
        file.write_bytes(b"kept")

    monkeypatch.setattr(os, "fchown", give)
    os.close(create_file(file, os.O_RDWR, tmp_path))
    assert file.read_bytes() == b"kept"
    with ThreadPoolExecutor(8) as pool:  # a folder that replaced another would lose the files in it
        for number in range(50):
            folder = tmp_path / str(number)
            list(pool.map(create_folder_and_file, [folder] * 8, range(8)))
            assert len(list(folder.iterdir())) == 8
    assert len(list(tmp_path.iterdir())) == 51


def create_folder_and_file(folder: Path, number: int) -> None:
    create_folder(folder)
    (folder / str(number)).touch()


def test_file_that_exists_is_opened_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"kept")
    os.close(create_file(path, os.O_RDWR, tmp_path))
    assert path.read_bytes() == b"kept"
