"""The folder of an archive that the home knows is refused as a source of files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.archive_look import a_home, an_archive, drive, fill
from tidelog import Home
from tidelog.errors import InvalidError
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.tasks import LocalWorkers


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        made.create_topic("again", 1)
        fill(made, range(20))
        yield made


@pytest.mark.parametrize("folder", ["", "/g1", "/g1/t"])
def test_folder_of_a_known_archive_is_no_source_of_files(home: Home, folder: str) -> None:
    daily = an_archive(home)
    drive(home, daily)
    path = home.store.url.removeprefix("file://")
    source = f"file:{path}/{daily.root}{folder}"
    with pytest.raises(InvalidError, match=r"folder of archive `daily`.*give archive:daily"):
        an_archive(home, "copy", source)
    with pytest.raises(InvalidError, match=r"folder of archive `daily`.*give archive:daily"):
        open_pump(home.context, PumpOptions(source, "again"), LocalWorkers())
    assert drive(home, an_archive(home, "copy", "archive:daily")) == 20


def test_copy_of_an_archive_s_folder_is_a_source_of_files(home: Home, tmp_path: Path) -> None:
    daily = an_archive(home)
    drive(home, daily)
    path = Path(home.store.url.removeprefix("file://")) / daily.folder()
    path.rename(tmp_path / "copied")
    assert drive(home, an_archive(home, "copy", f"file:{tmp_path}/copied")) == 20
