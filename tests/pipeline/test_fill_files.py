"""A backfill of an archive of files that were rotated: each line is in the new generation once."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pipeline.looking import a_home, an_archive, drive
from tidelog import Home
from tidelog.log.archives import read_partitions
from tidelog.model.archive import Archive, Making
from tidelog.pipeline.archive import find_archive, open_pipeline
from tidelog.pipeline.contents import Wanted, archived_rows
from tidelog.pipeline.driver import Driver, Driving
from tidelog.pipeline.generations import begin_backfill, promote
from tidelog.pipeline.verify import Verifying, verify_archive
from tidelog.pipeline.workers import LocalWorkers


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path / "home") as made:
        yield made


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in" / "app.log"


def write(log: Path, name: str, count: int) -> list[str]:
    lines = [f"{name} {n}" for n in range(count)]
    with log.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    return lines


def rename(log: Path) -> None:
    log.rename(log.with_name("app.log.1"))


def copy_and_truncate(log: Path) -> None:
    shutil.copy(log, log.with_name("app.log.1"))
    os.truncate(log, 0)


def compress(log: Path) -> None:
    log.with_name("app.log.1.gz").write_bytes(gzip.compress(log.read_bytes()))
    log.unlink()


def delete(log: Path) -> None:
    log.unlink()


def backfill(home: Home) -> Archive:
    built, generation = begin_backfill(home, "daily", Making(format="avro"))
    Driver(home.log, open_pipeline(home, built, LocalWorkers(2), generation), Driving()).run()
    return promote(home, "daily")


def archived(home: Home, archive: Archive) -> list[str]:
    """All lines of the live generation, sorted."""
    found: list[str] = []
    for batch in archived_rows(home, archive, Wanted()):
        found += [value.decode() for value in batch.column("value").to_pylist()]
    return sorted(found)


@pytest.mark.parametrize("rotate", [rename, copy_and_truncate, compress, delete])
@pytest.mark.parametrize("header", [True, False])
def test_backfill_after_a_rotation_has_each_line_once(
    home: Home, log: Path, rotate: Callable[[Path], None], header: bool
) -> None:
    """Files that begin with the same line are different files too."""
    first = ["time;value"] if header else []
    log.write_text("".join(f"{line}\n" for line in first))
    lines = [*first, *write(log, "old", 5)]
    archive = an_archive(home, source=f"file:{log.parent}")
    drive(home, archive)
    rotate(log)
    log.write_text("".join(f"{line}\n" for line in first))
    lines += [*first, *write(log, "new", 8)]
    drive(home, archive)
    assert archived(home, archive) == sorted(lines)
    promoted = backfill(home)
    assert archived(home, promoted) == sorted(lines)
    one, two = archive.pipeline(1), promoted.pipeline(2)
    assert read_partitions(home.log, one) == read_partitions(home.log, two)
    lines += write(log, "late", 3)
    drive(home, promoted)
    rename(log) if rotate is delete else log.rename(log.with_name("app.log.2"))
    lines += write(log, "last", 2)
    drive(home, find_archive(home, "daily"))
    assert archived(home, promoted) == sorted(lines)
    assert verify_archive(home, promoted, Verifying(deep=True)).problems == []


def test_rotation_during_a_backfill_doubles_and_loses_nothing(home: Home, log: Path) -> None:
    lines = write(log, "old", 5)
    archive = an_archive(home, source=f"file:{log.parent}")
    drive(home, archive)
    built, generation = begin_backfill(home, "daily", Making(format="avro"))
    Driver(home.log, open_pipeline(home, built, LocalWorkers(2), generation), Driving()).run()
    lines += write(log, "late", 2)
    rename(log)
    lines += write(log, "new", 8)
    Driver(home.log, open_pipeline(home, built, LocalWorkers(2), generation), Driving()).run()
    drive(home, archive)
    promoted = promote(home, "daily")
    assert archived(home, promoted) == sorted(lines)
    drive(home, promoted)
    assert archived(home, promoted) == sorted(lines)
