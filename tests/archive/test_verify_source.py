"""Verifying against a source that cannot be reached, or not for everything, is never clean."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.archive_look import a_home, an_archive, drive
from tidelog.archive.status import read_status
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions, ArchiveVerifyReport
from tidelog.home import Home
from tidelog.model.archive import Archive


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path / "home") as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "in"
    found.mkdir()
    for name in ("a.log", "b.log"):
        (found / name).write_text("one\ntwo\n")
    return found


@pytest.fixture
def archive(home: Home, folder: Path) -> Archive:
    found = an_archive(home, "in", f"file:{folder}")
    assert drive(home, found) == 4
    return found


def verified(home: Home, archive: Archive) -> ArchiveVerifyReport:
    return verify_archive(home.context, archive, ArchiveVerifyOptions(source=True, deep=True))


def test_source_that_cannot_be_asked_is_a_problem(
    home: Home, archive: Archive, folder: Path
) -> None:
    assert verified(home, archive).problems == []
    shutil.rmtree(folder)
    found = verified(home, archive)
    [problem] = found.problems
    assert problem.kind == "source"
    assert "cannot be reached" in problem.what
    assert found.files == 2  # all else was verified


def test_source_partition_that_cannot_be_asked_is_a_problem(
    home: Home, archive: Archive, folder: Path
) -> None:
    os.truncate(folder / "a.log", 4)
    [problem] = verified(home, archive).problems
    assert problem.where == "in/a.log"
    assert "has shrunk to 4 bytes" in problem.what


def test_deleted_source_partition_is_noted(home: Home, archive: Archive, folder: Path) -> None:
    (folder / "a.log").unlink()
    found = verified(home, archive)
    assert found.problems == []
    assert [note.where for note in found.notes] == ["in/a.log"]
    assert "no longer has it" in found.notes[0].what


def test_file_that_is_left_out_is_in_status_and_noted(
    home: Home, archive: Archive, folder: Path
) -> None:
    (folder / "a.log.1").write_text("one\n")
    assert drive(home, archive) == 0
    [(name, why)] = read_status(home.context, archive).left_out.items()
    assert name == "in/a.log.1"
    assert "is the beginning of `in/a.log`" in why
    assert [note.where for note in verified(home, archive).notes] == ["in/a.log.1"]
