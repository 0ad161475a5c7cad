"""``archive verify`` names every object that a restored catalog needs and the store lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.pipeline.test_forgotten_ranges import cycle
from tests.support.archive_look import AT, AT_OR_WHEN, a_home, an_archive, fill
from tidelog import Home
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions, Problem, check_decided
from tidelog.catalog.base import Put
from tidelog.coordination.commits import load_manifest, read_commits
from tidelog.coordination.pipeline_rows import read_intent
from tidelog.erasure.rewrite import PartitionRewriter, erase_from_archives
from tidelog.model.archive import Archive
from tidelog.model.pipeline import FileEntry
from tidelog.pipeline.cycle import Cycle
from tidelog.testing.scheduler import Crash


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        fill(made, range(10))
        yield made


def problems(home: Home, archive: Archive) -> list[Problem]:
    return verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True)).problems


def test_missing_manifest_beside_missing_dead_letters_is_named(home: Home) -> None:
    archive = an_archive(home, parser=AT)
    cycle(home, archive, 1)
    fill(home, range(10, 20))
    cycle(home, archive, 2)
    first, second = read_commits(home.context, archive.pipeline(), "t/0")
    letters = [each.key for each in home.store.list(f"{archive.dead}/")]
    files = load_manifest(home.store, second.manifest).files
    home.store.delete([first.manifest, *letters])
    texts = " ".join(map(repr, problems(home, archive)))
    assert first.manifest in texts
    assert all(file.target in texts for file in files if file.kind == "dead")


def a_decided_range(home: Home) -> tuple[Archive, tuple[FileEntry, ...]]:
    """An archive whose driver died after it had decided a range, and the range's files."""

    def die(*_: object) -> int:
        raise Crash

    archive = an_archive(home, parser=AT_OR_WHEN)
    with pytest.MonkeyPatch.context() as patch, suppress(Crash):
        patch.setattr(Cycle, "_publish", die)
        cycle(home, archive, 1)
    intent = read_intent(home.context, archive.pipeline(), "t/0")
    assert intent is not None
    return archive, load_manifest(home.store, intent.manifest).files


def test_decided_range_with_staged_files_is_healthy(home: Home) -> None:
    archive, files = a_decided_range(home)
    assert problems(home, archive) == []
    home.store.copy(files[0].staged, files[0].target)
    home.store.delete([files[0].staged])
    assert problems(home, archive) == []


def test_missing_staged_file_of_a_decided_range_is_named(home: Home) -> None:
    archive, files = a_decided_range(home)
    data = home.store.get(files[0].staged)
    home.store.delete([files[0].staged])
    (found,) = problems(home, archive)
    assert (found.kind, found.where) == ("missing", files[0].staged)
    home.store.put(files[0].staged, data)
    assert cycle(home, archive, 2).errors == {}
    assert problems(home, archive) == []


def test_file_in_the_place_of_a_decided_one_is_named(home: Home) -> None:
    archive, files = a_decided_range(home)
    home.store.put(files[0].target, b"other")
    (found,) = problems(home, archive)
    assert (found.kind, found.where) == ("decided", files[0].target)
    assert list(check_decided(home.store, files, lambda: False)) == []  # it was committed meanwhile
    home.store.delete([files[0].target])  # a person moves it out
    assert cycle(home, archive, 2).errors == {}
    assert problems(home, archive) == []


def test_missing_manifest_of_a_rewrite_is_named_with_its_files(home: Home) -> None:
    """The catalog was copied when an erasure had replaced a file, and not committed it yet."""
    archive = an_archive(home, parser=AT_OR_WHEN)
    cycle(home, archive, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartitionRewriter, "_count_row", _die)
        with pytest.raises(Crash):
            erase_from_archives(home.context, home.topic("t"), {0: {1}})
    assert problems(home, archive) == []
    (committed,) = read_commits(home.context, archive.pipeline(), "t/0")
    data = home.store.get(committed.rewrite)
    home.store.delete([committed.rewrite])
    (found,) = problems(home, archive)
    assert found.kind == "size"
    assert committed.rewrite in found.do
    home.store.put(committed.rewrite, data)
    erase_from_archives(home.context, home.topic("t"), {0: {1}})
    assert problems(home, archive) == []


def _die(*_: object) -> list[Put]:
    raise Crash
