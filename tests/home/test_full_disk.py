"""A full disk: nothing is lost, errors say so, and the commands that free space work."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.archive.test_archive import an_archive, drive
from tests.support.cli_run import Run, run_here
from tests.support.homes import a_catalog
from tests.support.mounts import small_disk
from tidelog import Event, Home
from tidelog.archive.delete import delete_archive
from tidelog.archive.generations import begin_backfill, drop_generation
from tidelog.catalog import sqlite as module
from tidelog.catalog.base import ABSENT, Catalog, Put
from tidelog.catalog.update import LostReplyError
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_segment
from tidelog.errors import TidelogError, UnavailableError, UnknownOutcomeError
from tidelog.home import World, create_home
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.log.producer.append import Appender
from tidelog.model import limits
from tidelog.settings import Settings

ROOM = 4 << 20
FRAME = 4_120  # bytes of a page in SQLite's log


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(limits, "RESERVE_BYTES", ROOM)
    with small_disk(tmp_path / "disk", 32) as folder:
        yield folder


def made(disk: Path) -> Home:
    settings = Settings(str(disk / "o"), str(disk / "c.sqlite"), lease_ttl_ms=1_000)
    return create_home(settings, world=World(environ={}))[0]


def reserve(disk: Path) -> int:
    return (disk / "c.sqlite-reserve").stat().st_size


def fill_up(disk: Path) -> None:
    """Take every byte that is left."""
    with contextlib.suppress(OSError), open(disk / "ballast", "ab", buffering=0) as file:
        for size in (65_536, 4_096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    assert os.statvfs(disk).f_bavail == 0


def events(home: Home, topic: str = "t") -> list[bytes]:
    return [each.value for each in home.read(topic, start=home.partitions(topic)[0].start)]


def prepared(disk: Path) -> None:
    with made(disk) as home:
        for topic in ("t", "u"):
            home.create_topic(topic, 1)
            for _ in range(20):
                home.append(topic, [Event(os.urandom(10_000))])
        archive = an_archive(home, "daily")
        drive(home, archive)
        built, generation = begin_backfill(home.context, "daily", archive.format_of())
        assert generation == 2
        assert built.building == 2
    assert reserve(disk) == ROOM
    fill_up(disk)


def test_append_to_a_full_disk_stores_nothing_and_says_so(disk: Path) -> None:
    prepared(disk)
    with made(disk) as home:
        before = events(home)
        with pytest.raises(UnavailableError, match="the disk is full"):
            home.append("t", [Event(os.urandom(100_000))])
        assert events(home) == before
        assert home.verify("t").errors == 0
        os.unlink(disk / "ballast")
        home.append("t", [Event(b"z")])
        assert events(home) == [*before, b"z"]
        home.sweep("0s")
        assert reserve(disk) == ROOM, "it is made whole when there is room"


def test_what_frees_space_works_on_a_full_disk(disk: Path) -> None:
    prepared(disk)
    with made(disk) as home:
        fill_up(disk)
        home.trim("t", ToOffsets({0: 15}), past_readers=True)
        fill_up(disk)
        home.sweep("0s")
        fill_up(disk)
        drop_generation(home.context, "daily", 2)
        fill_up(disk)
        home.delete_topic("u")
        fill_up(disk)
        delete_archive(home.context, "daily")
        assert len(events(home)) == 5
        assert [each.name for each in home.topics()] == ["t"]
        assert home.verify("t").errors == 0
    os.unlink(disk / "ballast")
    with made(disk) as home:
        home.sweep("0s")
        assert reserve(disk) == ROOM
        assert len(events(home)) == 5


def test_trim_of_any_number_of_runs_needs_a_part_of_the_reserve(disk: Path) -> None:
    runs = 1_250  # in each of four partitions
    with made(disk) as home:
        home.create_topic("many", 4)
        topic, context = home.topic("many"), home.context
        appender = Appender(context, topic, "~many")
        for _ in range(runs):
            parts = [(each, table_of([Event(b"x")], 0)) for each in range(4)]
            segment = encode_segment(parts, appender.known(range(4)))
            stored = appender.upload(segment)
            for piece in segment.pieces:
                appender.commit(stored, piece)
    assert reserve(disk) == ROOM
    fill_up(disk)
    with made(disk) as home:
        fill_up(disk)
        done = home.trim("many", ToOffsets(dict.fromkeys(range(4), runs)))
        assert sum(each.runs for each in done) == 4 * runs
        assert reserve(disk) >= ROOM // 2
        fill_up(disk)
        assert home.sweep("0s").objects_deleted == runs
        assert os.statvfs(disk).f_bavail > 0


def test_commands_end_with_one_line_on_a_full_disk(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    prepared(disk)
    run: Run = run_here(monkeypatch, capfdbinary, disk)
    with made(disk) as home:
        config = home.config
    fill_up(disk)
    failed = run("--home", config, "produce", "t", stdin=os.urandom(60_000).hex().encode() + b"\n")
    assert failed.code == 1
    assert "the disk is full" in failed.err
    assert len(failed.err.strip().splitlines()) == 1
    done = run("--home", config, "trim", "t", "--offset", "0:15", "--past-readers")
    assert done.code == 0, done.err


def use_up_inodes(disk: Path) -> None:
    for number in range(10_000):
        try:
            (disk / f"file-{number}").touch(exist_ok=False)
        except OSError:
            break
    assert os.statvfs(disk).f_favail == 0


def test_sweep_needs_no_space_on_the_disk_of_the_store(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8, inodes=60) as folder:
        settings = Settings(str(folder / "o"), str(tmp_path / "c.sqlite"))
        with create_home(settings, world=World(environ={}))[0] as home:
            home.create_topic("t", 1)
            home.append("t", [Event(b"first")])
            home.append("t", [Event(b"second")])
            use_up_inodes(folder)
            with pytest.raises(UnavailableError, match="the disk is full"):
                home.append("t", [Event(b"more")])
            home.trim("t", ToOffsets({0: 2}))
            assert home.sweep(grace="0s").objects_deleted == 2
            assert events(home) == []


def test_catalog_on_a_disk_without_inodes_names_the_cause(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 16, inodes=60) as folder:
        made(folder).close()
        use_up_inodes(folder)
        with pytest.raises(UnavailableError, match="no inodes left"):
            made(folder)
        (folder / "file-0").unlink()
        (folder / "file-1").unlink()
        made(folder).close()


def test_opening_uses_a_slice_of_the_reserve_alone(disk: Path) -> None:
    prepared(disk)
    with made(disk) as home:
        assert len(events(home)) == 20
    assert ROOM - reserve(disk) <= 65_536
    with open(disk / "c.sqlite-reserve", "wb"):
        pass
    fill_up(disk)
    with pytest.raises(UnavailableError, match="the disk is full, nothing was written: free"):
        made(disk)


def test_write_that_the_log_holds_but_not_its_index_has_an_unknown_outcome(tmp_path: Path) -> None:
    """SQLite's index has no space for the commit frame, which the log has: a crash brings it."""
    with small_disk(tmp_path / "disk", 64) as disk:
        catalog = a_catalog(f"sqlite://{disk}/c.sqlite", create=True)
        other = sqlite3.connect(disk / "c.sqlite", isolation_level=None)
        other.execute("BEGIN")  # a reader, so that the log is not begun again
        other.execute("SELECT count(*) FROM rows").fetchall()
        log, number = disk / "c.sqlite-wal", 0
        while log.stat().st_size < 4_000 * FRAME:  # a page of the index has 4,062
            catalog.write("where", Put("large", bytes(200_000)), write_id=f"large-{number}")
            number += 1
        number = write_until_it_fails(disk, catalog)
        for name in ("c.sqlite", "c.sqlite-wal"):  # as after a crash: the index is lost
            shutil.copy(disk / name, tmp_path / name)
        other.close()
        catalog.close()
    crashed = a_catalog(f"sqlite://{tmp_path}/c.sqlite")
    found = crashed.get("where", "small")
    assert found is not None
    assert found.version == f"small-{number}"
    crashed.close()


