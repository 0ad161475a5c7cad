"""A backfill of an archive of files that were rotated: each line is in the new generation once."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.archive_look import a_home, an_archive, drive
from tidelog import Home
from tidelog.archive.archive import open_pipeline
from tidelog.archive.generations import begin_backfill, promote
from tidelog.archive.read import ReadRequest, archived_rows
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.coordination.pipeline_rows import read_partitions
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.tasks import LocalWorkers


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path / "home") as made:
        yield made


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in" / "app.log"


def write(context: Path, name: str, count: int) -> list[str]:
    lines = [f"{name} {n}" for n in range(count)]
    with context.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    return lines


def rename(context: Path) -> None:
    context.rename(context.with_name("app.log.1"))


def copy_and_truncate(context: Path) -> None:
    shutil.copy(context, context.with_name("app.log.1"))
    os.truncate(context, 0)


def compress(context: Path) -> None:
    context.with_name("app.log.1.gz").write_bytes(gzip.compress(context.read_bytes()))
    context.unlink()


def delete(context: Path) -> None:
    context.unlink()


def backfill(home: Home) -> Archive:
    built, generation = begin_backfill(home.context, "daily", ArchiveFormat(format="avro"))
    Driver(
        home.context,
        open_pipeline(home.context, built, LocalWorkers(2), generation),
        DriverOptions(),
    ).run()
    return promote(home.context, "daily")


def archived(home: Home, archive: Archive) -> list[str]:
    """All lines of the live generation, sorted."""
    found: list[str] = []
    for batch in archived_rows(home.context, archive, ReadRequest()):
        found += [value.decode() for value in batch.column("value").to_pylist()]
    return sorted(found)


@pytest.mark.parametrize("rotate", [rename, copy_and_truncate, compress, delete])
@pytest.mark.parametrize("header", [True, False])
def test_backfill_after_a_rotation_has_each_line_once(
    home: Home, context: Path, rotate: Callable[[Path], None], header: bool
) -> None:
    """Files that begin with the same line are different files too."""
    first = ["time;value"] if header else []
    context.write_text("".join(f"{line}\n" for line in first))
    lines = [*first, *write(context, "old", 5)]
    archive = an_archive(home, source=f"file:{context.parent}")
    drive(home, archive)
    rotate(context)
    context.write_text("".join(f"{line}\n" for line in first))
    lines += [*first, *write(context, "new", 8)]
    drive(home, archive)
    assert archived(home, archive) == sorted(lines)
    promoted = backfill(home)
    assert archived(home, promoted) == sorted(lines)
    one, two = archive.pipeline(1), promoted.pipeline(2)
    assert read_partitions(home.context, one) == read_partitions(home.context, two)
    lines += write(context, "late", 3)
    drive(home, promoted)
    rename(context) if rotate is delete else context.rename(context.with_name("app.log.2"))
    lines += write(context, "last", 2)
    drive(home, home.archives.get("daily").info)
    assert archived(home, promoted) == sorted(lines)
    assert verify_archive(home.context, promoted, ArchiveVerifyOptions(deep=True)).problems == []


def test_rotation_during_a_backfill_doubles_and_loses_nothing(home: Home, context: Path) -> None:
    lines = write(context, "old", 5)
    archive = an_archive(home, source=f"file:{context.parent}")
    drive(home, archive)
    built, generation = begin_backfill(home.context, "daily", ArchiveFormat(format="avro"))
    Driver(
        home.context,
        open_pipeline(home.context, built, LocalWorkers(2), generation),
        DriverOptions(),
    ).run()
    lines += write(context, "late", 2)
    rename(context)
    lines += write(context, "new", 8)
    Driver(
        home.context,
        open_pipeline(home.context, built, LocalWorkers(2), generation),
        DriverOptions(),
    ).run()
    drive(home, archive)
    promoted = promote(home.context, "daily")
    assert archived(home, promoted) == sorted(lines)
    drive(home, promoted)
    assert archived(home, promoted) == sorted(lines)
