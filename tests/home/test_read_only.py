"""A home that cannot be written to is read, verified, listed and played; a write is one error."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.archive.test_archive import an_archive, drive, fill
from tests.support.all_times import ALL_TIMES
from tests.support.cli_run import run_here
from tests.support.mounts import read_only
from tidelog import Event, Home
from tidelog.archive.status import read_status
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.coordination.pipeline_rows import list_archives
from tidelog.errors import InvalidError, TidelogError
from tidelog.home import World, create_home, open_home
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.settings import Settings

NOBODY = 65_534


def made(folder: Path) -> Home:
    settings = Settings(str(folder / "o"), str(folder / "c.sqlite"), lease_ttl_ms=1_000)
    return create_home(settings, world=World(environ={}))[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    with made(folder) as home:
        home.create_topic("t", 1)
        fill(home, 50)
        drive(home, an_archive(home, "daily", parser="json:at"))
    assert sorted(each.name for each in folder.iterdir()) == ["c.sqlite", "c.sqlite-reserve", "o"]
    return folder


def opened(folder: Path) -> Home:
    text = f"tidelog:?store=file://{folder}/o&catalog=sqlite://{folder}/c.sqlite"
    return open_home(text, world=World(environ={}))


def check_reads(folder: Path) -> None:
    """Everything that reads works, and everything that writes is refused with one line."""
    with opened(folder) as home:
        assert len(list(home.read("t"))) == 50
        assert [each.name for each in home.topics()] == ["t"]
        assert home.verify("t").errors == 0
        assert home.inspect() == []
        assert len(list(home.playback("t", *ALL_TIMES))) == 50
        assert sum(each.num_rows for each in home.playback_arrow("t")) == 50
        archive = home.archives.get("daily").info
        assert verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True)).problems == []
        assert read_status(home.context, archive).lag == 0
        assert [each.name for each in list_archives(home.context)] == ["daily"]
        for write in (
            lambda: home.append("t", [Event(b"x")]),
            lambda: home.create_topic("new"),
            lambda: home.delete_topic("t"),
            lambda: home.sweep("0s"),
            lambda: home.trim("t", ToOffsets({0: 10}), past_readers=True),
            lambda: home.consumer("t", "c").poll(),
        ):
            with pytest.raises(TidelogError) as refused:
                write()
            assert isinstance(refused.value, InvalidError), refused.value
            assert "read-only" in str(refused.value) or "no permission" in str(refused.value)
            assert "\n" not in str(refused.value)
        assert len(list(home.read("t"))) == 50


def test_read_only_mount_is_read(folder: Path, tmp_path: Path) -> None:
    with read_only(folder, tmp_path / "there") as there:
        check_reads(there)
    assert sorted(each.name for each in folder.iterdir()) == ["c.sqlite", "c.sqlite-reserve", "o"]


def test_home_without_write_rights_is_read(folder: Path) -> None:
    as_reader(folder, lambda: check_reads(folder))


def test_home_that_others_write_to_is_read_from_a_read_only_mount(
    folder: Path, tmp_path: Path
) -> None:
    with read_only(folder, tmp_path / "there") as there:
        with opened(there) as reader:
            assert len(list(reader.read("t"))) == 50
            with made(folder) as writer:  # its log is there from now on
                fill(writer, 10, first=50)
                assert len(list(reader.read("t"))) == 60
            assert len(list(reader.read("t"))) == 60, "its log is gone again"
            with made(folder) as writer:
                fill(writer, 10, first=60)
            assert len(list(reader.read("t"))) == 70, "it came and went"
        with made(folder) as writer, opened(there) as reader:
            fill(writer, 10, first=70)
            assert len(list(reader.read("t"))) == 80


def test_log_that_cannot_be_read_is_not_passed_over(folder: Path, tmp_path: Path) -> None:
    """A copy of a home that was in use has its last writes in the log alone."""
    copy = tmp_path / "copy"
    with made(folder) as writer:
        fill(writer, 10, first=50)
        shutil.copytree(folder, copy)
    (copy / "c.sqlite-shm").unlink()
    refused = pytest.raises(InvalidError, match="copy the home to a place that can be written to")
    with read_only(copy, tmp_path / "there") as there, refused:
        opened(there)


def test_commands_read_a_read_only_home(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    run = run_here(monkeypatch, capfdbinary, tmp_path)
    with read_only(folder, tmp_path / "there") as there:
        home = f"tidelog:?store=file://{there}/o&catalog=sqlite://{there}/c.sqlite"
        for words in (
            ("topic", "list"),
            ("topic", "show", "t"),
            ("verify", "t"),
            ("archive", "list"),
            ("archive", "status", "daily"),
            ("archive", "verify", "daily"),
            ("archive", "cat", "daily"),
            ("archive", "manifest", "daily"),
            ("playback", "t", "--start", "2020-01-01", "--to", "stdout:"),
            ("home",),
        ):
            done = run("--home", home, *words)
            assert done.code == 0, (words, done.err)
        for words in (("trim", "t", "--offset", "0:10"), ("topic", "delete", "t", "--yes")):
            refused = run("--home", home, *words)
            assert refused.code == 2
            assert len(refused.err.strip().splitlines()) == 1
            assert "read-only" in refused.err


def as_reader(folder: Path, work: Callable[[], None]) -> None:
    """Do it without the right to write there; root has all rights, so in a child without them."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    above = [
        each for each in folder.parents if each.stat().st_uid == os.getuid() and each != Path("/")
    ]
    modes = {each: each.stat().st_mode for each in above}
    try:
        if os.geteuid() != 0:
            work()
            return
        for each in above:
            each.chmod(modes[each] | 0o055)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                work()
                code = 0
            except BaseException:  # noqa: BLE001 - a forked child reports, and ends here
                traceback.print_exc(file=sys.stderr)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        for each, mode in modes.items():
            each.chmod(mode)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