def write_until_it_fails(disk: Path, catalog: Catalog) -> int:
    """Leaves space for some frames, but not for the next page of the index."""
    with open(disk / "ballast", "ab", buffering=0) as file:
        for number in range(100):
            leave_free(disk, file, 24_576)
            try:
                catalog.write("where", Put("small", b"value"), write_id=f"small-{number}")
            except UnknownOutcomeError:
                return number
    pytest.fail("the index had space for all")


def leave_free(disk: Path, file: IO[bytes], size: int) -> None:
    """Takes or frees space so that this much is left."""
    while os.statvfs(disk).f_bavail * 4_096 > size:
        file.write(bytes(4_096))
    while os.statvfs(disk).f_bavail * 4_096 < size:
        file.truncate(os.fstat(file.fileno()).st_size - 4_096)


def test_write_that_frees_space_is_sent_again_after_an_unknown_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made(tmp_path) as home:
        real, fails = module._write_once, [True]

        def full(*given: object) -> None:
            real(*given)  # type: ignore[arg-type]
            if fails:
                fails.pop()
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorname = "SQLITE_IOERR_SHMSIZE"
                raise LostReplyError(str(error)) from error

        monkeypatch.setattr(module, "_write_once", full)
        put = Put("row", b"value", ABSENT)
        with home.catalog.freeing():  # type: ignore[attr-defined]
            home.catalog.write("where", put, write_id="mine")
        assert not fails
        row = home.catalog.get("where", "row")
        assert row is not None
        assert row.version == "mine"


def test_write_that_frees_space_uses_the_reserve_without_a_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with a full disk that is injected, where mounting is not permitted."""
    with made(tmp_path) as home:
        real, fails = module._write_once, [True]

        def full(*given: object) -> None:
            if fails:
                fails.pop()
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorname = "SQLITE_FULL"
                raise error
            real(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(module, "_write_once", full)
        put = Put("row", b"value", ABSENT)
        with pytest.raises(TidelogError, match="the disk is full"):
            home.catalog.write("where", put, write_id=home.context.ids.new())
        fails += [True, True]  # the first time, SQLite's log is emptied
        before = reserve(tmp_path)
        with home.catalog.freeing():  # type: ignore[attr-defined]
            home.catalog.write("where", put, write_id=home.context.ids.new())
            assert reserve(tmp_path) < before
        assert reserve(tmp_path) == before
