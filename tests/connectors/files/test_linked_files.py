"""A file that has several names in its folder is read once; packed files are not lines."""

from __future__ import annotations

import lzma
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.archive_look import a_home
from tidelog import Home
from tidelog.api.archives import ArchiveHandle
from tidelog.errors import InvalidError


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    (tmp_path / "logs").mkdir()
    with a_home(tmp_path) as made:
        yield made


def add(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def archive_of(home: Home, folder: Path) -> ArchiveHandle:
    return home.archives.create("w", source=f"file:{folder}")


def archived(archive: ArchiveHandle) -> list[str]:
    batches = list(archive.read())
    return sorted(each.decode() for one in batches for each in one.column("value").to_pylist())


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_file_with_two_names_is_read_once(
    home: Home, tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    logs = tmp_path / "logs"
    add(logs / "app.INFO.1118", "a")
    link(logs / "app.INFO.1118", logs / "current")
    archive = archive_of(home, logs)
    assert archive.run().events == 1
    add(logs / "app.INFO.1118", "b")
    assert archive.run().events == 1
    assert list(archive.status().left_out.values()) == [
        "is another name of the file `logs/app.INFO.1118`, which is read"
    ]
    (logs / "current").unlink()
    add(logs / "app.INFO.1119", "c")
    link(logs / "app.INFO.1119", logs / "current")
    add(logs / "app.INFO.1118", "d")
    assert archive.run().events == 2
    assert archived(archive) == ["a", "b", "c", "d"]


def test_file_that_becomes_a_link_keeps_its_source_partition(home: Home, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    add(logs / "app.log", "a")
    archive = archive_of(home, logs)
    archive.run()
    (logs / "app.log").rename(logs / "old")
    (logs / "app.log").symlink_to("old")
    add(logs / "old", "b")
    assert archive.run().events == 1
    assert [each.partition for each in archive.status().partitions] == ["logs/app.log"]
    assert archived(archive) == ["a", "b"]


def test_folder_that_is_linked_is_read_once(home: Home, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    (logs / "web").mkdir()
    add(logs / "web" / "app.log", "a")
    (logs / "all").symlink_to("web")
    archive = archive_of(home, logs)
    archive.run()
    assert [each.partition for each in archive.status().partitions] == ["logs/web%2Fapp.log"]
    assert archived(archive) == ["a"]


def test_address_that_names_a_link_reads_it(home: Home, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    add(logs / "app.log.20261118", "a")
    (logs / "app.log").symlink_to("app.log.20261118")
    archive = archive_of(home, logs / "app.log")
    archive.run()
    (logs / "app.log").unlink()
    add(logs / "app.log.20261119", "c")
    (logs / "app.log").symlink_to("app.log.20261119")
    add(logs / "app.log.20261118", "b")
    archive.run()
    assert archived(archive) == ["a", "b", "c"]


def test_packed_file_is_an_error_of_its_own(home: Home, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    add(logs / "app.log", "a")
    (logs / "app.log.1.xz").write_bytes(lzma.compress(b"b\nc\n"))
    archive = archive_of(home, logs)
    with pytest.raises(InvalidError, match=r"app.log.1.xz`: is packed in a way that is not read"):
        archive.run()
    assert archived(archive) == ["a"]
